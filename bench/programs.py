"""HellaSwag and generation, compared with the usual ways to compute them."""

import dataclasses
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch.nn.utils.rnn import pad_sequence

import hellaswag
import train_gpt2
from bench.measure import measure
from bench.steps import configure, transformers_model, world_of
from plumbing.data import tokenizers
from plumbing.run.huggingface import transposed
from plumbing.system.kernels import without_cudnn_attention
from train_gpt2 import GPT


def random_model(options, vocab_size=1, block_size=1):
    """(GPT with seeded random weights and at least these sizes, its Settings, its dtype)."""
    config = configure(options)
    config = dataclasses.replace(
        config,
        vocab_size=max(config.vocab_size, vocab_size),
        block_size=max(config.block_size, block_size),
    )
    torch.manual_seed(0)
    model = GPT(config.model_config).to(config.device)
    return model.eval(), config, getattr(torch, config.dtype)


@torch.no_grad()
def four_rows(model, examples, n_vocab):
    """Score HellaSwag in the usual way: one example at a time, in four padded rows of context and ending."""
    device = next(model.parameters()).device
    predictions = []
    for example in examples:
        rows = [torch.tensor(example.context + ending) for ending in example.endings]
        tokens = pad_sequence(rows, batch_first=True).to(device)
        lengths = torch.tensor([len(row) for row in rows], device=device)
        places = torch.arange(tokens.size(1), device=device)
        mask = (places >= len(example.context)) & (places < lengths[:, None])
        logits = model(tokens)[0][:, :-1, :n_vocab].float()
        targets = tokens[:, 1:].flatten()
        losses = F.cross_entropy(logits.flatten(0, 1), targets, reduction="none")
        total = (losses.view(4, -1) * mask[:, 1:]).sum(1)
        mean = total / mask.sum(1)
        predictions.append([total.argmin().item(), mean.argmin().item()])
    return np.array(predictions)


def score(options):
    """Compare HellaSwag in hellaswag.py, which runs each context once, and in the usual four rows.

    Both do without cuDNN's attention, which would build a kernel for each length.
    """
    enc = tokenizers.get_encoding(options.tokenizer)
    lines = hellaswag.read_examples(options.hellaswag, options.limit)
    examples = [hellaswag.render_example(line, enc) for line in lines]
    longest = max(len(example.context) + max(map(len, example.endings)) for example in examples)
    model, config, dtype = random_model(options, enc.n_vocab, longest)
    score_by: Any = hellaswag.score
    sides = {
        "hellaswag.py": lambda: score_by(model, examples, enc.n_vocab).argmax(2)[:2].T,
        "four rows": lambda: four_rows(model, examples, enc.n_vocab),
    }
    with train_gpt2.autocast(config, world_of(config)), without_cudnn_attention():
        work = dict.fromkeys(sides, len(examples))
        numbers, endings = measure(sides, options.rounds, work, unit="examples")
    by_sum, by_mean = (endings["hellaswag.py"] == endings["four rows"]).sum(0).tolist()
    print(f"{len(examples)} examples, {dtype}: same ending by sum {by_sum}, by mean {by_mean}")
    return numbers | dict(examples=len(examples), same_by_sum=by_sum, same_by_mean=by_mean)


@torch.no_grad()
def generate_without_cache(model, idx, max_new_tokens):
    """Greedy decoding that recomputes the whole sequence for every token."""
    for _ in range(max_new_tokens):
        logits = model(idx[:, -model.config.block_size :])[0][:, -1]
        idx = torch.cat([idx, logits.argmax(-1, keepdim=True)], 1)
    return idx


def sample(options):
    """Compare greedy generation in sample.py, without a cache, and in transformers.

    All do without cuDNN's attention, which would build a kernel for each length.
    """
    B, n = options.num_samples, options.max_new_tokens
    model, config, dtype = random_model(options, block_size=8 + n)
    prompt = torch.randint(config.vocab_size, (B, 8), device=config.device)
    model.to(dtype)  # as in sample.py
    theirs: Any = transformers_model(config)
    theirs.to(dtype).eval()
    theirs.load_state_dict(transposed(model.state_dict()))
    limits: dict[str, Any] = dict(
        max_new_tokens=n, min_new_tokens=n, do_sample=False, use_cache=True, pad_token_id=0
    )
    limits["attention_mask"] = torch.ones_like(prompt)
    sides = {
        "sample.py": lambda: torch.stack(list(model.generate(prompt, n, config.vocab_size, temperature=0)), 1),
        "without a cache": lambda: generate_without_cache(model, prompt, n)[:, -n:],
        "transformers": lambda: theirs.generate(prompt, **limits)[:, -n:],
    }
    with without_cudnn_attention():
        numbers, ids = measure(sides, options.rounds, dict.fromkeys(sides, B * n), unit="tok")
    same = {name: torch.equal(ids[name], ids["sample.py"]) for name in ids}
    print(f"{n} tokens, sequences at a time: {B}, {dtype}, greedy; the same tokens: {same}")
    return numbers | {"same_tokens": same}
