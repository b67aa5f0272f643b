"""The file that trains, train_gpt2.py or a changed copy of it: what a run keeps of it, and whether it has changed."""

import functools
import hashlib
import importlib
import importlib.util
import inspect
import re
import sys
from pathlib import Path
from typing import Any

from plumbing.cli.console import ROOT, UserError, first_line, note, output_of
from plumbing.files import atomic_write

NAME = "train_gpt2.py"
COPY = re.compile(r".+-[0-9a-f]{8}\.py")  # the names of the copies that a run keeps
# the modules of this program that a trainer may import, and that the commit in run.txt stands for
PROGRAM = {"bench", "contamination", "fineweb", "hellaswag", "plumbing", "sample", "smoltalk", "tokenizer"}
# {file: the name of its copy in the run's folder, which has a hash of its bytes}, the trainer first
Code = dict[str, str]


def file_of(config_class: type) -> Path:
    """The file that defines this GPTConfig or TrainConfig, and so the one that runs."""
    return Path(inspect.getfile(config_class)).resolve()


@functools.cache
def source_of(config_class: type) -> bytes:
    """The trainer's file as it was when this was asked first: before torch was imported, which takes seconds."""
    return file_of(config_class).read_bytes()


@functools.cache
def sources_of(config_class: type) -> dict[str, bytes]:
    """{name: content} of the trainer's file and of the modules beside it that are imported, at the first call.

    A module of the same name that was imported from elsewhere in the place of one beside the trainer is named.
    """
    path = file_of(config_class)
    sources = {path.name: source_of(config_class)}
    for name, module in sorted(sys.modules.items()):
        if path.parent == ROOT and name.split(".")[0] in PROGRAM:
            continue
        stem = path.parent / name.replace(".", "/")
        for beside in (stem.with_name(f"{stem.name}.py"), stem / "__init__.py"):
            imported_from = getattr(module, "__file__", None)
            if not imported_from or not beside.is_file() or beside == path:
                continue
            if beside.samefile(imported_from):
                sources[beside.relative_to(path.parent).as_posix()] = beside.read_bytes()
            elif Path(imported_from).suffix == ".py":
                note(f"{name} is the module in {imported_from}, and not the one beside {path.name}.")
    return sources


def describe(config_class: type) -> Code:
    """What a checkpoint and run.txt say of the code that runs."""
    return {name: copy_of(name, source) for name, source in sources_of(config_class).items()}


def copy_of(name: str, source: bytes) -> str:
    """The name of a source's copy: layers/rotary.py -> layers.rotary-0123abcd.py"""
    stem = name.removesuffix(".py").replace("/", ".")
    return f"{stem}-{hashlib.sha256(source).hexdigest()[:8]}.py"


def is_same(saved: Code, config_class: type) -> bool:
    """Whether the code that runs has the contents of the saved one: a copy of the trainer may have any name."""
    hashes = [[copy.rpartition("-")[2] for copy in code.values()] for code in (saved, describe(config_class))]
    return hashes[0] == hashes[1]


def git(*words: str) -> str:
    """What git says of this program's folder; "" if that is not a clone."""
    return output_of("git", "-C", str(ROOT), *words)


def git_commit() -> str:
    """The commit of this program, with "-dirty" if it was changed since; "" if that is not known."""
    return git("describe", "--always", "--dirty", "--abbrev=40")


def keep_copies(config: Any) -> None:
    """Keep the sources that run in the run's folder, once per version: to be read, as they are never run from there."""
    for name, source in sources_of(type(config)).items():
        path = Path(config.out_dir, copy_of(name, source))
        if not path.exists():
            with atomic_write(path) as file:
                file.write(source)


def compare(saved: Code, config_class: type, source: str, *, goes_on: bool) -> None:
    """Say so if the code that is to use what is in `source` is not that which trained it; {} is not known.

    A run goes on with the code of any file. Else train_gpt2.py does not stand for a changed copy: that is a UserError.
    """
    if not saved or is_same(saved, config_class):
        return
    own = describe(config_class)
    then, now = next(iter(saved)), next(iter(own))
    kept = f"The run's folder has a copy of what trained it: {', '.join(saved.values())}."
    if then != now == NAME and not goes_on:
        raise UserError(
            f"The model in {source} was trained by {then}, whose code is not that of {now}. Add --code {then}. {kept}"
        )
    changed = [name for name in {**own, **saved} if own.get(name) != saved.get(name)]
    note(
        f"{source} was trained by other code than runs now ({', '.join(changed)}), so results may differ. {kept}",
        file=sys.stdout if goes_on else sys.stderr,  # what sample.py writes to stdout are samples
    )


def import_trainer(path: str) -> Any:
    """The module train_gpt2 or, if it is not "", the changed copy of it that --code names."""
    if not path:
        return importlib.import_module(Path(NAME).stem)
    remedy = "Give the trainer's file that trained the model."
    # a name that no import asks for: the file may be called torch.py
    name = f"{Path(path).stem} of --code"
    spec = importlib.util.spec_from_file_location(name, path)
    if not (path.endswith(".py") and Path(path).is_file() and spec and spec.loader):
        raise UserError(f"--code {path} is not a Python file (*.py). {remedy}")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(Path(path).resolve().parent))  # the modules beside it, as where it trained
    try:
        spec.loader.exec_module(module)
    except (SyntaxError, ImportError) as error:
        raise UserError(f"--code {path} cannot be imported: {first_line(error)}. {remedy}") from None
    except SystemExit:
        raise UserError(f"--code {path} ends the program when it is imported. {remedy}") from None
    if not hasattr(module, "load_model"):
        raise UserError(f"--code {path} has no load_model, so it is no trainer. {remedy}")
    return module
