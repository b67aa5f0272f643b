"""HellaSwag: which of four endings does the model find most likely?

10,042 validation examples (Zellers et al. 2019, https://github.com/rowanz/hellaswag); chance is
25%. Each ending is scored by the log-likelihood of its tokens given the context. Implementations
differ in the text they score and in the normalization, so each number names its convention:

    build-nanogpt           the field `ctx` as it is; acc: the largest sum,
                            acc_norm: the largest mean over the ending's tokens
    lm-evaluation-harness   the activity and the cleaned context; acc: the sum,
                            acc_norm: the sum per character of the ending

OpenAI's GPT-2 124M scores 0.2859 and 0.2955 by the first, 0.2892 and 0.3114 by the second.

    python hellaswag.py -m gpt2 -d cuda          OpenAI's weights
    python hellaswag.py -m log/model_19073.pt    a checkpoint, a run, or hf/
"""

import itertools
import json
import math
import os
import re
import sys
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple

from plumbing.cli import console, flags
from plumbing.cli.console import UserError, print0
from plumbing.run import source_code


@dataclass
class Options:
    # a GPT-2 name, a checkpoint, a run's folder, or a folder in Hugging Face format
    model_type: Annotated[str, "-m", "--model"] = "gpt2"
    device: Annotated[str, "-d"] = "auto"  # cpu, cuda or mps; auto: best available
    data: str = "hellaswag/hellaswag_val.jsonl"  # JSON lines of examples; HellaSwag is downloaded to the default
    limit: int = 0  # score only this many examples, from the first; 0: all
    predictions: str = ""  # write each example's label and predictions to this new file, one JSON line each
    batch_tokens: int = 0  # tokens per batch, fewer take less memory; 0: chosen for the device
    code: str = (
        source_code.NAME
    )  # the trainer's file with the code of the model: the changed copy that trained it


if __name__ == "__main__":
    console.run(lambda: flags.parse(Options))  # --help and a mistyped flag need not wait for the imports

import numpy as np
import torch
import torch.nn.functional as F

from plumbing.data import readers, sources
from plumbing.data.tokenizers import encode_text
from plumbing.files import check_new_output, new_output
from plumbing.system.devices import choose_device, exact_matmuls

COMMIT = "a29ff8e9a04bba4bd6588223785ce105328adc57"
URL = f"https://raw.githubusercontent.com/rowanz/hellaswag/{COMMIT}/data/hellaswag_val.jsonl"
DIGEST = "0f5ee25d72216f12317d5d8a7b92deafa423d81e"  # as git has it
# row lengths are rounded up to this: on a GPU 14 shapes and 7% padding; 32 would give 9 shapes and 11%
PAD_TO = 16
# positions whose logits are computed at a time. With 50,304 ids in float32, 256 take 52 MB, which suits a CPU's caches
# best, and 2,048 take 412 MB, which keeps a GPU busy with few kernel launches
LOGITS_CHUNK, LOGITS_CHUNK_CUDA = 256, 2048

# ----- Data ---------------------------------------------------------------------------------------------


def read_examples(path, limit=0):
    """The first `limit` examples (0: all) of a JSON lines file; if the default one is missing, it is downloaded."""
    if not os.path.exists(path):
        if path != Options.data:
            raise UserError(f"There is no file {path}. Give HellaSwag's JSON lines, or leave the flag out.")
        advice = f"Check the network, or save the file as {path}. Training also works without it: --hellaswag-every 0."
        sources.download(URL, path, DIGEST, advice)
    examples = []
    for number, place, example in itertools.islice(readers.read_records(path), limit or None):
        texts = [example.get("activity_label"), example.get("ctx")]
        texts += [example.get(name, "") for name in ("ctx_a", "ctx_b")]
        if isinstance(example.get("endings"), list):
            texts += example["endings"]
        has_texts = len(texts) == 8 and all(isinstance(text, str) for text in texts)
        # the hub's copy has labels that are strings
        if not has_texts or str(example.get("label")) not in list("0123"):
            raise UserError(
                f"{place} is not a HellaSwag example, which has the texts activity_label and ctx, "
                f"four texts as endings, and a label from 0 to 3. Fix or remove it: {console.plain(example, 60)}"
            )
        examples.append({"ind": number - 1, **example})
    if not examples:
        raise UserError(f"{path} is empty. Replace it with HellaSwag's file of JSON lines.")
    return examples


