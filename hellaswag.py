"""HellaSwag: which of four endings does the model find most likely?

10,042 validation examples (Zellers et al. 2019, https://github.com/rowanz/hellaswag); chance is
25%. Each ending is scored by the log-likelihood of its tokens given the context. Implementations
differ in the text they score and in the normalization, so each number names its convention:

    build-nanogpt           the field `ctx` as it is; acc: the largest sum,
                            acc_norm: the largest mean over the ending's tokens
    lm-evaluation-harness   the activity and the cleaned context; acc: the sum,
                            acc_norm: the sum over the ending's characters

OpenAI's GPT-2 124M scores 0.2859 and 0.2955 by the first, 0.2892 and 0.3114 by the second.

    python hellaswag.py -m gpt2 -d cuda          OpenAI's weights
    python hellaswag.py -m log/model_19073.pt    a checkpoint, a run, or hf/

The four endings of an example share one pass over its context: a row holds the context, then each
ending. The position ids of every ending start after the context, and the attention mask hides the
endings from one another. This takes half the tokens of the usual four rows.
"""

import itertools
import json
import math
import os
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Annotated, NamedTuple

from plumbing import cli
from plumbing.cli import UserError


@dataclass
class Options:
    """HellaSwag accuracy of a GPT-2, in the two conventions that people quote."""

    # a GPT-2 name, a checkpoint, a run's folder, or a folder in Hugging Face format
    model_type: Annotated[str, "-m", "--model"] = "gpt2"
    device: Annotated[str, "-d"] = "auto"  # cpu, cuda or mps; auto: best available
    data: str = ""  # JSON lines of examples; default: the validation file, downloaded once to hellaswag/
    limit: int = 0  # score only this many examples, from the first; 0: all
    predictions: str = ""  # write each example's label and predictions to this new file, one JSON line each
    batch_tokens: int = 0  # tokens per batch, fewer take less memory; 0: chosen for the device


# the names for these in nanoGPT, transformers and lm-evaluation-harness
SYNONYMS = {
    "--model": "model out-dir init-from pretrained model-args model-name-or-path model-path checkpoint ckpt",
    "--limit": "num-examples max-examples num-samples length",
    "--batch-tokens": "batch-size",
    "--predictions": "output-path output out log-samples",
    "Scoring reads no prompt.": "prompt start",
}


def parse_args(args=None):
    """The Options of a command line. Raises one UserError listing everything that is wrong with the flags."""
    options = cli.parse(Options, args, synonyms=SYNONYMS)
    errors = cli.check_numbers(options, above_0=())
    if options.data and not os.path.exists(options.data):
        errors.append(f"There is no file {options.data}. Give HellaSwag's JSON lines, or leave --data out.")
    if errors:
        raise UserError(" ".join(errors))
    return options


if __name__ == "__main__":
    cli.run(parse_args)  # before importing torch, which takes seconds

import numpy as np
import torch
import torch.nn.functional as F
from tqdm import tqdm

from plumbing import documents
from plumbing.distributed import choose_device
from plumbing.files import check_new_output, new_output, open_regular

URL = "https://raw.githubusercontent.com/rowanz/hellaswag/master/data/hellaswag_val.jsonl"
NUM_EXAMPLES = 10042  # lines of that file
PAD_TO = 16  # row lengths are rounded up to this: on a GPU 14 shapes and 7% padding; 32 would give 9 shapes and 11%
PADDING_SEGMENT = 5  # 0 is the context, 1 to 4 are the endings
# positions whose logits are computed at a time. In float32 of 50,304 ids, 52 MB suit a CPU's caches best, and 412 MB
# keep a GPU busy with few kernel launches
LOGITS_CHUNK, LOGITS_CHUNK_CUDA = 256, 2048

# -----------------------------------------------------------------------------
# Data


def download(path="hellaswag/hellaswag_val.jsonl"):
    """Download the validation file to `path` unless it is there; return `path`."""
    if not os.path.exists(path):
        advice = f"Check the network and run the same command again, or save the file as {path} yourself."
        documents.download(URL, path, advice)
    with open_regular(path) as file:
        found = sum(1 for line in file)
    if found != NUM_EXAMPLES:
        raise UserError(
            f"{path} has {found} lines, but HellaSwag's validation file has {NUM_EXAMPLES}. "
            "Delete it and run the same command again to download it."
        )
    return path


