"""tokenizer.py: every tokenizer is a tiktoken.Encoding, loses nothing, and agrees with whoever else reads it."""

import json
from pathlib import Path

import pytest
import tiktoken
import tokenizer
from plumbing.cli.console import UserError
from plumbing.data import tokenizers
from plumbing.run.huggingface import tokenizer_files
from tiktoken.load import load_tiktoken_bpe

from corpora import corpus, odd_texts, train_small
from harness import ROOT, listing, printed_commands, refused


def test_bytes_are_the_bytes_of_utf8_and_need_no_network():
    enc = tokenizers.get_encoding("bytes")
    assert isinstance(enc, tiktoken.Encoding)
    assert (enc.name, enc.n_vocab, enc.eot_token) == ("bytes", 257, 256)
    for text in [*odd_texts(500), "x" * 10_000, "<|endoftext|>"]:
        assert enc.encode_ordinary(text) == list(text.encode())
        assert enc.decode(list(text.encode())) == text
    assert enc.encode("a<|endoftext|>", allowed_special="all") == [97, 256]


def test_chat_markers_take_the_ids_after_the_tokenizers_own():
    trained = train_small("gpt4")
    chat = tokenizers.with_chat(trained)
    assert (chat.name, chat.n_vocab, chat.eot_token) == (trained.name + "+chat", 1004, trained.eot_token)
    for i, token in enumerate(tokenizers.CHAT_TOKENS):
        assert chat.encode(token, allowed_special="all") == [1000 + i]
        assert chat.encode_ordinary(token) == trained.encode_ordinary(token)  # typed by a user, it is text


def test_the_first_merges_are_those_that_can_be_counted_by_hand():
    # the textbook example of byte-pair encoding: "aaabdaaabac" -> aa, then ab, then aaab
    enc = tokenizer.train(["aaabdaaabac"], 260, name="t")
    tokens = sorted(enc._mergeable_ranks, key=enc._mergeable_ranks.get)[256:]
    assert tokens == [b"aa", b"ab", b"aaab"]
    assert enc.n_vocab == 260
    assert enc.decode_tokens_bytes(enc.encode_ordinary("aaabdaaabac")) == [b"aaab", b"d", b"aaab", b"a", b"c"]
    # the name tells tokenizers apart, and not runs
    names = [tokenizer.train([text], 300, name="n").name for text in ("aaab abab", "aaab abab", "bbbc cbcb")]
    assert names[0] == names[1] != names[2]
    assert all(name.startswith("n-") and len(name) == 10 for name in names)


@pytest.mark.parametrize("pattern", ["gpt2", "gpt4"])
def test_a_file_and_a_checkpoint_hold_all_of_a_tokenizer_which_loses_nothing(tmp_path, pattern, monkeypatch):
    trained = train_small(pattern)
    path = tmp_path / "x.tiktoken"
    assert (trained.n_vocab, trained.eot_token) == (1000, 998)
    sizes = tokenizers.token_bytes(trained)
    assert sizes.shape == (1000,)
    assert sizes[998:].tolist() == [0, 0]  # the special tokens
    tokenizers.write_encoding(trained, path)
    encs = tokenizers.get_encoding(path), tokenizers.loads(tokenizers.dumps(trained))
    assert all((enc.name, enc._special_tokens) == (trained.name, trained._special_tokens) for enc in encs)
    for text in odd_texts(2000) + corpus()[:5]:
        ids = trained.encode_ordinary(text)
        assert trained.decode(ids) == text
        assert sizes[ids].sum() == len(text.encode())
        assert all(enc.encode_ordinary(text) == ids for enc in encs)
    assert tokenizers.get_encoding(f"{path}+chat").n_vocab == 1004
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", "")  # tiktoken caches local files as well
    assert load_tiktoken_bpe(str(path)) == trained._mergeable_ranks


def test_a_file_is_not_replaced_by_another_tokenizers(tmp_path):
    """A user's own tokenizer in the folder of the shards was, and one that appeared while another was learned."""
    trained = train_small("gpt4")
    enc = tokenizers.get_encoding("bytes")
    tokenizers.write_encoding(enc, tmp_path / "tokenizer.tiktoken")
    (tmp_path / "x.tiktoken.json").write_bytes(b"\xffmine")
    before = listing(tmp_path)
    for name in ("tokenizer.tiktoken", "x.tiktoken"):
        with pytest.raises(UserError, match=f"{name}.* exists already, with other contents"):
            tokenizers.write_encoding(trained, tmp_path / name)
    tokenizers.save_for_folder(tokenizers.with_chat(enc), tmp_path)  # the same without its markers
    assert listing(tmp_path) == before


def test_a_folder_of_shards_opens_with_its_own_tokenizer(tmp_path, monkeypatch):
    """GPT-2's, too: a node without a network and without tiktoken's cache has its tables from the shards."""
    trained = train_small("gpt4")
    gpt2 = tokenizers.copy_encoding(trained, "gpt2", trained._special_tokens)
    monkeypatch.setattr(tiktoken, "get_encoding", lambda name: gpt2)
    assert tokenizers.folder_encoding(tmp_path) is gpt2  # shards of others, which have neither of the two files
    monkeypatch.setattr(tiktoken, "get_encoding", lambda name: pytest.fail("it asked for the network"))
    for i, enc in enumerate((trained, tokenizers.with_chat(trained), tokenizers.get_encoding("bytes"), gpt2)):
        folder = tmp_path / str(i)
        folder.mkdir()
        (folder / "meta.json").write_text(json.dumps({"tokenizer": enc.name}), encoding="utf-8")
        tokenizers.save_for_folder(enc, folder)
        again = tokenizers.folder_encoding(folder)
        assert (again.name, tokenizers.dumps(again)) == (enc.name, tokenizers.dumps(enc))
        assert sorted(listing(folder)) == ["meta.json", "tokenizer.tiktoken", "tokenizer.tiktoken.json"]
    (folder / "meta.json").write_text('{"tokenizer": "bytes"}', encoding="utf-8")
    with pytest.raises(UserError, match="holds tokenizer gpt2, but the meta.json beside it names bytes"):
        tokenizers.folder_encoding(folder)


