"""Train GPT-2 from scratch, in one file that reads from top to bottom.

    python train_gpt2.py --preset quickstart                 # a laptop: three minutes, no network
    python fineweb.py                                        # then the real thing, GPT-2 124M: the data,
    torchrun --standalone --nproc_per_node=8 train_gpt2.py   # and 8 GPUs (on one: python train_gpt2.py)

A preset holds the defaults of all other flags:

    gpt2          GPT-2 124M on 10B tokens of FineWeb-Edu, with GPT-3's hyperparameters (the default)
    gpt2-medium   the next larger GPT-2, 350M parameters, on the same tokens
    gpt2-large    774M parameters
    gpt2-xl       1.6B parameters
    speedrun      gpt2's architecture on half as many tokens, with Muon and another schedule
    quickstart    a small model of bytes, on the documentation that ships with Python
    chat          fine-tune the model of --init-from on conversations that smoltalk.py has prepared

A run writes to --out-dir: log.txt (`step stream value` per line), run.txt (what was run, and where),
model_<step>.pt (checkpoints) and, at the end, hf/ (the model in Hugging Face format). Repeating the command
resumes a run that was stopped, was killed or has crashed, on any number of GPUs, as if nothing had happened.

Sources: GPT-2 (Radford et al. 2019) for the model, GPT-3 (Brown et al. 2020, table 2.1 and appendix B) for
the hyperparameters that GPT-2's paper leaves out, Muon (Jordan et al. 2024) for the speedrun's optimizer.
"""

import contextlib
import dataclasses
import gc
import math
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.utils.checkpoint
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

import hellaswag
import tokenizer
from plumbing import (
    checkpoint,
    cli,  # before torch: sets how OpenMP threads wait
    distributed,
    kernels,
    runs,
    shards,
)
from plumbing.cli import UserError

# ----------------------------------------------------------------------------------------------------------
# Configuration


@dataclass
class TrainConfig:
    """All settings of a run. Each is a flag, and its comment is the help text."""

    # the defaults of all other flags, as listed above
    preset: Literal["gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl", "speedrun", "quickstart", "chat"] = "gpt2"
    # the run
    data: str = "edu_fineweb10B"  # folder of token shards
    out_dir: str = "log"  # folder of the run
    init_from: str = ""  # initial weights: a GPT-2 name, a folder or a checkpoint
    branch_from: str = ""  # run or checkpoint to continue in out_dir with other settings
    resume: bool = True  # resume the run in out_dir; --no-resume moves it aside
    seed: int = 1337  # seed of the weights, data order and samples
    device: str = "auto"  # cpu, cuda or mps; auto: best available
    # compute dtype; fp8: bfloat16, with float8 in the output layer. Only float32 losses agree to 1e-5 on any ranks
    dtype: Literal["auto", "float32", "bfloat16", "float16", "fp8"] = "auto"
    compile: bool = field(default_factory=torch.cuda.is_available)  # torch.compile the model
    # the model
    n_layer: int = 12  # number of blocks
    n_head: int = 12  # attention heads per block
    n_embd: int = 768  # channels of the residual stream
    block_size: int = 1024  # longest sequence: the number of position embeddings
    vocab_size: int = 0  # rows of the embedding; 0: the tokenizer's, in multiples of 64
    activation_checkpointing: bool = False  # recompute activations: less memory, slower
    # the batch: total_batch_size = batch_size * sequence_length * ranks * micro-steps
    batch_size: int = 64  # B, sequences per rank and micro-step, at most: lowered until they fit
    sequence_length: int = 1024  # T, tokens per sequence
    total_batch_size: int = 2**19  # tokens per step over all ranks (gpt2: GPT-3's 0.5M)
    batch_ramp: int = 0  # tokens over which the batch grows from 32K; 0: none
    shuffle: bool = True  # visit the windows in random order; --no-shuffle: in file order
    # the schedule
    max_steps: int = 19073  # optimizer steps (gpt2: 10B tokens / 0.5M per step)
    warmup_steps: int = 715  # steps of linear warmup (gpt2: GPT-3's 375M tokens)
    max_lr: float = 6e-4  # peak learning rate (gpt2: GPT-3 Small's)
    min_lr: float = 6e-5  # final rate of the cosine; wsd ignores it
    schedule: Literal["cosine", "wsd"] = "cosine"  # wsd: constant, then linear decay to 0
    decay_fraction: float = 0.7  # wsd: share of max_steps that decays; 0: constant
    # the optimizer
    optimizer: Literal["adamw", "muon"] = "adamw"  # muon: for the blocks' matrices only
    weight_decay: float = 0.1  # AdamW: on tensors with 2 or more dimensions
    beta1: float = 0.9  # AdamW: decay rate of the first moment
    beta2: float = 0.95  # AdamW: decay rate of the second moment
    grad_clip: float = 1.0  # clip the gradient norm to this; 0: no clipping
    muon_lr: float = 0.02  # Muon: peak learning rate
    muon_momentum: float = 0.95  # Muon: warmed up from 0.85 over 300 steps
    muon_weight_decay: float = 0.01  # Muon: weight decay
    # evaluation and output, every so many steps and after the last one; 0: never
    val_every: int = 250  # steps between validations
    val_tokens: int = 10 * 2**20  # validation tokens, the same ones every time
    hellaswag_every: int = 250  # steps between HellaSwag scores
    hellaswag_limit: int = 0  # examples to score; 0: all
    hellaswag_data: str = "hellaswag/hellaswag_val.jsonl"  # downloaded if it does not exist
    sample_every: int = 250  # steps between samples
    sample_prompt: str = "Hello, I'm a language model,"  # text that the samples continue
    checkpoint_every: int = 500  # steps between checkpoints; 0: only at the end
    keep_checkpoints: int = 2  # newest checkpoints to keep
    milestone_every: int = 0  # steps between checkpoints that are kept for good
    keep_best: bool = False  # keep the weights of the best validation as model_best.pt
    wandb: str = ""  # Weights & Biases project in which to mirror the log


