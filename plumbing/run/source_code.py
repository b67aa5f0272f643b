"""The file that trains, train_gpt2.py or a changed copy of it: what a run keeps of it, and whether it has changed."""

import ast
import contextlib
import functools
import hashlib
import importlib
import importlib.util
import inspect
import re
import sys
from pathlib import Path
from typing import Any

from plumbing.cli.console import ROOT, UserError, first_line, output_of
from plumbing.files import atomic_write

NAME = "train_gpt2.py"
COPY = re.compile(r".+-[0-9a-f]{8}\.py")  # the names of the copies that a run keeps
Code = dict[str, str]  # of a file: its "name", that of its "copy" in the run's folder, and a "hash" of its code


def file_of(config_class: type) -> Path:
    """The file that defines this GPTConfig or TrainConfig, and so the one that runs."""
    return Path(inspect.getfile(config_class)).resolve()


@functools.cache
def source_of(config_class: type) -> bytes:
    """That file as it is when this is first called: it may be edited while the run goes on."""
    return file_of(config_class).read_bytes()


@functools.cache
def describe(config_class: type) -> Code:
    """What a checkpoint says of the file that trained it."""
    path, source = file_of(config_class), source_of(config_class)
    copy = f"{path.stem}-{hashlib.sha256(source).hexdigest()[:8]}.py"
    return {"name": path.name, "copy": copy, "hash": hash_of(source)}


def git(*words: str) -> str:
    """What git says of this program's folder; "" if that is not a clone."""
    return output_of("git", "-C", str(ROOT), *words)


def git_commit() -> str:
    """The commit of this program, with "-dirty" if it was changed since; "" if that is not known."""
    return git("describe", "--always", "--dirty", "--abbrev=40")


class WithoutSettings(ast.NodeTransformer):
    """Leaves out docstrings, the fields of dataclasses, and PRESETS: what a flag could say as well."""

    def visit_Expr(self, node):
        return None if isinstance(node.value, ast.Constant) else node

    def visit_Assign(self, node):
        return None if ast.unparse(node.targets[0]) == "PRESETS" else node

    def visit_ClassDef(self, node):
        if any("dataclass" in ast.unparse(each) for each in node.decorator_list):
            node.body = [each for each in node.body if not isinstance(each, ast.AnnAssign)]
        return self.generic_visit(node)


@functools.cache
def hash_of(source: bytes) -> str:
    """The same for two files that differ in comments, docstrings and settings alone."""
    code = ast.unparse(WithoutSettings().visit(ast.parse(source)))
    return hashlib.sha256(code.encode()).hexdigest()[:16]


def keep_copy(config: Any) -> None:
    """Keep the file that runs in the run's folder, once per version: to be read, as it is never run from there."""
    path = Path(config.out_dir, describe(type(config))["copy"])
    if path.exists():
        return
    try:
        with atomic_write(path) as file:
            file.write(source_of(type(config)))
    except UserError as error:  # the run itself may need less room
        print(f"note: {error} The run goes on, but keeps no copy of its source.", flush=True)


def copies_in(out_dir: Path) -> dict[Path, str]:
    """{path of a copy that the run in out_dir keeps: the hash of its code}."""
    found = {}
    for path in out_dir.glob("*.py"):
        if COPY.fullmatch(path.name):
            with contextlib.suppress(SyntaxError, ValueError):  # then it is another file, as it can't have run
                found[path] = hash_of(path.read_bytes())
    return found


def compare(saved: Code, config_class: type, source: str, may_be_a_copy: bool) -> None:
    """Say so if the code that is to use what is in `source` is not that which trained it; {} is not known.

    may_be_a_copy: whether a run goes on, which a file of another name may do; else that is a UserError.
    """
    own = describe(config_class)
    if not saved or saved.get("hash") == own["hash"]:  # without a hash, it is an earlier version's
        return
    copy = f"The run's folder has a copy of what trained it: {saved['copy']}."
    remedy = f"save it beside {own['name']}" if may_be_a_copy else "give it with --code"
    if saved["name"] != own["name"] and not may_be_a_copy:
        raise UserError(
            f"The model in {source} was trained by {saved['name']}, whose code is not that of {own['name']}. Add "
            f"--code {saved['name']}. {copy}"
        )
    print(
        f"note: {own['name']} has changed since {source} was trained by {saved['name']}, so the results may differ. "
        f"{copy} To use that, {remedy}.",
        file=sys.stdout if may_be_a_copy else sys.stderr,  # what sample.py writes to stdout are samples
        flush=True,
    )


def load(path: str) -> Any:
    """The module train_gpt2, or the changed copy of it that --code names."""
    name = Path(path).stem
    if path == NAME:
        return importlib.import_module(name)
    spec = importlib.util.spec_from_file_location(name, path)
    remedy = "Give the trainer's file that trained the model."
    if not Path(path).is_file() or not spec or not spec.loader:
        raise UserError(f"--code {path} is not a Python file. {remedy}")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except (SyntaxError, ImportError) as error:
        raise UserError(f"--code {path} cannot be imported: {first_line(error)}. {remedy}") from None
    if not hasattr(module, "load_model"):
        raise UserError(f"--code {path} has no load_model, so it is no trainer. {remedy}")
    return module
