"""Optimizers, numbers and objects that people add to the training: each is resumed, branched and logged as it is."""

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
import train_gpt2

from edits import (
    BEFORE_GROUPS,
    GELU,
    HIDDEN_STATES,
    MLP_CALL,
    OPTIMIZERS,
    POSITIONS,
    SCALER,
    WIDTH,
)
from harness import (
    assert_same_tensors,
    losses,
    read_log,
    tiny_model,
    train,
)

pytestmark = pytest.mark.gpt2


CONSTANT = dict(schedule="wsd", decay_fraction=0, warmup_steps=0)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_gets_all_that_it_has_saved(name, changed):
    """Where a run is stopped. A branch that changes settings keeps the counts beside them."""
    trainer = changed(OPTIMIZERS[name])
    trainer.check_resume(trainer.stop, **CONSTANT)
    assert_same_tensors(trainer.optimizer("resumed"), trainer.optimizer("whole"))
    changes = dict(weight_decay=0.3, beta1=0.5, max_lr=1e-4)
    trainer.train("branch", branch_from="whole/model_00008.pt", **CONSTANT | changes)
    ours, theirs = trainer.optimizer("branch"), trainer.optimizer("whole")
    group, their_group = [state.get("inner", state)["param_groups"][0] for state in (ours, theirs)]
    assert (group["initial_lr"], group["weight_decay"], group["betas"]) == (1e-4, 0.3, (0.5, 0.95))
    assert group["lr"] == pytest.approx(1e-4) or name == "Growing"
    for count in ("count", "pulls", "d", "k", "nan", "sums"):
        assert_same_tensors((ours | group).get(count), (theirs | their_group).get(count))


WITHOUT_VECTORS = """        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.LayerNorm)):
                module.bias = None
            if isinstance(module, nn.LayerNorm):
                module.weight = None
"""


def test_muon_splits_no_matrix_but_that_of_query_key_and_value():
    model = tiny_model()
    model.transformer.h[0].mlp.c_fc = torch.nn.Linear(32, 96)  # of the same shape
    muon, _ = train_gpt2.configure_optimizers(model, train_gpt2.TrainConfig(optimizer="muon"))
    split = [group["param_names"] for group in muon.param_groups if group["split"] != 1]
    assert split == [["transformer.h.0.attn.c_attn.weight", "transformer.h.1.attn.c_attn.weight"]]


def test_muons_update_of_a_complex_matrix_is_nearly_unitary():
    p = torch.nn.Parameter(torch.zeros(5, 7, dtype=torch.complex64))
    p.grad = torch.randn_like(p)
    train_gpt2.Muon([p], lr=1.0, momentum=0.9, weight_decay=0.0).step()
    singular_values = torch.linalg.svdvals(p.detach())
    assert 0.6 < singular_values.min()
    assert singular_values.max() < 1.6


def test_a_rate_that_is_set_before_the_optimizers_are_returned_counts(changed):
    returned = "    return optimizers\n"
    trainer = changed({returned: '    optimizers[-1].param_groups[0]["lr"] *= 0\n' + returned})
    trainer.train()
    assert [group["lr"] > 0 for group in trainer.optimizer("out")["param_groups"]] == [False, True]


AFTER_LOSSES = "    # a number put here becomes"
LEFT = {
    "        return self.lm_head(x)\n": "        self.left = x.detach().norm()\n        return self.lm_head(x)\n",
    AFTER_LOSSES: '    scalars["left"] = parts.raw_model.left\n' + AFTER_LOSSES,
    "        losses.append(loss.detach())\n": "        losses.append(loss.detach())\n"
    '        scalars["inside"] = parts.raw_model.left\n',
}


def test_a_number_that_the_model_has_left_is_that_of_its_own_step(changed):
    trainer = changed(LEFT)
    trainer.check_resume(trainer.kill)
    assert read_log("whole", "left") == read_log("whole", "inside")


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


@pytest.mark.parametrize("shard", [False, True])
def test_targets_that_the_loop_leaves_out_count_as_little_as_those_of_a_mask(shard, changed, data):
    masked = Path(shutil.copytree(data, "masked"))
    for path in masked.glob("*.npy"):
        with open(path.with_suffix(".mask"), "wb") as file:
            np.save(file, 1 - np.arange(len(np.load(path)), dtype=np.uint8) % 2)
    options = dict(max_steps=1, shuffle=False, val_every=0)
    train(masked, "one", **options)
    read = "        x, y = loader.next_batch(B)\n"
    trainer = changed({read: read + "        y[:, ::2] = IGNORE_INDEX\n"})
    trainer.train("two", ranks=2, shard=shard, batch_size=2, **options)
    for stream in ("train", "norm"):
        assert losses("two", stream) == pytest.approx(losses("one", stream), rel=1e-5)


def test_gradients_that_no_checkpoint_has_are_said(changed):
    """Of a trainer that keeps them over three steps: it trains, and a run that is resumed would be another one."""
    zero_grad = "        optimizer.zero_grad("
    said = changed({zero_grad: "        if step % 3 == 2:\n    " + zero_grad}).train(max_steps=6)
    assert said.count("After step 0 there are gradients") == said.count("there are gradients") == 1