def iterate_examples(path):
    """Yield the examples of a JSON lines file as dictionaries. Raises UserError naming the line that is wrong."""
    number = 0
    for number, example in documents.read_json_lines(path):
        if not is_example(example):
            raise UserError(
                f"Line {number} of {path} is not a HellaSwag example, which has the texts activity_label and ctx, a "
                f"list of four texts as endings, and a label from 0 to 3. Fix or remove it: {cli.plain(example, 60)}"
            )
        yield {"ind": number - 1, **example}
    if number == 0:
        raise UserError(f"{path} is empty. Replace it with HellaSwag's file of JSON lines.")


def is_example(example):
    """Whether a dictionary has what scoring needs. The hub's copy has labels that are strings."""
    texts = [example.get(name) for name in ("activity_label", "ctx")]
    texts += [example[name] for name in ("ctx_a", "ctx_b") if name in example]
    endings = example.get("endings")
    if not isinstance(endings, list) or len(endings) != 4 or str(example.get("label")) not in list("0123"):
        return False
    return all(isinstance(text, str) for text in texts + endings)


def load_examples(path, enc, limit=0):
    """The first `limit` examples (0: all) of a JSON lines file, rendered, for a training run; downloaded if missing."""
    if not os.path.exists(path):
        try:
            download(path)
        except UserError as error:
            raise UserError(f"{error} To train without HellaSwag's scores, add --hellaswag-every 0.") from None
    return [render_example(example, enc) for example in itertools.islice(iterate_examples(path), limit or None)]


class Rendered(NamedTuple):
    """An example as tokens."""

    context: list  # ids of the context
    endings: list  # per ending, its ids
    label: int  # index of the true ending
    characters: list  # per ending, the length of its text in characters, by which the harness normalizes


def render_example(example, enc, harness=False):
    """Tokenize an example by build-nanogpt's convention or by lm-evaluation-harness'.

    {"ctx": "A man is on a roof. he", "endings": ["pulls up roofing.", ...], "label": 0} becomes the
    ids of "A man is on a roof. he" and, for each ending, those of " pulls up roofing.": the space
    before a word belongs to its first token, as in running text.
    """
    context, endings = example["ctx"], example["endings"]
    prefix = " "
    if harness:
        context, endings = harness_text(example)
        # the harness moves trailing whitespace from the context to the endings
        stripped = context.rstrip()
        prefix = context[len(stripped) :] + " "
        context = stripped
    return Rendered(
        enc.encode_ordinary(context) or [enc.eot_token],  # the first token must be predicted from something
        [enc.encode_ordinary(prefix + ending) for ending in endings],
        int(example["label"]),
        [len(ending) for ending in endings],
    )


def harness_text(example):
    """Context and endings, formatted like lm-evaluation-harness' task hellaswag (version 1.0).

    It capitalizes ctx_b, the begun sentence that the endings complete. If a file has only ctx,
    ctx_b is taken to be the text after its last full stop, question mark or exclamation mark.
    """
    if "ctx_a" in example and "ctx_b" in example:
        sentences, begun = example["ctx_a"], example["ctx_b"]
    else:
        match = re.fullmatch(r"(.*[.?!])\s+([^A-Z.?!][^.?!]*)", example["ctx"], re.DOTALL)
        sentences, begun = match.groups() if match else (example["ctx"], "")

    def clean(text):  # [header], [title] and [step] come from WikiHow
        return re.sub(r"\[.*?\]", "", text.strip().replace(" [title]", ". ")).replace("  ", " ")

    context = clean(f"{example['activity_label']}: {sentences} {begun.capitalize()}")
    return context, [clean(ending) for ending in example["endings"]]


# -----------------------------------------------------------------------------
# Scoring


def truncate(example, block_size):
    """Truncate (context, endings) to what a model with `block_size` positions can read.

    The last token of an ending is only predicted, never an input. Too long a context loses its oldest
    tokens, as many as the longest ending requires; too long an ending counts only with its first
    `block_size` tokens.
    """
    endings = [ending[:block_size] for ending in example.endings]
    longest = max(len(ending) for ending in endings)
    return example.context[-(block_size + 1 - longest) :], endings


