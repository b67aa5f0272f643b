"""Training steps: the trainer's own with any of its settings changed, and other programs'."""

import contextlib
import dataclasses
import importlib.util
import sys
import tempfile
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch

import train_gpt2
from bench.measure import interleave, report, timed
from bench.model import BenchGPT, PlainAttention
from bench.profile import roofline
from plumbing import cli
from plumbing.cli import UserError
from plumbing.distributed import World, choose_dtype
from plumbing.fit import check_config
from train_gpt2 import PRESETS, GPTConfig, TrainConfig


@dataclass
class Settings(TrainConfig):
    """The trainer's settings, and experiments that no flag of the trainer reaches."""

    triton_loss: bool = False  # the loss with its gradient from a Triton kernel
    return_logits: bool = False  # the forward pass returns the logits, too
    bfloat16_residual: bool = True  # the residual stream in bfloat16 where the matmuls are; else in float32
    fused_adamw: bool = True  # AdamW as one kernel; else torch's default
    tf32: bool = True  # TF32 for float32 matmuls on a GPU
    plain_attention: bool = False  # attention written out, without a fused kernel


def make_settings(options, **changes):
    """The Settings that the flags describe; `changes` are defaults for what the flags leave out."""
    preset = options.preset or ("gpt2" if options.device.startswith("cuda") else "quickstart")
    if preset not in PRESETS:
        raise UserError(f"There is no preset called {preset!r}. {cli.suggest(preset, PRESETS)}")
    names = "batch_size sequence_length total_batch_size n_layer n_head n_embd vocab_size".split()
    given = {name: getattr(options, name) for name in names if getattr(options, name)}
    # every side has AdamW, because the references do
    changes = dict(dtype=options.dtype, device=options.device, optimizer="adamw") | changes | given
    config = dataclasses.replace(Settings(**dataclasses.asdict(PRESETS[preset])), **changes)
    micro_batch = config.batch_size * config.sequence_length
    if not options.total_batch_size:
        config.total_batch_size = max(1, config.total_batch_size // micro_batch) * micro_batch
    config.block_size = max(config.block_size, config.sequence_length)
    config.vocab_size = config.vocab_size or (320 if preset == "quickstart" else 50304)
    if config.compile is None:
        config.compile = config.device.startswith("cuda")
    check_config(config, 1)
    return config


def apply_variant(config, variant):
    """ "compile=False,batch_size=32" applied to Settings."""
    changed = cli.parse(Settings, [f"--{pair}" for pair in variant.split(",") if pair], default=config)
    check_config(changed, 1)
    return changed


def random_shards(folder, config, num_windows=256):
    """Write shards of random ids: the time of a step does not depend on the data."""
    size = max(num_windows, config.total_batch_size // config.sequence_length) * config.sequence_length + 1
    for split in ("val_000000", "train_000001"):
        ids = np.random.default_rng(0).integers(config.vocab_size, size=size).astype(np.uint16)
        np.save(Path(folder) / f"random_{split}.npy", ids)


class Side:
    """The common part of all sides: a call makes `steps` optimizer steps and returns the last one's loss."""

    def __init__(self, config):
        self.config, self.steps, self.step = config, 1, 0
        dtype, _ = choose_dtype(config.dtype, config.device, config.n_embd)
        self.world = World(device=config.device, dtype=dtype)

    def __call__(self):
        tf32 = self.config.tf32 and self.world.device_type == "cuda"
        torch.set_float32_matmul_precision("high" if tf32 else "highest")
        for _ in range(self.steps):
            loss = self.train_step()
            self.step += 1
        return loss


class Ours(Side):
    """The trainer's own parts, put together as in train_gpt2.train."""

    def __init__(self, config, folder):
        super().__init__(config)
        torch.manual_seed(0)
        shape = (config.block_size, config.vocab_size, config.n_layer, config.n_head, config.n_embd)
        self.raw_model = BenchGPT(GPTConfig(*shape), config.triton_loss, config.return_logits)
        for block in self.raw_model.transformer.h if config.plain_attention else ():
            block.attn.__class__ = PlainAttention  # keeps its weights
        self.model, self.B = train_gpt2.fit_to_machine(self.raw_model, config, self.world)
        if config.compile and self.model is self.raw_model:
            raise UserError("torch.compile failed, as the warning above says, so its speed cannot be measured.")
        if self.B < config.batch_size:
            raise UserError(f"Only {self.B} of {config.batch_size} sequences fit in memory. Try --batch-size {self.B}.")
        if not config.bfloat16_residual:
            self.raw_model.residual_dtype = torch.float32
        layout = dict(B=self.B, T=config.sequence_length, world=self.world, shuffle=config.shuffle)
        self.loader = train_gpt2.DataLoaderLite(folder, "train", **layout)
        self.optimizers = train_gpt2.configure_optimizers(self.raw_model, config)
        for group in () if config.fused_adamw else self.optimizers[-1].param_groups:
            group["fused"] = None
        self.scaler = torch.amp.GradScaler(self.world.device_type, enabled=self.world.dtype == torch.float16)

    def train_step(self):
        c = self.config
        train_gpt2.apply_schedules(self.optimizers, self.step, c)
        num_windows = c.total_batch_size // c.sequence_length
        state = self.optimizers, self.scaler, self.step, c, [], self.world
        return train_gpt2.train_step(self.model, self.loader, num_windows, *state)[0]


class Reference(Side):
    """Another implementation's model and optimizer in a plain training loop."""

    def __init__(self, config, folder, model, loss_of, optimizer):
        super().__init__(config)
        self.model, self.loss_of, self.optimizer, self.B = model.train(), loss_of, optimizer, config.batch_size
        tokens = torch.from_numpy(np.load(Path(folder) / "random_train_000001.npy").astype(np.int64))
        shape = (-1, config.batch_size, config.sequence_length)
        used = (len(tokens) - 1) // (shape[1] * shape[2]) * shape[1] * shape[2]
        self.batches = list(zip(tokens[:used].view(shape), tokens[1 : used + 1].view(shape)))

    def train_step(self):
        c, total = self.config, 0.0
        accumulation = c.total_batch_size // (c.batch_size * c.sequence_length)
        for micro_step in range(self.step * accumulation, (self.step + 1) * accumulation):
            x, y = (ids.to(c.device) for ids in self.batches[micro_step % len(self.batches)])
            with self.world.autocast():
                loss = self.loss_of(self.model, x, y) / accumulation
            loss.backward()
            total += loss.detach()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), c.grad_clip)
        for group in self.optimizer.param_groups:
            group["lr"] = train_gpt2.get_lr(self.step, c)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(total)


