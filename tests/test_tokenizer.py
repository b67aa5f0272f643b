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
from plumbing.huggingface_tokenizer import export_tokenizer, import_tokenizer

needs_gpt2 = pytest.mark.skipif(not (SHARED / "tiktoken_cache").exists(), reason="GPT-2's tables are not at hand")
# letters of many scripts, digits, blanks of every kind, signs, contractions, characters beyond 16 bits
COMMON = list(" \n\t\r  '\u2019sSdDtTlLvVeErR.,!?0123456789abcdefghijklmnopqrstuvwxyzABCDE")
RARE = list(
    "\u017f\u212a\x00\x1c\x85\xa0\u180e\u200b\u2028\u3000\ufeff\u00e9\u0301\u0633\u093f\u65e5\u2167\u00bd\U0001f642\U0010ffff"
)


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


NO_NETWORK = (
    "import socket\n"
    "def refuse(*args, **kwargs): raise OSError('no network')\n"
    "socket.socket.connect = socket.create_connection = socket.getaddrinfo = refuse\n"
    "import tokenizer\n"
    "from plumbing import cli\n"
)


def without_network(code, cache):
    """Run Python code in a process without a network and with tiktoken's cache in the folder `cache`."""
    env = {**os.environ, "TIKTOKEN_CACHE_DIR": str(cache)}
    return subprocess.run([sys.executable, "-c", NO_NETWORK + code], cwd=ROOT, env=env, capture_output=True, text=True)


