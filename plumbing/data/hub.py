"""Find the files of a split of a data set on the hub.

The library `datasets` decides by the data set's card and its file names. The hub is asked once, and later starts use
the same commit.
"""

import collections
import os
import re
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from plumbing.cli import console
from plumbing.cli.console import UserError
from plumbing.data import downloads, python_docs
from plumbing.data.inputs import (
    NO_DATA,
    TYPES,
    Source,
    check_names,
    file_type,
    list_inputs,
    suffix_of,
    supported_files,
)

# texts about the data, in many data sets; two of them would outnumber a single table
ABOUT_DATA = re.compile(
    r"(?i)(^|/)(licen[cs]e|notice|readme|requirements|changelog|citation|authors)\b[^/]*\.txt$"
)
ALIASES = {"fineweb-edu": ("HuggingFaceFW/fineweb-edu", "sample-10BT")}  # {--dataset: (name on the hub, config)}
CONVERTED = "refs/convert/parquet"  # the branch with the hub's own Parquet copy of many data sets


class Files(NamedTuple):
    """The files of a split of a data set, or the user's own."""

    dataset: str  # its full name
    sources: list[Source]
    commit: str = ""  # on the hub
    config: str = ""
    split: str = ""


def find_files(options: Any) -> Files:
    """Find the files that a script's options name: input, or dataset, config, split and revision."""
    if options.input:
        return Files("input", list_inputs(options.input))
    if options.dataset == "python-docs":
        return Files("python-docs", [Source(python_docs.NAME)])
    dataset, config = ALIASES.get(options.dataset, (options.dataset, options.config))
    repo, commit, files = downloads.retry(
        dataset, downloads.NO_NETWORK, lambda: list_hub(dataset, options.revision)
    )
    check_names(repo, list(files.values()))
    root = f"hf://datasets/{repo}@{commit}"
    script = f"{os.path.basename(repo)}.py"
    if f"{root}/{script}" in files:  # `datasets` refuses it, too: what lies beside it may be anything
        raise unclear(repo, f"it is a script, {script}, which is not run")
    try:
        configs = read_configs(root, files, options.revision)
        config = choose_config(repo, configs, config)
        sources = choose_files(repo, root, files, configs=configs, config=config, split=options.split)
    except UserError:
        raise
    except Exception as error:  # of many kinds, such as YAML's
        raise unclear(repo, console.plain(console.first_line(error))) from None
    name = repo if dataset == options.dataset else options.dataset
    return Files(name, sources, commit=commit, config=config, split=options.split)


def list_hub(dataset: str, revision: str) -> tuple[str, str, dict[str, Source]]:
    """List a data set's files: (its full name, commit, {address: Source})."""
    import huggingface_hub  # slow to import

    # before version 1, huggingface_hub's client has no hooks
    hooks = getattr(huggingface_hub.get_session(), "event_hooks", {"request": [set_timeout]})["request"]
    if set_timeout not in hooks:
        hooks.append(set_timeout)
    info: Any = huggingface_hub.HfApi().dataset_info(dataset, revision=revision or None)
    root = f"datasets/{info.id}@{info.sha}"
    # subtle: fsspec gives `datasets` the same object, so this listing is cached for it
    tree: Any = huggingface_hub.HfFileSystem().find(root, detail=True)
    files = {}
    for path, entry in tree.items():
        digest = entry["lfs"].sha256 if entry["lfs"] else entry["blob_id"]
        name = path.removeprefix(f"{root}/")
        files[f"hf://{path}"] = Source(name, entry["size"], digest, repo=info.id, commit=info.sha)
    return info.id, info.sha, files


def set_timeout(request: Any) -> None:
    """Limit the time of a request of the hub's client. It would wait forever for a list of files."""
    request.extensions["timeout"] = dict.fromkeys(("connect", "read", "write", "pool"), downloads.TIMEOUT)


def read_configs(root: str, files: Mapping[str, Source], revision: str) -> dict[str, Any]:
    """{config: its entry in the data set's card, which may name its files}; {} without a card."""
    import huggingface_hub

    card = files.get(f"{root}/README.md")
    configs = {}
    if revision == CONVERTED:  # no card: its files are CONFIG/SPLIT/0000.parquet
        folders = {os.path.dirname(source.name) for source in files.values()}
        for folder in sorted(folder for folder in folders if folder.count("/") == 1):
            config, split = folder.split("/")
            entry = {"split": split.removeprefix("partial-"), "path": f"{folder}/*.parquet"}
            configs.setdefault(config, {"data_files": []})["data_files"].append(entry)
    elif card:
        with tempfile.TemporaryDirectory() as folder:
            header = huggingface_hub.metadata_load(downloads.fetch(card, folder)) or {}
        configs = {entry["config_name"]: entry for entry in header.get("configs") or []}
    return configs