def pack(rows, L):
    """Pack (context, endings) pairs into one batch of rows of L tokens.

    A context of 3 tokens and endings a, b of 3 and 2 make a row of L = 8 like this:

        idx      c0 c1 c2  a0 a1  b0  0  0     a2 and b1 are only predicted
        pos       0  1  2   3  4   3  0  0
        segment   0  0  0   1  1   2  5  5     5 is padding

    Returns idx, pos, segment (B, L) and, for every token of every ending in order, its id and the flat
    index (row * L + column) at which it is predicted: positions, targets (N,).
    """
    shape = (len(rows), L)
    idx, pos, segment = np.zeros(shape, int), np.zeros(shape, int), np.full(shape, PADDING_SEGMENT)
    positions, targets = [], []
    for row, (context, endings) in enumerate(rows):
        context_length = len(context)
        idx[row, :context_length] = context
        pos[row, :context_length] = range(context_length)
        segment[row, :context_length] = 0
        end = context_length
        for number, ending in enumerate(endings, 1):
            start, end = end, end + len(ending) - 1
            idx[row, start:end] = ending[:-1]
            pos[row, start:end] = range(context_length, context_length + end - start)
            segment[row, start:end] = number
            # subtle: the context's last token predicts the first of each ending
            positions.append(row * L + context_length - 1)
            positions.extend(range(row * L + start, row * L + end))
            targets.extend(ending)
    arrays = (idx, pos, segment, np.array(positions), np.array(targets))
    return [torch.from_numpy(array) for array in arrays]


def attention_mask(segment):
    """The mask (B, 1, L, L): a token attends causally to the context and to its own segment."""
    L = segment.size(1)
    query, key = segment[:, :, None], segment[:, None, :]
    causal = torch.ones(L, L, dtype=torch.bool, device=segment.device).tril()
    return (causal & ((query == key) | (key == 0)))[:, None]


class Stopped(Exception):
    """Scoring was stopped before it was complete, for example by a signal."""


@torch.no_grad()
def score(model, examples, n_vocab, batch_tokens=0, progress=False, stop=()):
    """The sum and the mean of the log-likelihoods of each ending's tokens: two arrays (examples, 4).

    `model` is the plain GPT, neither compiled nor wrapped, since the shapes vary. `n_vocab` is the
    tokenizer's: higher ids are padding and get no probability. `batch_tokens` limits the tokens per
    batch; 0 chooses a limit that suits the device. Raises Stopped once the list `stop` has an entry.
    """
    device = next(model.parameters()).device
    if batch_tokens == 0:
        # a CPU's caches hold few rows; a GPU needs many to keep busy
        batch_tokens = 2**14 if device.type == "cuda" else 2**11
    rows = [truncate(example, model.config.block_size) for example in examples]
    lengths = np.array([[len(ending) for ending in endings] for _, endings in rows]).reshape(-1, 4)
    context_lengths = np.array([len(context) for context, _ in rows], dtype=int)
    row_lengths = context_lengths + lengths.sum(1) - 4  # the last token of each ending is not read
    # longest first: memory use peaks early, and rows of similar length share a batch
    order = np.argsort(-row_lengths, kind="stable")
    batches = packed_batches([rows[i] for i in order], row_lengths[order], batch_tokens, device)
    log_probs = [torch.zeros(0, device=device)]
    with tqdm(total=len(rows), desc="HellaSwag", unit=" examples", leave=False, disable=not progress) as bar:
        for batch in run_ahead(batches):
            if stop:
                raise Stopped
            log_probs.extend(score_batch(model, batch, n_vocab))
            bar.update(len(batch[0]))
    log_probs = torch.cat(log_probs).cpu().numpy().astype(np.float64)  # the only host-device synchronization
    total = np.empty(lengths.shape)
    if len(rows):
        starts = np.cumsum(lengths[order]) - lengths[order].ravel()
        total[order] = np.add.reduceat(log_probs, starts).reshape(-1, 4)
    return total, total / lengths


