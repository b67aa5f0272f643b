"""tokenizer.py: every tokenizer is a tiktoken.Encoding, loses nothing, and agrees with whoever else reads it."""

import functools
import json
import os
import pydoc_data.topics
import random
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import tiktoken
from conftest import ROOT, SHARED, listing

import tokenizer
from plumbing.cli import UserError

needs_gpt2 = pytest.mark.skipif(not (SHARED / "tiktoken_cache").exists(), reason="GPT-2's tables are not at hand")
# letters of many scripts, digits, blanks of every kind, signs, contractions, characters beyond 16 bits
COMMON = list(" \n\t\r  '\u2019sSdDtTlLvVeErR.,!?0123456789abcdefghijklmnopqrstuvwxyzABCDE")
RARE = list("\u017f\u212a\x00\x1c\x85\xa0\u180e\u200b\u2028\u3000\ufeff\u00e9\u0301\u0633\u093f\u65e5\u2167\u00bd\U0001f642\U0010ffff")


def odd_texts(count, seed=0):
    """Random strings, one character in ten from all of Unicode."""
    rng = random.Random(seed)
    anything = [chr(i) for i in range(0x110000) if not 0xD800 <= i < 0xE000]
    pools = [COMMON] * 7 + [RARE] * 2 + [anything]
    return ["".join(rng.choice(rng.choice(pools)) for _ in range(rng.randrange(60))) for _ in range(count)]


@functools.cache
def corpus():
    """Text to learn from: part of the language reference that comes with Python, and odd texts."""
    return [text for _, text in sorted(pydoc_data.topics.topics.items())[:40]] + odd_texts(200, seed=1)


@pytest.fixture(scope="module", params=["gpt2", "gpt4"])
def trained(request):
    return tokenizer.train(corpus(), 1000, name="small", pattern=request.param, special_tokens=["<|pad|>"])


def script(*args, **environment):
    """`python tokenizer.py ...` as a user runs it."""
    command = [sys.executable, str(ROOT / "tokenizer.py"), *map(str, args)]
    return subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, timeout=60)


# -----------------------------------------------------------------------------
# By name


def test_bytes_are_the_bytes_of_utf8_and_need_no_network(tmp_path):
    enc = tokenizer.get_encoding("bytes")
    assert isinstance(enc, tiktoken.Encoding) and (enc.name, enc.n_vocab, enc.eot_token) == ("bytes", 257, 256)
    for text in [*odd_texts(500), "x" * 10_000, "<|endoftext|>"]:
        assert enc.encode_ordinary(text) == list(text.encode()) and enc.decode(list(text.encode())) == text
    assert enc.encode("a<|endoftext|>", allowed_special="all") == [97, 256]


@needs_gpt2
def test_gpt2_is_tiktokens():
    enc = tokenizer.get_encoding("gpt2")
    assert (enc.name, enc.n_vocab, enc.eot_token) == ("gpt2", 50257, 50256)
    assert enc.encode_ordinary("hello world") == [31373, 995]  # the example of tiktoken's documentation


@needs_gpt2
def test_chat_markers_take_the_ids_after_the_tokenizers_own():
    gpt2, chat = tokenizer.get_encoding("gpt2"), tokenizer.get_encoding("gpt2+chat")
    assert (chat.name, chat.n_vocab, chat.eot_token) == ("gpt2+chat", 50261, 50256)
    for i, token in enumerate(tokenizer.CHAT_TOKENS):
        assert chat.encode(token, allowed_special="all") == [50257 + i]
        assert chat.encode_ordinary(token) == gpt2.encode_ordinary(token)  # typed by a user, it is text
    assert tokenizer.get_encoding("bytes+chat").encode("<|end|>", allowed_special="all") == [260]