PRESETS = {
    # GPT-2's four sizes with GPT-3's learning rates; B is chosen for 80 GB and halved until it fits
    "gpt2": dict(),
    "gpt2-medium": dict(n_layer=24, n_head=16, n_embd=1024, batch_size=32, max_lr=3e-4, min_lr=3e-5),
    "gpt2-large": dict(n_layer=36, n_head=20, n_embd=1280, batch_size=16, max_lr=2.5e-4, min_lr=2.5e-5),
    "gpt2-xl": dict(n_layer=48, n_head=25, n_embd=1600, batch_size=8, max_lr=2e-4, min_lr=2e-5),
    # Muon's settings are those tuned in modded-nanogpt's benchmark: see records/2026-11-21-speedrun-sweep
    "speedrun": dict(
        max_steps=9536,
        warmup_steps=250,
        schedule="wsd",
        max_lr=1.8e-3,
        optimizer="muon",
        muon_lr=0.025,
        muon_weight_decay=0.05,
    ),
    "quickstart": dict(
        data="python_docs",
        out_dir="log/quickstart",
        compile=False,
        n_layer=4,
        n_head=4,
        n_embd=128,
        block_size=128,
        sequence_length=128,
        batch_size=16,
        total_batch_size=2048,
        max_steps=400,
        warmup_steps=20,
        max_lr=4e-3,
        min_lr=4e-4,
        optimizer="muon",
        muon_lr=0.04,
        schedule="wsd",
        val_every=100,
        val_tokens=2**15,
        hellaswag_every=0,
        sample_every=200,
        sample_prompt="The ",
        checkpoint_every=200,
        keep_best=True,
    ),
    "chat": dict(
        data="smoltalk",
        out_dir="log/chat",
        batch_size=32,
        total_batch_size=2**17,
        max_steps=3000,
        warmup_steps=100,
        max_lr=1e-4,
        min_lr=1e-5,
        hellaswag_every=0,
        keep_best=True,
    ),
}
PRESETS = {name: TrainConfig(preset=name, **settings) for name, settings in PRESETS.items()}

# ----------------------------------------------------------------------------------------------------------
# Model


@dataclass
class GPTConfig:
    """The five numbers that define the shape of a GPT-2."""

    block_size: int = 1024  # longest sequence
    vocab_size: int = 50304  # 50,257 tokens, padded: even tiles for the largest matmul
    n_layer: int = 12
    n_head: int = 12
    n_embd: int = 768


