"""sample.py and GPT.generate: the same tokens as without a cache and as transformers, and what people type."""

import io
import os
import sys
from pathlib import Path

import pytest
import sample
import tiktoken
import torch
import train_gpt2
from plumbing.cli.console import harmless
from plumbing.data import tokenizers
from plumbing.run.commands import sample_command
from plumbing.run.huggingface import export_huggingface
from sample import Options, fit_prompt, generate_rows, stream_text

from corpora import train_small
from harness import (
    greedy_without_cache,
    parrot_model,
    printed_commands,
    refused,
    status_of,
    talk,
    tiny_model,
)

gpt2 = pytest.mark.gpt2

BYTES = tokenizers.get_encoding("bytes")
CHAT = tokenizers.get_encoding("bytes+chat")
PROMPT = [72, 101, 108, 108, 111]


def tokenizer_of_257(**special_tokens):
    """A tokenizer of bytes and one more token; no special one means that a text has no end."""
    ranks = BYTES._mergeable_ranks | {b"the": 256}
    return tiktoken.Encoding("257", pat_str=".", mergeable_ranks=ranks, special_tokens=special_tokens)


@pytest.fixture(scope="module")
def model():
    return tiny_model().eval()


def save(model, enc=BYTES):
    """The folder of this model."""
    export_huggingface(model, enc, Path("model"))
    return "model"


def rows_of(model, ids, max_new_tokens, enc=None, rows=1, seed=0, **options):
    """The rows that `generate_rows` gives: lists of ids, None where a row had stopped."""
    torch.manual_seed(seed)
    options = Options(max_new_tokens=max_new_tokens, **options)
    steps = generate_rows(model, enc or tokenizer_of_257(), ids, options=options, rows=rows)
    return [list(row) for row in zip(*steps)]


@pytest.mark.parametrize("length", [1, 32])
def test_greedy_with_the_cache_is_greedy_without_it_also_beyond_the_block(model, length):
    prompts = torch.randint(257, (3, length))
    steps = [*model.generate(prompts, 60, 257, temperature=0)]  # the block is 32
    rows = torch.stack(steps, 1).tolist()
    for prompt, row in zip(prompts.tolist(), rows):
        assert prompt + row == greedy_without_cache(model, prompt, 60)


def test_a_model_that_no_cache_suits_is_sampled_without_one():
    turning = tiny_model().eval()
    turning.transformer.ln_f.register_forward_hook(lambda ln_f, args, x: x * (-1) ** x.size(1))
    turning.has_cache = False
    row = [ids.item() for ids in turning.generate(torch.tensor([PROMPT]), 20, 257, temperature=0)]
    assert PROMPT + row == greedy_without_cache(turning, PROMPT, 20)


@gpt2
@pytest.mark.parametrize("penalty", [0.7, 1.8])
def test_a_repetition_penalty_gives_transformers_numbers(penalty, model):
    from transformers import GPT2LMHeadModel

    theirs = GPT2LMHeadModel.from_pretrained(save(model))
    options = dict(max_new_tokens=20, do_sample=False, repetition_penalty=penalty, eos_token_id=None)
    expected = theirs.generate(torch.tensor([PROMPT]), **options)[0, len(PROMPT) :].tolist()
    assert rows_of(model, PROMPT, 20, temperature=0, repetition_penalty=penalty) == [expected]


@pytest.mark.parametrize(
    "pieces, stops, expected",
    [
        (["a", "b", "c"], (), ["a", "b", "c", ""]),
        (["Hi.", "\nUs", "er: no"], ("\nUser:",), ["", "H", "i."]),  # nothing of it is printed before it is whole
        (["ab", "c"], ("bd", "x"), ["a", "b", "c"]),
        (["a b c"], ("c", "b"), ["a "]),
    ],
)
def test_a_text_ends_before_the_first_of_the_texts_that_stop_it(pieces, stops, expected):
    assert [*sample.up_to(stops, pieces)] == expected


