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

A run writes to --out-dir: log.txt (`step stream value` per line), run.txt (commands, settings, machines), a copy
of this file, model_<step>.pt (checkpoints) and, at the end, hf/ (a GPT-2 in Hugging Face format). Repeating the
command continues a run that was stopped or killed, or crashed, even on a different number of GPUs.

Sources: GPT-2 (Radford et al. 2019) for the model, GPT-3 (Brown et al. 2020, table 2.1 and appendix B) for
the hyperparameters that GPT-2's paper leaves out, Muon (Jordan et al. 2024) for the speedrun's optimizer.
"""

import contextlib
import dataclasses
import gc
import math
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal

from plumbing.cli import console, flags

# ----- Configuration ------------------------------------------------------------------------------------


@dataclasses.dataclass
class GPTConfig:
    """What defines a model: it is saved with the weights. Each field is a flag, too, and its comment the help text."""

    block_size: int = 1024  # longest sequence: the number of position embeddings
    vocab_size: int = 50304  # 50,257 tokens, padded to a multiple of 64 for a faster matmul
    n_layer: int = 12  # number of blocks
    n_head: int = 12  # attention heads per block
    n_embd: int = 768  # channels of the residual stream


@dataclasses.dataclass
class TrainConfig(GPTConfig):
    """All settings of a run: those of its model, and these."""

    # the defaults of all other flags, as listed above
    preset: Literal["gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl", "speedrun", "quickstart", "baby", "chat"] = (
        "gpt2"
    )
    # the run
    data: str = "edu_fineweb10B"  # folder of token shards
    out_dir: str = "log"  # folder of the run
    init_from: str = ""  # initial weights: a GPT-2 name, a folder or a checkpoint
    branch_from: str = ""  # run or checkpoint to continue in out_dir with other settings
    resume: bool = True  # resume the run in out_dir; --no-resume moves it aside
    seed: int = 1337  # seed of the weights, data order and samples
    dry_run: bool = False  # say what the run will do and cost, and end before its first step; nothing is written
    device: str = "auto"  # cpu, cuda or mps; auto: best available
    # auto: bfloat16 where the device is fast at it, float16 on GPUs before Ampere, else float32; fp8: bfloat16 with the
    # output layer in float8. Runs on different numbers of ranks differ by rounding, least in float32
    dtype: Literal["auto", "float32", "bfloat16", "float16", "fp8"] = "auto"
    compile: bool | None = None  # torch.compile the model; by default on CUDA only
    activation_checkpointing: bool = False  # recompute activations: less memory, slower
    # the batch: total_batch_size = batch_size * sequence_length * ranks * micro-steps
    batch_size: int = 64  # B, at most this many sequences per rank and micro-step; lowered until they fit
    sequence_length: int = 1024  # T, tokens per sequence
    total_batch_size: int = 2**19  # tokens per step over all ranks (gpt2: GPT-3's 0.5M)
    batch_ramp: int = 0  # tokens over which the batch grows from 32K; 0: none
    shuffle: bool = True  # read the sequences in random order; --no-shuffle: in file order
    # the schedule
    max_steps: int = 19073  # optimizer steps (gpt2: 10B tokens / 0.5M per step); 0: evaluate only
    passes: float = 0.0  # passes over the training data, in place of --max-steps; 0: --max-steps counts
    warmup_steps: int = 715  # steps of linear warmup (gpt2: GPT-3's 375M tokens)
    max_lr: float = 6e-4  # peak learning rate (gpt2: GPT-3 Small's); with Muon, of what is not in its groups
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
    muon_momentum: float = 0.95  # Muon: warmed up from 0.85 over 300 steps
    muon_weight_decay: float = 0.01  # Muon: weight decay
    # evaluation and output, every so many steps and after the last one; 0: never
    val_every: int = 250  # steps between validations
    val_tokens: int = 10 * 2**20  # validation tokens, the same ones every time
    hellaswag_every: int = 250  # steps between HellaSwag scores
    hellaswag_limit: int = 0  # examples to score; 0: all
    hellaswag_data: str = "hellaswag/hellaswag_val.jsonl"  # HellaSwag's examples; downloaded if missing
    sample_every: int = 250  # steps between samples
    sample_prompt: Annotated[str, "may be empty"] = "Hello, I'm a language model,"  # what samples continue
    checkpoint_every: int = 500  # steps between checkpoints; 0: only at the end
    keep_checkpoints: int = 2  # newest checkpoints to keep
    milestone_every: int = 0  # steps between checkpoints that are kept for good
    keep_best: bool = False  # keep the weights with the lowest validation loss as model_best.pt
    wandb: Annotated[str, "may be empty"] = ""  # Weights & Biases project in which to mirror the log
    # the model; what has weights can only be fine-tuned with a larger --vocab-size or a smaller --block-size
    vocab_size: int = 0  # rows of the embedding; 0: the tokenizer's size, rounded up to a multiple of 64


# fmt: off
PRESETS = {
    # GPT-2's four sizes with GPT-3's learning rates; B is chosen for 80 GB and halved until it fits
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
        preset="quickstart", data="python_docs", out_dir="log/quickstart", compile=False, sample_prompt="The ",
        n_layer=4, n_head=4, n_embd=128, block_size=128,
        batch_size=16, sequence_length=128, total_batch_size=2048,
        max_steps=400, warmup_steps=20, schedule="wsd", max_lr=4e-3, min_lr=4e-4,
        optimizer="muon", muon_lr=0.04, val_every=100, val_tokens=2**15, hellaswag_every=0,
        sample_every=200, checkpoint_every=200, keep_best=True),
    "baby": TrainConfig(
        preset="baby", data="python_docs", out_dir="log/baby", sample_prompt="The ", hellaswag_every=0, keep_best=True,
        n_layer=6, n_head=6, n_embd=384, block_size=256, sequence_length=256, total_batch_size=2**14,
        max_steps=1000, warmup_steps=50, schedule="wsd", max_lr=2e-3, optimizer="muon", val_tokens=2**17),
    "chat": TrainConfig(
        preset="chat", data="smoltalk", out_dir="log/chat", sample_prompt="Why is the sky blue?", hellaswag_every=0,
        batch_size=32, total_batch_size=2**17, keep_best=True,
        max_steps=3000, warmup_steps=100, max_lr=1e-4, min_lr=1e-5),
}
# fmt: on


def complaints(c: TrainConfig) -> Iterator[str]:
    """A sentence for each thing that is wrong with the model's settings, apart from single numbers."""
    if c.n_head > 0 and c.n_embd > 0 and c.n_embd % c.n_head:
        divisors = [n for n in range(c.n_embd, 0, -1) if c.n_embd % n == 0]
        heads = min(divisors, key=lambda n: abs(n - c.n_head))
        width = max(1, round(c.n_embd / c.n_head)) * c.n_head
        yield f"--n-embd {c.n_embd} is not a multiple of --n-head {c.n_head}. Try --n-head {heads} or --n-embd {width}."
    if c.sequence_length > c.block_size:
        longer = "" if c.init_from or c.branch_from else ", or raise --block-size"
        yield f"--sequence-length {c.sequence_length} is above --block-size {c.block_size}. Lower it{longer}."


