"""HellaSwag: which of four endings does the model find most likely?

10,042 validation examples (Zellers et al. 2019,
https://github.com/rowanz/hellaswag); chance is 25%. An ending's score is the
log-likelihood of its tokens given the context. Implementations differ in the
text they score and in the normalization, so each result names its convention:

    build-nanogpt           the field `ctx` as it is; acc: the largest sum,
                            acc_norm: the largest mean over the ending's tokens
    lm-evaluation-harness   the activity and the cleaned context; acc: the sum,
                            acc_norm: the sum per character of the ending

OpenAI's GPT-2 124M scores 0.2859 (acc) and 0.2955 (acc_norm) by the first, and
0.2892 and 0.3114 by the second.

    python hellaswag.py -m gpt2 -d cuda          OpenAI's weights
    python hellaswag.py -m log/model_19073.pt    a checkpoint, a run, or hf/
"""

import itertools
import json
import os
import re
import sys
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple

sys.path.append(os.path.dirname(__file__))  # python -P and -I leave it out

from plumbing.cli import console, flags
from plumbing.cli.console import UserError
from plumbing.run import source_code


@dataclass
class Options:
    # a checkpoint, a run's folder, a folder in Hugging Face format, or a name on the Hub: gpt2, or OWNER/NAME
    model_type: Annotated[str, "-m", "--model"] = "gpt2"
    device: Annotated[str, "-d"] = "auto"  # cpu, cuda or mps; auto: best available
    data: str = "hellaswag/hellaswag_val.jsonl"  # examples, as JSON lines; the default is downloaded if missing
    limit: int = 0  # number of examples to score, from the first one; 0: all
    predictions: str = ""  # write each example's label and predictions to this new file, as JSON lines
    batch_tokens: flags.Positive[int] = 2**14  # maximum number of tokens per batch; fewer need less memory
    code: str = ""  # the changed copy of train_gpt2.py that trained the model; by default train_gpt2.py itself


if __name__ == "__main__":
    console.run(lambda: flags.parse(Options))  # answers --help and mistyped flags before the slow imports below

import numpy as np
import torch
import torch.nn.functional as F

from plumbing.data import downloads, readers
from plumbing.data.tokenizers import encode_text
from plumbing.files import check_new_output, new_output
from plumbing.system.devices import choose_device
from plumbing.system.kernels import KVCache

COMMIT = "a29ff8e9a04bba4bd6588223785ce105328adc57"
URL = f"https://raw.githubusercontent.com/rowanz/hellaswag/{COMMIT}/data/hellaswag_val.jsonl"
DIGEST = "0f5ee25d72216f12317d5d8a7b92deafa423d81e"  # git's hash of the file
# contexts share a batch if their lengths are equal when rounded down to a multiple of this; 8 is as fast, 32 slower
SHARED_MULTIPLE = 16
# positions in a chunk of logits. With 50,304 ids in float32, 256 take 52 MB and suit a CPU's caches best; 2,048 take
# 412 MB and keep a GPU busy with few kernel launches
LOGITS_CHUNK = 256
LOGITS_CHUNK_CUDA = 2048

# ----- Data ---------------------------------------------------------------------------------------------


def read_examples(path, limit=0, *, advice=""):
    """The first `limit` examples (0: all) of a JSON lines file. The default file is downloaded if missing."""
    if not os.path.exists(path):
        if path != Options.data:
            raise UserError(f"There is no file {path}. Give a file of examples, or leave the flag out.")
        downloads.download(URL, path, DIGEST, advice=f"Check the network, or save the file as {path}.{advice}")
    examples = []
    for number, place, example in itertools.islice(readers.read_records(path), limit or None):
        if not is_example(example):
            raise UserError(
                f"{place} is not a HellaSwag example. One has a text ctx, four texts as endings, and a label from 0 to "
                f"3. Fix or remove it: {console.plain(example, 60)}"
            )
        examples.append({"ind": number - 1, **example})
    if not examples:
        raise UserError(f"{path} is empty. Replace it with HellaSwag's file of JSON lines.")
    return examples


def is_example(example):
    """Whether an object has the fields of an example. HellaSwag in other languages may lack activity_label."""
    endings = example.get("endings")
    if not isinstance(endings, list) or len(endings) != 4:
        return False
    optional = [example.get(name, "") for name in ("activity_label", "ctx_a", "ctx_b")]
    texts = [example.get("ctx"), *optional, *endings]
    # in the hub's copy, labels are strings
    return all(isinstance(text, str) for text in texts) and str(example.get("label")) in list("0123")


def load_examples(path, enc, limit=0):
    """Read and render the examples for a training run."""
    advice = " To train without HellaSwag, add --hellaswag-every 0."
    return [render_example(example, enc) for example in read_examples(path, limit, advice=advice)]


class Rendered(NamedTuple):
    """An example as tokens."""

    context: list  # ids of the context
    endings: list  # per ending, its ids
    label: int  # index of the true ending
    characters: list  # per ending, its length in characters; the harness divides by it
    harness: bool = False  # whether each ending has its own context in `truncate`


