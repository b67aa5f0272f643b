"""sample.py and GPT.generate: the same tokens as without a cache and as transformers, and what people type."""

import io
import os
import re
import signal
import subprocess
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
    ROOT,
    greedy_without_cache,
    parrot_model,
    printed_commands,
    refused,
    status_of,
    talk,
    tiny_model,
)

BYTES = tokenizers.get_encoding("bytes")
CHAT = tokenizers.get_encoding("bytes+chat")
PROMPT = [72, 101, 108, 108, 111]


def tokenizer_of_257(**special_tokens):
    """A tokenizer of bytes and one more token; no special one means that a text has no end."""
    ranks = {bytes([i]): i for i in range(256)} | {b"the": 256}
    return tiktoken.Encoding("257", pat_str=".", mergeable_ranks=ranks, special_tokens=special_tokens)


@pytest.fixture(scope="module")
def model():
    return tiny_model().eval()


def save(path, model, enc=BYTES):
    export_huggingface(model, enc, path)
    return str(path)


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


class Turning(train_gpt2.GPT):
    """A model that computes something else of the same text in parts."""

    def hidden_states(self, idx, cache=None):
        return super().hidden_states(idx, cache) * (-1) ** idx.size(1)


def test_a_model_that_no_cache_suits_is_sampled_without_one(model):
    turning = Turning(model.config).eval()
    turning.load_state_dict(model.state_dict())
    turning.has_cache = False
    row = [ids.item() for ids in turning.generate(torch.tensor([PROMPT]), 20, 257, temperature=0)]
    assert PROMPT + row == greedy_without_cache(turning, PROMPT, 20)


@pytest.fixture
def padded():
    """A model whose padding of the vocabulary has by far the largest logits, for whatever hidden state."""
    model = tiny_model().eval()
    with torch.no_grad():
        model.transformer.ln_f.weight.zero_()
        model.transformer.ln_f.bias.fill_(1.0)
        model.transformer.wte.weight[257:] = 9.0
        model.transformer.wte.weight[:257] *= 0.01
    return model


@pytest.mark.gpt2
@pytest.mark.parametrize("options", [dict(temperature=0), dict(top_k=400), dict(top_p=0.5)], ids=str)
def test_the_padding_of_the_vocabulary_is_never_sampled(options, padded):
    for row in rows_of(padded, PROMPT, 40, rows=4, **options):
        assert len(row) == 40
        assert max(row) < 257


@pytest.mark.gpt2
@pytest.mark.parametrize("penalty", [0.7, 1.8])
def test_a_repetition_penalty_gives_transformers_numbers(penalty, model, tmp_path):
    from transformers import GPT2LMHeadModel

    theirs = GPT2LMHeadModel.from_pretrained(save(tmp_path / "hf", model))
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


@pytest.mark.parametrize(
    "options, kept",
    [(dict(top_k=5, temperature=2.0), 5), (dict(top_k=0, temperature=0.5), 257)],
)
def test_an_id_is_drawn_as_often_as_it_is_likely_among_those_that_are_kept(options, kept, model):
    logits, _ = model(torch.tensor([PROMPT]))
    probs = (logits[0, -1, :257] / options["temperature"]).softmax(-1)
    ordered, order = probs.sort(descending=True)
    drawn = torch.tensor(rows_of(model, PROMPT, 1, rows=5000, **options))[:, 0]
    assert set(drawn.tolist()) <= set(order[:kept].tolist())
    expected = ordered[:5] / ordered[:kept].sum()
    seen = [(drawn == token).float().mean() for token in order[:5]]
    assert (torch.stack(seen) - expected).abs().max() < 0.03  # 4 standard errors of a share of 5,000 draws


@pytest.mark.parametrize("options", [dict(top_k=1), dict(top_k=0, top_p=1e-6)], ids=str)
def test_the_likeliest_id_alone_is_greedy(options, model):
    assert rows_of(model, PROMPT, 20, **options) == rows_of(model, PROMPT, 20, temperature=0)


@pytest.mark.parametrize("top_p, kept", [(0.5, {0}), (0.75, {0, 1}), (0.76, {0, 1, 2})])
def test_top_p_keeps_the_fewest_ids_that_have_it_together(top_p, kept):
    """Also where that is exact."""
    logits = torch.tensor([0.5, 0.25, 0.25]).log()
    logits = logits.repeat(200, 1)
    assert set(train_gpt2.sample_ids(logits, top_p=top_p).tolist()) == kept


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
def printed(model, tmp_path, capsys):
    """A function that returns what sample.py prints for these words, of the model in tmp_path / "model"."""
    path = save(tmp_path / "model", model)
    capsys.readouterr()

    def sample_with(*words):
        assert status_of(sample.main, [*words, "-m", path, "--max-new-tokens", "40", "--device", "cpu"]) == 0
        return capsys.readouterr().out

    return sample_with


@pytest.fixture
def greedy(model):
    """The text that the model makes of Hello."""
    ids = greedy_without_cache(model, PROMPT, 40)
    return harmless(BYTES.decode(ids).partition("<|endoftext|>")[0])


LINE = f"\n{'-' * 80}\n"


@pytest.mark.gpt2
@pytest.mark.parametrize("rows", [1, 3])
def test_samples_are_printed_as_the_prompt_and_its_continuation_with_lines_between_them(rows, printed, greedy):
    assert "\\x" in greedy, "what could steer a terminal is shown"
    assert printed("Hello", "--temperature", "0", "-n", str(rows)) == LINE.join([greedy] * rows) + "\n"


