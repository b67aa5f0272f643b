"""The flags of every script that makes shards."""

from dataclasses import dataclass

from plumbing.cli import flags


@dataclass
class DataOptions:
    dataset: str = ""
    config: str = ""  # one of the data set's configs, if it has several
    split: str = "train"  # one of its splits
    revision: str = ""  # its commit, branch or tag; by default the newest commit at the first start
    # your own files, folders or globs: .jsonl, .json, .csv, .parquet or text such as .txt, .md or .py, also .gz or .zst
    input: tuple[str, ...] = ()
    out_dir: str | None = None  # folder of the shards; by default named after the data set or the first file
    tokenizer: str = "gpt2"  # gpt2, bytes, or the path of a .tiktoken file
    shard_size: flags.Positive[int] = 100_000_000  # about how many tokens are in a shard: 200 MB
    num_proc: int = 0  # cores to tokenize on; 0: all; affects only the speed
