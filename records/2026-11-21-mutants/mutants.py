"""Does a test fail where the program is wrong? Applies one mutant after another to a copy of the tree and runs tests.

    python records/2026-11-21-mutants/mutants.py                 # all of them
    python records/2026-11-21-mutants/mutants.py milestone mask  # those with one of these words in their names

A mutant is one small mistake in the code. For each, the tests that should notice it are run, up to the first that
fails. In the end those that have failed are run on the tree as it is, where all of them must pass.
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
JOBS = 3  # mutants at a time, each in a copy of its own


@dataclass
class Mutant:
    name: str
    path: str  # of the file, from the root
    before: str  # is in the file exactly once
    after: str
    tests: str  # arguments of pytest


MUTANTS = [
    # what the log says
    Mutant(
        "HellaSwag of the trainer is rank 0's share only",
        "train_gpt2.py",
        "totals = world.all_reduce_sum(torch.tensor(counts, device=world.device))",
        "totals = torch.tensor(counts, device=world.device)",
        "tests/test_train.py -k hellaswags_score",
    ),
    Mutant(
        "hella is acc, not acc_norm",
        "plumbing/runs.py",
        "accuracy = counts.acc_norm / counts.n",
        "accuracy = counts.acc / counts.n",
        "tests/test_train.py -k hellaswags_score",
    ),
    Mutant(
        "tok/s counts sequences, not tokens",
        "train_gpt2.py",
        "norm, num_windows * T, time.perf_counter()",
        "norm, num_windows, time.perf_counter()",
        "tests/test_train.py -k tok_per_s",
    ),
    Mutant(
        "the notebook's memory estimate is ten times too high",
        "play.ipynb",
        r"\"blocks\": tokens * kept",
        r"\"blocks\": 10 * tokens * kept",
        "tests/test_notebook.py -k memory",
    ),
    Mutant(
        "time left can be negative",
        "plumbing/runs.py",
        "return seconds * (self.max_steps - step - 1)",
        "return seconds * (self.max_steps - step - 2)",
        "tests/test_console.py",
    ),
    Mutant(
        "a resumed run's log keeps the step it repeats",
        "plumbing/runs.py",
        "int(match[1]) < before]",
        "int(match[1]) <= before]",
        "tests/test_resume.py -k killed_at_any_moment",
    ),
    # the data
    Mutant(
        "every epoch has the first one's order",
        "train_gpt2.py",
        "np.random.SeedSequence([self.seed, int(epoch)])",
        "np.random.SeedSequence([self.seed, 0])",
        "tests/test_data.py -k epoch",
    ),
    Mutant(
        "the mask is inverted",
        "train_gpt2.py",
        "y.masked_fill(mask[0][:, 1:] == 0, IGNORE_INDEX)",
        "y.masked_fill(mask[0][:, 1:] != 0, IGNORE_INDEX)",
        "tests/test_data.py -k mask",
    ),
    Mutant(
        "the mask is that of the input, not of the target",
        "train_gpt2.py",
        "y.masked_fill(mask[0][:, 1:] == 0, IGNORE_INDEX)",
        "y.masked_fill(mask[0][:, :-1] == 0, IGNORE_INDEX)",
        "tests/test_data.py -k mask",
    ),
    Mutant(
        "a fingerprint is made of sizes only",
        "plumbing/shards.py",
        "digest.update(file.read(SAMPLE_BLOCK))",
        "file.read(SAMPLE_BLOCK)",
        "tests/test_shards.py -k fingerprint",
    ),
    Mutant(
        "a shard that is one token too short is whole",
        "plumbing/shards.py",
        "if num_bytes < expected or",
        "if num_bytes < expected - dtype.itemsize or",
        "tests/test_data.py tests/test_shards.py -k damaged",
    ),
    Mutant(
        "the user's words are targets, too",
        "smoltalk.py",
        '[int(message["role"] == "assistant")] * len(body)',
        '[int(message["role"] != "system")] * len(body)',
        "tests/test_smoltalk.py",
    ),
    Mutant(
        "a part of the validation split stays in the training split",
        "fineweb.py",
        "                    num_yielded = i + 1\n",
        "                    num_yielded = i\n",
        "tests/test_fineweb.py -k every_kind_of_input",
    ),
    # the update
    Mutant(
        "validation is a mean over windows, not over targets",
        "train_gpt2.py",
        "return loss / targets",
        "return loss / num_windows",
        "tests/test_train.py -k validation",
    ),
    Mutant(
        "weight decay on biases and norms",
        "train_gpt2.py",
        'if p.dim() < 2], "weight_decay": 0.0,',
        'if p.dim() < 2], "weight_decay": config.weight_decay,',
        "tests/test_model.py -k weight_decay",
    ),
    Mutant(
        "a step's loss is not weighted by its targets",
        "train_gpt2.py",
        "loss = loss * ((y != IGNORE_INDEX).sum() * world.size / num_targets)",
        "loss = loss / grad_accum_steps",
        "tests/test_train.py -k equals_a_plain_loop",
    ),
    Mutant(
        "gradients are reduced in every micro-step",
        "train_gpt2.py",
        "with contextlib.nullcontext() if last else world.no_sync(model):",
        "with contextlib.nullcontext():",
        "tests/test_train.py -k two_processes_equal_a_plain",
    ),
    Mutant(
        "the gradient is clipped to 1, whatever the flag",
        "train_gpt2.py",
        "config.grad_clip or math.inf)",
        "1.0)",
        "tests/test_train.py tests/test_branch.py -k 'clip or takes_effect'",
    ),
    Mutant(
        "the decay of wsd starts a step late",
        "train_gpt2.py",
        "(config.max_steps - step) / decay_steps)",
        "(config.max_steps - step + 1) / decay_steps)",
        "tests/test_schedule.py",
    ),
    Mutant(
        "B does not divide the step",
        "train_gpt2.py",
        "return max(d for d in range(1, min(number, at_most) + 1) if number % d == 0)",
        "return min(number, at_most)",
        "tests/test_schedule.py -k divisor",
    ),
    Mutant(
        "a loss that is not finite is trained on",
        "train_gpt2.py",
        "if not math.isfinite(loss) or not (math.isfinite(norm) or overflow):",
        "if not (math.isfinite(norm) or overflow or not math.isfinite(loss)):",
        "tests/test_train.py -k nan",
    ),
    # checkpoints, and what continues from them
    Mutant(
        "the check of a checkpoint leaves out its scaler",
        "plumbing/checkpoint.py",
        'if not template["scaler"] or not saved["scaler"]:',
        "if True:",
        "tests/test_attacks.py -k another_structure",
    ),
    Mutant(
        "the check of a checkpoint leaves out the optimizer's structure",
        "plumbing/checkpoint.py",
        "    problem = describe_difference(content, template)\n    if not problem:\n        tensors = {",
        '    template["optimizer"] = content["optimizer"]\n    problem = describe_difference(content, template)\n'
        "    if not problem:\n        tensors = {",
        "tests/test_attacks.py -k another_structure",
    ),
    Mutant(
        "the random state is not restored",
        "train_gpt2.py",
        '    torch.set_rng_state(saved["rng"])\n',
        "",
        "tests/test_branch.py -k without_changes",
    ),
    Mutant(
        "the optimizer's state is not restored",
        "train_gpt2.py",
        'optimizer.load_state_dict({"state": state["state"],',
        'optimizer.load_state_dict({"state": {},',
        "tests/test_resume.py -k killed_at_any_moment",
    ),
    Mutant(
        "a checkpoint is written in place",
        "plumbing/files.py",
        'part = path.with_name(path.name + ".part")',
        "part = path",
        "tests/test_resume.py -k 'killed_at_any_moment and half'",
    ),
    Mutant(
        "a checkpoint is written while training changes it",
        "plumbing/checkpoint.py",
        'return state.detach().to("cpu", copy=True)',
        'return state.detach().to("cpu")',
        "tests/test_resume.py -k checkpoint_is_of_its_step",
    ),
    Mutant(
        "the folder's lock is shared",
        "plumbing/files.py",
        "fcntl.LOCK_EX | fcntl.LOCK_NB",
        "fcntl.LOCK_SH | fcntl.LOCK_NB",
        "tests/test_files.py -k belongs",
    ),
    Mutant(
        "a run does not lock its folder",
        "plumbing/runs.py",
        "lock = lock_folder(out_dir)",
        'lock = open(os.devnull)',
        "tests/test_attacks.py -k belongs_to_one",
    ),
    Mutant(
        "a branch's log lacks its parent's lines",
        "plumbing/runs.py",
        'lines = intact_log_lines(Path(parent) / "log.txt" if parent else path, step)',
        "lines = intact_log_lines(path, step)",
        "tests/test_branch.py -k 'branch_of_a_branch or bit_for_bit'",
    ),
    Mutant(
        "keep-best takes a later loss that is the same",
        "plumbing/runs.py",
        "self.config.keep_best and loss < self.best_val_loss",
        "self.config.keep_best and loss <= self.best_val_loss",
        "tests/test_branch.py -k best",
    ),
    Mutant(
        "milestones are off by one",
        "plumbing/checkpoint.py",
        "step_of(path) % milestone_every == 0",
        "(step_of(path) + 1) % milestone_every == 0",
        "tests/test_branch.py -k milestone",
    ),
    Mutant(
        "a different run's folder is continued",
        "plumbing/runs.py",
        "different = {name: pair for name, pair in different.items() if name not in MAY_CHANGE_ON_RESUME}\n"
        "    if different:",
        "different = {}\n    if different:",
        "tests/test_resume.py -k different_run",
    ),
    # processes and signals
    Mutant(
        "SIGHUP is not handled",
        "plumbing/runs.py",
        'for name in ("SIGTERM", "SIGINT", "SIGHUP"):',
        'for name in ("SIGTERM", "SIGINT"):',
        "tests/test_attacks.py -k closed_terminal",
    ),
    Mutant(
        "a refusal leaves with status 1",
        "plumbing/cli.py",
        'print(f"error: {message}", file=sys.stderr, flush=True)\n    sys.exit(2)',
        'print(f"error: {message}", file=sys.stderr, flush=True)\n    sys.exit(1)',
        "tests/test_bad_input.py -k real_script",
    ),
    Mutant(
        "a signal to one rank stops that rank only",
        "train_gpt2.py",
        "return loss, norm, signalled > 0 or",
        "return loss, norm, len(signals) > 0 or",
        "tests/test_resume.py -k signal_to_one_rank",
    ),
    Mutant(
        "ranks that differ are not noticed",
        "plumbing/distributed.py",
        "if value != expected:",
        "if False:",
        "tests/test_attacks.py -k ranks_that_differ",
    ),
    # other programs
    Mutant(
        "an export of a chat model ends only at the end of a text",
        "plumbing/huggingface.py",
        'ends.append(enc.encode_single_token("<|end|>"))',
        "pass",
        "tests/test_huggingface.py -k end_of_a_turn",
    ),
    Mutant(
        "an export keeps the vocabulary's padding",
        "plumbing/huggingface.py",
        'weights["transformer.wte.weight"][: enc.n_vocab]',
        'weights["transformer.wte.weight"]',
        "tests/test_model.py -k export",
    ),
    Mutant(
        "padding ids can be sampled",
        "train_gpt2.py",
        "logits = self.lm_head(x[:, -1])[:, :vocab_size].float()",
        "logits = self.lm_head(x[:, -1]).float()",
        "tests/test_model.py -k padding",
    ),
    Mutant(
        "top-p keeps one id too few",
        "train_gpt2.py",
        "ordered.where(before < top_p, 0)",
        "ordered.where(before + ordered < top_p, 0)",
        "tests/test_sample.py -k top",
    ),
    Mutant(
        "HellaSwag's endings see one another",
        "hellaswag.py",
        "((query == key) | (key == 0))",
        "((query >= key) | (key == 0))",
        "tests/test_hellaswag.py -k hides",
    ),
    Mutant(
        "an n-gram across two shards is not searched",
        "contamination.py",
        "tokens = np.concatenate([tokens, follower.read(0, NGRAM - 1)])",
        "pass",
        "tests/test_contamination.py",
    ),
    Mutant(
        "an L40 is taken for an L4",
        "plumbing/peaks.py",
        'return PEAK_FLOPS.get(re.sub(r"^((NVIDIA|Tesla|GeForce) )+", "", device_name))',
        'name = re.sub(r"^((NVIDIA|Tesla|GeForce) )+", "", device_name)\n'
        "    return next((peak for known, peak in PEAK_FLOPS.items() if name.startswith(known)), None)",
        "tests/test_peaks.py",
    ),
    Mutant(
        "a resumed run is a new one at Weights & Biases",
        "plumbing/mirror.py",
        "    if not path.exists():\n        folder.mkdir(exist_ok=True)",
        "    if True:\n        folder.mkdir(exist_ok=True)",
        "tests/test_mirror.py -k resumed",
    ),
    # what one is told, and what is taken without a flag
    Mutant(
        "MFU is measured by the peak of one GPU",
        "plumbing/runs.py",
        "self.peak = peak * world.size if peak else None",
        "self.peak = peak",
        "tests/test_console.py",
    ),
    Mutant(
        "run.txt's command of two nodes starts one",
        "plumbing/runs.py",
        'nodes = "--standalone" if local_ranks == ranks else',
        'nodes = "--standalone" if True else',
        "tests/test_console.py -k run_txt",
    ),
    Mutant(
        "without a flag, gradients are not clipped",
        "train_gpt2.py",
        "grad_clip: float = 1.0",
        "grad_clip: float = 0.0",
        "tests/test_schedule.py",
    ),
    Mutant(
        "without a flag, Adam's second average is that of torch",
        "train_gpt2.py",
        "beta2: float = 0.95",
        "beta2: float = 0.999",
        "tests/test_model.py -k weight_decay",
    ),
    Mutant(
        "Muon's momentum is not warmed up",
        "train_gpt2.py",
        "* min(1.0, step / 300)",
        "* min(1.0, step + 1)",
        "tests/test_schedule.py",
    ),
    Mutant(
        "samples draw from training's random state",
        "train_gpt2.py",
        "top_k=50, generator=generator))",
        "top_k=50))",
        "tests/test_train.py -k evaluation_leaves",
    ),
    Mutant(
        "an id that is one too high is taken",
        "plumbing/shards.py",
        "if largest >= n_vocab:",
        "if largest > n_vocab:",
        "tests/test_data.py -k beyond_the_vocabulary",
    ),
    Mutant(
        "a conversation is cut before the last answer that just fits",
        "smoltalk.py",
        "for i in range(max_length) if",
        "for i in range(max_length - 1) if",
        "tests/test_smoltalk.py",
    ),
    Mutant(
        "the last update is not evaluated",
        "train_gpt2.py",
        "(step % every == 0 or step == max_steps)",
        "step % every == 0",
        "tests/test_schedule.py -k due",
    ),
]


def copy_tree(place):
    """A copy of what git tracks, with the shared data beside it, if there are any."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, listed.split("\0")):
        target = place / "tree" / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, target)
    if (ROOT.parent / "shared").exists():
        (place / "shared").symlink_to((ROOT.parent / "shared").resolve())
    return place / "tree"


