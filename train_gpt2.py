"""Train GPT-2 from scratch: one file, read it from top to bottom.

    python train_gpt2.py --preset quickstart                      # a laptop: three minutes, no network
    python fineweb.py                                             # then the real thing, GPT-2 124M:
    torchrun --standalone --nproc_per_node=8 train_gpt2.py        # on 8 GPUs (on one: python train_gpt2.py)

Every flag is a field of `TrainConfig`; --preset chooses the defaults. A run lives in --out-dir: log.txt
(`step stream value` per line), run.txt (what was run, where), model_<step>.pt (checkpoints) and, when it
has ended, hf/ (the model as Hugging Face transformers reads it). The same command again continues a run
that was stopped, killed or crashed, on any number of GPUs, as if nothing had happened.

Sources: GPT-2 (Radford et al. 2019) for the model, GPT-3 (Brown et al. 2020, table 2.1 and appendix B) for
the hyperparameters that GPT-2's paper leaves out, Muon (Jordan et al. 2024) for the speedrun's optimizer.
"""

import contextlib
import dataclasses
import datetime
import gc
import itertools
import json
import math
import os
import pickle
import platform
import shutil
import signal
import subprocess
import sys
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from plumbing import cli  # before torch: it says how OpenMP's threads wait

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.utils.checkpoint
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

import hellaswag
import tokenizer
from plumbing.cli import UserError
from plumbing.huggingface import MATRICES, export_huggingface, load_huggingface
from plumbing.shards import find_shards, open_mask, open_tokens

# ----------------------------------------------------------------------------------------------------------
# Configuration


@dataclass
class TrainConfig:
    """Train GPT-2 from scratch. Each --preset sets its own defaults for the flags below."""

    preset: str = "gpt2"  # gpt2, gpt2-medium, gpt2-large, gpt2-xl, speedrun, quickstart or chat
    # the run
    data: str = "edu_fineweb10B"  # folder of token shards, as fineweb.py writes them
    out_dir: str = "log"  # where the run lives
    init_from: str = ""  # start from these weights: a GPT-2 name, a Hugging Face folder, a checkpoint or run
    resume: bool = True  # continue the run in out_dir; --no-resume sets it aside and starts afresh
    seed: int = 1337  # of the initial weights, the data order and the samples
    device: str = "auto"  # cpu, cuda or mps; auto takes the best there is
    # of activations, weights stay float32; fp8 is bfloat16 but for the output layer's matmuls
    dtype: Literal["auto", "float32", "bfloat16", "float16", "fp8"] = "auto"
    compile: bool = field(default_factory=torch.cuda.is_available)  # torch.compile the model
    # the model: GPT-2 124M
    n_layer: int = 12  # blocks
    n_head: int = 12  # attention heads per block
    n_embd: int = 768  # channels of the residual stream
    block_size: int = 1024  # longest sequence: the number of position embeddings
    vocab_size: int = 0  # rows of the embedding; 0: the tokenizer's, rounded up to a multiple of 64
    activation_checkpointing: bool = False  # recompute activations in the backward pass: less memory, slower
    # the batch: total_batch_size = batch_size * sequence_length * ranks * gradient accumulation steps
    batch_size: int = 64  # B, sequences per rank and micro-step: as many as fit, the losses don't depend on it
    sequence_length: int = 1024  # T, tokens per sequence
    total_batch_size: int = 2**19  # tokens per step over all ranks: GPT-3's 0.5M
    batch_ramp: int = 0  # tokens over which the batch grows linearly from 32K to full (GPT-3: 4e9); 0: none
    shuffle: bool = True  # visit the training windows in a seeded random order; --no-shuffle: in file order
    # the schedule
    max_steps: int = 19073  # 10B tokens / 0.5M per step: one epoch of FineWeb-Edu 10B
    warmup_steps: int = 715  # GPT-3's 375M tokens / 0.5M per step
    max_lr: float = 6e-4  # peak learning rate: GPT-3 Small's
    min_lr: float = 6e-5  # a tenth of the peak, where the cosine ends
    schedule: Literal["cosine", "wsd"] = "cosine"  # wsd: warm up, stay, decay linearly to zero
    decay_fraction: float = 0.7  # wsd: the share of max_steps that decays
    # the optimizer
    optimizer: Literal["adamw", "muon"] = "adamw"  # muon: for the blocks' matrices, AdamW for the rest
    weight_decay: float = 0.1  # on tensors with 2 or more dimensions
    beta1: float = 0.9  # AdamW's decay of the mean gradient
    beta2: float = 0.95  # AdamW's decay of the mean squared gradient
    grad_clip: float = 1.0  # largest norm of the gradient
    muon_lr: float = 0.02  # muon's peak learning rate; it follows the same schedule
    muon_momentum: float = 0.95  # reached over the first 300 steps, from 0.85
    muon_momentum_cooldown: float = 0.0  # the share of max_steps at the end in which it goes back to 0.85
    muon_weight_decay: float = 0.01  # on muon's matrices
    # evaluation and output; 0 switches an -every off, all happen after the last step too
    val_every: int = 250  # steps between validations
    val_tokens: int = 10 * 2**20  # of the validation split, the same tokens each time
    hellaswag_every: int = 250  # steps between HellaSwag scores
    hellaswag_limit: int = 0  # examples to score; 0: all
    hellaswag_data: str = "hellaswag/hellaswag_val.jsonl"  # downloaded if it is not there
    sample_every: int = 250  # steps between samples
    sample_prompt: str = "Hello, I'm a language model,"  # what the samples continue
    checkpoint_every: int = 500  # steps between checkpoints
    keep_checkpoints: int = 2  # the newest ones stay


# GPT-2's four sizes with GPT-3's learning rates; B is for 80 GB and is halved where it doesn't fit
PRESETS = {
    "gpt2": TrainConfig(),
    "gpt2-medium": TrainConfig(
        preset="gpt2-medium", n_layer=24, n_head=16, n_embd=1024, batch_size=32, max_lr=3e-4, min_lr=3e-5
    ),
    "gpt2-large": TrainConfig(
        preset="gpt2-large", n_layer=36, n_head=20, n_embd=1280, batch_size=16, max_lr=2.5e-4, min_lr=2.5e-5
    ),
    "gpt2-xl": TrainConfig(
        preset="gpt2-xl", n_layer=48, n_head=25, n_embd=1600, batch_size=8, max_lr=2e-4, min_lr=2e-5
    ),
    # the architecture of gpt2 in half of its tokens: see records/2026-11-20-speedrun-ablation. Muon's rate and weight
    # decay are the tuned ones of modded-nanogpt's optimizer benchmark: see records/2026-11-21-speedrun-sweep
    "speedrun": TrainConfig(
        preset="speedrun", optimizer="muon", muon_lr=0.025, muon_weight_decay=0.05, schedule="wsd",
        max_steps=9536, warmup_steps=250, max_lr=1.8e-3,
    ),
    "quickstart": TrainConfig(
        preset="quickstart", data="python_docs", out_dir="log/quickstart", compile=False,
        n_layer=4, n_head=4, n_embd=128, block_size=128, sequence_length=128, batch_size=16,
        total_batch_size=2048, max_steps=400, warmup_steps=20, max_lr=4e-3, min_lr=4e-4,
        optimizer="muon", muon_lr=0.04, schedule="wsd", val_every=100, val_tokens=2**15, hellaswag_every=0,
        sample_every=200, sample_prompt="The ", checkpoint_every=200,
    ),
    # fine-tune a trained model (--init-from) on conversations, which smoltalk.py makes into shards
    "chat": TrainConfig(
        preset="chat", data="smoltalk", out_dir="log/chat", batch_size=32, total_batch_size=2**17,
        max_steps=3000, warmup_steps=100, max_lr=1e-4, min_lr=1e-5, hellaswag_every=0,
    ),
}  # fmt: skip

# what may differ between two stretches of one run: nothing here changes what the model learns
FREE_TO_CHANGE = {
    "out_dir", "resume", "device", "compile", "activation_checkpointing", "batch_size", "data",
    "val_every", "hellaswag_every", "hellaswag_limit", "hellaswag_data", "sample_every", "sample_prompt",
    "checkpoint_every", "keep_checkpoints",
}  # fmt: skip


def parse_args(args=None):
    """The TrainConfig of a command line: the preset's defaults, then one flag per field."""
    args = sys.argv[1:] if args is None else list(args)
    preset = "gpt2"
    for flag, value in zip(args, args[1:] + [""]):
        if flag.split("=")[0] == "--preset":
            preset = flag.split("=")[1] if "=" in flag else value
    if preset not in PRESETS:
        raise UserError(f"got --preset {preset}, needed one that exists, {cli.suggest(preset, PRESETS)}")
    return cli.parse(TrainConfig, args, default=PRESETS[preset])