def packed_batches(rows, row_lengths, batch_tokens, device):
    """Yield batches, as `pack` returns them, of rows sorted by length; in pinned memory for a GPU."""
    done = 0
    while done < len(rows):
        L = -(-row_lengths[done] // PAD_TO) * PAD_TO  # rounded up
        num_rows = max(1, batch_tokens // L)
        tensors = pack(rows[done : done + num_rows], L)
        # from pinned memory a copy to the GPU does not wait for the work that is queued there
        yield [tensor.pin_memory() for tensor in tensors] if device.type == "cuda" else tensors
        done += num_rows


def run_ahead(iterator):
    """Yield what `iterator` yields, while a thread makes the next item."""
    with ThreadPoolExecutor(1) as executor:
        pending = executor.submit(next, iterator, None)
        item = pending.result()
        while item is not None:
            pending = executor.submit(next, iterator, None)
            yield item
            item = pending.result()


def score_batch(model, batch, n_vocab):
    """Yield the log-probabilities of the endings' tokens in a packed batch, in chunks."""
    device = next(model.parameters()).device
    idx, pos, segment, positions, targets = (tensor.to(device, non_blocking=True) for tensor in batch)
    hidden = model.hidden_states(idx, pos, attention_mask(segment)).flatten(0, 1)  # (B * L, C)
    chunk_size = LOGITS_CHUNK_CUDA if device.type == "cuda" else LOGITS_CHUNK
    for first in range(0, len(positions), chunk_size):
        chunk = slice(first, first + chunk_size)
        logits = model.lm_head(hidden[positions[chunk]])  # (chunk_size, vocab)
        logits[:, n_vocab:] = -torch.inf
        yield -F.cross_entropy(logits.float(), targets[chunk], reduction="none")


def predict(model, examples, n_vocab, **options):
    """The predicted ending by largest sum, mean over tokens, and sum over characters: ints (examples, 3)."""
    total, mean = score(model, examples, n_vocab, **options)
    characters = np.array([example.characters for example in examples], dtype=int).reshape(-1, 4).clip(1)
    return np.stack([values.argmax(1) for values in (total, mean, total / characters)], axis=1)


class Counts(NamedTuple):
    """The number of examples, and how many are correct by each rule; to be summed over the ranks."""

    n: int
    acc: int  # largest sum
    acc_norm: int  # largest mean over tokens, build-nanogpt's rule
    acc_char: int  # largest sum over characters; on the harness' text this is its acc_norm


def evaluate(model, examples, n_vocab, rank=0, world_size=1, **options):
    """The Counts on this rank's share of the rendered examples: every `world_size`-th, starting at `rank`.

    If `stop` ends the scoring, all Counts are 0. For the other options see `score`.
    """
    local = examples[rank::world_size]
    labels = np.array([example.label for example in local], dtype=int)
    try:
        correct = predict(model, local, n_vocab, **options) == labels[:, None]
    except Stopped:
        return Counts(0, 0, 0, 0)
    return Counts(len(local), *correct.sum(0).tolist())


# -----------------------------------------------------------------------------
# Command line


def main(args=None):
    """Score the model in both conventions; the last line is build-nanogpt's."""
    options = parse_args(args)
    if options.predictions:
        check_new_output(options.predictions)
    from train_gpt2 import load_model  # not above: train_gpt2 imports this file

    device = choose_device(options.device)
    model, enc = load_model(options.model_type)
    model.to(device)
    torch.set_float32_matmul_precision("high")  # TF32 on CUDA, which is accurate enough for this
    examples = list(itertools.islice(iterate_examples(options.data or download()), options.limit or None))

    predictions = {}
    for convention in ("harness", "build-nanogpt"):
        rendered = [render_example(example, enc, convention == "harness") for example in examples]
        predictions[convention] = predict(
            model, rendered, enc.n_vocab, batch_tokens=options.batch_tokens, progress=True
        )
    if options.predictions:
        with new_output(options.predictions) as file:
            for example, nanogpt, harness in zip(examples, predictions["build-nanogpt"], predictions["harness"]):
                line = dict(ind=example["ind"], label=int(example["label"]))
                line |= dict(pred=int(nanogpt[0]), pred_norm=int(nanogpt[1]))
                line |= dict(harness_pred=int(harness[0]), harness_pred_norm=int(harness[2]))
                file.write(json.dumps(line) + "\n")
    print_accuracies(examples, predictions)


def print_accuracies(examples, predictions):
    """Print the accuracies in both conventions."""
    labels = np.array([[int(example["label"])] for example in examples])
    number = cli.count(len(examples), "example")
    num_derived = sum("ctx_b" not in example for example in examples)
    if num_derived:
        print(f"note: {num_derived:,} lacked ctx_a and ctx_b, which were derived from ctx.", file=sys.stderr)
    print(f"lm-evaluation-harness (cleaned text, acc_norm by characters), {number}:")
    print(summary(predictions["harness"][:, [0, 2]] == labels, errors=True))
    print(f"build-nanogpt (ctx as it is, acc_norm by tokens), {number}:")
    print(summary(predictions["build-nanogpt"][:, :2] == labels))


def summary(correct, errors=False):
    """ "10042 acc: 0.2859 acc_norm: 0.2955" from bools (examples, 2); `errors` adds one standard error."""
    parts = [str(len(correct))]
    for name, share in zip(("acc", "acc_norm"), correct.mean(0)):
        parts.append(f"{name}: {share:.4f}")
        if errors:
            standard_error = math.sqrt(share * (1 - share) / max(len(correct) - 1, 1))  # n - 1, as in the harness
            parts.append(f"+- {standard_error:.4f}")
    return " ".join(parts)


if __name__ == "__main__":
    cli.run(main, output_is_product=True)
