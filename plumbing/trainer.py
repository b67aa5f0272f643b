"""The file that trains, train_gpt2.py or a changed copy of it: what a run keeps of it, and which file can go on.

What is compared leaves out comments and settings, which are the dataclasses and PRESETS.
"""

import ast
import functools
import hashlib
import importlib
import importlib.util
import inspect
import sys
from pathlib import Path
from typing import Any

from plumbing.files import atomic_write
from plumbing.program import UserError, first_line

NAME = "train_gpt2.py"
# of a file: its "name", that of its "copy" in the run's folder, and hashes of "all" its code and of its "model"'s
Code = dict[str, str]


def file_of(config_class: type) -> Path:
    """The file that defines this GPTConfig or TrainConfig, and so the one that runs."""
    return Path(inspect.getfile(config_class)).resolve()


@functools.cache
def describe(config_class: type) -> Code:
    """What a checkpoint says of the file that trained it. The model's code is that of its modules and what they use."""
    path = file_of(config_class)
    source = path.read_bytes()
    code = parse(source)
    model: list[Any] = [node for node in code if isinstance(node, ast.ClassDef) and is_module(node)]
    for node in model:
        used = {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}
        model += [other for other in code if other not in model and names_of(other) & used]
    return {
        "name": path.name,
        "copy": f"{path.stem}-{hashlib.sha256(source).hexdigest()[:8]}.py",
        "all": hash_of(code),
        "model": hash_of(model),
    }


def parse(source: bytes) -> list[ast.stmt]:
    """The file's statements as a syntax tree, without comments, docstrings and settings."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list) and body and isinstance(body[0], ast.Expr):
            if isinstance(body[0].value, ast.Constant):
                del body[0]  # a docstring
    return [node for node in tree.body if not is_settings(node)]


def is_module(node):
    """Whether a class of the syntax tree is one of torch's modules."""
    return any(ast.unparse(base).endswith("Module") for base in node.bases)


def is_settings(node):
    """Whether a statement of the file is a dataclass or PRESETS."""
    decorators = map(ast.unparse, getattr(node, "decorator_list", []))
    return "PRESETS" in names_of(node) or any("dataclass" in decorator for decorator in decorators)


def names_of(node: Any) -> set[Any]:
    """The names that a statement of the file defines."""
    targets = getattr(node, "targets", [])
    return {getattr(node, "name", None), *(getattr(target, "id", None) for target in targets)} - {None}


def hash_of(nodes):
    return hashlib.sha256("\n".join(sorted(map(ast.unparse, nodes))).encode()).hexdigest()[:16]


def keep_copy(config: Any) -> None:
    """Keep the file that runs in the run's folder, once per version: to be read, as it is never run from there."""
    path = Path(config.out_dir, describe(type(config))["copy"])
    if path.exists():
        return
    try:
        with atomic_write(path) as file:
            file.write(file_of(type(config)).read_bytes())
    except UserError as error:  # the run itself may need less room
        print(f"note: {error} The run goes on, but keeps no copy of its source.", flush=True)


def check_model(saved: Code, config_class: type, source: str) -> None:
    """Refuse a model that another file trained, unless its code is the same; say so if this file was changed since."""
    own = describe(config_class)
    if not saved or saved["model"] == own["model"]:
        return
    copy = f"The run's folder has a copy of it: {saved['copy']}."
    if saved["name"] != own["name"]:
        raise UserError(
            f"The model in {source} was trained by {saved['name']}, whose model is not that of {own['name']}. Add "
            f"--code {saved['name']}. {copy}"
        )
    print(
        f"note: {source} was trained by {saved['name']} before its model was changed, so its results are "
        f"not those of the training. {copy} To use that, save it beside {own['name']} and add --code NAME.",
        file=sys.stderr,
        flush=True,
    )


def note_changes(saved: Code, config_class: type, source: str) -> None:
    """Say so if a run goes on, or another begins with its weights, with other code than that which trained it."""
    own = describe(config_class)
    if saved and saved["all"] != own["all"]:
        changed = "its model, too" if saved["model"] != own["model"] else "but not its model"
        print(
            f"note: {own['name']} has changed since {source} was trained by {saved['name']}, {changed}. "
            f"The run's folder has a copy of what trained it: {saved['copy']}.",
            flush=True,
        )


def load(path: str) -> Any:
    """The module train_gpt2, or the changed copy of it that --code names."""
    name = Path(path).stem
    if path == NAME:
        return importlib.import_module(name)
    spec = importlib.util.spec_from_file_location(name, path)
    if not Path(path).is_file() or not spec or not spec.loader:
        raise UserError(f"--code {path} is not a Python file. Give the trainer's file that trained the model.")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except (SyntaxError, ImportError) as error:
        raise UserError(
            f"--code {path} cannot be imported: {first_line(error)}. Give the trainer's file that trained the model."
        ) from None
    if not hasattr(module, "load_model"):
        raise UserError(
            f"--code {path} has no load_model, so it is no trainer. Give the file that trained the model."
        )
    return module
