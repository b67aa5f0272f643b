"""hellaswag.py: what is scored, who wins, how it is spread over ranks, and what bad input does."""

import json
import re

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

from harness import examples_file, four_rows, listing, patched, refusal_of, refused, tiny_model, train

ENC = tokenizers.get_encoding("bytes")  # ids 0..255 and <|endoftext|>, 257 in all

# unequal lengths, text beyond ASCII, a context of one letter
ROOF = ["is using wrap.", "is ripping level tiles off.", "holds a cube.", "pulls up the roofing on a roof."]
CAFE = ["says \u201cmerci\u201d.", "asks for \u5bff\u53f8 and waits for a long time.", "flies.", "sleeps."]
EXAMPLES = [
    dict(
        activity_label="Roofing",
        ctx="A man is on a roof. he",
        label=3,
        endings=ROOF,
    ),
    dict(
        activity_label="Caf\u00e9",
        ctx="Zo\u00eb orders a caf\u00e9 cr\u00e8me. she",
        label=0,
        endings=CAFE,
    ),
    dict(
        activity_label="X",
        ctx="x",
        label=1,
        endings=["a", "bb", "ccc", "dddd"],
    ),
]


class Planted(nn.Module):
    """A bigram model with known probabilities: 1/2 for the planted successor of a byte, 1/512 for each other.

    Every prediction then costs 1 or 9 bits. Columns from 257 on are the vocabulary's padding.
    """

    def __init__(self, padding=0.0):
        super().__init__()
        self.config, self.has_cache = GPTConfig(block_size=1024, vocab_size=320), True
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
    "label": 1,
    "endings": ["b", E_ACUTE * 4, "aaab", "ac"],
}


@pytest.mark.parametrize("padding", [0.0, 100.0])
def test_winners_computed_by_hand_whatever_the_logits_of_the_vocabularys_padding(padding):
    """Sum: "b", 10 bits. Mean over tokens: E_ACUTE * 4, 17/9. Mean over characters: "aaab", 13/4."""
    model, example = Planted(padding), render_example(WINNERS, ENC)
    bits = -score(model, [example], ENC.n_vocab)[:, 0] / np.log(2)
    assert bits[0] == pytest.approx([10, 17, 13, 11], rel=1e-5)
    assert bits[1] == pytest.approx([10 / 2, 17 / 9, 13 / 5, 11 / 3], rel=1e-5)
    assert bits[2] == pytest.approx([10 / 1, 17 / 4, 13 / 4, 11 / 2], rel=1e-5)
    assert evaluate(model, [example], ENC.n_vocab) == Counts(
        n=1,
        acc=0,
        acc_norm=1,
        acc_char=0,
    )


@pytest.mark.parametrize("has_cache", [True, False])
def test_scores_equal_four_independent_rows_whatever_the_batch_and_the_chunks_of_logits(has_cache, monkeypatch):
    examples = [render_example(example, ENC, harness) for example in EXAMPLES * 3 for harness in (False, True)]
    model = tiny_model(block_size=1024)
    model.has_cache = has_cache
    # logits below 10 have errors below 1e-5 whatever the order of their sums, and an ending has 45 tokens
    same = pytest.approx(four_rows(model, examples), abs=1e-3)
    for at_most, chunk in ((1, 1), (300, 7), (2**14, 2048)):
        monkeypatch.setattr(hellaswag, "LOGITS_CHUNK", chunk)
        assert score(model, examples, ENC.n_vocab, at_most=at_most)[0] == same


@pytest.mark.parametrize("batch_tokens", [1, 500, 2000, 10**6])
def test_no_batch_is_larger_than_it_may_be_and_each_example_is_in_one(batch_tokens):
    """Its tokens are those of four rows per example, padding and the cache of what they share included."""
    rng = np.random.default_rng(0)
    rows = [([0] * rng.integers(1, 90), [[0] * rng.integers(1, 40) for _ in range(4)]) for _ in range(60)]
    for multiple in (0, 16):
        batches = list(hellaswag.make_batches(rows, batch_tokens, multiple))
        assert sorted(number for batch, _ in batches for number in batch) == list(range(60))
        for batch, cut in batches:
            assert multiple == cut == 0 or (cut % multiple == 0 and cut < min(len(rows[i][0]) for i in batch))
            longest = max(len(rows[i][0]) + max(map(len, rows[i][1])) - 1 for i in batch)
            assert len(batch) == 1 or 4 * len(batch) * longest <= batch_tokens