@pytest.mark.parametrize("top_k, kept", [(5, 5), (0, 257)])
def test_an_id_is_drawn_as_often_as_it_is_likely_among_those_that_are_kept(top_k, kept, model):
    """Among which is no padding of the vocabulary."""
    logits, _ = model(torch.tensor([PROMPT]))
    ordered, order = (logits[0, -1, :257] / 2).softmax(-1).sort(descending=True)
    drawn = torch.tensor(rows_of(model, PROMPT, 1, rows=5000, top_k=top_k, temperature=2.0))
    assert {*drawn.flatten().tolist()} <= {*order[:kept].tolist()}
    expected = ordered[:5] / ordered[:kept].sum()
    seen = (drawn == order[:5]).float().mean(0)
    assert (seen - expected).abs().max() < 0.03  # 4 standard errors of a share of 5,000 draws


def test_top_p_keeps_the_fewest_ids_that_have_it_together():
    """Also where that is exact."""
    logits = torch.tensor([0.5, 0.25, 0.25]).log()
    drawn = train_gpt2.sample_ids(logits.repeat(200, 1), top_p=0.75)
    assert {*drawn.tolist()} == {0, 1}


def test_each_row_stops_at_its_own_end(model):
    open_rows = rows_of(model, PROMPT, 30, rows=6, top_k=4, seed=3)
    end = open_rows[0][4]
    stopping = tokenizer_of_257(end=end)
    stopped = rows_of(model, PROMPT, 30, stopping, rows=6, top_k=4, seed=3)
    lengths = [whole.index(end) if end in whole else 30 for whole in open_rows]
    assert len(set(lengths)) > 1
    assert min(lengths) <= 4
    assert len(stopped[0]) == max(lengths), "the others go on"
    for row, whole, length in zip(stopped, open_rows, lengths):
        assert row == whole[:length] + [None] * (max(lengths) - length)


def test_a_character_of_many_bytes_is_printed_when_it_is_whole():
    model, prompt = parrot_model(text="a\u00e9\u20ac"), [CHAT.encode_single_token("<|assistant|>")]
    pieces = stream_text(model, CHAT, prompt, options=Options(temperature=0))
    assert "|".join(pieces) == "a||\u00e9|||\u20ac|"  # of 1, 2 and 3 bytes


@pytest.fixture
def printed(model, output):
    """A function that returns what sample.py prints for these words, of this model."""
    path = save(model)
    output()

    def sample_with(*words):
        assert status_of(sample.main, [*words, "-m", path, "--max-new-tokens", "40", "--device", "cpu"]) == 0
        return output()

    return sample_with


LINE = f"\n{'-' * 80}\n"


@gpt2
@pytest.mark.parametrize("rows", ["1", "3"])
def test_samples_are_the_prompt_and_its_continuation_before_a_text_that_stops_it(rows, printed, model):
    words = ["Hello", "--temperature", "0", "-n", rows]
    ids = greedy_without_cache(model, PROMPT, 40)
    text = harmless(BYTES.decode(ids).partition("<|endoftext|>")[0])
    assert "\\x" in text, "what could steer a terminal is shown"
    assert printed(*words) == LINE.join([text] * int(rows)) + "\n"
    stop = text[-3:]
    text = text[: text.index(stop, 5)]
    assert printed(*words, "--stop", "no such text", stop) == LINE.join([text] * int(rows)) + "\n"


@gpt2
def test_a_prompt_that_spells_a_special_token_is_text(printed):
    assert printed("<|endoftext|>").startswith("<|endoftext|>")


@gpt2
def test_an_export_has_the_weights_bit_for_bit(printed, model):
    [[_, script, *words]] = printed_commands(printed("--export", "out"))
    assert (Path(script).name, words) == ("sample.py", ["The", "-m", "out"])
    weights = dict(model.named_parameters())
    for name, weight in train_gpt2.load_model("out")[0].named_parameters():
        assert torch.equal(weight, weights[name][: len(weight)])


@pytest.mark.parametrize("enc, word", [(BYTES, "The"), (CHAT, "--chat")])
def test_the_command_that_a_run_prints_works_for_its_code_and_whatever_its_prompt_begins_with(enc, word):
    command = sample_command("log", enc, "-x", code=Path("other.py"))
    assert command == ["python", "sample.py", word, ("-m", "log"), ("--code", "other.py")]