@pytest.mark.gpt2
@pytest.mark.parametrize("rows", [1, 2])
def test_samples_end_before_a_text_that_stops_them(rows, printed, greedy):
    stop = greedy[-3:]
    said = printed("Hello", "--temperature", "0", "-n", str(rows), "--stop", "no such text", stop)
    assert said == LINE.join([greedy[: greedy.index(stop, 5)]] * rows) + "\n"


@pytest.mark.gpt2
def test_a_prompt_that_spells_a_special_token_is_text(printed):
    assert printed("<|endoftext|>").startswith("<|endoftext|>")


@pytest.mark.gpt2
def test_an_export_has_the_weights_bit_for_bit(printed, model, tmp_path):
    folder = str(tmp_path / "out")
    assert printed_commands(printed("--export", folder)) == [["python", "sample.py", "The", "-m", folder]]
    weights = dict(model.named_parameters())
    for name, weight in train_gpt2.load_model(folder)[0].named_parameters():
        assert torch.equal(weight, weights[name][: len(weight)])


@pytest.mark.parametrize("enc, word", [(BYTES, "The"), (CHAT, "--chat")])
def test_the_command_that_a_run_prints_works_for_its_code_and_whatever_its_prompt_begins_with(enc, word):
    command = sample_command("log", enc, "-x", code=Path("other.py"))
    assert command == ["python", "sample.py", word, ("-m", "log"), ("--code", "other.py")]


@pytest.mark.parametrize("name", ["folder", "file", "link"])
def test_an_export_replaces_nothing(name, tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    assert "exists already" in refused(sample.main, "--export", tmp_path / name)


@pytest.mark.gpt2
@pytest.mark.parametrize(
    "words, said",
    [
        ([""], "prompt is empty"),
        (["x" * 33], "The prompt has 33 tokens"),
        (["x", "--top-p", "1.5"], "--top-p is 1.5"),
        (["", "--top-k", "-1"], "The prompt is empty. .*--top-k is -1"),
        (["--chat", "-n", "2"], "--num-samples and --export"),
        (["x", "--system", "Be kind."], "Add --chat"),
    ],
)
def test_a_mistake_is_one_line(words, said, model, tmp_path):
    assert re.search(said, refused(sample.main, "-m", save(tmp_path / "model", model), *words))


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


def test_a_last_message_that_does_not_fit_is_not_cut():
    assert fit_prompt(talk("fifth"), CHAT, 8) is None


@pytest.mark.parametrize("enc", [CHAT, BYTES])
def test_a_system_message_comes_first_and_stays(enc):
    messages = [{"role": "system", "content": "Be kind, now"}, *talk("first", "second", "third")]
    left = [messages[0], messages[3]]
    whole = sample.render_prompt(left, enc)
    assert fit_prompt(messages, enc, len(whole)) == whole
    assert messages == left


@pytest.fixture
def chat(tmp_path, monkeypatch, capsys):
    """A function that returns what sample.py --chat prints for these lines."""

    def talk_to(model, lines, enc=CHAT, words=("--max-new-tokens", "5")):
        monkeypatch.setattr(sys, "stdin", io.StringIO(lines))
        words = ["--chat", "--temperature", "0", "--device", "cpu", *words]
        assert status_of(sample.main, [*words, "-m", save(tmp_path / "model", model, enc)]) == 0
        return capsys.readouterr()

    return talk_to


@pytest.mark.gpt2
def test_chat_answers_each_line_until_quit(chat):
    assert chat(parrot_model(block_size=32), "hi\n\nyou?\n/quit\nnever\n").out == "ok\nok\n"


@pytest.mark.gpt2
@pytest.mark.parametrize("words", [["hi"], ["hi", "--max-new-tokens", "5"]])
def test_chat_answers_its_prompt_first(words, chat):
    """Also where an answer may be longer than the block, as by default: half of it is for the answer then."""
    assert chat(parrot_model(block_size=32), "you?\n", words=words).out == "ok\nok\n"


@pytest.mark.gpt2
def test_a_line_that_is_too_long_begins_a_new_conversation(chat):
    lines = "x" * 60 + "\nhi"
    said = chat(parrot_model(block_size=32), lines).out
    assert said == "(That is too long: at most 27 tokens fit. The conversation starts over.)\nok\n"


@pytest.mark.gpt2
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


@pytest.mark.gpt2
def test_a_model_that_was_not_trained_to_chat_is_named(chat, model):
    assert "was not trained to chat" in chat(model, "hi\n", BYTES).err


@pytest.mark.gpt2
@pytest.mark.parametrize("enc, said", [(BYTES, "\nok\n"), (CHAT, "\nok\nUser:\n")])
def test_without_role_markers_a_line_is_an_answer(enc, said, chat, model, monkeypatch):
    pieces = ["\n", "ok", "\n", "User:"]
    monkeypatch.setattr(sample, "stream_text", lambda *args, **options: iter(pieces))
    assert chat(model, "hi\n", enc).out == said


@pytest.mark.slow
def test_ctrl_c_stops_an_answer_and_not_the_conversation(tmp_path):
    model = tiny_model(n_layer=4, n_embd=64, block_size=1024)
    path = save(tmp_path / "model", model, CHAT)
    command = [sys.executable, ROOT / "sample.py", "--chat", "-m", path, "--max-new-tokens", "1000"]
    pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    process = subprocess.Popen(command, **pipes, env=os.environ | {"PYTHONUNBUFFERED": "1"})
    process.stdin.write(b"hi\n")
    process.stdin.flush()
    assert process.stdout.read(1)  # the answer has begun
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(b"/quit\n", timeout=250)
    assert process.returncode == 0
    assert b" ...\n" in out
    assert b"Traceback" not in err
