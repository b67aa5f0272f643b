"""HellaSwag: which of four endings does the model find most likely?

10,042 validation examples (Zellers et al. 2019, https://github.com/rowanz/hellaswag); chance is
25%. A model reads the context, and each ending gets the log-likelihood of its tokens. Papers and
programs differ in what they do with it, so every number here carries its convention:

    build-nanogpt            the raw "ctx"; acc takes the ending with the largest sum, acc_norm the
                             one with the largest mean over its tokens
    lm-evaluation-harness    "activity: ctx" with its cleaning; acc by the sum, acc_norm by the sum
                             over the number of characters of the ending

OpenAI's GPT-2 124M scores 0.2859 and 0.2955 in the first, 0.2892 and 0.3114 in the second.

    python hellaswag.py -m gpt2 -d cuda              OpenAI's weights
    python hellaswag.py -m log/model_19073.pt        a checkpoint, or a Hugging Face directory

The context of an example runs once and its four endings share it. One row holds the context and
then every ending; position ids start again after the context for each ending, and the attention
mask hides the endings from one another. That is half the tokens of four full rows.
"""

import http.client
import json
import os
import re
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from typing import Annotated, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
import tyro
from tqdm import tqdm

import cli
from cli import UserError

URL = "https://raw.githubusercontent.com/rowanz/hellaswag/master/data/hellaswag_val.jsonl"
DEFAULT_PATH = os.path.join("hellaswag", "hellaswag_val.jsonl")
NUM_EXAMPLES = 10042  # lines of the official validation file
PAD_TO = 32  # rows are as long as a multiple of this: few shapes, and aligned for attention kernels
LOGITS_CHUNK = 1024  # positions whose logits exist at a time: 206 MB in float32 at 50,304 ids

# -----------------------------------------------------------------------------
# Data


def download(path=DEFAULT_PATH, url=URL, num_lines=NUM_EXAMPLES, attempts=5, wait=1.0):
    """Fetch the validation file to `path` unless it is there; `wait` (seconds) doubles per attempt."""
    if os.path.exists(path):
        with open(path, "rb") as file:
            found = len(file.read().splitlines())
        if found != num_lines:
            raise UserError(f"got {path} with {found} lines, needed {num_lines}, do delete it and run again")
        return path
    try:
        os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
    except OSError as error:
        raise UserError(f"got '{error.strerror}' for {path}, needed a folder that may be written") from None
    for attempt in range(attempts):
        try:
            with urllib.request.urlopen(url, timeout=30) as response:  # raises unless the status is 2xx
                content = response.read()
            found = len(content.splitlines())
            if found == num_lines:
                break
            problem, final = f"{found} lines instead of {num_lines}", False
        except urllib.error.HTTPError as error:  # 4xx stays 4xx, but for "too many requests"
            problem, final = f"status {error.code}", error.code < 500 and error.code != 429
        except (OSError, http.client.HTTPException) as error:  # no network, timed out, cut short
            problem, final = str(error), False
        if final or attempt == attempts - 1:
            raise UserError(
                f"got {problem} from {url}, needed HellaSwag's validation file, "
                f"do fetch it on another machine and put it at {path}"
            )
        time.sleep(wait * 2**attempt)
    with cli.atomic_write(path) as file:
        file.write(content)
    return path


def iterate_examples(path):
    """Each example of a JSON lines file as a dictionary; UserError names the line that is wrong."""
    number = 0
    try:
        with open(path, encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                try:
                    example = json.loads(line)
                    check_example(example)
                except ValueError as error:
                    raise UserError(
                        f"got {path} line {number}: {error}, needed HellaSwag's JSON lines "
                        "(ctx, endings, label, activity_label), do mend or remove that line"
                    ) from None
                example.setdefault("ind", number - 1)
                yield example
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"got {error} after line {number} of {path}, needed a readable file") from None
    if not number:
        raise UserError(f"got an empty file {path}, needed HellaSwag's JSON lines, do fetch it again")


