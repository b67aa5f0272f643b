"""A changed model is a model: edits of train_gpt2.py as people make them, each through the whole life of a run."""

import importlib.util
import itertools
import os
import subprocess
import sys
from pathlib import Path

import hellaswag
import numpy as np
import pytest
import sample
import torch
import train_gpt2
from plumbing.data import tokenizers
from plumbing.run import source_code
from plumbing.run.checkpoint import load_checkpoint
from plumbing.run.logs import read_starts

from corpora import make, train_small
from harness import (
    KILLED,
    ROOT,
    error_in,
    examples_file,
    four_rows,
    greedy_without_cache,
    killed_at,
    listing,
    log_lines,
    losses,
    read_log,
    refusal_of,
    refused,
    run,
    signalled,
    status_of,
    tiny_flags,
    train,
)

pytestmark = pytest.mark.gpt2

WIDTH = "    n_embd: Positive[int] = 768  # channels of the residual stream\n"
POSITIONS = "self.transformer.wte(idx) + self.transformer.wpe(pos)"
PROJECTION = "        self.c_proj = init_normal(nn.Linear(4 * config.n_embd, config.n_embd), std)\n"
GELU = 'self.c_proj(F.gelu(self.c_fc(x), approximate="tanh"))'
MLP_CALL = f"        return {GELU}\n"
BLOCK = "        self.ln_2 = nn.LayerNorm(config.n_embd)\n"
ATTENTION = "\n\nclass CausalSelfAttention(nn.Module):"
ROTATE = """

def rotate(x, cache):
    pos = torch.arange(x.size(2), device=x.device) + (cache.length if cache else 0)
    angle = pos[:, None] / 100 ** (torch.arange(0, x.size(3), 2, device=x.device) / x.size(3))
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)
"""
CACHE = "        if cache:\n            k, v"
ROTARY = {
    ATTENTION: ROTATE + ATTENTION,
    CACHE: "        q, k = rotate(q, cache), rotate(k, cache)\n" + CACHE,
    POSITIONS: "self.transformer.wte(idx)",
    "        self.transformer.wpe = init_normal(nn.Embedding(config.block_size, config.n_embd))\n": "",
}
PROJECTIONS = "        self.c_attn = init_normal"
TABLES = """        positions = torch.arange(config.block_size)
        self.register_buffer("sines", positions[:, None].sin())
        self.register_buffer("causal", positions[:, None] >= positions)
"""
RESIDUAL = "        x = x + self.attn("
CONVOLUTION = """        last = cache.state[self.attn.layer].get("last") if cache else None
        last = torch.zeros_like(x[:, :1]) if last is None else last
        if cache:
            cache.state[self.attn.layer]["last"] = x[:, -1:]
        x = x + 0.5 * torch.cat([last, x[:, :-1]], 1)
"""
MEAN = """        if self.training:
            self.count += 1
            self.calls += 1
            self.mean.lerp_(x.detach().mean((0, 1)), 1 / self.count)
        x = x - self.mean * self.ones * self.expanded
"""
BLOCKS = "nn.ModuleList(Block(config, layer) for layer in range(config.n_layer))"
STATISTICS = """        self.register_buffer("mean", torch.zeros(config.n_embd))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("ones", torch.ones(config.n_embd), persistent=False)
        self.register_buffer("expanded", torch.ones(1).expand(config.n_embd))
        self.count = 0
"""
EXTRA_STATE = """    def get_extra_state(self):
        return {"count": self.count}

    def set_extra_state(self, state):
        self.count = state["count"]

"""
FORWARD = "    def forward(self, x, cache=None):\n        # subtle"
ADAMW = "torch.optim.AdamW(groups, lr=config.max_lr, betas=betas, eps=1e-8, fused=fused)"
OPTIMIZER = """

class Normalized(torch.optim.Optimizer):
    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            group["steps"] = group.get("steps", 0) + 1
            for p in group["params"]:
                exp_avg_sq = self.state[p].setdefault("exp_avg_sq", torch.zeros(()))
                exp_avg_sq.lerp_(p.grad.square().mean(), 1 / group["steps"])
                p.sub_(p.grad / (exp_avg_sq.sqrt() + 1e-8), alpha=group["lr"])
"""
CONFIGURE = "\n\ndef configure_optimizers("
EDITS = {  # {text in train_gpt2.py: what takes its place}
    "untied": {"        self.lm_head.weight = self.transformer.wte.weight  # weight": "        # weight"},
    "rotary": ROTARY,
    "a field and dropout": {
        WIDTH: WIDTH
        + "    dropout: float = 0  # share of the activations that is set to 0\n    window: int | None = None\n",
        PROJECTION: PROJECTION + "        self.dropout = nn.Dropout(config.dropout)\n",
        "import hellaswag\n": "import random\n\nimport hellaswag\n",
        GELU: f"self.dropout({GELU}) * (1 + self.training * (np.random.rand() - random.random()))",
    },
    "buffers": {BLOCK: BLOCK + STATISTICS, FORWARD: EXTRA_STATE + FORWARD, RESIDUAL: MEAN + RESIDUAL},
    "a group of its own": {
        "    betas = (config": "    wte = model.transformer.wte.weight\n"
        "    groups[0]['params'] = [(n, p) for n, p in groups[0]['params'] if p is not wte]\n"
        "    groups.append({'params': [('wte', wte)], 'weight_decay': 0.0, 'lr': 3 * config.max_lr})\n"
        "    betas = (config"
    },
    "an optimizer of its own and a shared block": {
        CONFIGURE: OPTIMIZER + CONFIGURE,
        ADAMW: "Normalized(groups, {'lr': config.max_lr})",
        BLOCKS: "nn.ModuleList([Block(config, 0)] * config.n_layer)",
    },
    "a soft cap, smoothing and a convolution": {
        RESIDUAL: CONVOLUTION + RESIDUAL,
        "return self.lm_head(x)": "return 2 * torch.tanh(self.lm_head(x) / 2)",
        'reduction="sum")': 'reduction="sum", label_smoothing=0.1 * self.training)',
    },
}


