"""Which files a data set is made of, people's own or the hub's, and how those of the hub come to this machine.

The library `datasets` says which files a split of one of the hub's has, and the hub's client fetches them, at the
commit that was asked for once. What is in them is read in readers.py.
"""

import collections
import glob
import hashlib
import io
import os
import platform
import re
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path, PureWindowsPath
from typing import Any, NamedTuple

from plumbing.cli import console
from plumbing.cli.console import UserError
from plumbing.files import atomic_write, named_errors, open_regular

# what is never input: files beside shards, and those that tell of a data set
NO_DATA = re.compile(r"(^|[/\\])((meta|tokenizer\.tiktoken|dataset_infos?|dataset_dict|state|config)\.json)$")
# what stands beside the data in many sets; two of these would outnumber one table
ABOUT_DATA = re.compile(
    r"(?i)(^|/)(licen[cs]e|notice|readme|requirements|changelog|citation|authors)\b[^/]*\.txt$"
)
COMPRESSIONS = {".gz": "gzip", ".zst": "zstd"}
TYPES = {  # how a file is read: the ends of the names of such files; HTML and source code are text as they are
    ".parquet": ".parquet",
    ".jsonl": ".jsonl .json .ndjson",
    ".csv": ".csv .tsv",
    ".txt": ".txt .md .html .py .text .markdown .rst .org .adoc .tex .htm .xml .pyi .js .jsx .ts .tsx .c .h .cc"
    " .cpp .hpp .cu .cs .java .go .rs .rb .php .swift .kt .scala .lua .jl .pl .r .sql .sh .css",
}
TIMEOUT = 10  # seconds without an answer
RETRY_SECONDS = 2.0  # before the second attempt
PATIENCE = 20  # seconds; what fails later than this was tried several times by the hub's client already
PYTHON_DOCS = f"the documentation of Python {platform.python_version()}"
ALIASES = {"fineweb-edu": ("HuggingFaceFW/fineweb-edu", "sample-10BT")}  # {--dataset: (name on the hub, config)}
CONVERTED = "refs/convert/parquet"  # the branch in which the hub keeps its own copy of many data sets
OWN_FILES = "Your own files are given with --input FILES."
REFUSALS = {  # by what the hub's client raises
    "GatedRepoError": "it is gated. Accept its conditions on its page, then log in: hf auth login.",
    "HFValidationError": f"a data set's name is OWNER/NAME, as the hub shows it. {OWN_FILES}",
    "RepositoryNotFoundError": f"none has that name, or it is private. Check it, or log in: hf auth login. {OWN_FILES}",
    "RevisionNotFoundError": "it has no such revision. Choose a commit, a branch or a tag that the hub shows.",
}
NO_NETWORK = (
    "Check the network and repeat the command. Without one, use --input, or --dataset python-docs --tokenizer"
)
NO_NETWORK += " bytes."


class Source(NamedTuple):
    """A file to read."""

    name: str  # its path, on this machine or in a data set of the hub
    size: int = 0  # bytes; 0 if unknown
    digest: str = ""  # of a local file a hash of its start, of the hub's what its tree has
    path: str = ""  # on this machine; `fetched` fills it in for those of the hub
    repo: str = ""  # on the hub: the data set
    commit: str = ""

    def recorded(self) -> list[Any]:
        """[name, size, digest] for meta.json; a local file is recorded without its folder, so it may be moved."""
        return [self.name if self.repo else os.path.basename(self.name), self.size, self.digest]


class Found(NamedTuple):
    """The files of a split of a data set, or of one of the user's own."""

    dataset: str  # its full name
    commit: str  # on the hub
    config: str
    split: str
    sources: list[Source]


def file_type(name: str) -> str:
    """The key of TYPES for a file's name, "" if there is none: "a/b.json.gz" -> ".jsonl"."""
    ending = suffix_of(name)
    return next((kind for kind, endings in TYPES.items() if ending and ending in endings.split()), "")


def suffix_of(name: str) -> str:
    """The end of a file's name, without that of its compression: "a/B.TXT.gz" -> ".txt"."""
    stem, suffix = os.path.splitext(str(name).lower())
    return os.path.splitext(stem)[1] if suffix in COMPRESSIONS else suffix


def what_is_read(types: Sequence[str] = tuple(TYPES)) -> str:
    ends = ", ".join(end for kind in types for end in TYPES[kind].split()[:4])
    others = " and other text and source code" if ".txt" in types else ""
    return f"files that end in {ends}{others} (.gz and .zst are unpacked)"


# ----- Files on this machine ----------------------------------------------------------------------------


