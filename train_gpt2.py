"""Train GPT-2 from scratch, in one file that reads from top to bottom.

    python train_gpt2.py --preset quickstart   # a laptop: a minute or two
    python fineweb.py                          # prepare the data for GPT-2 124M
    torchrun --standalone --nproc-per-node=8 train_gpt2.py   # train on 8 GPUs

(On one GPU, run python train_gpt2.py.) A preset sets the defaults of all other
flags:

    gpt2          GPT-2 124M on 10B tokens of FineWeb-Edu; the default
    gpt2-medium   355M parameters
    gpt2-large    774M parameters
    gpt2-xl       1.6B parameters
    speedrun      gpt2 on half as many tokens, with Muon and another schedule
    quickstart    a small byte-level model, on Python's own documentation
    baby          nanoGPT's 10M shape, on bytes, for one GPU or a patient laptop
    chat          fine-tunes --init-from on conversations from smoltalk.py

A run writes to --out-dir: log.txt (`step stream value` per line), samples.txt,
run.txt (commands, settings, machines), a copy of this file, model_<step>.pt
(checkpoints) and, at the end, hf/ (a GPT-2 in Hugging Face format). The same
command again, or --out-dir alone, continues a run that was stopped, was killed
or has crashed, also on another number of GPUs, if it divides a step's sequences
(for gpt2: 1, 2, 4, 8, ...).

Sources: GPT-2 (Radford et al. 2019) for the model, GPT-3 (Brown et al. 2020,
table 2.1 and appendix B) for the hyperparameters that GPT-2's paper leaves out,
Muon (Jordan et al. 2024) for the speedrun's optimizer.
"""

import dataclasses
import functools
import math
import os
import sys
import time
import types
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

sys.path.append(os.path.dirname(__file__))  # python -P and -I leave this folder out

from plumbing.cli import console
from plumbing.cli.flags import Positive
from plumbing.run.options import RunOptions, read_flags

# ----- Configuration ------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class GPTConfig:
    """The shape of a model, saved with its weights. Each field becomes a flag, and its comment is that flag's help."""

    # the model (with --init-from, block size and vocabulary may change)
    block_size: Positive[int] = 1024  # longest sequence: the number of position embeddings
    # rows of the embedding; by default the tokenizer's size, padded to a multiple of 64 for faster matmuls
    vocab_size: int = 50304
    n_layer: Positive[int] = 12  # number of blocks
    n_head: Positive[int] = 12  # attention heads per block
    n_embd: Positive[int] = 768  # channels of the residual stream


@dataclasses.dataclass(frozen=True)
class Recipe(GPTConfig):
    """Every setting that affects what is learned. A run keeps them for good; to change one, start a branch."""

    # the defaults of all other flags, as listed above
    preset: Literal["gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl", "speedrun", "quickstart", "baby", "chat"] = (
        "gpt2"
    )
    # initial weights, seed and precision
    init_from: str = ""  # initial weights: a GPT-2 on the Hub, a folder or a checkpoint
    branch_from: str = ""  # run or checkpoint to continue in out_dir with other settings
    seed: int = 1337  # seed of the weights, data order and samples
    # auto: bfloat16 where the device computes it fast, float16 on GPUs before Ampere, else float32; fp8: bfloat16 with
    # the output layer in float8, also in validation
    dtype: Literal["auto", "float32", "bfloat16", "float16", "fp8"] = "auto"
    # the data (total_batch_size = batch_size * sequence_length * ranks * micro-steps)
    sequence_length: Positive[int] = 1024  # T, tokens per sequence; at most --block-size
    total_batch_size: Positive[int] = 2**19  # tokens per step over all ranks (gpt2: GPT-3's 0.5M)
    batch_ramp: int = 0  # tokens over which the batch grows from 32K; 0: no ramp
    # shares of the folders in --data; by default an epoch reads each window once
    data_weights: tuple[float, ...] = ()
    shuffle: bool = True  # read the sequences in random order; --no-shuffle: in file order
    val_tokens: Positive[int] = 10 * 2**20  # validation tokens, the same ones every time
    # the schedule
    max_steps: int = 19073  # optimizer steps (gpt2: 10B tokens / 0.5M per step); 0: evaluate only
    passes: float = 0.0  # passes over the training data, instead of --max-steps; 0: use --max-steps
    # tokens for each parameter, instead of --max-steps: 20 are best for the compute (Hoffmann et al. 2022)
    tokens_per_parameter: float = 0.0
    warmup_steps: int = 715  # steps of linear warmup (gpt2: GPT-3's 375M tokens)
    max_lr: Positive[float] = 6e-4  # peak learning rate (gpt2: GPT-3 Small's); with Muon, AdamW's
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
    muon_momentum_warmup: int = 300  # Muon: steps at the start of a run, while momentum grows from 0.85
    muon_weight_decay: float = 0.01  # Muon: weight decay

    @property
    def model_config(self) -> GPTConfig:
        """The fields that define the model: a GPT is made from these alone."""
        return GPTConfig(**{field.name: getattr(self, field.name) for field in dataclasses.fields(GPTConfig)})


@dataclasses.dataclass(frozen=True)
class TrainConfig(Recipe, RunOptions):
    """All settings of a run: its recipe, and plumbing/run/options.py's, which do not affect what it learns."""


# fmt: off
PRESETS = {
    # GPT-2's four sizes with GPT-3's learning rates; batch_size suits 80 GB, and is halved until it fits
    "gpt2": TrainConfig(),
    "gpt2-medium": TrainConfig(
        preset="gpt2-medium", n_layer=24, n_head=16, n_embd=1024, batch_size=32, max_lr=3e-4, min_lr=3e-5),
    "gpt2-large": TrainConfig(
        preset="gpt2-large", n_layer=36, n_head=20, n_embd=1280, batch_size=16, max_lr=2.5e-4, min_lr=2.5e-5),
    "gpt2-xl": TrainConfig(
        preset="gpt2-xl", n_layer=48, n_head=25, n_embd=1600, batch_size=8, max_lr=2e-4, min_lr=2e-5),
    # modded-nanogpt's benchmark has tuned Muon's settings: see records/2026-11-21-speedrun-sweep
    "speedrun": TrainConfig(
        preset="speedrun", max_steps=9536, warmup_steps=250, schedule="wsd", max_lr=1.8e-3,
        optimizer="muon", muon_lr=0.025, muon_weight_decay=0.05),
    "quickstart": TrainConfig(
        preset="quickstart", data=("python_docs",), out_dir="log/quickstart", compile=False, sample_prompt="The",
        vocab_size=320, n_layer=4, n_head=4, n_embd=128, block_size=128,
        batch_size=16, sequence_length=128, total_batch_size=2048,
        max_steps=400, warmup_steps=20, schedule="wsd", max_lr=4e-3,
        optimizer="muon", muon_lr=0.04, val_every=100, val_tokens=2**15, hellaswag_every=0,
        sample_every=200, checkpoint_every=200, keep_best=True),
    "baby": TrainConfig(
        preset="baby", data=("python_docs",), out_dir="log/baby", sample_prompt="The", hellaswag_every=0,
        keep_best=True, vocab_size=320, n_layer=6, n_head=6, n_embd=384, block_size=256,
        sequence_length=256, total_batch_size=2**14,
        max_steps=1000, warmup_steps=50, schedule="wsd", max_lr=2e-3, optimizer="muon", val_tokens=2**17),
    "chat": TrainConfig(
        preset="chat", data=("smoltalk",), out_dir="log/chat", sample_prompt="Why is the sky blue?", hellaswag_every=0,
        batch_size=32, total_batch_size=2**17, keep_best=True,
        max_steps=3000, warmup_steps=100, max_lr=1e-4, min_lr=1e-5),
}
# fmt: on


