"""Training steps of the trainer, with any of its settings changed, and of other programs."""

import contextlib
import dataclasses
import functools
import importlib
import itertools
import math
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

import train_gpt2
from bench.measure import matmul_rate, measure
from plumbing.cli import flags
from plumbing.cli.console import UserError
from plumbing.data.tokenizers import get_encoding
from plumbing.run.start import check_config
from plumbing.system.distributed import World
from plumbing.system.layout import Whole
from plumbing.system.trial import Trial
from train_gpt2 import GPT, PRESETS, CausalSelfAttention, DataLoaderLite, TrainConfig


@dataclass(frozen=True)
class Settings(TrainConfig):
    """The trainer's settings, and switches for what it always does: the ladder turns these off."""

    # the usual GPT: the residual stream in float32, and a loss from all logits at once
    usual_forward: bool = False
    fused_adamw: bool = True  # AdamW as one kernel; else torch's default
    tf32: bool = True  # TF32 for float32 matmuls on a GPU
    plain_attention: bool = False  # attention written out, without a fused kernel


def configure(options, changes="", defaults=""):
    """The Settings from `defaults`, then --settings, then `changes`: the later ones win."""
    is_gpu = options.device.startswith("cuda")
    preset = "quickstart" if options.what == "train" and not is_gpu else "gpt2"
    # every side has AdamW, because the references do
    settings = f"preset={preset},device={options.device},optimizer=adamw,{defaults},{options.settings},{changes}"
    words = [f"--{pair}" for pair in settings.split(",") if pair]
    presets = {name: Settings(**dataclasses.asdict(preset)) for name, preset in PRESETS.items()}
    config = flags.parse(Settings, words, presets=presets)
    vocab_size = config.vocab_size
    if not vocab_size:
        vocab_size = 320 if config.preset == "quickstart" else 50304
    config = dataclasses.replace(
        config,
        vocab_size=vocab_size,
        sequence_length=min(config.sequence_length, config.block_size),
        compile=is_gpu if config.compile is None else config.compile,
    )
    world = world_of(config)
    complaints = train_gpt2.complaints(config, {}, world)
    return check_config(config, {}, complaints, world=world, is_wide=config.n_embd >= 128)


def world_of(config):
    return World(device=torch.device(config.device))


def random_shard(folder, vocab_size):
    """Write a shard of random ids: the time of a step does not depend on the data."""
    ids = np.random.default_rng(0).integers(vocab_size, size=2**21).astype(np.uint16)
    np.save(Path(folder, "random_train_000001.npy"), ids)


def set_precision(config):
    is_gpu = config.device.startswith("cuda")
    torch.set_float32_matmul_precision("high" if config.tf32 and is_gpu else "highest")


def configure_optimizers(model, config):
    """The trainer's optimizers; without --fused-adamw, AdamW uses torch's default, which is not a single kernel."""
    optimizers = train_gpt2.configure_optimizers(model, config)
    train_gpt2.keep_peak_rates(optimizers)
    if not config.fused_adamw:
        for group in optimizers[-1].param_groups:
            group["fused"] = None
    return optimizers


class UsualGPT(GPT):
    """GPT with the residual stream in float32. It computes the loss from all logits at once, and returns them."""

    def hidden_states(self, idx, cache=None):
        x = self.transformer.wte(idx) + self.transformer.wpe.weight[: idx.size(1)]
        for block in self.transformer.h:
            x = block(x)
        return self.transformer.ln_f(x)

    def forward(self, idx, targets: Any = None, return_logits=True):
        logits = self.logits(self.hidden_states(idx))
        return logits, self.cross_entropy(logits.flatten(0, 1), targets.flatten()) / targets.numel()