def parse_args(args: Sequence[str] | None = None, **inherited: Any) -> TrainConfig:
    """Parse a command line into a TrainConfig. Flags override `inherited` settings, which override the preset's."""
    presets = {name: dataclasses.replace(preset, **inherited) for name, preset in PRESETS.items()}
    return flags.parse(TrainConfig, args, presets=presets, synonyms=flags.OTHER_TRAINERS)


if __name__ == "__main__":
    console.run(parse_args)  # answers --help and mistyped flags before the slow imports below

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
import torch.nn as nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.checkpoint import checkpoint as recompute_in_backward

import hellaswag
from plumbing.cli.console import UserError
from plumbing.data import shards, tokenizers
from plumbing.data.order import permute
from plumbing.run import checkpoint, checks, huggingface, options
from plumbing.run import folder as run_folder
from plumbing.run.summary import print_account
from plumbing.system import autofit, devices, distributed, kernels

# ----- Model --------------------------------------------------------------------------------------------

IGNORE_INDEX = -100  # targets that are excluded from the loss


class CausalSelfAttention(nn.Module):
    """Causal multi-head self-attention (Vaswani et al. 2017, section 3.2)."""

    def __init__(self, config):
        super().__init__()
        self.n_head = config.n_head
        self.c_attn: Any = nn.Linear(config.n_embd, 3 * config.n_embd)  # query, key, value in one matmul
        self.c_attn.weight.parts = [config.n_embd] * 3  # their rows, for Muon: each part is a matrix of its own
        self.c_proj = nn.Linear(config.n_embd, config.n_embd)

    def forward(self, x, attn_mask=None, cache=None):
        # B sequences, T tokens, C channels = nh heads * hs channels each; with a cache, S >= T tokens to attend to
        B, T, C = x.shape
        q, k, v = self.c_attn(x).split(C, dim=2)
        heads = (B, T, self.n_head, C // self.n_head)
        q = q.view(heads).transpose(1, 2)  # (B, nh, T, hs)
        k = k.view(heads).transpose(1, 2)  # (B, nh, T, hs)
        v = v.view(heads).transpose(1, 2)  # (B, nh, T, hs)
        if cache:
            k, v = cache.update(k, v)  # (B, nh, S, hs)
        # subtle: with a cache, T is 1 (the new token attends to everything) or S (the prompt: ordinary causal mask)
        options: dict[str, Any] = dict(attn_mask=attn_mask, is_causal=attn_mask is None and T > 1)
        if not x.is_cpu:
            y = F.scaled_dot_product_attention(q, k, v, **options)  # (B, nh, T, hs)
        else:  # in float32, which CPUs compute faster at T <= 512
            y = kernels.attention_on_cpu(q, k, v, **options)
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
    """Pre-norm residual block: GPT-2 moved LayerNorm to the input of each sub-block."""

    def __init__(self, config):
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.n_embd)
        self.attn = CausalSelfAttention(config)
        self.ln_2 = nn.LayerNorm(config.n_embd)
        self.mlp = MLP(config)

    def forward(self, x, attn_mask=None, cache=None):
        # subtle: autocast's LayerNorm returns float32, which would be copied where DDP cuts the compiled graph
        x = x + self.attn(self.ln_1(x).to(x.dtype), attn_mask, cache)
        return x + self.mlp(self.ln_2(x).to(x.dtype))


