"""Optimizers, numbers and objects that people add to the training: each is resumed, branched and logged as it is."""

import pytest
import torch
import torch.nn.functional as F
import train_gpt2
from plumbing.system.distributed import join_ranks

from edits import BEFORE_GROUPS, GELU, HIDDEN_STATES, OPTIMIZERS, SCALER, Changed, adamw_as
from harness import (
    assert_same_tensors,
    losses,
    read_log,
    run,
    tiny_model,
    train,
)

pytestmark = pytest.mark.gpt2


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_run_that_is_stopped_gives_its_optimizer_all_that_it_saved(name, changed):
    trainer = changed(OPTIMIZERS[name])
    trainer.check_resume(trainer.stop)


CONSTANT = dict(schedule="wsd", decay_fraction=0, warmup_steps=0)


@pytest.mark.parametrize("name", ["Inside", "Growing"])
def test_a_longer_branch_keeps_what_an_optimizer_has_counted(name, changed, tmp_path):
    trainer = changed(OPTIMIZERS[name])
    trainer.train("long", max_steps=14, **CONSTANT)
    trainer.train("short", **CONSTANT)
    trainer.train("branch", branch_from=tmp_path / "short" / "model_00008.pt", max_steps=14, **CONSTANT)
    assert trainer.log("branch") == trainer.log("long")


@pytest.fixture
def optimizer_of_branch(changed, tmp_path):
    """optimizer_of_branch(name, **changes): that optimizer's state after 8 steps and 4 more of a branch with these."""

    def branch(name, **changes):
        trainer = changed(OPTIMIZERS[name])
        trainer.train("parent", **CONSTANT)
        trainer.train("branch", branch_from=tmp_path / "parent" / "model_00008.pt", **CONSTANT | changes)
        return trainer.optimizer("branch")

    return branch


def test_a_branch_keeps_a_count_beside_a_setting_that_it_changes(optimizer_of_branch):
    group = optimizer_of_branch("Growing", weight_decay=0.3, beta1=0.5)["param_groups"][0]
    assert (group["k"], group["weight_decay"], group["betas"]) == (12, 0.3, (0.5, 0.95))


def test_a_branch_changes_the_rate_of_an_optimizer_that_keeps_another_one_inside(optimizer_of_branch):
    group = optimizer_of_branch("Inside", weight_decay=0.3, max_lr=1e-4)["inner"]["param_groups"][0]
    assert (group["lr"], group["initial_lr"], group["weight_decay"]) == (pytest.approx(1e-4), 1e-4, 0.3)


COUNTS = ["a number of NumPy's", "nan", "tensors in a list"]
COUNTING = """

class Counting(torch.optim.AdamW):
    def step(self):
        for group in self.param_groups:
            group["a number of NumPy's"] += 1
            group["nan"] = 1.0 if group["nan"] != group["nan"] else group["nan"] + 1
            group["tensors in a list"] = [tensor + 1 for tensor in group["tensors in a list"]]
        super().step()
"""
BEFORE_COUNTING = """    for group in groups:
        group["a number of NumPy's"] = np.int64(0)
        group["nan"] = float("nan")
        group["tensors in a list"] = [torch.zeros(2), torch.zeros(3)]
"""


@pytest.fixture(scope="module")
def counted(folder):
    """Groups of an optimizer with these counts: of a run that was stopped, and of one that was not."""
    edits = adamw_as("Counting", COUNTING) | {BEFORE_GROUPS: BEFORE_COUNTING + BEFORE_GROUPS}
    trainer = Changed(folder.parent, folder, edits)
    trainer.check_resume(trainer.stop)
    return [trainer.optimizer(out)["param_groups"][0] for out in ("resumed", "whole")]


@pytest.mark.parametrize("name", COUNTS)
def test_a_count_of_any_kind_continues_where_a_run_does(name, counted):
    resumed, whole = counted
    assert_same_tensors(resumed[name], whole[name])


WITHOUT_VECTORS = """        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.LayerNorm)):
                module.bias = None
            if isinstance(module, nn.LayerNorm):
                module.weight = None
"""


def test_a_model_whose_parameters_are_all_matrices_trains(changed, out):
    """By Muon, and so by AdamW as well."""
    changed({HIDDEN_STATES: WITHOUT_VECTORS + HIDDEN_STATES}).train(optimizer="muon")
    assert losses(out)[-1] < losses(out)[0]


def test_muon_splits_no_matrix_but_that_of_query_key_and_value():
    model = tiny_model()
    model.transformer.h[0].mlp.c_fc = torch.nn.Linear(32, 96)  # of the same shape
    muon, _ = train_gpt2.configure_optimizers(model, train_gpt2.TrainConfig(optimizer="muon"))
    split = []
    for group in muon.param_groups:
        if group["split"] != 1:
            split += group["param_names"]
    assert split == ["transformer.h.0.attn.c_attn.weight", "transformer.h.1.attn.c_attn.weight"]