class PlainAttention(CausalSelfAttention):
    """Attention without a fused kernel: it writes the T x T scores of each head to memory."""

    def forward(self, x, cache=None):
        B, T, C = x.shape
        qkv = self.c_attn(x).view(B, T, 3, self.n_head, C // self.n_head)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # (B, nh, T, hs) each
        scores = q @ k.mT / math.sqrt(k.size(-1))  # (B, nh, T, T)
        future = torch.ones(T, T, dtype=torch.bool, device=x.device).triu(1)
        y = scores.masked_fill(future, -math.inf).softmax(-1) @ v
        return self.c_proj(y.transpose(1, 2).reshape(B, T, C))


def batches(config, folder):
    return DataLoaderLite(folder, "train", config.batch_size, config.sequence_length, device=config.device)


def make_ours(config, folder):
    """Make a function that does a step as the trainer does, and returns the loss."""
    world = world_of(config)
    set_precision(config)  # compiled models are compiled again if it changes
    torch.manual_seed(0)
    raw_model = train_gpt2.make_gpt(config).to(config.device)
    if config.usual_forward:
        raw_model.__class__ = UsualGPT
    if config.plain_attention:
        for block in raw_model.transformer.h:
            block.attn.__class__ = PlainAttention  # keeps its weights
    optimizers = configure_optimizers(raw_model, config)
    layout = Whole(world)
    trial = Trial(
        raw_model,
        optimizers,
        make=train_gpt2.make_gpt,
        wrap=train_gpt2.wrap,
        autocast=train_gpt2.autocast,
        matmul_dtype=train_gpt2.matmul_dtype(config),
        num_ids=257,
        config=config,
        layout=layout,
    )
    found = layout.try_out(trial, lambda model: True)
    if config.compile and not found.compiled:
        raise UserError("torch.compile failed, as the warning above says, so its speed cannot be measured.")
    if found.B < config.batch_size:
        raise UserError(
            f"Only {found.B} of {config.batch_size} sequences fit in memory and divide a step. Change batch_size, "
            "sequence_length or total_batch_size in --settings or --variants."
        )
    scaler = torch.amp.GradScaler(world.device.type, enabled=config.dtype == "float16")
    parts = train_gpt2.Parts(
        config=config,
        world=world,
        layout=layout,
        raw_model=raw_model,
        model=found.model,
        optimizers=optimizers,
        scaler=scaler,
        loader=batches(config, folder),
        val_loaders=[],
        enc=get_encoding("bytes"),
        token_bytes=torch.zeros(0),
        examples=[],
        own={},
        flops_per_token=raw_model.flops_per_token(config.sequence_length),
        found=found,
    )
    steps = itertools.count()

    def step():
        set_precision(config)
        return train_gpt2.train_step(next(steps), parts, []).loss

    return step


def make_reference(config, folder, model, *, loss_of, optimizer):
    """Make a function that does a step of another model and optimizer in a plain loop, and returns the loss."""
    world = world_of(config)
    loader = batches(config, folder)
    steps = itertools.count()
    accumulation = config.total_batch_size // (config.batch_size * config.sequence_length)
    model.train()

    def step():
        set_precision(config)
        total = 0.0
        for _ in range(accumulation):
            x, y = loader.next_batch()
            with train_gpt2.autocast(config, world):
                loss = loss_of(model, x, y) / accumulation
            loss.backward()
            total += loss.detach()
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.grad_clip)
        lr = train_gpt2.get_lr(next(steps), config)
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.step()
        optimizer.zero_grad()
        return float(total)

    return step


def transformers_model(config):
    """transformers' GPT-2 of the same shape, without dropout."""
    import transformers  # takes seconds

    transformers.logging.set_verbosity_error()
    shape = vars(config.model_config) | dict(n_positions=config.block_size)
    shape |= dict(use_cache=False, bos_token_id=0, eos_token_id=0)
    shape |= dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0)
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**shape)).to(config.device)


def make_transformers(config, folder):
    """transformers' GPT-2 with our settings and AdamW."""
    model = transformers_model(config)
    (optimizer,) = configure_optimizers(model, config)
    if config.compile:
        model = torch.compile(model, dynamic=False)

    def loss_of(model, x, y):
        return model(input_ids=x, labels=x).loss  # it shifts the labels itself

    return make_reference(config, folder, model, loss_of=loss_of, optimizer=optimizer)