@pytest.mark.parametrize("B, T", [(4, 128), (16, 64)])
def test_in_training_no_batch_has_more_tokens_than_one_of_training(B, T, data, tmp_path):
    """But for a single example, whose four rows may be longer."""
    shapes = []

    def hidden_states(self, idx, *rest):
        shapes.append(idx.shape)
        return compute(self, idx, *rest)

    def evaluate_and_record(parts):
        with patched(train_gpt2.GPT, "hidden_states", hidden_states):
            return evaluate_plainly(parts)

    compute = train_gpt2.GPT.hidden_states
    file = examples_file(tmp_path, ["A man is on a roof. he", "x", "She orders a coffee and"] * 4)
    options = dict(
        block_size=T,
        sequence_length=T,
        batch_size=B,
        total_batch_size=B * T,
        val_tokens=T,
    )
    with patched(train_gpt2, "evaluate_hellaswag", evaluate_and_record) as evaluate_plainly:
        train(
            data,
            tmp_path / "out",
            hellaswag_every=1,
            hellaswag_data=file,
            max_steps=0,
            **options,
        )
    assert max(rows for rows, _ in shapes) > 4
    assert all(rows == 4 or rows * length <= B * T for rows, length in shapes)


def test_too_long_contexts_lose_their_oldest_tokens():
    example = hellaswag.Rendered([1, 2, 3, 4, 5], [[6, 7, 8], [6], [6], [6]], 0, [1] * 4)
    context, endings = hellaswag.truncate(example, block_size=4)
    assert (context, endings[0]) == ([4, 5], [6, 7, 8])  # reads 4 5 6 7 and predicts 8
    context, endings = hellaswag.truncate(example._replace(endings=[[6, 7, 8, 9, 10, 11]] * 4), block_size=4)
    assert (context, endings[0]) == ([5], [6, 7, 8, 9])
    model = tiny_model(block_size=16)
    assert np.isfinite(score(model, [render_example(example, ENC) for example in EXAMPLES], ENC.n_vocab)).all()


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
    example = {
        "activity_label": "High jump",
        "endings": ["[substeps] Leap.  High."] * 4,
        **fields,
    }
    context, endings = harness_text(example)
    assert context == expected
    assert endings[0] == " Leap. High."


def test_the_blank_that_a_removed_mark_leaves_belongs_to_the_endings_as_in_the_harness():
    example = dict(
        activity_label="X",
        ctx="",
        ctx_a="Run fast. [step]",
        ctx_b="",
        label=0,
        endings=["Leap."] * 4,
    )
    rendered = render_example(example, ENC, harness=True)
    assert (bytes(rendered.context), bytes(rendered.endings[0])) == (b"X: Run fast.", b"  Leap.")


def test_the_file_is_downloaded_once(tmp_path, monkeypatch):
    path, fetched = tmp_path / "val.jsonl", []

    def fetch(url, path, digest, advice):
        fetched.append(url)
        path.write_text("".join(json.dumps(example) + "\n" for example in EXAMPLES), encoding="utf-8")

    monkeypatch.setattr(hellaswag.downloads, "download", fetch)
    monkeypatch.setattr(hellaswag.Options, "data", path)
    numbered = [{"ind": i, **example} for i, example in enumerate(EXAMPLES)]
    for limit in (0, 2):
        assert read_examples(path, limit) == numbered[: limit or None] and fetched == [hellaswag.URL]


def test_a_label_that_is_a_text_counts_as_its_number():
    """As in the hub's copy. The model chooses ending 1 by the mean over tokens."""
    example = render_example(WINNERS | {"label": "1"}, ENC)
    assert evaluate(Planted(), [example], ENC.n_vocab).acc_norm == 1