def check_config(config, world_size):
    """Raise one UserError with everything that is wrong with `config` on `world_size` ranks."""
    wrong = []
    positive = "n_layer n_head n_embd block_size batch_size sequence_length total_batch_size max_steps max_lr"
    for name, value in dataclasses.asdict(config).items():
        if name in [*positive.split(), "val_tokens", "keep_checkpoints"] and not 0 < value < math.inf:
            wrong.append(f"got {name} {value}, needed more than 0")
        elif isinstance(value, (int, float)) and not 0 <= value < math.inf:
            wrong.append(f"got {name} {value}, needed 0 or more")

    # what is wrong already must not keep the rest from being checked: nothing is divided by 0 here
    B, T, n_head = (max(1, number) for number in (config.batch_size, config.sequence_length, config.n_head))
    total = config.total_batch_size
    if config.n_embd % n_head:
        nearest = n_head * max(1, round(config.n_embd / n_head))
        wrong.append(f"got n_embd {config.n_embd}, needed a multiple of n_head {n_head}, try --n-embd {nearest}")
    if T > config.block_size:
        wrong.append(f"got sequence_length {T}, needed at most the block size {config.block_size}, raise --block-size")
    micro_batch = B * T * world_size
    if total % micro_batch:
        nearest = micro_batch * max(1, round(total / micro_batch))
        wrong.append(
            f"got total_batch_size {total}, needed a multiple of batch_size {B} * sequence_length {T} * {world_size} "
            f"ranks = {micro_batch}, try --total-batch-size {nearest}"
        )
    if config.batch_ramp and (total % 2**15 or 2**15 % (T * world_size)):
        wrong.append(f"got a batch_ramp, needed T * ranks, {T * world_size}, to divide 32768, and that {total}")
    if config.dtype == "fp8" and (T % 16 or config.n_embd % 16 or config.vocab_size % 16):
        wrong.append("got dtype fp8, needed sequence_length, n_embd and vocab_size to be multiples of 16")
    if config.val_tokens < T:
        wrong.append(f"got val_tokens {config.val_tokens}, needed at least one sequence of {T}")
    if config.decay_fraction > 1:
        wrong.append(f"got decay_fraction {config.decay_fraction}, needed a share of max_steps from 0 to 1")
    if config.muon_momentum_cooldown > 1:
        share = config.muon_momentum_cooldown
        wrong.append(f"got muon_momentum_cooldown {share}, needed a share of max_steps from 0 to 1")
    if wrong:
        raise UserError("; ".join(wrong))


# ----------------------------------------------------------------------------------------------------------
# Model


@dataclass
class GPTConfig:
    """The five numbers that make a GPT-2."""

    block_size: int = 1024  # longest sequence
    vocab_size: int = 50304  # 50,257 tokens padded to a multiple of 128: even tiles for the largest matmul
    n_layer: int = 12
    n_head: int = 12
    n_embd: int = 768


class CausalSelfAttention(nn.Module):
    """Multi-head attention over the past (Vaswani et al. 2017, section 3.2).

    Shapes: B sequences, T tokens, C channels = nh heads * hs channels each; S >= T tokens to attend to.
    """

    def __init__(self, config):
        super().__init__()
        self.n_head = config.n_head
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd)  # query, key, value in one matmul
        self.c_proj = nn.Linear(config.n_embd, config.n_embd)

    def forward(self, x, attn_mask=None, cache=None):
        B, T, C = x.shape
        q, k, v = self.c_attn(x).split(C, dim=2)
        # (B, nh, T, hs) each
        q, k, v = (part.view(B, T, self.n_head, C // self.n_head).transpose(1, 2) for part in (q, k, v))
        if cache is not None:
            k, v = cache.append(self, k, v)  # (B, nh, S, hs)
        # subtle: with a cache T is 1 (the newest token sees all) or S (the prompt: plain causal)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=attn_mask, is_causal=attn_mask is None and T > 1)
        return self.c_proj(y.transpose(1, 2).reshape(B, T, C))


class MLP(nn.Module):
    """Two layers, four times as wide in between, with GPT-2's tanh approximation of GELU."""

    def __init__(self, config):
        super().__init__()
        self.c_fc = nn.Linear(config.n_embd, 4 * config.n_embd)
        self.c_proj = nn.Linear(4 * config.n_embd, config.n_embd)

    def forward(self, x):
        return self.c_proj(F.gelu(self.c_fc(x), approximate="tanh"))


class Block(nn.Module):
    """Pre-norm residual block: GPT-2 moved LayerNorm to the input of each part."""

    def __init__(self, config):
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.n_embd)
        self.attn = CausalSelfAttention(config)
        self.ln_2 = nn.LayerNorm(config.n_embd)
        self.mlp = MLP(config)

    def forward(self, x, attn_mask=None, cache=None):
        x = x + self.attn(self.ln_1(x), attn_mask, cache)
        return x + self.mlp(self.ln_2(x))


def to_float8(tensor, dtype):
    """The tensor in an 8-bit dtype, its largest value at the end of the range, and the scale to multiply it with."""
    scale = tensor.abs().amax().float().clamp(min=1e-12) / torch.finfo(dtype).max
    return (tensor / scale).to(dtype), scale


class Float8Matmul(torch.autograd.Function):
    """x (N, C) @ w (V, C).T in 8-bit floats, whose matmuls run at twice bfloat16's rate (Hopper, Ada, and newer).

    Four bits of exponent and three of mantissa for x and w, five and two for the gradient, which spans more
    (Micikevicius et al. 2022). N, C and V must be multiples of 16.
    """

    @staticmethod
    def forward(ctx, x, w):
        x, x_scale = to_float8(x, torch.float8_e4m3fn)
        w, w_scale = to_float8(w, torch.float8_e4m3fn)
        ctx.save_for_backward(x, x_scale, w, w_scale)
        return torch._scaled_mm(x, w.T, x_scale, w_scale, out_dtype=torch.bfloat16, use_fast_accum=True)

    @staticmethod
    def backward(ctx, grad):
        x, x_scale, w, w_scale = ctx.saved_tensors
        grad, scale = to_float8(grad, torch.float8_e5m2)
        # the hardware wants rows of the first operand and columns of the second in one piece
        grad_x = torch._scaled_mm(grad, w.T.contiguous().T, scale, w_scale, out_dtype=torch.bfloat16)
        grad_w = torch._scaled_mm(grad.T.contiguous(), x.T.contiguous().T, scale, x_scale, out_dtype=torch.float32)
        return grad_x, grad_w


class KVCache:
    """Keys and values of the tokens so far, for generating one token at a time.

    Room for `max_len` tokens of `batch_size` sequences; `length` tokens are in.
    """

    def __init__(self, model, batch_size, max_len):
        self.length = 0
        self.room = (batch_size, model.config.n_head, max_len, model.config.n_embd // model.config.n_head)
        self.keys_values = {}  # attention layer -> two tensors (B, nh, max_len, hs)

    def append(self, layer, k, v):
        """Store k, v (B, nh, T, hs) of one layer behind those of the past; return both with their past."""
        assert self.length == 0 or k.size(2) == 1, "a prompt at once, then token by token: the mask is right for these"
        if layer not in self.keys_values:
            self.keys_values[layer] = k.new_empty(self.room), v.new_empty(self.room)
        end = self.length + k.size(2)
        for store, new in zip(self.keys_values[layer], (k, v)):
            store[:, :, self.length : end] = new
        return [store[:, :, :end] for store in self.keys_values[layer]]


@contextlib.contextmanager
def without_cudnn_attention():
    """For what comes in many shapes: cuDNN would build a kernel for each of them."""
    enabled = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(enabled)


IGNORE = -100  # a target that is no target: cross_entropy's default


class GPT(nn.Module):
    """GPT-2 with the names of OpenAI's checkpoint, so that weights go in and out key by key."""

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.activation_checkpointing = False
        self.residual_dtype = torch.float32  # of the stream between the blocks
        self.float8_head = False  # whether a loss, in training or validation, comes from logits of 8 bits
        self.transformer = nn.ModuleDict(
            dict(
                wte=nn.Embedding(config.vocab_size, config.n_embd),
                wpe=nn.Embedding(config.block_size, config.n_embd),
                h=nn.ModuleList(Block(config) for _ in range(config.n_layer)),
                ln_f=nn.LayerNorm(config.n_embd),
            )
        )
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        self.lm_head.weight = self.transformer.wte.weight  # one matrix reads and writes tokens

        # GPT-2's initialisation; its positions had std 0.01, the field settled on 0.02 for both embeddings
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(parameter)
            elif name.endswith("c_proj.weight"):
                # 2 * n_layer projections add up in the residual stream: keep its variance (GPT-2, section 2.3)
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * config.n_layer))
            elif parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)

    def hidden_states(self, idx, pos=None, attn_mask=None, cache=None):
        """Token ids (B, T) to the last layer's hidden states (B, T, C), after the final norm.

        pos: position ids (B, T), default 0, 1, 2, ...; attn_mask: (B, 1, T, T), True where a token may look,
        default causal; cache: a KVCache, idx then continues what is in it.
        """
        if pos is None:
            start = cache.length if cache else 0
            pos = torch.arange(start, start + idx.size(1), device=idx.device)
        x = (self.transformer.wte(idx) + self.transformer.wpe(pos)).to(self.residual_dtype)  # (B, T, C)
        for block in self.transformer.h:
            if self.activation_checkpointing and torch.is_grad_enabled():
                x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)
            else:
                x = block(x, attn_mask, cache)
        if cache:
            cache.length += idx.size(1)
        return self.transformer.ln_f(x)

    def forward(self, idx, targets=None, return_logits=True):
        """Token ids (B, T) to (logits, loss): logits (B, T, vocabulary), loss the mean over the targets.

        Targets (B, T) that are IGNORE don't count. return_logits=False leaves the logits out (None): whoever
        only wants the loss then never has them written to memory.
        """
        x = self.hidden_states(idx)
        if targets is None:
            return self.lm_head(x), None
        if self.float8_head:
            logits = Float8Matmul.apply(x.flatten(0, 1), self.lm_head.weight).view(*idx.shape, -1)
        else:
            logits = self.lm_head(x)
        # in float32: a bfloat16 loss near 11 knows steps of 0.06 only. The count may be 0, hence no mean
        loss = F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), reduction="sum", ignore_index=IGNORE)
        loss = loss / (targets != IGNORE).sum().clamp(min=1)
        return logits if return_logits else None, loss

    @torch.no_grad()
    def generate(self, idx, max_new_tokens, vocab_size, temperature=1.0, top_k=0, top_p=1.0, generator=None):
        """Continue the token ids (B, T): yield one (B,) tensor of next ids at a time.

        temperature 0 is greedy; top_k > 0 keeps the k likeliest ids, top_p < 1 the likeliest that together
        have that probability (Holtzman et al. 2020). Ids from vocab_size on, the padding of the vocabulary,
        are never chosen. Beyond the block size the model sees the last block_size tokens.
        """
        block_size = self.config.block_size
        cache = KVCache(self, idx.size(0), min(block_size, idx.size(1) + max_new_tokens))
        for _ in range(max_new_tokens):
            with without_cudnn_attention():  # each token sees one key more than the last
                if idx.size(1) <= block_size:
                    x = self.hidden_states(idx[:, cache.length :], cache=cache)
                else:  # every token has moved to another position: nothing cached is right any more
                    x = self.hidden_states(idx[:, -block_size:])
            logits = self.lm_head(x[:, -1])[:, :vocab_size].float()  # (B, vocab_size)
            if temperature == 0:
                next_ids = logits.argmax(-1)
            else:
                logits /= temperature
                if top_k:
                    kth = logits.topk(min(top_k, vocab_size)).values[:, -1:]
                    logits[logits < kth] = -math.inf
                probs = logits.softmax(-1)
                if top_p < 1:
                    ordered, order = probs.sort(descending=True)
                    probs.scatter_(1, order, ordered.where(ordered.cumsum(1) - ordered < top_p, 0))
                next_ids = torch.multinomial(probs, 1, generator=generator)[:, 0]
            idx = torch.cat([idx, next_ids[:, None]], 1)
            yield next_ids

    def resize(self, block_size, vocab_size):
        """Cut the positions to at most block_size and fill the vocabulary up to at least vocab_size rows.

        New rows are the mean of the old: a row of zeros would have logit 0, far above what a trained model
        gives to most tokens.
        """
        wte, wpe = self.transformer.wte, self.transformer.wpe
        block_size, vocab_size = min(block_size, self.config.block_size), max(vocab_size, self.config.vocab_size)
        new_rows = wte.weight.mean(0).expand(vocab_size - len(wte.weight), -1)
        self.lm_head.weight = wte.weight = nn.Parameter(torch.cat([wte.weight, new_rows]).detach())
        wpe.weight = nn.Parameter(wpe.weight[:block_size].detach().clone())
        wte.num_embeddings = self.lm_head.out_features = vocab_size
        wpe.num_embeddings = block_size
        self.config = dataclasses.replace(self.config, block_size=block_size, vocab_size=vocab_size)

    @classmethod
    def from_pretrained(cls, name_or_directory):
        """The GPT with the weights of a GPT-2 on the hub (gpt2, gpt2-xl, ...) or in a Hugging Face folder."""
        shape, weights = load_huggingface(name_or_directory)
        model = cls(GPTConfig(**shape))
        model.load_state_dict(weights)
        return model


