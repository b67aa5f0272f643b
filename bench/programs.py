"""Data preparation, HellaSwag and generation, compared with how they are usually done."""

import contextlib
import io
import itertools
import json
import math
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

import fineweb
import hellaswag
import tokenizer
from bench.measure import interleave, report
from bench.steps import transformers_model
from plumbing import documents
from plumbing.cli import count
from plumbing.distributed import choose_dtype, disable_cudnn_attention
from plumbing.huggingface import MATRICES
from train_gpt2 import GPT, GPTConfig, load_model


def data(options):
    """fineweb.py, from documents to shards on all cores, and tiktoken on one thread, with the texts in memory."""
    cores, enc = documents.num_cores(), tokenizer.get_encoding(options.tokenizer)

    def tiktoken():
        return sum(len(enc.encode_ordinary(text)) + 1 for text in texts)

    with tempfile.TemporaryDirectory() as folder:
        if options.input:
            sources, inputs = documents.list_inputs(options.input), options.input
            texts = [p.text for s in sources for p in documents.read_pieces(s, "text")]
        else:
            # Python's own documentation, read beforehand, and often enough that each core has a second of work: so
            # neither reading Python's sources nor starting processes counts
            texts, inputs = documents.python_docs(), (f"{folder}/docs.jsonl",)
            start = time.perf_counter()
            tiktoken()
            texts *= math.ceil(cores / (time.perf_counter() - start))
            Path(inputs[0]).write_text("".join(json.dumps({"text": t}) + "\n" for t in texts), encoding="utf-8")
        numbers = itertools.count()

        def ours():
            out_dir = f"{folder}/{next(numbers)}"
            with contextlib.redirect_stdout(None), contextlib.redirect_stderr(io.StringIO()):
                fineweb.prepare(fineweb.Options(input=inputs, out_dir=out_dir, tokenizer=options.tokenizer))
            return json.loads(Path(out_dir, "meta.json").read_text(encoding="utf-8"))["tokens"]

        measured = interleave({"fineweb.py": ours, "tiktoken, one thread": tiktoken}, options.rounds, "cpu")
    tokens, theirs = (side["result"] for side in measured.values())
    if tokens != theirs:
        print(f"warning: fineweb.py made {tokens:,} tokens and tiktoken {theirs:,}, so the speeds cannot be compared.")
    print(f"{len(texts):,} documents, {tokens:,} tokens, {cores} cores")
    numbers = report(options, measured, tokens, "tok", cores=cores, tokens=tokens)
    print(f"{numbers['ratio'] / cores:.0%} of {cores} cores x one thread")
    return numbers


def load_or_random_model(options):
    """(GPT, tokenizer) of --model, or GPT-2 124M with seeded random weights."""
    torch.manual_seed(0)
    if options.model:
        model, enc = load_model(options.model)
    else:
        enc = tokenizer.get_encoding(options.tokenizer)
        shape = {name: getattr(options, name) for name in ("n_layer", "n_head", "n_embd") if getattr(options, name)}
        model = GPT(GPTConfig(vocab_size=math.ceil(enc.n_vocab / 64) * 64, **shape))
    dtype, _ = choose_dtype(options.dtype, options.device, model.config.n_embd)
    return model.to(options.device).eval(), enc, dtype


@torch.no_grad()
def four_rows(model, examples, n_vocab):
    """HellaSwag as usually scored: one example at a time, in four padded rows of context and ending."""
    device = next(model.parameters()).device
    predictions = []
    for context, endings, *_ in examples:
        length = len(context) + max(map(len, endings))
        tokens, mask = torch.zeros(2, 4, length, dtype=torch.long)
        for row, ending in enumerate(endings):
            tokens[row, : len(context) + len(ending)] = torch.tensor(context + ending)
            mask[row, len(context) : len(context) + len(ending)] = 1
        tokens, mask = tokens.to(device), mask.to(device)
        logits = model(tokens)[0][:, :-1, :n_vocab].float()
        losses = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="none").view(4, -1)
        total = (losses * mask[:, 1:]).sum(1)
        predictions.append([total.argmin().item(), (total / mask.sum(1)).argmin().item()])
    return np.array(predictions)