def make_nanogpt(config, folder, checkout):
    """The GPT of a nanoGPT checkout, with its own optimizer configuration."""
    sys.path.append(checkout)
    module = importlib.import_module("model")
    with contextlib.redirect_stdout(None):
        model = module.GPT(module.GPTConfig(**vars(config.model_config), dropout=0.0, bias=True))
        model = model.to(config.device)
        betas = (config.beta1, config.beta2)
        device_type = config.device.split(":")[0]
        optimizer = model.configure_optimizers(config.weight_decay, config.max_lr, betas, device_type)
    if config.compile:
        model = torch.compile(model)

    def loss_of(model, x, y):
        return model(x, y)[1]

    return make_reference(config, folder, model, loss_of=loss_of, optimizer=optimizer)


# ----- The benchmarks -----------------------------------------------------------------------------------


def compare(makers, rounds, ours):
    """Measure the sides, and the MFU of `ours`. makers: {name: (the function that makes a side, its Settings)}."""
    sides = {}
    work = {}
    with tempfile.TemporaryDirectory() as folder:
        random_shard(folder, min(config.vocab_size for _, config in makers.values()))
        for name, (make, config) in makers.items():
            print(f"preparing {name}", flush=True)  # compiling takes a minute
            sides[name] = make(config, folder)
            work[name] = config.total_batch_size
        numbers, losses = measure(sides, rounds, work, unit="tok", ours=ours)
    _, config = makers[ours]
    is_bfloat16 = config.device.startswith("cuda") or config.dtype == "bfloat16"
    peak = matmul_rate(config.device, torch.bfloat16 if is_bfloat16 else torch.float32)
    with torch.device("meta"):  # takes no memory
        flops = GPT(config.model_config).flops_per_token(config.sequence_length)
    mfu = flops * numbers["tok_per_s"] / peak  # in PaLM's convention
    print(f"MFU: {mfu:.1%} of the peak that matrix products reach on this machine")
    return numbers | dict(losses=losses, settings=dataclasses.asdict(config), peak=peak, mfu=mfu)


def train(options):
    """Compare training steps on the same tokens, model shape, optimizer and precision."""
    config = configure(options)
    makers: dict[str, Any] = {
        "train_gpt2": (make_ours, config),
        "transformers": (make_transformers, configure(options, "fused_adamw=False")),
        "transformers, fused AdamW": (make_transformers, config),
    }
    if options.peer:
        if not Path(options.peer, "model.py").exists():
            raise UserError(
                f"There is no model.py in {options.peer}. Give the folder of a nanoGPT checkout with --peer."
            )
        makers["nanoGPT"] = functools.partial(make_nanogpt, checkout=options.peer), config
    for variant in options.variants:
        makers[f"train_gpt2 {variant}"] = make_ours, configure(options, variant)
    return compare(makers, options.rounds, "train_gpt2")


RUNGS = {  # the changes, in the order of build-nanogpt's lecture; 50304 is the next multiple of 128
    "float32": "dtype=float32,tf32=False,compile=False,plain_attention=True,vocab_size=50257,fused_adamw=False"
    ",usual_forward=True",
    "TF32": "tf32=True",
    "bfloat16 autocast": "dtype=bfloat16",
    "torch.compile": "compile=True",
    "flash attention": "plain_attention=False",
    "vocabulary 50304": "vocab_size=50304",
    "fused AdamW": "fused_adamw=True",
    "this program": "usual_forward=False",
    "this program, B 64": "batch_size=64,total_batch_size=65536",
}


def ladder(options):
    """Measure what each optimization adds to the training step, on top of those before it."""
    defaults = "batch_size=16,total_batch_size=16384"  # the lecture's B
    rungs = dict(RUNGS)
    if not options.device.startswith("cuda"):
        defaults = "n_layer=4,n_head=6,n_embd=384,batch_size=1,sequence_length=512,total_batch_size=512"
        if "preset=" in options.settings:
            defaults = ""
        del rungs["TF32"], rungs["this program, B 64"]
        if not torch.cpu._is_avx512_bf16_supported():
            del rungs["bfloat16 autocast"]
    makers = {}
    changes = ""
    for name, change in rungs.items():
        changes += f",{change}"
        makers[name] = make_ours, configure(options, changes, defaults)
    return compare(makers, options.rounds, "this program")
