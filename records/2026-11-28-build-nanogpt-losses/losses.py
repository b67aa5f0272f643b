"""build-nanogpt's own train_gpt2.py and this one: the same weights, the same shards, file order. The same losses?

    OMP_NUM_THREADS=1 python records/2026-11-28-build-nanogpt-losses/losses.py BUILD_NANOGPT HELLASWAG PARQUET...

BUILD_NANOGPT is a clone of https://github.com/karpathy/build-nanogpt, HELLASWAG a file of examples, PARQUET files with
a column `text`. The clone is copied, and the copy's lines are changed as EDITS says (changes.diff). The logs and the
predictions are written to this folder.
"""

import difflib
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
ROOT = FOLDER.parents[1]
EXAMPLES = 500
SHARD = 200 * 512 + 1  # tokens: of such a shard, his loader leaves nothing out
# {a line's part: what takes its place}
EDITS = {
    "total_batch_size = 524288 #": "total_batch_size = 512 #",
    "B = 64 #": "B = 4 #",
    "T = 1024 #": "T = 64 #",
    "GPTConfig(vocab_size=50304)": "GPTConfig(vocab_size=50304, n_layer=4, n_head=4, n_embd=64)",
    "warmup_steps = 715": "warmup_steps = 50",
    "max_steps = 19073 #": "max_steps = 500 #",
    "if (step % 250 == 0 or last_step) and": "if last_step and",  # HellaSwag takes longer than 100 steps
    # two lines that only write down: the first weights, as its later checkpoints, and the predictions
    "os.makedirs(log_dir, exist_ok=True)": "os.makedirs(log_dir, exist_ok=True); torch.save({'model': "
    "raw_model.state_dict(), 'config': raw_model.config, 'step': 0, 'val_loss': 0.0}, 'log/first.pt')",
    "num_total += 1": "num_total += 1; print('prediction', pred_norm)",
}
FLOAT32 = {"dtype=torch.bfloat16)": "dtype=torch.bfloat16, enabled=False)"}
OURS = (
    "--no-shuffle --device cpu --no-compile --batch-size 4 --sequence-length 64 --total-batch-size 512 "
    "--warmup-steps 50 --max-steps 500 --val-every 250 --val-tokens 5120 --hellaswag-every 0 --sample-every 0 "
    "--checkpoint-every 250 --keep-checkpoints 9 --milestone-every 499"
).split()
LAST = "model_00499.pt"  # he evaluates before the last update
# or glibc would give the memory of the logits back, and take it anew, in each step
MALLOC = dict(MALLOC_MMAP_THRESHOLD_="1000000000", MALLOC_TRIM_THRESHOLD_="4000000000")


def edit(path, edits, count=1):
    text = path.read_text()
    for before, after in edits.items():
        assert text.count(before) == count, before
        text = text.replace(before, after)
    path.write_text(text)


def call(arguments, folder, **options):
    return subprocess.run([sys.executable, *map(str, arguments)], cwd=folder, check=True, **options)


def copy_of(clone, folder, dtype):
    """His program in a folder of its own, smaller, with the first examples of HellaSwag."""
    shutil.copytree(clone, folder, ignore=shutil.ignore_patterns(".git"))
    source = folder / "train_gpt2.py"
    published = source.read_text().splitlines()
    edit(source, EDITS)
    if dtype == "float32":
        edit(source, FLOAT32, count=4)
        changed = source.read_text().splitlines()
        changes = difflib.unified_diff(published, changed, "published", "run", n=0, lineterm="")
        (FOLDER / "changes.diff").write_text("\n".join(changes) + "\n")
    return folder


def make_shards(clone, parquet, work):
    """His shards, made by his fineweb.py from these files instead of the Hub's, and ours: one for each split."""
    source = shutil.copy(clone / "fineweb.py", work)
    files = {'"HuggingFaceFW/fineweb-edu", name=remote_name': f'"parquet", data_files={parquet!r}'}
    edit(Path(source), {**files, "int(1e8)": str(SHARD)})
    call(["fineweb.py"], work)
    call([ROOT / "fineweb.py", "--input", *parquet, "--out-dir", "ours"], work)
    return {"his": work / "edu_fineweb10B", "ours": work / "ours"}


def train_his(name, clone, shards, *, dtype, examples):
    """Returns the weights that it began with, and its predictions at the last step, a digit for each example."""
    folder = copy_of(clone, shards.parent / f"his-{name}", dtype)
    (folder / "edu_fineweb10B").symlink_to(shards)
    (folder / "hellaswag").mkdir()
    (folder / "hellaswag/hellaswag_val.jsonl").write_text(examples)
    said = call(["train_gpt2.py"], folder, stdout=subprocess.PIPE, text=True).stdout
    shutil.copy(folder / "log/log.txt", FOLDER / f"build-nanogpt-{name}.txt")
    return folder / "log/first.pt", "".join(re.findall(r"^prediction (\d)", said, re.MULTILINE))


def start_ours(out, first, shards, dtype):
    words = ["--init-from", first, "--data", shards, "--dtype", dtype, *OURS, "--out-dir", out]
    command = [sys.executable, "train_gpt2.py", *map(str, words)]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL)


def keep_log(out, name):
    lines = (out / "log.txt").read_text().splitlines(keepends=True)
    kept = [line for line in lines if line.split()[1] in ("train", "val")]
    (FOLDER / f"ours-{name}.txt").write_text("".join(kept))


def predict(model, folder):
    """Our hellaswag.py's predictions."""
    path = folder / f"{model.parent.name}.jsonl"
    words = ["-m", model, "-d", "cpu", "--data", folder / "hellaswag_val.jsonl", "--predictions", path]
    call([ROOT / "hellaswag.py", *words], folder)
    return "".join(str(json.loads(line)["pred_norm"]) for line in path.open())


def train_ours(name, first, shards, dtype):
    out = shards.parent / f"ours-{name}"
    assert start_ours(out, first, shards, dtype).wait() == 0
    keep_log(out, name)
    return out / LAST


def kill_ours(first, shards):
    """Killed where its log has 380 steps, which its checkpoint of step 250 has not seen; the same command again."""
    out = shards.parent / "ours-killed"
    process = start_ours(out, first, shards, "float32")
    while not (out / "log.txt").exists() or "\n380 train" not in (out / "log.txt").read_text():
        time.sleep(0.05)
    process.kill()
    process.wait()
    assert start_ours(out, first, shards, "float32").wait() == 0
    keep_log(out, "killed")


def main(clone, hellaswag, *parquet):
    clone, parquet = Path(clone).resolve(), [*map(os.path.abspath, parquet)]
    with open(hellaswag, encoding="utf-8") as file:
        examples = "".join(itertools.islice(file, EXAMPLES))
    predictions = {}
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        os.environ.update(HF_HOME=str(work / "cache"), CUDA_VISIBLE_DEVICES="", **MALLOC)
        (work / "hellaswag_val.jsonl").write_text(examples)
        shards = make_shards(clone, parquet, work)
        for dtype, whose in (("float32", "his"), ("float32", "ours"), ("bfloat16", "his")):
            name = f"{dtype}-{whose}-shards"
            first, his = train_his(name, clone, shards[whose], dtype=dtype, examples=examples)
            model = train_ours(name, first, shards[whose], dtype)
            predictions[name] = {"build-nanogpt": his, "ours": predict(model, work)}
            print(f"{name} is done", flush=True)
            if name == "float32-his-shards":
                kill_ours(first, shards[whose])
    (FOLDER / "predictions.json").write_text(json.dumps(predictions, indent=1) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