def list_inputs(patterns: Sequence[str], types: Sequence[str] = tuple(TYPES)) -> list[Source]:
    """The files named by `patterns`: a file, a folder's files, a glob's matches, sorted by name."""
    return [local_source(name) for pattern in patterns for name in list_names(pattern, types)]


def list_names(pattern, types):
    """The paths of the files of these types that a path or a glob names; a README.md only by its own path."""
    is_folder = os.path.isdir(pattern)
    if is_folder and tells_of_data(pattern):
        raise UserError(
            f"{pattern} is a whole data set. Name the files of a clone that you want, as with --input "
            f"'{pattern}/data/train-*.parquet'. What save_to_disk wrote becomes a file that is read here with Python's "
            f"datasets.load_from_disk('{pattern}/train').to_parquet('train.parquet')."
        )
    names = [pattern]
    if is_folder or not os.path.lexists(pattern):
        places = os.path.join(glob.escape(pattern), "*") if is_folder else pattern
        names = [name for name in sorted(glob.glob(places, recursive=True)) if not os.path.isdir(name)]
    kept = [name for name in names if file_type(name) in types and not NO_DATA.search(name)]
    kept = [name for name in kept if name == pattern or os.path.basename(name).lower() != "readme.md"]
    left_out = sorted(set(names) - set(kept))
    if not kept:
        wrong = f"{left_out[-1]} is not of a type that is read here" if names else f"No file matches {pattern}"
        raise UserError(
            f"{wrong}. Give {what_is_read(types)}. A data set of the hub is for fineweb.py and smoltalk.py: --dataset "
            "OWNER/NAME. A file on another server is fetched first: curl -LO ADDRESS."
        )
    if left_out:
        print(f"note: {len(left_out)} of {len(names)} files in {pattern} are left out, such as {left_out[0]}.")
    return kept


def tells_of_data(folder):
    """Whether a folder is a clone of a data set, whose card has a header, or was written by save_to_disk."""
    there = set(os.listdir(folder))
    card = Path(folder, "README.md").read_bytes() if "README.md" in there else b""
    return bool(re.match(rb"(\xef\xbb\xbf)?---\s", card) or there & {"dataset_dict.json", "state.json"})


def local_source(name):
    """A local file with a hash of its first bytes."""
    with named_errors(name), open_regular(name) as file:
        size = os.fstat(file.fileno()).st_size
        start = file.read(4096)
    if start.startswith(b"version https://git-lfs.github.com/spec/"):
        raise UserError(f"{name} only says where Git LFS keeps the file. Fetch it: git lfs pull, in that clone.")
    return Source(name, size, hashlib.sha256(start).hexdigest()[:16], path=name)


# ----- Which files a data set of the hub has ------------------------------------------------------------


def find(options: Any, types: Sequence[str] = tuple(TYPES)) -> Found:
    """The files that the options of a script name, by those called input, dataset, config, split and revision."""
    if options.input:
        return Found("input", "", "", "", list_inputs(options.input, types))
    if options.dataset == "python-docs":
        return Found("python-docs", "", "", "", [Source(PYTHON_DOCS)])
    dataset, config = ALIASES.get(options.dataset, (options.dataset, options.config))
    name, commit, files = retry(dataset, NO_NETWORK, lambda: list_hub(dataset, options.revision))
    for source in files.values():
        path = PureWindowsPath(source.name)  # knows both kinds of slashes, and drives
        if path.anchor or ".." in path.parts or "\0" in source.name:
            raise UserError(
                f"{name} lists a file {console.plain(source.name)!r}, which would be written outside of its folder. Do "
                "not use this data set, and tell the hub."
            )
    root = f"hf://datasets/{name}@{commit}"
    try:
        configs = read_configs(root, files, options.revision)
        config, chosen = choose_files(name, root, files, configs, config, options.split)
    except UserError:
        raise
    except Exception as error:  # of many kinds, YAML's among them
        raise unclear(name, console.plain(console.first_line(error))) from None
    return Found(name if dataset == options.dataset else options.dataset, commit, config, options.split, chosen)


def list_hub(dataset, revision):
    """(full name, commit, {address: Source}) of the files of a data set."""
    import huggingface_hub  # slow to import

    hooks = huggingface_hub.get_session().event_hooks["request"]
    if set_timeout not in hooks:
        hooks.append(set_timeout)
    info: Any = huggingface_hub.HfApi().dataset_info(dataset, revision=revision or None)
    root, files = f"datasets/{info.id}@{info.sha}", {}
    # subtle: `datasets` gets the same object, which remembers the list
    tree: Any = huggingface_hub.HfFileSystem().find(root, detail=True)
    for path, entry in tree.items():
        digest = entry["lfs"].sha256 if entry["lfs"] else entry["blob_id"]
        name = path.removeprefix(f"{root}/")
        files[f"hf://{path}"] = Source(name, entry["size"], digest, repo=info.id, commit=info.sha)
    return info.id, info.sha, files


