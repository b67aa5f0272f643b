"""The files of a data set, and which of a person's own files are one."""

import glob
import hashlib
import os
import re
from collections.abc import Sequence
from pathlib import Path, PureWindowsPath
from typing import Any, NamedTuple

from plumbing.cli import console
from plumbing.cli.console import UserError
from plumbing.files import named_errors, open_regular

# never input: files beside shards, and those that describe a data set
NO_DATA = re.compile(r"(^|[/\\])((meta|tokenizer\.tiktoken|dataset_infos?|dataset_dict|state|config)\.json)$")
COMPRESSIONS = {".gz": "gzip", ".zst": "zstd"}
# {how a file is read: the endings of such files}; HTML and source code are text as they are
TYPES = {
    ".parquet": ".parquet",
    ".jsonl": ".jsonl .json .ndjson",
    ".csv": ".csv .tsv",
    ".txt": ".txt .md .html .py .text .markdown .rst .org .adoc .tex .htm .xml .pyi .js .jsx .ts .tsx .c .h .cc"
    " .cpp .hpp .cu .cs .java .go .rs .rb .php .swift .kt .scala .lua .jl .pl .r .sql .sh .css",
}


class Source(NamedTuple):
    """A file to read."""

    name: str  # its path, on this machine or in a data set of the hub
    size: int = 0  # bytes; 0 if unknown
    digest: str = ""  # of a local file a hash of its start, of one on the hub the hash that the hub lists
    path: str = ""  # on this machine; `downloads.fetch_all` fills it in for those of the hub
    repo: str = ""  # on the hub: the data set
    commit: str = ""

    def recorded(self) -> list[Any]:
        """[name, size, digest] for meta.json. A local file is recorded without its folder, so it may be moved."""
        return [self.name if self.repo else os.path.basename(self.name), self.size, self.digest]


def check_names(repo: str, sources: Sequence[Source]) -> None:
    """UserError if a file of a data set of the hub would be written outside of the folder of its downloads."""
    for source in sources:
        path = PureWindowsPath(source.name)  # knows both kinds of slashes, and drives
        if path.anchor or ".." in path.parts or "\0" in source.name:
            raise UserError(
                f"{repo} lists a file {console.plain(source.name)!r}, which would be written outside of its folder. Do "
                "not use this data set, and tell the hub."
            )


def file_type(name: str) -> str:
    """The key of TYPES for a file's name, "" if there is none: "a/b.json.gz" -> ".jsonl"."""
    ending = suffix_of(name)
    for kind, endings in TYPES.items():
        if ending and ending in endings.split():
            return kind
    return ""


def suffix_of(name: str) -> str:
    """The ending of a file's name, without that of its compression: "a/B.TXT.gz" -> ".txt"."""
    stem, suffix = os.path.splitext(str(name).lower())
    return os.path.splitext(stem)[1] if suffix in COMPRESSIONS else suffix


def supported_files(types: Sequence[str] = tuple(TYPES)) -> str:
    """The files that can be read, in words."""
    endings = []
    for kind in types:
        endings += TYPES[kind].split()[:4]
    others = " and other text and source code" if ".txt" in types else ""
    return f"files that end in {', '.join(endings)}{others} (.gz and .zst are unpacked)"


def list_inputs(patterns: Sequence[str], types: Sequence[str] = tuple(TYPES)) -> list[Source]:
    """The files that `patterns` name, in this order: a file, a folder's files, or a glob's matches, sorted by name."""
    names = []
    for pattern in patterns:
        names += list_names(pattern, types)
    return [local_source(name) for name in names]


def list_names(pattern: str, types: Sequence[str]) -> list[str]:
    """The paths of the files of these types that a path or a glob names; a README.md only by its own path."""
    is_folder = os.path.isdir(pattern)
    if is_folder and is_data_set(pattern):
        raise UserError(
            f"{pattern} is a whole data set. Name the files of a clone that you want, as with --input "
            f"'{pattern}/data/train-*.parquet'. To read what save_to_disk wrote, make a file of it with Python's "
            f"datasets.load_from_disk('{pattern}/train').to_parquet('train.parquet')."
        )
    names = [pattern]
    if is_folder or not os.path.lexists(pattern):
        matching = os.path.join(glob.escape(pattern), "*") if is_folder else pattern
        names = [name for name in sorted(glob.glob(matching, recursive=True)) if not os.path.isdir(name)]
    kept = [name for name in names if is_input(name, types)]
    kept = [name for name in kept if name == pattern or os.path.basename(name).lower() != "readme.md"]
    left_out = sorted(set(names) - set(kept))
    if not kept:
        wrong = f"{left_out[-1]} is not of a type that is read here" if names else f"No file matches {pattern}"
        raise UserError(
            f"{wrong}. Give {supported_files(types)}. A data set of the hub is for fineweb.py and smoltalk.py: "
            "--dataset OWNER/NAME. Fetch a file on another server first: curl -LO ADDRESS."
        )
    if left_out:
        console.note(f"{len(left_out)} of {len(names)} files in {pattern} are left out, such as {left_out[0]}.")
    return kept


def is_input(name: str, types: Sequence[str]) -> bool:
    return file_type(name) in types and not NO_DATA.search(name)


def is_data_set(folder: str) -> bool:
    """Whether a folder is a clone of a data set, whose README.md begins with a header, or save_to_disk wrote it."""
    there = set(os.listdir(folder))
    if there & {"dataset_dict.json", "state.json"}:
        return True
    card = Path(folder, "README.md").read_bytes() if "README.md" in there else b""
    return bool(re.match(rb"(\xef\xbb\xbf)?---\s", card))


def local_source(name: str) -> Source:
    """A local file with a hash of its first bytes."""
    with named_errors(name), open_regular(name) as file:
        size = os.fstat(file.fileno()).st_size
        start = file.read(4096)
    if start.startswith(b"version https://git-lfs.github.com/spec/"):
        raise UserError(f"{name} only says where Git LFS keeps the file. Fetch it: git lfs pull, in that clone.")
    return Source(name, size, hashlib.sha256(start).hexdigest()[:16], path=name)