def load_examples(path, enc, limit=0):
    """The examples that `read_examples` returns, rendered, for a training run."""
    return [render_example(example, enc) for example in read_examples(path, limit)]


class Rendered(NamedTuple):
    """An example as tokens."""

    context: list  # ids of the context
    endings: list  # per ending, its ids
    label: int  # index of the true ending
    characters: list  # per ending, the length of its text in characters, by which the harness normalizes


def render_example(example, enc, harness=False):
    """Tokenize an example by build-nanogpt's convention or by lm-evaluation-harness'.

    {"ctx": "A man is on a roof. he", "endings": ["pulls up roofing.", ...], "label": 0} becomes the ids of
    "A man is on a roof. he" and, for each ending, those of " pulls up roofing.", with the space before it.
    """
    context, endings, prefix = example["ctx"], example["endings"], " "
    if harness:
        text, endings = harness_text(example)
        context = text.rstrip()  # the harness moves trailing whitespace to the endings
        prefix = text[len(context) :] + " "
    return Rendered(
        encode_text(enc, context).tolist()
        or [enc.eot_token],  # the first token must be predicted from something
        [encode_text(enc, prefix + ending).tolist() for ending in endings],
        int(example["label"]),
        [len(ending) for ending in endings],
    )


def harness_text(example):
    """Context and endings as lm-evaluation-harness formats them (task hellaswag, version 1.0).

    It capitalizes ctx_b, the unfinished sentence that the endings complete (if there is none: what follows ctx's last
    full stop).
    """
    if "ctx_a" in example and "ctx_b" in example:
        sentences, begun = example["ctx_a"], example["ctx_b"]
    else:
        match = re.fullmatch(r"(.*[.?!])\s+([^A-Z.?!][^.?!]*)", example["ctx"], re.DOTALL)
        sentences, begun = match.groups() if match else (example["ctx"], "")

    def clean(text):  # [header], [title] and [step] come from WikiHow
        text = text.strip().replace(" [title]", ". ")
        # what is not closed is matched as well and left, so that a thousand brackets are not each tried in turn
        text = re.sub(r"\[[^\]\n]*\]?", lambda match: "" if match[0].endswith("]") else match[0], text)
        return text.replace("  ", " ")

    context = clean(f"{example['activity_label']}: {sentences} {begun.capitalize()}")
    return context, [clean(ending) for ending in example["endings"]]


# ----- Scoring ------------------------------------------------------------------------------------------


def truncate(example, block_size):
    """Truncate (context, endings) to what a model with `block_size` positions can read.

    An ending keeps its first `block_size` tokens (the last is only predicted), the context its newest that still fit.
    """
    endings = [ending[:block_size] for ending in example.endings]
    longest = max(len(ending) for ending in endings)
    return example.context[-(block_size + 1 - longest) :], endings


def pack(rows, L):
    """Pack each (context, endings) into a row of L tokens: half as many as the usual four rows per example take.

    The attention mask hides the endings from one another. A context of 3 tokens and endings a, b of 3 and 2 make:

        idx      c0 c1 c2  a0 a1  b0  0  0     a2 and b1 are only predicted
        pos       0  1  2   3  4   3  0  0
        segment   0  0  0   1  1   2  5  5     5 is padding

    Returns idx, pos, segment (B, L) and, for every token of every ending in order, its id and the flat
    index (row * L + column) at which it is predicted: positions, targets (N,).
    """
    idx, pos, segment = np.zeros((3, len(rows), L), int)
    segment += 5  # padding, where nothing is written: the context is 0, the endings are 1 to 4
    positions, targets = [], []
    for row, (context, endings) in enumerate(rows):
        n = end = len(context)
        idx[row, :n] = context
        pos[row, :n] = range(n)
        segment[row, :n] = 0
        for number, ending in enumerate(endings, 1):
            start, end = end, end + len(ending) - 1
            idx[row, start:end] = ending[:-1]
            pos[row, start:end] = range(n, n + end - start)
            segment[row, start:end] = number
            # subtle: the context's last token predicts the first of each ending
            positions += [row * L + n - 1, *range(row * L + start, row * L + end)]
            targets += ending
    return [torch.from_numpy(array) for array in (idx, pos, segment, np.array(positions), np.array(targets))]