def set_timeout(request):
    """For the hub's client, which would wait for a list of files without an end."""
    request.extensions["timeout"] = dict.fromkeys(("connect", "read", "write", "pool"), TIMEOUT)


def read_configs(root, files, revision):
    """{config: what says which files it has} by the card of a data set at `root`, {} without one."""
    import huggingface_hub

    card, configs = files.get(f"{root}/README.md"), {}
    if revision == CONVERTED:  # which has no card: its files are CONFIG/SPLIT/0000.parquet
        places = {os.path.dirname(source.name) for source in files.values()}
        for config, split in sorted(place.split("/") for place in places if place.count("/") == 1):
            entry = {"split": split.removeprefix("partial-"), "path": f"{config}/{split}/*.parquet"}
            configs.setdefault(config, {"data_files": []})["data_files"].append(entry)
    elif card:
        with tempfile.TemporaryDirectory() as folder:
            header = huggingface_hub.metadata_load(fetch(card, folder)) or {}
        configs = {entry["config_name"]: entry for entry in header.get("configs") or []}
    return configs


def choose_files(dataset, root, files, configs, config, split):
    """(config, its split's files) of a data set at `root`, by the rules of `datasets`."""
    from datasets import data_files, utils  # slow to import

    known = utils.metadata.MetadataConfigs(configs)
    config = config or known.get_default_config_name() or ("" if configs else "default")
    check_choice(dataset, "config", config, list(configs) or ["default"])
    # not asked of its builder, which looks for the files of every config, and there may be thousands
    entry = configs.get(config, {})
    base = "/".join(filter(None, (root, entry.get("data_dir"))))
    own = entry.get("data_files")
    patterns = data_files.sanitize_patterns(own) if own else data_files.get_data_patterns(base)
    found = data_files.DataFilesDict.from_patterns(patterns, base_path=base)
    check_choice(dataset, "split", split, list(map(str, found)))
    if elsewhere := {*found[split]} - {*files}:
        raise unclear(dataset, f"its card names {console.plain(min(elsewhere))}, which is not in the data set")
    sources = [files[path] for path in found[split] if is_data(files[path].name)]
    # those of the most common type, as `datasets` does; of two that are as common, the first one of TYPES
    counts = collections.Counter(file_type(source.name) for source in sources)
    main = max(TYPES, key=counts.__getitem__)
    chosen = [source for source in sources if file_type(source.name) == main]
    if not chosen:
        ends = sorted({suffix_of(files[path].name) for path in found[split]} - {""})
        raise unclear(dataset, f"it has no files that are read here, but {', '.join(ends[:5]) or 'none'}")
    in_splits = {files.get(path) for name in found if name != split for path in found[name]} | {*chosen}
    candidates = sources if configs else files.values()
    unused = [source.name for source in candidates if is_data(source.name) and source not in in_splits]
    if unused:
        such = console.plain(min(unused))
        print(f"note: {console.count(len(unused), 'file')} of {dataset} left out, such as {such}.")
    return config, chosen


def is_data(name):
    """Whether a file may hold the documents of a data set: those of other people's are no Markdown or source code."""
    is_read = file_type(name) not in ("", ".txt") or suffix_of(name) == ".txt"
    return is_read and not (NO_DATA.search(name) or ABOUT_DATA.search(name))


def check_choice(dataset, noun, value, known):
    """Raise UserError unless `value` is one of the `known` configs or splits."""
    if value not in known:
        wrong = f"no {noun} {value!r}" if value else f"several {noun}s"
        more = f" and {len(known) - 50:,} more" if len(known) > 50 else ""
        raise UserError(
            f"{dataset} has {wrong}. Choose one with --{noun}: {', '.join(known[:50]) or 'none'}{more}."
        )


def unclear(dataset, reason):
    """The error for a data set of which `datasets` cannot tell the files, or whose files are not read here."""
    return UserError(
        f"Which files of {dataset} hold its texts is not clear: {reason}. Fetch those that you want, and give them "
        f"with --input: {what_is_read()}. Where there is only a script, the hub may have converted the data set: then "
        f"its copy is read with --revision {CONVERTED}."
    )


