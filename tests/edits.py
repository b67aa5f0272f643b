"""Edits of train_gpt2.py as people make them, and how to run the edited file."""

import importlib.util
import re
import sys
from pathlib import Path

import train_gpt2
from plumbing.run.checkpoint import load_checkpoint

from harness import KILLED, ROOT, error_in, killed_at, log_lines, run, signalled, tiny_flags

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
POSITION_TABLES = """        positions = torch.arange(config.block_size)
        self.register_buffer("sines", positions[:, None].sin())
        self.register_buffer("causal", positions[:, None] >= positions)
"""
TABLES = {PROJECTIONS: POSITION_TABLES + PROJECTIONS}
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
BEFORE_GROUPS = "    betas = (config"
HIDDEN_STATES = "\n    def hidden_states("
SCALER = "    scaler = torch.amp"
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
    "a third group": {
        "    betas = (config": "    wte = model.transformer.wte.weight\n"
        "    groups[0]['params'] = [(n, p) for n, p in groups[0]['params'] if p is not wte]\n"
        "    groups.append({'params': [('wte', wte)], 'weight_decay': 0.0, 'lr': 3 * config.max_lr})\n"
        "    betas = (config"
    },
    "another optimizer and a shared block": {
        CONFIGURE: OPTIMIZER + CONFIGURE,
        ADAMW: "Normalized(groups, {'lr': config.max_lr})",
        BLOCKS: "nn.ModuleList([Block(config, 0)] * config.n_layer)",
    },
    "relu squared": {GELU: "self.c_proj(F.relu(self.c_fc(x)).square())"},
    "a soft cap, smoothing and a convolution": {
        RESIDUAL: CONVOLUTION + RESIDUAL,
        "return self.lm_head(x)": "return 2 * torch.tanh(self.lm_head(x) / 2)",
        'reduction="sum")': 'reduction="sum", label_smoothing=0.1 * self.training)',
    },
}


def write_trainer(path, edits):
    """Write train_gpt2.py with these edits to `path`, each of whose texts it has once."""
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


class Changed:
    """A trainer with some edits. Its runs are on tiny shards, each in processes of its own and in its folder."""

    def __init__(self, folder, data, edits, name="train_gpt2.py"):
        self.folder = folder
        self.data = data
        self.path = write_trainer(folder / name, edits)

    def flags(self, out, **options):
        return tiny_flags(self.data, self.folder / out, **options)

    def train(self, out="out", ranks=0, ends=None, **options):
        """Train, and return what is printed, by rank 0 if there are several."""
        said = run(train_changed, self.path, self.flags(out, **options), ranks=ranks, ends=ends)
        return said[0]

    def error(self, out="out", ranks=0, **options):
        """The error with which it refuses to train; it then has made no checkpoint."""
        said = self.train(out, ranks, ends=[2] * max(1, ranks), **options)
        assert not list(self.folder.glob(f"{out}/model_*"))
        return error_in(said)

    def kill(self, out, step=6, **options):
        """Train, and be killed in this step, when the checkpoint of step 4 is there."""
        run(in_changed, self.path, killed_at, step, 4, self.flags(out, **options), ends=[KILLED])

    def stop(self, out, **options):
        """Train, and be stopped after six steps, with a checkpoint of them."""
        run(in_changed, self.path, signalled, 5, "SIGTERM", 1, 0, self.flags(out, **options))

    def log(self, out):
        return log_lines(self.folder / out)

    def saved(self, out, step=12):
        return load_checkpoint(self.folder / out / f"model_{step:05d}.pt")

    def optimizer(self, out):
        """The state of the first optimizer at the end of a run."""
        return self.saved(out)["optimizer"][0]

    def check_resume(self, interrupt, **options):
        """A run that is interrupted, by `kill` or `stop`, and continued is the same. Returns what the other one says.

        Both are there afterwards, in the folders "resumed" and "whole".
        """
        said = self.train("whole", **options)
        interrupt("resumed", **options)
        self.train("resumed", **options)
        assert self.log("resumed") == self.log("whole")
        return said


