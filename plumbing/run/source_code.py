"""The trainer's source, train_gpt2.py or a changed copy: a run keeps a copy of it and notices changes."""

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
COPY = re.compile(r".+-[0-9a-f]{8}\.py")  # names of the copies that a run keeps
# modules of this program that a trainer may import; the commit in run.txt says which version of them ran
PROGRAM = {"bench", "contamination", "fineweb", "hellaswag", "plumbing", "sample", "smoltalk", "tokenizer"}
# {file: the name of its copy in the run's folder, with a hash of its bytes}, the trainer first
Code = dict[str, str]


def file_of(config_class: type) -> Path:
    """The trainer's file, which defines this GPTConfig or TrainConfig."""
    return Path(inspect.getfile(config_class)).resolve()


@functools.cache
def source_of(config_class: type) -> bytes:
    """The trainer's file as it was at the first call, before importing torch takes seconds."""
    return file_of(config_class).read_bytes()


@functools.cache
def sources_of(config_class: type) -> dict[str, bytes]:
    """{name: content} of the trainer's file and the imported modules beside it, at the first call.

    A note names each module that was imported from elsewhere although the trainer has one of that name beside it.
    """
    path = file_of(config_class)
    sources = {path.name: source_of(config_class)}
    names = {entry.stem for entry in path.parent.iterdir()}  # the disk is asked about these alone
    if path.parent == ROOT:
        names -= PROGRAM
    for name, module in sorted(sys.modules.items()):
        if name.split(".")[0] not in names:
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


def code_of(config_class: type) -> Code:
    """The running code, as a checkpoint and run.txt record it."""
    return {name: copy_of(name, source) for name, source in sources_of(config_class).items()}


def copy_of(name: str, source: bytes) -> str:
    """The name of a source's copy: layers/rotary.py -> layers.rotary-0123abcd.py"""
    stem = name.removesuffix(".py").replace("/", ".")
    return f"{stem}-{hashlib.sha256(source).hexdigest()[:8]}.py"


def hashes_in(code: Code) -> list[str]:
    return [copy.rpartition("-")[2] for copy in code.values()]


def is_same(saved: Code, config_class: type) -> bool:
    """Whether the saved code and the running code have equal contents: a copy of the trainer may have any name."""
    return hashes_in(saved) == hashes_in(code_of(config_class))


def git(*words: str) -> str:
    """The output of a git command in this program's folder; "" if that is not a clone."""
    return output_of("git", "-C", str(ROOT), *words)


def git_commit() -> str:
    """The commit of this program, with "-dirty" if files have changed since; "" if it is unknown."""
    return git("describe", "--always", "--dirty", "--abbrev=40")


def keep_copies(config: Any) -> None:
    """Copy the running sources to the run's folder, once per version. People read them; nothing runs them."""
    for name, source in sources_of(type(config)).items():
        path = Path(config.out_dir, copy_of(name, source))
        if not path.exists():
            with atomic_write(path) as file:
                file.write(source)


def check_code(saved: Code, config_class: type, source: str, *, goes_on: bool) -> None:
    """Print a note if the running code differs from the `saved` code (if known) that trained the model in `source`.

    A run that continues may use any file. Otherwise, train_gpt2.py instead of a changed copy is a UserError.
    """
    if not saved or is_same(saved, config_class):
        return
    own = code_of(config_class)
    then = next(iter(saved))
    now = next(iter(own))
    kept = f"The run's folder has a copy of the code that trained it: {', '.join(saved.values())}."
    if now == NAME and then != NAME and not goes_on:
        raise UserError(
            f"The model in {source} was trained by {then}, whose code differs from {now}. Add --code {then}. {kept}"
        )
    changed = [name for name in {**own, **saved} if own.get(name) != saved.get(name)]
    note(
        f"{source} was trained by other code ({', '.join(changed)}), so results may differ. {kept}",
        file=sys.stdout if goes_on else sys.stderr,  # sample.py writes samples to stdout
    )


def import_trainer(path: str) -> Any:
    """The module train_gpt2 or, if `path` is not "", the changed copy that --code names."""
    if not path:
        return importlib.import_module(Path(NAME).stem)
    remedy = "Give the file that trained the model."
    # a name that no import statement uses: the file may be called torch.py
    name = f"{Path(path).stem} of --code"
    spec = importlib.util.spec_from_file_location(name, path)
    is_python = path.endswith(".py") and Path(path).is_file()
    if not is_python or not spec or not spec.loader:
        raise UserError(f"--code {path} does not name a Python file (*.py). {remedy}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    sys.path.insert(0, str(Path(path).resolve().parent))  # for the modules beside it
    try:
        spec.loader.exec_module(module)
    except (SyntaxError, ImportError) as error:
        raise UserError(f"--code {path} cannot be imported: {first_line(error)}. {remedy}") from None
    except SystemExit:
        raise UserError(f"--code {path} ends the program when it is imported. {remedy}") from None
    if not hasattr(module, "load_model"):
        raise UserError(f"--code {path} has no load_model, so it is not a trainer. {remedy}")
    return module