def test_gpt2_without_tables_and_network_says_what_works_without(tmp_path):
    done = without_network("cli.run(lambda: tokenizer.get_encoding('gpt2'))", tmp_path)
    assert (
        done.returncode == 2
        and done.stderr.startswith("error: The GPT-2 tokenizer is not")
        and len(done.stderr.splitlines()) == 1
    )
    assert "TIKTOKEN_CACHE_DIR" in done.stderr and "bytes" in done.stderr
    assert "--" not in done.stderr, "the trainer has no flag for the tokenizer"


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
        [
            pre_tokenizers.Split(Regex(plain), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    theirs.train_from_iterator(
        corpus(), trainers.BpeTrainer(vocab_size=998, initial_alphabet=alphabet, show_progress=False)
    )
    for text in odd_texts(2000) + corpus()[:5]:
        assert trained.encode_ordinary(text) == theirs.encode(text).ids


def test_a_file_and_a_checkpoint_hold_all_of_a_tokenizer(tmp_path, trained):
    path, old = tmp_path / "x.tiktoken", tmp_path / "old.tiktoken"
    tokenizer.write_encoding(trained, path)
    old.write_text(tokenizer.dumps(trained))  # one file, the JSON first
    assert json.loads((tmp_path / "x.tiktoken.json").read_text())["special_tokens"] == {
        "<|endoftext|>": 998,
        "<|pad|>": 999,
    }
    for again in (tokenizer.get_encoding(path), tokenizer.get_encoding(old), tokenizer.loads(tokenizer.dumps(trained))):
        assert again.name == trained.name and again.n_vocab == 1000
        assert all(again.encode_ordinary(text) == trained.encode_ordinary(text) for text in odd_texts(300))
    assert tokenizer.get_encoding(f"{path}+chat").n_vocab == 1004


def test_tiktokens_own_loader_reads_a_file(tmp_path, trained, monkeypatch):
    from tiktoken.load import load_tiktoken_bpe

    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", "")  # it caches local files as well
    tokenizer.write_encoding(trained, tmp_path / "x.tiktoken")
    assert load_tiktoken_bpe(str(tmp_path / "x.tiktoken")) == trained._mergeable_ranks


def test_the_name_tells_tokenizers_apart_and_not_runs():
    names = [tokenizer.train([text], 300, name="n").name for text in ("aaab abab", "aaab abab", "bbbc cbcb")]
    assert names[0] == names[1] != names[2] and all(name.startswith("n-") and len(name) == 10 for name in names)


def test_a_folder_of_shards_opens_with_its_own_tokenizer(tmp_path, trained):
    def name_of(enc):
        (tmp_path / "meta.json").write_text(json.dumps({"tokenizer": enc.name}))
        tokenizer.save_for_folder(enc, tmp_path)
        return tokenizer.folder_encoding(tmp_path)

    for enc in (trained, tokenizer.with_chat(trained), tokenizer.get_encoding("bytes")):
        again = name_of(enc)
        assert again.name == enc.name and again._special_tokens == enc._special_tokens
        assert sorted(listing(tmp_path)) == ["meta.json", "tokenizer.tiktoken", "tokenizer.tiktoken.json"]


@needs_gpt2
def test_a_node_without_network_and_cache_reads_gpt2s_tables_from_the_folder_of_shards(tmp_path):
    gpt2 = tokenizer.get_encoding("gpt2")
    (tmp_path / "meta.json").write_text('{"tokenizer": "gpt2+chat"}')
    tokenizer.save_for_folder(tokenizer.with_chat(gpt2), tmp_path)
    (tmp_path / "cache").mkdir()
    code = f"enc = tokenizer.folder_encoding({str(tmp_path)!r})\nprint(enc.name, enc.n_vocab, enc.encode_ordinary('hello world'))"
    done = without_network(code, tmp_path / "cache")
    assert done.stdout == "gpt2+chat 50261 [31373, 995]\n", done.stderr
    again = tokenizer.read_encoding(tmp_path / "tokenizer.tiktoken")
    assert (again.name, again.n_vocab, again._special_tokens) == ("gpt2", 50257, gpt2._special_tokens)
    assert again._mergeable_ranks == gpt2._mergeable_ranks
    for text in odd_texts(500) + corpus()[:3]:
        assert again.encode_ordinary(text) == gpt2.encode_ordinary(text)


def test_folders_of_older_versions_are_read(tmp_path, trained):
    (tmp_path / "meta.json").write_text(json.dumps({"tokenizer": f"{trained.name}+chat"}))
    (tmp_path / f"{trained.name}.tiktoken").write_text(tokenizer.dumps(trained))
    assert tokenizer.folder_encoding(tmp_path).n_vocab == 1004


def test_a_folder_whose_meta_names_another_tokenizer_is_refused(tmp_path, trained):
    tokenizer.save_for_folder(trained, tmp_path)
    (tmp_path / "meta.json").write_text('{"tokenizer": "bytes"}')
    with pytest.raises(UserError, match="names tokenizer bytes, but .* holds small-"):
        tokenizer.folder_encoding(tmp_path)


@needs_gpt2
def test_a_folder_without_meta_json_is_gpt2s(tmp_path):
    assert tokenizer.folder_encoding(tmp_path).name == "gpt2"


@pytest.mark.parametrize(
    "content", ['{"tokenizer": "byt', "{}", "[]", '{"tokenizer": 3}', "", '{"tokenizer": "../../pwn"}', "[" * 10**6]
)
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

    export_tokenizer(enc, folder)
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
    export_tokenizer(tokenizer.get_encoding("gpt2"), tmp_path)
    merges = json.loads((tmp_path / "tokenizer.json").read_text())["model"]["merges"]
    assert [" ".join(pair) for pair in merges] == vocab_bpe.read_text(encoding="utf-8").split("\n")[1:-1]


def test_a_special_token_that_is_a_word_too_is_not_exported_as_one(tmp_path):
    enc = tokenizer.train(["aaabdaaabac"], 261, special_tokens=["aaab"])
    with pytest.raises(UserError, match="'aaab' is both a special token and a word"):
        export_tokenizer(enc, tmp_path)


# -----------------------------------------------------------------------------
# Import


def real_text():
    """Text to compare ids on: the tests' corpus and, where it is at hand, a play."""
    texts = odd_texts(2000) + corpus()[:5]
    if (SHARED / "tinyshakespeare.txt").exists():
        texts.append((SHARED / "tinyshakespeare.txt").read_text()[:100_000])
    return [text.replace("<|", "< |") for text in texts]


def check_import(folder):
    """The tokenizer that is made of a folder's, after a comparison with transformers."""
    from transformers import AutoTokenizer

    (folder / "config.json").write_text('{"model_type": "gpt2"}')
    enc, theirs = import_tokenizer(folder), AutoTokenizer.from_pretrained(folder)
    for text in real_text():
        assert enc.encode_ordinary(text) == theirs.encode(text)
    assert enc.n_vocab == len(theirs) and enc.eot_token == theirs.convert_tokens_to_ids("<|endoftext|>")
    assert tokenizer.loads(tokenizer.dumps(enc)).name == enc.name, "a checkpoint holds it"
    return enc


@needs_gpt2
def test_openais_own_files_are_gpt2(tmp_path):
    cache = SHARED / "tiktoken_cache"
    (tmp_path / "vocab.json").write_bytes((cache / "6c7ea1a7e38e3a7f062df639a5b80947f075ffe6").read_bytes())
    (tmp_path / "merges.txt").write_bytes((cache / "6d1cbeee0f20b3d9449abfede4726ed8212e3aee").read_bytes())
    assert check_import(tmp_path).name == "gpt2"


def test_a_tokenizer_json_of_ours_comes_back(tmp_path, trained):
    export_tokenizer(trained, tmp_path)
    enc = check_import(tmp_path)
    assert enc._mergeable_ranks == trained._mergeable_ranks and enc._special_tokens == trained._special_tokens
    assert enc.name.startswith("hf-")


def huggingface_trained(special_tokens=("<|endoftext|>",), **options):
    """A byte-level BPE made by Hugging Face's library alone; its special tokens come first."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    theirs = Tokenizer(models.BPE())
    theirs.pre_tokenizer = pre_tokenizers.ByteLevel(**{"add_prefix_space": False} | options)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=700, initial_alphabet=alphabet, special_tokens=list(special_tokens), show_progress=False
    )
    theirs.train_from_iterator(corpus(), trainer)
    return theirs


def test_special_tokens_before_the_bytes_keep_their_ids(tmp_path):
    huggingface_trained(["<|endoftext|>", "<|pad|>"]).save(str(tmp_path / "tokenizer.json"))
    enc = check_import(tmp_path)
    assert enc.eot_token == 0 and enc._mergeable_ranks[b"!"] == 2
    (tmp_path / "out").mkdir()
    export_tokenizer(enc, tmp_path / "out")
    assert check_import(tmp_path / "out")._special_tokens == {"<|endoftext|>": 0, "<|pad|>": 1}


def change_json(change):
    """Apply `change` to the fields of a tokenizer.json."""

    def apply(path):
        fields = json.loads(path.read_text())
        change(fields)
        path.write_text(json.dumps(fields))

    return apply


def swap_two_ids(fields):
    vocab = fields["model"]["vocab"]
    names = sorted(vocab, key=vocab.get)[300:302]
    vocab[names[0]], vocab[names[1]] = vocab[names[1]], vocab[names[0]]


BPE_OF_OTHER_KINDS = {
    "a normalizer": (change_json(lambda fields: fields.update(normalizer={"type": "Lowercase"})), "other ids"),
    "a space before the text": (
        change_json(lambda fields: fields["pre_tokenizer"].update(add_prefix_space=True)),
        "other ids",
    ),
    "no bytes": (change_json(lambda fields: fields.update(pre_tokenizer={"type": "Whitespace"})), "not byte-level"),
    "no splits": (change_json(lambda fields: fields.update(pre_tokenizer=None)), "not byte-level"),
    "another model": (
        change_json(lambda fields: fields.update(model={"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"})),
        "WordLevel",
    ),
    "merges in another order": (change_json(swap_two_ids), "order of its merges"),
    "no <|endoftext|>": (lambda path: path.write_text(path.read_text().replace("<|endoftext|>", "</s>")), "endoftext"),
    "half a file": (lambda path: path.write_text(path.read_text()[:5000]), "Could not read"),
    "no JSON": (lambda path: path.write_bytes(b"\xff\x00"), "Could not read"),
}


@pytest.mark.parametrize("kind", BPE_OF_OTHER_KINDS)
def test_a_tokenizer_of_another_kind_is_refused(tmp_path, kind):
    change, reason = BPE_OF_OTHER_KINDS[kind]
    path = tmp_path / "tokenizer.json"
    huggingface_trained().save(str(path))
    change(path)
    with pytest.raises(UserError, match=reason) as caught:
        import_tokenizer(tmp_path)
    assert "\n" not in str(caught.value)


# -----------------------------------------------------------------------------
# Command line


def test_the_command_trains_saves_and_compares(tmp_path):
    text = tmp_path / "a.txt"
    text.write_text("".join(corpus()[:-200]))
    out = tmp_path / "my.tiktoken"
    args = [
        "--input",
        text,
        "--vocab-size",
        500,
        "--out",
        out,
        "--special-tokens",
        "<|a|>",
        "<|b|>",
        "--pattern",
        "gpt4",
    ]
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
        "vocabulary too small for its special tokens": (
            [*good, "--vocab-size", 257, "--special-tokens", "<|a|>"],
            ["258"],
        ),
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


@pytest.mark.parametrize(
    "name",
    [
        "vocabulary too small",
        "vocabulary too small for its special tokens",
        "vocabulary too large",
        "no input",
        "missing input",
        "empty input",
        "no output",
        "output that exists",
        "output of another kind",
        "output in no folder",
        "unknown pattern",
        "the same special token twice",
        "unknown flag",
    ],
)
def test_bad_input_is_one_line_and_status_2(refusals, name):
    cases, done = refusals
    assert done[name].returncode == 2, done[name]
    lines = done[name].stderr.splitlines()
    assert len(lines) == 1 and lines[0].startswith("error: "), done[name].stderr
    assert all(word in lines[0] for word in cases[name][1]), lines[0]


def header(**changes):
    """The text of a tokenizer of bytes with another line of JSON."""
    first, ranks = tokenizer.dumps(tokenizer.get_encoding("bytes")).split("\n", 1)
    return json.dumps(json.loads(first) | changes) + "\n" + ranks


DAMAGED = {
    "cut short": lambda text: text[: len(text) // 2],
    "no <|endoftext|>": lambda text: text.replace('"<|endoftext|>"', '"<|end|>"'),
    "no pattern": lambda text: text.replace('"pat_str"', '"pattern"'),
    "not base64": lambda text: text.replace("\n", "\nnot base64 \n", 1),
    "a byte is missing": lambda text: text.replace("IQ== ", "Ig== ", 1),
    "a rank that is none": lambda text: text.replace("IQ== ", "IQ== 3.", 1),
    "an empty object": lambda text: "{}\n" + text.split("\n", 1)[1],
    "deep JSON": lambda text: '{"a":' * 10**6 + text,
    "another folder in its name": lambda text: header(name="../../pwn"),
    "a name that is none": lambda text: header(name=["bytes"]),
    "a pattern that is none": lambda text: header(pat_str=3),
    "a pattern that does not compile": lambda text: header(pat_str="("),
    "a pattern that skips text": lambda text: header(pat_str="[a-z]+"),
    "a pattern with half a surrogate pair": lambda text: header(pat_str="\ud800|(?s:.)"),
    "special tokens that are a list": lambda text: header(special_tokens=["<|endoftext|>"]),
    "an id that is no number": lambda text: header(special_tokens={"<|endoftext|>": "256"}),
    "an id that is no whole number": lambda text: header(special_tokens={"<|endoftext|>": 256.0}),
    "an id that no machine holds": lambda text: header(special_tokens={"<|endoftext|>": 2**70}),
    "an empty special token": lambda text: header(special_tokens={"<|endoftext|>": 256, "": 257}),
}


@pytest.mark.parametrize("damage", DAMAGED)
def test_a_damaged_file_is_refused(tmp_path, damage):
    path = tmp_path / "x.tiktoken"
    path.write_text(DAMAGED[damage](tokenizer.dumps(tokenizer.get_encoding("bytes"))))
    with pytest.raises(UserError, match="x.tiktoken is damaged") as caught:
        tokenizer.get_encoding(path)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 600


def test_a_file_without_its_json_or_with_that_of_another_is_refused(tmp_path, trained):
    path = tmp_path / "x.tiktoken"
    tokenizer.write_encoding(trained, path)
    fields = (tmp_path / "x.tiktoken.json").read_text()
    (tmp_path / "x.tiktoken.json").unlink()
    with pytest.raises(UserError, match="x.tiktoken has no .*x.tiktoken.json with it"):
        tokenizer.get_encoding(path)
    for content in (fields.replace('"sha256": "', '"sha256": "0'), "{", "[]", "[" * 10**6, "\u00e9"):
        (tmp_path / "x.tiktoken.json").write_text(content, encoding="utf-8")
        with pytest.raises(UserError, match="x.tiktoken is "):
            tokenizer.get_encoding(path)


def test_a_missing_file_is_named(tmp_path):
    for name in ("x.tiktoken", "x.json"):
        with pytest.raises(UserError, match=f"There is no tokenizer called .*{name}"):
            tokenizer.get_encoding(tmp_path / name)
    with pytest.raises(UserError, match="Could not open tokenizer"):
        tokenizer.get_encoding(tmp_path)


def test_a_name_never_leads_out_of_the_folder(tmp_path, trained):
    enc = tokenizer.copy_encoding(trained, "../../pwn", trained._special_tokens)
    folder = tmp_path / "a" / "b"
    folder.mkdir(parents=True)
    tokenizer.save_for_folder(enc, folder)
    assert sorted(listing(tmp_path)) == ["a", "a/b", "a/b/tokenizer.tiktoken", "a/b/tokenizer.tiktoken.json"]
    with pytest.raises(UserError, match="its name is '../../pwn'"):
        tokenizer.folder_encoding(folder)
