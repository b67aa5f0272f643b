"""HellaSwag: which of four endings does the model find most likely?

10,042 validation examples (Zellers et al. 2019, https://github.com/rowanz/hellaswag); chance is
25%. The model reads the context, and each ending gets the log-likelihood of its tokens. Programs
differ in the text they score and in what they divide by, so each number names its convention:

    build-nanogpt            the field `ctx` as it is; acc takes the ending with the largest sum,
                             acc_norm the one with the largest mean over its tokens
    lm-evaluation-harness    the activity and the cleaned context; acc by the sum, acc_norm by the
                             sum over the number of the ending's characters

OpenAI's GPT-2 124M scores 0.2859 and 0.2955 in the first, 0.2892 and 0.3114 in the second.

    python hellaswag.py -m gpt2 -d cuda              OpenAI's weights
    python hellaswag.py -m log/model_19073.pt        a checkpoint, a run, or a Hugging Face folder

The context of an example runs once and its four endings share it: one row holds the context, then
each ending. Position ids start again behind the context for every ending, and the attention mask
hides the endings from one another. That is half the tokens of the usual four rows.
"""

import http.client
import itertools
import json
import os
import re
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from typing import Annotated, NamedTuple

from plumbing import cli  # before torch: it says how OpenMP's threads wait

import numpy as np
import torch
import torch.nn.functional as F
import tyro
from tqdm import tqdm

from plumbing.cli import UserError

URL = "https://raw.githubusercontent.com/rowanz/hellaswag/master/data/hellaswag_val.jsonl"
NUM_EXAMPLES = 10042  # lines of that file
PAD_TO = 16  # rows are a multiple of this long: 14 shapes and 7% padding on a GPU; with 32, 9 and 11%
LOGITS_CHUNK = 256  # positions whose logits exist at a time: 52 MB in float32 at 50,304 ids

# -----------------------------------------------------------------------------
# Data


def download(path="hellaswag/hellaswag_val.jsonl", url=URL, num_lines=NUM_EXAMPLES, attempts=5, wait=1.0):
    """Fetch the validation file to `path` unless it is there; `wait` seconds double with each attempt."""
    if os.path.exists(path):
        with open(path, "rb") as file:
            found = len(file.read().splitlines())
        if found != num_lines:
            raise UserError(f"got {path} with {found} lines, needed {num_lines}, delete it and run again")
        return path
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
            raise UserError(f"got {problem} from {url}, needed HellaSwag, fetch it elsewhere and put it at {path}")
        time.sleep(wait * 2**attempt)
    try:
        os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
    except OSError as error:
        raise UserError(f"got '{error.strerror}' for {path}, needed a folder that may be written") from None
    with cli.atomic_write(path) as file:
        file.write(content)
    return path