def test_an_export_replaces_nothing():
    """Not even a link that leads nowhere."""
    os.symlink("nowhere", "link")
    assert "exists already" in refused(sample.main, "--export", "link")


def test_a_prompt_of_a_million_blanks_is_one_like_any_other():
    """tiktoken gives up on so many in one place, and the prompt ended in its traceback."""
    million = "x" + " " * 1_000_000 + "y"
    enc = train_small("gpt4")
    said = enc.decode(sample.render_prompt(talk(million), enc))
    assert said == f"<|endoftext|>User: {million}\n\nAssistant:"


def test_the_oldest_messages_are_dropped_when_the_block_is_full():
    messages = talk("first", "second", "third", "fourth", "fifth")
    # <|endoftext|>, then marker, bytes and <|end|> for each message, and <|assistant|>
    assert len(fit_prompt(messages, CHAT, 39)) == 39
    assert len(fit_prompt(messages, CHAT, 38)) == 24
    assert [message["content"] for message in messages] == ["third", "fourth", "fifth"]


@pytest.mark.parametrize("enc", [CHAT, BYTES])
def test_a_system_message_comes_first_and_stays(enc):
    messages = [{"role": "system", "content": "Be kind, now"}, *talk("first", "second", "third")]
    left = [messages[0], messages[3]]
    whole = sample.render_prompt(left, enc)
    assert fit_prompt(messages, enc, len(whole)) == whole
    assert messages == left


@pytest.fixture
def chat(monkeypatch, capsys):
    """A function that returns what sample.py --chat prints for these lines."""

    def talk_to(model, lines, enc=CHAT, words=("--max-new-tokens", "5")):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(lines.encode("latin-1")), "utf-8"))
        words = ["--chat", "--temperature", "0", "--device", "cpu", *words]
        assert status_of(sample.main, [*words, "-m", save(model, enc)]) == 0
        return capsys.readouterr()

    return talk_to


@gpt2
def test_chat_answers_its_prompt_and_each_line_until_quit(chat):
    """Also where an answer may be longer than the block, as by default: half of it is for the answer then."""
    assert chat(parrot_model(block_size=32), "caf\u00e9?\n\n/quit\nnever\n", words=["hi"]).out == "ok\nok\n"


@gpt2
def test_a_line_that_is_too_long_begins_a_new_conversation(chat):
    lines = "x" * 60 + "\nhi"
    said = chat(parrot_model(block_size=32), lines).out
    assert said == "(That is too long: at most 27 tokens fit. The conversation starts over.)\nok\n"


@gpt2
def test_a_model_reads_the_conversation_since_reset_with_its_own_answers(chat):
    model = tiny_model(block_size=256).eval()
    options = Options(temperature=0, max_new_tokens=5)
    expected = []
    for lines in (["hi", "you?"], ["again"]):
        messages = [{"role": "system", "content": "Be kind."}]
        for line in lines:
            messages.append({"role": "user", "content": line})
            ids = tokenizers.render_question(messages, CHAT)
            text = "".join(stream_text(model, CHAT, ids, options=options))
            messages.append({"role": "assistant", "content": text.strip()})
            expected.append(f"{harmless(text)}\n")
    words = ["--max-new-tokens", "5", "--system", "Be kind."]
    assert chat(model, "hi\nyou?\n/reset\nagain\n", words=words).out == "".join(expected)


@gpt2
@pytest.mark.parametrize("enc, said", [(BYTES, "\nok\n"), (CHAT, "\nok\nUser:\n")])
def test_without_role_markers_a_line_is_an_answer(enc, said, chat, model, monkeypatch):
    pieces = ["\n", "ok", "\n", "User:"]
    monkeypatch.setattr(sample, "stream_text", lambda *args, **options: iter(pieces))
    out, err = chat(model, "hi\n", enc)
    assert out == said
    assert ("was not trained to chat" in err) == (enc is BYTES)


@gpt2
def test_ctrl_c_stops_an_answer_and_not_the_conversation(chat, model, monkeypatch):
    def interrupted(*args, **options):
        yield "ok"
        raise KeyboardInterrupt

    monkeypatch.setattr(sample, "stream_text", interrupted)
    assert chat(model, "hi\nyou?\n").out == "ok ...\nok ...\n"
