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
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from plumbing.cli.console import ROOT, UserError, first_line, output_of
from plumbing.files import atomic_write

NAME = "train_gpt2.py"
COPY = re.compile(r".+-[0-9a-f]{8}\.py")  # the names of the copies that a run keeps
# the modules of this program that a trainer may import, and that the commit in run.txt stands for
PROGRAM = {"contamination", "fineweb", "hellaswag", "plumbing", "sample", "smoltalk", "tokenizer"}
# of a file: its "name", that of its "copy" in the run's folder, a "hash" of its code with that of the modules that it
# imports from beside it, and the copies of these "modules", by their names
Code = dict[str, Any]


def file_of(config_class: type) -> Path:
    """The file that defines this GPTConfig or TrainConfig, and so the one that runs."""
    return Path(inspect.getfile(config_class)).resolve()


@functools.cache
def sources_of(config_class: type) -> dict[str, bytes]:
    """{name: content} of that file and of the modules that it imports from beside it.

    They may be edited while the run goes on, or while torch is imported, so what counts is the first call.
    """
    path = file_of(config_class)
    sources: dict[str, bytes] = {}
    waiting = [(path.parent, path.name)]
    while waiting:
        folder, name = waiting.pop(0)
        if name not in sources:
            source = (folder / name).read_bytes()
            with contextlib.suppress(
                SyntaxError, ValueError
            ):  # what cannot be read is imported in a `try` at most
                waiting += imported(source, folder, name)
                sources[name] = source
    return sources


def imported(source: bytes, folder: Path, name: str) -> Iterator[tuple[Path, str]]:
    """(folder, name in it) of each module that a source imports from its folder or from this program's."""
    for node in ast.walk(ast.parse(source, name)):
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):  # one dot is the package in which the source is
            package = name.split("/")[: -node.level] if node.level else []
            base = [*package, *filter(None, [node.module])]
            modules = [".".join([*base, alias.name]) for alias in node.names]
        else:
            continue
        for words in [module.split(".") for module in modules]:
            for path in [
                "/".join(words[:n]) + end for n in range(1, len(words) + 1) for end in (".py", "/__init__.py")
            ]:
                for place in (folder, ROOT):
                    if (place / path).is_file() and not (place == ROOT and words[0] in PROGRAM):
                        yield place, path
                        break


@functools.cache
def describe(config_class: type) -> Code:
    """What a checkpoint says of the file that trained it."""
    sources = sources_of(config_class)
    name, *modules = sources
    hashes = " ".join(map(hash_of, sources.values()))
    return {
        "name": name,
        "copy": copy_of(name, sources[name]),
        "hash": hashlib.sha256(hashes.encode()).hexdigest()[:16] if modules else hashes,
        "modules": {module: copy_of(module, sources[module]) for module in modules},
    }


def copy_of(name: str, source: bytes) -> str:
    """The name of a source's copy: layers/rotary.py -> layers.rotary-0123abcd.py"""
    stem = name.removesuffix(".py").replace("/", ".")
    return f"{stem}-{hashlib.sha256(source).hexdigest()[:8]}.py"


def git(*words: str) -> str:
    """What git says of this program's folder; "" if that is not a clone."""
    return output_of("git", "-C", str(ROOT), *words)


def git_commit() -> str:
    """The commit of this program, with "-dirty" if it was changed since; "" if that is not known."""
    return git("describe", "--always", "--dirty", "--abbrev=40")


class WithoutSettings(ast.NodeTransformer):
    """Leaves out docstrings, PRESETS, and the fields of the class that these are of: what a flag could say as well."""

    def visit_Module(self, node):
        assignments = [each for each in node.body if isinstance(each, ast.Assign)]
        presets = [each for each in assignments if ast.unparse(each.targets[0]) == "PRESETS"]
        classes = {each.name: each for each in node.body if isinstance(each, ast.ClassDef)}
        names = [each.id for setting in presets for each in ast.walk(setting) if isinstance(each, ast.Name)]
        configs = [name for name in dict.fromkeys(names) if name in classes]
        for name in configs:  # which grows
            config = classes[name]
            config.body = [each for each in config.body if not is_field(each)]
            configs += [base.id for base in config.bases if isinstance(base, ast.Name) and base.id in classes]
        node.body = [each for each in node.body if each not in presets]
        return self.generic_visit(node)

    def visit_Expr(self, node):
        return None if isinstance(node.value, ast.Constant) else node


def is_field(node: ast.AST) -> bool:
    return isinstance(node, ast.AnnAssign) and "ClassVar" not in ast.unparse(node.annotation)


@functools.cache
def hash_of(source: bytes) -> str:
    """The same for two files that differ in comments, docstrings and settings alone."""
    code = ast.unparse(WithoutSettings().visit(ast.parse(source)))
    return hashlib.sha256(code.encode()).hexdigest()[:16]


def keep_copies(config: Any) -> None:
    """Keep the sources that run in the run's folder, once per version: to be read, as they are never run from there."""
    for name, source in sources_of(type(config)).items():
        path = Path(config.out_dir, copy_of(name, source))
        if path.exists():
            continue
        try:
            with atomic_write(path) as file:
                file.write(source)
        except UserError as error:  # the run itself may need less room
            print(f"note: {error} The run goes on, but keeps no copy of {name}.", flush=True)


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
    then, now = saved.get("modules", {}), own["modules"]
    modules = [name for name in {**then, **now} if then.get(name) != now.get(name)]
    copies = [saved["copy"], *(f"{copy} of {name}" for name, copy in then.items())]
    kept = f"The run's folder has a copy of what trained it: {', '.join(copies)}."
    remedy = f"save it beside {own['name']}" if may_be_a_copy else "give it with --code"
    if saved["name"] != own["name"] and not may_be_a_copy:
        raise UserError(
            f"The model in {source} was trained by {saved['name']}, whose code is not that of {own['name']}. Add "
            f"--code {saved['name']}. {kept}"
        )
    print(
        f"note: {' and '.join(modules) or own['name']} has changed since {source} was trained by {saved['name']}, so "
        f"the results may differ. {kept} To use that, {remedy}.",
        file=sys.stdout if may_be_a_copy else sys.stderr,  # what sample.py writes to stdout are samples
        flush=True,
    )


def load(path: str) -> Any:
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
    try:
        spec.loader.exec_module(module)
    except (SyntaxError, ImportError) as error:
        raise UserError(f"--code {path} cannot be imported: {first_line(error)}. {remedy}") from None
    except SystemExit:
        raise UserError(f"--code {path} ends the program when it is imported. {remedy}") from None
    if not hasattr(module, "load_model"):
        raise UserError(f"--code {path} has no load_model, so it is no trainer. {remedy}")
    return module