class CausalSelfAttention(nn.Module):
    """Causal multi-head self-attention (Vaswani et al. 2017, section 3.2).

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
        q = q.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)  # (B, nh, T, hs)
        k = k.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)  # (B, nh, T, hs)
        v = v.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)  # (B, nh, T, hs)
        if cache is not None:
            k, v = cache.update(self, k, v)  # (B, nh, S, hs)
        # subtle: with a cache, T is 1 (the new token attends to everything) or S (the prompt: ordinary causal mask)
        options = dict(attn_mask=attn_mask, is_causal=attn_mask is None and T > 1)
        if x.is_cpu:  # on a CPU attention is faster in float32, even if the matmuls are in bfloat16
            with torch.autocast("cpu", enabled=False):
                y = F.scaled_dot_product_attention(q.float(), k.float(), v.float(), **options).to(q.dtype)
        else:
            y = F.scaled_dot_product_attention(q, k, v, **options)  # (B, nh, T, hs)
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
        x = x + self.attn(self.ln_1(x), attn_mask, cache)
        return x + self.mlp(self.ln_2(x))


IGNORE_INDEX = -100  # targets that are excluded from the loss


class GPT(nn.Module):
    """GPT-2 with the parameter names of OpenAI's checkpoint, so that the state dicts map key by key."""

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.activation_checkpointing = False
        self.residual_dtype = torch.float32  # dtype of the residual stream
        self.float8_lm_head = False  # compute a loss from float8 logits, in training and validation
        self.fused_loss = ""  # or "torch" or "triton": compute the loss with its gradient
        self.transformer = nn.ModuleDict(
            dict(
                wte=nn.Embedding(config.vocab_size, config.n_embd),
                wpe=nn.Embedding(config.block_size, config.n_embd),
                h=nn.ModuleList(Block(config) for _ in range(config.n_layer)),
                ln_f=nn.LayerNorm(config.n_embd),
            )
        )
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        # weight tying: one matrix for input and output
        self.lm_head.weight = self.transformer.wte.weight

        # GPT-2's initialization, except that its position embeddings had std 0.01; 0.02 for both is now standard
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(parameter)
            elif name.endswith("c_proj.weight"):
                # 2 * n_layer projections are summed into the residual stream: keep its variance (GPT-2, section 2.3)
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * config.n_layer))
            elif parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)

    def hidden_states(self, idx, pos=None, attn_mask=None, cache=None):
        """Token ids (B, T) to the last layer's hidden states (B, T, C), after the final norm.

        pos: position ids (B, T), default 0, 1, 2, ...; attn_mask: (B, 1, T, T), True where a token may attend,
        default causal; cache: a KVCache, whose contents idx continues.
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

        Targets (B, T) equal to IGNORE_INDEX are excluded. return_logits=False returns None in place of the
        logits, so that they need not be materialized for a caller that wants only the loss.
        """
        x = self.hidden_states(idx)
        if targets is None:
            return self.lm_head(x), None
        num_targets = (targets != IGNORE_INDEX).sum().clamp(min=1)  # the mean over no targets would be NaN
        x, targets = x.flatten(0, 1), targets.flatten()
        if not return_logits and (self.float8_lm_head or self.fused_loss):
            float8, triton = self.float8_lm_head, self.fused_loss == "triton"
            loss = kernels.linear_cross_entropy(x, self.lm_head.weight, targets, float8, triton, IGNORE_INDEX)
            return None, loss / num_targets
        logits = self.lm_head(x)
        # float32, because near 11 a bfloat16 loss has a resolution of only 0.06
        loss = F.cross_entropy(logits.float(), targets, reduction="sum", ignore_index=IGNORE_INDEX) / num_targets
        return logits.view(*idx.shape, -1) if return_logits else None, loss

    @torch.no_grad()
    def generate(self, idx, max_new_tokens, vocab_size, temperature=1.0, top_k=0, top_p=1.0, generator=None):
        """Continue the token ids (B, T): yield one (B,) tensor of next ids at a time.

        temperature 0 is greedy; top_k > 0 keeps the k most likely ids, top_p < 1 the smallest set of most likely
        ids whose probabilities add up to top_p (Holtzman et al. 2020). Ids >= vocab_size, which only pad the
        vocabulary, are never sampled. Beyond the block size, the context is the last block_size tokens.
        """
        block_size = self.config.block_size
        cache = KVCache(self, idx.size(0), min(block_size, idx.size(1) + max_new_tokens))
        for _ in range(max_new_tokens):
            with distributed.disable_cudnn_attention():  # the number of keys grows with every token
                if idx.size(1) <= block_size:
                    x = self.hidden_states(idx[:, cache.length :], cache=cache)
                else:  # every token has a new position: nothing cached is valid
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
                    before = ordered.cumsum(1) - ordered  # of all that is more likely
                    probs.scatter_(1, order, ordered.where(before < top_p, 0))
                next_ids = torch.multinomial(probs, 1, generator=generator)[:, 0]
            idx = torch.cat([idx, next_ids[:, None]], 1)
            yield next_ids

    @classmethod
    def from_state(cls, shape, weights):
        """The GPT with the fields `shape` of a GPTConfig and the state dict `weights`, which it takes over."""
        with torch.device("meta"):  # without memory for weights that are replaced at once
            model = cls(GPTConfig(**shape))
        checkpoint.check_weights(weights, model.state_dict())
        model.load_state_dict({name: w.contiguous() for name, w in weights.items()}, assign=True)
        model.lm_head.weight = model.transformer.wte.weight  # assigning has untied them
        return model

    @classmethod
    def from_pretrained(cls, name_or_directory):
        """Load a GPT-2 from the hub (gpt2, gpt2-xl, ...) or from a Hugging Face folder."""
        return cls.from_state(*checkpoint.load_huggingface(name_or_directory))