@pytest.mark.parametrize("shape", [(5, 7), (7, 5)])
def test_muons_update_of_a_complex_matrix_is_nearly_unitary(shape):
    p = torch.nn.Parameter(torch.zeros(shape, dtype=torch.complex64))
    p.grad = torch.randn(shape, dtype=torch.complex64)
    train_gpt2.Muon([p], lr=1.0, momentum=0.9, weight_decay=0.0).step()
    singular_values = torch.linalg.svdvals(p.detach())
    assert 0.6 < singular_values.min()
    assert singular_values.max() < 1.6


def update_tall_stacks():
    """Muon's updates of two parameters that are three tall matrices each, one on top of the other."""
    with join_ranks({"device": "cpu"}):
        torch.manual_seed(0)
        params = [torch.nn.Parameter(torch.zeros(3 * 7, 5)) for _ in range(2)]
        for p in params:
            p.grad = torch.randn(p.shape)
        group = {"params": params, "split": 3}
        train_gpt2.Muon([group], lr=1.0, momentum=0.9, weight_decay=0.0).step()
        singular_values = torch.linalg.svdvals(torch.cat([*params]).detach().view(6, 7, 5)) / (7 / 5) ** 0.5
        assert 0.6 < singular_values.min()
        assert singular_values.max() < 1.6


@pytest.mark.parametrize("ranks", [0, 2])
def test_muon_updates_tall_matrices_that_one_parameter_holds(ranks):
    """As of a gate and an up projection in one layer, or of stacked experts."""
    run(update_tall_stacks, ranks=ranks)


def test_a_rate_that_is_set_before_the_optimizers_are_returned_counts(changed):
    returned = "    return optimizers\n"
    trainer = changed({returned: '    optimizers[-1].param_groups[0]["lr"] *= 0\n' + returned})
    trainer.train(warmup_steps=0)
    assert [group["lr"] > 0 for group in trainer.optimizer("out")["param_groups"]] == [False, True]


AFTER_LOSSES = "    # a number put here becomes"
LEFT = {
    "        return self.lm_head(x)\n": "        self.left = x.detach().norm()\n        return self.lm_head(x)\n",
    AFTER_LOSSES: '    scalars["left"] = parts.raw_model.left\n' + AFTER_LOSSES,
    "        losses.append(loss.detach())\n": "        losses.append(loss.detach())\n"
    '        scalars["inside"] = parts.raw_model.left\n',
}


def test_a_number_that_the_model_has_left_is_that_of_its_own_step(changed, tmp_path):
    trainer = changed(LEFT)
    trainer.check_resume(trainer.kill)
    assert read_log(tmp_path / "whole", "left") == read_log(tmp_path / "whole", "inside")


@pytest.mark.parametrize("value, kind", [("0.0", "float"), ("torch.Generator()", "Generator")])
def test_an_object_without_a_state_dict_is_named_before_the_first_step(value, kind, changed):
    error = changed({SCALER: f'    own["mean"] = {value}\n{SCALER}'}).error()
    assert f"Parts.own['mean'] is a {kind}, which has no state_dict()" in error


def test_nothing_is_added_to_own_in_a_step(changed):
    """It would be refused when the run is resumed."""
    trainer = changed({AFTER_LOSSES: '    parts.own["late"] = torch.nn.Linear(2, 2)\n' + AFTER_LOSSES})
    assert "does not support item assignment" in trainer.train(ends=[1])


CAPACITY = " * (torch.arange(x[..., 0].numel()) >= x[..., 0].numel() - 40).view(x[..., 0].shape)[..., None]"
ROWS = {  # logits that depend on the other rows of the batch
    "the mean over the batch": {GELU: 'self.c_proj(F.gelu((x := self.c_fc(x)) - x.mean(0), approximate="tanh"))'},
    "a capacity that the last tokens take": {GELU: GELU + CAPACITY},
}


@pytest.mark.parametrize("name", ROWS)
def test_rows_of_a_batch_that_depend_on_one_another_are_said(name, changed):
    said = changed(ROWS[name]).train(max_steps=1)
    assert "depend on the other rows of its batch" in said
    assert "depend on later tokens" not in said