# each block, but not in its first pass, which alone would not show that there are others
LAYERDROP = {
    "    def forward(self, x, cache=None):\n        # subtle": """    def forward(self, x, cache=None):
        self.passes = getattr(self, "passes", 0) + self.training
        if self.training and torch.rand(()) < 0.4 and self.passes > 1:
            return x
        # subtle"""
}
GRADIENT = "torch.func.grad(lambda w: (x.detach().mean() * w).square().mean())(torch.ones(1))"
MATRICES = "    groups.append({'params': [(n, p) for n, p in rest if 'c_fc.weight' in n], 'lr': 1e-3})\n"
RETURNED = "return logits if return_logits else None, loss / num_targets\n"
MADE = "    optimizers = configure_optimizers(raw_model, config)\n"
TRAINS = {  # {what: (the edit, settings)}
    "parameters that are all matrices": ({HIDDEN_STATES: WITHOUT_VECTORS + HIDDEN_STATES}, dict(optimizer="muon")),
    "a group that Muon leaves empty": ({BEFORE_GROUPS: MATRICES + BEFORE_GROUPS}, dict(optimizer="muon")),
    # as in test-time training: the estimate of the memory allows none
    "a gradient of torch.func in the forward pass": ({GELU: f"{GELU} - 0.1 * {GRADIENT}"}, {}),
    "a forward pass that returns more": (
        {
            RETURNED: "return logits, loss / num_targets, logits\n",
            "_, loss = model(x, y, return_logits=False)": "_, loss, _ = model(x, y, return_logits=False)",
        },
        {},
    ),
    "blocks that ranks leave out at random": (
        LAYERDROP | {"bucket_cap_mb=100": "find_unused_parameters=True, bucket_cap_mb=100"},
        dict(ranks=2),
    ),
}


@pytest.mark.parametrize("what", TRAINS)
def test_a_model_may_have(what, changed, out):
    edit, settings = TRAINS[what]
    changed(edit).train(max_steps=6, **settings)
    assert losses(out)[-1] < losses(out)[0]


LOOP = "    losses = []\n    for micro"
REFUSED = {  # {the error, before a checkpoint is written: the edit}
    "['optimizer'][0]['param_groups'][1]['schedule'], which is a function": {
        BEFORE_GROUPS: "    groups[1]['schedule'] = lambda step: 1.0\n" + BEFORE_GROUPS
    },
    "The field options of TrainConfig has the type 'dict'": {
        WIDTH: WIDTH + "    options: dict = dataclasses.field(default_factory=dict)\n"
    },
    "cannot load its own state dict": {
        MLP_CALL: MLP_CALL + "\n    def get_extra_state(self):\n        return {'version': 2}\n"
    },
    "Parts.own['mean'] is a float, which has no state_dict()": {SCALER: f'    own["mean"] = 0.0\n{SCALER}'},
    "Parts.own['draws'] is a Generator,": {SCALER: f'    own["draws"] = torch.Generator()\n{SCALER}'},
    "forward() returns a dict. Return (logits, loss)": {
        RETURNED: 'return {"logits": logits, "loss": loss / num_targets}\n'
    },
    "no checkpoint of the run could be used": {MADE: "    raw_model.low = nn.Linear(32, 4)\n" + MADE},
}
REFUSED_ON_TWO_RANKS = {
    "add find_unused_parameters=True to DDP": LAYERDROP,
    "A step does not use 1 parameter, such as transformer.wpe.weight": {POSITIONS: "self.transformer.wte(idx)"},
    # DDP averages the gradients of those parameters that require one when the run begins
    "After step 0, transformer.wpe.weight is not the same on all ranks": {
        HIDDEN_STATES: "        self.transformer.wpe.requires_grad_(False)\n" + HIDDEN_STATES,
        LOOP: "    model.requires_grad_(True)\n" + LOOP,
    },
}


@pytest.mark.parametrize("error", REFUSED | REFUSED_ON_TWO_RANKS)
def test_what_could_not_be_resumed_or_shared_is_refused_in_one_line(error, changed, out):
    ranks = 2 if error in REFUSED_ON_TWO_RANKS else 0
    assert error in changed((REFUSED | REFUSED_ON_TWO_RANKS)[error]).error(ranks=ranks)
    assert out.exists() == error.startswith("After step 0")


def test_a_dry_run_takes_a_model_that_reads_its_first_values(changed, out):
    made = "        self.c_fc = init_normal(nn.Linear(config.n_embd, 4 * config.n_embd))\n"
    changed({made: made + "        assert self.c_fc.weight.std().item() > 0\n"}).train(dry_run=True)
    assert not out.exists()


def test_weights_are_extended_only_where_a_run_begins(changed, data):
    """As by a model that makes its deeper layers of shallower ones: a resume would undo their training."""
    bias = "transformer.h.1.mlp.c_fc.bias"
    returned = "        return extended\n"
    trainer = changed({returned: f"        extended['{bias}'] = torch.ones_like(extended['{bias}'])\n" + returned})
    train(data, "base")
    trainer.check_resume(trainer.kill, init_from="base", max_lr=1e-3)
    assert (trainer.saved("whole", step=8)["model"][bias] - 1).abs().max() < 0.1