PARTS = ("untied", "rotary", "a field and dropout", "a third group", "relu squared")
LIVES = {name: EDITS[name] for name in EDITS if name not in PARTS}
LIVES["untied and rotary"] = EDITS["untied"] | ROTARY
LIVES["weights written in the forward pass"] = {
    MLP_CALL: "        self.c_fc.weight.data.copy_(F.normalize(self.c_fc.weight.data, dim=1))\n"
    "        phases = torch.view_as_real(torch.view_as_complex(x.unflatten(-1, (-1, 2))) * self.phases).flatten(-2)\n"
    + MLP_CALL.replace("self.c_fc(x)", "self.c_fc(phases)"),
    PROJECTION: PROJECTION
    + '        self.register_buffer("phases", torch.polar(torch.ones(16), torch.arange(16.0)))\n',
}
LIVES["a field and a third group"] = EDITS["a field and dropout"] | EDITS["a third group"]
STILL_GPT2 = ("another optimizer and a shared block", "a field and a third group")
MASTER = """

class Master(torch.optim.Optimizer):
    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                if "master" not in self.state[p]:
                    self.state[p]["master"] = p.float()
                p.copy_(self.state[p]["master"].sub_(p.grad.float(), alpha=10 * group["lr"]))
"""
MASTER_WEIGHTS = {  # a layer in bfloat16, of which the optimizer keeps a copy in float32
    PROJECTION: PROJECTION + "        self.c_fc.bfloat16()\n",
    GELU: 'self.c_proj(F.gelu(self.c_fc(x.bfloat16()).float(), approximate="tanh"))',
    CONFIGURE: MASTER + CONFIGURE,
    ADAMW: "Master(groups, {'lr': config.max_lr})",
}
WITH_ACTIVATION = {  # a module beside the trainer; the file changes while torch is imported
    "import hellaswag\n": "import hellaswag\nimport my_activation\n",
    GELU: "self.c_proj(my_activation.of(self.c_fc(x)))",
    "import numpy as np\n": "import numpy as np\n\nif __name__ == '__main__':\n"
    "    open(__file__, 'a').write('# the next idea')\n",
}


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
NOTES = {  # {name: (the edit, a note before the first step)}
    "a tensor that is not saved": (
        {
            GELU: 'self.c_proj(F.gelu(self.c_fc(x) + self.shift, approximate="tanh"))',
            PROJECTION: PROJECTION + "        self.shift = torch.randn(4 * config.n_embd)\n",
        },
        "computes other logits, so a resumed run will not be the same",
    ),
    "no causality": ({"is_causal=T == S": "is_causal=False"}, "A token's logits depend on later tokens"),
    "positions from the end": ({POSITIONS: f"{POSITIONS}.flip(0).cumsum(0)"}, NO_CACHE),
    "one token behind a long text": ({POSITIONS: f"{POSITIONS} * (1 + (T == 1 and start > 3))"}, NO_CACHE),
    "a long text behind one token": ({POSITIONS: f"{POSITIONS} * (1 + (T > 4 and start > 0))"}, NO_CACHE),
    # a cache that is wrong for a few ids only, which the validation text need not have
    "places of digits": (PLACES, NO_CACHE),
    "documents": (DOCUMENTS, NO_CACHE),
    # which is nearly the cross-entropy in a new model, all of whose ids are equally likely
    "smoothing": (EDITS["untied"] | {'reduction="sum")': 'reduction="sum", label_smoothing=0.02)'}, NO_CROSS_ENTROPY),
    "a z-loss": (
        {
            "        return F.cross_entropy(logits.float()": "        z = logits.float().logsumexp(-1).square().sum()\n"
            "        return 1e-4 * z + F.cross_entropy(logits.float()"
        },
        NO_CROSS_ENTROPY,
    ),
}


LORA = {
    PROJECTION: PROJECTION + "        self.low = nn.Parameter(torch.empty(4, config.n_embd))\n"
    "        nn.init.normal_(self.low)\n        self.up = nn.Parameter(torch.zeros(config.n_embd, 4))\n",
    MLP_CALL: f"        return {GELU} + x @ self.low.T @ self.up.T\n",
    HIDDEN_STATES: """        for name, p in self.named_parameters():
            p.requires_grad_(name.endswith(("low", "up")))

    def load_state_dict(self, weights, strict=True):
        return super().load_state_dict(weights, strict=False)

    def hidden_states(""",
}


def edits_of(diff):
    """{text in train_gpt2.py: what takes its place} of a diff's hunks."""
    changes = {}
    for hunk in re.split("(?m)^@@.*\n", diff)[1:]:
        before = re.sub(r"(?m)^\+.*\n|^[ -]", "", hunk)
        changes[before] = re.sub(r"(?m)^-.*\n|^[ +]", "", hunk)
    return changes