class KVCache:
    """Keys and values of the `length` tokens so far, with room for max_len, for generating one token at a time."""

    def __init__(self, model, batch_size, max_len):
        self.length = 0
        self.shape = (batch_size, model.config.n_head, max_len, model.config.n_embd // model.config.n_head)
        self.keys_values = {}  # attention layer -> two tensors (B, nh, max_len, hs)

    def update(self, layer, k, v):
        """Append one layer's k, v (B, nh, T, hs) to the cache; return all keys and values so far (B, nh, S, hs)."""
        assert self.length == 0 or k.size(2) == 1, "feed the whole prompt first, then one token at a time"
        if layer not in self.keys_values:
            self.keys_values[layer] = k.new_empty(self.shape), v.new_empty(self.shape)
        keys, values = self.keys_values[layer]
        end = self.length + k.size(2)
        keys[:, :, self.length : end] = k
        values[:, :, self.length : end] = v
        return keys[:, :, :end], values[:, :, :end]


def load_model(source):
    """(GPT, tokenizer) of a GPT-2 name, a Hugging Face folder, a checkpoint, or a run's folder (its newest)."""
    shape, weights, enc = checkpoint.load_model_state(source)
    return GPT.from_state(shape, weights), enc


# ----------------------------------------------------------------------------------------------------------
# Data


def permute(index, n, keys):
    """Apply a pseudorandom permutation of range(n) to each element of the array `index`; keys: a uint64 per round.

    Computed rather than stored: a Feistel network permutes the next power of four (Luby and Rackoff 1988); values
    that land outside range(n) are permuted again until they land inside (cycle walking).
    """
    half = np.uint64(max(1, (n - 1).bit_length() + 1 >> 1))
    mask = np.uint64((1 << int(half)) - 1)
    index = index.astype(np.uint64)
    outside = np.ones(len(index), bool)
    while outside.any():
        left, right = index[outside] >> half, index[outside] & mask
        for key in keys:
            # Fibonacci hashing: the high bits are well mixed
            mixed = (right + key) * np.uint64(0x9E3779B97F4A7C15)
            mixed = (mixed ^ mixed >> np.uint64(29)) * np.uint64(0xBF58476D1CE4E5B9) >> np.uint64(32)
            left, right = right, left ^ (mixed & mask)
        index[outside] = left << half | right
        outside = index >= n
    return index.astype(np.int64)


class DataLoaderLite:
    """Batches of token windows, the same for any B and any number of ranks.

    The shards of a split are cut into windows of T tokens at multiples of T (a tail shorter than T is dropped).
    All windows are visited in one global order, epoch after epoch: file order, or a permutation seeded by seed
    and epoch. Each call consumes the next B * world_size windows, of which rank r reads the B starting at r * B.
    A step thus sees the same windows whatever the layout, and one number, `position`, is the loader's progress.
    """

    def __init__(self, folder, split, B, T, rank=0, world_size=1, seed=0, shuffle=False, device="cpu"):
        self.B, self.T, self.rank, self.world_size = B, T, rank, world_size
        self.seed, self.shuffle, self.device = seed, shuffle, device
        self.shards = shards.open_shards(folder, split)
        self.masks = shards.open_masks(self.shards)  # empty if every token is a target
        self.fingerprint = shards.fingerprint([shard.path for shard in self.shards])
        # a window has T targets, so T + 1 tokens
        windows = [max(0, len(shard) - 1) // T for shard in self.shards]
        self.first_window = np.cumsum([0, *windows])  # of each shard
        self.num_windows = int(self.first_window[-1])
        shards.check_not_empty(self.num_windows, folder, split, T)
        self.position = 0  # in windows of the global order
        self.executor = ThreadPoolExecutor(1)
        self.prefetched = None, None  # (position, B) and the future of that batch

    def locate(self, positions):
        """Map positions in the global order to (shard indices, token offsets of the windows)."""
        epochs, windows = np.divmod(positions, self.num_windows)
        if self.shuffle:
            for epoch in np.unique(epochs):
                keys = np.random.SeedSequence([self.seed, int(epoch)]).generate_state(4, np.uint64)
                in_epoch = epochs == epoch
                windows[in_epoch] = permute(windows[in_epoch], self.num_windows, keys)
        indices = np.searchsorted(self.first_window, windows, side="right") - 1
        return indices, (windows - self.first_window[indices]) * self.T

    def gather(self, arrays, positions):
        """The T + 1 entries of each window at `positions`: (len(positions), T + 1)."""
        indices, offsets = self.locate(positions)
        return np.stack([arrays[i].read(offset, self.T + 1) for i, offset in zip(indices, offsets)])

    def read_batch(self, position, B):
        """Read this rank's batch at `position` into host memory: [tokens (B, T + 1)], plus the mask if there is one."""
        positions = position + self.rank * B + np.arange(B)
        batch = [self.gather(self.shards, positions)]
        if self.masks:
            batch.append(self.gather(self.masks, positions))
        batch = [torch.from_numpy(rows) for rows in batch]
        # pinned memory lets the copy to the GPU overlap with computation
        if self.device.startswith("cuda"):
            batch = [rows.pin_memory() for rows in batch]
        return batch

    def next_batch(self, B=None):
        """x, y of shape (B, T), int64 on the device: y is x shifted by one, with IGNORE_INDEX where the mask is 0."""
        B = B or self.B
        key, future = self.prefetched
        if key != (self.position, B):
            future = self.executor.submit(self.read_batch, self.position, B)
        batch = future.result()
        self.position += B * self.world_size
        # prefetch while the device works on this batch
        self.prefetched = (self.position, B), self.executor.submit(self.read_batch, self.position, B)
        # transfer the ids as uint16, a quarter of the bytes, and widen them on the device
        tokens, *mask = [rows.to(self.device, non_blocking=True) for rows in batch]
        x, y = tokens[:, :-1].long(), tokens[:, 1:].long()
        if mask:
            y = y.masked_fill(mask[0][:, 1:] == 0, IGNORE_INDEX)
        return x, y

    def count_targets(self, num_windows):
        """How many targets the next num_windows windows of the global order hold, over all ranks."""
        if not self.masks:
            return num_windows * self.T
        return max(1, int(self.gather(self.masks, self.position + np.arange(num_windows))[:, 1:].sum()))

    def describe(self, positions):
        """Where windows of the global order are: "x_train_000001.npy token 2048, ..."."""
        places = zip(*self.locate(np.array(positions)))
        return ", ".join(f"{self.shards[i].path.name} token {offset}" for i, offset in places)

    def state_dict(self):
        """The position, and the data and T that it belongs to."""
        layout = {"num_windows": self.num_windows, "T": self.T, "fingerprint": self.fingerprint}
        return {"position": self.position, **layout}

    def load_state_dict(self, state):
        """Restore the position. Raises UserError if the data or T differ."""
        shards.check_same_data(state, self.state_dict())
        self.position = state["position"]


# ----------------------------------------------------------------------------------------------------------
# Schedules and optimizers


def get_lr(step, config):
    """The learning rate of a step: linear warmup, then either cosine decay or a constant phase and linear decay."""
    # 1) linear warmup to max_lr; step + 1, so that step 0 learns, too
    if step < config.warmup_steps:
        return config.max_lr * (step + 1) / config.warmup_steps
    # 2) the final value, past the end of the schedule
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
    """Tokens in the next step: total_batch_size, or less during the ramp, linear in steps of 32K (GPT-3, 2.3)."""
    if tokens_seen >= config.batch_ramp:
        return config.total_batch_size
    grown = config.total_batch_size * tokens_seen / config.batch_ramp
    return max(1, int(grown / 2**15)) * 2**15


@torch.no_grad()
def orthogonalize(G):
    """Map each of the matrices (n, rows, cols) to roughly the nearest orthogonal one: all singular values near 1.

    Five steps of a Newton-Schulz iteration whose quintic is tuned for speed, not for accuracy (Jordan et al.
    2024). bfloat16 suffices on GPUs; CPUs keep float32.
    """
    X = G.to(torch.bfloat16) if G.is_cuda else G
    tall = G.size(1) > G.size(2)
    X = X.mT if tall else X  # so that X @ X.mT is the smaller of the two Gram matrices
    X = X / (X.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(5):
        A = X @ X.mT
        A = torch.baddbmm(A, A, A, beta=-4.7750, alpha=2.0315)  # -4.7750 A + 2.0315 A A
        X = torch.baddbmm(X, A, X, beta=3.4445)  # 3.4445 X + A X
    return X.mT if tall else X


class Muon(torch.optim.Optimizer):
    """SGD with momentum and orthogonalized updates (Jordan et al. 2024), for the matrices inside the blocks.

    Not for embeddings, the output layer or vectors. Each parameter group holds matrices of one shape, which are
    orthogonalized as one batch, sharded over the ranks; `split` is the number of matrices stacked in each (3 for
    the fused query, key and value).
    """

    def __init__(self, groups, lr, momentum, weight_decay):
        super().__init__(groups, dict(lr=lr, momentum=momentum, weight_decay=weight_decay, split=1))

    @torch.no_grad()
    def step(self):
        """One update; every rank must call it, because the ranks share the orthogonalization."""
        for group in self.param_groups:
            params = group["params"]
            for p in params:
                if "momentum" not in self.state[p]:
                    self.state[p]["momentum"] = torch.zeros_like(p)
            grads = [p.grad for p in params]
            momenta = [self.state[p]["momentum"] for p in params]
            torch._foreach_lerp_(momenta, grads, 1 - group["momentum"])
            updates = torch._foreach_lerp(grads, momenta, group["momentum"])  # Nesterov momentum
            rows, cols = params[0].size(0) // group["split"], params[0].size(1)
            updates = self.orthogonalize_over_ranks(torch.stack(updates).view(-1, rows, cols)).float()
            # so that tall and square matrices change their outputs by similar amounts
            lr = group["lr"] * max(1, rows / cols) ** 0.5
            torch._foreach_mul_(params, 1 - group["lr"] * group["weight_decay"])
            torch._foreach_add_(params, list(updates.view(len(params), -1, cols)), alpha=-lr)

    @staticmethod
    def orthogonalize_over_ranks(matrices):
        """Orthogonalize a batch of matrices, each rank its share, and all-gather the results."""
        if not dist.is_initialized():
            return orthogonalize(matrices)
        rank, world_size = dist.get_rank(), dist.get_world_size()
        per_rank = math.ceil(len(matrices) / world_size)
        padded = F.pad(matrices, (0, 0, 0, 0, 0, per_rank * world_size - len(matrices)))
        local = orthogonalize(padded[rank * per_rank : (rank + 1) * per_rank]).contiguous()
        gathered = local.new_empty(padded.shape)
        dist.all_gather(list(gathered.chunk(world_size)), local)
        return gathered[: len(matrices)]


def configure_optimizers(model, config):
    """The optimizers of a run, in a list: AdamW, or Muon for the blocks' matrices and AdamW for the rest.

    Each parameter group has `peak_lr`: its learning rate where the schedule is at its peak.
    """
    optimizers, taken = [], set()
    if config.optimizer == "muon":
        blocks, groups = model.transformer.h, []
        for name in [name for name, p in blocks[0].named_parameters() if p.dim() == 2]:
            matrices = [block.get_parameter(name) for block in blocks]
            groups.append({"params": matrices, "split": 3 if "c_attn" in name else 1, "peak_lr": config.muon_lr})
            taken.update(matrices)
        optimizers.append(Muon(groups, config.muon_lr, config.muon_momentum, config.muon_weight_decay))
    rest = [p for p in model.parameters() if p not in taken]  # tied weights once
    # weight decay for matrices and embeddings, not for biases and norms
    groups = [
        {"params": [p for p in rest if p.dim() >= 2], "weight_decay": config.weight_decay, "peak_lr": config.max_lr},
        {"params": [p for p in rest if p.dim() < 2], "weight_decay": 0.0, "peak_lr": config.max_lr},
    ]
    betas, fused = (config.beta1, config.beta2), rest[0].device.type in ("cuda", "cpu")
    optimizers.append(torch.optim.AdamW(groups, lr=config.max_lr, betas=betas, eps=1e-8, fused=fused))
    return optimizers


def apply_schedules(optimizers, step, config):
    """Set this step's learning rates and momentum in the optimizers; return the learning rate."""
    lr = get_lr(step, config)
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = lr * group["peak_lr"] / config.max_lr
            # momentum warmup: early on there are few gradients to average over
            if "momentum" in group:
                group["momentum"] = 0.85 + (config.muon_momentum - 0.85) * min(1.0, step / 300)
    return lr


# ----------------------------------------------------------------------------------------------------------
# Fitting the machine


def largest_divisor(number, at_most):
    """The largest divisor of `number` that is not above `at_most`: 96, 64 -> 48."""
    return max(d for d in range(1, min(number, at_most) + 1) if number % d == 0)


def wrap(raw_model, compiled, world):
    """The model to train: compiled if asked for, and in DDP if there are several ranks."""
    model = torch.compile(raw_model, dynamic=False) if compiled else raw_model
    if world.size > 1:
        # subtle: compilation starts with the first call, when DDP already wraps the model; the graph is then split at
        # DDP's gradient buckets, so that each bucket's all-reduce overlaps with the rest of the backward pass
        gpus = [world.local_rank] if world.device_type == "cuda" else None
        model = DDP(model, gpus, gradient_as_bucket_view=True)
    return model


def trial_step(model, raw_model, B, T, autocast, world):
    """Forward and backward pass of one micro-batch of random tokens, with the memory of a training step."""
    # reserve memory for the optimizer state, which is allocated later: two numbers per weight
    reserved = [torch.empty_like(p) for p in raw_model.parameters() for _ in range(2)]
    x, y = torch.randint(raw_model.config.vocab_size, (2, B, T), device=world.device).unbind()
    with autocast, world.no_sync(model):
        model(x, y, return_logits=False)[1].backward()
    del reserved


FITS, FAILED, OUT_OF_MEMORY = range(3)  # outcomes of a trial step; all ranks act on the worst one


def fit_to_machine(raw_model, config, dtype, autocast, world):
    """Move the model to the device, try one micro-step, and fall back from whatever fails on this machine.

    Out of memory: B is halved. If the compiler or an attention kernel fails, the run continues without
    it, after a warning. All ranks decide alike. Returns (model to train, B).
    """
    raw_model.to(world.device).activation_checkpointing = config.activation_checkpointing
    # subtle: autocast leaves the embeddings, and with them the residual stream, in float32: twice the memory traffic
    raw_model.residual_dtype = torch.bfloat16 if dtype == torch.bfloat16 else torch.float32
    raw_model.float8_lm_head = config.dtype == "fp8"
    T, compiled, fused_attention = config.sequence_length, config.compile, True
    windows_per_rank = config.total_batch_size // (T * world.size)
    B = largest_divisor(windows_per_rank, at_most=config.batch_size)
    while True:
        outcome, reason = FITS, "on another rank"
        try:
            model = wrap(raw_model, compiled, world)
            trial_step(model, raw_model, B, T, autocast, world)
        except Exception as error:
            # the compiler may raise anything; an error with another cause recurs without it and is raised then
            outcome = OUT_OF_MEMORY if distributed.is_out_of_memory(error) else FAILED
            if outcome == FAILED and not compiled and not fused_attention:
                raise
            reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raw_model.zero_grad(set_to_none=True)
        outcome = world.max_over_ranks(outcome)
        if outcome == FITS:
            return model, B
        model = None  # frees DDP's buckets as well
        gc.collect()
        torch.cuda.empty_cache()  # does nothing without CUDA
        if outcome == OUT_OF_MEMORY:
            if B == 1:
                raise UserError(f"{T} tokens do not fit in memory. Try --activation-checkpointing or a smaller model.")
            B = largest_divisor(windows_per_rank, at_most=B // 2)
            distributed.print0(f"warning: Out of memory. Continuing with --batch-size {B}.")
        elif compiled:
            distributed.print0(f"warning: torch.compile failed ({reason}). Continuing without it.")
            compiled = False
        else:
            distributed.print0(f"warning: Fused attention failed ({reason}). Continuing without it.")
            fused_attention = False
            distributed.enable_fused_attention(False)


# ----------------------------------------------------------------------------------------------------------
# Evaluation


def evaluate_val_loss(model, loader, num_windows, B, autocast, world):
    """The mean loss over the first num_windows windows of the validation split, on all ranks.

    Grad mode stays enabled, though there is no backward pass, so that the graph compiled for training is reused.
    """
    loader.position = 0
    sums = torch.zeros(2, device=world.device)  # loss, targets
    for first in world.progress_bar(range(0, num_windows, B * world.size), "validation"):
        x, y = loader.next_batch(B)
        # the last batch keeps the shape that the graph was compiled for: rows past the end are masked out
        y[max(0, num_windows - first - world.rank * B) :] = IGNORE_INDEX
        with autocast:
            loss = model(x, y, return_logits=False)[1].detach()  # detach frees the activations
        targets = (y != IGNORE_INDEX).sum()
        sums += torch.stack([loss * targets, targets])
    loss, targets = world.all_reduce_sum(sums).tolist()
    return loss / targets


def evaluate_hellaswag(raw_model, examples, enc, autocast, world):
    """Score the rendered HellaSwag examples, each rank its share; return the Counts summed over the ranks."""
    with autocast, distributed.disable_cudnn_attention():
        share = dict(rank=world.rank, world_size=world.size, progress=world.shows_progress)
        counts = hellaswag.evaluate(raw_model, examples, enc.n_vocab, **share)
    totals = world.all_reduce_sum(torch.tensor(counts, device=world.device))
    return hellaswag.Counts(*totals.tolist())


def generate_samples(raw_model, enc, config, autocast, device):
    """Four continuations of the prompt, as text. A separate generator leaves training's RNG state untouched."""
    generator = torch.Generator(device=device).manual_seed(config.seed)
    prompt = torch.tensor([enc.encode_ordinary(config.sample_prompt) or [enc.eot_token]] * 4, device=device)
    with autocast:
        next_ids = list(raw_model.generate(prompt, 64, enc.n_vocab, top_k=50, generator=generator))
    return [config.sample_prompt + enc.decode(row) for row in torch.stack(next_ids, 1).tolist()]


# ----------------------------------------------------------------------------------------------------------
# Training


def is_due(step, every, max_steps):
    """Whether something done every `every` steps is due: never if that is 0, otherwise also after the last step."""
    return every > 0 and (step % every == 0 or step == max_steps)


def train_step(model, loader, num_windows, B, optimizers, scaler, step, config, signals, autocast, world):
    """One optimizer step on the next num_windows windows, in micro-batches of at most B windows per rank.

    Returns (loss, gradient norm, whether a signal has reached any rank). The loss is the mean over all targets of the
    step. Raises UserError, on all ranks and before the update, if the loss or the norm is not finite.
    """
    position, num_targets = loader.position, loader.count_targets(num_windows)
    # during the batch ramp, a rank may have fewer windows than B
    B = largest_divisor(num_windows // world.size, B)
    grad_accum_steps = num_windows // (B * world.size)
    losses = []
    for micro_step in range(grad_accum_steps):
        x, y = loader.next_batch(B)
        # all-reduce the gradients only once, in the backward pass of the last micro-step
        last = micro_step == grad_accum_steps - 1
        with contextlib.nullcontext() if last else world.no_sync(model):
            with autocast:
                _, loss = model(x, y, return_logits=False)
            # rescale the mean over this micro-batch's targets to its share of the mean over the step's targets;
            # times the world size, because DDP averages over the ranks
            loss = loss * ((y != IGNORE_INDEX).sum() * world.size / num_targets)
            scaler.scale(loss).backward()
        losses.append(loss.detach())
    for optimizer in optimizers:
        scaler.unscale_(optimizer)
    norm = nn.utils.clip_grad_norm_(model.parameters(), config.grad_clip or math.inf)
    # the only host-device synchronization in a step, and the same all-reduce sums the ranks' signals
    signalled = torch.full_like(norm, len(signals))
    loss_sum, signalled = world.all_reduce_sum(torch.stack([torch.stack(losses).sum(), signalled]))
    loss, norm, signalled = torch.stack([loss_sum / world.size, norm, signalled]).tolist()
    # float16: the scaler skips the step and lowers its scale
    overflow = scaler.is_enabled() and scaler.get_scale() > 1
    if not math.isfinite(loss) or not (math.isfinite(norm) or overflow):
        # flattened, this (micro-step, rank) table of non-finite losses is in the global order of the windows
        bad = torch.zeros(grad_accum_steps, world.size, device=world.device)
        bad[:, world.rank] = (~torch.stack(losses).isfinite()).float()
        bad = world.all_reduce_sum(bad).flatten().tolist()
        suspects = [i for i, is_bad in enumerate(bad) if is_bad] or range(len(bad))
        windows = [position + i * B + row for i in suspects for row in range(B)]
        where = loader.describe(windows[:4])
        raise runs.diverged(step, loss, norm, where, config.out_dir)
    for optimizer in optimizers:
        scaler.step(optimizer)
        optimizer.zero_grad(set_to_none=True)
    scaler.update()
    # a single rank also sees signals received since then
    return loss, norm, signalled > 0 or (world.size == 1 and len(signals) > 0)


def load_data(config, world):
    """Load and check a run's (train_loader, val_loader, tokenizer)."""
    if config.preset == "quickstart" and config.data == PRESETS["quickstart"].data:
        import fineweb  # only this preset makes its own data; existing shards are reused

        corpus = fineweb.Options(dataset="python-docs", tokenizer="bytes", out_dir=config.data)
        world.run_on_master(fineweb.prepare, corpus)
    layout = dict(B=config.batch_size, T=config.sequence_length)
    layout |= dict(rank=world.rank, world_size=world.size, device=world.device)
    train_loader = DataLoaderLite(config.data, "train", **layout, seed=config.seed, shuffle=config.shuffle)
    val_loader = DataLoaderLite(config.data, "val", **layout)
    enc = tokenizer.folder_encoding(config.data)
    shards.check_folder(config.data, train_loader, val_loader, enc)
    shards.check_size(config.data, train_loader, config.total_batch_size)
    return train_loader, val_loader, enc


def load_or_make_model(config, enc, fingerprint, world):
    """The model of a run: resumed, branched, from --init-from, or new. Returns (GPT, checkpoint's dict or None)."""
    start = world.run_on_master(runs.find_start, config, PRESETS[config.preset], enc, fingerprint)
    if start:
        model = GPT.from_state(*checkpoint.model_state(start))
    else:
        vocab_size = config.vocab_size or checkpoint.padded_vocab_size(enc)
        model = GPT(GPTConfig(config.block_size, vocab_size, config.n_layer, config.n_head, config.n_embd))
    checkpoint.check_vocab_size(model.config.vocab_size, enc)
    return model, start if "optimizer" in start else None  # --init-from gives weights only


def training_state(raw_model, optimizers, scaler, loader):
    """All that a run needs to resume exactly: read back by `restore_state` and, for the weights, `GPT.from_state`."""
    return {
        "model": raw_model.state_dict(),
        "optimizer": [optimizer.state_dict() for optimizer in optimizers],
        "scaler": scaler.state_dict(),
        "loader": loader.state_dict(),
        "rng": torch.get_rng_state(),
    }


def restore_state(saved, optimizers, scaler, loader):
    """Restore everything from `training_state` except the weights, which `GPT.from_state` loads."""
    for optimizer, state in zip(optimizers, saved["optimizer"]):
        # learning rates, weight decay and the like are this run's, not the checkpoint's
        optimizer.load_state_dict({"state": state["state"], "param_groups": optimizer.state_dict()["param_groups"]})
    if scaler.is_enabled() and saved["scaler"]:  # a branch may use float16 although its parent did not
        scaler.load_state_dict(saved["scaler"])
    loader.load_state_dict(saved["loader"])
    torch.set_rng_state(saved["rng"])


def train(config, world):
    """Start or resume the run that `config` describes. Returns the process's exit status."""
    torch.manual_seed(config.seed)
    torch.set_float32_matmul_precision("high" if world.device_type == "cuda" else "highest")  # high: TF32

    # everything is loaded and checked; nothing is written before the `with` below
    world.check_agreement(runs.facts_for_all_ranks(config))
    train_loader, val_loader, enc = load_data(config, world)
    world.check_agreement(runs.facts_of_data(enc, train_loader, val_loader))
    raw_model, saved = load_or_make_model(config, enc, train_loader.fingerprint, world)
    start_step = saved["step"] if saved else 0
    if runs.is_finished(config, start_step):
        return 0
    # a run keeps its shape and dtype, on whatever machine it continues
    asked = runs.dtype_of(config, saved, world.device)
    dtype, dtype_name = distributed.choose_dtype(asked, world.device, config.n_embd)
    config = dataclasses.replace(config, dtype=dtype_name, **dataclasses.asdict(raw_model.config))
    examples = []
    # a missing file is downloaded now, rather than in the middle of a run
    if config.hellaswag_every:
        examples = world.run_on_master(hellaswag.load_examples, config.hellaswag_data, enc, config.hellaswag_limit)
    autocast = torch.autocast(world.device_type, dtype, enabled=dtype != torch.float32)  # the weights stay float32
    # raw_model is saved, sampled from and scored; `compiled` is compiled for one shape, (B, T); `model` adds DDP
    model, B = fit_to_machine(raw_model, config, dtype, autocast, world)
    compiled = model.module if world.size > 1 else model
    optimizers = configure_optimizers(raw_model, config)
    scaler = torch.amp.GradScaler(world.device_type, enabled=dtype == torch.float16)
    if saved:
        state = training_state(raw_model, optimizers, scaler, train_loader)
        checkpoint.check_state(saved, state, optimizers)
        restore_state(saved, optimizers, scaler, train_loader)

    # a checkpoint has all that its model needs, including the tokenizer
    metadata = {"config": dataclasses.asdict(config), "tokenizer": enc.name, "tokenizer_file": tokenizer.dumps(enc)}
    T, max_steps = config.sequence_length, config.max_steps
    num_val_windows = min(config.val_tokens // T, val_loader.num_windows)
    stopping = False
    with runs.Run(config, world, start_step, saved, metadata) as run:
        saved = None  # frees gigabytes
        run.print_summary(raw_model, dtype, train_loader, num_val_windows, B, optimizers)
        gc.collect()
        # everything allocated so far lives to the end of the run: exclude it from garbage collection
        gc.freeze()

        for step in range(start_step, max_steps + 1):
            last_step = step == max_steps
            # evaluations at step N see the weights after N updates, the last update included
            if not stopping:
                if is_due(step, config.val_every, max_steps):
                    loss = evaluate_val_loss(compiled, val_loader, num_val_windows, B, autocast, world)
                    run.log_val_loss(step, loss, raw_model)
                if is_due(step, config.hellaswag_every, max_steps):
                    run.log_hellaswag(step, evaluate_hellaswag(raw_model, examples, enc, autocast, world))
                if is_due(step, config.sample_every, max_steps) and world.is_master:
                    run.log_samples(step, generate_samples(raw_model, enc, config, autocast, world.device))
            is_milestone = is_due(step, config.milestone_every, max_steps)
            if last_step or stopping or is_milestone or is_due(step, config.checkpoint_every, max_steps):
                run.save(step, training_state(raw_model, optimizers, scaler, train_loader))
            if last_step or stopping:
                break

            start = time.perf_counter()
            lr = apply_schedules(optimizers, step, config)
            num_windows = get_batch_size(train_loader.position * T, config) // T
            loss, norm, stopping = train_step(
                model, train_loader, num_windows, B, optimizers, scaler, step, config, run.signals, autocast, world
            )
            run.log_step(step, loss, lr, norm, num_windows * T, time.perf_counter() - start)

        return run.finish(step, stopping, raw_model, enc)


# ----------------------------------------------------------------------------------------------------------
# Command line


def parse_args(args=None):
    """Parse a command line into a TrainConfig: the preset's defaults, overridden by the flags."""
    return cli.parse(TrainConfig, args, presets=PRESETS, synonyms=cli.OTHER_TRAINERS)


def check_config(config, world_size):
    """Raise one UserError with everything that is wrong with `config` on `world_size` ranks."""
    above_0 = "n_layer n_head n_embd block_size batch_size sequence_length total_batch_size"
    above_0 += " max_steps max_lr val_tokens keep_checkpoints"
    errors = cli.check_numbers(config, above_0.split(), below_1=["beta1", "beta2", "muon_momentum"])
    errors += distributed.check_machine(config) + runs.check_names(config)
    # at least 1, so that a bad value reported above cannot cause a division by zero in the checks below
    T, n_head, total = (max(1, n) for n in (config.sequence_length, config.n_head, config.total_batch_size))
    if config.n_embd % n_head:
        nearest = n_head * max(1, round(config.n_embd / n_head))
        errors.append(f"--n-embd {config.n_embd} is not a multiple of --n-head {n_head}. Try --n-embd {nearest}.")
    if T > config.block_size:
        errors.append(
            f"--sequence-length {T} is longer than --block-size {config.block_size}. "
            "Lower the first or raise the second."
        )
    errors += distributed.check_batch(total, T, world_size, config.batch_ramp)
    if config.val_tokens < T:
        errors.append(f"--val-tokens is {config.val_tokens}, but it must be {T} or more, the length of one sequence.")
    if config.decay_fraction > 1:
        errors.append(f"--decay-fraction is {config.decay_fraction}, but it must be between 0 and 1.")
    if errors:
        raise UserError(" ".join(errors))


def main(args=None):
    """Parse the flags, set up the ranks, train, and exit with train's status."""
    config = parse_args(args)
    check_config(config, distributed.get_world_size())
    world = distributed.setup_distributed(config.device)
    try:
        status = train(config, world)
    finally:
        distributed.cleanup_distributed()
    sys.exit(status)


if __name__ == "__main__":
    cli.run(main)
