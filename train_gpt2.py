"""Train GPT-2 from scratch, in one file that reads from top to bottom.

    python train_gpt2.py --preset quickstart   # a laptop: a minute or two
    python fineweb.py                          # prepare the data for GPT-2 124M
    torchrun --standalone --nproc_per_node=8 train_gpt2.py   # train on 8 GPUs

(On one GPU, run python train_gpt2.py.) A preset sets the defaults of all other flags:

    gpt2          GPT-2 124M on 10B tokens of FineWeb-Edu; the default
    gpt2-medium   355M parameters
    gpt2-large    774M parameters
    gpt2-xl       1.6B parameters
    speedrun      gpt2 on half as many tokens, with Muon and another schedule
    quickstart    a small byte-level model, on Python's own documentation
    baby          nanoGPT's 10M shape, on bytes, for one GPU or a patient laptop
    chat          fine-tunes --init-from on conversations from smoltalk.py

A run writes to --out-dir: log.txt (`step stream value` per line), samples.txt, run.txt (commands, settings, machines),
a copy of this file, model_<step>.pt (checkpoints) and, at the end, hf/ (a GPT-2 in Hugging Face format). The same
command again, or --out-dir alone, continues a run that was stopped, killed or has crashed, even on other GPUs.

Sources: GPT-2 (Radford et al. 2019) for the model, GPT-3 (Brown et al. 2020, table 2.1 and appendix B) for
the hyperparameters that GPT-2's paper leaves out, Muon (Jordan et al. 2024) for the speedrun's optimizer.
"""

import contextlib
import dataclasses
import math
import os
import sys
import time
import types
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

sys.path.append(os.path.dirname(__file__))  # which python -P and -I leave out

from plumbing.cli import console
from plumbing.run.options import RunOptions, answer_flags_before_slow_imports, read_flags

# ----- Configuration ------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class GPTConfig:
    """What defines a model: it is saved with the weights. Each field is a flag, too, and its comment the help text."""

    # the model; to change --vocab-size or --block-size of a trained one, begin with it by --init-from
    block_size: int = 1024  # longest sequence: the number of position embeddings
    # rows of the embedding; by default the tokenizer's size, padded to a multiple of 64 for faster matmuls
    vocab_size: int = 50304
    n_layer: int = 12  # number of blocks
    n_head: int = 12  # attention heads per block
    n_embd: int = 768  # channels of the residual stream


@dataclasses.dataclass(frozen=True)
class Recipe(GPTConfig):
    """All that changes what is learned: a run keeps these settings for its life, and only a branch may change them."""

    # the defaults of all other flags, as listed above
    preset: Literal["gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl", "speedrun", "quickstart", "baby", "chat"] = (
        "gpt2"
    )
    # the beginning
    init_from: str = ""  # initial weights: a GPT-2 name, a folder or a checkpoint
    branch_from: str = ""  # run or checkpoint to continue in out_dir with other settings
    seed: int = 1337  # seed of the weights, data order and samples
    # auto: bfloat16 where the device is fast at it, float16 on GPUs before Ampere, else float32; fp8: bfloat16 with the
    # output layer in float8, in validation, too. Runs on different numbers of ranks differ by rounding, least in
    # float32
    dtype: Literal["auto", "float32", "bfloat16", "float16", "fp8"] = "auto"
    # the data: total_batch_size = batch_size * sequence_length * ranks * micro-steps
    sequence_length: int = 1024  # T, tokens per sequence; by default at most block_size
    total_batch_size: int = 2**19  # tokens per step over all ranks (gpt2: GPT-3's 0.5M)
    batch_ramp: int = 0  # tokens over which the batch grows from 32K; 0: none
    # shares of the folders in --data; by default each window once per epoch
    data_weights: tuple[float, ...] = ()
    shuffle: bool = True  # read the sequences in random order; --no-shuffle: in file order
    val_tokens: int = 10 * 2**20  # validation tokens, the same ones every time
    # the schedule
    max_steps: int = 19073  # optimizer steps (gpt2: 10B tokens / 0.5M per step); 0: evaluate only
    passes: float = 0.0  # passes over the training data, in place of --max-steps; 0: --max-steps counts
    warmup_steps: int = 715  # steps of linear warmup (gpt2: GPT-3's 375M tokens)
    max_lr: float = 6e-4  # peak learning rate (gpt2: GPT-3 Small's); with Muon, AdamW's
    min_lr: float = 6e-5  # final rate of the cosine; wsd ignores it
    schedule: Literal["cosine", "wsd"] = "cosine"  # wsd: constant, then linear decay to 0
    decay_fraction: float = 0.7  # wsd: share of max_steps that decays; 0: constant
    # the optimizer
    optimizer: Literal["adamw", "muon"] = "adamw"  # muon: for the blocks' matrices, with AdamW for the rest
    weight_decay: float = 0.1  # AdamW: on tensors with 2 or more dimensions
    beta1: float = 0.9  # AdamW: decay rate of the first moment
    beta2: float = 0.95  # AdamW: decay rate of the second moment
    grad_clip: float = 1.0  # clip the gradient norm to this; 0: no clipping
    muon_lr: float = 0.02  # Muon: peak learning rate of the blocks' matrices, most of the parameters
    muon_momentum: float = 0.95  # Muon: momentum
    muon_momentum_warmup: int = 300  # Muon: first steps of the run, in which momentum grows from 0.85
    muon_weight_decay: float = 0.01  # Muon: weight decay

    @property
    def model_config(self) -> GPTConfig:
        """The fields that define the model: a GPT is made from these alone."""
        return GPTConfig(**{field.name: getattr(self, field.name) for field in dataclasses.fields(GPTConfig)})


@dataclasses.dataclass(frozen=True)
class TrainConfig(Recipe, RunOptions):
    """All settings of a run: its recipe and, in plumbing/run/options.py, those that do not change what it learns."""