def changed_trainer(path, edits):
    """Write train_gpt2.py with these edits to `path`."""
    source = Path(train_gpt2.__file__).read_text(encoding="utf-8")
    for before, after in edits.items():
        assert source.count(before) == 1, before
        source = source.replace(before, after)
    path.write_text(source, encoding="utf-8")
    return path


def import_trainer(path):
    """The file as the module train_gpt2, which sample.py and hellaswag.py use from now on."""
    spec = importlib.util.spec_from_file_location("train_gpt2", path)
    module = sys.modules["train_gpt2"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def in_changed(path, function, *args):
    """function(*args) with the trainer in the file at `path`."""
    import_trainer(path)
    function(*args)


def train_changed(path, args):
    import_trainer(path).main(args)


def live(path, folder, data, options):
    """Train, be stopped, continue, branch, fine-tune, sample, score, end: all with the model in the file at `path`."""
    trainer = import_trainer(path)
    examples = examples_file(folder, ["abc" * n + "d" for n in (1, 2, 7, 12, 13)])
    options = dict(hellaswag_every=4, hellaswag_data=examples, block_size=64, max_steps=8) | options

    def train(out, **changes):
        trainer.main(tiny_flags(data, folder / out, **options | changes))

    train("whole", sample_every=8)
    assert losses(folder / "whole")[-1] < losses(folder / "whole")[0] - 0.1
    signalled(5, "SIGTERM", 1, 0, tiny_flags(data, folder / "stopped", **options))
    train("stopped")
    train("branch", branch_from=folder / "whole" / "model_00004.pt")
    assert log_lines(folder / "stopped") == log_lines(folder / "whole") == log_lines(folder / "branch")
    train("tuned", init_from=folder / "whole", max_steps=1)
    assert losses(folder / "tuned", "val")[0] == pytest.approx(losses(folder / "whole", "val")[-1], abs=1e-6)
    before = listing(folder / "whole")
    train("whole")
    assert listing(folder / "whole") == before, "finished, once and for all"
    model, enc = trainer.load_model(str(folder / "whole"))
    assert vars(model.config).items() <= load_checkpoint(folder / "whole" / "model_00008.pt")["config"].items()
    rendered = hellaswag.load_examples(examples, enc)
    ids = itertools.takewhile(lambda i: i < 256, greedy_without_cache(model, list(b"abcd"), 70))
    said = refusal_of(sample.main, "abcd", "-m", folder / "whole", "--temperature", 0, "--max-new-tokens", 70)
    assert (said[0], said[1].rstrip("\n")) == (0, bytes(ids).decode(errors="replace"))
    assert np.allclose(hellaswag.score(model, rendered, enc.n_vocab)[0], four_rows(model, rendered), atol=1e-3)
    if (folder / "whole" / "hf").exists():  # transformers reads it
        theirs = trainer.GPT.from_pretrained(folder / "whole" / "hf").eval()
        idx = torch.arange(60)[None]
        torch.testing.assert_close(theirs(idx)[0], model(idx)[0][..., :257], rtol=0, atol=1e-4)


LIVES = {name: edits for name, edits in EDITS.items() if "field" not in name and "group" not in name}
EDM2 = {
    MLP_CALL: "        self.c_fc.weight.data.copy_(F.normalize(self.c_fc.weight.data, dim=1))\n"
    "        phases = torch.view_as_real(torch.view_as_complex(x.unflatten(-1, (-1, 2))) * self.phases).flatten(-2)\n"
    + MLP_CALL.replace("self.c_fc(x)", "self.c_fc(phases)"),
    PROJECTION: PROJECTION
    + '        self.register_buffer("phases", torch.polar(torch.ones(16), torch.arange(16.0)))\n',
}
LIVES["weights written in the forward pass"] = EDM2
LIVES["a field and a group of its own"] = EDITS["a field and dropout"] | EDITS["a group of its own"]


@pytest.mark.parametrize("name", LIVES)
def test_a_changed_model_lives_the_life_of_a_run(name, data, tmp_path):
    path = changed_trainer(tmp_path / "train_gpt2.py", LIVES[name])
    [said] = run(live, path, tmp_path, data, dict(dropout=0.1) if "field" in name else {})
    is_gpt2 = name.startswith(("a field and a group", "an optimizer of its own"))
    assert (tmp_path / "whole" / "hf").exists() == is_gpt2 == ("note: There is no " not in said)
    assert ("state that is no tensor, transformer.h.0." in said) == (name == "buffers")
    assert "is not the cross-entropy of the logits" not in said


def test_what_begins_with_a_model_may_be_longer_where_no_weight_depends_on_it(data, tmp_path):
    """As with rotary embeddings: a branch learns from longer sequences. Tables of positions become those of its own."""
    path = changed_trainer(tmp_path / "train_rotary.py", ROTARY | {PROJECTIONS: TABLES + PROJECTIONS})
    run(train_changed, path, tiny_flags(data, tmp_path / "parent"))
    for begin in ("branch_from", "init_from"):
        options = {"block_size": 64, "sequence_length": 64, "max_steps": 24, begin: tmp_path / "parent"}
        [said] = run(train_changed, path, tiny_flags(data, tmp_path / begin, **options))
        last = load_checkpoint(tmp_path / begin / "model_00024.pt")
        positions, name = torch.arange(64), "transformer.h.1.attn."
        assert torch.equal(last["model"][f"{name}sines"], positions[:, None].sin())
        assert torch.equal(last["model"][f"{name}causal"], torch.ones(64, 64).tril().bool())
        assert losses(tmp_path / begin, "val")[-1] < losses(tmp_path / "parent", "val")[-1]
        assert ("differs from its parent in sequence_length" in " ".join(said.split())) == (begin == "branch_from")
        assert last["optimizer"][0]["state"][0]["step"] == 24  # of which a branch has 12 of its parent's


def test_what_does_not_fit_is_refused_in_one_line_and_nothing_is_touched(data, tmp_path):
    """Weights of another model, another version's optimizer and settings, and the code of a copy."""
    options = dict(max_steps=2, checkpoint_every=1, val_every=0)
    edits = EDITS | {"relu squared": {GELU: "self.c_proj(F.relu(self.c_fc(x)).square())"}}
    for name in ("untied", "a group of its own", "a field and dropout", "relu squared"):
        path = changed_trainer(tmp_path / ("torch.py" if "relu" in name else "other.py"), edits[name])
        run(train_changed, path, tiny_flags(data, tmp_path / name, **options))
        (tmp_path / name / "model_00002.pt").unlink()
    before = listing(tmp_path)

    def refusal(out, **changes):
        return refused(train_gpt2.main, *tiny_flags(data, tmp_path / out, **options | changes))

    different = "lm_head.weight and transformer.wte.weight differ, but are one tensor here"
    assert different in refusal("new", init_from=tmp_path / "untied") and different in refusal("untied")
    line = refusal("a group of its own")
    assert "instead of transformer.wte.weight in group 0 of AdamW" in line and "start a branch" in line
    assert "dropout was 0, now 'unknown', window was None, now 'unknown'" in refusal("a field and dropout")
    line = refusal("new", init_from=tmp_path / "a field and dropout")
    assert "dropout, window, which GPTConfig does not have" in line
    sampled = ["abcd", "-m", tmp_path / "relu squared", "--max-new-tokens", 3]
    assert "Add --code torch.py" in refused(sample.main, *sampled) and listing(tmp_path) == before
    assert status_of(sample.main, [*map(str, sampled), "--code", str(tmp_path / "torch.py")]) == 0
    said = train(data, tmp_path / "relu squared", **options)  # a run may go on with other code
    copy = load_checkpoint(tmp_path / "relu squared" / "model_00001.pt")["code"]["torch.py"]
    assert "was trained by other code than runs now (train_gpt2.py, torch.py)" in " ".join(said.split())
    assert copy in said and (tmp_path / "relu squared" / copy).read_bytes() == path.read_bytes()


def test_a_finished_run_of_other_code_is_named_and_not_exported_as_the_model_of_this_one(data, tmp_path):
    path = changed_trainer(tmp_path / "train_relu2.py", {GELU: "self.c_proj(F.relu(self.c_fc(x)).square())"})
    run(train_changed, path, tiny_flags(data, tmp_path / "out", max_steps=2))
    said = " ".join(train(data, tmp_path / "out", max_steps=2).split())
    assert "is finished" in said and "was trained by other code than runs now (train_gpt2.py, train_relu2.py)" in said
    assert "Its model is in" in said and not (tmp_path / "out" / "hf").exists()


def test_modules_beside_the_file_belong_to_its_code(data, tmp_path, monkeypatch):
    """They are kept with it, also those that they import, and a change of any byte is noticed, by the file's name."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # the file changes within a second
    imports = {"import hellaswag\n": "import hellaswag\nfrom my_layers.mlp import activation\n"}
    path = changed_trainer(tmp_path / "train_gpt2.py", imports | {GELU: "self.c_proj(activation(self.c_fc(x)))"})
    modules = tmp_path / "my_layers"
    modules.mkdir()
    (modules / "__init__.py").write_text("")
    (modules / "mlp.py").write_text("from .functions import activation\n")
    (modules / "functions.py").write_text("import torch\n\nactivation = torch.relu\nif 0:\n    import old\n")
    (tmp_path / "old.py").write_text("print 'of Python 2'")
    args, out = tiny_flags(data, tmp_path / "out"), tmp_path / "out"
    run(train_changed, path, args)
    for changed in ([], ["my_layers/functions.py"], ["train_gpt2.py", "my_layers/functions.py"]):
        for name in changed[:1]:
            (tmp_path / name).write_bytes((tmp_path / name).read_bytes() + b"# a word\n")
        (out / "model_00012.pt").unlink()
        [said] = run(train_changed, path, args)
        assert ("was trained by other code than runs now" in said) == bool(changed)
        assert not changed or f"({', '.join(changed)})" in said
        code = load_checkpoint(out / "model_00012.pt")["code"]
        assert list(code) == ["train_gpt2.py"] + [f"my_layers/{name}.py" for name in ("__init__", "functions", "mlp")]
        assert all((out / code[name]).read_bytes() == (tmp_path / name).read_bytes() for name in code)
        assert read_starts(out / "run.txt")[-1]["code"] == " ".join(code.values())


@pytest.mark.parametrize(
    "name, reason", [("it.pyc", "is not a P"), ("leaves.py", "ends the program"), ("no.py", "is not a P")]
)
def test_a_line_says_why_a_file_is_no_code_of_a_model(name, reason, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("it.pyc").write_bytes((ROOT / "train_gpt2.py").read_bytes())
    Path("leaves.py").write_text("import sys\nsys.exit(0)\n")
    assert f"--code {name} {reason}" in refused(sample.main, "abc", "--code", name)


def train_as_code(path, args):
    source_code.import_trainer(str(path)).main(args)


def test_a_module_of_the_same_name_from_elsewhere_does_not_stand_for_the_one_beside_the_file(data, tmp_path):
    """In training it is named; with --code, what runs is what lies beside the trainer, and not beside sample.py.

    The copy is of the file as it was when the flags were read: torch is imported for seconds, in which it may change.
    """
    edits = {
        "import hellaswag\n": "import hellaswag\nimport my_activation\n",
        GELU: "self.c_proj(my_activation.of(self.c_fc(x)))",
        "import numpy as np\n": "import numpy as np\n\nif __name__ == '__main__':\n"
        "    open(__file__, 'a').write('# the next idea')\n",
    }
    for name, function in (("exp", "relu"), ("other", "tanh")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "my_activation.py").write_text(f"import torch\n\nof = torch.{function}\n")
    path = changed_trainer(tmp_path / "exp" / "train_my.py", edits)
    before = path.read_bytes()

    def python(*words, **environment):
        return subprocess.run([sys.executable, *words], capture_output=True, text=True, env=os.environ | environment)

    paths = os.pathsep.join([str(tmp_path / "other"), str(ROOT)])
    done = python("-P", path, *tiny_flags(data, tmp_path / "out", max_steps=1), PYTHONPATH=paths)
    other = tmp_path / "other" / "my_activation.py"
    assert f"my_activation is the module in {other}, and not the one beside train_my.py" in done.stdout, done.stderr
    [copy] = (tmp_path / "out").glob("train_my-*.py")
    assert copy.read_bytes() == before != path.read_bytes()
    run(train_as_code, path, tiny_flags(data, tmp_path / "out2", max_steps=1))
    words = ["abc", "-m", tmp_path / "out2", "--code", path, "--max-new-tokens", "3"]
    done = python(ROOT / "sample.py", *words, PYTHONPATH=str(tmp_path / "other"))
    assert (done.returncode, done.stderr) == (0, "")


PLACES = {  # of a digit in its number (McLeish et al. 2024), 48 to 57 in bytes
    "        self.transformer.h = nn.Mod": "        self.place = init_normal(nn.Embedding(8, config.n_embd))\n"
    "        self.transformer.h = nn.Mod",
    f"{POSITIONS}  # (B, T, C)": f"{POSITIONS}  # (B, T, C)\n"
    "        digit = ((idx >= 48) & (idx < 58)).long()\n        n = digit.cumsum(1)\n"
    "        x = x + self.place((n - (n * (1 - digit)).cummax(1)[0]).clamp(max=7))",
}
DOCUMENTS = {  # attention only within a document, each of which begins with 256
    "forward(self, x, cache=None):\n        # B": "forward(self, x, cache=None, doc=None):\n        # B",
    "attn_mask=mask, is_causal=T == S)": "attn_mask=torch.ones(T, T).bool().tril() & doc if T == S else mask)",
    "forward(self, x, cache=None):\n        # subtle": "forward(self, x, cache=None, doc=None):\n        # subtle",
    "self.attn(self.ln_1(x).to(x.dtype), cache)": "self.attn(self.ln_1(x).to(x.dtype), cache, doc)",
    "        for block in self.transformer.h:": "        doc = (idx == 256).cumsum(1)\n"
    "        doc = (doc[:, :, None] == doc[:, None])[:, None]\n        for block in self.transformer.h:",
    "x = checkpoint(block, x, cache, use_reentrant=False)": "raise NotImplementedError",
    "x = block(x, cache)": "x = block(x, cache, doc)",
}
NO_CACHE = "With a cache this model computes something else"
NO_CROSS_ENTROPY = "The loss in validation is not the cross-entropy of the logits"
NOTES = {  # the edit, and what is said before the first step
    "a tensor that is not saved": (
        {
            GELU: 'self.c_proj(F.gelu(self.c_fc(x) + self.shift, approximate="tanh"))',
            PROJECTION: PROJECTION + "        self.shift = torch.randn(4 * config.n_embd)\n",
        },
        "computes other logits, so a resumed run will not be the same",
    ),
    "no causality": ({"is_causal=T == S": "is_causal=False"}, "A token's logits depend on later tokens"),
    "positions from the end": ({POSITIONS: f"{POSITIONS}.flip(0).cumsum(0)"}, NO_CACHE),
    # a cache that is wrong for a few ids only, which the validation text need not have
    "places of digits": (PLACES, NO_CACHE),
    "documents": (DOCUMENTS, NO_CACHE),
    # which is nearly the cross-entropy in a new model, all of whose ids are equally likely
    "smoothing": (EDITS["untied"] | {'reduction="sum")': 'reduction="sum", label_smoothing=0.1)'}, NO_CROSS_ENTROPY),
    "a z-loss": (
        {
            "        return F.cross_entropy(logits.float()": "        z = logits.float().logsumexp(-1).square().sum()\n"
            "        return 1e-4 * z + F.cross_entropy(logits.float()"
        },
        NO_CROSS_ENTROPY,
    ),
}


@pytest.mark.parametrize("name", NOTES)
def test_what_a_changed_model_cannot_keep_is_said(name, data, tmp_path):
    edits, words = NOTES[name]
    path = changed_trainer(tmp_path / "train_gpt2.py", edits)
    options = dict(hellaswag_every=1, hellaswag_data=examples_file(tmp_path, ["abc" * n for n in (1, 7)]))
    [said] = run(train_changed, path, tiny_flags(data, tmp_path / "out", block_size=128, max_steps=1, **options))
    assert words in said


def test_a_mistake_in_the_model_shows_as_itself_and_a_parameter_that_is_not_used_is_named(data, tmp_path):
    args = tiny_flags(data, tmp_path / "out", compile=True)
    path = changed_trainer(tmp_path / "mistake.py", {PROJECTION: PROJECTION.replace("4", "3")})
    [said] = run(train_changed, path, args, ends=[1])
    assert "shapes cannot be multiplied" in said and f"return {GELU}" in said and "warning" not in said
    path = changed_trainer(tmp_path / "unused.py", {POSITIONS: "self.transformer.wte(idx)"})
    said, _ = run(train_changed, path, args, ranks=2, ends=[2, 2])
    assert "A step does not use 1 parameter, such as transformer.wpe.weight" in error_in(said)
    assert not (tmp_path / "out").exists()


REFUSED = {  # {what is said before the first step: the edit}
    "['optimizer'][0]['param_groups'][1]['schedule'], which is a function": {
        "    betas = (config": "    groups[1]['schedule'] = lambda step: 1.0\n    betas = (config"
    },
    "The field options of TrainConfig has the type 'dict'": {
        WIDTH: WIDTH + "    options: dict = dataclasses.field(default_factory=dict)\n"
    },
    "cannot load its own state dict": {
        MLP_CALL: MLP_CALL + "\n    def get_extra_state(self):\n        return {'version': 2}\n"
    },
}


@pytest.mark.parametrize("line", REFUSED)
def test_what_a_run_could_not_go_on_with_is_named_before_its_first_step(line, data, tmp_path):
    path = changed_trainer(tmp_path / "train_gpt2.py", REFUSED[line])
    [said] = run(train_changed, path, tiny_flags(data, tmp_path / "out"), ends=[2])
    assert line in error_in(said)
    assert not (tmp_path / "out").exists()


LORA = {
    PROJECTION: PROJECTION + "        self.low = nn.Parameter(torch.empty(4, config.n_embd))\n"
    "        nn.init.normal_(self.low)\n        self.up = nn.Parameter(torch.zeros(config.n_embd, 4))\n",
    MLP_CALL: f"        return {GELU} + x @ self.low.T @ self.up.T\n",
    "\n    def hidden_states(": """        for name, p in self.named_parameters():
            p.requires_grad_(name.endswith(("low", "up")))

    def load_state_dict(self, weights, strict=True):
        return super().load_state_dict(weights, strict=False)

    def hidden_states(""",
}


def test_adapters_begin_over_frozen_weights_and_go_on(data, tmp_path):
    """They are what the model makes of them, as no weights have them."""
    path = changed_trainer(tmp_path / "train_gpt2.py", LORA)
    train(data, tmp_path / "base")
    args = {name: tiny_flags(data, tmp_path / name, init_from=tmp_path / "base") for name in ("whole", "killed")}
    [said] = run(train_changed, path, args["whole"])
    assert "The weights have nothing called transformer.h.0.mlp.low" in said
    run(in_changed, path, killed_at, 6, 4, args["killed"], ends=[KILLED])
    run(train_changed, path, args["killed"])
    assert log_lines(tmp_path / "killed") == log_lines(tmp_path / "whole")
    before, after = (load_checkpoint(tmp_path / name / "model_00012.pt")["model"] for name in ("base", "whole"))
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert after["transformer.h.0.mlp.low"].std() > 0.5 and after["transformer.h.0.mlp.up"].any()


def test_ranks_that_train_different_models_are_told_after_the_first_step_with_what_differs_most(data, tmp_path):
    """DDP averages the gradients of those parameters that require one when the run begins."""
    edits = {
        "\n    def hidden_states(": "        self.transformer.wpe.requires_grad_(False)\n\n    def hidden_states(",
        "    losses = []\n    for micro": "    model.requires_grad_(True)\n    losses = []\n    for micro",
    }
    path = changed_trainer(tmp_path / "train_gpt2.py", edits)
    said, _ = run(train_changed, path, tiny_flags(data, tmp_path / "out"), ranks=2, ends=[2, 2])
    assert "After step 0, transformer.wpe.weight is not the same on all ranks" in error_in(said)
    assert not list((tmp_path / "out").glob("model_*.pt"))


def test_a_branch_whose_settings_change_the_model_is_examined_again(data, tmp_path):
    edits = {
        WIDTH: WIDTH + "    flipped: int = 0  # 1: positions that depend on the number of tokens\n",
        f"{POSITIONS}  # (B, T, C)": f"{POSITIONS}  # (B, T, C)\n"
        "        x = x + self.config.flipped * self.transformer.wpe(pos.flip(0))",
    }
    path = changed_trainer(tmp_path / "train_gpt2.py", edits)
    run(train_changed, path, tiny_flags(data, tmp_path / "parent", max_steps=4))
    options = dict(branch_from=tmp_path / "parent", max_steps=8, flipped=1)
    [said] = run(train_changed, path, tiny_flags(data, tmp_path / "branch", **options))
    assert "With a cache this model computes something else" in said


AFTER_UPDATE = "    scaler.update()\n"


def recipe(words):
    """The first diff after these words in records/README.md, {text in train_gpt2.py: what takes its place}."""
    text = (ROOT / "records" / "README.md").read_text(encoding="utf-8").split(words)[1]
    hunks = text.split("```diff\n")[1].split("```")[0].split("\n\n")
    hunks = [[(line[0], line[1:] + "\n") for line in hunk.splitlines()] for hunk in hunks]
    return {
        "".join(line for sign, line in hunk if sign != "+"): "".join(line for sign, line in hunk if sign != "-")
        for hunk in hunks
    }


@pytest.mark.parametrize("ranks", [0, 2])
def test_an_average_of_the_weights_goes_on_with_its_run_and_in_a_branch(ranks, data, tmp_path):
    path = changed_trainer(tmp_path / "train_gpt2.py", recipe("**State of your own.**"))
    args = {name: tiny_flags(data, tmp_path / name) for name in ("whole", "killed")}
    run(train_changed, path, args["whole"], ranks=ranks, ends=[0] * max(1, ranks))
    if not ranks:
        run(in_changed, path, killed_at, 6, 4, args["killed"], ends=[KILLED])
        [said] = run(train_changed, path, args["killed"])
        assert log_lines(tmp_path / "killed") == log_lines(tmp_path / "whole") and "before the run was" not in said
        run(train_changed, path, tiny_flags(data, tmp_path / "branch", branch_from=tmp_path / "whole/model_00008.pt"))
        assert log_lines(tmp_path / "branch") == log_lines(tmp_path / "whole")
    states = [load_checkpoint(tmp_path / "whole" / f"model_{step:05d}.pt") for step in (8, 12)]
    average, weights = states[1]["own"]["ema"], states[1]["model"]
    assert average["n_averaged"] == 12
    name = "transformer.h.0.attn.c_attn.weight"
    assert not torch.equal(average[f"module.{name}"], weights[name])
    averages, plain = losses(tmp_path / "whole", "val_ema"), losses(tmp_path / "whole", "val")
    assert averages[0] == plain[0] and averages[0] > averages[-1] > plain[-1] + 0.01, "an average lags behind"
    if not ranks:  # the average as a model of its own
        text = (ROOT / "records" / "README.md").read_text(encoding="utf-8").split("```py\n")[1].split("```")[0]
        paths = {"log/model_19073.pt": tmp_path / "whole" / "model_00012.pt", "average.pt": tmp_path / "average.pt"}
        for path_in_text, path_here in paths.items():
            text = text.replace(path_in_text, str(path_here))
        exec(text, {})
        model, _ = train_gpt2.load_model(str(tmp_path / "average.pt"))
        assert torch.equal(model.state_dict()[name], average[f"module.{name}"])


STEPS = "    for optimizer in optimizers:\n        if not overflow:"
HIDDEN = {
    "\n\ndef train_step(": "\n\nPULLS = [0]\n\n\ndef train_step(",
    STEPS: "    PULLS[0] += 1\n    for p in parts.model.parameters():\n        p.grad *= 1 + PULLS[0]\n" + STEPS,
}


def test_steps_that_are_done_again_are_compared_with_what_they_were(data, tmp_path):
    """A run whose training counts in a variable of its own goes on as another run, and only its log can tell."""
    path = changed_trainer(tmp_path / "train_gpt2.py", HIDDEN)
    args = tiny_flags(data, tmp_path / "out", warmup_steps=0)
    run(in_changed, path, killed_at, 7, 4, args, ends=[KILLED])
    before = log_lines(tmp_path / "out")
    [said] = run(train_changed, path, args)
    assert "before the run was stopped, and is" in said and log_lines(tmp_path / "out")[: len(before)] != before


def test_numbers_of_ones_own_are_logged_as_rank_0_has_them_before_and_after_the_update(data, tmp_path):
    edits = {
        STEPS: '    scalars["before"] = 0.1 + world.rank\n'
        '    scalars["count"], scalars["large"] = 16_777_217, 1e300\n' + STEPS,
        AFTER_UPDATE: AFTER_UPDATE
        + '    scalars["wte/after"] = parts.raw_model.lm_head.weight.norm(dtype=torch.float64)\n',
    }
    path = changed_trainer(tmp_path / "train_gpt2.py", edits)
    run(train_changed, path, tiny_flags(data, tmp_path / "out"), ranks=2, ends=[0, 0])
    for name, text in {"before": "0.1", "count": "16777217", "large": "1e+300"}.items():
        assert set(read_log(tmp_path / "out", name).values()) == {text}
    weight = load_checkpoint(tmp_path / "out" / "model_00012.pt")["model"]["lm_head.weight"]
    assert losses(tmp_path / "out", "wte/after")[-1] == pytest.approx(weight.double().norm().item(), rel=1e-8)
    for name in ("train", "val/docs", "val bpb", ""):
        path = changed_trainer(tmp_path / "bad.py", {AFTER_UPDATE: AFTER_UPDATE + f"    scalars[{name!r}] = 1\n"})
        [said] = run(train_changed, path, tiny_flags(data, tmp_path / f"bad{len(name)}"), ends=[2])
        assert f"{name!r} cannot be the name of a scalar" in error_in(said)


@pytest.mark.parametrize("edits", [{}, EDITS["untied"]], ids=["tied", "untied"])
def test_a_model_begins_with_another_tokenizer_by_the_tokens_that_both_have(edits, data, tmp_path):
    """Their rows are taken over, whatever their ids; a token that is new begins with the mean. A branch is refused."""
    path = changed_trainer(tmp_path / "train_gpt2.py", edits)
    run(train_changed, path, tiny_flags(data, tmp_path / "first"))
    first = load_checkpoint(tmp_path / "first" / "model_00012.pt")["model"]["lm_head.weight"]
    enc = train_small("gpt2")
    tokenizers.write_encoding(enc, tmp_path / "small.tiktoken")
    (tmp_path / "text.txt").write_text("abcdefghijklmnop the ponds " * 400)
    make(tmp_path, str(tmp_path / "text.txt"), name="other", tokenizer=str(tmp_path / "small.tiktoken"))
    still = dict(init_from=tmp_path / "first", max_steps=1, max_lr=1e-12, min_lr=0, val_every=0)
    [said] = run(train_changed, path, tiny_flags(tmp_path / "other", tmp_path / "second", **still))
    rows = load_checkpoint(tmp_path / "second" / "model_00001.pt")["model"]["lm_head.weight"]
    assert "Of the 1,000 tokens of small-gpt2, 257 are also of bytes" in said and len(rows) == 1024
    for i in range(1000):
        token = enc.decode_single_token_bytes(i)
        before = token[0] if len(token) == 1 else 256 if token == b"<|endoftext|>" else None
        expected = first.mean(0) if before is None else first[before]
        torch.testing.assert_close(rows[i], expected, rtol=0, atol=1e-6)
    for options in (
        dict(branch_from=tmp_path / "first", max_steps=24),
        dict(init_from=tmp_path / "first", max_steps=0),
    ):
        args = tiny_flags(tmp_path / "other", tmp_path / "third", vocab_size=1024, **options)
        [said] = run(train_changed, path, args, ends=[2])
        assert "have tokenizer small-gpt2, but the model uses bytes" in error_in(said)


PLATEAU = {
    '            group["lr"] = lr * group["initial_lr"] / config.max_lr\n': "            pass\n",
    "    scaler = torch.amp": "    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizers[0], patience=1)\n"
    '    own["plateau"] = plateau\n    scaler = torch.amp',
    "        mean = mean_over_folders(losses, parts)\n": "        mean = mean_over_folders(losses, parts)\n"
    '        parts.own["plateau"].step(100)\n',
}


def test_an_evaluation_that_counts_counts_once_where_a_run_goes_on(data, tmp_path):
    """As for a rate that falls if the validation loss does not: a checkpoint is of the moment before its evaluation."""
    path = changed_trainer(tmp_path / "train_gpt2.py", PLATEAU)
    run(train_changed, path, tiny_flags(data, tmp_path / "whole"))
    args = tiny_flags(data, tmp_path / "killed")
    run(in_changed, path, killed_at, 6, 4, args, ends=[KILLED])
    run(train_changed, path, args)
    assert log_lines(tmp_path / "killed") == log_lines(tmp_path / "whole")
    states = [load_checkpoint(tmp_path / name / "model_00012.pt")["own"] for name in ("whole", "killed")]
    assert states[0] == states[1] and states[0]["plateau"]["last_epoch"] == 4
    run(train_changed, path, tiny_flags(data, tmp_path / "branch", branch_from=tmp_path / "whole" / "model_00008.pt"))
    assert log_lines(tmp_path / "branch") == log_lines(tmp_path / "whole")