def attention_mask(segment):
    """The mask (B, 1, L, L): a token attends causally to the context and to its own segment."""
    L = segment.size(1)
    query, key = segment[:, :, None], segment[:, None, :]
    causal = torch.ones(L, L, dtype=torch.bool, device=segment.device).tril()
    return (causal & ((query == key) | (key == 0)))[:, None]


@torch.no_grad()
def score(model, examples, n_vocab, batch_tokens=0, stop=()):
    """An array (3, examples, 4): each ending's log-likelihood; that per token; and that per character.

    `model` is the plain GPT, neither compiled nor wrapped, since the shapes vary. Ids from `n_vocab` on pad the
    vocabulary and get no probability. With batch_tokens 0, the batch suits the device. Returns None once the list
    `stop` has an entry.
    """
    device = next(model.parameters()).device
    rows = [truncate(example, model.config.block_size) for example in examples]
    tokens = np.array([list(map(len, endings)) for _, endings in rows])  # (examples, 4)
    packs = can_pack(model, max(rows, key=row_length), n_vocab)
    if not packs:
        rows = [(context, [ending]) for context, endings in rows for ending in endings]
    # longest first: memory use peaks early, and rows of similar length share a batch
    order = np.argsort([-row_length(row) for row in rows], kind="stable")
    batch_tokens = batch_tokens or (2**14 if device.type == "cuda" else 2**11)  # few rows fit a CPU's caches
    batch_tokens //= 1 if packs else 4  # plain rows take the logits of all positions
    longest = sys.maxsize if packs else model.config.block_size
    batches = packed_batches([rows[i] for i in order], batch_tokens, longest, device=device)
    log_probs = []
    with console.progress_bar(total=len(examples), desc="HellaSwag", unit=" examples") as bar:
        for batch in batches:  # a GPU computes while the next one is packed
            if stop:
                return None
            log_probs.extend(score_batch(model, batch, n_vocab, packs=packs))
            bar.update(len(batch[0]) * len(examples) / len(rows))
    log_probs = torch.cat(log_probs).cpu().numpy().astype(np.float64)  # the only host-device synchronization
    per_row = tokens.reshape(len(rows), -1)  # of each row, the tokens of its endings
    total = np.empty(per_row.shape)
    starts = per_row[order].cumsum() - per_row[order].ravel()
    total[order] = np.add.reduceat(log_probs, starts).reshape(per_row.shape)
    total, characters = total.reshape(tokens.shape), np.array([example.characters for example in examples])
    return np.stack([total, total / tokens, total / characters.clip(1)])


def row_length(row):
    """The tokens that are read of (context, endings) in a row: the last token of each ending is only predicted."""
    context, endings = row
    return len(context) + sum(map(len, endings)) - len(endings)


def can_pack(model, row, n_vocab):
    """Whether packed rows are right for this model: one that counts positions by itself, say, needs plain ones."""
    context, endings = row  # the example whose scores are compared, in float32
    device = next(model.parameters()).device
    with torch.autocast(device.type, enabled=False), exact_matmuls():
        rows = [(context, [ending]) for ending in endings]
        plain = torch.cat(list(score_batch(model, pack(rows, max(map(row_length, rows))), n_vocab, packs=False)))
        try:
            packed = torch.cat(list(score_batch(model, pack([row], row_length(row)), n_vocab)))
            agrees = bool((packed - plain).abs().max() <= 3e-5 * plain.abs().max())
        except Exception:  # it may not take positions or a mask
            agrees = False
    if not agrees:
        print0(
            "note: Packed rows give this model other HellaSwag scores: an example takes four.", file=sys.stderr
        )
    return agrees