def check_example(example):
    """ValueError unless `example` has what scoring needs."""
    if not isinstance(example, dict):
        raise ValueError("not a JSON object")
    missing = [key for key in ("ctx", "endings", "label", "activity_label") if key not in example]
    if missing:
        raise ValueError(f"no {', '.join(missing)}")
    texts = [example["ctx"], example["activity_label"], *example["endings"]]
    if len(texts) != 6 or not all(isinstance(text, str) for text in texts):
        raise ValueError("not a ctx and four endings")
    if str(example["label"]) not in ("0", "1", "2", "3"):  # the hub's copy has strings
        raise ValueError(f"label {example['label']!r}")


class Rendered(NamedTuple):
    """One example as tokens."""

    context: list  # token ids
    endings: list  # of each of the four endings, its token ids
    label: int  # index of the true ending
    characters: list  # of each ending, its number of characters, which the harness divides by


def render_example(example, enc, harness=False):
    """Tokens of an example, in build-nanogpt's convention or in lm-evaluation-harness'.

    {"ctx": "A man is on a roof. he", "endings": ["pulls up roofing.", ...], "label": 0} gives the
    tokens of "A man is on a roof. he", and of " pulls up roofing." and so on: an ending's leading
    space belongs to its first token, as everywhere in running text.
    """
    context, endings = harness_text(example) if harness else (example["ctx"], example["endings"])
    characters = [len(ending) for ending in endings]
    endings = [" " + ending for ending in endings]
    if harness:  # white space at the context's end goes over to the endings, again for their first token
        bare = context.rstrip()
        context, endings = bare, [context[len(bare) :] + ending for ending in endings]
    return Rendered(
        enc.encode_ordinary(context) or [enc.eot_token],  # something must precede the first prediction
        [enc.encode_ordinary(ending) for ending in endings],
        int(example["label"]),
        characters,
    )


def harness_text(example):
    """Context and endings as lm-evaluation-harness' task `hellaswag` (version 1.0) words them.

    It capitalizes ctx_b, the begun sentence that the endings complete. Where a file has ctx only,
    ctx_b is taken to be what follows the last full stop, question or exclamation mark.
    """
    if "ctx_a" in example and "ctx_b" in example:
        first, last = example["ctx_a"], example["ctx_b"]
    else:
        begun = re.fullmatch(r"(.*[.?!])\s+([^A-Z.?!][^.?!]*)", example["ctx"], re.DOTALL)
        first, last = begun.groups() if begun else (example["ctx"], "")

    def clean(text):  # "[header]", "[title]" and "[step]" are left over from WikiHow
        text = re.sub(r"\[.*?\]", "", text.strip().replace(" [title]", ". "))
        return text.replace("  ", " ")

    context = clean(f"{example['activity_label']}: {first} {last.capitalize()}")
    return context, [clean(ending) for ending in example["endings"]]


# -----------------------------------------------------------------------------
# Scoring


def fit(example, block_size):
    """The context and endings that a model of `block_size` positions can read.

    The last token of an ending is predicted, never read. Too long a context loses its oldest
    tokens, as many as its longest ending asks for; an ending longer than the block is scored on
    its first `block_size` tokens.
    """
    endings = [ending[:block_size] for ending in example.endings]
    return example.context[-(block_size + 1 - max(map(len, endings))) :], endings


