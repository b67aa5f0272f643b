"""hellaswag.py: what is scored, who wins, how it is spread over ranks, and what bad input does."""

import json
import operator
import os
import re
from pathlib import Path

import hellaswag
import numpy as np
import pytest
import torch
import torch.nn as nn
import train_gpt2
from hellaswag import Counts, evaluate, harness_text, read_examples, render_example, score
from plumbing.data import tokenizers
from plumbing.run.huggingface import export_huggingface
from train_gpt2 import GPTConfig

from harness import examples_file, four_rows, patched, refusal_of, refused, tiny_model, train

ENC = tokenizers.get_encoding("bytes")  # ids 0..255 and <|endoftext|>, 257 in all

# unequal lengths, text beyond ASCII, an empty context
ROOF = ["is using wrap.", "is ripping level tiles off.", "holds a cube.", "pulls up the roofing on a roof."]
CAFE = ["says \u201cmerci\u201d.", "asks for \u5bff\u53f8 and waits for a long time.", "flies.", "sleeps."]
LETTERS = ["a", "bb", "ccc", "dddd"]
EXAMPLES = [
    {"activity_label": "Roofing", "ctx": "A man is on a roof. he", "label": 3, "endings": ROOF},
    {
        "activity_label": "Caf\u00e9",
        "ctx": "Zo\u00eb orders a caf\u00e9 cr\u00e8me. she",
        "label": 0,
        "endings": CAFE,
    },
    {"activity_label": "X", "ctx": "", "label": 1, "endings": LETTERS},
]


def write_examples(path, examples):
    """A file of JSON lines."""
    lines = [json.dumps(example) + "\n" for example in examples]
    path.write_text("".join(lines), encoding="utf-8")


def render_all(harness=False):
    return [render_example(example, ENC, harness=harness) for example in EXAMPLES]


class Planted(nn.Module):
    """A bigram model with known probabilities: 1/2 for the planted successor of a byte, 1/512 for each other.

    Every prediction then costs 1 or 9 bits. Columns from 257 on are the vocabulary's padding.
    """

    def __init__(self, padding=0.0):
        super().__init__()
        self.config = GPTConfig(block_size=1024, vocab_size=320)
        self.has_cache = True
        table = torch.zeros(257, 320)
        for pair in SUCCESSORS:
            before, after = pair.encode("latin-1")
            table[before, after] = np.log(256)  # 256 / (256 + 256 others) = 1/2
        table[:, 257:] = padding
        self.table = nn.Parameter(table)

    def hidden_states(self, idx, cache=None):
        return nn.functional.one_hot(idx, 257).float()

    def logits(self, hidden):
        return hidden @ self.table


E_ACUTE = "\u00e9"  # one character, two bytes: c3 a9
SUCCESSORS = ["x ", " a", "aa", "\xc3\xa9", "\xa9\xc3"]
# in bits: 10 for 2 tokens; 17 for 9 tokens of 4 characters; 13 for 5 tokens of 4 characters; 11 for 3 tokens of 2
WINNERS = {
    "activity_label": "",
    "ctx": "x",
    "label": "1",  # a text, as in the hub's copy
    "endings": ["b", E_ACUTE * 4, "aaab", "ac"],
}


@pytest.mark.parametrize("padding", [0.0, 100.0])
def test_winners_computed_by_hand_whatever_the_logits_of_the_vocabularys_padding(padding):
    """Sum: "b", 10 bits. Mean over tokens: E_ACUTE * 4, 17/9. Mean over characters: "aaab", 13/4."""
    model, example = Planted(padding), render_example(WINNERS, ENC)
    log_probs = score(model, [example], ENC.n_vocab)
    bits = -log_probs[:, 0] / np.log(2)
    assert bits[0] == pytest.approx([10, 17, 13, 11], rel=1e-5)
    assert bits[1] == pytest.approx([10 / 2, 17 / 9, 13 / 5, 11 / 3], rel=1e-5)
    assert bits[2] == pytest.approx([10 / 1, 17 / 4, 13 / 4, 11 / 2], rel=1e-5)
    assert evaluate(model, [example], ENC.n_vocab) == Counts(n=1, acc=0, acc_norm=1, acc_char=0)
    assert evaluate(model, [], ENC.n_vocab) == Counts(n=0, acc=0, acc_norm=0, acc_char=0), "as of a rank without any"