def choose_config(repo: str, configs: Mapping[str, Any], config: str) -> str:
    """The named config or, without a name, the default one. UserError if there is none."""
    from datasets import utils  # slow to import

    if not configs:
        check_choice(repo, "config", config or "default", known=["default"])
        return "default"
    config = config or utils.metadata.MetadataConfigs(configs).get_default_config_name() or ""
    check_choice(repo, "config", config, known=list(configs))
    return config


def choose_files(
    repo: str, root: str, files: Mapping[str, Source], *, configs: Mapping[str, Any], config: str, split: str
) -> list[Source]:
    """The files of a split of the data set at `root`, by the rules of `datasets`."""
    from datasets import data_files  # slow to import

    # the builder of `datasets` would look for the files of every config, and there may be thousands
    entry = configs.get(config, {})
    base = "/".join(filter(None, (root, entry.get("data_dir"))))
    named = entry.get("data_files")
    patterns = data_files.sanitize_patterns(named) if named else data_files.get_data_patterns(base)
    splits = data_files.DataFilesDict.from_patterns(patterns, base_path=base)
    check_choice(repo, "split", split, known=list(map(str, splits)))
    if elsewhere := {*splits[split]} - {*files}:
        raise unclear(repo, f"its card names {console.plain(min(elsewhere))}, which is not in the data set")
    sources = [files[path] for path in splits[split] if is_data(files[path].name)]
    # keep the most common type, as `datasets` does; in a tie, the first in TYPES
    counts = collections.Counter(file_type(source.name) for source in sources)
    main = max(TYPES, key=counts.__getitem__)
    chosen = [source for source in sources if file_type(source.name) == main]
    if not chosen:
        endings = sorted({suffix_of(files[path].name) for path in splits[split]} - {""})
        raise unclear(repo, f"no program here reads {', '.join(endings[:5]) or 'its'} files")
    used = {source.name for source in chosen}
    for name, paths in splits.items():
        if name != split:
            used |= {files[path].name for path in paths if path in files}
    candidates = sources if configs else files.values()
    unused = [source.name for source in candidates if is_data(source.name) and source.name not in used]
    if unused:
        console.note(f"{console.count(len(unused), 'file')} of {repo} left out, such as {min(unused)}.")
    return chosen


def is_data(name: str) -> bool:
    """Whether a file of someone else's data set may hold documents. Markdown and source code do not count."""
    if NO_DATA.search(name) or ABOUT_DATA.search(name):
        return False
    return file_type(name) not in ("", ".txt") or suffix_of(name) == ".txt"


def check_choice(repo: str, noun: str, value: str, *, known: Sequence[str]) -> None:
    """Raise UserError unless `value` is one of the `known` configs or splits."""
    if value not in known:
        wrong = f"no {noun} {value!r}" if value else f"several {noun}s"
        more = f" and {len(known) - 50:,} more" if len(known) > 50 else ""
        raise UserError(
            f"{repo} has {wrong}. Choose one with --{noun}: {', '.join(known[:50]) or 'none'}{more}."
        )


def unclear(repo: str, reason: str) -> UserError:
    """The error for a data set if `datasets` can't tell which files to use, or no program here reads them."""
    return UserError(
        f"It is not clear which files of {repo} hold its texts: {reason}. Download the files you want, and name them "
        f"with --input: {supported_files()}. If the data set is a script, the hub may have a converted copy: add "
        f"--revision {CONVERTED}."
    )


def recorded_files(meta: Any, options: Any) -> Files | None:
    """The files recorded in meta.json if `options` ask for the same data. Then the hub need not be asked again."""
    if options.input or not meta.asked or options.split != meta.made_from["split"]:
        return None
    if any(getattr(options, key) != value for key, value in meta.asked.items()):
        return None
    repo, _ = ALIASES.get(meta.dataset, (meta.dataset, ""))
    commit = meta.made_from["revision"]
    sources = [
        Source(name, size, digest, repo=repo, commit=commit) for name, size, digest in meta.made_from["sources"]
    ]
    check_names(repo, sources)
    return Files(meta.dataset, sources, commit=commit, config=meta.made_from["config"], split=options.split)
