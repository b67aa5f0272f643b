"""The flags of every script that makes shards."""

from dataclasses import dataclass

from plumbing.cli import flags


@dataclass
class DataOptions:
    dataset: str = ""
    config: str = ""  # one of the data set's configs, if it has several
    split: str = "train"  # one of the data set's splits
    # a commit, branch or tag of the data set; by default the newest commit when you first run the command
    revision: str = ""
    # your own files, folders or globs: .jsonl, .json, .csv, .parquet or text such as .txt, .md or .py; .gz
    # and .zst are unpacked
    input: tuple[str, ...] = ()
    out_dir: str | None = None  # folder for the shards; by default named after the data set or the first file
    # gpt2 (the default), bytes (the default for python-docs), a .tiktoken file, or a GPT-2 with a tokenizer of its own:
    # a folder in Hugging Face format or a name on the Hub
    tokenizer: str = ""
    shard_size: flags.Positive[int] = 100_000_000  # tokens in a shard, roughly; each takes 2 bytes
    num_proc: int = 0  # cores to tokenize on (0: all); changes only the speed