@pytest.mark.parametrize("has_cache", [True, False])
def test_scores_equal_four_independent_rows_whatever_the_batch_and_the_chunks_of_logits(has_cache, monkeypatch):
    examples = 3 * [*render_all(), *render_all(harness=True)]
    model = tiny_model(block_size=1024)
    model.has_cache = has_cache
    # logits below 10 have errors below 1e-5 whatever the order of their sums, and an ending has 45 tokens
    same = pytest.approx(four_rows(model, examples), abs=1e-3)
    for at_most, chunk in {1: 1, 300: 7, 2**14: 2048}.items():
        monkeypatch.setattr(hellaswag, "LOGITS_CHUNK", chunk)
        assert score(model, examples, ENC.n_vocab, at_most=at_most)[0] == same


def test_in_training_no_batch_has_more_tokens_than_one_of_training(data, tmp_path):
    """But for a single example, whose four rows may be longer."""
    shapes = []

    def hidden_states(self, idx, *rest):
        shapes.append(idx.shape)
        return compute(self, idx, *rest)

    def evaluate_and_record(parts):
        with patched(train_gpt2.GPT, "hidden_states", hidden_states):
            return evaluate_plainly(parts)

    compute = train_gpt2.GPT.hidden_states
    file = examples_file(tmp_path, ["A man is on a roof. he"] * 12)
    options = dict(max_steps=0, block_size=64, sequence_length=64, batch_size=4, total_batch_size=256)
    with patched(train_gpt2, "evaluate_hellaswag", evaluate_and_record) as evaluate_plainly:
        train(data, "out", hellaswag_every=1, hellaswag_data=file, **options)
    assert max(rows for rows, _ in shapes) > 4
    for rows, length in shapes:
        assert rows == 4 or rows * length <= 256


def test_too_long_contexts_lose_their_oldest_tokens_and_endings_their_newest():
    """All but the last token are read."""
    endings = [[6, 7, 8, 9, 10, 11], [6], [6], [6]]
    example = hellaswag.Rendered(context=[1, 2, 3, 4, 5], endings=endings, label=0, characters=[1] * 4)
    first, *others = hellaswag.truncate(example, block_size=4)
    assert first == ([5], [6, 7, 8, 9])
    assert others == [([5], [6])] * 3


def test_examples_that_are_longer_than_the_block_are_scored_as_the_harness_does():
    """It gives the model the newest tokens of context and ending, as many as it reads, and one to predict."""
    model = tiny_model(block_size=48)
    examples = render_all(harness=True)
    expected = []
    for example in examples:
        for ending in example.endings:
            newest = (example.context + ending)[-49:]
            logits, _ = model(torch.tensor([newest[:-1]]))
            log_probs = logits[0, -len(ending) :, :257].log_softmax(-1)
            expected.append(log_probs[range(len(ending)), ending].sum().item())
    assert score(model, examples, ENC.n_vocab)[0].ravel() == pytest.approx(expected, abs=1e-3)
    assert np.isfinite(score(tiny_model(block_size=16), render_all(), ENC.n_vocab)).all()


def test_examples_that_are_cut_are_counted_and_said(output):
    """The last token is only predicted: 54 bytes of context and ending fit a block of 53."""
    examples = [render_example(EXAMPLES[0], ENC), render_example(EXAMPLES[2], ENC)]
    assert len(examples[0].context) + len(examples[0].endings[3]) == 54
    hellaswag.note_cut(examples, 53)
    assert not output()
    hellaswag.note_cut(examples, 52)
    assert "note: 1 of 2 examples of HellaSwag are longer than the model's 52 tokens." in output()


HARNESS = [
    # the begun sentence is capitalized, and so lower-cased otherwise
    ({"ctx_a": "A boy runs.", "ctx_b": "the boy in the USA"}, "High jump: A boy runs. The boy in the usa"),
    ({"ctx_a": "[header] How to [title] Run. [step] Run fast.", "ctx_b": ""}, "High jump: How to. Run. Run fast."),
    # without ctx_a and ctx_b
    ({"ctx": "A boy runs. It is hot! the boy"}, "High jump: A boy runs. It is hot! The boy"),
    ({"ctx": "A boy runs in Paris. He stops in Rome."}, "High jump: A boy runs in Paris. He stops in Rome."),
    # a mark ends at the first bracket on its line
    ({"ctx": "[a [b] c] [d\n] e [f"}, "High jump: c] [d\n] e [f"),
]


@pytest.mark.parametrize("fields, expected", HARNESS)
def test_text_of_the_harness(fields, expected):
    endings = ["[substeps] Leap.  High."] * 4
    example = {"activity_label": "High jump", "endings": endings, **fields}
    context, endings = harness_text(example)
    assert context == expected
    assert endings[0] == " Leap. High."


