"""Optimizers, numbers and objects that people add to the training: each is resumed, branched and logged as it is."""

import signal

import pytest
import torch
import train_gpt2
from plumbing.run import checks
from plumbing.run.checkpoint import load_checkpoint

from edits import ADAMW, CONFIGURE, GELU, changed_trainer, in_changed, train_changed
from harness import (
    KILLED,
    assert_same_tensors,
    error_in,
    killed_at,
    log_lines,
    losses,
    needs,
    read_log,
    run,
    signalled,
    tiny_flags,
    tiny_model,
    train,
)

pytestmark = pytest.mark.gpt2

# AdamW whose weights go halfway back to slow ones every fourth step: the slow weights and the count are its own
LOOKAHEAD = """

class Lookahead(torch.optim.AdamW):
    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.count, self.slow = 0, [p.detach().clone() for group in self.param_groups for p in group["params"]]

    def step(self):
        super().step()
        self.count += 1
        if self.count % 4 == 0:
            with torch.no_grad():
                for slow, p in zip(self.slow, [p for group in self.param_groups for p in group["params"]]):
                    p.copy_(slow.lerp_(p, 0.5))

    def state_dict(self):
        return super().state_dict() | {"count": self.count, "slow": self.slow}

    def load_state_dict(self, state):
        super().load_state_dict(state)
        self.count, self.slow = state["count"], state["slow"]
"""
# an optimizer of no torch class, which keeps another one's state inside of its own
INSIDE = """

class Inside:
    def __init__(self, inner):
        self.inner, self.param_groups, self.pulls = inner, inner.param_groups, torch.zeros(())

    def step(self):
        self.pulls += 1
        for group in self.param_groups:
            for p in group["params"]:
                p.grad *= 1 + 1 / self.pulls
        self.inner.step()

    def zero_grad(self, set_to_none=True):
        self.inner.zero_grad(set_to_none)

    def state_dict(self):
        return {"inner": self.inner.state_dict(), "pulls": self.pulls}

    def load_state_dict(self, state):
        self.inner.load_state_dict(state["inner"])
        self.pulls = state["pulls"].clone()
        self.param_groups = self.inner.param_groups
"""
# a factor on the rate that grows with the steps, kept in the groups, as Prodigy's d and schedule-free's weights are
GROWING = """

class Growing(torch.optim.AdamW):
    def step(self):
        for group in self.param_groups:
            group["d"] *= 1.1
            group["k"] += 1
            group["sums"] += group["d"]
            group["lr"] *= group["d"] * (1 + 1 / group["k"]) * float(group["sums"])
        super().step()
"""
MADE = "    betas = (config"
OPTIMIZERS = {
    "Lookahead": {CONFIGURE: LOOKAHEAD + CONFIGURE, ADAMW: ADAMW.replace("torch.optim.AdamW", "Lookahead")},
    "Inside": {CONFIGURE: INSIDE + CONFIGURE, ADAMW: f"Inside({ADAMW})"},
    "Growing": {
        CONFIGURE: GROWING + CONFIGURE,
        ADAMW: ADAMW.replace("torch.optim.AdamW", "Growing"),
        MADE: "    for group in groups:\n        group |= dict(d=1.0, k=0, sums=torch.zeros(()))\n" + MADE,
    },
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_run_that_is_stopped_gives_its_optimizer_all_that_it_saved(name, data, tmp_path):
    path = changed_trainer(tmp_path / "train_gpt2.py", OPTIMIZERS[name])
    run(train_changed, path, tiny_flags(data, tmp_path / "whole"))
    args = tiny_flags(data, tmp_path / "stopped")
    run(in_changed, path, signalled, 5, "SIGTERM", 1, 0, args)
    run(train_changed, path, args)
    assert log_lines(tmp_path / "stopped") == log_lines(tmp_path / "whole")


CONSTANT = dict(schedule="wsd", decay_fraction=0, warmup_steps=0)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_branch_keeps_what_an_optimizer_has_counted_where_only_its_length_differs(name, data, tmp_path):
    path = changed_trainer(tmp_path / "train_gpt2.py", OPTIMIZERS[name])
    run(train_changed, path, tiny_flags(data, tmp_path / "long", max_steps=14, **CONSTANT))
    run(train_changed, path, tiny_flags(data, tmp_path / "short", max_steps=12, **CONSTANT))
    branch = dict(branch_from=tmp_path / "short" / "model_00008.pt", max_steps=14)
    run(train_changed, path, tiny_flags(data, tmp_path / "branch", **CONSTANT | branch))
    assert log_lines(tmp_path / "branch") == log_lines(tmp_path / "long")


def test_a_branch_keeps_a_count_beside_a_setting_that_it_changes(data, tmp_path):
    path = changed_trainer(tmp_path / "train_gpt2.py", OPTIMIZERS["Growing"])
    run(train_changed, path, tiny_flags(data, tmp_path / "parent", **CONSTANT))
    branch = dict(branch_from=tmp_path / "parent" / "model_00008.pt", weight_decay=0.3, beta1=0.5)
    run(train_changed, path, tiny_flags(data, tmp_path / "branch", **CONSTANT | branch))
    group = load_checkpoint(tmp_path / "branch" / "model_00012.pt")["optimizer"][0]["param_groups"][0]
    assert (group["k"], group["weight_decay"], group["betas"]) == (12, 0.3, (0.5, 0.95))


def test_a_branch_changes_the_rate_of_an_optimizer_that_keeps_another_one_inside(data, tmp_path):
    path = changed_trainer(tmp_path / "train_gpt2.py", OPTIMIZERS["Inside"])
    run(train_changed, path, tiny_flags(data, tmp_path / "parent", **CONSTANT))
    branch = dict(branch_from=tmp_path / "parent" / "model_00008.pt", weight_decay=0.3, max_lr=1e-4)
    run(train_changed, path, tiny_flags(data, tmp_path / "branch", **CONSTANT | branch))
    group = load_checkpoint(tmp_path / "branch" / "model_00012.pt")["optimizer"][0]["inner"]["param_groups"][0]
    assert (group["lr"], group["initial_lr"], group["weight_decay"]) == (pytest.approx(1e-4), 1e-4, 0.3)


COUNTS = {  # in the groups, and changed by each step
    "a number of NumPy's": ("np.int64(0)", "group['k'] + 1"),
    "nan": ("float('nan')", "1.0 if group['k'] != group['k'] else group['k'] + 1"),
    "tensors in a list": ("[torch.zeros(2), torch.zeros(3)]", "[each + 1 for each in group['k']]"),
}


@pytest.mark.parametrize("name", COUNTS)
def test_a_count_of_any_kind_continues_where_a_run_does(name, data, tmp_path):
    first, following = COUNTS[name]
    counting = f"""

class Counting(torch.optim.AdamW):
    def step(self):
        for group in self.param_groups:
            group["k"] = {following}
        super().step()
"""
    edits = {
        CONFIGURE: counting + CONFIGURE,
        ADAMW: ADAMW.replace("torch.optim.AdamW", "Counting"),
        MADE: f"    for group in groups:\n        group['k'] = {first}\n" + MADE,
    }
    path = changed_trainer(tmp_path / "train_gpt2.py", edits)
    run(train_changed, path, tiny_flags(data, tmp_path / "whole"))
    args = tiny_flags(data, tmp_path / "stopped")
    run(in_changed, path, signalled, 5, "SIGTERM", 1, 0, args)
    run(train_changed, path, args)
    states = [load_checkpoint(tmp_path / out / "model_00012.pt")["optimizer"] for out in ("whole", "stopped")]
    assert_same_tensors(*states)


def without_norms(path):
    """The trainer for a model without biases and without weights of norms: all its parameters are matrices."""
    edits = {
        "nn.LayerNorm(config.n_embd)": "nn.RMSNorm(config.n_embd, elementwise_affine=False)",
        "nn.Linear(config.n_embd, 3 * config.n_embd)": "nn.Linear(config.n_embd, 3 * config.n_embd, bias=False)",
        "nn.Linear(config.n_embd, config.n_embd)": "nn.Linear(config.n_embd, config.n_embd, bias=False)",
        "nn.Linear(config.n_embd, 4 * config.n_embd)": "nn.Linear(config.n_embd, 4 * config.n_embd, bias=False)",
        "nn.Linear(4 * config.n_embd, config.n_embd)": "nn.Linear(4 * config.n_embd, config.n_embd, bias=False)",
    }
    text = (changed_trainer(path, {})).read_text(encoding="utf-8")
    for before, after in edits.items():
        assert before in text
        text = text.replace(before, after)
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_model_without_biases_and_norm_weights_trains(optimizer, data, tmp_path):
    path = without_norms(tmp_path / "train_gpt2.py")
    run(train_changed, path, tiny_flags(data, tmp_path / "out", optimizer=optimizer))
    assert losses(tmp_path / "out")[-1] < losses(tmp_path / "out")[0]


def test_muon_splits_query_key_and_value_and_no_other_matrix_of_their_shape():
    model = tiny_model()
    model.transformer.h[0].mlp.c_fc = torch.nn.Linear(32, 96)
    muon, _ = train_gpt2.configure_optimizers(model, train_gpt2.TrainConfig(optimizer="muon"))
    splits = {name: group["split"] for group in muon.param_groups for name in group["param_names"]}
    assert {name for name in splits if splits[name] == 3} == {f"transformer.h.{i}.attn.c_attn.weight" for i in (0, 1)}
    assert splits["transformer.h.0.mlp.c_fc.weight"] == 1


def test_muon_makes_complex_matrices_unitary():
    G = torch.randn(2, 5, 7, dtype=torch.complex64, generator=torch.Generator().manual_seed(0))
    for matrices in (G, G.mT):
        singular_values = torch.linalg.svdvals(train_gpt2.orthogonalize(matrices))
        assert 0.6 < singular_values.min() and singular_values.max() < 1.3


def test_muon_trains_both_parts_of_a_complex_matrix():
    p = torch.nn.Parameter(torch.zeros(4, 6, dtype=torch.complex64))
    muon = train_gpt2.Muon([p], lr=1.0, momentum=0.9, weight_decay=0.0)
    p.grad = torch.randn(4, 6, dtype=torch.complex64, generator=torch.Generator().manual_seed(0))
    muon.step()
    assert p.detach().real.abs().max() > 0.1 and p.detach().imag.abs().max() > 0.1


def test_a_rate_that_is_set_before_the_optimizers_are_returned_counts(data, tmp_path):
    returned = "    return optimizers\n"
    path = changed_trainer(
        tmp_path / "train_gpt2.py",
        {returned: '    optimizers[-1].param_groups[0]["lr"] *= 0\n' + returned},
    )
    run(train_changed, path, tiny_flags(data, tmp_path / "out", max_steps=3, warmup_steps=0))
    saved = load_checkpoint(tmp_path / "out" / "model_00003.pt")
    assert [group["lr"] > 0 for group in saved["optimizer"][0]["param_groups"]] == [False, True]


AFTER_LOSSES = "    # a number put here becomes"
LEFT = {
    "        return self.lm_head(x)\n": "        self.left = x.detach().norm()\n        return self.lm_head(x)\n",
    AFTER_LOSSES: '    scalars["left"] = parts.raw_model.left\n' + AFTER_LOSSES,
    "        losses.append(loss.detach())\n": "        losses.append(loss.detach())\n"
    '        scalars["inside"] = parts.raw_model.left\n',
}


def test_a_number_that_the_model_has_left_is_that_of_its_own_step(data, tmp_path):
    path = changed_trainer(tmp_path / "train_gpt2.py", LEFT)
    run(train_changed, path, tiny_flags(data, tmp_path / "whole"))
    args = tiny_flags(data, tmp_path / "killed")
    run(in_changed, path, killed_at, 6, 4, args, ends=[KILLED])
    run(train_changed, path, args)
    assert log_lines(tmp_path / "killed") == log_lines(tmp_path / "whole")
    assert read_log(tmp_path / "whole", "left") == read_log(tmp_path / "whole", "inside")


OWN = "    scaler = torch.amp"


@pytest.mark.parametrize(
    "value, kind",
    [("0.0", "float"), ("torch.zeros(())", "Tensor"), ("torch.Generator()", "Generator"), ("[1, 2]", "list")],
)
def test_an_object_without_a_state_dict_is_named_before_the_first_step(value, kind, data, tmp_path):
    path = changed_trainer(tmp_path / "train_gpt2.py", {OWN: f'    own["mean"] = {value}\n{OWN}'})
    [said] = run(train_changed, path, tiny_flags(data, tmp_path / "out"), ends=[2])
    assert f"Parts.own['mean'] is a {kind}, which has no state_dict()" in error_in(said)
    assert not (tmp_path / "out").exists()


def test_nothing_is_added_to_own_in_a_step(data, tmp_path):
    """It would be refused when the run is resumed."""
    edits = {AFTER_LOSSES: '    parts.own["late"] = torch.nn.Linear(2, 2)\n' + AFTER_LOSSES}
    path = changed_trainer(tmp_path / "train_gpt2.py", edits)
    [said] = run(train_changed, path, tiny_flags(data, tmp_path / "out"), ends=[1])
    assert "does not support item assignment" in said and not losses(tmp_path / "out").size


ROWS = {  # logits that depend on the other rows of the batch
    "the mean over the batch": {GELU: 'self.c_proj(F.gelu((x := self.c_fc(x)) - x.mean(0), approximate="tanh"))'},
    "a capacity over the batch": {
        GELU: 'self.c_proj(F.gelu(self.c_fc(x), approximate="tanh"))'
        " * (torch.arange(x[..., 0].numel()) < 40).view(x[..., 0].shape)[..., None]"
    },
}


@pytest.mark.parametrize("name", ROWS)
def test_rows_of_a_batch_that_depend_on_one_another_are_said(name, data, tmp_path):
    path = changed_trainer(tmp_path / "train_gpt2.py", ROWS[name])
    [said] = run(train_changed, path, tiny_flags(data, tmp_path / "out", max_steps=1))
    assert "depend on the other rows of its batch" in said and "depend on later tokens" not in said


def test_a_plain_model_has_independent_rows():
    model = tiny_model().eval()
    idx = torch.randint(320, (1, 30))
    with torch.no_grad():
        assert checks.are_rows_independent(model, idx, model.hidden_states(idx))


def test_gradients_that_no_checkpoint_has_are_said(data, tmp_path):
    """Of a trainer that keeps them over three steps: it trains, and a run that is resumed would be another one."""
    zero_grad = "        optimizer.zero_grad("
    edits = {zero_grad: "        if step % 3 == 2:\n    " + zero_grad}
    path = changed_trainer(tmp_path / "train_gpt2.py", edits)
    [said] = run(train_changed, path, tiny_flags(data, tmp_path / "out"))
    assert "After step 4 there are gradients" in said
    assert "there are gradients" not in train(data, tmp_path / "plain")


LAYERDROP = "    def forward(self, x, cache=None):\n        # subtle"


@pytest.mark.parametrize("finds", [False, True])
def test_blocks_that_ranks_leave_out_at_random_are_refused_unless_ddp_looks_for_them(finds, data, tmp_path):
    drop = "    def forward(self, x, cache=None):\n"
    drop += "        if self.training and torch.rand(()) < 0.1:\n            return x\n"
    edits = {LAYERDROP: drop + LAYERDROP.partition("\n")[2]}
    if finds:
        edits["bucket_cap_mb=100"] = "find_unused_parameters=True, bucket_cap_mb=100"
    path = changed_trainer(tmp_path / "train_gpt2.py", edits)
    said, _ = run(train_changed, path, tiny_flags(data, tmp_path / "out"), ranks=2, ends=[0, 0] if finds else [2, 2])
    if finds:
        assert len(losses(tmp_path / "out")) == 12
    else:
        assert "add find_unused_parameters=True to DDP" in error_in(said)


def test_a_forward_pass_may_return_more_than_logits_and_loss(data, tmp_path):
    edits = {
        "return logits if return_logits else None, loss / num_targets\n": "return logits, loss / num_targets, logits\n",
        "_, loss = model(x, y, return_logits=False)": "_, loss, _ = model(x, y, return_logits=False)",
    }
    path = changed_trainer(tmp_path / "train_gpt2.py", edits)
    run(train_changed, path, tiny_flags(data, tmp_path / "out", max_steps=2))


def test_layers_that_only_setup_makes_are_named_before_the_first_step(data, tmp_path):
    made = "    optimizers = configure_optimizers(raw_model, config)\n"
    edits = {made: "    raw_model.low = nn.Linear(32, 4)\n" + made}
    path = changed_trainer(tmp_path / "train_gpt2.py", edits)
    [said] = run(train_changed, path, tiny_flags(data, tmp_path / "out"), ends=[2])
    assert "no checkpoint of the run could be used" in error_in(said) and "low.weight" in error_in(said)
    assert not (tmp_path / "out").exists()


def test_a_dry_run_takes_a_model_that_reads_its_first_values(data, tmp_path):
    made = "        self.c_fc = init_normal(nn.Linear(config.n_embd, 4 * config.n_embd))\n"
    edits = {made: made + "        assert self.c_fc.weight.std().item() > 0\n"}
    path = changed_trainer(tmp_path / "train_gpt2.py", edits)
    run(train_changed, path, tiny_flags(data, tmp_path / "out", dry_run=True))
    assert not (tmp_path / "out").exists()


def test_weights_are_extended_where_a_run_begins_and_not_where_it_is_resumed(data, tmp_path):
    """As by a model that makes its deeper layers of shallower ones: a resume would undo their training."""
    name = '"transformer.h.1.mlp.c_fc.bias"'
    returned = "        return extended\n"
    edits = {returned: f"        extended[{name}] = torch.ones_like(extended[{name}])\n" + returned}
    path = changed_trainer(tmp_path / "train_gpt2.py", edits)
    train(data, tmp_path / "base")
    options = dict(init_from=tmp_path / "base", max_lr=1e-3)
    run(train_changed, path, tiny_flags(data, tmp_path / "whole", **options))
    args = tiny_flags(data, tmp_path / "killed", **options)
    run(in_changed, path, killed_at, 6, 4, args, ends=[KILLED])
    run(train_changed, path, args)
    assert log_lines(tmp_path / "killed") == log_lines(tmp_path / "whole")
    bias = load_checkpoint(tmp_path / "whole" / "model_00008.pt")["model"]["transformer.h.1.mlp.c_fc.bias"]
    assert (bias - 1).abs().max() < 0.1


@needs("SIGHUP")
def test_sigusr1_stops_a_run_as_sigterm_does(data, tmp_path):
    """Slurm's users choose it: #SBATCH --signal=USR1@90."""
    assert hasattr(signal, "SIGUSR1")
    train(data, tmp_path / "whole")
    args = tiny_flags(data, tmp_path / "stopped")
    [said] = run(signalled, 5, "SIGUSR1", 1, 0, args)
    assert "Stopped after 6 steps" in said
    run(train_gpt2.main, args)
    assert log_lines(tmp_path / "stopped") == log_lines(tmp_path / "whole")
    states = [load_checkpoint(tmp_path / name / "model_00012.pt")["optimizer"] for name in ("whole", "stopped")]
    assert_same_tensors(*states)