class GPT(nn.Module):
    """GPT-2 with the parameter names of transformers' GPT2LMHeadModel, so that the state dicts map key by key."""

    def __init__(self, config):
        super().__init__()
        self.config = config
        # how a run computes, which does not belong to the model: fit_to_machine sets these
        self.activation_checkpointing = False  # recompute the blocks' activations in the backward pass
        self.float8_lm_head = False  # output layer in float8 when only the loss is needed
        self.transformer: Any = nn.ModuleDict()
        self.transformer.wte = nn.Embedding(config.vocab_size, config.n_embd)
        self.transformer.wpe = nn.Embedding(config.block_size, config.n_embd)
        self.transformer.h = nn.ModuleList(Block(config) for _ in range(config.n_layer))
        self.transformer.ln_f = nn.LayerNorm(config.n_embd)
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        self.lm_head.weight = self.transformer.wte.weight  # weight tying: one matrix for input and output
        # GPT-2's initialization with one change: position embeddings get std 0.02, as is now usual; GPT-2 used 0.01
        for name, parameter in self.named_parameters():
            if parameter._version != 1:  # torch's layers write theirs once: this was set on purpose
                continue
            if name.endswith("bias"):
                nn.init.zeros_(parameter)
            elif name.endswith("c_proj.weight"):
                # 2 * n_layer projections add up in the residual stream, whose variance should not grow (GPT-2, 2.3)
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * config.n_layer))
            elif parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)

    def hidden_states(self, idx: torch.Tensor, pos=None, attn_mask=None, cache=None) -> torch.Tensor:
        """Map token ids (B, T) to the last layer's hidden states (B, T, C), after the final norm.

        pos: position ids (B, T), default 0, 1, 2, ..., counted on from the cache; attn_mask: (B, 1, T, T), True where a
        token may attend, default causal; cache: a kernels.KVCache of the tokens before idx.
        """
        if pos is None:
            start, T = cache.length if cache else 0, idx.size(1)
            assert start + T <= self.config.block_size, f"{start + T} tokens are more than block_size"
            pos = torch.arange(start, start + T, device=idx.device)
        x = self.transformer.wte(idx) + self.transformer.wpe(pos)  # (B, T, C)
        device = x.device.type
        if torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device) == torch.bfloat16:
            x = x.bfloat16()  # autocast leaves the residual stream in float32: twice the memory traffic
        for block in self.transformer.h:
            if self.activation_checkpointing and torch.is_grad_enabled():
                x = recompute_in_backward(block, x, attn_mask, cache, use_reentrant=False)
            else:
                x = block(x, attn_mask, cache)
        if cache:
            cache.advance(idx.size(1))
        return self.transformer.ln_f(x)

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """Map hidden states (..., C) to logits (..., vocabulary), for training, sampling and HellaSwag alike."""
        return self.lm_head(x)

    def forward(self, idx: torch.Tensor, targets: torch.Tensor | None = None, return_logits: bool = True):
        """Map token ids (B, T) to (logits, loss): logits (B, T, vocabulary), and the mean loss over targets (B, T).

        Targets equal to IGNORE_INDEX do not count; without targets, the loss is None. With return_logits=False and
        targets, the logits are None, which saves their memory.
        """
        x = self.hidden_states(idx)
        if targets is None:
            return self.logits(x), None
        # FasterLoss changes how this is computed, but not what: see plumbing/system/kernels.py
        with kernels.FasterLoss(float8=self.float8_lm_head and not return_logits):
            logits = self.logits(x.flatten(0, 1))  # (B * T, vocabulary)
            loss = F.cross_entropy(logits, targets.flatten(), reduction="sum", ignore_index=IGNORE_INDEX)
        # add other losses `if self.training` only, so that validation losses can be compared between models
        num_targets = (targets != IGNORE_INDEX).sum().clamp(min=1)  # the mean over no targets would be NaN
        return logits.view(*idx.shape, -1) if return_logits else None, loss / num_targets

    @torch.no_grad()
    def generate(self, idx: torch.Tensor, max_new_tokens: int, vocab_size: int, *, temperature=1.0, **sampling):
        """Continue the token ids (B, T), reading their last block_size: yield the next ids (B,), one step at a time.

        temperature 0 is greedy; for `sampling` see `sample_ids`. Ids >= vocab_size are padding, never sampled.
        """
        block_size = self.config.block_size
        max_len = min(block_size, idx.size(1) + max_new_tokens)
        cache = kernels.KVCache(max_len)
        for _ in range(max_new_tokens):
            with devices.without_cudnn_attention():  # the number of keys grows with every token
                if idx.size(1) <= block_size and kernels.uses_cache(self, idx, max_len):
                    x = self.hidden_states(idx[:, cache.length :], cache=cache)
                else:  # past block_size every token has a new position: nothing cached is valid
                    x = self.hidden_states(idx[:, -block_size:])
            logits = self.logits(x[:, -1])[:, :vocab_size].float()  # (B, vocab_size)
            next_ids = sample_ids(logits / temperature, **sampling) if temperature else logits.argmax(-1)
            idx = torch.cat([idx, next_ids[:, None]], 1)
            yield next_ids

    @classmethod
    def from_state(cls, config: GPTConfig, weights: dict[str, torch.Tensor]) -> "GPT":
        """Make a GPT as `config` says and copy the state dict `weights` into it; UserError unless they fit exactly."""
        with checkpoint.SkipInit():
            model = cls(config)
        checkpoint.load_weights(model, weights)
        return model

    @classmethod
    def from_pretrained(cls, name_or_directory: str) -> "GPT":
        """Load a GPT-2 from the hub (gpt2, gpt2-xl, ...) or from a Hugging Face folder."""
        settings, weights = huggingface.load_huggingface(name_or_directory)
        return cls.from_state(GPTConfig(**settings), weights)


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
    saved = checkpoint.load_saved_model(source, GPTConfig)
    model = GPT.from_state(checkpoint.make_config(GPTConfig, saved.settings), saved.weights)
    checkpoint.check_num_ids(model.config.vocab_size, saved.enc)
    return model.eval(), saved.enc