def test_a_tokenizer_that_is_damaged_or_made_by_hand_is_one_error(tmp_path):
    enc = tokenizers.get_encoding("bytes")
    path = tmp_path / "x.tiktoken"
    json_path = tmp_path / "x.tiktoken.json"
    with pytest.raises(UserError, match="x.tiktoken is missing or damaged: .*No such file"):
        tokenizers.get_encoding(path)
    tokenizers.write_encoding(enc, path)
    fields = json.loads(json_path.read_text(encoding="ascii"))
    # a name that a terminal obeys, an id that is none, a pattern that loses text without a word
    changes = [
        {"name": "x\x1b[31m"},
        {"special_tokens": {"<|endoftext|>": "256"}},
        {"pat_str": "a"},
        {"pat_str": "("},
    ]
    headers = [json.dumps(fields | change) for change in changes] + ["3", "{", "\u00e9"]
    for content in [*headers, json.dumps(fields | {"sha256": "0"})]:
        json_path.write_text(content, encoding="utf-8")
        with pytest.raises(UserError, match="Tokenizer .*x.tiktoken is missing or damaged: ") as caught:
            tokenizers.get_encoding(path)
        assert str(caught.value).isprintable()
    text = tokenizers.dumps(enc)  # a checkpoint holds it as one text
    damaged = [header + "\n" + text.split("\n", 1)[1] for header in headers]
    # no base64; a byte twice, another one missing; an id twice
    damaged += [text.replace("IQ== ", other, 1) for other in ("I ", "Ig== ")] + [text.replace("eg== 122", "eg== 123")]
    for content in damaged:
        with pytest.raises(ValueError):
            tokenizers.loads(content)


@pytest.mark.parametrize("name", ["bytes+chat", "gpt2", "gpt4"])
def test_transformers_reads_an_export(tmp_path, name):
    from transformers import AutoTokenizer

    enc = tokenizers.get_encoding(name) if "+" in name else train_small(name)
    for file, content in tokenizer_files(enc).items():
        (tmp_path / file).write_bytes(content)
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}', encoding="utf-8")  # as beside an exported model
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    for text in odd_texts(2000) + corpus()[:5]:
        assert enc.encode_ordinary(text.replace("<|", "< |")) == theirs.encode(text.replace("<|", "< |"))
        assert theirs.decode(theirs.encode(text)) == text
    assert enc.n_vocab == len(theirs)
    assert enc.eot_token == theirs.eos_token_id == theirs.bos_token_id
    for token, i in enc._special_tokens.items():
        assert theirs.encode(f"a{token}") == [*enc.encode_ordinary("a"), i]


def test_a_special_token_that_is_a_word_too_is_not_exported_as_one():
    enc = tokenizer.train(["aaabdaaabac"], 260)
    enc = tokenizers.copy_encoding(enc, enc.name, enc._special_tokens | {"aaab": 260})
    with pytest.raises(UserError, match="its special token 'aaab' is also an ordinary token"):
        tokenizer_files(enc)


def test_the_command_trains_and_goes_on_if_it_was_killed_between_its_two_files(tmp_path, capsys, monkeypatch):
    """Both files are in .gitignore."""
    monkeypatch.chdir(tmp_path)
    Path("-a.txt").write_text("".join(corpus()[:-200]), encoding="utf-8")
    args = ["--input=-a.txt", "--out", "x.tiktoken", "--vocab-size", "500"]
    tokenizer.main(args)
    enc = tokenizers.get_encoding("x.tiktoken")
    assert enc.name.startswith("x-")
    assert enc._special_tokens == {tokenizers.EOT: 499}
    before = listing(tmp_path)
    Path("x.tiktoken").unlink()
    tokenizer.main(args)
    assert listing(tmp_path) == before
    [words] = printed_commands(capsys.readouterr().out)
    assert words[2:] == ["--input", "./-a.txt", "--tokenizer", "x.tiktoken"]
    ignored = (ROOT / ".gitignore").read_text(encoding="utf-8").splitlines()
    assert {"*" + name.removeprefix("x") for name in before if name.startswith("x")} <= set(ignored)


def test_bad_input_is_one_line_and_status_2_and_changes_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    files = {"a.txt": "text", "empty.txt": "", "old.tiktoken": "mine", "x.tiktoken.json": "mine"}
    for name, content in files.items():
        Path(name).write_text(content, encoding="utf-8")
    cases = {
        "--input a.txt --out new.tiktoken --vocab-size 256": "must be from 257",
        "--input none.txt --out new.tiktoken": "To read from the hub, use --dataset",
        "--input empty.txt --out new.tiktoken": "There is no text in",
        "": "--input is missing. Give the files to learn from. --out is missing",
        "--input a.txt --out old.tiktoken": "exists already",
        "--input a.txt --out \x1b.tiktoken": "an existing, writable folder",
    }
    before = listing(tmp_path)
    for words, said in cases.items():
        assert said in refused(tokenizer.main, *words.split())
    assert listing(tmp_path) == before