def test_the_blank_that_a_removed_mark_leaves_belongs_to_the_endings_as_in_the_harness():
    """Which divides by the characters of the cleaned ending, without the context's blank."""
    example = dict(activity_label="X", ctx="", ctx_a="Run fast. [step]", ctx_b="", label=0)
    example["endings"] = ["[substeps] Leap.", "a", "bb", "ccc"]
    rendered = render_example(example, ENC, harness=True)
    assert bytes(rendered.context) == b"X: Run fast."
    assert bytes(rendered.endings[0]) == b"   Leap."
    assert rendered.characters == [len(" Leap."), 1, 2, 3]


def test_the_file_is_downloaded_once(monkeypatch):
    path = Path("val.jsonl")
    fetched = []

    def fetch(url, path, digest, advice):
        fetched.append(url)
        write_examples(path, EXAMPLES)

    monkeypatch.setattr(hellaswag.downloads, "download", fetch)
    monkeypatch.setattr(hellaswag.Options, "data", path)
    numbered = [{"ind": number, **example} for number, example in enumerate(EXAMPLES)]
    assert read_examples(path, 0) == numbered
    assert read_examples(path, 2) == numbered[:2]
    assert fetched == [hellaswag.URL]


GOOD = json.dumps(EXAMPLES[0])
BAD = {
    GOOD.replace('"label": 3', '"label": 4'): "Line 1 .*bad.jsonl is not a HellaSwag example",
    GOOD.replace('"is using wrap.", ', ""): "Line 1 .*bad.jsonl is not a HellaSwag example",
    "": "bad.jsonl is empty",
    GOOD + "\n{broken\n": "Line 2 .*bad.jsonl is not a valid JSON object: Expecting property name",
}


@pytest.mark.parametrize("text", BAD)
def test_a_bad_example_is_one_line(text):
    Path("bad.jsonl").write_text(text, encoding="utf-8")
    assert re.search(BAD[text], refused(hellaswag.main, "--data", "bad.jsonl"))


def test_predictions_replace_nothing():
    """Not even a link that leads nowhere, and this is said before the model is loaded."""
    os.symlink("nowhere", "link")
    assert "exists already" in refused(hellaswag.main, "--predictions", "link", "-m", "no-such-model")


@pytest.fixture
def scored(monkeypatch):
    """A function that returns the lines and the notes of hellaswag.py for these examples and words."""
    monkeypatch.setattr(torch, "set_float32_matmul_precision", lambda precision: None)  # it would outlast a test
    export_huggingface(MODEL, ENC, Path("hf"))

    def score_examples(examples, *words):
        write_examples(Path("val.jsonl"), examples)
        options = ["-m", "hf", "-d", "cpu", "--data", "val.jsonl"]
        status, stdout, stderr = refusal_of(hellaswag.main, *options, *words)
        assert status == 0, stderr
        return stdout.splitlines(), stderr

    return score_examples


MODEL = tiny_model(block_size=1024)


@pytest.mark.gpt2
def test_the_command_prints_both_conventions(scored):
    (first, harness, second, plain), _ = scored(EXAMPLES)
    assert "lm-evaluation-harness" in first
    counts = evaluate(MODEL, render_all(harness=True), ENC.n_vocab)
    assert harness == f"3 acc: {counts.acc / 3:.4f} acc_norm: {counts.acc_char / 3:.4f}"
    assert "build-nanogpt" in second
    counts = evaluate(MODEL, render_all(), ENC.n_vocab)
    assert plain == f"3 acc: {counts.acc / 3:.4f} acc_norm: {counts.acc_norm / 3:.4f}"


@pytest.mark.gpt2
def test_predictions_are_the_endings_that_each_rule_chooses(scored):
    numbered = [{"ind": number, **example} for number, example in zip("789", EXAMPLES)]
    scored(numbered, "--predictions", "chosen.jsonl")
    lines = Path("chosen.jsonl").read_text(encoding="utf-8").splitlines()
    by_sum, by_mean, _ = score(MODEL, render_all(), ENC.n_vocab).argmax(2).tolist()
    chosen = map(operator.itemgetter("ind", "label", "pred", "pred_norm"), map(json.loads, lines))
    assert [*chosen] == [*zip("789", [3, 0, 1], by_sum, by_mean)]


@pytest.mark.gpt2
def test_without_activity_label_examples_are_scored_in_the_convention_that_does_not_read_it(scored):
    """HellaSwag in other languages may lack it."""
    lines, _ = scored(EXAMPLES)
    fewer = []
    for example in EXAMPLES:
        fewer.append({name: example[name] for name in ("ctx", "label", "endings")})
    said, notes = scored(fewer)
    assert said == lines[2:]
    assert notes.startswith("note: The examples lack activity_label")