# ----- Data ---------------------------------------------------------------------------------------------


class DataLoaderLite:
    """Sequences, which are windows of T tokens, in one global order that depends neither on B nor on the ranks.

    The shards of a split are cut into windows of T tokens at multiples of T; up to T tokens left at the end of a shard
    are dropped. All windows are visited, epoch after epoch, in file order or in a permutation by seed and epoch. Each
    call consumes the next B * world_size windows, and rank r reads the B of them from r * B on.
    """

    def __init__(
        self, folder: str, split: str, B: int, T: int, rank: int = 0, world_size: int = 1, *,
        seed: int = 0, shuffle: bool = False, device: str = "cpu",
    ):  # fmt: skip
        self.B, self.T, self.rank, self.world_size = B, T, rank, world_size
        self.seed, self.shuffle, self.device = seed, shuffle, device
        self.shards = shards.open_shards(folder, split)
        self.masks = shards.open_masks(self.shards)  # empty if every token is a target
        self.fingerprint = shards.fingerprint([shard.path for shard in self.shards])
        windows = [max(0, len(shard) - 1) // T for shard in self.shards]  # T targets take T + 1 tokens
        self.first_window = np.cumsum([0, *windows])  # the number of each shard's first window
        self.num_windows = int(self.first_window[-1])
        shards.check_size(folder, split, T, num_windows=self.num_windows, at_least=T)
        self.position = 0  # windows of the global order read so far: all that a resume needs
        self.executor = ThreadPoolExecutor(1)
        self.prefetched = {}  # (position, B) -> the future of that batch

    def locate(self, positions):
        """Map positions in the global order to (shard index, token offset) of each window."""
        epochs, windows = np.divmod(positions, self.num_windows)
        if self.shuffle:
            for epoch in np.unique(epochs):
                keys = np.random.SeedSequence([self.seed, int(epoch)]).generate_state(4, np.uint64)
                in_epoch = epochs == epoch
                windows[in_epoch] = permute(windows[in_epoch], self.num_windows, keys)
        indices = np.searchsorted(self.first_window, windows, side="right") - 1
        return zip(indices, (windows - self.first_window[indices]) * self.T)

    def read_batch(self, position, B):
        """Read this rank's batch at `position` into host memory: [tokens (B, T + 1)], plus the mask if there is one."""
        windows = list(self.locate(position + self.rank * B + np.arange(B)))
        batch = []
        for arrays in [self.shards, self.masks] if self.masks else [self.shards]:
            rows = [arrays[i].read(offset, self.T + 1) for i, offset in windows]
            batch.append(torch.from_numpy(np.stack(rows)))
        if self.device.startswith("cuda"):  # pinned memory lets the copy overlap with computation
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
        # subtle: stack gives the strides that fit_to_machine compiled for; slices would keep the row stride T + 1
        x, y = torch.stack([tokens[:, :-1], tokens[:, 1:]])
        if mask:
            y = y.masked_fill(mask[0][:, 1:] == 0, IGNORE_INDEX)
        return x, y


# ----- Schedules and optimizers -------------------------------------------------------------------------


def get_lr(step: int, config: TrainConfig) -> float:
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


def get_batch_size(tokens_seen: int, config: TrainConfig) -> int:
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
    X = X.mT if tall else X  # so that X @ X.mT is the smaller of the two Gram matrices
    X = X / (X.norm(dim=(1, 2), keepdim=True) + 1e-7)
    # a Newton-Schulz iteration whose quintic is tuned for speed, not for accuracy (Jordan et al. 2024)
    for _ in range(5):
        A = X @ X.mT
        A = torch.baddbmm(A, A, A, beta=-4.7750, alpha=2.0315)  # -4.7750 A + 2.0315 A A
        X = torch.baddbmm(X, A, X, beta=3.4445)  # 3.4445 X + A X
    return X.mT if tall else X


class Muon(torch.optim.Optimizer):
    """SGD with momentum and orthogonalized updates (Jordan et al. 2024), for the matrices inside the blocks.

    All parameters of a group have the same shape, and each is a stack of `split` matrices (3: query, key and value).
    torch.optim.Muon would orthogonalize one matrix after another, on every rank, and query, key and value as one.
    """

    def __init__(self, groups, lr, momentum, weight_decay):
        super().__init__(groups, dict(lr=lr, momentum=momentum, weight_decay=weight_decay, split=1))

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
            matrices = distributed.map_over_ranks(orthogonalize, matrices).float()
            updates = matrices.view(len(params), -1, cols).unbind()  # one per parameter
            # rows > cols: an orthogonal update changes outputs by only sqrt(cols / rows) as much as a square one
            scale = max(1, rows / cols) ** 0.5
            torch._foreach_mul_(params, 1 - group["lr"] * group["weight_decay"])
            torch._foreach_add_(params, updates, alpha=-group["lr"] * scale)


def configure_optimizers(model, config):
    """The optimizers, with their peak rates: AdamW, or Muon for the blocks' matrices and AdamW for the rest."""
    optimizers: list[torch.optim.Optimizer] = []
    muon_groups = {}  # by shape: matrices that are updated together
    for p in model.transformer.h.parameters() if config.optimizer == "muon" else ():
        if p.dim() == 2:
            parts = getattr(p, "parts", [])  # they are not those of a matrix whose shape was changed
            split = len(parts) if {len(p)} == {len(parts) * rows for rows in parts} else 1
            muon_groups.setdefault((p.shape, split), {"params": [], "split": split})["params"].append(p)
    if muon_groups:
        matrices = list(muon_groups.values())
        optimizers = [Muon(matrices, config.muon_lr, config.muon_momentum, config.muon_weight_decay)]
    with_muon = {p for group in muon_groups.values() for p in group["params"]}
    rest = [p for p in model.parameters() if p not in with_muon]  # tied weights appear once
    groups = [
        {"params": [p for p in rest if p.dim() >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in rest if p.dim() < 2], "weight_decay": 0.0},  # biases and norms
    ]
    betas = (config.beta1, config.beta2)
    fused = all(p.device.type in ("cuda", "cpu") and p.is_floating_point() for p in rest)
    optimizers.append(torch.optim.AdamW(groups, lr=config.max_lr, betas=betas, eps=1e-8, fused=fused))
    return optimizers


def apply_schedules(optimizers, step, config):
    """Scale each group's peak rate by the schedule, and set Muon's momentum. Returns the rate of a group at max_lr."""
    lr = get_lr(step, config)
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = lr * group.setdefault("initial_lr", group["lr"]) / config.max_lr
            if isinstance(optimizer, Muon):  # warmup: early on there are few gradients to average over
                group["momentum"] = 0.85 + (config.muon_momentum - 0.85) * min(1.0, step / 300)
    return lr


# ----- Evaluation ---------------------------------------------------------------------------------------


def evaluate_val_loss(model, loader, num_windows, *, token_bytes, signals, world):
    """(mean loss, bits per byte of text) over num_windows windows of the validation split, the same ones on all ranks.

    None if a rank has received one of the `signals` to stop. Bits per byte can be compared between tokenizers. Grad
    mode stays enabled, though there is no backward pass, so that the graph compiled for training is reused.
    """
    loader.position, B = 0, loader.B
    sums = torch.zeros(3, device=world.device)  # loss, targets, bytes
    for first in console.progress_bar(range(0, num_windows, B * world.size), "validation", delay=3):
        if signals:
            break
        x, y = loader.next_batch()
        # the last batch keeps the shape that the graph was compiled for: rows past the end are masked out
        y[max(0, num_windows - first - world.rank * B) :] = IGNORE_INDEX
        with world.autocast():
            loss = model(x, y, return_logits=False)[1].detach()  # detach frees the activations
        is_target = y != IGNORE_INDEX
        targets, text = is_target.sum(), token_bytes[y.clamp(min=0)] * is_target
        sums += torch.stack([loss * targets, targets, text.sum()])
    if world.max_over_ranks(len(signals)):
        return None
    loss, targets, num_bytes = world.all_reduce_sum(sums).tolist()
    return loss / targets, loss / math.log(2) / max(1, num_bytes)


def evaluate_hellaswag(raw_model, examples, enc, *, signals, world):
    """Score the rendered HellaSwag examples, each rank its share. Returns Counts over all, or None after a signal."""
    with world.autocast(), devices.without_cudnn_attention():
        share = examples[world.rank :: world.size]
        counts = hellaswag.evaluate(raw_model, share, enc.n_vocab, stop=signals)
    totals = world.all_reduce_sum(torch.tensor(counts, device=world.device))
    return None if world.max_over_ranks(len(signals)) else hellaswag.Counts(*totals.tolist())


def generate_samples(raw_model, enc, config, *, world):
    """Return four continuations of the prompt as text or, in chat fine-tuning, four answers to it."""
    text = config.sample_prompt
    ids = enc.encode_ordinary(text) or [enc.eot_token]
    if tokenizers.has_chat_tokens(enc):
        ids = tokenizers.render_question([{"role": "user", "content": text}], enc)
        text = enc.decode(ids[1:])
    prompt = torch.tensor([ids] * 4, device=world.device)
    generator = torch.Generator(world.device).manual_seed(config.seed)  # so that steps can be compared
    with world.autocast():
        next_ids = list(raw_model.generate(prompt, 64, enc.n_vocab, top_k=50, generator=generator))
    rows = torch.stack(next_ids, 1).tolist()
    return [text + enc.decode(row).partition("<|end|>")[0] for row in rows]


# ----- Training -----------------------------------------------------------------------------------------


def is_due(step, every, max_steps):
    """Whether something done every `every` steps is due: never if that is 0, otherwise also after the last step."""
    return every > 0 and (step % every == 0 or step == max_steps)


def train_step(model, loader, num_windows, *, step, config, optimizers, scaler, signals, world, scalars=None):
    """One optimizer step on the next num_windows windows, in micro-batches of at most loader.B windows per rank.

    Returns (loss, gradient norm, whether any rank has received one of the `signals` to stop). The loss is the mean over
    all targets of the step. Raises UserError, on all ranks and before the update, if loss or norm is not finite.
    """
    start = loader.position
    # dropout, say, draws the same numbers in a step, whether or not the run was resumed before it
    devices.seed_random_numbers(np.random.SeedSequence([config.seed, step, world.rank]).generate_state(1)[0])
    all_targets = num_windows * loader.T  # of the step, unless a mask leaves some out
    # in a batch ramp B changes, but takes few values: torch.compile compiles for each, and gives up after 8
    B = math.gcd(num_windows // world.size, loader.B)
    grad_accum_steps = num_windows // (B * world.size)
    losses, counts = [], []
    for micro_step in range(grad_accum_steps):
        x, y = loader.next_batch(B)
        last = micro_step == grad_accum_steps - 1  # only its backward pass all-reduces the gradients
        with contextlib.nullcontext() if last else world.no_sync(model):
            with world.autocast():
                _, loss = model(x, y, return_logits=False)
            # micro-batches with 10 and 30 targets weigh 1 and 3, so that their sum becomes the mean over the step's
            # targets; times the world size, because DDP averages over the ranks
            num_targets = (y != IGNORE_INDEX).sum()
            loss = loss * (num_targets * world.size / all_targets)
            scaler.scale(loss).backward()
        losses.append(loss.detach())
        counts.append(num_targets)
    losses = torch.stack(losses)
    for optimizer in optimizers:
        scaler.unscale_(optimizer)
    # besides DDP's, one all-reduce and one copy to the host per step (float16 adds copies, Muon's step all-gathers)
    sums = torch.stack([losses.sum(), torch.stack(counts).sum(), torch.full_like(losses[0], len(signals))])
    loss_sum, num_targets, num_signals = world.all_reduce_sum(sums)
    correction = all_targets / num_targets.clamp(min=1)  # exactly 1 if no targets were left out
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    norm = nn.utils.get_total_norm(gradients) * correction
    clip = ((config.grad_clip or math.inf) / (norm + 1e-6)).clamp(max=1)
    torch._foreach_mul_(gradients, clip * correction)
    scalars = {} if scalars is None else scalars
    # a tensor of one number put here is a stream of log.txt: scalars["wte"] = next(model.parameters()).norm()
    values = torch.stack([correction * loss_sum / world.size, norm, num_signals, *scalars.values()]).tolist()
    loss, norm, num_signals = values[:3]
    scalars.update(zip(scalars, values[3:]))
    # float16: gradients overflow now and then, on all ranks alike; then no optimizer steps, and the scale is lowered
    overflow = not math.isfinite(norm) and scaler.is_enabled() and scaler.get_scale() > 1
    if not math.isfinite(loss) or not (math.isfinite(norm) or overflow):
        batch_losses = world.gather(losses.tolist())  # per rank, of its micro-batches
        raise run_folder.diverged(
            config, step, loss, norm, loader=loader, start=start, B=B, batch_losses=batch_losses
        )
    for optimizer in optimizers if not overflow else ():
        scaler.step(optimizer)
    model.zero_grad()
    scaler.update()
    world.share_buffers(model)
    # a single rank also counts the signals that it has received since the sum
    return loss, norm, num_signals > 0 or (world.size == 1 and len(signals) > 0)


def load_data(config, world):
    """Load and check a run's (train_loader, val_loader, tokenizer)."""
    if config.data == PRESETS["quickstart"].data and not config.dry_run:
        import fineweb  # only these data are made here, if there are none

        world.broadcast_from_master(fineweb.make_python_docs, config.data)
    B, T, ranks = config.batch_size, config.sequence_length, (world.rank, world.size)
    order = dict(shuffle=config.shuffle, device=world.device)
    train_loader = DataLoaderLite(config.data, "train", B, T, *ranks, seed=config.seed, **order)
    val_loader = DataLoaderLite(config.data, "val", B, T, *ranks, **order)  # no seed: always the same windows
    enc = tokenizers.folder_encoding(config.data)
    shards.check_folder(config.data, train_loader, val_loader, enc=enc, step_tokens=config.total_batch_size)
    return train_loader, val_loader, enc


def load_or_make_model(config, start, world):
    """The model with its first weights: new ones, or those in the run_folder.Start `start`."""
    if not start.model:
        autofit.check_memory(lambda: GPT(config), world.device)
        devices.seed_random_numbers(config.seed)
        return GPT(config)
    then, weights = start.model
    then = checkpoint.make_config(GPTConfig, then)
    for name in ("n_layer", "n_head", "n_embd", "block_size"):
        given, has = getattr(config, name), getattr(then, name)
        if given > has or (given < has and name != "block_size"):
            raise UserError(f"{flags.flag_of(name)} is {given}, but {config.init_from} has {has}. Leave it out.")
    # fine-tuning may take more ids, and shorter sequences
    rows = [(then.vocab_size, config.vocab_size), (then.block_size, config.block_size)]
    return GPT.from_state(config, checkpoint.resize(weights, lambda: GPT(config), rows))


def wrap(raw_model, compiled, world):
    """The model to train: compiled if asked for, and in DDP if there are several ranks."""
    model = torch.compile(raw_model, dynamic=False) if compiled else raw_model
    if world.size > 1:
        # subtle: the first call compiles, inside of DDP, which splits the graph at its gradient buckets, so that their
        # all-reduces overlap with the backward pass; at DDP's default of 25 MB it would be split inside of each block
        model = DDP(model, bucket_cap_mb=100, gradient_as_bucket_view=True)
    return model


def fit_to_machine(raw_model, config, enc, world):
    """Move the model to the device and find out what fits there: an autofit.Fit, with the model to train and B."""
    raw_model.to(world.device)
    raw_model.activation_checkpointing = config.activation_checkpointing
    raw_model.float8_lm_head = config.dtype == "fp8"
    return autofit.find_what_fits(raw_model, wrap, config, num_ids=enc.n_vocab, world=world)


def train(config, world, lock):
    """Start or resume the run that `config` describes, in the locked out_dir. Returns the process's exit status."""
    torch.set_float32_matmul_precision("high" if world.device_type == "cuda" else "highest")  # high: TF32
    # load and check everything: no file of the run is touched before the `with` below
    loader, val_loader, enc = load_data(config, world)
    vocab_size = config.vocab_size or checkpoint.padded_size(enc)
    if config.init_from:  # it may have fewer ids, or more
        vocab_size = max(vocab_size, checkpoint.padded_size(enc))
    config = dataclasses.replace(options.with_passes(config, loader.num_windows), vocab_size=vocab_size)
    fingerprints = {"training data": loader.fingerprint, "validation data": val_loader.fingerprint}
    world.check_agreement(fingerprints | {"the tokenizer": enc.name})
    checkpoint.check_num_ids(vocab_size, enc)
    start = world.broadcast_from_master(run_folder.find_start, config, enc, fingerprints)
    if start.finished:  # a note has been printed
        return 0
    raw_model = load_or_make_model(config, start, world)
    # a run keeps its dtype, on whatever machine it continues
    saved = start.checkpoint
    asked = saved["config"]["dtype"] if saved and config.dtype == "auto" else config.dtype
    # CPUs with instructions for bfloat16 are faster with it unless the matrices are tiny
    dtype, dtype_name = devices.choose_dtype(asked, world.device, is_wide=config.n_embd >= 128)
    world.check_agreement({"the dtype": dtype_name})  # that of unlike GPUs may differ
    config = dataclasses.replace(config, dtype=dtype_name)
    world = dataclasses.replace(world, dtype=dtype)
    # a missing file is downloaded now, rather than in the middle of a run
    load = hellaswag.load_examples, config.hellaswag_data, enc, config.hellaswag_limit
    examples = world.broadcast_from_master(*load) if config.hellaswag_every and not config.dry_run else []
    # raw_model: saved, sampled from and scored. model: trained. unwrapped: model without DDP, for validation
    fit = fit_to_machine(raw_model, config, enc, world)
    model = fit.model
    unwrapped = model.module if world.size > 1 else model
    loader.B = val_loader.B = fit.B
    optimizers = configure_optimizers(raw_model, config)
    checkpoint.check_groups(raw_model, optimizers)
    scaler = torch.amp.GradScaler(world.device_type, enabled=dtype == torch.float16)
    T, max_steps = config.sequence_length, config.max_steps
    state = raw_model, optimizers, scaler, loader  # all that an exact resume needs, but for the step
    if saved:
        checkpoint.restore_state(saved, *state)
    else:
        checks.self_check(raw_model, GPT.from_state, enc.n_vocab, T=T, world=world)
    metadata = checkpoint.metadata(config, enc, val_loader.fingerprint)
    num_val_windows = min(config.val_tokens // T, val_loader.num_windows)
    bytes_of = torch.tensor(tokenizers.token_bytes(enc), device=world.device)
    loaders = loader, val_loader
    print_account(config, raw_model, optimizers, loaders=loaders, enc=enc, fit=fit, start=start, world=world)
    if config.dry_run:
        return 0
    stopping = False
    # Run opens the run's folder; from here on, signals stop the run at the end of a step
    with run_folder.Run(config, world, lock, start=start, metadata=metadata, fit=fit) as run:
        signals, start, saved = run.signals, None, None  # dropping the checkpoint frees gigabytes
        extra = dict(signals=signals, world=world)
        update = dict(config=config, optimizers=optimizers, scaler=scaler, **extra)
        gc.collect()
        gc.freeze()  # what exists now lives to the end: exclude it from garbage collection
        # the loop runs max_steps + 1 times: evaluations at step N see the weights after N updates, the last one, too
        for step in range(run.start_step, max_steps + 1):
            raw_model.eval()
            if not stopping and is_due(step, config.val_every, max_steps):
                losses = evaluate_val_loss(unwrapped, val_loader, num_val_windows, token_bytes=bytes_of, **extra)
                stopping = losses is None
                run.log_val_loss(step, losses)
                if config.keep_best and losses:
                    run.keep_best(step, losses[0], raw_model)
            if not stopping and is_due(step, config.hellaswag_every, max_steps):
                counts = evaluate_hellaswag(raw_model, examples, enc, **extra)
                stopping = counts is None
                run.log_hellaswag(step, counts)
            has_learned = step > 0 or max_steps == 0  # a new model's samples would be noise
            if not stopping and has_learned and is_due(step, config.sample_every, max_steps) and world.is_master:
                run.log_samples(step, generate_samples(raw_model, enc, config, world=world))
            raw_model.train()
            ends = stopping or step == max_steps
            save_every = config.checkpoint_every, config.milestone_every
            if step > run.start_step and (ends or any(is_due(step, every, max_steps) for every in save_every)):
                run.save(step, *state)
            if ends:
                break
            began = time.perf_counter()
            lr = apply_schedules(optimizers, step, config)
            num_windows = get_batch_size(loader.position * T, config) // T
            scalars = {}  # what a line of one's own in train_step adds to the log
            loss, norm, stopping = train_step(model, loader, num_windows, step=step, scalars=scalars, **update)
            seconds = time.perf_counter() - began
            run.log_step(step, loss, lr=lr, norm=norm, tokens=num_windows * T, seconds=seconds, scalars=scalars)
        return run.finish(step, stopping, raw_model, enc=enc)  # exports the model, unless the run was stopped


def main(args=None):
    """Parse the flags, set up the ranks, train, and exit with train's status."""
    config = parse_args(args)
    world = distributed.setup_distributed(config.device)
    # rank 0 reads what they come from, which may be on its own disk
    inherited = world.broadcast_from_master(options.inherit, config)
    if "block_size" in inherited and not config.branch_from:
        inherited["sequence_length"] = min(inherited["block_size"], config.sequence_length)
    config = parse_args(args, **inherited)
    options.check_config(config, world, complaints(config), ["n_layer", "n_head", "n_embd", "block_size"])
    options.print_notes(config, PRESETS[config.preset], inherited)
    if config.compile is None:
        config.compile = world.device_type == "cuda"
    world.check_agreement(options.facts_for_all_ranks(config))
    with run_folder.lock_out_dir(config, world) as lock:
        status = train(config, world, lock)
    distributed.cleanup_distributed()  # not after an error: it would wait for ranks that wait for this one
    sys.exit(status)


if __name__ == "__main__":
    console.run(main)
