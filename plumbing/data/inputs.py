"""Input files: their types, and which ones a path, a folder or a glob names."""

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

# files that come with shards or describe a data set: read only if they are named by their own path
NO_DATA = re.compile(
    r"(?i)(^|[/\\])(readme\.md|(meta|tokenizer\.tiktoken|dataset_infos?|dataset_dict|state|config)\.json)$"
)
COMPRESSIONS = {".gz": "gzip", ".zst": "zstd"}
# {type: the endings of its files}; HTML and source code are read as plain text
TYPES = {
    ".parquet": ".parquet",
    ".jsonl": ".jsonl .json .ndjson",
    ".csv": ".csv .tsv",
    ".txt": ".txt .md .html .py .text .markdown .rst .org .adoc .tex .htm .xml .pyi .js .jsx .ts .tsx .c .h .cc"
    " .cpp .hpp .cu .cs .java .go .rs .rb .php .swift .kt .scala .lua .jl .pl .r .sql .sh .css",
}

# {command that makes a text of a file: the endings of its format}
CONVERSIONS = {
    "pdftotext FILE NEW.txt": ".pdf",
    "pandoc -t plain FILE -o NEW.txt": ".docx .odt .rtf .epub",
    "unzip FILE": ".zip",
    "tar -xf FILE": ".tar .tgz",
    "mv FILE NEW.txt": ".srt .vtt .log",
}


class Source(NamedTuple):
    """A file to read."""

    name: str  # its path on this machine, or in a data set on the hub
    size: int = 0  # bytes; 0 if unknown
    digest: str = ""  # for a local file, a hash of its first 4 KB; on the hub, the hash that the hub lists
    path: str = ""  # on this machine; for a file on the hub, `downloads.fetch_all` fills it in
    repo: str = ""  # on the hub: the data set
    commit: str = ""

    def recorded(self) -> list[Any]:
        """[name, size, digest] for meta.json. A local file is recorded without its folder, so it may be moved."""
        return [self.name if self.repo else os.path.basename(self.name), self.size, self.digest]


def check_names(repo: str, sources: Sequence[Source]) -> None:
    """UserError if a data set on the hub has a file name that leads out of the download folder."""
    for source in sources:
        path = PureWindowsPath(source.name)  # knows both kinds of slashes, and drives
        if path.anchor or ".." in path.parts or "\0" in source.name:
            raise UserError(
                f"{repo} lists a file {console.plain(source.name)!r}, which would be written outside of its folder. "
                "Don't use this data set, and report it to the hub."
            )


def file_type(name: str) -> str:
    """The type of a file by its name, a key of TYPES, or "": "a/b.json.gz" -> ".jsonl"."""
    ending = suffix_of(name)
    for kind, endings in TYPES.items():
        if ending in endings.split():
            return kind
    return ""


def suffix_of(name: str) -> str:
    """The ending of a file name before any .gz or .zst, in lower case: "a/B.TXT.gz" -> ".txt"."""
    stem, suffix = os.path.splitext(str(name).lower())
    return os.path.splitext(stem)[1] if suffix in COMPRESSIONS else suffix


def supported_files() -> str:
    """The files that can be read, in words."""
    endings = []
    for kind in TYPES:
        endings += TYPES[kind].split()[:4]
    return f"files that end in {', '.join(endings)} and other text and source code (.gz and .zst are unpacked)"


def list_inputs(patterns: Sequence[str]) -> list[Source]:
    """The files that `patterns` name, in this order: a file, a folder's files, or a glob's matches, sorted by name."""
    names = []
    for pattern in patterns:
        names += list_names(pattern)
    return [local_source(name) for name in names]


def list_names(pattern: str) -> list[str]:
    """The files of known types at a path, directly in a folder, or matching a glob. A note counts all others."""
    is_folder = os.path.isdir(pattern)
    if is_folder and is_data_set(pattern):
        raise UserError(
            f"{pattern} is a whole data set. If it is a clone, name the files you want, such as --input "
            f"'{pattern}/data/train-*.parquet'. If save_to_disk wrote it, first convert it in Python: "
            f"datasets.load_from_disk('{pattern}/train').to_parquet('train.parquet')."
        )
    names = [pattern]
    if is_folder:
        names = sorted(str(path) for path in Path(pattern).rglob("*") if not path.is_dir())
    elif not os.path.lexists(pattern):
        names = [name for name in sorted(glob.glob(pattern, recursive=True)) if not os.path.isdir(name)]
    kept = [name for name in names if file_type(name)]
    if names != [pattern]:
        kept = [name for name in kept if not NO_DATA.search(name)]
    if is_folder:
        shown = [path for path in map(Path, kept) if path.parent == Path(pattern)]
        kept = [str(path) for path in shown if not path.name.startswith(".")]
    left_out = sorted(set(names) - set(kept))
    if not names:
        raise UserError(
            f"No file matches {pattern}. Check the path. To read from the Hub, use --dataset OWNER/NAME (in fineweb.py "
            "and smoltalk.py). From another server, download the file first: curl -LO ADDRESS."
        )
    if not kept:
        advice = advice_on(left_out[-1])
        raise UserError(f"{left_out[-1]} is not read as input. Give {supported_files()}.{advice}")
    if left_out:
        example = f"{left_out[0]}.{advice_on(left_out[0])}"
        console.note(f"{len(left_out)} of {len(names)} files in {pattern} are left out, such as {example}")
    return kept


def advice_on(name: str) -> str:
    """How a file that was left out can be read; "" if that is unknown."""
    if file_type(name):  # a hidden one, one in a folder, or one of NO_DATA
        return " To read it, give its path, or a glob such as 'FOLDER/**'."
    commands = [command for command, endings in CONVERSIONS.items() if suffix_of(name) in endings.split()]
    return f" Convert it: {commands[0]}" if commands else ""


def is_data_set(folder: str) -> bool:
    """Whether a folder is a clone of a data set (its README.md begins with a header), or written by save_to_disk."""
    there = set(os.listdir(folder))
    if there & {"dataset_dict.json", "state.json"}:
        return True
    card = Path(folder, "README.md").read_bytes() if "README.md" in there else b""
    return bool(re.match(rb"(\xef\xbb\xbf)?---\s", card))


def local_source(name: str) -> Source:
    """The Source of a local file."""
    with named_errors(name), open_regular(name) as file:
        size = os.fstat(file.fileno()).st_size
        start = file.read(4096)
    if start.startswith(b"version https://git-lfs.github.com/spec/"):
        raise UserError(f"{name} is only a pointer to a file in Git LFS. Run git lfs pull in that clone.")
    return Source(name, size, hashlib.sha256(start).hexdigest()[:16], path=name)