def render_example(example, enc, harness=False):
    """Tokenize an example by build-nanogpt's convention or, with `harness`, by lm-evaluation-harness's.

    {"ctx": "A man is on a roof. he", "endings": ["pulls up roofing.", ...], "label": 0} becomes the ids of
    "A man is on a roof. he" and, for each ending, those of " pulls up roofing.", with the space before it.
    """
    context = example["ctx"]
    endings = example["endings"]
    prefix = " "
    if harness:
        text, endings = harness_text(example)
        context = text.rstrip()  # the harness moves trailing whitespace to the endings
        prefix = text[len(context) :] + " "
    ids = encode_text(enc, context).tolist()
    return Rendered(
        context=ids or [enc.eot_token],  # something must predict an ending's first token
        endings=[encode_text(enc, prefix + ending).tolist() for ending in endings],
        label=int(example["label"]),
        characters=[len(ending) for ending in endings],
        harness=harness,
    )


def harness_text(example):
    """Context and endings as lm-evaluation-harness formats them (task hellaswag, version 1.0).

    It capitalizes ctx_b, the unfinished sentence that the endings complete. Without ctx_b, this is the text after the
    last complete sentence in ctx.
    """
    if "ctx_a" in example and "ctx_b" in example:
        sentences, begun = example["ctx_a"], example["ctx_b"]
    else:
        sentences, begun = example["ctx"], ""
        if match := re.fullmatch(r"(.*[.?!])\s+([^A-Z.?!][^.?!]*)", sentences, re.DOTALL):
            sentences, begun = match.groups()

    def clean(text):  # [header], [title] and [step] come from WikiHow
        text = text.strip().replace(" [title]", ". ")
        return re.sub(r"\[.*?\]", "", text).replace("  ", " ")

    context = clean(f"{example['activity_label']}: {sentences} {begun.capitalize()}")
    return context, [clean(ending) for ending in example["endings"]]


# ----- Scoring ------------------------------------------------------------------------------------------


def truncate(example, block_size):
    """The four (context, ending) of an example, truncated for a model with `block_size` positions.

    An ending keeps its first `block_size` tokens (the model does not read the last one). Then the context keeps as many
    of its newest tokens as fit together with the longest ending or, as in the harness, with this one.
    """
    endings = [ending[:block_size] for ending in example.endings]
    longest = max(map(len, endings))
    pairs = []
    for ending in endings:
        room = len(ending) if example.harness else longest
        pairs.append((example.context[-(block_size + 1 - room) :], ending))
    return pairs


def note_cut(examples, block_size, file=None):
    """Note how many examples are longer than a model with `block_size` positions."""
    lengths = [len(example.context) + max(map(len, example.endings)) for example in examples]
    cut = sum(length > block_size + 1 for length in lengths)
    if cut:
        console.note(
            f"{cut} of {len(examples)} examples of HellaSwag are longer than the model's {block_size} tokens. They "
            "lose the beginning of their context, so a model that reads more tokens may score better.",
            file=file,
        )


@torch.no_grad()
def score(model, examples, n_vocab, *, at_most=2**14):
    """An array (3, examples, 4): each ending's log-likelihood, in total, per token and per character.

    `model` is the plain GPT, neither compiled nor in DDP, because the shapes vary. Ids from `n_vocab` on are padding
    and get no probability. A batch has at most `at_most` tokens, and fewer on a CPU.
    """
    device = next(model.parameters()).device
    batch_tokens = at_most
    if device.type != "cuda":
        batch_tokens = min(at_most, 2**10)  # a CPU's caches hold few rows
    rows = [truncate(example, model.config.block_size) for example in examples]
    batches = list(make_batches(rows, batch_tokens, SHARED_MULTIPLE if model.has_cache else 0))
    log_probs = []
    with console.progress_bar(total=len(examples), desc="HellaSwag", unit=" examples") as bar:
        for batch, cut in batches:  # a GPU computes while the next batch is prepared
            log_probs.append(score_batch(model, [rows[i] for i in batch], cut, n_vocab=n_vocab))
            bar.update(len(batch))
    lengths = np.array([len(ending) for _, ending in itertools.chain(*rows)]).reshape(-1, 4)  # (examples, 4)
    total = np.empty((len(rows), 4))
    for (batch, _), of_tokens in zip(batches, log_probs):
        ends = lengths[batch].cumsum()
        starts = ends - lengths[batch].ravel()
        sums = np.add.reduceat(of_tokens.cpu().double().numpy(), starts)
        total[batch] = sums.reshape(-1, 4)
    characters = np.array([example.characters for example in examples])
    return np.stack([total, total / lengths, total / characters.clip(1)])