def transformers_model(shape):
    """transformers' GPT-2 of a GPTConfig's shape, without dropout."""
    import transformers  # takes seconds

    transformers.logging.set_verbosity_error()
    config = {name: getattr(shape, name) for name in ("vocab_size", "n_layer", "n_head", "n_embd")}
    config |= dict(n_positions=shape.block_size, use_cache=False, bos_token_id=0, eos_token_id=0)
    config |= dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0)
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**config))


def make_transformers(config, folder, fused=None):
    """transformers' GPT-2 with our settings and AdamW; fused=None: torch's default, which is not one kernel."""
    model = transformers_model(config).to(config.device)
    (optimizer,) = train_gpt2.configure_optimizers(model, config)
    for group in optimizer.param_groups:
        group["fused"] = fused
    model = torch.compile(model, dynamic=False) if config.compile else model
    # its loss shifts the labels itself
    return Reference(config, folder, model, lambda m, x, y: m(input_ids=x, labels=x).loss, optimizer)


def make_nanogpt(config, folder, checkout):
    """The GPT from a nanoGPT checkout, with its own optimizer configuration."""
    path = Path(checkout) / "model.py"
    if not path.exists():
        raise UserError(f"There is no model.py in {checkout}. Give the folder of a nanoGPT checkout with --peer.")
    spec = importlib.util.spec_from_file_location("nanogpt_model", path)
    module = sys.modules["nanogpt_model"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    shape = {name: getattr(config, name) for name in ("block_size", "vocab_size", "n_layer", "n_head", "n_embd")}
    with contextlib.redirect_stdout(None):
        model = module.GPT(module.GPTConfig(**shape, dropout=0.0, bias=True)).to(config.device)
        betas, device_type = (config.beta1, config.beta2), config.device.split(":")[0]
        optimizer = model.configure_optimizers(config.weight_decay, config.max_lr, betas, device_type)
    model = torch.compile(model) if config.compile else model
    return Reference(config, folder, model, lambda m, x, y: m(x, y)[1], optimizer)


# -----------------------------------------------------------------------------
# The benchmarks


def train(options):
    """Compare training steps on the same tokens, model shape, optimizer and precision."""
    config = make_settings(options)
    compiled = ", compiled" * config.compile
    builders = {
        "train_gpt2": partial(Ours, config),
        f"transformers{compiled}": partial(make_transformers, config),
        f"transformers{compiled}, fused AdamW": partial(make_transformers, config, fused=True),
    }
    if options.peer:
        builders[f"nanoGPT{compiled}"] = partial(make_nanogpt, config, checkout=options.peer)
    for variant in options.variants:
        builders[f"train_gpt2 {variant}"] = partial(Ours, apply_variant(config, variant))
    with tempfile.TemporaryDirectory() as folder:
        random_shards(folder, config)
        sides = {name: build(folder=folder) for name, build in builders.items()}
        ours = sides["train_gpt2"]
        steps = options.steps or max(1, round(0.5 / min(timed(ours, config.device)[0] for _ in range(3))))
        for side in sides.values():
            side.steps = steps
        print(f"{config.n_layer} layers, {config.n_head} heads, {config.n_embd} wide, B {ours.B}, {ours.world.dtype}")
        tokens, rounds = f"{config.total_batch_size:,} tokens a step", f"{cli.count(steps, 'step')} a round"
        print(f"T {config.sequence_length}, {tokens}, {rounds}")
        measured = interleave(sides, options.rounds, config.device)
        losses = {name: side["result"] for name, side in measured.items()}
        ours.steps = 1
        details = roofline(ours, np.median(measured["train_gpt2"]["seconds"]) / steps)
    tokens = {name: steps * side.config.total_batch_size for name, side in sides.items()}
    return report(options, measured, tokens, "tok", steps=steps, losses=losses, **details)


FLOAT32 = dict(dtype="float32", tf32=False, compile=False, plain_attention=True, vocab_size=50257)
FLOAT32 |= dict(fused_adamw=False, bfloat16_residual=False, return_logits=True)
RUNGS = {  # the changes, in the order of build-nanogpt's lecture; 50304 is the next multiple of 128
    "float32": {},
    "TF32": dict(tf32=True),
    "bfloat16 autocast": dict(dtype="bfloat16"),
    "torch.compile": dict(compile=True),
    "flash attention": dict(plain_attention=False),
    "vocabulary 50304": dict(vocab_size=50304),
    "fused AdamW": dict(fused_adamw=True),
    "this program": dict(bfloat16_residual=True, return_logits=False),
}


def make_rungs(options):
    """{rung: its Settings} for the rungs that exist on this device; each has the changes of those before it."""
    cuda = options.device.startswith("cuda")
    # the lecture's B of 16 on a GPU, a small GPT on a CPU
    shape = dict(batch_size=16) if cuda else dict(n_layer=4, n_head=6, n_embd=384, batch_size=1, sequence_length=512)
    config = make_settings(dataclasses.replace(options, preset="gpt2"), **FLOAT32 | shape)
    config.total_batch_size = config.batch_size * config.sequence_length
    has_bfloat16 = cuda or torch.cpu._is_avx512_bf16_supported()
    missing = ["TF32"] * (not cuda) + ["bfloat16 autocast"] * (not has_bfloat16)
    rungs = {}
    for name, change in RUNGS.items():
        if name not in missing:
            config = rungs[name] = dataclasses.replace(config, **change)
    if cuda:
        larger = dict(batch_size=64, total_batch_size=64 * config.sequence_length)
        rungs["this program, B 64"] = dataclasses.replace(config, **larger)
    return rungs


def ladder(options):
    """Measure what each optimization adds to the training step, on top of those before it."""
    settings, rungs = make_rungs(options), {}
    config = settings["float32"]
    print(f"{config.n_layer} layers, {config.n_head} heads, {config.n_embd} wide, T {config.sequence_length}")
    with tempfile.TemporaryDirectory() as folder:
        random_shards(folder, config)
        for name, setting in settings.items():
            print(f"preparing {name}", flush=True)  # compiling takes a minute
            try:
                rungs[name] = Ours(setting, folder)
            except UserError as error:  # its B does not fit
                print(f"{name}: {error}")
        measured = interleave(rungs, options.rounds, options.device)
    tokens = {name: rung.config.total_batch_size for name, rung in rungs.items()}
    losses = {name: side["result"] for name, side in measured.items()}
    return report(options, measured, tokens, "tok", ours=list(rungs)[-1], rungs=losses, tokens=tokens)