def find_again(meta: dict[str, Any], options: Any) -> Found | None:
    """The files that an earlier run found, by its meta.json, if `options` ask for the same: the hub is not asked."""
    dataset, then, asked = meta["dataset"], meta["made_from"], meta.get("asked") or {}
    if options.input or not asked or options.split != then["split"]:
        return None
    if any(getattr(options, key) != value for key, value in asked.items()):
        return None
    repo, _ = ALIASES.get(dataset, (dataset, ""))
    found = [Source(*recorded, repo=repo, commit=then["revision"]) for recorded in then["sources"]]
    return Found(dataset, then["revision"], then["config"], then["split"], found)


# ----- Downloads ----------------------------------------------------------------------------------------


def retry(name: str, advice: str, function: Callable[[], Any]) -> Any:
    """Call `function()`, which fetches `name`, a second time if that may help; `advice` is for the user."""
    for attempt in (1, 2):
        begun = time.monotonic()
        try:
            return function()
        except Exception as error:  # the hub's client has renamed its network errors from version to version
            if getattr(error, "errno", None) in console.ADVICE:  # the disk's
                raise
            if refusal := REFUSALS.get(type(error).__name__):
                raise UserError(f"Could not download {name}: {refusal}") from None
            if attempt == 2 or time.monotonic() - begun > PATIENCE:
                wrong = console.plain(console.first_line(error))
                raise UserError(f"Could not download {name}: {wrong}. {advice}") from None
        time.sleep(RETRY_SECONDS)


def is_whole(file, digest):
    """Whether a file that is open has this digest, sha256 or git's sha1, if it is known."""
    size = file.seek(0, os.SEEK_END)
    file.seek(0)
    begun = hashlib.sha1(b"blob %d\0" % size) if len(digest) == 40 else hashlib.sha256()
    return not digest or hashlib.file_digest(file, lambda: begun).hexdigest() == digest


def fetch(source: Source, folder: str) -> str:
    """The path of a source's file: one of this machine, of the user's cache of the hub, or fetched into `folder`."""
    if source.path or not source.repo:
        return source.path
    import huggingface_hub

    place: Any = dict(repo_id=source.repo, filename=source.name, repo_type="dataset", revision=source.commit)
    for path in (huggingface_hub.try_to_load_from_cache(**place), os.path.join(folder, source.name)):
        if isinstance(path, str) and os.path.isfile(path):
            with open(path, "rb") as file:
                if is_whole(file, source.digest):
                    return path

    def load():
        # without a network this fails at once; hf_hub_download repeats the same request for 23 seconds
        huggingface_hub.get_hf_file_metadata(huggingface_hub.hf_hub_url(**place), timeout=TIMEOUT)
        path = huggingface_hub.hf_hub_download(**place, local_dir=folder)
        with open(path, "rb") as file:
            if is_whole(file, source.digest):
                return path
        os.remove(path)
        raise ConnectionError(f"its {source.size:,} bytes are not those that the hub lists")

    return retry(f"{source.name} of {source.repo}", NO_NETWORK, load)


def fetched(sources: list[Source], folder: str, first: int, ahead: bool) -> Iterator[tuple[int, Source]]:
    """Yield (number, source with the path of its file) from the first one on; those of the hub come into `folder`.

    ahead: whether one file is fetched while the one before it is read.
    """
    coming = None
    for number in range(first, len(sources)):
        source = sources[number]
        path = coming.result() if coming else fetch(source, folder)
        if ahead and number + 1 < len(sources):
            coming = in_background(fetch, sources[number + 1], folder)
        yield number, source._replace(path=path)


def in_background(function, *args):
    """Call a function in a thread; unlike that of an executor, it does not make an exit wait for a download."""
    coming = Future()

    def run():
        try:
            coming.set_result(function(*args))
        except BaseException as error:  # for the thread that waits
            coming.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return coming


def remove_fetched(sources: list[Source], folder: str) -> None:
    """Remove the files of these sources, which will not be read again; those of the user stay."""
    for source in sources:
        if not source.path:
            Path(folder, source.name).unlink(missing_ok=True)


def download(url: str, path: str, digest: str, advice: str) -> None:
    """Download `url` to `path`, whole or not at all: with this digest. `advice` is what to do if that fails."""

    def load():
        with urllib.request.urlopen(url, timeout=TIMEOUT) as response:
            content = response.read()
        if not is_whole(io.BytesIO(content), digest):
            raise ConnectionError(f"the {len(content):,} bytes that came are not those of the file")
        return content

    content = retry(url, advice, load)
    os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
    with atomic_write(path) as file:
        file.write(content)