# fmt: off
PRESETS = {
    # GPT-2's four sizes with GPT-3's learning rates; batch_size is for 80 GB, and halved until it fits
    "gpt2": TrainConfig(),
    "gpt2-medium": TrainConfig(
        preset="gpt2-medium", n_layer=24, n_head=16, n_embd=1024, batch_size=32, max_lr=3e-4, min_lr=3e-5),
    "gpt2-large": TrainConfig(
        preset="gpt2-large", n_layer=36, n_head=20, n_embd=1280, batch_size=16, max_lr=2.5e-4, min_lr=2.5e-5),
    "gpt2-xl": TrainConfig(
        preset="gpt2-xl", n_layer=48, n_head=25, n_embd=1600, batch_size=8, max_lr=2e-4, min_lr=2e-5),
    # Muon's settings are those tuned in modded-nanogpt's benchmark: see records/2026-11-21-speedrun-sweep
    "speedrun": TrainConfig(
        preset="speedrun", max_steps=9536, warmup_steps=250, schedule="wsd", max_lr=1.8e-3,
        optimizer="muon", muon_lr=0.025, muon_weight_decay=0.05),
    "quickstart": TrainConfig(
        preset="quickstart", data=("python_docs",), out_dir="log/quickstart", compile=False, sample_prompt="The ",
        vocab_size=320, n_layer=4, n_head=4, n_embd=128, block_size=128,
        batch_size=16, sequence_length=128, total_batch_size=2048,
        max_steps=400, warmup_steps=20, schedule="wsd", max_lr=4e-3,
        optimizer="muon", muon_lr=0.04, val_every=100, val_tokens=2**15, hellaswag_every=0,
        sample_every=200, checkpoint_every=200, keep_best=True),
    "baby": TrainConfig(
        preset="baby", data=("python_docs",), out_dir="log/baby", sample_prompt="The ", hellaswag_every=0,
        keep_best=True, vocab_size=320, n_layer=6, n_head=6, n_embd=384, block_size=256,
        sequence_length=256, total_batch_size=2**14,
        max_steps=1000, warmup_steps=50, schedule="wsd", max_lr=2e-3, optimizer="muon", val_tokens=2**17),
    "chat": TrainConfig(
        preset="chat", data=("smoltalk",), out_dir="log/chat", sample_prompt="Why is the sky blue?", hellaswag_every=0,
        batch_size=32, total_batch_size=2**17, keep_best=True,
        max_steps=3000, warmup_steps=100, max_lr=1e-4, min_lr=1e-5),
}
# fmt: on


if __name__ == "__main__":
    typed = answer_flags_before_slow_imports(TrainConfig, PRESETS)

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.checkpoint import checkpoint

import hellaswag
from plumbing.data import tokenizers
from plumbing.data.windows import Order, data_tokenizer
from plumbing.run import models
from plumbing.run.run import diverged, open_run
from plumbing.run.start import begin, check_config, check_data, first_model, try_out
from plumbing.system import kernels
from plumbing.system.devices import choose_dtype, seed_random_numbers
from plumbing.system.distributed import join_ranks, map_over_ranks

# ----- Model --------------------------------------------------------------------------------------------

IGNORE_INDEX = -100  # targets that are excluded from the loss


def init_normal(layer, std=0.02):
    """GPT-2's initialization of a new linear layer or embedding, which is returned: normal weights, biases of 0."""
    nn.init.normal_(layer.weight, std=std)
    if getattr(layer, "bias", None) is not None:
        nn.init.zeros_(layer.bias)
    return layer


class CausalSelfAttention(nn.Module):
    """Causal multi-head self-attention (Vaswani et al. 2017, section 3.2)."""

    def __init__(self, config, layer):
        super().__init__()
        self.layer, self.n_head = layer, config.n_head
        self.c_attn = init_normal(nn.Linear(config.n_embd, 3 * config.n_embd))  # query, key, value in one matmul
        # 2 * n_layer projections add up in the residual stream, whose variance should not grow (GPT-2, section 2.3)
        std = 0.02 / math.sqrt(2 * config.n_layer)
        self.c_proj = init_normal(nn.Linear(config.n_embd, config.n_embd), std)

    def forward(self, x, cache=None):
        # B sequences, T tokens, C channels = nh heads * hs channels each; with a cache, S >= T tokens to attend to
        B, T, C = x.shape
        q, k, v = self.c_attn(x).split(C, dim=2)
        heads = (B, T, self.n_head, C // self.n_head)
        q = q.view(heads).transpose(1, 2)  # (B, nh, T, hs)
        k = k.view(heads).transpose(1, 2)  # (B, nh, T, hs)
        v = v.view(heads).transpose(1, 2)  # (B, nh, T, hs)
        if cache:
            k, v = cache.append(self.layer, k, v)  # (B, nh, S, hs)
        # subtle: is_causal would take the T new tokens for the first of the S; a single one attends to everything
        S = k.size(2)
        mask = torch.ones(T, S, dtype=torch.bool, device=x.device).tril(S - T) if 1 < T < S else None
        # flash attention (Dao et al. 2022): F.scaled_dot_product_attention, on a CPU in float32, which is faster there
        y = kernels.attention(q, k, v, attn_mask=mask, is_causal=T == S)  # (B, nh, T, hs)
        return self.c_proj(y.transpose(1, 2).reshape(B, T, C))


class MLP(nn.Module):
    """Two layers, four times as wide in between, with GPT-2's tanh approximation of GELU."""

    def __init__(self, config):
        super().__init__()
        self.c_fc = init_normal(nn.Linear(config.n_embd, 4 * config.n_embd))
        std = 0.02 / math.sqrt(2 * config.n_layer)  # as in attention
        self.c_proj = init_normal(nn.Linear(4 * config.n_embd, config.n_embd), std)

    def forward(self, x):
        return self.c_proj(F.gelu(self.c_fc(x), approximate="tanh"))


class Block(nn.Module):
    """Pre-norm residual block: GPT-2 moved LayerNorm to the input of each sub-block."""

    def __init__(self, config, layer):
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.n_embd)
        self.attn = CausalSelfAttention(config, layer)
        self.ln_2 = nn.LayerNorm(config.n_embd)
        self.mlp = MLP(config)

    def forward(self, x, cache=None):
        # subtle: autocast's LayerNorm returns float32, which would be copied where DDP cuts the compiled graph
        x = x + self.attn(self.ln_1(x).to(x.dtype), cache)
        return x + self.mlp(self.ln_2(x).to(x.dtype))