@pytest.mark.gpt2
def test_without_activity_label_examples_are_scored_in_the_convention_that_does_not_read_it(tmp_path):
    """HellaSwag in other languages may lack it."""
    export_huggingface(tiny_model(block_size=1024), ENC, tmp_path / "hf")
    outputs = []
    for name, keys in (
        ("all", ["activity_label", "ctx", "label", "endings"]),
        ("fewer", ["ctx", "label", "endings"]),
    ):
        path = tmp_path / name
        path.write_text("".join(json.dumps({key: each[key] for key in keys}) + "\n" for each in EXAMPLES))
        status, stdout, stderr = refusal_of(hellaswag.main, "-m", tmp_path / "hf", "-d", "cpu", "--data", path)
        assert status == 0, stderr
        outputs.append(stdout.splitlines())
    assert outputs[1] == outputs[0][2:] and stderr.startswith("note: The examples lack activity_label")


GOOD = json.dumps(EXAMPLES[0])
BAD = {
    GOOD.replace('"label": 3', '"label": 4'): "Line 1 .*bad.jsonl is not a HellaSwag example",
    GOOD.replace('"is using wrap.", ', ""): "Line 1 .*bad.jsonl is not a HellaSwag example",
    "": "bad.jsonl is empty",
    GOOD + "\n{broken\n": "Line 2 .*bad.jsonl is not a valid JSON object: Expecting property name",
}


def test_mistakes_are_one_line_and_predictions_replace_nothing(tmp_path):
    bad = tmp_path / "bad.jsonl"
    for text, reason in BAD.items():
        bad.write_text(text, encoding="utf-8")
        assert re.search(reason, refused(hellaswag.main, "--data", bad))
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    before = listing(tmp_path)
    assert "--limit is -1" in refused(hellaswag.main, "--limit", "-1")
    assert "There is no file" in refused(hellaswag.main, "--data", tmp_path / "nowhere")
    for name in ("bad.jsonl", "link", "."):
        assert "exists already" in refused(hellaswag.main, "--predictions", tmp_path / name, "-m", "no-such-model")
    assert listing(tmp_path) == before


@pytest.mark.gpt2
def test_the_command_prints_both_conventions_and_writes_predictions(tmp_path, monkeypatch):
    monkeypatch.setattr(torch, "set_float32_matmul_precision", lambda precision: None)  # it would outlast this test
    model = tiny_model(block_size=1024)
    export_huggingface(model, ENC, tmp_path / "hf")
    data, predictions = tmp_path / "val.jsonl", tmp_path / "predictions.jsonl"
    lines = [json.dumps({"ind": 7 + i, **example}) + "\n" for i, example in enumerate(EXAMPLES)]
    data.write_text("".join(lines), encoding="utf-8")
    args = ["-m", tmp_path / "hf", "-d", "cpu", "--data", data, "--predictions", predictions]
    status, stdout, stderr = refusal_of(hellaswag.main, *args)
    assert status == 0, stderr
    lines = stdout.splitlines()
    assert "lm-evaluation-harness" in lines[0] and "build-nanogpt" in lines[2]
    examples = [render_example(example, ENC) for example in EXAMPLES]
    counts = evaluate(model, examples, ENC.n_vocab)
    assert lines[3] == f"3 acc: {counts.acc / 3:.4f} acc_norm: {counts.acc_norm / 3:.4f}"
    counts = evaluate(model, [render_example(example, ENC, harness=True) for example in EXAMPLES], ENC.n_vocab)
    assert lines[1] == f"3 acc: {counts.acc / 3:.4f} acc_norm: {counts.acc_char / 3:.4f}"
    written = [json.loads(line) for line in predictions.read_text(encoding="utf-8").splitlines()]
    assert [line["ind"] for line in written] == [7, 8, 9] and [line["label"] for line in written] == [3, 0, 1]
    chosen = score(model, examples, ENC.n_vocab).argmax(2).tolist()
    assert [[line[name] for line in written] for name in ("pred", "pred_norm")] == chosen[:2]