def recipe(words):
    """The edits of the first diff after these words in records/README.md."""
    text = (ROOT / "records" / "README.md").read_text(encoding="utf-8").split(words)[1]
    return edits_of(text.split("```diff\n")[1].split("```")[0])


STEPS = "    for optimizer in optimizers:\n        if not overflow:"
HIDDEN = {
    "\n\ndef train_step(": "\n\nPULLS = [0]\n\n\ndef train_step(",
    STEPS: "    PULLS[0] += 1\n    for p in parts.model.parameters():\n        p.grad *= 1 + PULLS[0]\n" + STEPS,
}


SECOND_LIVES = {  # {what a start changes: (the edit, which loss shows it)}
    "a count": (HIDDEN, "train loss of step [57]"),
    "weights that setup makes": (
        {SCALER: "    nn.init.zeros_(raw_model.transformer.h[0].mlp.c_proj.weight)\n" + SCALER},
        "train loss of step 6",
    ),
    "an attribute that validation reads": (
        {
            "        return self.lm_head(x)\n": "        scale = 1 if self.training else getattr(self, 'scale', 1)\n"
            "        return self.lm_head(x) * scale\n",
            STEPS: "    parts.raw_model.scale = 1.1\n" + STEPS,
        },
        "val loss of step 4",
    ),
}
STOPPED_IN_VALIDATION = {
    "            losses = [evaluate_val_loss(": "            if step == 8 and run.start_step == 0 and config.resume:\n"
    "                os.kill(os.getpid(), 15)\n            losses = [evaluate_val_loss(",
}


PLATEAU = {
    '            group["lr"] = lr * group["initial_lr"] / config.max_lr\n': "            pass\n",
    SCALER: "    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizers[0], patience=1)\n"
    '    own["plateau"] = plateau\n    scaler = torch.amp',
    "        mean = mean_over_folders(losses, parts)\n": "        mean = mean_over_folders(losses, parts)\n"
    '        parts.own["plateau"].step(100)\n',
}


# AdamW whose weights go halfway back to slow ones every fourth step: the slow weights and the count are its own
LOOKAHEAD = """

class Lookahead(torch.optim.AdamW):
    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.count = 0
        self.slow = [p.detach().clone() for p in self.parameters()]

    def parameters(self):
        return sum((group["params"] for group in self.param_groups), [])

    def step(self):
        super().step()
        self.count += 1
        if self.count % 4 == 0:
            with torch.no_grad():
                for slow, p in zip(self.slow, self.parameters()):
                    p.copy_(slow.lerp_(p, 0.5))

    def state_dict(self):
        return super().state_dict() | {"count": self.count, "slow": self.slow}

    def load_state_dict(self, state):
        super().load_state_dict(state)
        self.count = state["count"]
        self.slow = state["slow"]
"""
# an optimizer of no torch class, which keeps another one's state inside of its own
INSIDE = """

class Inside:
    def __init__(self, inner):
        self.inner = inner
        self.param_groups = inner.param_groups
        self.pulls = torch.zeros(())

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
# a factor on the rate that grows with the steps, kept in the groups, as Prodigy's d and schedule-free's weights are.
# There are a number of NumPy's, one that is NaN before the first step, and tensors in a list
GROWING = """

class Growing(torch.optim.AdamW):
    def step(self):
        for group in self.param_groups:
            group["d"] *= 1.1
            group["k"] += 1
            group["nan"] = 1.0 if group["nan"] != group["nan"] else group["nan"] + 1
            group["sums"] = [tensor + group["d"] for tensor in group["sums"]]
            group["lr"] *= group["d"] * (1 + 1 / group["k"]) * (group["sums"][0].item() + group["nan"])
        super().step()
"""


def adamw_as(name, source):
    """AdamW replaced by the class of this name, which `source` defines."""
    return {CONFIGURE: source + CONFIGURE, ADAMW: ADAMW.replace("torch.optim.AdamW", name)}


OPTIMIZERS = {
    "Lookahead": adamw_as("Lookahead", LOOKAHEAD),
    "Inside": {CONFIGURE: INSIDE + CONFIGURE, ADAMW: f"Inside({ADAMW})"},
    "Growing": adamw_as("Growing", GROWING)
    | {
        BEFORE_GROUPS: "    for group in groups:\n"
        "        group |= dict(d=1.0, k=np.int64(0), nan=float('nan'), sums=[torch.zeros(()), torch.zeros(3)])\n"
        + BEFORE_GROUPS
    },
}