def iterate_examples(path):
    """The examples of a JSON lines file as dictionaries; a UserError names the line that is wrong."""
    number = 0
    try:
        with open(path, encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                try:
                    example = json.loads(line)
                    check_example(example)
                except ValueError as error:
                    raise UserError(
                        f"got {path} line {number}: {error}, needed JSON with activity_label, ctx, "
                        "four endings and a label from 0 to 3, mend or remove that line"
                    ) from None
                yield {"ind": number - 1, **example}
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error.reason
        raise UserError(f"got {path} that can't be read ({reason}), needed HellaSwag's JSON lines") from None
    if not number:
        raise UserError(f"got {path}, which is empty, needed HellaSwag's JSON lines, fetch it again")


def check_example(example):
    """Raise ValueError unless `example` has what scoring needs."""
    if not isinstance(example, dict):
        raise ValueError("no JSON object")
    missing = [key for key in ("activity_label", "ctx", "endings", "label") if key not in example]
    if missing:
        raise ValueError(f"no {', '.join(missing)}")
    if not isinstance(example["endings"], list) or len(example["endings"]) != 4:
        raise ValueError("endings that are not four")
    if not all(isinstance(text, str) for text in (example["activity_label"], example["ctx"], *example["endings"])):
        raise ValueError("a text that is none")
    if str(example["label"]) not in ("0", "1", "2", "3"):  # the hub's copy has them as strings
        raise ValueError(f"label {example['label']!r}")


def load_examples(path, enc, limit=None):
    """The first `limit` examples of a JSON lines file, rendered; the validation file is downloaded if missing."""
    if not os.path.exists(path):
        download(path)
    return [render_example(example, enc) for example in itertools.islice(iterate_examples(path), limit)]


class Rendered(NamedTuple):
    """An example as tokens."""

    context: list  # its ids
    endings: list  # of each of the four endings, its ids
    label: int  # the number of the true ending
    characters: list  # of each ending, the length of its text, by which the harness divides


def render_example(example, enc, harness=False):
    """The tokens of an example, in build-nanogpt's convention or in lm-evaluation-harness'.

    {"ctx": "A man is on a roof. he", "endings": ["pulls up roofing.", ...], "label": 0} becomes the
    ids of "A man is on a roof. he", and for each ending those of " pulls up roofing.": a word's
    space belongs to its first token, as everywhere in running text.
    """
    context, endings = harness_text(example) if harness else (example["ctx"], example["endings"])
    characters = [len(ending) for ending in endings]
    blank = len(context) - len(context.rstrip()) if harness else 0  # the harness hands it on to the endings
    context, joint = context[: len(context) - blank], context[len(context) - blank :] + " "
    return Rendered(
        enc.encode_ordinary(context) or [enc.eot_token],  # something must predict the first token
        [enc.encode_ordinary(joint + ending) for ending in endings],
        int(example["label"]),
        characters,
    )


def harness_text(example):
    """Context and endings as lm-evaluation-harness' task hellaswag (version 1.0) words them.

    It capitalizes ctx_b, the begun sentence that the endings complete. Where a file has only ctx,
    ctx_b is taken to be what follows its last full stop, question or exclamation mark.
    """
    if "ctx_a" in example and "ctx_b" in example:
        whole, begun = example["ctx_a"], example["ctx_b"]
    else:
        match = re.fullmatch(r"(.*[.?!])\s+([^A-Z.?!][^.?!]*)", example["ctx"], re.DOTALL)
        whole, begun = match.groups() if match else (example["ctx"], "")

    def clean(text):  # [header], [title] and [step] come from WikiHow
        return re.sub(r"\[.*?\]", "", text.strip().replace(" [title]", ". ")).replace("  ", " ")

    context = clean(f"{example['activity_label']}: {whole} {begun.capitalize()}")
    return context, [clean(ending) for ending in example["endings"]]


# -----------------------------------------------------------------------------
# Scoring


def fit(example, block_size):
    """(context, endings) as a model of `block_size` positions can read them.

    The last token of an ending is predicted and never read. Too long a context loses its oldest
    tokens, as many as its longest ending asks for; of too long an ending the first `block_size`
    tokens count.
    """
    endings = [ending[:block_size] for ending in example.endings]
    return example.context[-(block_size + 1 - max(map(len, endings))) :], endings


def pack(rows, L, device="cpu"):
    """(context, endings) pairs as one batch of rows of L tokens.

    A context of 3 tokens and endings a, b of 3 and 2 make a row of L = 8 like this:

        idx      c0 c1 c2  a0 a1  b0  0  0     a2 and b1 are predicted only
        pos       0  1  2   3  4   3  0  0
        segment   0  0  0   1  1   2  5  5     5 is padding

    A token attends to the context and to its own segment, up to itself. Returns idx, pos (B, L),
    attn_mask (B, 1, L, L), and for every token of every ending, in order, where it is predicted
    (row * L + column) and its id: places, targets (N,).
    """
    idx, pos, segment = (np.full((len(rows), L), fill) for fill in (0, 0, 5))
    places, targets = [], []
    for row, (context, endings) in enumerate(rows):
        end = len(context)
        idx[row, :end], pos[row, :end], segment[row, :end] = context, range(end), 0
        for number, ending in enumerate(endings, 1):
            start, end = end, end + len(ending) - 1
            idx[row, start:end], segment[row, start:end] = ending[:-1], number
            pos[row, start:end] = range(len(context), len(context) + end - start)
            # subtle: the context's last token predicts the first of each ending
            places += [row * L + len(context) - 1, *range(row * L + start, row * L + end)]
            targets += ending
    arrays = (idx, pos, segment, np.array(places), np.array(targets))
    idx, pos, segment, places, targets = (torch.from_numpy(x).to(device, non_blocking=True) for x in arrays)
    query, key = segment[:, :, None], segment[:, None, :]
    causal = torch.ones(L, L, dtype=torch.bool, device=device).tril()
    return idx, pos, (causal & ((query == key) | (key == 0)))[:, None], places, targets


@torch.no_grad()
def score(model, examples, n_vocab, batch_tokens=0, progress=False):
    """The sum and the mean of the log-likelihoods of each ending's tokens: two arrays (examples, 4).

    `model` is a GPT as such, neither compiled nor wrapped, for the shapes vary. `n_vocab` is the
    tokenizer's: ids from there on are padding and get no probability. `batch_tokens` bounds the
    tokens of a batch; 0 is what suits the device.
    """
    device = next(model.parameters()).device
    # a CPU's caches hold few rows; a GPU wants many to be busy
    batch_tokens = batch_tokens or (2**14 if device.type == "cuda" else 2**11)
    rows = [fit(example, model.config.block_size) for example in examples]
    lengths = np.array([[len(ending) for ending in endings] for _, endings in rows]).reshape(-1, 4)
    sizes = np.array([len(context) for context, _ in rows], dtype=int) + lengths.sum(1) - 4  # tokens to read
    order = np.argsort(-sizes, kind="stable")  # longest first: memory peaks early, and like goes with like
    scores = [torch.zeros(0, device=device)]
    done = 0
    with tqdm(total=len(rows), unit=" examples", disable=not progress) as bar:
        while done < len(rows):
            L = -(-sizes[order[done]] // PAD_TO) * PAD_TO
            batch = [rows[i] for i in order[done : done + max(1, batch_tokens // L)]]
            idx, pos, attn_mask, places, targets = pack(batch, L, device)
            hidden = model.hidden_states(idx, pos, attn_mask).flatten(0, 1)  # (B * L, C)
            for first in range(0, len(places), LOGITS_CHUNK):
                chunk = slice(first, first + LOGITS_CHUNK)
                logits = model.lm_head(hidden[places[chunk]])  # (LOGITS_CHUNK, vocab)
                logits[:, n_vocab:] = -torch.inf
                scores.append(-F.cross_entropy(logits.float(), targets[chunk], reduction="none"))
            done += len(batch)
            bar.update(len(batch))
    scores = torch.cat(scores).cpu().numpy().astype(np.float64)  # the one wait for the device
    total = np.empty(lengths.shape)
    if len(rows):
        starts = np.cumsum(lengths[order]) - lengths[order].ravel()
        total[order] = np.add.reduceat(scores, starts).reshape(-1, 4)
    return total, total / lengths


def predict(model, examples, n_vocab, batch_tokens=0, progress=False):
    """The ending with the largest sum, mean over tokens, and sum over characters: ints (examples, 3)."""
    total, mean = score(model, examples, n_vocab, batch_tokens, progress)
    characters = np.array([example.characters for example in examples], dtype=int).reshape(-1, 4).clip(1)
    return np.stack([values.argmax(1) for values in (total, mean, total / characters)], axis=1)


class Counts(NamedTuple):
    """How many examples, and how many right by each rule; ranks add theirs up."""

    n: int
    acc: int  # largest sum
    acc_norm: int  # largest mean over tokens, build-nanogpt's rule
    acc_char: int  # largest sum over characters, which on its own text is the harness' acc_norm


def evaluate(model, examples, n_vocab, batch_tokens=0, rank=0, world_size=1, progress=False):
    """The Counts of every `world_size`-th of the rendered examples, from number `rank` on."""
    mine = examples[rank::world_size]
    labels = np.array([example.label for example in mine], dtype=int)
    right = predict(model, mine, n_vocab, batch_tokens, progress) == labels[:, None]
    return Counts(len(mine), *right.sum(0).tolist())


# -----------------------------------------------------------------------------
# Command line


@dataclass
class Options:
    """HellaSwag accuracy of a GPT-2, in the two conventions that people quote."""

    # a GPT-2 name, a checkpoint, a run's folder, or a folder in Hugging Face format
    model_type: Annotated[str, tyro.conf.arg(aliases=["-m"])] = "gpt2"
    device: Annotated[str, tyro.conf.arg(aliases=["-d"])] = "auto"  # cpu, cuda or mps; auto takes the best
    data: str = ""  # JSON lines of examples; default: the validation file, fetched once to hellaswag/
    limit: int = 0  # score only the first so many examples; 0: all
    predictions: str = ""  # write each example's label and choices to this file, a JSON line each
    batch_tokens: int = 0  # tokens per batch, fewer take less memory; 0: what suits the device


def main():
    """Score the model in both conventions; the last line is build-nanogpt's."""
    options = cli.parse(Options)
    if (least := min(options.limit, options.batch_tokens)) < 0:
        raise UserError(f"got {least}, needed a --limit and --batch-tokens of 0 or more")
    examples = list(iterate_examples(options.data or download()))[: options.limit or None]
    from train_gpt2 import choose_device, load_model  # not above: train_gpt2 imports this file

    device = choose_device(options)
    model, enc = load_model(options.model_type)
    model.to(device)
    torch.set_float32_matmul_precision("high")  # TF32 on CUDA, far finer than what the accuracies resolve

    picks = {}
    for convention in ("harness", "build-nanogpt"):
        rendered = [render_example(example, enc, convention == "harness") for example in examples]
        picks[convention] = predict(model, rendered, enc.n_vocab, options.batch_tokens, progress=True)
    if options.predictions:
        with cli.atomic_write(options.predictions, "w") as file:
            for example, own, harness in zip(examples, picks["build-nanogpt"].tolist(), picks["harness"].tolist()):
                line = {"ind": example["ind"], "label": int(example["label"]), "pred": own[0], "pred_norm": own[1]}
                line |= {"harness_pred": harness[0], "harness_pred_norm": harness[2]}
                file.write(json.dumps(line) + "\n")

    labels = np.array([[int(example["label"])] for example in examples])
    derived = sum("ctx_b" not in example for example in examples)
    note = f"; {derived} lack ctx_a and ctx_b, which are derived from ctx" if derived else ""
    print(f"lm-evaluation-harness (cleaned text; acc by sum, acc_norm by sum over characters{note}):")
    print(summary(picks["harness"][:, [0, 2]] == labels, errors=True))
    print("build-nanogpt (ctx as it is; acc by sum, acc_norm by mean over tokens):")
    print(summary(picks["build-nanogpt"][:, :2] == labels))


def summary(right, errors=False):
    """"10042 acc: 0.2859 acc_norm: 0.2955" from bools (examples, 2); `errors` adds one standard error."""
    shares = right.mean(0)
    # as the harness has it, with n - 1
    plus = [f" +- {(p * (1 - p) / max(len(right) - 1, 1)) ** 0.5:.4f}" if errors else "" for p in shares]
    return f"{len(right)} acc: {shares[0]:.4f}{plus[0]} acc_norm: {shares[1]:.4f}{plus[1]}"


if __name__ == "__main__":
    cli.run(main)