# --help and a mistyped flag end the program here, before torch is imported, which takes seconds
if __name__ == "__main__":
    typed = console.run(read_flags, TrainConfig, PRESETS)

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import tiktoken
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.checkpoint import checkpoint

import hellaswag
from plumbing.data import tokenizers
from plumbing.data.windows import Folder, Order, open_folders
from plumbing.run import models
from plumbing.run.divergence import diverged
from plumbing.run.run import open_report, open_run
from plumbing.run.start import EVALUATION, TUNED, begin, check_config, check_data, make_model, split_of, try_out
from plumbing.run.summary import print_account
from plumbing.system import kernels, memory
from plumbing.system.collectives import map_over_ranks
from plumbing.system.devices import seed_random_numbers
from plumbing.system.distributed import World, join_ranks
from plumbing.system.layout import Whole
from plumbing.system.trial import Fit

# ----- Model --------------------------------------------------------------------------------------------

IGNORE_INDEX = -100  # targets with this id are left out of the loss


def init_normal(layer, std=0.02):
    """Initialize a layer as GPT-2 does, with normal weights and zero biases, and return it."""
    nn.init.normal_(layer.weight, std=std)
    if getattr(layer, "bias", None) is not None:
        nn.init.zeros_(layer.bias)
    return layer


class CausalSelfAttention(nn.Module):
    """Causal multi-head self-attention (Vaswani et al. 2017, section 3.2)."""

    def __init__(self, config, layer):
        super().__init__()
        self.layer = layer
        self.n_head = config.n_head
        self.c_attn = init_normal(nn.Linear(config.n_embd, 3 * config.n_embd))  # query, key, value in one matmul
        # 2 * n_layer projections add up in the residual stream, whose variance should not grow (GPT-2, section 2.3)
        std = 0.02 / math.sqrt(2 * config.n_layer)
        self.c_proj = init_normal(nn.Linear(config.n_embd, config.n_embd), std)

    def forward(self, x, cache=None):
        # B sequences, T tokens, C channels = nh heads * hs channels each; with a cache there are S >= T keys
        B, T, C = x.shape
        q, k, v = self.c_attn(x).split(C, dim=2)
        heads = (B, T, self.n_head, C // self.n_head)
        q = q.view(heads).transpose(1, 2)  # (B, nh, T, hs)
        k = k.view(heads).transpose(1, 2)  # (B, nh, T, hs)
        v = v.view(heads).transpose(1, 2)  # (B, nh, T, hs)
        if cache:
            k, v = cache.append(self.layer, k, v)  # (B, nh, S, hs)
        S = k.size(2)
        mask = None
        if 1 < T < S:
            # subtle: is_causal would align the T queries with the first T keys instead of the last T. A single new
            # token needs no mask: it sees every key
            mask = torch.ones(T, S, dtype=torch.bool, device=x.device).tril(S - T)
        # flash attention (Dao et al. 2022): F.scaled_dot_product_attention, in float32 on a CPU, which is faster there
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
        # subtle: under autocast, LayerNorm returns float32. Cast it back, or DDP, which splits the compiled graph here,
        # would copy it at twice the size
        x = x + self.attn(self.ln_1(x).to(x.dtype), cache)
        return x + self.mlp(self.ln_2(x).to(x.dtype))


class GPT(nn.Module):
    """GPT-2 with the parameter names of transformers' GPT2LMHeadModel, so that the state dicts map key by key."""

    def __init__(self, config):
        super().__init__()
        self.config = config
        # how the model is run, not what it is: make_gpt() and an examination set these
        self.activation_checkpointing = False  # recompute the blocks' activations in the backward pass
        self.has_cache = True  # whether decoding with a cache gives the same result as reading the whole text
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

        cache: a kernels.KVCache of the tokens before idx. The tokens of idx are added to it.
        """
        T = idx.size(1)
        start = cache.length if cache else 0
        assert start + T <= self.config.block_size, f"{start + T} tokens are more than block_size"
        pos = torch.arange(start, start + T, device=idx.device)
        x = self.transformer.wte(idx) + self.transformer.wpe(pos)  # (B, T, C)
        device = x.device.type
        if torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device) == torch.bfloat16:
            x = x.bfloat16()  # autocast leaves the residual stream in float32: twice the memory traffic
        recompute = self.activation_checkpointing and torch.is_grad_enabled()
        for block in self.transformer.h:
            if recompute:
                x = checkpoint(block, x, cache, use_reentrant=False)
            else:
                x = block(x, cache)
        if cache:
            cache.advance(T)
        return self.transformer.ln_f(x)

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """Map hidden states (..., C) to logits (..., vocabulary), for training, sampling and HellaSwag alike."""
        return self.lm_head(x)

    def cross_entropy(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Sum the losses of logits (N, vocabulary) and targets (N,). Targets equal to IGNORE_INDEX are skipped.

        forward() calls this with a chunk of rows at a time, so a row's loss must not depend on other rows. The backward
        pass calls it again, so it must count and keep nothing. Computed in float32: near a loss of 11, bfloat16 has
        steps of 0.06.
        """
        return F.cross_entropy(logits.float(), targets, ignore_index=IGNORE_INDEX, reduction="sum")

    def forward(self, idx: torch.Tensor, targets: torch.Tensor | None = None, return_logits: bool = True):
        """Map token ids (B, T) to (logits, loss): logits (B, T, vocabulary), and the mean loss over targets (B, T).

        Targets equal to IGNORE_INDEX are skipped. Without targets, the loss is None. With return_logits=False and
        targets, the logits are None, which saves their memory.
        """
        logits = self.logits(self.hidden_states(idx))
        if targets is None:
            return logits, None
        targets = targets.flatten()
        # in chunks of rows: F.cross_entropy copies its input to float32, which for all logits at once is gigabytes
        loss = kernels.in_chunks(self.cross_entropy, logits.flatten(0, 1), targets)
        # add other losses only `if self.training`, so that validation losses can be compared between models
        num_targets = (targets != IGNORE_INDEX).sum().clamp(min=1)  # the mean over no targets would be NaN
        return logits if return_logits else None, loss / num_targets

    @property
    def blocks(self) -> list[nn.Module]:
        return list(dict.fromkeys(self.transformer.h))  # a model may use one block several times

    @torch.no_grad()
    def generate(
        self, idx: torch.Tensor, max_new_tokens: int, vocab_size: int, *,
        temperature=1.0, repetition_penalty=1.0, **sampling
    ):  # fmt: skip
        """Continue the token ids (B, T): yield the next ids (B,), one at a time.

        The model sees the last block_size ids. temperature: 0 picks the likeliest id; vocab_size: ids from here on are
        padding and never sampled; repetition_penalty: above 1, ids that the text has become less likely (Keskar et al.
        2019); sampling: see `sample_ids`.
        """
        block_size = self.config.block_size
        cache = None
        if self.has_cache:
            cache = kernels.KVCache(min(block_size, idx.size(1) + max_new_tokens))
        for _ in range(max_new_tokens):
            with kernels.without_cudnn_attention():  # the number of keys grows with every token
                if cache and idx.size(1) <= block_size:
                    x = self.hidden_states(idx[:, cache.length :], cache)
                else:  # past block_size every token gets a new position, so nothing cached is valid
                    x = self.hidden_states(idx[:, -block_size:])
            logits = self.logits(x[:, -1])[:, :vocab_size].float()  # (B, vocab_size)
            if repetition_penalty != 1:
                seen = logits.gather(1, idx)
                logits.scatter_(
                    1, idx, torch.where(seen < 0, seen * repetition_penalty, seen / repetition_penalty)
                )
            if temperature:
                next_ids = sample_ids(logits / temperature, **sampling)
            else:
                next_ids = logits.argmax(-1)
            idx = torch.cat([idx, next_ids[:, None]], 1)
            yield next_ids

    def flops_per_token(self, T: int) -> int:
        """The FLOPs of training on one token, in a sequence of T, for MFU (Chowdhery et al. 2022, appendix B).

        A weight of a matmul takes 2 in the forward pass and 4 in the backward pass, which computes two gradients.
        Attention multiplies T queries and keys, and T weights and values, in each channel of each layer.
        """
        parameters = {*self.transformer.h.parameters(), *self.lm_head.parameters()}  # a set: each counts once
        matmuls = sum(p.numel() for p in parameters if p.dim() >= 2)
        attention = 12 * self.config.n_layer * self.config.n_embd * T
        return 6 * matmuls + attention

    def extend(self, weights: dict[str, Any], old_ids: torch.Tensor | None = None) -> dict[str, Any]:
        """Resize the embeddings in a state dict to this model's vocab_size and block_size. Surplus rows are dropped.

        New ids get the mean of the old rows: zeros would give them logit 0, far above most. New positions repeat the
        old ones from the first on (records/2026-11-25-longer-sequences). This model's buffers replace those of another
        shape. old_ids: for another tokenizer, each token's id in the old one, or -1 if the token is new.
        """
        buffers = dict(self.named_buffers(remove_duplicate=False))
        extended = dict(weights)
        if old_ids is not None:
            for name, weight in weights.items():
                if name.startswith(("transformer.wte.", "lm_head.")):
                    extended[name] = weight[old_ids]
                    extended[name][old_ids < 0] = weight.mean(0)
        for name, own in self.state_dict().items():
            weight = extended.get(name)
            if weight is None or not isinstance(own, torch.Tensor) or own.shape == weight.shape:
                continue
            if name in buffers:
                extended[name] = own
                continue
            num_new = max(0, len(own) - len(weight))
            if name.startswith("transformer.wpe"):
                new_rows = weight[torch.arange(num_new) % len(weight)]
            else:
                new_rows = weight.mean(0).expand(num_new, *weight.shape[1:])
            extended[name] = torch.cat([weight[: len(own)], new_rows])
        return extended

    @classmethod
    def from_pretrained(cls, name_or_directory: str) -> "GPT":
        """Load a GPT-2 from the Hub (gpt2, gpt2-xl, ...) or from a Hugging Face folder."""
        return models.load_model(cls, GPTConfig, name_or_directory)[0]


def sample_ids(logits, *, top_k=0, top_p=1.0, generator=None):
    """Draw one id from each row of logits (B, V), and return the ids (B,). The logits may be overwritten.

    top_k > 0 keeps the k most likely ids, top_p < 1 the fewest with this total probability (Holtzman et al. 2020).
    """
    if top_k:
        k = min(top_k, logits.size(1))
        kth = logits.topk(k).values[:, -1:]
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
    """Yields windows of T tokens in one global order, the same for any batch size and any number of ranks.

    It cuts the shards of a split into windows at multiples of T, and drops up to T tokens at the end of each shard. An
    epoch visits every window, in file order or in a permutation by seed and epoch (see plumbing/data/windows.py). With
    `weights`, each folder has its share of the order and its own epochs. Each call takes the next B * world_size
    windows, and rank r reads B of them, from r * B on. Windows are not read through np.memmap: when a disk fails, it
    ends the process without a message.
    """

    def __init__(
        self, folders: str | Sequence[str | Folder], split: str, B: int, T: int, rank: int = 0, world_size: int = 1, *,
        weights: Sequence[float] = (), seed: int = 0, shuffle: bool = False, device: str | torch.device = "cpu",
    ):  # fmt: skip
        self.B = B
        self.T = T
        self.rank = rank
        self.world_size = world_size
        self.device = torch.device(device)
        self.order = Order(folders, split, T, weights=weights, seed=seed, shuffle=shuffle)
        self.num_windows = self.order.num_windows
        self.position = 0  # windows of the global order read so far: all that a resume needs
        self.seconds_waited = 0.0  # for data
        self.executor = ThreadPoolExecutor(1)
        self.prefetched = {}  # (position, B) -> the future of that batch

    def count_targets(self, num_windows: int) -> int:
        """The number of targets in the next num_windows windows, on all ranks: T in each, minus the masked ones."""
        return self.order.count_targets(self.position + np.arange(num_windows))

    def read_batch(self, position, B):
        """Read this rank's batch at `position` into host memory: [tokens (B, T + 1)], plus the mask if there is one.

        A thread does this two batches ahead: draw random numbers from a generator that `position` seeds.
        """
        arrays = self.order.read(position + self.rank * B + np.arange(B))
        batch = [torch.from_numpy(array) for array in arrays]
        if self.device.type == "cuda":  # pinned memory lets the copy overlap with computation
            batch = [rows.pin_memory() for rows in batch]
        return batch

    def next_batch(self, B: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """x, y of shape (B, T), int64 on the device: y is x shifted by one, with IGNORE_INDEX where the mask is 0."""
        if B is None:
            B = self.B
        step = B * self.world_size
        # read this batch, and two more while the device works on it
        keys = [(self.position + i * step, B) for i in range(3)]
        for key in keys:
            if key not in self.prefetched:
                self.prefetched[key] = self.executor.submit(self.read_batch, *key)
        self.prefetched = {key: self.prefetched[key] for key in keys}  # drops older batches
        began = time.perf_counter()
        batch = self.prefetched.pop(keys[0]).result()
        self.seconds_waited += time.perf_counter() - began
        self.position += step
        # transfer the ids as uint16, a quarter of the bytes, and widen them on the device
        batch = [rows.to(self.device, non_blocking=True) for rows in batch]
        tokens = batch[0].long()
        # subtle: stack gives the strides that the trial has compiled for; slices would keep the row stride T + 1
        x, y = torch.stack([tokens[:, :-1], tokens[:, 1:]])
        if len(batch) > 1:
            mask = batch[1][:, 1:]
            y = y.masked_fill(mask == 0, IGNORE_INDEX)
        return x, y

    def state_dict(self) -> dict[str, Any]:
        """The position, and the settings that define the order of the windows."""
        return {"position": self.position, "order": self.order.settings()}

    def load_state_dict(self, state: dict[str, Any]) -> str:
        """Continue from a saved position and return "". If the order differs, start at 0 and return the differences."""
        order = self.order.settings()
        different = [name for name in order if order[name] != state["order"].get(name)]
        self.position = 0 if different else state["position"]
        return ", ".join(different)


# ----- Schedules and optimizers -------------------------------------------------------------------------


RAMP_STEP = 2**15  # tokens by which the batch ramp grows


def get_lr(step: int, config: Recipe) -> float:
    """The learning rate of a step: linear warmup, then half a cosine, or a constant phase and a linear decay."""
    # 1) linear warmup to max_lr; step + 1, so that step 0 learns as well
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


def count_steps(config: TrainConfig, folders: Sequence[Folder]) -> int:
    """The number of steps, at least 1, that read the tokens of --passes or of --tokens-per-parameter."""
    if config.passes:
        loader = DataLoaderLite(folders, "train", 1, config.sequence_length)
        tokens = config.passes * loader.num_windows * loader.T
    else:
        model = memory.imagine(lambda: GPT(config.model_config))
        tokens = config.tokens_per_parameter * memory.count_parameters(model)
    seen = steps = 0
    while seen < min(tokens, config.batch_ramp):
        seen += get_batch_size(seen, config)
        steps += 1
    return max(1, steps + round((tokens - seen) / config.total_batch_size))


def get_batch_size(tokens_seen: int, config: Recipe) -> int:
    """Tokens in the next step: total_batch_size, or less in the linear ramp by steps of 32K (GPT-3, appendix B)."""
    if tokens_seen >= config.batch_ramp:
        return config.total_batch_size
    grown = config.total_batch_size * tokens_seen / config.batch_ramp
    return max(1, int(grown / RAMP_STEP)) * RAMP_STEP


@torch.no_grad()
def orthogonalize(G):
    """Map each matrix in G (n, rows, cols) to roughly the nearest orthogonal one, whose singular values are 1."""
    X = G
    if G.is_cuda and not G.is_complex():
        X = G.to(torch.bfloat16)  # accurate enough, but slower on some CPUs
    tall = G.size(1) > G.size(2)
    X = X.mH if tall else X  # so that X @ X.mH is the smaller of the two Gram matrices
    X = X / (X.norm(dim=(1, 2), keepdim=True) + 1e-7)
    # a Newton-Schulz iteration whose quintic is tuned for speed, not for accuracy (Jordan et al. 2024)
    for _ in range(5):
        A = X @ X.mH  # mH: the conjugate transpose
        A = torch.baddbmm(A, A, A, beta=-4.7750, alpha=2.0315)  # -4.7750 A + 2.0315 A A
        X = torch.baddbmm(X, A, X, beta=3.4445)  # 3.4445 X + A X
    return X.mH if tall else X


class Muon(torch.optim.Optimizer):
    """SGD with momentum and orthogonalized updates (Jordan et al. 2024), for the matrices inside the blocks.

    All parameters of a group have the same shape, and each is a stack of `split` matrices (3: query, key and value).
    torch.optim.Muon would orthogonalize one matrix after another on every rank, and query, key and value as one.
    """

    numbers_per_parameter = 1  # momentum only; the account of a run estimates memory from this

    def __init__(self, groups, lr, *, momentum, weight_decay):
        defaults = dict(lr=lr, momentum=momentum, weight_decay=weight_decay, split=1)
        super().__init__(groups, defaults | dict(foreach=True))  # zero_grad clears all gradients at once

    @torch.no_grad()
    def step(self):
        """Update the parameters. Every rank must call it, because the ranks share the orthogonalization."""
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
            torch._foreach_lerp_(grads, momenta, group["momentum"])  # Nesterov momentum
            rows, cols = params[0].shape
            rows //= group["split"]
            stacks = torch.stack(grads)  # (len(params), split * rows, cols)
            stacks = map_over_ranks(orthogonalize, stacks, rows=rows)
            updates = [stacks[i] for i in range(len(params))]  # torch 2.8 unbinds no sharded tensor
            # rows > cols: an orthogonal update changes outputs by only sqrt(cols / rows) as much as a square one
            scale = max(1, rows / cols) ** 0.5
            torch._foreach_mul_(params, 1 - group["lr"] * group["weight_decay"])
            torch._foreach_add_(params, updates, alpha=-group["lr"] * scale)


def configure_optimizers(model, config):
    """The optimizers, with their peak rates: AdamW, or Muon for the blocks' matrices and AdamW for the rest.

    Parameters are passed with their names, so that optimizer state in a checkpoint can be matched by name. A group's
    "flag" is the one that sets its rate: the account of the run shows it.
    """
    optimizers: list[torch.optim.Optimizer] = []
    muon_groups = {}
    rest = []
    for name, p in model.named_parameters():  # tied weights appear once
        if config.optimizer == "muon" and name.startswith("transformer.h.") and p.dim() == 2:
            rows, cols = p.shape
            is_qkv = name.endswith("c_attn.weight") and rows == 3 * cols
            split = 3 if is_qkv else 1  # query, key and value are three matrices
            # matrices of one shape are updated together
            group = muon_groups.setdefault((p.shape, split), {"params": [], "split": split, "flag": "--muon-lr"})
            group["params"].append((name, p))
        else:
            rest.append((name, p))
    if muon_groups:
        groups = list(muon_groups.values())
        momentum, weight_decay = config.muon_momentum, config.muon_weight_decay
        optimizers.append(Muon(groups, config.muon_lr, momentum=momentum, weight_decay=weight_decay))
    decayed = [(name, p) for name, p in rest if p.dim() >= 2]
    others = [(name, p) for name, p in rest if p.dim() < 2]  # biases and norms
    groups = [
        {"params": decayed, "weight_decay": config.weight_decay, "flag": "--max-lr"},
        {"params": others, "weight_decay": 0.0, "flag": "--max-lr"},
    ]
    betas = (config.beta1, config.beta2)
    fused = all(p.device.type in ("cuda", "cpu") and p.is_floating_point() for _, p in rest)
    groups = [group for group in groups if group["params"]]  # torch takes no empty group of named parameters
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
    warmed_up = 1.0
    if step < config.muon_momentum_warmup:
        warmed_up = step / config.muon_momentum_warmup
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = lr * group["initial_lr"] / config.max_lr
            if isinstance(optimizer, Muon):  # early on there are few gradients to average over
                group["momentum"] = 0.85 + (config.muon_momentum - 0.85) * warmed_up
    return lr


# ----- A run and its parts ------------------------------------------------------------------------------


class Parts(NamedTuple):
    """Everything the training loop works with."""

    config: TrainConfig
    world: World  # this process's rank, the number of ranks (size) and the device
    layout: Whole  # how the ranks hold the model: each all of it, or each a share
    raw_model: GPT  # the model that is saved, sampled and scored
    model: Any  # the same model for training: compiled and in DDP where these are used
    optimizers: list[torch.optim.Optimizer]
    scaler: torch.amp.GradScaler  # for float16
    loader: DataLoaderLite  # of the training data
    val_loaders: list[DataLoaderLite]  # one for each folder
    enc: tiktoken.Encoding
    token_bytes: torch.Tensor  # the number of bytes of text that each id stands for
    examples: list[hellaswag.Rendered]
    # your own objects, by name. Each has state_dict() and load_state_dict(): it is saved in every checkpoint (rank 0's
    # copy), and restored on resume and in branches
    own: Mapping[str, Any]
    flops_per_token: int  # of training, see GPT.flops_per_token
    found: Fit  # B, and whether torch.compile works here


def autocast(config, world):
    """Context in which matmuls and attention run in the run's dtype. Weights, gradients and the loss stay in float32.

    So do LayerNorm and softmax on a GPU; a CPU computes them in bfloat16.
    """
    return torch.autocast(world.device.type, matmul_dtype(config), enabled=config.dtype != "float32")


def matmul_dtype(config):
    """The dtype of matmuls; with fp8, all but the output layer's."""
    return getattr(torch, "bfloat16" if config.dtype == "fp8" else config.dtype)


def sum_over_ranks(tensor, world):
    """All-reduce a tensor in place: the sum over the ranks. (For a mean, divide: gloo has no average.)"""
    if world.size > 1:
        dist.all_reduce(tensor)
    return tensor


# ----- Evaluation ---------------------------------------------------------------------------------------


class ValLoss(NamedTuple):
    """The loss on a validation split."""

    loss: float  # the mean over its targets, in nats per token
    bits_per_byte: float  # of text: comparable between tokenizers


def val_batches(
    loader: DataLoaderLite, parts: Parts
) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """This rank's batches of val_tokens tokens of a validation split, the same ones every time: x, y and is_target.

    All are of shape (B, T). is_target says where y is a target: not where a mask leaves it out, and not past the end.
    """
    config, world = parts.config, parts.world
    num_windows = min(config.val_tokens // config.sequence_length, loader.num_windows)
    B = loader.B
    loader.position = 0
    for first in console.progress_bar(range(0, num_windows, B * world.size), "validation", delay=3):
        x, y = loader.next_batch()
        # the last batch keeps the shape that the graph was compiled for: rows past the end are masked out
        num_rows = max(0, num_windows - first - world.rank * B)
        y[num_rows:] = IGNORE_INDEX
        yield x, y, y != IGNORE_INDEX


def evaluate_val_loss(model, loader, parts: Parts) -> ValLoss:
    """The loss of `model` on a validation split.

    Grad mode stays enabled although there is no backward pass, so that the graph compiled for training is reused.
    """
    sums = torch.zeros(3, device=parts.world.device)  # loss, targets, bytes
    for x, y, is_target in val_batches(loader, parts):
        with autocast(parts.config, parts.world):
            loss = model(x, y, return_logits=False)[1]
        num_targets = is_target.sum()
        num_bytes = parts.token_bytes[y.clamp(min=0)] * is_target
        sums += torch.stack([loss.detach() * num_targets, num_targets, num_bytes.sum()])
        del loss  # frees the activations before the next forward pass
    loss, num_targets, num_bytes = sum_over_ranks(sums, parts.world).tolist()
    if not num_targets:  # a mask may leave out every target
        return ValLoss(math.nan, math.nan)
    return ValLoss(loss / num_targets, loss / math.log(2) / max(1, num_bytes))


def mean_over_folders(losses: list[ValLoss], parts: Parts) -> ValLoss:
    """The mean of the folders' validation losses, weighted by the folders' shares of the training data."""
    weights = parts.config.data_weights or parts.loader.order.shares
    # a folder without a share may have no targets, and so no loss
    counted = [(weight / sum(weights), each) for weight, each in zip(weights, losses) if weight]
    loss = sum(share * each.loss for share, each in counted)
    bits_per_byte = sum(share * each.bits_per_byte for share, each in counted)
    return ValLoss(loss, bits_per_byte)


def evaluate_hellaswag(parts: Parts):
    """Score the rendered HellaSwag examples: each rank scores a share. Returns hellaswag's Counts over all of them."""
    world = parts.world
    share = parts.examples[world.rank :: world.size]
    fits = parts.val_loaders[0].B * parts.config.sequence_length  # tokens in a batch of training
    with autocast(parts.config, world), kernels.without_cudnn_attention():
        counts = hellaswag.evaluate(parts.raw_model, share, parts.enc.n_vocab, at_most=fits)
    sums = sum_over_ranks(torch.tensor(counts, device=world.device), world)
    return counts._make(sums.tolist())


def generate_samples(parts: Parts) -> list[str]:
    """Return four continuations of the prompt as text or, in chat fine-tuning, four answers to it."""
    config, enc, device = parts.config, parts.enc, parts.world.device
    text, ids = tokenizers.render_prompt(config.sample_prompt, enc)
    prompt = torch.tensor([ids] * 4, device=device)
    generator = torch.Generator(device).manual_seed(config.seed)  # so that steps can be compared
    with autocast(config, parts.world):
        next_ids = list(parts.raw_model.generate(prompt, 64, enc.n_vocab, top_k=50, generator=generator))
    rows = torch.stack(next_ids, 1).tolist()
    return [text + enc.decode(row).partition("<|end|>")[0] for row in rows]


def is_due(step, every, last=False):
    """Whether something is due that is done every `every` steps and after the last step; 0: never."""
    return every > 0 and (last or step % every == 0)


def evaluate(step, parts: Parts, run):
    """Run the evaluations and samples that are due at this step.

    After a signal to stop, the rest is skipped. The next start repeats all of this step's.
    """
    config, world, layout = parts.config, parts.world, parts.layout
    last = step == config.max_steps

    def is_due_now(every):
        return is_due(step, every, last) and not run.stopping

    @functools.cache
    def whole_parts():
        return parts._replace(raw_model=layout.whole_model(parts.raw_model))

    parts.raw_model.eval()
    if is_due_now(config.val_every):
        model = parts.model.module if layout.copies > 1 else parts.model
        with run.evaluation():
            losses = [evaluate_val_loss(model, loader, parts) for loader in parts.val_loaders]
        mean = mean_over_folders(losses, parts)
        # with --keep-best, the lowest mean is the best
        run.log_val_loss(step, mean, by_folder=losses)
    if is_due_now(config.hellaswag_every):
        with run.evaluation():
            counts = evaluate_hellaswag(whole_parts())
        accuracy = counts.acc_norm / counts.n
        run.report(step, f"HellaSwag {counts.acc_norm}/{counts.n} = {accuracy:.4f}", {"hella": accuracy})
    # add your own evaluation here, with val_batches or like HellaSwag's. The stream that it reports is logged, plotted
    # and compared
    if is_due_now(config.sample_every):
        if step > 0 or last:  # before the first step, samples would be noise
            whole = whole_parts()
            if world.rank == 0:
                run.log_samples(step, generate_samples(whole))
    parts.raw_model.train()


# ----- Training -----------------------------------------------------------------------------------------


class Step(NamedTuple):
    """The result of one optimizer step."""

    loss: float  # the mean over all targets of the step, on all ranks, before the update
    norm: float  # the gradient norm before clipping
    lr: float  # AdamW's
    tokens: int  # on all ranks
    stop: bool  # whether a rank has received a signal to stop
    scalars: dict[str, Any]  # your own streams of log.txt


def accumulate_gradients(parts: Parts, num_windows: int, scalars: dict[str, Any]) -> torch.Tensor:
    """Read the next num_windows windows in micro-batches of at most loader.B per rank, and add up their gradients.

    Returns this rank's loss of each micro-batch, weighted so that their sum, averaged over the ranks, is the mean over
    all targets. scalars: for a number that needs x, y or the loss of a micro-batch; add it as in train_step.
    """
    config, world = parts.config, parts.world
    model, loader = parts.model, parts.loader
    # in a batch ramp B changes, but takes few values: torch.compile compiles for each, and gives up after 8
    B = math.gcd(num_windows // world.size, loader.B)
    grad_accum_steps = num_windows // (B * world.size)
    num_targets = max(1, loader.count_targets(num_windows))
    counts = []
    losses = []
    for micro_step in range(grad_accum_steps):
        x, y = loader.next_batch(B)
        # leave out more targets here, if you like: y[...] = IGNORE_INDEX
        # as no_sync() does: only the last micro-step all-reduces the gradients. With FSDP every one does, because whole
        # gradients may not fit
        if parts.layout.copies > 1:
            model.require_backward_grad_sync = micro_step == grad_accum_steps - 1
        # only forward pass and loss are under autocast; the backward pass follows their dtypes
        with autocast(config, world):
            _, loss = model(x, y, return_logits=False)
        # micro-batches with 10 and 30 targets weigh 1 and 3, so that their sum becomes the mean over the step's
        # targets; times the world size, because DDP averages over the ranks
        count = (y != IGNORE_INDEX).sum()
        loss = loss * (count * world.size / num_targets)
        parts.scaler.scale(loss).backward()
        losses.append(loss.detach())
        counts.append(count)
    # num_targets is what the files have. If the loop has left out more, this makes it the mean over the others
    found = sum_over_ranks(torch.stack(counts).sum(), world)
    share = num_targets / found.clamp(min=1)
    for p in model.parameters():
        if p.grad is not None:
            p.grad.mul_(share)
    return torch.stack(losses) * share


def train_step(step: int, parts: Parts, signals: Sequence[int]) -> Step:
    """Take one optimizer step on the next windows.

    signals: the stop signals received so far. If loss or norm is not finite, all ranks raise an error and nothing is
    updated.
    """
    config, world, optimizers, scaler = parts.config, parts.world, parts.optimizers, parts.scaler
    lr = apply_schedules(optimizers, step, config)
    # dropout, for example, draws the same numbers in a step, whether or not the run was resumed before it
    seed_random_numbers(config.seed, step, world.rank)
    T = config.sequence_length
    start = parts.loader.position
    num_windows = get_batch_size(start * T, config) // T
    assert num_windows % world.size == 0, f"{num_windows} sequences cannot be shared by {world.size} ranks"
    scalars: dict[str, Any] = {}
    losses = accumulate_gradients(parts, num_windows, scalars)
    # a number put here becomes a stream of log.txt, with rank 0's values:
    # scalars["wte"] = parts.raw_model.transformer.wte.weight.norm()
    for optimizer in optimizers:
        scaler.unscale_(optimizer)
    norm = nn.utils.clip_grad_norm_(parts.model.parameters(), config.grad_clip or math.inf)
    norm = parts.layout.whole_tensor(norm)
    # with that of the targets, two small all-reduces per step in addition to DDP's, and one copy to the host (more with
    # float16; Muon also all-gathers)
    sums = torch.stack([losses.sum(), torch.full_like(losses[0], len(signals))])
    sums = sum_over_ranks(sums, world)
    loss_sum, num_signals, norm = torch.cat([sums, norm[None]]).tolist()
    loss = loss_sum / world.size
    overflow = False
    if not math.isfinite(norm):
        # float16: gradients overflow now and then, on all ranks alike. Then no optimizer takes a step, and the scaler
        # lowers the scale. In other dtypes the scale is 1
        overflow = scaler.get_scale() > 1
    if not math.isfinite(loss) or not (overflow or math.isfinite(norm)):
        raise diverged(step, parts, loss=loss, norm=norm, start=start, batch_losses=losses)
    for optimizer in optimizers:
        if not overflow:
            scaler.step(optimizer)
        # DDP's gradients are views of its buckets: keep them, because new ones would take more memory
        optimizer.zero_grad(set_to_none=parts.layout.copies == 1)
    scaler.update()
    if world.size > 1:
        for buffer in parts.raw_model.buffers():
            dist.broadcast(buffer, 0)  # running statistics, for example; GPT-2 has none
    if world.size == 1:
        num_signals = len(signals)  # also those received since the sum
    return Step(loss=loss, norm=norm, lr=lr, tokens=num_windows * T, stop=num_signals > 0, scalars=scalars)


# ----- The run ------------------------------------------------------------------------------------------


def complaints(c: TrainConfig, inherited: dict[str, Any], world: World) -> Iterator[str]:
    """A sentence for each thing that is wrong with the recipe. `check_config` finds the rest."""
    if min(c.n_head, c.n_embd) > 0 and c.n_embd % c.n_head:
        divisors = [n for n in range(c.n_embd, 0, -1) if c.n_embd % n == 0]
        heads = min(divisors, key=lambda n: abs(n - c.n_head))
        width = max(1, round(c.n_embd / c.n_head)) * c.n_head
        yield f"--n-embd {c.n_embd} is not a multiple of --n-head {c.n_head}. Try --n-head {heads} or --n-embd {width}."
    if c.sequence_length > c.block_size:
        yield f"--sequence-length {c.sequence_length} is above --block-size {c.block_size}. Lower the first one."
    for name in ("n_layer", "n_head", "n_embd"):  # new ids and positions can be added, see GPT.extend
        value = getattr(c, name)
        if inherited.get(name, value) != value:
            yield (
                f"--{name.replace('_', '-')} is {value}, but the weights that the run starts from have "
                f"{inherited[name]}. Leave it out, or start a new model in another --out-dir."
            )
    smallest = max(1, c.sequence_length) * world.size
    left_over = RAMP_STEP % smallest + c.total_batch_size % RAMP_STEP
    if c.batch_ramp and left_over:
        yield (
            f"A batch ramp grows in steps of {RAMP_STEP:,} tokens. {smallest} (--sequence-length x ranks) must divide "
            "that number, and --total-batch-size must be a multiple of it. Change these, or leave out --batch-ramp."
        )
    for name in ("beta1", "beta2", "muon_momentum"):
        if not 0 <= getattr(c, name) < 1:
            yield f"--{name.replace('_', '-')} is {getattr(c, name)}, but it must be 0 or more and below 1."
    if not 0 <= c.decay_fraction <= 1:
        yield f"--decay-fraction is {c.decay_fraction}, but it must be between 0 and 1."
    if c.preset == "chat" and not c.init_from and not c.branch_from:
        yield "--preset chat fine-tunes a model. Name one with --init-from, for example --init-from log or gpt2."


def make_config(
    inherited: dict[str, Any], typed: dict[str, Any], world: World, *, kind: str = "", tokenizer: str = ""
) -> tuple[TrainConfig, Sequence[Folder]]:
    """Make the run's config and open its folders of data. UserError if a setting is wrong, or if there are no data.

    Typed settings win over inherited ones (from the run, its parent or its model), and those over the preset's. Rank 0
    makes the config at each start; it keeps the values that an earlier start has completed.

    kind: of start, see plumbing/run/start.py; tokenizer: the name of the one that the weights were trained with.
    """
    preset = PRESETS[typed.get("preset", "gpt2")]
    c = TrainConfig(**vars(preset) | inherited | typed)
    if "sequence_length" not in typed:  # the preset's may be too long for a model
        c = dataclasses.replace(c, sequence_length=min(c.sequence_length, c.block_size))
    c = check_config(c, typed, complaints(c, inherited, world), world=world, is_wide=c.n_embd >= 128)
    docs = PRESETS["quickstart"].data[0]
    if docs in c.data and not c.dry_run:
        import fineweb  # the trainer makes no other data

        fineweb.make_python_docs(docs)
    folders = open_folders(c, split_of(kind), num_ids=c.vocab_size or preset.vocab_size, tokenizer=tokenizer)
    enc = folders[0].enc
    padded = math.ceil(enc.n_vocab / 64) * 64  # 50,304 for 50,257
    rows = inherited.get("vocab_size", 0)  # which a run that continues, a branch and an evaluation keep
    if kind == TUNED:
        rows = max(rows, padded) if models.is_tokenizer(tokenizer, enc) else padded
    c = dataclasses.replace(c, vocab_size=typed.get("vocab_size") or rows or padded)
    if (c.passes or c.tokens_per_parameter) and kind != EVALUATION:
        steps = count_steps(c, folders)
        # the warmup is at most a tenth of the run
        c = dataclasses.replace(c, max_steps=steps, warmup_steps=min(c.warmup_steps, steps // 10))
    return dataclasses.replace(c, passes=0.0, tokens_per_parameter=0.0), folders


def load_data(start):
    """A run's loader, in the order of the training, and a validation loader for each folder."""
    config, world = start.config, start.layout.world

    B, T = config.batch_size, config.sequence_length
    place = dict(rank=world.rank, world_size=world.size, shuffle=config.shuffle, device=world.device)
    order = dict(weights=config.data_weights, seed=config.seed)
    loader = DataLoaderLite(start.folders, split_of(start.kind), B, T, **order, **place)
    # without the seed, so that they always read the same windows
    return loader, [DataLoaderLite([folder], "val", B, T, **place) for folder in start.folders]


def shard(model, world, config):
    """Split a model's weights, and so gradients and optimizer state, across the ranks: FSDP2 (Zhao et al. 2023).

    A block's weights are gathered before its forward pass and before its backward pass, and freed after each. All
    others stay gathered from the forward pass to the end of the backward pass.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard  # takes a second to import

    mesh = init_device_mesh(world.device.type, (world.size,))
    policy = MixedPrecisionPolicy()
    # under autocast alone, autograd would keep a copy of each weight on every rank. A CPU's LayerNorm takes no float16
    if config.dtype != "float32" and (world.device.type, config.dtype) != ("cpu", "float16"):
        dtype = matmul_dtype(config)
        policy = MixedPrecisionPolicy(dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh)  # embeddings and the final norm stay in float32


def make_gpt(config) -> GPT:
    """A new model, computed as the run's TrainConfig says."""
    model = GPT(config.model_config)
    model.activation_checkpointing = config.activation_checkpointing
    if config.dtype == "fp8":
        from plumbing.system.float8 import Float8Linear

        model.lm_head = Float8Linear(model.lm_head)  # shares its weight
    return model


def wrap(raw_model, config, layout):
    """The model to train: compiled with config.compile, and in DDP if several ranks have a whole model each.

    With DDP, every rank must use every parameter in every step.
    """
    model = torch.compile(raw_model, dynamic=False) if config.compile else raw_model
    if config.compile and layout.shares > 1:  # FSDP's hooks and checkpoint() hide the blocks from torch.compile
        for block in raw_model.blocks:
            block.compile(dynamic=False)
    if layout.copies > 1:
        # subtle: the first call compiles inside DDP, which splits the graph at its gradient buckets, so that their
        # all-reduces overlap with the backward pass. Larger buckets than DDP's 25 MB leave fewer graphs to compile
        model = DDP(model, bucket_cap_mb=100, gradient_as_bucket_view=True)
    return model


def setup(start) -> Parts:
    """Load, make and check everything that the run needs. This writes nothing to its folder yet."""
    config, layout = start.config, start.layout
    world = layout.world
    # high: TF32, which GPUs have since Ampere
    torch.set_float32_matmul_precision("high" if world.device.type == "cuda" else "highest")
    loader, val_loaders = load_data(start)
    check_data(start, loader, val_loaders)
    enc = start.folders[0].enc
    text, _ = val_loaders[0].next_batch(8)
    seed_random_numbers(config.seed)  # torch.manual_seed, and numpy's and Python's own, alike on all ranks
    # a new model, or one with the weights that the run starts from
    raw_model = make_model(make_gpt, start, shard=shard, text=text)
    # from here on the model has the weights that this start begins with: initialize them in GPT.__init__
    optimizers = configure_optimizers(raw_model, config)
    if start.kind == EVALUATION:
        optimizers = []  # they would take memory in the trial
    keep_peak_rates(optimizers)
    own: dict[str, Any] = {}  # see Parts: own["ema"] = torch.optim.swa_utils.AveragedModel(raw_model)
    scaler = torch.amp.GradScaler(world.device.type, enabled=config.dtype == "float16")
    examples = []
    if config.hellaswag_every:
        # a missing file is downloaded now, rather than in the middle of a run
        path, limit = config.hellaswag_data, config.hellaswag_limit
        examples = world.broadcast_from_master(hellaswag.load_examples, path, enc, limit)
        hellaswag.note_cut(examples, config.block_size)
    # try a step: find the largest B that fits, and whether this machine can do torch.compile, which `wrap` adds
    functions = dict(make=make_gpt, wrap=wrap, autocast=autocast, matmul_dtype=matmul_dtype(config))
    found = try_out(start, raw_model, optimizers, text=text, **functions)
    for each in (loader, *val_loaders):
        each.B = found.B
    return Parts(
        config=config,
        world=world,
        layout=layout,
        raw_model=raw_model,
        model=found.model,
        optimizers=optimizers,
        scaler=scaler,
        loader=loader,
        val_loaders=val_loaders,
        enc=enc,
        token_bytes=torch.tensor(tokenizers.token_bytes(enc), device=world.device),
        examples=examples,
        own=types.MappingProxyType(own),  # read-only: a resume could not restore later additions
        flops_per_token=raw_model.flops_per_token(config.sequence_length),
        found=found,
    )


def fit(parts: Parts, run):
    """The training loop, from the run's first or next step to its last. Returns the run's Ended: steps and losses."""
    config = parts.config
    # one iteration more than steps: the evaluations at step N see the weights after N updates, also after the last one
    for step in range(run.start_step, config.max_steps + 1):
        last = step == config.max_steps
        is_saved = not last and (is_due(step, config.checkpoint_every) or is_due(step, config.milestone_every))
        if is_saved:  # before the evaluations, because a start from this checkpoint repeats them
            run.save(step, finished=False)
        evaluate(step, parts, run)
        if last or run.stopping:
            if not is_saved:
                run.save(step, finished=last and not run.stopping)
            break
        take_step(step, parts, run)
    if run.stopping:
        # the next start repeats these steps and compares the losses, because state that no checkpoint holds would be
        # lost in silence. The second one's depends on all that an update uses
        for repeated in range(step, min(step + 2, config.max_steps)):
            take_step(repeated, parts, run)
    return run.finish(step)  # exports the model, unless the run was stopped


def take_step(step: int, parts: Parts, run):
    """Take a step and log it."""
    began = time.perf_counter()
    done = train_step(step, parts, run.signals)
    run.log_step(step, done, seconds=time.perf_counter() - began)


def evaluate_only(start):
    """Evaluate a model and train nothing (--max-steps 0). Returns the losses as an Ended of step 0."""
    parts = setup(start)
    with open_report(start, parts) as report:
        evaluate(0, parts, report)
    return report.finish(0)


def plan(start):
    """Print what the run will do and cost (--dry-run), and write nothing."""
    config = dataclasses.replace(start.config, hellaswag_every=0)  # the examples may have to be downloaded
    parts = setup(start._replace(config=config))
    if start.saved:
        parts.loader.load_state_dict(start.saved["loader"])
    print_account(start, parts)


def train(typed: dict[str, Any]):
    """Train with the typed settings, {name: value}, and return the run's Ended."""
    # torchrun starts a process for each GPU and sets RANK, LOCAL_RANK and WORLD_SIZE. The ranks meet here
    with join_ranks(typed) as world:
        # rank 0 decides what the run is: from the preset, from its folder, its parent or its model, and what was typed
        with begin(PRESETS, typed, make_config, model_class=GPT, world=world) as start:
            if start.ended:  # the run is finished already
                return start.ended
            if start.config.dry_run:
                return plan(start)
            if start.kind == EVALUATION:
                return evaluate_only(start)
            parts = setup(start)
            # restores the checkpoint and says what the run will do and cost
            with open_run(start, parts) as run:
                return fit(parts, run)


def main(args=None):
    """Train with the flags on the command line or in a list of words, and return the run's Ended: steps and losses."""
    return train(read_flags(TrainConfig, PRESETS, args))


if __name__ == "__main__":
    console.run(train, typed)