# ----------------------------------------------------------------------------------------------------------
# Data


def permute(index, n, keys):
    """Where a seeded random permutation of range(n) sends each number of the array `index`.

    Computed, not stored: a Feistel network over the next power of four permutes whatever its round function
    (Luby and Rackoff 1988); what lands outside range(n) goes through again until it is inside (cycle walking).
    keys: one uint64 per round.
    """
    half = np.uint64(max(1, (n - 1).bit_length() + 1 >> 1))
    mask = np.uint64((1 << int(half)) - 1)
    index = index.astype(np.uint64)
    outside = np.ones(len(index), bool)
    while outside.any():
        left, right = index[outside] >> half, index[outside] & mask
        for key in keys:
            mixed = (right + key) * np.uint64(0x9E3779B97F4A7C15)  # Fibonacci hashing: the high bits are well mixed
            mixed = (mixed ^ mixed >> np.uint64(29)) * np.uint64(0xBF58476D1CE4E5B9) >> np.uint64(32)
            left, right = right, left ^ (mixed & mask)
        index[outside] = left << half | right
        outside = index >= n
    return index.astype(np.int64)


class DataLoaderLite:
    """Batches of token windows, the same for any B and any number of ranks.

    The shards of a split are cut into windows of T tokens at multiples of T (a shard's tail shorter than T is
    not used). One global order visits all windows, epoch after epoch: file order, or a permutation by seed and
    epoch. A call takes the next B * world_size windows of that order, rank r the B at r * B: whatever the
    layout, a step consumes the same windows, and one number, `position`, says how far the run has read.
    """

    def __init__(self, folder, split, B, T, rank=0, world_size=1, seed=0, shuffle=False, device="cpu"):
        self.B, self.T, self.rank, self.world_size = B, T, rank, world_size
        self.seed, self.shuffle, self.device = seed, shuffle, device
        self.paths = find_shards(folder, split)
        self.shards = [open_tokens(path) for path in self.paths]
        masks = [path.with_suffix(".mask") for path in self.paths]
        masked = any(path.exists() for path in masks)
        self.masks = [open_mask(path, len(shard)) for path, shard in zip(masks, self.shards)] if masked else None
        windows = [max(0, len(shard) - 1) // T for shard in self.shards]  # a window has T targets, so T + 1 tokens
        self.first_window = np.cumsum([0, *windows])  # of each shard
        self.num_windows = int(self.first_window[-1])
        if not self.num_windows:
            raise UserError(f"got only shards shorter than T + 1 = {T + 1} in {folder}, needed more text")
        self.position = 0  # in windows of the global order
        self.reader, self.ahead = ThreadPoolExecutor(1), {}  # (position, B) -> the batch that is being read for it

    def locate(self, positions):
        """Positions of the global order to (shard numbers, offsets of the windows' first tokens)."""
        epochs, windows = np.divmod(positions, self.num_windows)
        if self.shuffle:
            for epoch in np.unique(epochs):
                keys = np.random.SeedSequence([self.seed, int(epoch)]).generate_state(4, np.uint64)
                here = epochs == epoch
                windows[here] = permute(windows[here], self.num_windows, keys)
        shards = np.searchsorted(self.first_window, windows, side="right") - 1
        return shards, (windows - self.first_window[shards]) * self.T

    def gather(self, arrays, positions):
        """The T + 1 entries of each window at `positions`: (len(positions), T + 1)."""
        rows = zip(*self.locate(positions))
        return np.stack([arrays[shard][offset : offset + self.T + 1] for shard, offset in rows])

    def read(self, position, B):
        """This rank's batch at `position` on the host: [tokens (B, T + 1)], and their mask where there is one."""
        positions = position + self.rank * B + np.arange(B)
        batch = [self.gather(self.shards, positions)]
        if self.masks:
            batch.append(self.gather(self.masks, positions))
        batch = [torch.from_numpy(rows) for rows in batch]
        # from pinned memory the copy to the GPU runs while the GPU computes
        return [rows.pin_memory() for rows in batch] if self.device.startswith("cuda") else batch

    def next_batch(self):
        """x, y of shape (B, T), int64 on the device: y is x moved on by one, IGNORE where the mask is 0."""
        wanted = self.position, self.B
        batch = (self.ahead.get(wanted) or self.reader.submit(self.read, *wanted)).result()
        self.position += self.B * self.world_size
        following = self.position, self.B
        self.ahead = {following: self.reader.submit(self.read, *following)}  # while the device works on this one
        # ids travel as uint16 and are widened on the device: a quarter of the bytes
        tokens, *mask = [rows.to(self.device, non_blocking=True) for rows in batch]
        x, y = tokens[:, :-1].long(), tokens[:, 1:].long()
        return (x, y.masked_fill(mask[0][:, 1:] == 0, IGNORE)) if mask else (x, y)

    def count_targets(self, num_windows):
        """How many targets the next num_windows windows of the global order hold, over all ranks."""
        if not self.masks:
            return num_windows * self.T
        return max(1, int(self.gather(self.masks, self.position + np.arange(num_windows))[:, 1:].sum()))

    def check_ids(self, enc):
        """Raise UserError where a shard can't be of this tokenizer: 128M ids are looked at, in all shards alike."""
        for path, tokens in zip(self.paths, self.shards):
            largest = int(tokens[: 2**27 // len(self.paths)].max(initial=0))
            if largest >= enc.n_vocab:
                needed = f"ids under {enc.n_vocab}, the vocabulary of tokenizer {enc.name}, make the shards with that"
                raise UserError(f"got token id {largest} in {path}, needed {needed}")

    def state_dict(self):
        return {"position": self.position, "num_windows": self.num_windows, "T": self.T}

    def load_state_dict(self, state):
        got = {"num_windows": self.num_windows, "T": self.T}
        if any(state[name] != value for name, value in got.items()):
            raise UserError(f"got data of {got}, needed those of the run, {state}, name its folder by --data")
        self.position = state["position"]


# ----------------------------------------------------------------------------------------------------------
# Schedules


def get_lr(step, config):
    """The learning rate of a step, in three phases: linear warm-up, then cosine, or constant and linear."""
    # 1) up to max_lr; step 0 already learns
    if step < config.warmup_steps:
        return config.max_lr * (step + 1) / config.warmup_steps
    # 2) nothing below the end of the schedule
    if step >= config.max_steps:
        return config.min_lr if config.schedule == "cosine" else 0.0
    if config.schedule == "wsd":
        # 3a) constant, then down to zero over the last decay_fraction of the run (Hu et al. 2024, section 4)
        decay_steps = max(1, config.decay_fraction * config.max_steps)
        return config.max_lr * min(1.0, (config.max_steps - step) / decay_steps)
    # 3b) half a cosine from max_lr to min_lr
    progress = (step - config.warmup_steps) / (config.max_steps - config.warmup_steps)
    return config.min_lr + 0.5 * (1 + math.cos(math.pi * progress)) * (config.max_lr - config.min_lr)


def get_batch_size(tokens_seen, config):
    """Tokens of the next step: total_batch_size, or on the way to it, linearly in steps of 32K (GPT-3, 2.3)."""
    if tokens_seen >= config.batch_ramp:
        return config.total_batch_size
    grown = config.total_batch_size * tokens_seen / config.batch_ramp
    return max(1, int(grown / 2**15)) * 2**15


# ----------------------------------------------------------------------------------------------------------
# Optimizer


@torch.no_grad()
def orthogonalize(G):
    """Matrices (n, rows, cols) to about the nearest orthogonal ones: all singular values near 1.

    Five steps of a Newton-Schulz iteration whose quintic is tuned for speed, not for accuracy (Jordan et al.
    2024). bfloat16 suffices on GPUs; CPUs keep float32.
    """
    X = G.to(torch.bfloat16) if G.is_cuda else G
    tall = G.size(1) > G.size(2)
    X = X.mT if tall else X  # the Gram matrix of the short side
    X = X / (X.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(5):
        A = X @ X.mT
        A = torch.baddbmm(A, A, A, beta=-4.7750, alpha=2.0315)  # -4.7750 A + 2.0315 A A
        X = torch.baddbmm(X, A, X, beta=3.4445)  # 3.4445 X + A X
    return X.mT if tall else X


class Muon(torch.optim.Optimizer):
    """Momentum whose update is orthogonalized (Jordan et al. 2024), for the matrices inside the blocks.

    Not for embeddings, the output layer or vectors. A parameter group holds matrices of one shape, which are
    orthogonalized as one batch, divided over the ranks; `split` says how many matrices each stacks (3 for the
    fused query, key and value).
    """

    def __init__(self, groups, lr, momentum, weight_decay):
        super().__init__(groups, dict(lr=lr, momentum=momentum, weight_decay=weight_decay, split=1))

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            params = group["params"]
            for p in params:
                if "momentum" not in self.state[p]:
                    self.state[p]["momentum"] = torch.zeros_like(p)
            grads = [p.grad for p in params]
            momenta = [self.state[p]["momentum"] for p in params]
            torch._foreach_lerp_(momenta, grads, 1 - group["momentum"])
            updates = torch._foreach_lerp(grads, momenta, group["momentum"])  # Nesterov's look ahead
            rows, cols = params[0].size(0) // group["split"], params[0].size(1)
            updates = self.orthogonalize_over_ranks(torch.stack(updates).view(-1, rows, cols)).float()
            lr = group["lr"] * max(1, rows / cols) ** 0.5  # so that tall and square matrices move their outputs alike
            torch._foreach_mul_(params, 1 - group["lr"] * group["weight_decay"])
            torch._foreach_add_(params, list(updates.view(len(params), -1, cols)), alpha=-lr)

    @staticmethod
    def orthogonalize_over_ranks(matrices):
        if not dist.is_initialized():
            return orthogonalize(matrices)
        rank, world_size = dist.get_rank(), dist.get_world_size()
        share = math.ceil(len(matrices) / world_size)
        padded = F.pad(matrices, (0, 0, 0, 0, 0, share * world_size - len(matrices)))
        mine = orthogonalize(padded[rank * share : (rank + 1) * share]).contiguous()
        everyones = mine.new_empty(padded.shape)
        dist.all_gather(list(everyones.chunk(world_size)), mine)
        return everyones[: len(matrices)]


def configure_optimizers(model, config, device_type):
    """The optimizers of a run, in a list: AdamW, or Muon for the blocks' matrices and AdamW for the rest.

    Each parameter group has `peak_lr`: its learning rate where the schedule is at its peak.
    """
    parameters = dict(model.named_parameters())  # tied weights once
    optimizers = []
    if config.optimizer == "muon":
        groups = []
        for name in MATRICES:  # of a block
            matrices = [parameters.pop(n) for n in list(parameters) if n.endswith(name)]
            groups.append({"params": matrices, "split": 3 if "c_attn" in name else 1, "peak_lr": config.muon_lr})
        optimizers.append(Muon(groups, config.muon_lr, config.muon_momentum, config.muon_weight_decay))
    # matrices and embeddings decay, biases and norms don't
    groups = [
        {"params": [p for p in parameters.values() if p.dim() >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters.values() if p.dim() < 2], "weight_decay": 0.0},
    ]
    for group in groups:
        group["peak_lr"] = config.max_lr
    betas, fused = (config.beta1, config.beta2), device_type in ("cuda", "cpu")
    optimizers.append(torch.optim.AdamW(groups, lr=config.max_lr, betas=betas, eps=1e-8, fused=fused))
    return optimizers


def get_momentum(step, config):
    """Muon's momentum at a step: it starts at 0.85, and can return there while the learning rate nears zero."""
    share = min(1.0, step / 300)  # momentum averages few gradients at first, so start it lower
    cooldown_steps, steps_left = config.muon_momentum_cooldown * config.max_steps, config.max_steps - step
    if 0 <= steps_left < cooldown_steps:
        share = min(share, steps_left / cooldown_steps)
    return 0.85 + (config.muon_momentum - 0.85) * share


def set_schedules(optimizers, step, config):
    """Set what changes from step to step in the optimizers; return the learning rate."""
    lr = get_lr(step, config)
    for group in (group for optimizer in optimizers for group in optimizer.param_groups):
        group["lr"] = lr * group["peak_lr"] / config.max_lr
        if "momentum" in group:
            group["momentum"] = get_momentum(step, config)
    return lr


# ----------------------------------------------------------------------------------------------------------
# Distributed


@dataclass(frozen=True)
class Distributed:
    """This process among those of the run; torchrun says so in the environment."""

    rank: int
    local_rank: int
    world_size: int
    device: str  # cpu, mps or cuda:<local_rank>
    dtype: torch.dtype  # of activations

    @property
    def is_master(self):
        return self.rank == 0

    @property
    def device_type(self):
        return self.device.split(":")[0]

    def autocast(self):
        """The context in which matmuls and attention compute in dtype; the weights stay float32."""
        return torch.autocast(self.device_type, self.dtype, enabled=self.dtype != torch.float32)

    def no_sync(self, model):
        """The context in which forward and backward pass leave each rank its own gradients."""
        return model.no_sync() if self.world_size > 1 else contextlib.nullcontext()

    def sum(self, tensor):
        """Sum over the ranks, in place. A mean is this over world_size: gloo knows no average."""
        if self.world_size > 1:
            dist.all_reduce(tensor)
        return tensor

    def any(self, flag):
        """Whether `flag` is true on any rank: what all ranks must do alike is decided with this."""
        return bool(self.sum(torch.tensor(float(bool(flag)), device=self.device)))

    def on_master(self, action, *args):
        """What action(*args) returns on rank 0, on every rank; a UserError there is raised everywhere."""
        outcome = [None, None]
        if self.is_master:
            try:
                outcome[0] = action(*args)
            except UserError as error:
                outcome[1] = error
        if self.world_size > 1:
            dist.broadcast_object_list(outcome)
        if outcome[1]:
            raise outcome[1]
        return outcome[0]


def choose_device(config):
    """The device type of --device, or the best there is. Raises UserError where this machine lacks it."""
    here = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    device = next(d for d in here if here[d]) if config.device == "auto" else config.device
    if device.split(":")[0] not in here:
        raise UserError(f"got --device {device}, needed one that exists, {cli.suggest(device, here)}")
    if not here[device.split(":")[0]]:
        raise UserError(f"got --device {device}, needed one of this machine: {', '.join(d for d in here if here[d])}")
    return device


def choose_dtype(config, device_type):
    """The torch dtype of --dtype, or what the device does well at this size."""
    if config.dtype != "auto":
        if config.dtype == "bfloat16" and device_type == "cuda" and not torch.cuda.is_bf16_supported(False):
            raise UserError("got --dtype bfloat16, needed a GPU that has it (Ampere or newer), try --dtype float16")
        if config.dtype == "fp8":
            if device_type == "mps" or device_type == "cuda" and torch.cuda.get_device_capability() < (8, 9):
                raise UserError("got --dtype fp8, needed a GPU that has it (Ada, Hopper, newer), try --dtype bfloat16")
            return torch.bfloat16
        return getattr(torch, config.dtype)
    if device_type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported(including_emulation=False) else torch.float16
    # a CPU with instructions for bfloat16 gains from them where matrices are large
    if device_type == "cpu" and config.n_embd >= 512 and torch.cpu._is_avx512_bf16_supported():
        return torch.bfloat16
    return torch.float32


def open_store(rank, world_size):
    """Where the ranks find each other, made anew by rank 0 each time that they start.

    torchrun's own store outlives a restart, and then leads ranks to peers that are dead (pytorch issue 135712).
    """
    shared, host = next(dist.rendezvous("env://"))[0], os.environ["MASTER_ADDR"]
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return shared  # started by something else: rank 0 has just made this one
    if rank == 0:
        store = dist.TCPStore(host, 0, world_size, is_master=True, wait_for_workers=False)
        shared.set("port", str(store.port))
        return store
    while True:  # until rank 0 has written its port: at one from before a restart nobody listens
        with contextlib.suppress(dist.DistNetworkError):
            patience = datetime.timedelta(seconds=2)
            store = dist.TCPStore(host, int(shared.get("port")), world_size, timeout=patience, wait_for_workers=False)
            store.set_timeout(datetime.timedelta(minutes=30))
            return store


def setup_distributed(config):
    """Join the processes that torchrun started, or stand alone; check what this rank needs."""
    rank, local_rank, world_size = (int(os.environ.get(name, d)) for name, d in
                                    [("RANK", 0), ("LOCAL_RANK", 0), ("WORLD_SIZE", 1)])  # fmt: skip
    device = choose_device(config)
    dtype = choose_dtype(config, device.split(":")[0])
    local_ranks, gpus = int(os.environ.get("LOCAL_WORLD_SIZE", 1)), torch.cuda.device_count()
    if device == "cuda" and local_ranks > gpus:
        needed = "a GPU for each, lower --nproc_per_node"
        raise UserError(f"got {local_ranks} ranks on a machine of {gpus} GPUs, needed {needed}")
    if device == "cuda":
        device = f"cuda:{local_rank}"
    if device.startswith("cuda"):
        torch.cuda.set_device(device)
    if "RANK" in os.environ:
        backend, store = "nccl" if device.startswith("cuda") else "gloo", open_store(rank, world_size)
        dist.init_process_group(backend, store=store, rank=rank, world_size=world_size)
    return Distributed(rank, local_rank, world_size, device, dtype)


def leave_distributed():
    """Leave the processes that setup_distributed joined, if any."""
    if dist.is_initialized():
        # subtle: gloo's thread takes the interpreter's lock to let go of its last tensor; whoever destroys the group
        # holds that lock and waits for the thread. Asleep, this thread lets it have the lock first
        time.sleep(0.1)
        dist.destroy_process_group()


def print0(*args):
    """Print on rank 0."""
    if os.environ.get("RANK", "0") == "0":
        print(*args, flush=True)


# ----------------------------------------------------------------------------------------------------------
# Evaluation


def evaluate_val_loss(model, loader, num_windows, ddp):
    """The mean loss over the first num_windows windows of the validation split, on all ranks.

    Gradients stay switched on, though none are taken: the graph that was compiled for training then serves here.
    """
    loader.position = 0
    sums = torch.zeros(2, device=ddp.device)  # loss, targets
    for first in range(0, num_windows, loader.B * ddp.world_size):
        x, y = loader.next_batch()
        # the last batch is as large as the others, and compiled for it: rows past the end just don't count
        y[max(0, num_windows - first - ddp.rank * loader.B) :] = IGNORE
        with ddp.autocast():
            loss = model(x, y, return_logits=False)[1].detach()  # lets go of the activations
        targets = (y != IGNORE).sum()
        sums += torch.stack([loss * targets, targets])
    loss, targets = ddp.sum(sums).tolist()
    return loss / targets


def load_hellaswag(config, enc):
    """HellaSwag's examples as tokens; fetched, if they are not there, now and not in the middle of a run."""
    if not Path(config.hellaswag_data).exists():
        hellaswag.download(config.hellaswag_data)
    examples = itertools.islice(hellaswag.iterate_examples(config.hellaswag_data), config.hellaswag_limit or None)
    return [hellaswag.render_example(example, enc) for example in examples]


def evaluate_hellaswag(raw_model, examples, enc, ddp):
    """HellaSwag's counts over all ranks, each of which scores its share of the rendered examples."""
    with ddp.autocast(), without_cudnn_attention():
        counts = hellaswag.evaluate(raw_model, examples, enc.n_vocab, rank=ddp.rank, world_size=ddp.world_size)
    totals = ddp.sum(torch.tensor(counts, device=ddp.device))
    return hellaswag.Counts(*totals.tolist())


def print_samples(raw_model, enc, config, step, ddp):
    """Print four continuations of the prompt. Their own generator leaves training's random state alone."""
    generator = torch.Generator(device=ddp.device).manual_seed(config.seed)
    prompt = torch.tensor([enc.encode_ordinary(config.sample_prompt) or [enc.eot_token]] * 4, device=ddp.device)
    with ddp.autocast():
        rows = torch.stack(list(raw_model.generate(prompt, 64, enc.n_vocab, top_k=50, generator=generator)), 1)
    for row in rows.tolist():
        print(f"step {step:5d} | sample | {config.sample_prompt + enc.decode(row)!r}", flush=True)


# ----------------------------------------------------------------------------------------------------------
# Checkpoints and logs


def to_cpu(state):
    """A copy on the CPU of the tensors in nested dicts and lists: what training does next can't change it."""
    if isinstance(state, torch.Tensor):
        return state.detach().to("cpu", copy=True)
    if isinstance(state, dict):
        return {name: to_cpu(value) for name, value in state.items()}
    return [to_cpu(value) for value in state] if isinstance(state, (list, tuple)) else state


def training_state(raw_model, optimizers, scaler, loader):
    """What a run needs to go on as if it had never stopped: `restore_state` takes it, and the model its weights."""
    return {
        "model": raw_model.state_dict(),
        "optimizer": [optimizer.state_dict() for optimizer in optimizers],
        "scaler": scaler.state_dict(),
        "loader": loader.state_dict(),
        "rng": torch.get_rng_state(),
    }


def restore_state(checkpoint, optimizers, scaler, loader):
    """Put back what `training_state` took; the weights come with `model_from_checkpoint`."""
    for optimizer, state in zip(optimizers, checkpoint["optimizer"]):
        optimizer.load_state_dict(state)
    scaler.load_state_dict(checkpoint["scaler"])
    loader.load_state_dict(checkpoint["loader"])
    torch.set_rng_state(checkpoint["rng"])


def list_checkpoints(folder):
    """The paths of a folder's checkpoints, oldest first."""
    paths = [path for path in Path(folder).glob("model_*.pt") if path.stem.removeprefix("model_").isdigit()]
    return sorted(paths, key=lambda path: int(path.stem.removeprefix("model_")))


def write_checkpoint(path, checkpoint, keep):
    """Write a checkpoint so that it is whole or not there, then delete all but the newest `keep`.

    What has a later step is damaged: the run has gone on from before it.
    """
    try:
        with cli.atomic_write(path) as file:
            torch.save(checkpoint, file)
    except RuntimeError as error:  # how torch's writer reports a write that failed
        raise UserError(f"got '{error}' while writing {path}, needed room, make some and run the same command again")
    paths = list_checkpoints(path.parent)
    newest = paths.index(path)
    for unwanted in paths[: max(0, newest + 1 - keep)] + paths[newest + 1 :]:
        unwanted.unlink()


class CheckpointWriter:
    """Writes checkpoints while training goes on: the copy takes the loop's time, the disk does not."""

    def __init__(self, out_dir, keep):
        self.out_dir, self.keep = Path(out_dir), keep
        self.thread, self.writing = ThreadPoolExecutor(1), None
        self.seconds = 0.0  # of the loop's time spent here

    def write(self, checkpoint):
        start = time.perf_counter()
        self.wait()
        checkpoint = to_cpu(checkpoint)
        # the tied weights are one tensor in the file, too
        checkpoint["model"]["lm_head.weight"] = checkpoint["model"]["transformer.wte.weight"]
        path = self.out_dir / f"model_{checkpoint['step']:05d}.pt"
        self.writing = self.thread.submit(write_checkpoint, path, checkpoint, self.keep)
        self.seconds += time.perf_counter() - start

    def wait(self):
        """Until the checkpoint is on disk; raises what went wrong there."""
        if self.writing:
            self.writing.result()
            self.writing = None


def load_checkpoint(path):
    """A checkpoint's dict, on the CPU. Loads tensors and plain data only: no file can run code."""
    try:
        with warnings.catch_warnings(action="ignore"):  # about the pickle protocol of what is no checkpoint
            checkpoint = torch.load(path, map_location="cpu", weights_only=True)
        missing = {"model", "optimizer", "config", "step", "loader", "tokenizer_file"} - set(checkpoint)
        missing |= {f.name for f in dataclasses.fields(GPTConfig)} - set(checkpoint.get("config", ()))
    except pickle.UnpicklingError:
        raise UserError(f"got {path}, which is no checkpoint or holds code, needed one of train_gpt2.py, take another")
    except (OSError, RuntimeError, EOFError, ValueError, TypeError, AttributeError) as error:
        reason = str(error).splitlines()[0] if str(error) else "empty"
        raise UserError(f"got {path}, which does not load ({reason}), needed a whole checkpoint, take another")
    if missing:
        raise UserError(f"got {path} without {', '.join(sorted(missing))}, needed a checkpoint of train_gpt2.py")
    return checkpoint


def newest_checkpoint(folder):
    """The newest whole checkpoint of a folder, as a dict, or None. Says which damaged ones it skips."""
    paths = list_checkpoints(folder)
    for path in reversed(paths):
        try:
            return load_checkpoint(path)
        except UserError as error:
            print(f"skipping a damaged checkpoint: {error}", flush=True)
    if paths:
        raise UserError(f"got no whole checkpoint in {folder}, needed one, start afresh with --no-resume")
    return None


def model_from_checkpoint(checkpoint):
    """The GPT and the tokenizer of a checkpoint's dict."""
    shape = {f.name: checkpoint["config"][f.name] for f in dataclasses.fields(GPTConfig)}
    model = GPT(GPTConfig(**shape))
    try:
        model.load_state_dict(checkpoint["model"])
    except RuntimeError as error:
        reason = str(error).splitlines()[1].strip()
        raise UserError(f"got a checkpoint with weights of another shape ({reason}), needed those of {shape}")
    return model, tokenizer.loads(checkpoint["tokenizer_file"])


def load_model(source):
    """(GPT, tokenizer) of a GPT-2 name, a Hugging Face folder, a checkpoint, or a run's folder (its newest)."""
    path = Path(source)
    openai = ("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl")
    if path.is_file():
        return model_from_checkpoint(load_checkpoint(path))
    if (path / "config.json").exists() or source in openai:
        trained = path / "tokenizer.tiktoken"  # export_huggingface leaves it there
        return GPT.from_pretrained(source), tokenizer.get_encoding(str(trained) if trained.exists() else "gpt2")
    checkpoint = newest_checkpoint(path)
    if checkpoint is None:
        kinds = "a checkpoint, the folder of a run or of a model in Hugging Face format"
        raise UserError(f"got {source}, needed {kinds}, or a GPT-2, {cli.suggest(source, openai)}")
    return model_from_checkpoint(checkpoint)


def describe_run(config):
    """What run.txt records of a start: command, configuration, versions, machine, commit."""
    git = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=40"]
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    lines = {
        "started": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
        "command": " ".join(sys.argv),
        "config": json.dumps(dataclasses.asdict(config)),
        "versions": f"python {platform.python_version()}, torch {torch.__version__}, numpy {np.__version__}",
        "machine": f"{platform.platform()}, {os.cpu_count()} cores, {', '.join(gpus) or 'no GPU'}",
        "ranks": os.environ.get("WORLD_SIZE", "1"),
        "commit": subprocess.run(git, capture_output=True, text=True).stdout.strip() if shutil.which("git") else "",
    }
    return "".join(f"{name}: {text}\n" for name, text in lines.items()) + "\n"


def find_run(config):
    """The newest whole checkpoint of the run that out_dir holds, or None where there is nothing to go on with.

    Refuses a folder that holds a different run, naming what differs. Changes nothing.
    """
    out_dir, remedy = Path(config.out_dir), "choose another --out-dir, or --no-resume to set that aside"
    if not config.resume or not out_dir.exists():
        return None
    if (out_dir / "run.txt").exists():
        lines = (out_dir / "run.txt").read_text().splitlines()
        try:
            old = json.loads(next(line for line in lines if line.startswith("config: ")).removeprefix("config: "))
        except (StopIteration, ValueError):
            raise UserError(f"got {out_dir / 'run.txt'} without the run's config, needed this run, {remedy}") from None
        new = {name: value for name, value in dataclasses.asdict(config).items() if name not in FREE_TO_CHANGE}
        different = [f"{name} {old.get(name)} there, {new[name]} here" for name in new if new[name] != old.get(name)]
        if different:
            raise UserError(f"got {out_dir} with a different run ({', '.join(different)}), needed this run, {remedy}")
    elif any(out_dir.glob("model_*.pt")) or (out_dir / "log.txt").exists():
        raise UserError(f"got {out_dir} with some other program's log or checkpoints, needed this run, {remedy}")
    return newest_checkpoint(out_dir)


def start_run(config):
    """Make out_dir the folder of this run, an old run set aside if so asked, and note the start in run.txt."""
    out_dir = Path(config.out_dir)
    try:
        if not config.resume and out_dir.exists() and any(out_dir.iterdir()):
            aside = next(path for n in range(1, 10**6) if not (path := Path(f"{out_dir}.{n}")).exists())
            out_dir.rename(aside)
            print(f"the run that was in {out_dir} is now in {aside}", flush=True)
        out_dir.mkdir(parents=True, exist_ok=True)
        for leftover in out_dir.glob("*.part"):  # of a process killed while it wrote
            leftover.unlink() if leftover.is_file() else shutil.rmtree(leftover)
    except OSError as error:
        raise UserError(f"got '{error}' for the run's folder, needed one that may be written, choose another --out-dir")
    history = (out_dir / "run.txt").read_text() if (out_dir / "run.txt").exists() else ""
    with cli.atomic_write(out_dir / "run.txt", "w") as file:
        file.write(history + describe_run(config))


def open_log(out_dir, step):
    """log.txt open for appending, cut back to what came before `step`; a line torn by a crash goes too."""
    path = Path(out_dir) / "log.txt"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    with cli.atomic_write(path, "w") as file:
        file.writelines(line for line in lines if line.endswith("\n") and int(line.split()[0]) < step)
    return open(path, "a")


def report(log, step, text, streams):
    """Print a line about a step and log its `step stream value` lines, in one write. Rank 0 has the log."""
    if log is None:
        return
    try:
        print(f"step {step:5d} | {text}", flush=True)
        log.write("".join(f"{step} {stream} {value:.9g}\n" for stream, value in streams.items()))
        log.flush()
    except OSError as error:
        remedy = "make some and run the same command again: it goes on from the newest checkpoint"
        raise UserError(f"got '{error.strerror}' while writing {log.name}, needed room, {remedy}") from error


# ----------------------------------------------------------------------------------------------------------
# Training


# dense bf16 peaks in FLOP/s from the vendors' datasheets, by what the device's name contains
PEAK_FLOPS = {
    "B200": 2250e12, "H100 PCIe": 756e12, "H100": 989.4e12, "H200": 989.4e12, "GH200": 989.4e12, "A100": 312e12,
    "L40S": 362e12, "L4": 121e12, "A10G": 70e12, "4090": 165.2e12, "3090": 71e12, "V100": 125e12,
}  # fmt: skip


def flops_per_token(c, T):
    """Training FLOPs per token: 6 per weight of every matmul, and 12 * L * T * C for attention.

    The convention of PaLM (Chowdhery et al. 2022, appendix B): attention counts the full square of scores.
    """
    return 6 * (12 * c.n_layer * c.n_embd**2 + c.vocab_size * c.n_embd) + 12 * c.n_layer * T * c.n_embd


def estimate_memory(model, config, B, dtype):
    """Bytes that training takes: (weights, gradients, optimizer, activations at B * T tokens).

    Activations are what a block saves for its backward pass, per token and channel: two inputs of norms, and
    14 inputs of matmuls, attention and GELU (1 + 3 + 1 + 1 + 4 + 4); then the logits, their float32
    copy, its log-softmax and its gradient.
    """
    c, weights = model.config, sum(4 * p.numel() for p in model.parameters())
    matrices = 4 * 12 * c.n_layer * c.n_embd**2
    optimizer = 2 * weights - (matrices if config.optimizer == "muon" else 0)  # Muon keeps one number per weight
    size = dtype.itemsize  # of activations
    residual = 2 if dtype == torch.bfloat16 else 4
    block = (2 * residual + 14 * size) * c.n_embd
    blocks = c.n_layer * residual * c.n_embd + block if config.activation_checkpointing else c.n_layer * block
    logits = (2 * size if config.compile else 12 + 2 * (size % 4)) * c.vocab_size
    return weights, weights, optimizer, B * config.sequence_length * (blocks + logits)


def peak_flops(ddp):
    """The bf16 peak of all ranks in FLOP/s, or None where this device's is not known."""
    name = torch.cuda.get_device_name() if ddp.device_type == "cuda" else ""
    return next((peak * ddp.world_size for key, peak in PEAK_FLOPS.items() if key in name), None)


def is_due(step, every, max_steps):
    """Whether what happens every so many steps happens now: 0 is never, the last step always counts."""
    return every > 0 and (step % every == 0 or step == max_steps)


def train_step(model, loader, optimizers, scaler, num_windows, config, ddp):
    """One update from the next num_windows windows; (loss, gradient norm), the same on all ranks.

    The loss is the mean over all targets of the step, whatever micro-step or rank they fall on. Raises
    FloatingPointError, on all ranks and before the update, where the loss or the norm is not finite.
    """
    position, num_targets = loader.position, loader.count_targets(num_windows)
    grad_accum_steps = num_windows // (loader.B * ddp.world_size)
    losses = []
    for micro_step in range(grad_accum_steps):
        x, y = loader.next_batch()
        # gradients are summed over the ranks once, behind the last micro-step
        last = micro_step == grad_accum_steps - 1
        with contextlib.nullcontext() if last else ddp.no_sync(model):
            with ddp.autocast():
                _, loss = model(x, y, return_logits=False)
            # from the mean over these targets to their part in the mean over the step's; DDP will average
            # over the ranks, hence the world size
            loss = loss * ((y != IGNORE).sum() * ddp.world_size / num_targets)
            scaler.scale(loss).backward()
        losses.append(loss.detach())

    for optimizer in optimizers:
        scaler.unscale_(optimizer)
    norm = nn.utils.clip_grad_norm_(model.parameters(), config.grad_clip or math.inf)
    # the one wait for the device in a step
    loss, norm = torch.stack([ddp.sum(torch.stack(losses).sum()) / ddp.world_size, norm]).tolist()
    overflow = scaler.is_enabled() and scaler.get_scale() > 1  # float16: the scaler skips the step and scales less
    if not math.isfinite(loss) or not (math.isfinite(norm) or overflow):
        # a table of the micro-steps (rows) and ranks (columns) that went wrong reads in the global order
        bad = torch.zeros(grad_accum_steps, ddp.world_size, device=ddp.device)
        bad[:, ddp.rank] = (~torch.stack(losses).isfinite()).float()
        bad = ddp.sum(bad).flatten().cpu().numpy() > 0
        windows = position + np.arange(num_windows).reshape(-1, loader.B)[bad if bad.any() else ~bad].ravel()
        where = [f"{loader.paths[shard].name} token {offset}" for shard, offset in zip(*loader.locate(windows[:4]))]
        raise FloatingPointError(f"loss {loss}, gradient norm {norm} after windows at {', '.join(where)}, ...")
    for optimizer in optimizers:
        scaler.step(optimizer)
        optimizer.zero_grad(set_to_none=True)
    scaler.update()
    return loss, norm


def enable_fused_attention(enabled):
    """Whether this process's attention may use fused kernels; the plain one is always there."""
    torch.backends.cuda.enable_cudnn_sdp(enabled)
    torch.backends.cuda.enable_flash_sdp(enabled)
    torch.backends.cuda.enable_mem_efficient_sdp(enabled)


def fit_to_machine(raw_model, config, ddp):
    """Move the model to the device, try a micro-step, and step back from what this machine can't do.

    Out of memory: B is halved, which leaves the losses as they are. A compiler or an attention kernel that
    fails: one warning, and on without it. All ranks decide alike. Returns the model to train (compiled, and in DDP
    where there are several ranks) and B.
    """
    raw_model.to(ddp.device).activation_checkpointing = config.activation_checkpointing
    # subtle: autocast's embeddings are float32, and with them the whole residual stream: twice the traffic
    raw_model.residual_dtype = torch.bfloat16 if ddp.dtype == torch.bfloat16 else torch.float32
    raw_model.float8_head = config.dtype == "fp8"
    B, T, compiled, fused_attention = config.batch_size, config.sequence_length, config.compile, True
    while True:
        trouble = ""
        try:
            model = torch.compile(raw_model, dynamic=False) if compiled else raw_model
            if ddp.world_size > 1:
                # subtle: the compiler, which starts with the first call, finds DDP around it and cuts the graph where a
                # bucket of gradients is full: its sum over the ranks then runs beside the rest of the backward pass
                gpus = [ddp.local_rank] if ddp.device_type == "cuda" else None
                model = DDP(model, gpus, gradient_as_bucket_view=True)
            # the optimizer's state is not there yet, but will be: two numbers per weight
            reserved = [torch.empty_like(p) for p in raw_model.parameters() for _ in range(2)]
            x, y = torch.randint(raw_model.config.vocab_size, (2, B, T), device=ddp.device).unbind()
            with ddp.autocast(), ddp.no_sync(model):
                model(x, y, return_logits=False)[1].backward()
        except torch.OutOfMemoryError:
            trouble = "out of memory"
        except Exception as error:  # compilers fail in many ways. What is not theirs comes again, and is raised
            if not compiled and not fused_attention:
                raise
            trouble = f"{type(error).__name__}: {error}".splitlines()[0]
        x = y = reserved = None
        raw_model.zero_grad(set_to_none=True)
        if ddp.any(trouble == "out of memory"):
            model = None  # with it go DDP's buckets
            gc.collect()
            if ddp.device_type == "cuda":
                torch.cuda.empty_cache()
            if B == 1:
                raise UserError("got no memory for even one sequence, needed less, try --activation-checkpointing")
            windows = config.total_batch_size // (T * ddp.world_size)
            B = max(b for b in range(1, B // 2 + 1) if windows % b == 0)
            print0(f"out of memory: going on with --batch-size {B} and more accumulation, the losses stay the same")
        elif ddp.any(trouble) and compiled:
            print0(f"warning: going on without torch.compile, which failed: {trouble or 'on another rank'}")
            compiled = False
        elif ddp.any(trouble):
            print0(f"warning: going on without fused attention, as this failed: {trouble or 'on another rank'}")
            fused_attention = False
            enable_fused_attention(False)
        else:
            return model, B


def catch_signals():
    """A list to which SIGTERM and SIGINT are added, for the step to end first. A second SIGINT leaves at once."""
    received = []

    def remember(number, frame):
        if number == signal.SIGINT and signal.SIGINT in received:
            os._exit(128 + signal.SIGINT)
        received.append(number)

    signal.signal(signal.SIGTERM, remember)
    signal.signal(signal.SIGINT, remember)
    return received


def prepare(config, ddp):
    """The data, tokenizer, evaluation set and model of a run: fetched, checked, nothing written to out_dir.

    Returns train_loader, val_loader, enc, examples, raw_model, checkpoint (None for a new run).
    """
    T = config.sequence_length
    if config.preset == "quickstart" and config.data == PRESETS["quickstart"].data:
        import fineweb  # only this preset makes its own data; what is there already stays

        ddp.on_master(fineweb.prepare, fineweb.Options(dataset="python-docs", tokenizer="bytes", out_dir=config.data))
    layout = dict(B=config.batch_size, T=T, rank=ddp.rank, world_size=ddp.world_size, device=ddp.device)
    train_loader = DataLoaderLite(config.data, "train", **layout, seed=config.seed, shuffle=config.shuffle)
    val_loader = DataLoaderLite(config.data, "val", **layout)
    if train_loader.num_windows * T < config.total_batch_size:
        got = f"{train_loader.num_windows * T} training tokens in {config.data}"
        raise UserError(f"got {got}, needed a step's {config.total_batch_size}, lower --total-batch-size or add shards")
    enc = tokenizer.folder_encoding(config.data)
    train_loader.check_ids(enc)
    val_loader.check_ids(enc)

    examples = ddp.on_master(load_hellaswag, config, enc) if config.hellaswag_every else []

    checkpoint = ddp.on_master(find_run, config)
    # 50,257 tokens become 50,304 rows: even tiles for the largest matmul
    padded_vocab_size = math.ceil(enc.n_vocab / 64) * 64
    if checkpoint:
        raw_model, model_enc = model_from_checkpoint(checkpoint)
    elif config.init_from:
        raw_model, model_enc = ddp.on_master(load_model, config.init_from)
        raw_model.resize(config.block_size, max(config.vocab_size, padded_vocab_size))
        if T > raw_model.config.block_size:
            limit = f"{raw_model.config.block_size}, the block size of {config.init_from}"
            raise UserError(f"got sequence_length {T}, needed at most {limit}, lower --sequence-length")
    else:
        vocab_size = config.vocab_size or padded_vocab_size
        raw_model = GPT(GPTConfig(config.block_size, vocab_size, config.n_layer, config.n_head, config.n_embd))
        model_enc = enc
    if model_enc.name.removesuffix("+chat") != enc.name.removesuffix("+chat"):
        needed = f"the model's tokenizer, {model_enc.name}, make the shards with that"
        raise UserError(f"got shards of tokenizer {enc.name} in {config.data}, needed {needed}")
    if raw_model.config.vocab_size < enc.n_vocab:
        raise UserError(f"got vocab_size {raw_model.config.vocab_size}, needed at least the tokenizer's {enc.n_vocab}")
    return train_loader, val_loader, enc, examples, raw_model, checkpoint


def print_start(config, ddp, raw_model, train_loader, enc, optimizers, start_step):
    """Say what is about to run, in numbers that can be checked."""
    S, B = config.total_batch_size, train_loader.B
    device = torch.cuda.get_device_name() if ddp.device_type == "cuda" else ddp.device
    groups = [group["params"] for optimizer in optimizers for group in optimizer.param_groups]
    groups = ", ".join(f"{len(params)} tensors with {sum(p.numel() for p in params):,}" for params in groups)
    accumulation = S // (B * config.sequence_length * ddp.world_size)
    num_params = sum(p.numel() for p in raw_model.parameters())
    head = ", its output layer in 8 bits" if raw_model.float8_head else ""
    print0(f"model: {num_params:,} parameters on {ddp.world_size} x {device}, {ddp.dtype}{head}")
    print0(f"data: {train_loader.num_windows * config.sequence_length:,} training tokens in {len(train_loader.paths)} "
           f"shards, tokenizer {enc.name}")  # fmt: skip
    print0(f"step: {S:,} tokens = B {B} * T {config.sequence_length} * {ddp.world_size} ranks * "
           f"{accumulation} micro-steps")  # fmt: skip
    parts = [part / 2**30 for part in estimate_memory(raw_model, config, B, ddp.dtype)]
    print0("memory: {:.2f} GiB of weights + {:.2f} gradients + {:.2f} optimizer + {:.2f} activations".format(*parts)
           + f" = {sum(parts):.2f} GiB, estimated")  # fmt: skip
    print0(f"optimizer: {config.optimizer} on groups of {groups} parameters")
    print0(f"run: {config.out_dir}, from step {start_step} to {config.max_steps}")


def train(config, ddp):
    """Train, or go on with, the run that `config` describes. Returns the process's exit status."""
    torch.manual_seed(config.seed)
    if ddp.device_type == "cuda":
        torch.set_float32_matmul_precision("high")  # TF32 where matmuls are float32

    train_loader, val_loader, enc, examples, raw_model, checkpoint = prepare(config, ddp)
    out_dir, T, max_steps = Path(config.out_dir), config.sequence_length, config.max_steps
    num_val_windows = min(config.val_tokens // T, val_loader.num_windows)
    start_step = checkpoint["step"] if checkpoint else 0
    if start_step == max_steps and (out_dir / "hf").exists():
        print0(f"the run in {out_dir} is finished: {max_steps} steps, its model is in {out_dir / 'hf'}")
        return 0

    # raw_model is what is saved, sampled and scored; `compiled` knows one shape, (B, T); `model` is it with DDP around
    model, B = fit_to_machine(raw_model, config, ddp)
    compiled = model.module if ddp.world_size > 1 else model
    train_loader.B = val_loader.B = B
    optimizers = configure_optimizers(raw_model, config, ddp.device_type)
    scaler = torch.amp.GradScaler(ddp.device_type, enabled=ddp.dtype == torch.float16)
    val_loss = None
    if checkpoint:
        restore_state(checkpoint, optimizers, scaler, train_loader)
        val_loss, checkpoint = checkpoint["val_loss"], None  # let go of gigabytes

    ddp.on_master(start_run, config)
    log = open_log(out_dir, start_step) if ddp.is_master else None
    writer = CheckpointWriter(out_dir, config.keep_checkpoints)
    print_start(config, ddp, raw_model, train_loader, enc, optimizers, start_step)
    # a checkpoint says all that its model needs, the tokenizer included
    about = {"config": dataclasses.asdict(config) | dataclasses.asdict(raw_model.config)}
    about |= {"tokenizer": enc.name, "tokenizer_file": tokenizer.dumps(enc)}
    peak = peak_flops(ddp)
    signals, stopping, started = catch_signals(), False, time.perf_counter()
    gc.collect()
    gc.freeze()  # what lives now lives on: the collector need not look at it again

    for step in range(start_step, max_steps + 1):
        last_step = step == max_steps
        # every evaluation of step N sees the weights after N updates, the last update included
        if is_due(step, config.val_every, max_steps) and not stopping:
            val_loss = evaluate_val_loss(compiled, val_loader, num_val_windows, ddp)
            report(log, step, f"val loss {val_loss:.6f}", {"val": val_loss})
        if is_due(step, config.hellaswag_every, max_steps) and not stopping:
            counts = evaluate_hellaswag(raw_model, examples, enc, ddp)
            accuracy = counts.acc_norm / counts.n
            report(log, step, f"HellaSwag {counts.acc_norm}/{counts.n} = {accuracy:.4f}", {"hella": accuracy})
        if is_due(step, config.sample_every, max_steps) and not stopping and ddp.is_master:
            print_samples(raw_model, enc, config, step, ddp)
        if (is_due(step, config.checkpoint_every, max_steps) or last_step or stopping) and step > start_step and log:
            state = training_state(raw_model, optimizers, scaler, train_loader)
            writer.write({"step": step, "val_loss": val_loss, **state, **about})
        if last_step or stopping:
            break

        start = time.perf_counter()
        lr = set_schedules(optimizers, step, config)
        num_windows = get_batch_size(train_loader.position * T, config) // T
        train_loader.B = math.gcd(B, num_windows // ddp.world_size)  # a ramp's first steps may be smaller than B
        try:
            loss, norm = train_step(model, train_loader, optimizers, scaler, num_windows, config, ddp)
        except FloatingPointError as error:
            writer.wait()
            remedy = f"nothing was updated, the newest checkpoint in {out_dir} is good: try a lower --max-lr"
            raise UserError(f"got {error} in step {step}, needed finite numbers, {remedy}") from None
        seconds = time.perf_counter() - start
        tok_per_s = num_windows * T / seconds
        mfu = f" | {tok_per_s * flops_per_token(raw_model.config, T) / peak:5.1%} MFU" if peak else ""
        left = datetime.timedelta(seconds=round(seconds * (max_steps - step - 1)))
        line = f"loss {loss:.6f} | lr {lr:.4e} | norm {norm:7.4f} | {1e3 * seconds:8.2f} ms | {tok_per_s:9,.0f} tok/s"
        report(log, step, f"{line}{mfu} | {left} left", {"train": loss, "lr": lr, "norm": norm, "tok/s": tok_per_s})
        stopping = ddp.any(signals)

    writer.wait()
    if stopping:
        print0(f"stopped after {step} steps, the checkpoint is written: the same command goes on from here")
        return 128 + signal.SIGINT if signal.SIGINT in signals else 0
    if ddp.is_master:
        export_huggingface(raw_model, enc, out_dir / "hf")
        minutes = (time.perf_counter() - started) / 60
        memory = f", {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB at most" if ddp.device_type == "cuda" else ""
        print(f"done in {minutes:.1f} minutes{memory}, {writer.seconds:.1f} s of it for checkpoints")
        print(f"the model is in {out_dir / 'hf'}")
    return 0


def main(args=None):
    config = parse_args(args)
    if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0":
        config.resume = True  # torchrun started us again after a crash: --no-resume was for the first time
    check_config(config, int(os.environ.get("WORLD_SIZE", 1)))
    ddp = setup_distributed(config)
    try:
        status = train(config, ddp)
    finally:
        leave_distributed()
    sys.exit(status)


if __name__ == "__main__":
    cli.run(main)