def run_tests(tree, *tests):
    """(exit status of pytest, the tests that failed, seconds)."""
    start = time.perf_counter()
    pytest = [sys.executable, "-m", "pytest", "-q", "-rfE", "-p", "no:cacheprovider", *tests]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(pytest, cwd=tree, env=environment, capture_output=True, text=True, timeout=900)
    failed = re.findall(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", done.stdout, re.MULTILINE)
    return done.returncode, failed, time.perf_counter() - start


def check(mutant, tree):
    """Before anything is run: the mutant can be applied."""
    found = (tree / mutant.path).read_text(encoding="utf-8").count(mutant.before)
    assert found == 1, f"{mutant.name}: {found} places in {mutant.path}"


def apply(mutant, tree):
    """Write the mutant's file into the tree."""
    path = tree / mutant.path
    text = path.read_text(encoding="utf-8")
    path.write_text(text.replace(mutant.before, mutant.after), encoding="utf-8")


def try_mutant(mutant):
    """The first test that fails under the mutant, or None."""
    with tempfile.TemporaryDirectory() as place:
        tree = copy_tree(Path(place))
        apply(mutant, tree)
        status, failed, seconds = run_tests(tree, "-x", *shlex.split(mutant.tests))
    killer = failed[0] if status == 1 and failed else None
    print(f"{mutant.name} | {killer or 'SURVIVED'} | {seconds:.0f} s", flush=True)
    return killer


def main(words):
    chosen = [mutant for mutant in MUTANTS if not words or any(word in mutant.name for word in words)]
    for mutant in chosen:
        check(mutant, ROOT)
    with ThreadPoolExecutor(JOBS) as executor:
        killers = list(executor.map(try_mutant, chosen))
    with tempfile.TemporaryDirectory() as place:
        names = dict.fromkeys(filter(None, killers))
        status, failed, seconds = run_tests(copy_tree(Path(place)), *names)
    print(f"without a mutant: {len(names)} tests, {len(failed)} fail {failed or ''} | {seconds:.0f} s")
    print(f"{len(chosen)} mutants, {killers.count(None)} survived")
    return status != 0 or None in killers


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
