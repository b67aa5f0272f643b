"""Each flag of the programs beside the trainer, changed alone, changes what its program does."""

import contextlib
import dataclasses
import functools
import io
import shutil
import sys

import contamination
import fineweb
import hellaswag
import pytest
import sample
import smoltalk
import tokenizer
from plumbing.data import tokenizers
from plumbing.run.huggingface import export_huggingface

import edits
from corpora import random_texts, train_small, write, write_rows
from harness import examples_file, flags, listing, make_shards, parrot_model, patched, refusal_of, talk, tiny_model

pytestmark = pytest.mark.gpt2

# flags that have no other value here
REASONS = dict.fromkeys(["dataset", "config", "split", "revision", "pretokenized"], "test_downloads.py has the hub")
REASONS |= dict.fromkeys(["num_proc", "batch_tokens"], "changes the speed alone")
REASONS["device"] = "there may be one device"
# of each program: a command, and another value of each of its flags
PROGRAMS = {
    fineweb: (
        dict(input="a.jsonl", tokenizer="bytes", out_dir="out", shard_size=3000),
        dict(input="b.jsonl", text_column="title", separator="the", out_dir="other", tokenizer="small.tiktoken")
        | dict(shard_size=2000, max_tokens=500),
    ),
    smoltalk: (
        dict(input="a.jsonl", out_dir="out", tokenizer="bytes", shard_size=3000, max_length=256),
        dict(input="b.jsonl", out_dir="other", tokenizer="small.tiktoken", shard_size=2000, max_length=128)
        | dict(init_from="a.hf"),
    ),
    tokenizer: (
        dict(input="a.jsonl", out="a.tiktoken", vocab_size=300),
        dict(input="b.jsonl", out="b.tiktoken", vocab_size=310, text_column="title"),
    ),
    contamination: (
        dict(data="a.shards", eval="a.examples"),
        dict(data="b.shards", eval="b.examples"),
    ),
    hellaswag: (
        dict(model_type="a.hf", data="a.examples", predictions="a.out"),
        dict(model_type="b.hf", data="b.examples", limit=3, predictions="b.out", code="flat.py"),
    ),
    sample: (
        dict(prompt="abcd", model="a.hf", max_new_tokens=20),
        dict(prompt="abc", model="b.hf", num_samples=2, max_new_tokens=7, temperature=3.0, top_k=2, top_p=0.01)
        | dict(repetition_penalty=9.0, stop="k", seed=1, code="flat.py", chat=True, system="Be kind.", export="new"),
    ),
}
MATTERS_WITH = {  # settings without which a flag makes no difference
    "separator": dict(input="a.txt"),
    "init_from": dict(init_from="chat", tokenizer=None, max_length=None),
    "system": dict(chat=True),
    "stop": dict(model="chat", chat=True, temperature=0.0),
}
CASES = []
for each in PROGRAMS:
    CASES += [(each, field.name) for field in dataclasses.fields(each.Options) if field.name not in REASONS]


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """A folder with all that the flags name."""
    folder = tmp_path_factory.mktemp("world")
    bytes_enc = tokenizers.get_encoding("bytes")
    export_huggingface(parrot_model(), tokenizers.get_encoding("bytes+chat"), folder / "chat")
    tokenizers.write_encoding(train_small("gpt2"), folder / "small.tiktoken")
    for seed, name in enumerate(("a", "b")):
        export_huggingface(tiny_model(seed, vocab_size=257, block_size=128), bytes_enc, folder / f"{name}.hf")
        make_shards(folder / f"{name}.shards", seed=seed)
        texts = random_texts(60, seed=seed)
        write(folder / f"{name}.txt", "the".join(texts))
        rows = [{"text": text, "title": text[::-1], "messages": talk(text[:20], text[:30])} for text in texts]
        write_rows(folder / f"{name}.jsonl", rows)
        examples_file(folder, [f"{name}{'abc' * i}" for i in range(9 + seed)]).rename(folder / f"{name}.examples")
    edits.write_trainer(folder / "flat.py", {"return self.lm_head(x)": "return 0 * self.lm_head(x)"})
    return folder


@pytest.fixture(scope="module")
def does(world, tmp_path_factory):
    """does(program, **options): (what it prints, the files that it writes). The same command is called once."""

    @functools.cache
    def call(program, **options):
        folder = tmp_path_factory.mktemp("does")
        shutil.copytree(world, folder, dirs_exist_ok=True)
        words = [options.pop("prompt")] if "prompt" in options else []
        options = {name: value for name, value in options.items() if value is not None}
        with contextlib.chdir(folder), patched(sys, "stdin", io.StringIO("abc\n/quit\n")):
            status, said, errors = refusal_of(program.main, *words, *flags(**options))
        assert status == 0, errors
        return said, listing(folder)

    return call


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_the_same_command_does_the_same(program, does):
    usual, _ = PROGRAMS[program]
    assert does(program, **usual) == does.__wrapped__(program, **usual)


@pytest.mark.parametrize("program, name", CASES, ids=lambda each: getattr(each, "__name__", each))
def test_a_flag_that_is_changed_alone_changes_what_is_done(program, name, does):
    usual, others = PROGRAMS[program]
    usual = usual | MATTERS_WITH.get(name, {})
    assert does(program, **usual | {name: others[name]}) != does(program, **usual)
