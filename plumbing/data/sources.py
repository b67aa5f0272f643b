"""Which files a data set is made of, people's own or the hub's, and how those of the hub come to this machine.

Of a data set of the hub, and of a clone of one, the library `datasets` says which files a split has: its own rules are
applied to a folder of empty files with the same names. The hub's client fetches them, at the commit that was asked for
once; what is in them is read in readers.py.
"""

import glob
import hashlib
import json
import os
import platform
import re
import shutil
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path, PureWindowsPath
from typing import Any, NamedTuple

from plumbing.cli import console
from plumbing.cli.console import UserError
from plumbing.files import atomic_write, file_sample, named_errors, open_regular, remove_folder

# what is never input: files beside shards, and those that tell of a data set or made it
NO_DATA = re.compile(
    r"(^|[/\\])((meta|tokenizer\.tiktoken|dataset_infos?|dataset_dict|state)\.json|config\.json|\.huggingface\.yaml)$"
)
# what stands beside the data in many sets; two of these would outnumber one table
ABOUT_DATA = re.compile(
    r"(?i)(^|/)(licen[cs]e|notice|readme|requirements|changelog|citation|authors)\b[^/]*\.txt$"
)
# of a config in a card, those that say which files it has
CONFIG_FIELDS = ("config_name", "data_files", "data_dir")
COMPRESSIONS = {".gz": "gzip", ".zst": "zstd"}
TYPES = {  # how a file is read: the ends of the names of such files; HTML and source code are text as they are
    ".parquet": ".parquet",
    ".jsonl": ".jsonl .json .ndjson",
    ".csv": ".csv .tsv",
    ".txt": ".txt .md .html .py .text .markdown .rst .org .adoc .tex .htm .xml .pyi .js .jsx .ts .tsx .c .h .cc"
    " .cpp .hpp .cu .cs .java .go .rs .rb .php .swift .kt .scala .lua .jl .pl .r .sql .sh .css",
}
MAX_HASHED = 2**22  # bytes; only a sample of a larger local file is hashed
TIMEOUT = 10  # seconds without an answer
RETRY_SECONDS = 2.0  # before the second attempt
PATIENCE = 20  # seconds; what fails later than this was tried several times by the hub's client already
PYTHON_DOCS = f"the documentation of Python {platform.python_version()}"
# {--dataset: (its name on the hub, the folder of it that is read)}
ALIASES = {"fineweb-edu": ("HuggingFaceFW/fineweb-edu", "sample/10BT")}
CONVERTED = "refs/convert/parquet"  # the branch in which the hub keeps its own copy of many data sets


class Source(NamedTuple):
    """A file to read."""

    name: str  # its path, on this machine or in a data set of the hub
    size: int = 0  # bytes; 0 if unknown
    digest: str = ""  # of a local file short hashes of its start and of a sample, of the hub's what its tree has
    path: str = ""  # on this machine; `Downloads` fills it in for those of the hub
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


def example(flag: str, value: str) -> str:
    """A sentence with the command that was typed and one more flag; of a flag that is typed twice, the last counts."""
    return f"For example: {' '.join(map(console.quote_group, ['python', *sys.argv, (flag, value)]))}"


def file_type(name: str) -> str:
    """The key of TYPES for a file's name, "" if there is none: "a/b.json.gz" -> ".jsonl"."""
    ending = suffix_of(name)
    return next((kind for kind, endings in TYPES.items() if ending and ending in endings.split()), "")


def suffix_of(name: str) -> str:
    """The end of a file's name, without that of its compression: "a/B.TXT.gz" -> ".txt"."""
    stem, suffix = os.path.splitext(str(name).lower())
    return os.path.splitext(stem)[1] if suffix in COMPRESSIONS else suffix


def what_is_read(types: Iterable[str] = tuple(TYPES)) -> str:
    ends = ", ".join(end for kind in types for end in TYPES[kind].split()[:4])
    others = " and other text and source code" if ".txt" in types else ""
    return f"files that end in {ends}{others} (.gz and .zst are unpacked)"