def score(options):
    """HellaSwag in packed rows and in four rows per example; without cuDNN, which would plan for every length."""
    model, enc, dtype = load_or_random_model(options)
    limit = options.limit or (1000 if options.device.startswith("cuda") else 24)
    lines = itertools.islice(hellaswag.iterate_examples(options.data), limit)
    examples = [hellaswag.render_example(line, enc) for line in lines]
    compared = {
        "hellaswag.py": lambda: hellaswag.score(model, examples, enc.n_vocab).argmax(2)[:2].T,
        "four rows": lambda: four_rows(model, examples, enc.n_vocab),
    }
    autocast = torch.autocast(options.device.split(":")[0], dtype, enabled=dtype != torch.float32)
    with autocast, disable_cudnn_attention():
        measured = interleave(compared, options.rounds, options.device)
    same = (measured["hellaswag.py"]["result"] == measured["four rows"]["result"]).sum(0).tolist()
    print(f"{len(examples)} examples, {dtype}: same ending by sum {same[0]}, by mean {same[1]}")
    counts = dict(examples=len(examples), same_by_sum=same[0], same_by_mean=same[1])
    numbers = report(options, measured, len(examples), "examples", **counts)
    seconds = hellaswag.NUM_EXAMPLES / numbers["examples_per_s"]
    print(f"all {hellaswag.NUM_EXAMPLES:,} examples at this rate: {seconds:.1f} s")
    return numbers


@torch.no_grad()
def generate_without_cache(model, idx, max_new_tokens, n_vocab):
    """Greedy decoding that recomputes the whole sequence for every token."""
    for _ in range(max_new_tokens):
        logits = model(idx[:, -model.config.block_size :])[0][:, -1, :n_vocab]
        idx = torch.cat([idx, logits.argmax(-1, keepdim=True)], 1)
    return idx


def sample(options):
    """Greedy generation: ours, without a cache, and transformers'; without cuDNN, which would plan for every length."""
    model, enc, dtype = load_or_random_model(options)
    B, n = options.batch_size or 1, options.max_new_tokens
    prompt = torch.tensor([enc.encode_ordinary("Hello, I'm a language model,")] * B, device=options.device)
    model.to(dtype).residual_dtype = dtype  # as in sample.py
    theirs = transformers_model(model.config).to(options.device, dtype).eval()
    weights = {name: p.T if name.endswith(MATRICES) else p for name, p in model.named_parameters()}
    theirs.load_state_dict(weights | {"lm_head.weight": model.lm_head.weight})
    # ids that only pad the vocabulary, which no side may generate
    padding = list(range(enc.n_vocab, model.config.vocab_size)) or None
    limits = dict(max_new_tokens=n, min_new_tokens=n, do_sample=False, use_cache=True, pad_token_id=0)
    limits |= dict(suppress_tokens=padding, attention_mask=torch.ones_like(prompt))
    compared = {
        "sample.py": lambda: torch.stack(list(model.generate(prompt, n, enc.n_vocab, temperature=0)), 1).tolist(),
        "without a cache": lambda: generate_without_cache(model, prompt, n, enc.n_vocab)[:, -n:].tolist(),
        "transformers": lambda: theirs.generate(prompt, **limits)[:, -n:].tolist(),
    }
    with disable_cudnn_attention():
        measured = interleave(compared, options.rounds, options.device)
    same = {name: side["result"] == measured["sample.py"]["result"] for name, side in measured.items()}
    differ = ", ".join(name for name in same if not same[name])
    print(f"{n} tokens for {count(B, 'sequence')}, {dtype}, greedy; other tokens than ours: {differ or 'none'}")
    return report(options, measured, B * n, "tok", same_tokens=same, max_new_tokens=n)