class GPT(nn.Module):
    """GPT-2 with the parameter names of transformers' GPT2LMHeadModel, so that the state dicts map key by key."""

    def __init__(self, config):
        super().__init__()
        self.config = config
        # how it is computed, which does not belong to the model: set for a run, or where a model is loaded
        self.activation_checkpointing = False  # recompute the blocks' activations in the backward pass
        self.float8 = False  # output layer in float8 when only the loss is needed
        self.has_cache = True  # whether a cache gives what the whole text gives: plumbing/run/checks.py tries it
        self.transformer: Any = nn.ModuleDict()
        self.transformer.wte = init_normal(nn.Embedding(config.vocab_size, config.n_embd))
        # for position embeddings, GPT-2 had std 0.01; 0.02 is now usual
        self.transformer.wpe = init_normal(nn.Embedding(config.block_size, config.n_embd))
        self.transformer.h = nn.ModuleList(Block(config, layer) for layer in range(config.n_layer))
        self.transformer.ln_f = nn.LayerNorm(config.n_embd)
        self.lm_head = init_normal(nn.Linear(config.n_embd, config.vocab_size, bias=False))
        self.lm_head.weight = self.transformer.wte.weight  # weight tying: one matrix for input and output

    def hidden_states(self, idx: torch.Tensor, cache=None) -> torch.Tensor:
        """Map token ids (B, T) to the last layer's hidden states (B, T, C), after the final norm.

        cache: a kernels.KVCache of the tokens before idx, to which those of idx are added.
        """
        start, T = cache.length if cache else 0, idx.size(1)
        assert start + T <= self.config.block_size, f"{start + T} tokens are more than block_size"
        pos = torch.arange(start, start + T, device=idx.device)
        x = self.transformer.wte(idx) + self.transformer.wpe(pos)  # (B, T, C)
        device = x.device.type
        if torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device) == torch.bfloat16:
            x = x.bfloat16()  # autocast leaves the residual stream in float32: twice the memory traffic
        recompute = self.activation_checkpointing and torch.is_grad_enabled()
        for block in self.transformer.h:
            x = checkpoint(block, x, cache, use_reentrant=False) if recompute else block(x, cache)
        if cache:
            cache.advance(T)
        return self.transformer.ln_f(x)

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """Map hidden states (..., C) to logits (..., vocabulary), for training, sampling and HellaSwag alike."""
        return self.lm_head(x)

    def cross_entropy(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """The sum of the losses of logits (N, vocabulary) and targets (N,), of which IGNORE_INDEX do not count.

        These are some rows of a batch at a time, so no row's loss may depend on another row. In float32: near 11, a
        bfloat16 is exact to 0.06 only.
        """
        return F.cross_entropy(logits.float(), targets, ignore_index=IGNORE_INDEX, reduction="sum")

    def loss_sum(self, x: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(logits (N, vocabulary), the sum of the losses) of hidden states x (N, C) and targets (N,)."""
        logits = self.logits(x)
        # some rows at a time, as F.cross_entropy makes float32 copies of what it is given: gigabytes of all logits
        return logits, kernels.in_chunks(self.cross_entropy, logits, targets)

    def forward(self, idx: torch.Tensor, targets: torch.Tensor | None = None, return_logits: bool = True):
        """Map token ids (B, T) to (logits, loss): logits (B, T, vocabulary), and the mean loss over targets (B, T).

        Targets equal to IGNORE_INDEX do not count; without targets, the loss is None. With return_logits=False and
        targets, the logits are None, which saves their memory.
        """
        x = self.hidden_states(idx)
        if targets is None:
            return self.logits(x), None
        x, targets = x.flatten(0, 1), targets.flatten()
        if self.float8 and not return_logits:  # also in validation; a loss_sum of another kind is refused
            logits, weight = None, self.lm_head.weight
            loss = kernels.cross_entropy_in_float8(self.loss_sum, x, weight, targets, IGNORE_INDEX)
        else:
            logits, loss = self.loss_sum(x, targets)
        # add other losses `if self.training` only, so that validation losses can be compared between models
        num_targets = (targets != IGNORE_INDEX).sum().clamp(min=1)  # the mean over no targets would be NaN
        logits = logits.view(*idx.shape, -1) if logits is not None and return_logits else None
        return logits, loss / num_targets

    @torch.no_grad()
    def generate(self, idx: torch.Tensor, max_new_tokens: int, vocab_size: int, *, temperature=1.0, **sampling):
        """Continue the token ids (B, T), reading their last block_size: yield the next ids (B,), one step at a time.

        temperature 0 is greedy; for `sampling` see `sample_ids`. Ids >= vocab_size are padding, never sampled.
        """
        block_size = self.config.block_size
        cache = kernels.KVCache(min(block_size, idx.size(1) + max_new_tokens)) if self.has_cache else None
        for _ in range(max_new_tokens):
            with kernels.without_cudnn_attention():  # the number of keys grows with every token
                if cache and idx.size(1) <= block_size:
                    x = self.hidden_states(idx[:, cache.length :], cache)
                else:  # past block_size every token has a new position: nothing cached is valid
                    x = self.hidden_states(idx[:, -block_size:])
            logits = self.logits(x[:, -1])[:, :vocab_size].float()  # (B, vocab_size)
            next_ids = sample_ids(logits / temperature, **sampling) if temperature else logits.argmax(-1)
            idx = torch.cat([idx, next_ids[:, None]], 1)
            yield next_ids

    def flops_per_token(self, T: int) -> int:
        """FLOPs of training on a token of a sequence of T, for MFU (Chowdhery et al. 2022, appendix B).

        A weight of a matmul takes 2 in the forward pass and 4 in the backward pass. Attention multiplies T queries and
        keys, and T weights and values, in each channel of each layer.
        """
        parameters = {*self.transformer.h.parameters(), *self.lm_head.parameters()}  # each once
        matmuls = sum(p.numel() for p in parameters if p.dim() >= 2)
        attention = 12 * self.config.n_layer * self.config.n_embd * T
        return 6 * matmuls + attention

    def extend(self, weights: dict[str, Any], old_ids: torch.Tensor | None = None) -> dict[str, Any]:
        """Give the rows of a state dict this model's vocab_size and block_size; rows that are too many are left out.

        New ids get the mean of the others: zeros would give them logit 0, far above that of most. New positions repeat
        the others from the first on (records/2026-11-25-longer-sequences). Buffers are tables that this model has made.
        old_ids: with another tokenizer, the id that each of its tokens had, -1 for a new token.
        """
        buffers, extended = dict(self.named_buffers(remove_duplicate=False)), dict(weights)
        if old_ids is not None:
            for name in [name for name in weights if name.startswith(("transformer.wte.", "lm_head."))]:
                extended[name] = weights[name][old_ids]
                extended[name][old_ids < 0] = weights[name].mean(0)
        for name, own in self.state_dict().items():
            weight = extended.get(name)
            if weight is None or not isinstance(own, torch.Tensor) or own.shape == weight.shape:
                continue
            new = max(0, len(own) - len(weight))
            if name in buffers:
                extended[name] = own
            elif name.startswith("transformer.wpe"):
                extended[name] = torch.cat([weight[: len(own)], weight[torch.arange(new) % len(weight)]])
            else:
                extended[name] = torch.cat([weight[: len(own)], weight.mean(0).expand(new, *weight.shape[1:])])
        return extended

    @classmethod
    def from_pretrained(cls, name_or_directory: str) -> "GPT":
        """Load a GPT-2 from the hub (gpt2, gpt2-xl, ...) or from a Hugging Face folder."""
        return models.load_model(cls, GPTConfig, name_or_directory)[0]


def sample_ids(logits, *, top_k=0, top_p=1.0, generator=None):
    """Draw an id (B,) from each row of logits (B, V), which it may overwrite.

    top_k > 0 keeps the k most likely ids, top_p < 1 the fewest with this total probability (Holtzman et al. 2020).
    """
    if top_k:
        kth = logits.topk(min(top_k, logits.size(1))).values[:, -1:]
        logits[logits < kth] = -math.inf
    probs = logits.softmax(-1)
    if top_p < 1:
        ordered, order = probs.sort(descending=True)
        before = ordered.cumsum(1) - ordered  # total probability of the more likely ids
        probs.scatter_(1, order, ordered.where(before < top_p, 0))
    return torch.multinomial(probs, 1, generator=generator)[:, 0]


def load_model(source):
    """Load (GPT, tokenizer) from a GPT-2 name, a Hugging Face folder, a checkpoint, or a run's newest checkpoint."""
    model, saved = models.load_model(GPT, GPTConfig, source)
    model.has_cache = models.examine_loaded(
        model, saved, num_ids=model.config.vocab_size, longest=model.config.block_size
    )
    return model, saved.enc


# ----- Data ---------------------------------------------------------------------------------------------


class DataLoaderLite:
    """Sequences, which are windows of T tokens, in one global order that depends neither on B nor on the ranks.

    The shards of a split are cut into windows of T tokens at multiples of T; up to T tokens left at the end of a shard
    are dropped. All windows are visited, epoch after epoch, in file order or in a permutation by seed and epoch. With
    `weights`, each of the `folders` has its share of the order, and is read over epochs of its own. Each call consumes
    the next B * world_size windows, and rank r reads the B of them from r * B on.
    """

    def __init__(
        self, folders: str | Sequence[str], split: str, B: int, T: int, rank: int = 0, world_size: int = 1, *,
        weights: Sequence[float] = (), seed: int = 0, shuffle: bool = False, device: str | torch.device = "cpu",
    ):  # fmt: skip
        self.B, self.T, self.rank, self.world_size = B, T, rank, world_size
        self.order = Order(folders, split, T, weights=weights, seed=seed, shuffle=shuffle)
        self.num_windows, self.device = self.order.num_windows, torch.device(device)
        self.position = 0  # windows of the global order read so far: all that a resume needs
        self.executor = ThreadPoolExecutor(1)
        self.prefetched = {}  # (position, B) -> the future of that batch

    def count_targets(self, num_windows: int) -> int:
        """The targets of the next num_windows windows, on all ranks: num_windows * T, less what masks leave out."""
        return self.order.count_targets(self.position + np.arange(num_windows))

    def read_batch(self, position, B):
        """Read this rank's batch at `position` into host memory: [tokens (B, T + 1)], plus the mask if there is one."""
        arrays = self.order.read(position + self.rank * B + np.arange(B))
        batch = [torch.from_numpy(array) for array in arrays]
        if self.device.type == "cuda":  # pinned memory lets the copy overlap with computation
            batch = [rows.pin_memory() for rows in batch]
        return batch

    def next_batch(self, B: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """x, y of shape (B, T), int64 on the device: y is x shifted by one, with IGNORE_INDEX where the mask is 0."""
        B = B or self.B
        step = B * self.world_size
        # this batch, and two more that are read while the device works on it
        keys = [(self.position + i * step, B) for i in range(3)]
        for key in keys:
            if key not in self.prefetched:
                self.prefetched[key] = self.executor.submit(self.read_batch, *key)
        self.prefetched = {key: self.prefetched[key] for key in keys}  # drops what is behind
        batch = self.prefetched.pop(keys[0]).result()
        self.position += step
        # transfer the ids as uint16, a quarter of the bytes, and widen them on the device
        tokens, *mask = [rows.to(self.device, non_blocking=True) for rows in batch]
        tokens = tokens.long()
        # subtle: stack gives the strides that the trial has compiled for; slices would keep the row stride T + 1
        x, y = torch.stack([tokens[:, :-1], tokens[:, 1:]])
        if mask:
            y = y.masked_fill(mask[0][:, 1:] == 0, IGNORE_INDEX)
        return x, y

    def state_dict(self) -> dict[str, Any]:
        """The position, and what fixes the order in which it is one."""
        return {"position": self.position, "order": self.order.settings()}

    def load_state_dict(self, state: dict[str, Any]) -> str:
        """Go on at a saved position, and return "". If it is one of another order, begin, and return what differs."""
        order = self.order.settings()
        different = ", ".join(name for name in order if order[name] != state["order"].get(name))
        self.position = 0 if different else state["position"]
        return different


# ----- Schedules and optimizers -------------------------------------------------------------------------


def get_lr(step: int, config: Recipe) -> float:
    """The learning rate of a step: linear warmup, then half a cosine, or a constant phase and a linear decay."""
    # 1) linear warmup to max_lr; step + 1, so that step 0 learns, too
    if step < config.warmup_steps:
        return config.max_lr * (step + 1) / config.warmup_steps
    # 2) wsd: constant, then down to zero over the last decay_fraction of the run (Hu et al. 2024, section 4)
    if config.schedule == "wsd":
        decay_steps = max(1, config.decay_fraction * config.max_steps)
        return config.max_lr * min(1.0, max(0, config.max_steps - step) / decay_steps)
    # 3) cosine: from max_lr to min_lr at max_steps, and min_lr from there on
    decay_steps = max(1, config.max_steps - config.warmup_steps)
    progress = min(1.0, (step - config.warmup_steps) / decay_steps)
    coefficient = 0.5 * (1 + math.cos(math.pi * progress))
    return config.min_lr + coefficient * (config.max_lr - config.min_lr)


def steps_for_passes(config: TrainConfig) -> int:
    """The number of steps, at least 1, that read the training data config.passes times."""
    loader = DataLoaderLite(config.data, "train", 1, config.sequence_length)
    tokens = config.passes * loader.num_windows * loader.T
    seen = steps = 0
    while seen < min(tokens, config.batch_ramp):
        seen, steps = seen + get_batch_size(seen, config), steps + 1
    return max(1, steps + round((tokens - seen) / config.total_batch_size))


def get_batch_size(tokens_seen: int, config: Recipe) -> int:
    """Tokens in the next step: total_batch_size, or less in the ramp, linear in steps of 32K (GPT-3, appendix B)."""
    if tokens_seen >= config.batch_ramp:
        return config.total_batch_size
    grown = config.total_batch_size * tokens_seen / config.batch_ramp
    return max(1, int(grown / 2**15)) * 2**15


@torch.no_grad()
def orthogonalize(G):
    """Map each of the matrices (n, rows, cols) to roughly the nearest orthogonal one: all singular values near 1."""
    X = G.to(torch.bfloat16) if G.is_cuda else G  # accurate enough, but slower on some CPUs
    tall = G.size(1) > G.size(2)
    X = X.mH if tall else X  # so that X @ X.mH is the smaller of the two Gram matrices
    X = X / (X.norm(dim=(1, 2), keepdim=True) + 1e-7)
    # a Newton-Schulz iteration whose quintic is tuned for speed, not for accuracy (Jordan et al. 2024)
    for _ in range(5):
        A = X @ X.mH  # mH is mT, conjugated: a model may have complex matrices
        A = torch.baddbmm(A, A, A, beta=-4.7750, alpha=2.0315)  # -4.7750 A + 2.0315 A A
        X = torch.baddbmm(X, A, X, beta=3.4445)  # 3.4445 X + A X
    return X.mH if tall else X


class Muon(torch.optim.Optimizer):
    """SGD with momentum and orthogonalized updates (Jordan et al. 2024), for the matrices inside the blocks.

    All parameters of a group have the same shape, and each is a stack of `split` matrices (3: query, key and value).
    torch.optim.Muon would orthogonalize one matrix after another, on every rank, and query, key and value as one.
    """

    def __init__(self, groups, lr, momentum, weight_decay):
        defaults = dict(lr=lr, momentum=momentum, weight_decay=weight_decay, split=1)
        super().__init__(groups, defaults | dict(foreach=True))  # all gradients are set to zero at once

    @torch.no_grad()
    def step(self):
        """One update; every rank must call it, because the ranks share the orthogonalization."""
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            if not params:
                continue
            for p in params:
                if "momentum" not in self.state[p]:
                    self.state[p]["momentum"] = torch.zeros_like(p)
            grads = [p.grad for p in params]
            momenta = [self.state[p]["momentum"] for p in params]
            torch._foreach_lerp_(momenta, grads, 1 - group["momentum"])
            updates = torch._foreach_lerp(grads, momenta, group["momentum"])  # Nesterov momentum
            rows, cols = params[0].shape
            rows //= group["split"]
            matrices = torch.stack(updates).view(-1, rows, cols)  # (len(params) * split, rows, cols)
            matrices = map_over_ranks(orthogonalize, matrices).float()
            updates = matrices.view(len(params), -1, cols).unbind()  # one per parameter
            # rows > cols: an orthogonal update changes outputs by only sqrt(cols / rows) as much as a square one
            scale = max(1, rows / cols) ** 0.5
            torch._foreach_mul_(params, 1 - group["lr"] * group["weight_decay"])
            torch._foreach_add_(params, updates, alpha=-group["lr"] * scale)


def configure_optimizers(model, config):
    """The optimizers, with their peak rates: AdamW, or Muon for the blocks' matrices and AdamW for the rest.

    They are given the parameters with their names, by which a checkpoint's state finds its own again.
    """
    optimizers: list[torch.optim.Optimizer] = []
    named, muon_groups = dict(model.named_parameters()), {}  # tied weights appear once
    for name, p in named.items() if config.optimizer == "muon" else ():
        if name.startswith("transformer.h.") and p.dim() == 2:
            rows, cols = p.shape
            is_qkv = name.endswith("c_attn.weight") and rows == 3 * cols
            split = 3 if is_qkv else 1  # query, key and value are three matrices
            # matrices of one shape are updated together
            group = muon_groups.setdefault((p.shape, split), {"params": [], "split": split})
            group["params"].append((name, p))
    if muon_groups:
        matrices = list(muon_groups.values())
        optimizers = [Muon(matrices, config.muon_lr, config.muon_momentum, config.muon_weight_decay)]
    with_muon = {p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}
    rest = [(name, p) for name, p in named.items() if p not in with_muon]
    groups = [
        {"params": [(name, p) for name, p in rest if p.dim() >= 2], "weight_decay": config.weight_decay},
        {"params": [(name, p) for name, p in rest if p.dim() < 2], "weight_decay": 0.0},  # biases and norms
    ]
    groups = [group for group in groups if group["params"]]  # torch takes no empty group of named parameters
    betas = (config.beta1, config.beta2)
    fused = all(p.device.type in ("cuda", "cpu") and p.is_floating_point() for _, p in rest)
    optimizers.append(torch.optim.AdamW(groups, lr=config.max_lr, betas=betas, eps=1e-8, fused=fused))
    return optimizers


def keep_peak_rates(optimizers):
    """Keep the rate that each group was made with: apply_schedules scales it."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["initial_lr"] = group["lr"]


def apply_schedules(optimizers, step, config):
    """Scale each group's peak rate by the schedule, and set Muon's momentum. Returns AdamW's rate."""
    lr = get_lr(step, config)
    warmed_up = min(1.0, step / config.muon_momentum_warmup) if config.muon_momentum_warmup else 1.0
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = lr * group["initial_lr"] / config.max_lr
            if isinstance(optimizer, Muon):  # early on there are few gradients to average over
                group["momentum"] = 0.85 + (config.muon_momentum - 0.85) * warmed_up
    return lr


# ----- A run and its parts ------------------------------------------------------------------------------


class Parts(NamedTuple):
    """What the loop works with."""

    config: TrainConfig
    world: Any  # this process's rank, the number of ranks (size) and the device
    raw_model: GPT  # saved, sampled from and scored
    model: Any  # trained: compiled and in DDP where these are used
    optimizers: list[torch.optim.Optimizer]
    scaler: torch.amp.GradScaler  # for float16
    loader: Any  # a DataLoaderLite; None if nothing is trained, or in a dry run without data
    val_loaders: list[DataLoaderLite]  # one for each folder
    enc: Any  # the tokenizer; in a dry run, there may be none yet
    token_bytes: Any  # a tensor: how many bytes of text each id stands for
    examples: list[Any]  # HellaSwag's, rendered
    # of one's own, by a name: what has state_dict() and load_state_dict() is saved, as rank 0 has it, and goes on with
    # the run and in its branches
    own: Mapping[str, Any]
    found: Any  # what works on this machine


def autocast(config, world):
    """Context in which matmuls and attention are in the run's dtype; LayerNorm, softmax and loss stay in float32."""
    dtype = torch.bfloat16 if config.dtype == "fp8" else getattr(torch, config.dtype)
    return torch.autocast(world.device.type, dtype, enabled=dtype != torch.float32)


def sum_over_ranks(tensor, world):
    """All-reduce: the sum over the ranks, in place. For a mean, divide by their number: gloo has no average."""
    if world.size > 1:
        dist.all_reduce(tensor)
    return tensor


# ----- Evaluation ---------------------------------------------------------------------------------------


def evaluate_val_loss(model, loader, num_windows, parts):
    """(mean loss, bits per byte of text) over num_windows windows of the validation split, the same ones on all ranks.

    Bits per byte can be compared between tokenizers. Grad mode stays enabled, though there is no backward pass, so that
    the graph compiled for training is reused.
    """
    world = parts.world
    loader.position, B = 0, loader.B
    sums = torch.zeros(3, device=world.device)  # loss, targets, bytes
    for first in console.progress_bar(range(0, num_windows, B * world.size), "validation", delay=3):
        x, y = loader.next_batch()
        # the last batch keeps the shape that the graph was compiled for: rows past the end are masked out
        y[max(0, num_windows - first - world.rank * B) :] = IGNORE_INDEX
        with autocast(parts.config, world):
            loss = model(x, y, return_logits=False)[1].detach()  # detach frees the activations
        is_target = y != IGNORE_INDEX
        targets, text = is_target.sum(), parts.token_bytes[y.clamp(min=0)] * is_target
        sums += torch.stack([loss * targets, targets, text.sum()])
    loss, targets, num_bytes = sum_over_ranks(sums, world).tolist()
    if not targets:  # a mask may leave all of them out
        return math.nan, math.nan
    return loss / targets, loss / math.log(2) / max(1, num_bytes)


def evaluate_hellaswag(parts):
    """Score the rendered HellaSwag examples, each rank its share. Returns HellaSwag's Counts over all of them."""
    world, share = parts.world, parts.examples[parts.world.rank :: parts.world.size]
    fits = parts.val_loaders[0].B * parts.config.sequence_length  # tokens in a batch of training
    with autocast(parts.config, world), kernels.without_cudnn_attention():
        counts = hellaswag.evaluate(parts.raw_model, share, parts.enc.n_vocab, at_most=fits)
    return counts._make(sum_over_ranks(torch.tensor(counts, device=world.device), world).tolist())


def generate_samples(parts):
    """Return four continuations of the prompt as text or, in chat fine-tuning, four answers to it."""
    config, enc, device = parts.config, parts.enc, parts.world.device
    text, ids = tokenizers.render_prompt(config.sample_prompt, enc)
    prompt = torch.tensor([ids] * 4, device=device)
    generator = torch.Generator(device).manual_seed(config.seed)  # so that steps can be compared
    with autocast(config, parts.world):
        next_ids = list(parts.raw_model.generate(prompt, 64, enc.n_vocab, top_k=50, generator=generator))
    rows = torch.stack(next_ids, 1).tolist()
    return [text + enc.decode(row).partition("<|end|>")[0] for row in rows]


def is_due(step, every, last):
    """Whether something done every `every` steps is due: never if that is 0, otherwise also after the last step."""
    return every > 0 and (step % every == 0 or last)


def evaluate(step, parts: Parts, run):
    """Do what is due of evaluations and samples. A signal to stop ends them; the next start begins with them again."""
    config, world, last = parts.config, parts.world, step == parts.config.max_steps
    model = parts.model.module if world.size > 1 else parts.model  # without DDP
    parts.raw_model.eval()
    if is_due(step, config.val_every, last) and not run.stopping:
        most = config.val_tokens // config.sequence_length  # windows
        with run.evaluation():
            loaders = parts.val_loaders
            losses = [evaluate_val_loss(model, each, min(most, each.num_windows), parts) for each in loaders]
        run.log_val_loss(step, losses)
    if is_due(step, config.hellaswag_every, last) and not run.stopping:
        with run.evaluation():
            counts = evaluate_hellaswag(parts)
        accuracy = counts.acc_norm / counts.n
        run.report(step, f"HellaSwag {counts.acc_norm}/{counts.n} = {accuracy:.4f}", {"hella": accuracy})
    # an evaluation of one's own goes here, in the form of HellaSwag's: its stream is in log.txt, drawn and compared
    has_learned = step > 0 or config.max_steps == 0  # a new model's samples would be noise
    if is_due(step, config.sample_every, last) and has_learned and not run.stopping and world.rank == 0:
        run.log_samples(step, generate_samples(parts))
    parts.raw_model.train()


# ----- Training -----------------------------------------------------------------------------------------


class Step(NamedTuple):
    """What is known of an update."""

    loss: float  # the mean over all targets of the step, on all ranks
    norm: float  # of the gradient, before it was clipped
    lr: float  # AdamW's
    tokens: int  # of all ranks
    stop: bool  # whether a rank has received a signal to stop
    scalars: dict[str, Any]  # streams of one's own in log.txt


def accumulate_gradients(parts: Parts, num_windows: int, scalars: dict[str, Any]) -> torch.Tensor:
    """Read the next num_windows windows in micro-batches of at most loader.B windows per rank, and go backward.

    Returns this rank's losses of them. Their sum over the ranks, divided by the ranks, is the mean over all targets.
    scalars: streams of log.txt that you add, for a number that needs x, y, logits or the loss of a micro-batch.
    """
    config, world, model, loader = parts.config, parts.world, parts.model, parts.loader
    # in a batch ramp B changes, but takes few values: torch.compile compiles for each, and gives up after 8
    B = math.gcd(num_windows // world.size, loader.B)
    grad_accum_steps = num_windows // (B * world.size)
    num_targets = max(1, loader.count_targets(num_windows))
    losses = []
    for micro_step in range(grad_accum_steps):
        x, y = loader.next_batch(B)
        # only the last backward pass all-reduces the gradients
        syncs = world.size == 1 or micro_step == grad_accum_steps - 1
        with contextlib.nullcontext() if syncs else model.no_sync():
            with autocast(config, world):
                _, loss = model(x, y, return_logits=False)
            # micro-batches with 10 and 30 targets weigh 1 and 3, so that their sum becomes the mean over the step's
            # targets; times the world size, because DDP averages over the ranks
            loss = loss * ((y != IGNORE_INDEX).sum() * world.size / num_targets)
            parts.scaler.scale(loss).backward()
        losses.append(loss.detach())
    return torch.stack(losses)


def train_step(step: int, parts: Parts, signals: Sequence[int]) -> Step:
    """One optimizer step on the next windows. signals: those to stop, received so far.

    An error, on all ranks and before the update, if loss or norm is not finite.
    """
    config, world, optimizers, scaler = parts.config, parts.world, parts.optimizers, parts.scaler
    scalars: dict[str, Any] = {}
    lr = apply_schedules(optimizers, step, config)
    # dropout, say, draws the same numbers in a step, whether or not the run was resumed before it
    seed_random_numbers(config.seed, step, world.rank)
    start, T = parts.loader.position, config.sequence_length
    num_windows = get_batch_size(start * T, config) // T
    assert num_windows % world.size == 0, f"{num_windows} sequences cannot be shared by {world.size} ranks"
    losses = accumulate_gradients(parts, num_windows, scalars)
    # a number put here becomes a stream of log.txt, with rank 0's values:
    # scalars["wte"] = parts.raw_model.transformer.wte.weight.norm()
    for optimizer in optimizers:
        scaler.unscale_(optimizer)
    norm = nn.utils.clip_grad_norm_(parts.model.parameters(), config.grad_clip or math.inf)
    # besides DDP's, one all-reduce and one copy to the host per step (float16 adds copies, Muon's step all-gathers)
    sums = sum_over_ranks(torch.stack([losses.sum(), torch.full_like(losses[0], len(signals))]), world)
    loss, num_signals, norm = torch.cat([sums, norm[None]]).tolist()
    loss /= world.size
    # float16: gradients overflow now and then, on all ranks alike; then no optimizer steps, and the scale is lowered
    overflow = not math.isfinite(norm) and scaler.is_enabled() and scaler.get_scale() > 1
    if not math.isfinite(loss) or not (math.isfinite(norm) or overflow):
        raise diverged(step, parts, loss, norm, start=start, batch_losses=losses)
    for optimizer in optimizers if not overflow else ():
        scaler.step(optimizer)
    for optimizer in optimizers:
        # DDP's gradients are views of its buckets; if they were dropped, the next ones would take memory of their own
        optimizer.zero_grad(set_to_none=world.size == 1)
    scaler.update()
    for buffer in parts.raw_model.buffers() if world.size > 1 else ():
        dist.broadcast(buffer, 0)  # running statistics, for example; GPT-2 has none
    # a single rank also counts the signals that it has received since the sum
    stop = num_signals > 0 or (world.size == 1 and len(signals) > 0)
    return Step(loss, norm, lr, num_windows * T, stop, scalars)


# ----- The run ------------------------------------------------------------------------------------------


def complaints(c: TrainConfig, inherited: dict[str, Any], typed: dict[str, Any]) -> Iterator[str]:
    """A sentence for each thing that is wrong with the recipe; what else is negative is refused in all settings."""
    for name in "block_size n_layer n_head n_embd sequence_length total_batch_size val_tokens max_lr".split():
        if not getattr(c, name) > 0:
            yield f"--{name.replace('_', '-')} is {getattr(c, name)}, but it must be above 0."
    if c.n_head > 0 and c.n_embd > 0 and c.n_embd % c.n_head:
        divisors = [n for n in range(c.n_embd, 0, -1) if c.n_embd % n == 0]
        heads = min(divisors, key=lambda n: abs(n - c.n_head))
        width = max(1, round(c.n_embd / c.n_head)) * c.n_head
        yield f"--n-embd {c.n_embd} is not a multiple of --n-head {c.n_head}. Try --n-head {heads} or --n-embd {width}."
    if c.sequence_length > c.block_size:
        yield f"--sequence-length {c.sequence_length} is above --block-size {c.block_size}. Lower it, or raise that."
    if len(set(map(os.path.realpath, c.data))) < len(c.data):
        yield f"--data names a folder twice: {' '.join(c.data)}. Name each once, and its share with --data-weights."
    weights = c.data_weights
    if weights and not (len(weights) == len(c.data) and min(weights) >= 0 and 0 < sum(weights) < math.inf):
        found = f"--data-weights is {' '.join(map(str, weights))}, and --data {' '.join(c.data)}"
        yield f"{found}. Give a share for each folder: 0 or more, and not all 0."
    for name in ("n_layer", "n_head", "n_embd"):  # new ids and positions can be added, see GPT.extend
        if inherited.get(name, getattr(c, name)) != getattr(c, name):
            yield (
                f"--{name.replace('_', '-')} is {getattr(c, name)}, but the weights that the run begins with have "
                f"{inherited[name]}. Leave it out, or begin a new model in another --out-dir."
            )
    if c.passes and typed.get("max_steps"):
        yield "--passes and --max-steps both say how long the run is. Give one of them."
    if c.passes and weights:
        yield "--passes counts all windows of all folders, which shares of them do not: give --max-steps in its place."
    for name in ("beta1", "beta2", "muon_momentum"):
        if not 0 <= getattr(c, name) < 1:
            yield f"--{name.replace('_', '-')} is {getattr(c, name)}, but it must be 0 or more and below 1."
    if not 0 <= c.decay_fraction <= 1:
        yield f"--decay-fraction is {c.decay_fraction}, but it must be between 0 and 1."
    if c.preset == "chat" and not (c.init_from or c.branch_from):
        yield "--preset chat fine-tunes a model. Name one with --init-from, for example --init-from log or gpt2."


def make_config(inherited: dict[str, Any], typed: dict[str, Any], world) -> TrainConfig:
    """The run's config: its settings, completed by what the data and the machine say. UserError if they are wrong.

    Of these, a preset's count least, then what is inherited from the run itself, its parent or its model, and most what
    was typed. Rank 0 makes the config at each start; what an earlier start has completed stays as it is.
    """
    preset = PRESETS[typed.get("preset", "gpt2")]
    c = TrainConfig(**vars(preset) | inherited | typed)
    if "sequence_length" not in typed:  # that of a preset may be too long for a model
        c = dataclasses.replace(c, sequence_length=min(c.sequence_length, c.block_size))
    check_config(c, complaints(c, inherited, typed), world)
    docs = PRESETS["quickstart"].data[0]
    if docs in c.data and not c.dry_run:
        import fineweb  # only these data are made here, if there are none

        fineweb.make_python_docs(docs)
    enc = data_tokenizer(c)
    # before there are data, a dry run assumes bytes for those that are made here, and else GPT-2's tokens
    assumed = 257 if c.data == (docs,) else 50257
    n_vocab = enc.n_vocab if enc else assumed
    vocab_size = typed.get("vocab_size") or inherited.get("vocab_size") or 0
    # an evaluation is of the weights as they are
    if not vocab_size or (c.max_steps and not typed.get("vocab_size")):
        vocab_size = max(vocab_size, math.ceil(n_vocab / 64) * 64)  # 50,304 for 50,257
    dtype = choose_dtype(c.dtype, world.device, is_wide=c.n_embd >= 128)
    found = dict(vocab_size=vocab_size, dtype=dtype, passes=0.0)
    if c.passes and c.max_steps:
        steps = steps_for_passes(c)
        # the warmup is at most a tenth of the run
        found |= dict(max_steps=steps, warmup_steps=min(c.warmup_steps, steps // 10))
    return dataclasses.replace(c, **found)


def load_data(config, world):
    """Load a run's (loader, validation loaders, tokenizer): nothing where a dry run has no data."""
    enc = data_tokenizer(config)
    if not enc:
        return None, [], None
    B, T, ranks = config.batch_size, config.sequence_length, (world.rank, world.size)
    loader, order = None, dict(shuffle=config.shuffle, device=world.device)
    if config.max_steps:
        shares = dict(weights=config.data_weights, seed=config.seed)
        loader = DataLoaderLite(config.data, "train", B, T, *ranks, **shares, **order)
    # no seed: always the same windows
    val_loaders = [DataLoaderLite(folder, "val", B, T, *ranks, **order) for folder in config.data]
    return loader, val_loaders, enc


def wrap(raw_model, compiled, world):
    """The model to train: compiled if asked for, and in DDP if there are several ranks."""
    model = torch.compile(raw_model, dynamic=False) if compiled else raw_model
    if world.size > 1:
        # subtle: the first call compiles, inside of DDP, which splits the graph at its gradient buckets, so that their
        # all-reduces overlap with the backward pass; larger buckets than DDP's 25 MB are fewer graphs to compile
        model = DDP(model, bucket_cap_mb=100, gradient_as_bucket_view=True)
    return model


def setup(start, world) -> Parts:
    """Load, make and check all that the run needs. Nothing of its folder is written yet."""
    config = start.config
    torch.set_float32_matmul_precision("high" if world.device.type == "cuda" else "highest")  # high: TF32
    loader, val_loaders, enc = load_data(config, world)
    check_data(config, loader, val_loaders, enc, num_ids=config.vocab_size, world=world)
    seed_random_numbers(config.seed)  # torch.manual_seed, and numpy's and Python's own, alike on all ranks
    raw_model = first_model(GPT, start, world.device)  # new, or with the weights that the run begins with
    raw_model.activation_checkpointing, raw_model.float8 = config.activation_checkpointing, config.dtype == "fp8"
    optimizers = configure_optimizers(raw_model, config)
    keep_peak_rates(optimizers)
    own: dict[str, Any] = {}  # see Parts: own["ema"] = torch.optim.swa_utils.AveragedModel(raw_model)
    scaler = torch.amp.GradScaler(world.device.type, enabled=config.dtype == "float16")
    # a missing file is downloaded now, rather than in the middle of a run
    load = hellaswag.load_examples, config.hellaswag_data, enc, config.hellaswag_limit
    examples = world.broadcast_from_master(*load) if config.hellaswag_every and not config.dry_run else []
    token_bytes = torch.tensor(tokenizers.token_bytes(enc), device=world.device) if enc else None
    # what works on this machine: with torch.compile and DDP, which `wrap` adds, or without, and the largest B that fits
    text = val_loaders[0].next_batch(8)[0] if val_loaders else None
    num_ids = enc.n_vocab if enc else config.vocab_size
    ways = dict(wrap=wrap, autocast=autocast, text=text, num_ids=num_ids, longest=config.block_size)
    found, raw_model.has_cache = try_out(start, raw_model, optimizers, world=world, **ways)
    for each in (loader, *val_loaders) if loader else val_loaders:
        each.B = found.B
    data = loader, val_loaders, enc, token_bytes, examples
    read_only = types.MappingProxyType(own)  # a later entry would not be there when the run is resumed
    return Parts(config, world, raw_model, found.model, optimizers, scaler, *data, read_only, found)


def fit(parts: Parts, run):
    """The training loop, from the run's first or next step to its last. Returns what the run ended with."""
    config = parts.config
    # one turn more than steps: evaluations at step N see the weights after N updates, the last one, too
    for step in range(run.start_step, config.max_steps + 1):
        last = step == config.max_steps
        # before the evaluations, which a start from this checkpoint does again: what they count is counted once
        often = config.checkpoint_every, config.milestone_every
        is_saved = not last and any(is_due(step, every, last) for every in often)
        if is_saved:
            run.save(step, finished=False)
        evaluate(step, parts, run)
        if (last or run.stopping) and not is_saved:
            run.save(step, finished=last and not run.stopping)
        if last or run.stopping:
            break
        began = time.perf_counter()
        done = train_step(step, parts, run.signals)
        run.log_step(step, done, seconds=time.perf_counter() - began)
    return run.finish(step)  # exports the model, unless the run was stopped


def train(typed: dict[str, Any]):
    """Train as the flags that were `typed` say, {setting: value}, and return what the run ended with."""
    # torchrun starts a process for each GPU, and hands over RANK, LOCAL_RANK and WORLD_SIZE: here these meet
    with join_ranks(typed) as world:
        # rank 0 decides what the run is: the preset, what the run, its parent or its model has, and what was typed
        with begin(PRESETS, typed, make_config, GPT, world) as start:
            if start.ended:  # it is finished already
                return start.ended
            parts = setup(start, world)
            # what its checkpoint holds is put back, and what it will do and cost is said: in a dry run, that is all
            with open_run(start, parts) as run:
                return fit(parts, run) if run else None


def main(args=None):
    """Train as the flags say, those of the command line or a list of them; return what the run ended with."""
    return train(read_flags(TrainConfig, PRESETS, args))


if __name__ == "__main__":
    console.run(train, typed)