# ----- Files on this machine ----------------------------------------------------------------------------


def list_inputs(patterns: Sequence[str], types=tuple(TYPES), config="", split="train") -> list[Source]:
    """The files named by `patterns`: a file, a folder's files, a glob's matches, sorted by name; a data set's split."""
    found = []
    for pattern in patterns:
        names = list_data_set(pattern, config, split)
        if names is None and (config or split != "train"):
            raise UserError(f"{pattern} is no data set with splits. Leave --config and --split out.")
        found += [local_source(name) for name in names or list_names(pattern, types)]
    return found


def list_names(pattern, types):
    """The paths of the files of these types that a path or a glob names."""
    is_folder = os.path.isdir(pattern)
    names = [pattern]
    if is_folder or not os.path.lexists(pattern):
        places = os.path.join(glob.escape(pattern), "*") if is_folder else pattern
        names = sorted(glob.glob(places, recursive=True))
    files = [name for name in names if not os.path.isdir(name)]
    if "**" in pattern:  # it also matches the folders whose files it takes
        names = files
    kept = [name for name in files if file_type(name) in types and not NO_DATA.search(name)]
    if pattern not in names:  # a README tells of the others, unless it is all there is
        kept = [name for name in kept if os.path.basename(name).lower() != "readme.md"] or kept
    left_out = sorted(set(names) - set(kept))
    if not kept:
        wrong = f"{left_out[0]} is not of a type that is read here" if names else f"No file matches {pattern}"
        if re.match(r"\w[\w+.-]+:/", pattern):
            wrong = f"Addresses are not read here: fetch the file first, as with curl -LO {pattern}"
        advice = "A data set of the hub is for fineweb.py and smoltalk.py: --dataset OWNER/NAME."
        raise UserError(f"{wrong}. Give {what_is_read(types)}. {advice}")
    if left_out:
        print(f"note: {len(left_out)} of {len(names)} names in {pattern} are left out, such as {left_out[0]}.")
    return kept


def local_source(name):
    """A local file with hashes of its first bytes and of its contents, or of a sample of a large file."""
    with named_errors(name), open_regular(name) as file:
        size = os.fstat(file.fileno()).st_size
        start = file.read(4096)
        contents = start + file.read() if size <= MAX_HASHED else file_sample(name)
    if start.startswith(b"version https://git-lfs.github.com/spec/"):
        raise UserError(f"{name} only says where Git LFS keeps the file. Fetch it: git lfs pull, in that clone.")
    digest = "".join(hashlib.sha256(part).hexdigest()[:8] for part in (start, contents))
    return Source(name, size, digest, path=name)


# ----- Data sets on this machine: a clone of one of the hub's, or a folder of save_to_disk --------------


def list_data_set(folder, config, split):
    """The paths of a split's files if `folder` holds a data set, else None."""
    there = set(os.listdir(folder)) if os.path.isdir(folder) else set()
    if "dataset_dict.json" in there or {"dataset_info.json", "state.json"} <= there:
        return list_saved(folder, split)
    if "README.md" not in there:
        return None
    names, card = names_below(folder), Path(folder, "README.md").read_text(encoding="utf-8", errors="replace")
    has_header = re.match(r"\ufeff?---\s*\n", card)
    is_clone = has_header or any(name.startswith("data/") for name in names)
    if not is_clone or not any(is_table_or_text(name) for name in names):
        return None
    return [os.path.join(folder, name) for name in choose_files(folder, names, card, config, split)[1]]


def names_below(folder):
    """The names of the files below a folder, as a data set of the hub has them; none below hidden folders."""
    paths = [path.relative_to(folder) for path in sorted(Path(folder).rglob("*")) if path.is_file()]
    return [path.as_posix() for path in paths if not any(part.startswith(".") for part in path.parts[:-1])]


def is_table_or_text(name):
    """Whether a file may hold the documents of a data set: those of other people's are no Markdown or source code."""
    return file_type(name) not in ("", ".txt") or suffix_of(name) == ".txt"