def pack(examples, device="cpu"):
    """One row per (context, endings): the batch for the model, and where its predictions are read.

    A context of 3 tokens and endings of 3 and 2 tokens fill a row like this:

        idx      c0 c1 c2  a0 a1  b0  0  0     (a2 and b1 are only predicted)
        pos       0  1  2   3  4   3  0  0
        segment   0  0  0   1  1   2  5  5     (5: padding)

    A position attends to those before it, and to itself, in the context and in its own segment.
    Returns idx, pos (B, L), attn_mask (B, 1, L, L), and for each token of each ending, in order,
    the place (row * L + column) that predicts it and its id: places, targets (N,).
    """
    lengths = [len(context) + sum(len(ending) - 1 for ending in endings) for context, endings in examples]
    L = -(-max(lengths) // PAD_TO) * PAD_TO
    idx, pos, segment = (np.full((len(examples), L), fill) for fill in (0, 0, 5))
    places, targets = [], []
    for row, (context, endings) in enumerate(examples):
        end = len(context)
        idx[row, :end], pos[row, :end], segment[row, :end] = context, np.arange(end), 0
        for number, ending in enumerate(endings, 1):
            start, end = end, end + len(ending) - 1
            idx[row, start:end], segment[row, start:end] = ending[:-1], number
            pos[row, start:end] = np.arange(len(context), len(context) + end - start)
            # the context's last position predicts an ending's first token
            places += [row * L + len(context) - 1, *range(row * L + start, row * L + end)]
            targets += ending
    idx, pos, segment, places, targets = (
        torch.from_numpy(np.asarray(x)).to(device, non_blocking=True) for x in (idx, pos, segment, places, targets)
    )
    query, key = segment[:, :, None], segment[:, None, :]  # (B, L, 1), (B, 1, L)
    causal = torch.ones(L, L, dtype=torch.bool, device=device).tril()
    return idx, pos, (causal & ((query == key) | (key == 0)))[:, None], places, targets


@torch.no_grad()
def score(model, examples, n_vocab, batch_tokens=16384, progress=False):
    """Sum and mean log-likelihood of every ending's tokens: two float64 arrays (examples, 4).

    `model` is a plain GPT (not compiled, not wrapped: shapes vary), which is left in the mode it is
    in; `n_vocab` is the tokenizer's vocabulary, ids above it are padding and take no probability;
    `batch_tokens` bounds the tokens of a batch, padding included.
    """
    device = next(model.parameters()).device
    fitted = [fit(example, model.config.block_size) for example in examples]
    sizes = np.array([len(context) + sum(map(len, endings)) - 4 for context, endings in fitted])
    order = np.argsort(-sizes, kind="stable")  # longest first: rows alike share a batch, and memory peaks early
    scores, done = [], 0
    bar = tqdm(total=len(examples), unit=" examples", disable=not progress)
    while done < len(order):
        L = -(-sizes[order[done]] // PAD_TO) * PAD_TO
        batch = order[done : done + max(1, batch_tokens // L)]
        idx, pos, attn_mask, places, targets = pack([fitted[i] for i in batch], device)
        hidden = model.hidden_states(idx, pos, attn_mask).flatten(0, 1)  # (B * L, C)
        for chunk in range(0, len(places), LOGITS_CHUNK):
            here = slice(chunk, chunk + LOGITS_CHUNK)
            logits = model.lm_head(hidden[places[here]])[:, :n_vocab].float()  # (LOGITS_CHUNK, n_vocab)
            scores.append(-F.cross_entropy(logits, targets[here], reduction="none"))
        done += len(batch)
        bar.update(len(batch))
    bar.close()
    if not scores:
        return np.zeros((0, 4)), np.zeros((0, 4))
    scores = torch.cat(scores).double().cpu().numpy()  # the one wait for the device
    lengths = np.array([[len(ending) for ending in fitted[i][1]] for i in order])
    starts = np.cumsum(lengths) - lengths.ravel()
    total = np.empty(lengths.shape)
    mean = np.empty(lengths.shape)
    total[order] = np.add.reduceat(scores, starts).reshape(-1, 4)
    mean[order] = total[order] / lengths
    return total, mean


def predict(model, examples, n_vocab, batch_tokens=16384, progress=False):
    """The ending chosen by sum, by mean over tokens and by sum over characters: ints (examples, 3)."""
    total, mean = score(model, examples, n_vocab, batch_tokens, progress)
    characters = np.array([example.characters for example in examples]).reshape(-1, 4).clip(1)
    return np.stack([ranking.argmax(1) for ranking in (total, mean, total / characters)], axis=1)


class Counts(NamedTuple):
    """How many examples, and how many of them right by each rule; add them up over ranks."""

    n: int
    acc: int  # largest sum of the ending's log-likelihoods
    acc_norm: int  # largest mean over the ending's tokens: build-nanogpt's acc_norm
    acc_char: int  # largest sum over characters: lm-evaluation-harness' acc_norm, given its text


def evaluate(model, examples, n_vocab, batch_tokens=16384, rank=0, world_size=1, progress=False):
    """Counts over every `world_size`-th of the rendered examples, from `rank` on."""
    mine = examples[rank::world_size]
    labels = np.array([example.label for example in mine])
    right = predict(model, mine, n_vocab, batch_tokens, progress) == labels[:, None]
    return Counts(len(mine), *right.sum(0).tolist())


# -----------------------------------------------------------------------------
# Command line


@dataclass
class Options:
    """HellaSwag accuracy of a GPT-2, in two conventions."""

    # a GPT-2 name, a checkpoint, a run's folder, a folder in Hugging Face format
    model_type: Annotated[str, tyro.conf.arg(aliases=["-m"])] = "gpt2"
    device: Annotated[str, tyro.conf.arg(aliases=["-d"])] = "auto"  # cpu, cuda, cuda:1, mps; auto takes the fastest
    data: str = ""  # JSON lines; default: the validation file, fetched once to hellaswag/
    limit: int = 0  # only the first N examples; 0: all
    predictions: str = ""  # write each example's label and choices to this file, as JSON lines
    batch_tokens: int = 16384  # tokens per batch, padding included


def main():
    """Score the model in both conventions; the last line is build-nanogpt's."""
    options = cli.parse(Options)
    if options.limit < 0 or options.batch_tokens < 1:
        raise UserError(
            f"got --limit {options.limit} --batch-tokens {options.batch_tokens}, needed a limit of 0 (all) "
            "or more and at least one token per batch"
        )
    examples = list(iterate_examples(options.data or download()))[: options.limit or None]
    from train_gpt2 import load_model  # here, for train_gpt2 imports this file

    torch.set_float32_matmul_precision("high")  # TF32 on CUDA
    device = options.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    model, enc = load_model(options.model_type, device)

    picks = {}
    for harness in (True, False):
        rendered = [render_example(example, enc, harness) for example in examples]
        picks[harness] = predict(model, rendered, enc.n_vocab, options.batch_tokens, progress=True)
    if options.predictions:
        with cli.atomic_write(options.predictions, "w") as file:
            for example, ours, theirs in zip(examples, picks[False].tolist(), picks[True].tolist()):
                line = {"ind": example["ind"], "label": int(example["label"]), "pred": ours[0], "pred_norm": ours[1]}
                line |= {"harness_pred": theirs[0], "harness_pred_norm": theirs[2]}
                file.write(json.dumps(line) + "\n")

    labels = np.array([int(example["label"]) for example in examples])
    n, right = len(examples), {harness: (picks[harness] == labels[:, None]).mean(0) for harness in picks}
    derived = sum("ctx_b" not in example for example in examples)
    if derived:
        print(f"{derived} of the examples have no ctx_a and ctx_b: the harness' text is derived from their ctx")
    # one standard error of a share near 0.3 among 10,042 examples is 0.0046
    error = [f"{(p * (1 - p) / n) ** 0.5:.4f}" for p in (right[True][0], right[True][2], *right[False][:2])]
    print("lm-evaluation-harness (activity and cleaned text; acc by sum, acc_norm by sum over characters):")
    print(f"{n} acc: {right[True][0]:.4f} acc_norm: {right[True][2]:.4f} (standard errors {error[0]}, {error[1]})")
    print("build-nanogpt (ctx as it is; acc by sum, acc_norm by mean over tokens), standard errors "
          f"{error[2]}, {error[3]}:")
    print(f"{n} acc: {right[False][0]:.4f} acc_norm: {right[False][1]:.4f}")


if __name__ == "__main__":
    cli.run(main)