@pytest.mark.parametrize("options", [dict(), dict(ranks=2), dict(ranks=2, shard=True)])
def test_targets_that_the_loop_leaves_out_do_not_count(options, changed, data, out, tmp_path):
    """Loss and gradient are those of the mean over the other half, taken at once."""
    train(data, tmp_path / "whole", max_steps=1)
    read = "        x, y = loader.next_batch(B)\n"
    start = dict(init_from=tmp_path / "whole", max_steps=1, batch_size=2, shuffle=False)
    changed({read: read + "        y[:, ::2] = IGNORE_INDEX\n"}).train(**start, **options)
    model, _ = train_gpt2.load_model(str(tmp_path / "whole"))
    x, y = train_gpt2.DataLoaderLite(str(data), "train", 8, 16).next_batch()
    y[:, ::2] = train_gpt2.IGNORE_INDEX
    loss = F.cross_entropy(model(x)[0].mT, y)
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    assert losses(out)[0] == pytest.approx(loss.item(), rel=1e-5)
    assert float(read_log(out, "norm")[0]) == pytest.approx(norm.item(), rel=1e-4)


def test_gradients_that_no_checkpoint_has_are_said(changed):
    """Of a trainer that keeps them over three steps: it trains, and a run that is resumed would be another one."""
    zero_grad = "        optimizer.zero_grad("
    said = changed({zero_grad: "        if step % 3 == 2:\n    " + zero_grad}).train()
    assert said.count("After step 0 there are gradients") == said.count("there are gradients") == 1


# each block, but not in its first pass, which alone would not show that there are others
LAYERDROP = {
    "    def forward(self, x, cache=None):\n        # subtle": """    def forward(self, x, cache=None):
        self.passes = getattr(self, "passes", 0) + self.training
        if self.training and torch.rand(()) < 0.4 and self.passes > 1:
            return x
        # subtle"""
}


def test_blocks_that_ranks_leave_out_at_random_are_refused(changed):
    assert "add find_unused_parameters=True to DDP" in changed(LAYERDROP).error(ranks=2)


def test_ranks_may_leave_out_blocks_at_random_where_ddp_looks_for_them(changed, out):
    changed(LAYERDROP | {"bucket_cap_mb=100": "find_unused_parameters=True, bucket_cap_mb=100"}).train(ranks=2)
    assert len(losses(out)) == 12


def test_a_forward_pass_that_returns_no_pair_is_refused_in_one_line(changed):
    returned = "return logits if return_logits else None, loss / num_targets\n"
    error = changed({returned: 'return {"logits": logits, "loss": loss / num_targets}\n'}).error()
    assert "forward() returns a dict. Return (logits, loss)" in error


def test_a_group_that_muon_leaves_empty_is_left_out(changed, out):
    matrices = "    groups.append({'params': [(n, p) for n, p in rest if 'c_fc.weight' in n], 'lr': 1e-3})\n"
    changed({BEFORE_GROUPS: matrices + BEFORE_GROUPS}).train(optimizer="muon", max_steps=1)
    assert len(losses(out)) == 1


def test_a_model_may_learn_while_it_reads(changed, out):
    """By a gradient of torch.func, as in test-time training: the estimate of the memory allows none."""
    grad = "torch.func.grad(lambda w: (x.detach().mean() * w).square().mean())(torch.ones(1))"
    changed({GELU: f"{GELU} - 0.1 * {grad}"}).train(max_steps=2)
    assert len(losses(out)) == 2


def test_a_forward_pass_may_return_more_than_logits_and_loss(changed, out):
    edits = {
        "return logits if return_logits else None, loss / num_targets\n": "return logits, loss / num_targets, logits\n",
        "_, loss = model(x, y, return_logits=False)": "_, loss, _ = model(x, y, return_logits=False)",
    }
    changed(edits).train(max_steps=2)
    assert len(losses(out)) == 2


def test_layers_that_only_setup_makes_are_named_before_the_first_step(changed):
    made = "    optimizers = configure_optimizers(raw_model, config)\n"
    error = changed({made: "    raw_model.low = nn.Linear(32, 4)\n" + made}).error()
    assert "no checkpoint of the run could be used" in error
    assert "low.weight" in error


def test_a_dry_run_takes_a_model_that_reads_its_first_values(changed, out):
    made = "        self.c_fc = init_normal(nn.Linear(config.n_embd, 4 * config.n_embd))\n"
    changed({made: made + "        assert self.c_fc.weight.std().item() > 0\n"}).train(dry_run=True)
    assert not out.exists()


def test_weights_are_extended_only_where_a_run_begins(changed, data, tmp_path):
    """As by a model that makes its deeper layers of shallower ones: a resume would undo their training."""
    bias = "transformer.h.1.mlp.c_fc.bias"
    returned = "        return extended\n"
    trainer = changed({returned: f"        extended['{bias}'] = torch.ones_like(extended['{bias}'])\n" + returned})
    train(data, tmp_path / "base")
    trainer.check_resume(trainer.kill, init_from=tmp_path / "base", max_lr=1e-3)
    assert (trainer.saved("whole", step=8)["model"][bias] - 1).abs().max() < 0.1