def list_saved(folder, split):
    """The Arrow files of a split in a folder that `Dataset.save_to_disk` or `DatasetDict.save_to_disk` wrote."""
    import datasets  # slow to import

    try:
        saved: Any = datasets.load_from_disk(folder)
    except Exception as error:  # of many kinds
        reason = console.first_line(error)
        raise UserError(f"{folder} is damaged: {console.plain(reason)}. Save the data set again.") from None
    if not isinstance(saved, dict):  # a single split, which may be asked for by its name
        saved = {str(saved.split or "train"): saved, "train": saved}
    check_choice(folder, "split", split, list(saved))
    return [file["filename"] for file in saved[split].cache_files]


def check_choice(dataset, noun, value, known):
    """Raise UserError unless `value` is one of the `known` configs or splits."""
    if value not in known:
        wrong = f"no {noun} {value!r}" if value else f"several {noun}s"
        first = example(f"--{noun}", next(iter(known), value))
        more = f" and {len(known) - 50:,} more" if len(known) > 50 else ""
        raise UserError(f"{dataset} has {wrong}. Choose from {', '.join(known[:50]) or 'none'}{more}. {first}")


# ----- Which files a split has --------------------------------------------------------------------------


def choose_files(
    dataset: str, names: Sequence[str], card: str, config: str, split: str
) -> tuple[str, list[str]]:
    """(config, names of its split's files) of a data set that has files of these names, by the rules of `datasets`."""
    import datasets  # slow to import

    datasets.utils.logging.set_verbosity_error()
    check_names(dataset, names)
    names = [name for name in names if not (NO_DATA.search(name) or ABOUT_DATA.search(name))]
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as cache:
        for name in names:
            path = Path(folder, name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()
        known = configs_in(dataset, card)
        try:
            chosen = config or known.get_default_config_name() or ("" if known else "default")
            check_choice(dataset, "config", chosen, list(known) or ["default"])
            # with the other configs, of which there may be thousands, it would take minutes
            header = {key: value for key, value in known.get(chosen, {}).items() if key in CONFIG_FIELDS}
            text = f"---\n{json.dumps({'configs': [header]})}\n---\n" if header else ""  # JSON is YAML, too
            Path(folder, "README.md").write_text(text, encoding="utf-8")
            builder: Any = datasets.load_dataset_builder(folder, cache_dir=cache)
        except UserError:
            raise
        except Exception as error:  # of many kinds, YAML's among them
            raise nothing_is_read(dataset, names, f" ({console.plain(console.first_line(error))})") from None
        found: Any = builder.config.data_files or {}
        by_split = {
            str(key): [Path(os.path.relpath(path, folder)).as_posix() for path in found[key]] for key in found
        }
    check_choice(dataset, "split", split, list(by_split))
    elsewhere = sorted({*by_split[split]} - {*names})
    if elsewhere:
        raise UserError(
            f"The card of {dataset} names files that are not in the data set, such as {console.plain(elsewhere[0])}. "
            "Fetch those that you trust, and give them with --input."
        )
    if not all(map(file_type, by_split[split])) or not by_split[split]:
        raise nothing_is_read(dataset, names)
    unused = set(filter(is_table_or_text, names)) - {name for files in by_split.values() for name in files}
    if unused and not re.search(r"(?m)^configs:", card):
        print(f"note: {console.count(len(unused), 'file')} of {dataset} in no split, such as {min(unused)}.")
    return chosen, by_split[split]


def configs_in(dataset, card):
    """The configs of which a card tells, {name: what it says}, as `datasets` keeps them."""
    import datasets  # slow to import
    import huggingface_hub

    try:
        entries = huggingface_hub.DatasetCard(card.lstrip("\ufeff")).data.get("configs") or []
        return datasets.utils.metadata.MetadataConfigs({entry["config_name"]: entry for entry in entries})
    except Exception as error:  # of many kinds, YAML's among them
        reason = console.plain(console.first_line(error))
        raise UserError(
            f"The header of the card of {dataset}, its README.md, cannot be read: {reason}. Fetch the files that you "
            "want, and give them with --input."
        ) from None


def check_names(dataset, names):
    """Raise UserError if a file of a data set would be put outside of the folder that is meant for it."""
    for name in names:
        path = PureWindowsPath(name)  # knows both kinds of slashes, and drives
        if path.anchor or ".." in path.parts or "\0" in name:
            raise UserError(
                f"{dataset} lists a file {console.plain(name)!r}, which would be written outside of its folder. Do not "
                "use this data set, and tell the hub."
            )


def nothing_is_read(dataset, names, reason=""):
    """The error for a data set without a file that is read here."""
    ends = sorted({suffix_of(name) for name in names} - {"", ".md", ".json", ".gitattributes"})
    return UserError(
        f"{dataset} has no files that are read here, but {', '.join(ends[:5]) or 'none'}{reason}. Give "
        f"{what_is_read()}. Images and sounds have no text column. Where there is only a script, the hub may have "
        f"converted the data set: then its copy is read with --revision {CONVERTED}."
    )


# ----- The hub ------------------------------------------------------------------------------------------


def check_data_set(name: str) -> None:
    """Raise UserError unless `name` can be that of a data set of the hub."""
    is_name = re.fullmatch(r"[\w-][\w.-]*(/[\w-][\w.-]*)?", name)
    if not is_name or os.path.isfile(name) or (file_type(name) and "/" not in name):
        raise UserError(
            f"{name!r} is not the name of a data set. It is OWNER/NAME, as the hub shows it: --dataset "
            f"OWNER/NAME. Your own files are given with --input {'FILES' if '://' in name else console.quote(name)}."
        )


def find(options: Any, types: tuple[str, ...] = tuple(TYPES)) -> Found:
    """The files that the options of a script name, by those called input, dataset, config, split and revision."""
    config, split, revision = options.config, options.split, options.revision
    if options.input:
        found = list_inputs(options.input, types, config, split)
        return Found("input", "", config, "" if split == "train" else split, found)
    if options.dataset == "python-docs":
        return Found("python-docs", "", "", "", [Source(PYTHON_DOCS)])
    dataset, folder = ALIASES.get(options.dataset, (options.dataset, ""))
    check_data_set(dataset)
    import huggingface_hub  # slow to import

    list_files = list_cache if huggingface_hub.is_offline_mode() else list_hub
    name, commit, files = list_files(huggingface_hub, dataset, revision, folder)
    card = converted_card(files) if revision == CONVERTED else ""
    if "README.md" in files:
        with tempfile.TemporaryDirectory() as temporary:
            path = fetch(files["README.md"], temporary)
            card = Path(path).read_text(encoding="utf-8", errors="replace")
    config, chosen = choose_files(name, list(files), card, config, split)
    return Found(options.dataset if folder else name, commit, config, split, [files[path] for path in chosen])


def list_hub(client, dataset, revision, folder):
    """(full name, commit, {path: source}) of the files of a data set of the hub, or of those in a folder of it."""

    def list_files():
        info = client.HfApi().dataset_info(dataset, revision=revision or None, timeout=TIMEOUT)
        # the client's own list_repo_tree waits for an answer without an end
        place = f"{info.id}/tree/{info.sha}/{folder}".rstrip("/")
        url, files = f"{client.constants.ENDPOINT}/api/datasets/{place}?recursive=true", {}
        while url:
            answer = client.get_session().get(url, headers=client.utils.build_hf_headers(), timeout=TIMEOUT)
            client.utils.hf_raise_for_status(answer)
            for entry in answer.json():
                if entry["type"] == "file":
                    digest = entry.get("lfs", entry)["oid"]
                    name, size = entry["path"], entry["size"]
                    files[name] = Source(name, size, digest, repo=info.id, commit=info.sha)
            url = answer.links.get("next", {}).get("url")
        return info.id, info.sha, files

    return ask(dataset, revision, list_files)


def list_cache(client, dataset, revision, folder):
    """The same, with HF_HUB_OFFLINE, of a data set in the user's cache."""
    place: dict[str, Any] = dict(repo_id=dataset, repo_type="dataset", revision=revision or None)
    try:
        cached = client.snapshot_download(**place, local_files_only=True)
    except (OSError, ValueError):
        raise UserError(
            f"HF_HUB_OFFLINE is set, and {dataset} is not in the cache. Unset it, or use --input or "
            "--dataset python-docs --tokenizer bytes."
        ) from None
    print(f"note: HF_HUB_OFFLINE is set: the files of {dataset} are those in the cache.")
    commit, files = os.path.basename(cached), {}
    for name in names_below(cached):
        path = os.path.join(cached, name)
        if name.startswith(folder):
            files[name] = Source(name, os.path.getsize(path), repo=dataset, commit=commit, path=path)
    return dataset, commit, files


def converted_card(names):
    """A card for the hub's converted branch, which has none: its files are CONFIG/SPLIT/0000.parquet."""
    configs = {}
    for config, split in sorted({tuple(name.split("/")[:2]) for name in names if name.count("/") == 2}):
        files = {"split": split.removeprefix("partial-"), "path": f"{config}/{split}/*.parquet"}
        configs.setdefault(config, []).append(files)
    entries = [{"config_name": config, "data_files": files} for config, files in configs.items()]
    return f"---\n{json.dumps({'configs': entries})}\n---\n"  # JSON is YAML, too


def find_again(meta: dict[str, Any], options: Any) -> Found | None:
    """The files that an earlier run found, by its meta.json, if `options` ask for the same: the hub is not asked."""
    then: dict[str, Any] = {"config": "", "revision": "", "split": ""} | meta["made_from"]
    then["dataset"] = meta["dataset"]
    typed = then | meta.get("asked", {})
    is_same = all(getattr(options, key) in (then[key], typed[key]) for key in ("dataset", "config", "revision"))
    if options.input or not (is_same and options.split == (then["split"] or "train") and then["revision"]):
        return None
    repo, _ = ALIASES.get(then["dataset"], (then["dataset"], ""))
    found = [Source(*recorded, repo=repo, commit=then["revision"]) for recorded in then["sources"]]
    return Found(then["dataset"], then["revision"], then["config"], then["split"], found)


def ask(dataset, revision, function, file=""):
    """Call `function()`, which asks the hub for a data set; its refusals become a UserError that says what to do."""
    from huggingface_hub import constants, errors

    own = " The folder of that name is read with --input." if os.path.exists(dataset) else ""
    refusals = {  # the first is also one of the second kind
        errors.GatedRepoError: f"{dataset} is gated: accept its conditions at {constants.ENDPOINT}/datasets/{dataset}, "
        "then log in: hf auth login",
        errors.RepositoryNotFoundError: f"The hub shows no data set {dataset}: there is none of that name, or it is "
        f"private. Check the name, or log in as one who may read it: hf auth login.{own}",
        errors.RevisionNotFoundError: f"{dataset} has no revision {revision!r}. Choose a commit, a branch or a tag "
        "that the hub shows.",
    }

    def call():
        try:
            return function()
        except tuple(refusals) as error:
            raise UserError(next(refusals[kind] for kind in refusals if isinstance(error, kind))) from None

    advice = "Check the network and repeat the command. Without one, use --input, or python-docs as bytes: "
    advice += "--dataset python-docs --tokenizer bytes."
    return retry(f"{file} of {dataset}" if file else dataset, advice, call)


def retry(name: str, advice: str, function: Callable[[], Any]) -> Any:
    """Call `function()`, which fetches `name`, a second time if that may help; `advice` is for the user."""
    for attempt in (1, 2):
        begun = time.monotonic()
        try:
            return function()
        except Exception as error:  # the hub's client has renamed its network errors from version to version
            cause = error.__cause__ if isinstance(error, UserError) else error
            if cause is None:  # it says what to do
                raise
            response: Any = getattr(cause, "response", None)
            status = getattr(cause, "code", None) or getattr(response, "status_code", None)
            number: Any = getattr(cause, "errno", None)  # of an error from the disk
            is_refused = status in (401, 403, 404)
            if is_refused:
                advice = "The file is not there, or you may not read it: check the address and your access."
            is_lasting = is_refused or number in console.ADVICE
            if attempt == 2 or is_lasting or time.monotonic() - begun > PATIENCE:
                wrong = console.plain(console.first_line(cause))
                advice = console.ADVICE.get(number, advice)
                raise UserError(f"Could not download {name}: {wrong}. {advice}") from None
            time.sleep(RETRY_SECONDS)


def is_whole(path, digest):
    """Whether a file is there and has this digest, sha256 or git's sha1, if it is known."""
    if not os.path.isfile(path) or len(digest) not in (40, 64):
        return os.path.isfile(path)
    begun = hashlib.sha1(b"blob %d\0" % os.path.getsize(path)) if len(digest) == 40 else hashlib.sha256()
    with open(path, "rb") as file:
        return hashlib.file_digest(file, lambda: begun).hexdigest() == digest


def fetch(source: Source, folder: str) -> str:
    """The path of a source's file: one of this machine, of the user's cache of the hub, or fetched into `folder`."""
    if source.path or not source.repo:
        return source.path
    import huggingface_hub

    place: Any = dict(repo_id=source.repo, filename=source.name, repo_type="dataset", revision=source.commit)
    cached: Any = huggingface_hub.try_to_load_from_cache(**place)
    for path in (cached, os.path.join(folder, source.name)):
        if isinstance(path, str) and is_whole(path, source.digest):
            return path

    def load():
        # without a network this fails at once; hf_hub_download repeats the same request for 23 seconds
        huggingface_hub.get_hf_file_metadata(huggingface_hub.hf_hub_url(**place), timeout=TIMEOUT)
        path = huggingface_hub.hf_hub_download(**place, local_dir=folder)
        if not is_whole(path, source.digest):
            os.remove(path)
            raise ConnectionError(f"its {source.size:,} bytes are not those that the hub lists")
        return path

    return ask(source.repo, source.commit, load, source.name)


class Downloads:
    """The files of a data set in order: those of the hub are fetched into a folder, one ahead of the one being read."""

    def __init__(self, sources: list[Source], folder: str, first: int = 0, ahead: bool = True):
        self.sources, self.folder, self.first, self.ahead = sources, folder, first, ahead
        check_names("It", [source.name for source in sources if source.repo])

    def __iter__(self) -> Iterator[tuple[int, Source]]:
        """Yield (number, source with the path of its file) from the first one on."""
        coming = None
        for number in range(self.first, len(self.sources)):
            source = self.sources[number]
            path = coming.result() if coming else fetch(source, self.folder)
            if self.ahead and number + 1 < len(self.sources):
                coming = self.begin(self.sources[number + 1])
            yield number, source._replace(path=path)

    def begin(self, source):
        """Fetch a file in a thread; unlike that of an executor, it does not make an exit wait for the download."""
        coming = Future()

        def run():
            try:
                coming.set_result(fetch(source, self.folder))
            except BaseException as error:  # for the thread that waits
                coming.set_exception(error)

        threading.Thread(target=run, daemon=True).start()
        return coming

    def remove_before(self, number: int) -> None:
        """Remove the files before this one, which will not be read again; those of the user stay."""
        for source in self.sources[self.first : number]:
            if not source.path:
                Path(self.folder, source.name).unlink(missing_ok=True)
        self.first = max(self.first, number)

    def close(self) -> None:
        remove_folder(self.folder)


def download(url: str, path: str, digest: str, advice: str) -> None:
    """Download `url` to `path`, whole or not at all: with this digest. `advice` is what to do if that fails."""

    def attempt():
        with urllib.request.urlopen(url, timeout=TIMEOUT) as response:
            # not before: a download that cannot begin leaves nothing
            os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
            with atomic_write(path) as file:
                shutil.copyfileobj(response, file)
                file.flush()
                if not is_whole(file.name, digest):
                    raise ConnectionError(f"the {file.tell():,} bytes that came are not those of the file")

    retry(url, advice, attempt)