def make_batches(rows, batch_tokens, multiple):
    """Yield batches of the rows from `truncate`, as (the rows' numbers, the number of shared tokens).

    Shared tokens are at the beginning of each context and run once for its four endings. Their number is a multiple of
    `multiple`, so that contexts of many lengths fit into a batch; with 0, or if the four contexts are cut differently,
    nothing is shared. The context's last token is never shared, because it predicts the first token of each ending. The
    longest rows come first: memory use peaks early, and there is little padding.
    """
    cuts = [0] * len(rows)
    rests = []
    for i, row in enumerate(rows):
        lengths = {len(context) for context, _ in row}
        if multiple and len(lengths) == 1:
            cuts[i] = (min(lengths) - 1) // multiple * multiple
        longest = max(len(context + ending) for context, ending in row)
        rests.append(longest - cuts[i] - 1)
    order = sorted(range(len(rows)), key=lambda i: (cuts[i], rests[i]), reverse=True)
    while order:
        cut = cuts[order[0]]
        # the cache holds the shared part of each context four times
        at_once = max(1, batch_tokens // (4 * (cut + rests[order[0]])))
        batch = [i for i in order[:at_once] if cuts[i] == cut]
        order = order[len(batch) :]
        yield batch, cut


def score_batch(model, rows, cut, *, n_vocab):
    """The log-probability of each token of each ending, in order. The contexts' first `cut` tokens run only once.

    For a cut of 16, a context of 18 tokens and endings a, b of 3 and 2 tokens (0 is padding):

        c0 c1 ... c15       a cache, repeated for each ending
        c16 c17  a0 a1      predict a0 a1 a2 from c17 on
        c16 c17  b0  0      predict b0 b1
    """
    device = next(model.parameters()).device
    pairs = [(context[cut:], ending) for context, ending in itertools.chain(*rows)]
    L = max(len(context + ending) for context, ending in pairs) - 1  # an ending's last token is only predicted
    idx = np.zeros((len(pairs), L), int)
    targets = []
    positions = []
    for row, (context, ending) in enumerate(pairs):
        end = len(context + ending) - 1
        idx[row, :end] = (context + ending)[:-1]
        positions += range(
            row * L + len(context) - 1, row * L + end
        )  # the context's last token predicts the first
        targets += ending
    cache = None
    if cut:
        cache = KVCache(cut + L)
        model.hidden_states(copy_to(device, [row[0][0][:cut] for row in rows]), cache)
        cache.repeat(4)
    hidden = model.hidden_states(copy_to(device, idx), cache).flatten(0, 1)
    x = hidden[copy_to(device, positions)]  # (N, C), the positions that predict a token of an ending
    chunk_size = LOGITS_CHUNK_CUDA if device.type == "cuda" else LOGITS_CHUNK
    log_probs = []
    for chunk, ids in zip(x.split(chunk_size), copy_to(device, targets).split(chunk_size)):
        logits = model.logits(chunk)[:, :n_vocab].float()  # (chunk_size, n_vocab)
        log_probs.append(-F.cross_entropy(logits, ids, reduction="none"))
    return torch.cat(log_probs)


def copy_to(device, numbers):
    """Copy an array or a list to a tensor on the device. From pinned memory, no other work of a GPU delays the copy."""
    tensor = torch.as_tensor(numbers)
    if device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


class Counts(NamedTuple):
    """The number of examples, and how many are correct by each rule. The ranks' counts are added."""

    n: int
    acc: int  # largest sum
    acc_norm: int  # largest mean over tokens, build-nanogpt's rule
    acc_char: int  # largest sum divided by characters; on the harness' text this is its acc_norm


def evaluate(model, examples, n_vocab, *, at_most=2**14):
    """The Counts on rendered examples; for the arguments see `score`."""
    if not examples:  # a rank's share may be empty
        return Counts(n=0, acc=0, acc_norm=0, acc_char=0)
    scores = score(model, examples, n_vocab, at_most=at_most)
    labels = [example.label for example in examples]
    by_sum, by_tokens, by_characters = (scores.argmax(2) == labels).sum(1).tolist()
    return Counts(n=len(examples), acc=by_sum, acc_norm=by_tokens, acc_char=by_characters)


# ----- Command line -------------------------------------------------------------------------------------

# (name, prefix of its columns in --predictions, row of the scores that acc_norm compares)
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
    model, enc = source_code.import_trainer(options.code).load_model(options.model_type)
    model.to(device)
    torch.set_float32_matmul_precision("high")  # TF32 on CUDA is accurate enough here
    conventions = CONVENTIONS
    if not all("activity_label" in example for example in examples):
        console.note(
            "The examples lack activity_label. lm-evaluation-harness's text needs it, so they are scored in "
            "build-nanogpt's convention only.",
            file=sys.stderr,
        )
        conventions = CONVENTIONS[-1:]
    labels = [int(example["label"]) for example in examples]
    columns = {"ind": [example["ind"] for example in examples], "label": labels}
    for name, prefix, norm in conventions:
        is_harness = prefix == "harness_"
        rendered = [render_example(example, enc, harness=is_harness) for example in examples]
        note_cut(rendered, model.config.block_size, file=sys.stderr)
        scores: Any = score(model, rendered, enc.n_vocab, at_most=options.batch_tokens)
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