def test_gpt2_without_tables_and_network_says_what_works_without(tmp_path):
    code = (
        "import socket\n"
        "def refuse(*args, **kwargs): raise OSError('no network')\n"
        "socket.socket.connect = socket.create_connection = socket.getaddrinfo = refuse\n"
        "import tokenizer\n"
        "from plumbing import cli\n"
        "cli.run(lambda: tokenizer.get_encoding('gpt2'))\n"
    )
    env = {**os.environ, "TIKTOKEN_CACHE_DIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.startswith("error: The GPT-2 tokenizer is not") and len(done.stderr.splitlines()) == 1
    assert "TIKTOKEN_CACHE_DIR" in done.stderr and "--tokenizer bytes" in done.stderr


# -----------------------------------------------------------------------------
# Training


def test_the_first_merges_are_those_that_can_be_counted_by_hand():
    # the textbook example of byte-pair encoding: "aaabdaaabac" -> aa, then ab, then aaab
    enc = tokenizer.train(["aaabdaaabac"], 260, name="t")
    tokens = sorted(enc._mergeable_ranks, key=enc._mergeable_ranks.get)[256:]
    assert tokens == [b"aa", b"ab", b"aaab"] and enc.n_vocab == 260
    assert enc.decode_tokens_bytes(enc.encode_ordinary("aaabdaaabac")) == [b"aaab", b"d", b"aaab", b"a", b"c"]


def test_a_trained_tokenizer_loses_nothing(trained):
    assert trained.n_vocab == 1000 and trained.eot_token == 998
    assert trained.encode("<|pad|>", allowed_special="all") == [999]
    for text in odd_texts(2000) + corpus()[:5]:
        assert trained.decode(trained.encode_ordinary(text)) == text


def test_ids_are_those_of_huggingfaces_own_trained_on_the_same_text(trained):
    """Trained here without tokenizer.py: the library's vocabulary and merges give the same ids."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers

    plain = tokenizer.PATTERNS["gpt4" if "{1,3}" in trained._pat_str else "gpt2"]
    theirs = Tokenizer(models.BPE())
    theirs.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(plain), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    theirs.train_from_iterator(corpus(), trainers.BpeTrainer(vocab_size=998, initial_alphabet=alphabet, show_progress=False))
    for text in odd_texts(2000) + corpus()[:5]:
        assert trained.encode_ordinary(text) == theirs.encode(text).ids


def test_a_file_holds_all_of_a_tokenizer(tmp_path, trained):
    path = tmp_path / "x.tiktoken"
    path.write_text(tokenizer.dumps(trained))
    assert json.loads(path.read_text().split("\n")[0])["special_tokens"] == {"<|endoftext|>": 998, "<|pad|>": 999}
    for again in (tokenizer.get_encoding(path), tokenizer.loads(tokenizer.dumps(trained))):
        assert again.name == trained.name and again.n_vocab == 1000
        assert all(again.encode_ordinary(text) == trained.encode_ordinary(text) for text in odd_texts(300))
    assert tokenizer.get_encoding(f"{path}+chat").n_vocab == 1004


def test_the_name_tells_tokenizers_apart_and_not_runs():
    names = [tokenizer.train([text], 300, name="n").name for text in ("aaab abab", "aaab abab", "bbbc cbcb")]
    assert names[0] == names[1] != names[2] and all(name.startswith("n-") and len(name) == 10 for name in names)


def test_a_folder_of_shards_opens_with_its_own_tokenizer(tmp_path, trained):
    def name_of(enc):
        (tmp_path / "meta.json").write_text(json.dumps({"tokenizer": enc.name}))
        tokenizer.save_for_folder(enc, tmp_path)
        return tokenizer.folder_encoding(tmp_path)

    assert name_of(tokenizer.get_encoding("bytes")).name == "bytes" and len(listing(tmp_path)) == 1
    for enc in (trained, tokenizer.with_chat(trained)):
        again = name_of(enc)
        assert again.name == enc.name and again._special_tokens == enc._special_tokens
        assert sorted(path.name for path in tmp_path.iterdir()) == ["meta.json", f"{trained.name}.tiktoken"]


@needs_gpt2
def test_a_folder_without_meta_json_is_gpt2s(tmp_path):
    assert tokenizer.folder_encoding(tmp_path).name == "gpt2"


@pytest.mark.parametrize("content", ['{"tokenizer": "byt', "{}", "[]", '{"tokenizer": 3}', ""])
def test_a_meta_json_that_names_no_tokenizer_is_named_itself(tmp_path, content):
    (tmp_path / "meta.json").write_text(content)
    with pytest.raises(UserError, match="meta.json is damaged: it does not name the tokenizer"):
        tokenizer.folder_encoding(tmp_path)


# -----------------------------------------------------------------------------
# Export


@needs_gpt2
@pytest.mark.parametrize("name", ["gpt2", "bytes+chat"])
def test_transformers_reads_an_export_and_gives_the_same_ids(tmp_path, name):
    check_export(tokenizer.get_encoding(name), tmp_path)


def test_transformers_reads_a_trained_tokenizer_too(tmp_path, trained):
    check_export(trained, tmp_path)


def check_export(enc, folder):
    from transformers import AutoTokenizer

    tokenizer.export_huggingface(enc, folder)
    (folder / "config.json").write_text('{"model_type": "gpt2"}')  # as beside an exported model
    theirs = AutoTokenizer.from_pretrained(folder)
    assert len(theirs) == enc.n_vocab and theirs.eos_token_id == theirs.bos_token_id == enc.eot_token
    for text in odd_texts(2000) + corpus()[:3]:
        assert theirs.encode(text.replace("<|", "< |")) == enc.encode_ordinary(text.replace("<|", "< |"))
        assert theirs.decode(theirs.encode(text)) == text
    for token, i in enc._special_tokens.items():
        assert theirs.encode(f"a{token}") == [*enc.encode_ordinary("a"), i]
    assert tokenizer.get_encoding(folder / "tokenizer.tiktoken").name == enc.name


@needs_gpt2
def test_the_merges_of_an_export_of_gpt2_are_openais(tmp_path):
    vocab_bpe = SHARED / "tiktoken_cache" / "6d1cbeee0f20b3d9449abfede4726ed8212e3aee"  # tiktoken's name for vocab.bpe
    tokenizer.export_huggingface(tokenizer.get_encoding("gpt2"), tmp_path)
    merges = json.loads((tmp_path / "tokenizer.json").read_text())["model"]["merges"]
    assert [" ".join(pair) for pair in merges] == vocab_bpe.read_text(encoding="utf-8").split("\n")[1:-1]


# -----------------------------------------------------------------------------
# Command line


def test_the_command_trains_saves_and_compares(tmp_path):
    text = tmp_path / "a.txt"
    text.write_text("".join(corpus()[:-200]))
    out = tmp_path / "my.tiktoken"
    args = ["--input", text, "--vocab-size", 500, "--out", out, "--special-tokens", "<|a|>", "<|b|>", "--pattern", "gpt4"]
    done = script(*args, *(["--compare", text] if (SHARED / "tiktoken_cache").exists() else []))
    assert done.returncode == 0, done.stderr
    enc = tokenizer.get_encoding(out)
    assert enc.n_vocab == 500 and enc.name.startswith("my-") and enc.name in done.stdout
    if (SHARED / "tiktoken_cache").exists():
        ratio = len(text.read_bytes()) / len(enc.encode_ordinary(text.read_text()))
        assert f"{enc.name}: {ratio:.3f} bytes per token" in done.stdout and "gpt2: " in done.stdout


def bad_inputs(folder):
    """{name: (arguments, words that the line must have)}"""
    (folder / "a.txt").write_text("some text")
    (folder / "empty.txt").write_text("")
    (folder / "old.tiktoken").write_text("precious")
    good = ["--input", folder / "a.txt", "--out", folder / "new.tiktoken"]
    return {
        "vocabulary too small": ([*good, "--vocab-size", 256], ["257"]),
        "vocabulary too small for its special tokens": ([*good, "--vocab-size", 257, "--special-tokens", "<|a|>"], ["258"]),
        "vocabulary too large": ([*good, "--vocab-size", 65537], ["65536"]),
        "no input": (["--out", folder / "new.tiktoken"], ["--input"]),
        "missing input": (["--input", folder / "none.txt", "--out", folder / "new.tiktoken"], ["none.txt"]),
        "empty input": (["--input", folder / "empty.txt", "--out", folder / "new.tiktoken"], ["text"]),
        "no output": (["--input", folder / "a.txt"], ["--out"]),
        "output that exists": (["--input", folder / "a.txt", "--out", folder / "old.tiktoken"], ["old.tiktoken"]),
        "output of another kind": (["--input", folder / "a.txt", "--out", folder / "x.json"], [".tiktoken"]),
        "output in no folder": (["--input", folder / "a.txt", "--out", folder / "no" / "x.tiktoken"], ["x.tiktoken"]),
        "unknown pattern": ([*good, "--pattern", "gpt3"], ["gpt"]),
        "the same special token twice": ([*good, "--special-tokens", "<|endoftext|>"], ["<|endoftext|>"]),
        "unknown flag": ([*good, "--vocabsize", 300], ["--vocab-size"]),
    }


@pytest.fixture(scope="module")
def refusals(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bad")
    cases = bad_inputs(folder)
    before = listing(folder)
    with ThreadPoolExecutor(4) as pool:
        done = dict(zip(cases, pool.map(lambda case: script(*case[0]), cases.values())))
    assert listing(folder) == before, "bad input must leave everything as it was"
    return cases, done


@pytest.mark.parametrize("name", [
    "vocabulary too small", "vocabulary too small for its special tokens", "vocabulary too large", "no input",
    "missing input", "empty input", "no output", "output that exists", "output of another kind", "output in no folder",
    "unknown pattern", "the same special token twice", "unknown flag",
])  # fmt: skip
def test_bad_input_is_one_line_and_status_2(refusals, name):
    cases, done = refusals
    assert done[name].returncode == 2, done[name]
    lines = done[name].stderr.splitlines()
    assert len(lines) == 1 and lines[0].startswith("error: "), done[name].stderr
    assert all(word in lines[0] for word in cases[name][1]), lines[0]


@pytest.mark.parametrize("damage", [
    lambda text: text[: len(text) // 2],  # cut short
    lambda text: text.split("\n", 1)[1],  # OpenAI's format, which has no first line
    lambda text: text.replace('"<|endoftext|>"', '"<|end|>"'),
    lambda text: text.replace('"pat_str"', '"pattern"'),
    lambda text: text.replace("\n", "\nnot base64 \n", 1),
    lambda text: text.replace("IQ== ", "Ig== ", 1),  # a byte is missing
    lambda text: "",
])  # fmt: skip
def test_a_damaged_file_is_refused(tmp_path, damage):
    path = tmp_path / "x.tiktoken"
    path.write_text(damage(tokenizer.dumps(tokenizer.get_encoding("bytes"))))
    with pytest.raises(UserError, match="x.tiktoken is damaged"):
        tokenizer.get_encoding(path)