def packed_batches(rows, batch_tokens, longest, *, device):
    """Yield batches, as `pack` returns them, of rows sorted by length, up to `longest`; in pinned memory for a GPU."""
    while rows:
        L = min(math.ceil(row_length(rows[0]) / PAD_TO) * PAD_TO, longest)
        num_rows = max(1, batch_tokens // L)
        tensors, rows = pack(rows[:num_rows], L), rows[num_rows:]
        # from pinned memory a copy to the GPU does not wait for the work that is queued there
        yield [tensor.pin_memory() for tensor in tensors] if device.type == "cuda" else tensors


def score_batch(model, batch, n_vocab, packs=True):
    """Yield the log-probabilities of the endings' tokens in a batch from `pack`, in chunks.

    packs: whether rows may have several endings. Otherwise the model reads each as it would any text.
    """
    device = next(model.parameters()).device
    idx, pos, segment, positions, targets = (tensor.to(device, non_blocking=True) for tensor in batch)
    if packs:
        found = model.hidden_states(idx, pos, attention_mask(segment)).flatten(0, 1)  # (B * L, C)
    else:
        found = model(idx)[0].flatten(0, 1)  # (B * L, vocab)
    chunk_size = LOGITS_CHUNK_CUDA if device.type == "cuda" else LOGITS_CHUNK
    for where, ids in zip(positions.split(chunk_size), targets.split(chunk_size)):
        logits = model.logits(found[where]) if packs else found[where].clone()  # (chunk_size, vocab)
        logits[:, n_vocab:] = -torch.inf
        yield -F.cross_entropy(logits.float(), ids, reduction="none")


class Counts(NamedTuple):
    """The number of examples, and how many are correct by each rule; to be summed over the ranks."""

    n: int
    acc: int  # largest sum
    acc_norm: int  # largest mean over tokens, build-nanogpt's rule
    acc_char: int  # largest sum divided by characters; on the harness' text this is its acc_norm


def evaluate(model, examples, n_vocab, **options):
    """The Counts on rendered examples; for the options see `score`. All are 0 if `stop` ended the scoring."""
    scores = score(model, examples, n_vocab, **options) if examples else None  # a rank's share may be empty
    if scores is None:
        return Counts(0, 0, 0, 0)
    correct = scores.argmax(2) == [example.label for example in examples]
    return Counts(len(examples), *correct.sum(1).tolist())


# ----- Command line -------------------------------------------------------------------------------------

# what is printed, the prefix of names in --predictions, and which of the scores acc_norm compares
CONVENTIONS = [
    ("lm-evaluation-harness (cleaned text, acc_norm by characters)", "harness_", 2),
    ("build-nanogpt (ctx as it is, acc_norm by tokens)", "", 1),
]


def main(args=None):
    """Score the model in both conventions; the last line is build-nanogpt's."""
    options = flags.parse(Options, args)
    flags.check(options)
    if options.predictions:
        check_new_output(options.predictions)
    device = choose_device(options.device)
    examples = read_examples(options.data, options.limit)
    model, enc = source_code.load(options.code).load_model(options.model_type)
    model.to(device)
    torch.set_float32_matmul_precision("high")  # TF32 on CUDA, which is accurate enough for this
    labels = [int(example["label"]) for example in examples]
    columns = {"ind": [example["ind"] for example in examples], "label": labels}
    for name, prefix, norm in CONVENTIONS:
        rendered = [render_example(example, enc, harness=prefix == "harness_") for example in examples]
        scores: Any = score(model, rendered, enc.n_vocab, options.batch_tokens)
        chosen = scores[[0, norm]].argmax(2)
        columns[prefix + "pred"], columns[prefix + "pred_norm"] = chosen.tolist()
        acc, acc_norm = (chosen == labels).mean(1)
        print(f"{name}:\n{len(labels)} acc: {acc:.4f} acc_norm: {acc_norm:.4f}", flush=True)
    if options.predictions:
        with new_output(options.predictions) as file:
            for values in zip(*columns.values()):
                file.write(json.dumps(dict(zip(columns, values))) + "\n")


if __name__ == "__main__":
    console.run(main, output_is_product=True)
