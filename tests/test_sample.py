"""sample.py and GPT.generate: the same tokens as without a cache and as transformers, and what people type."""

import io
import math
import os
import signal
import subprocess
import sys

import pytest
import sample
import tiktoken
import torch
import train_gpt2
from plumbing.cli.console import harmless
from plumbing.data import tokenizers
from plumbing.run.huggingface import export_huggingface
from sample import Options, fit_prompt, generate_rows, stream_text

from corpora import train_small
from harness import (
    ROOT,
    flags,
    greedy_without_cache,
    listing,
    parrot_model,
    printed_commands,
    refusal_of,
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
def test_greedy_with_the_cache_is_greedy_without_it_and_goes_beyond_the_block(model, length):
    prompts = torch.randint(257, (3, length))
    rows = torch.stack(list(model.generate(prompts, 60, 257, temperature=0)), 1)  # the block is 32
    for prompt, row in zip(prompts.tolist(), rows.tolist()):
        assert prompt + row == greedy_without_cache(model, prompt, 60)


@pytest.mark.gpt2
def test_the_padding_of_the_vocabulary_is_never_sampled(model):
    # the padding's logits are made by far the largest, for whatever hidden state
    padded = tiny_model().eval()
    with torch.no_grad():
        padded.transformer.ln_f.weight.zero_()
        padded.transformer.ln_f.bias.fill_(1.0)
        padded.transformer.wte.weight[257:] = 9.0
        padded.transformer.wte.weight[:257] *= 0.01
    assert padded(torch.tensor([PROMPT]))[0][0, -1].argmax() >= 257
    for options in (dict(temperature=0), dict(top_k=400), dict(top_p=0.5)):
        ids = [token for row in rows_of(padded, PROMPT, 40, rows=4, **options) for token in row]
        assert len(ids) == 160 and max(ids) < 257


def test_top_k_1_and_the_smallest_top_p_are_greedy(model):
    greedy = rows_of(model, PROMPT, 20, temperature=0)
    assert rows_of(model, PROMPT, 20, top_k=1) == rows_of(model, PROMPT, 20, top_k=0, top_p=1e-6) == greedy


def test_top_k_and_top_p_keep_the_likeliest_and_the_rest_keep_their_proportions(model):
    probs = model(torch.tensor([PROMPT]))[0][0, -1, :257].softmax(-1)
    order = probs.argsort(descending=True).tolist()
    nucleus = int((probs.sort(descending=True).values.cumsum(0) < 0.6).sum()) + 1  # the ids that have 0.6 together
    for options, kept in ((dict(top_k=5), 5), (dict(top_k=0, top_p=0.6), nucleus)):
        drawn = torch.tensor([row[0] for row in rows_of(model, PROMPT, 1, rows=5000, **options)])
        assert set(drawn.tolist()) == set(order[:kept])
        expected = probs[order[:5]] / probs[order[:kept]].sum()
        seen = torch.stack([(drawn == token).float().mean() for token in order[:5]])
        assert (seen - expected).abs().max() < 0.03  # 4 standard errors of a share of 5,000 draws


def test_top_p_keeps_the_fewest_ids_that_have_it_together_also_where_that_is_exact():
    logits = torch.tensor([2.0, 1.0, 1.0]).repeat(200, 1) * math.log(2)  # probabilities of 1/2, 1/4 and 1/4
    for top_p, kept in ((0.5, {0}), (0.75, {0, 1}), (0.76, {0, 1, 2})):
        assert set(train_gpt2.sample_ids(logits.clone(), top_p=top_p).tolist()) == kept


def test_each_row_stops_at_its_own_end(model):
    open_rows = rows_of(model, PROMPT, 30, rows=6, top_k=4, seed=3)
    end = open_rows[0][4]
    stopping = tokenizer_of_257(end=end)
    stopped = rows_of(model, PROMPT, 30, stopping, rows=6, top_k=4, seed=3)
    lengths = [whole.index(end) if end in whole else 30 for whole in open_rows]
    assert len(stopped[0]) == max(lengths) and len(set(lengths)) > 1 and min(lengths) <= 4, "the others go on"
    for row, whole, length in zip(stopped, open_rows, lengths):
        assert row == whole[:length] + [None] * (max(lengths) - length)


def test_a_character_of_many_bytes_is_printed_when_it_is_whole():
    model, prompt = parrot_model(text="a\u00e9\u20ac"), [CHAT.encode_single_token("<|assistant|>")]
    pieces = stream_text(model, CHAT, prompt, options=Options(temperature=0))
    assert "|".join(pieces) == "a||\u00e9|||\u20ac|"  # of 1, 2 and 3 bytes


@pytest.mark.gpt2
def test_one_sample_is_printed_as_the_prompt_and_its_continuation(model, tmp_path, capsys):
    path = save(tmp_path / "model", model)
    command = flags(
        model=path,
        temperature=0,
        max_new_tokens=40,
        device="cpu",
    )
    assert status_of(sample.main, ["Hello", *command]) == 0
    expected = greedy_without_cache(model, PROMPT, 40)
    text = harmless(BYTES.decode(expected[: expected.index(256)] if 256 in expected else expected))
    assert "\\x" in text, "what could steer a terminal is shown"
    assert capsys.readouterr().out == text + "\n"
    assert status_of(sample.main, ["Hello", *command, "-n", "3"]) == 0
    assert capsys.readouterr().out.split(f"\n{'-' * 80}\n") == [text, text, text + "\n"]
    drawn = [refusal_of(sample.main, "Hello", *command, "--temperature", 1, "--seed", seed)[1] for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]
    assert status_of(sample.main, ["<|endoftext|>", *command]) == 0
    assert capsys.readouterr().out.startswith("<|endoftext|>"), "a prompt that spells a special token is text"


@pytest.mark.gpt2
def test_export_gives_the_weights_bit_for_bit_and_replaces_nothing(model, tmp_path):
    path, folder = save(tmp_path / "model", model), tmp_path / "out"
    status, said, _ = refusal_of(sample.main, "-m", path, "--export", folder)
    assert status == 0 and printed_commands(said) == [["python", "sample.py", "The ", "-m", str(folder)]]
    weights, back = dict(model.named_parameters()), train_gpt2.load_model(str(folder))[0]
    assert all(torch.equal(each, weights[name][: len(each)]) for name, each in back.named_parameters())
    before = listing(tmp_path)
    for taken in (folder, folder / "config.json"):
        assert "exists already" in refused(sample.main, "-m", path, "--export", taken)
    assert listing(tmp_path) == before


@pytest.mark.gpt2
def test_mistakes_get_one_line_and_status_2(model, tmp_path):
    path = save(tmp_path / "model", model)
    mistakes = {
        "prompt is empty": [""],
        "The prompt has 33 tokens": ["x" * 33],
        "--top-p is 1.5": ["x", "--top-p", "1.5"],
    }
    for part, args in mistakes.items():
        assert part in refused(sample.main, "-m", path, *args)


def test_a_prompt_of_a_million_blanks_is_one_like_any_other():
    """tiktoken gives up on so many in one place, and the prompt ended in its traceback."""
    million, enc = "x" + " " * 1_000_000 + "y", train_small("gpt4")
    said = enc.decode(sample.render_prompt(talk(million), enc))
    assert said == f"<|endoftext|>User: {million}\n\nAssistant:"


def test_the_oldest_messages_are_dropped_when_the_block_is_full():
    messages = talk(*(letter * 10 for letter in "abcde"))
    # <|endoftext|>, then marker, ten bytes and <|end|> for each message, and <|assistant|>
    assert len(fit_prompt(messages, CHAT, 62)) == 62 and len(messages) == 5
    assert len(fit_prompt(messages, CHAT, 61)) == 38
    assert [message["content"][0] for message in messages] == ["c", "d", "e"]
    assert fit_prompt(messages, CHAT, 13) is None, "a last message that does not fit is not cut"


@pytest.mark.gpt2
def test_chat_answers_each_line_until_quit_or_the_end_of_the_input(model, tmp_path, monkeypatch, capsys):
    options = flags(
        chat=True,
        device="cpu",
        temperature=0,
        max_new_tokens=5,
    )

    def chat(model, lines, enc=CHAT):
        monkeypatch.setattr(sys, "stdin", io.StringIO(lines))
        path = tmp_path / str(len(os.listdir(tmp_path)))
        assert status_of(sample.main, ["-m", save(path, model, enc), *options]) == 0
        return capsys.readouterr()

    parrot = parrot_model(block_size=32)
    assert chat(parrot, "hi\n\nyou?\n/quit\nnever\n").out == "ok\nok\n"
    too_long = "(That is too long: at most 27 tokens fit. The conversation starts over.)\n"
    assert chat(parrot, "x" * 60 + "\nhi").out == f"{too_long}ok\n"
    # what a model reads is the whole talk, its own answers included
    talker, messages, expected = tiny_model(block_size=256).eval(), [], ""
    for line in ("hi", "you?", "again"):
        messages = [] if line == "again" else messages
        messages.append({"role": "user", "content": line})
        ids = tokenizers.render_question(messages, CHAT)
        text = "".join(stream_text(talker, CHAT, ids, options=Options(temperature=0, max_new_tokens=5)))
        messages.append({"role": "assistant", "content": text.strip()})
        expected += f"{text}\n"
    assert chat(talker, "hi\nyou?\n/reset\nagain\n").out == expected
    said = chat(model, "hi\n", BYTES)
    assert "was not trained to chat" in said.err and said.out.endswith("\n")
    monkeypatch.setattr(sample, "stream_text", lambda *args, **options: iter(["\n", "ok", "\n", "User:"]))
    assert chat(model, "hi\n", BYTES).out == "\nok\n", "without markers, a line is an answer"
    assert chat(model, "hi\n", CHAT).out == "\nok\nUser:\n"


@pytest.mark.slow
def test_ctrl_c_stops_an_answer_and_not_the_conversation(tmp_path):
    path = save(
        tmp_path / "model",
        tiny_model(
            n_layer=4,
            n_embd=64,
            block_size=1024,
            vocab_size=320,
        ),
        CHAT,
    )
    command = [sys.executable, ROOT / "sample.py"]
    command += flags(
        chat=True,
        model=path,
        max_new_tokens=1000,
        device="cpu",
    )
    pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    process = subprocess.Popen(command, **pipes, env=os.environ | {"PYTHONUNBUFFERED": "1"})
    process.stdin.write(b"hi\n")
    process.stdin.flush()
    assert process.stdout.read(1)  # the answer has begun
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(b"/quit\n", timeout=60)
    assert process.returncode == 0 and b" ...\n" in out and b"Traceback" not in err
