"""Python's own documentation as documents: a corpus that needs no network, for preset quickstart."""

import ast
import hashlib
import os
import platform
import sysconfig
import warnings
from pathlib import Path
from typing import Any

NAME = f"the documentation of Python {platform.python_version()}"
DOCUMENTED = {ast.Module: "module", ast.ClassDef: "class", ast.FunctionDef: "def", ast.AsyncFunctionDef: "def"}
NOT_DOCUMENTED = {"site-packages", "dist-packages", "test", "tests", "idle_test"}  # folders


def python_docs() -> list[str]:
    """The language reference and the standard library's docstrings: one document per topic and per module.

    They are ordered by a hash of their names. The order is the same everywhere, and the first tenth is like the rest.
    """
    import pydoc_data.topics

    documents = dict(pydoc_data.topics.topics)
    root = sysconfig.get_paths()["stdlib"]
    for folder, folders, _ in os.walk(root):
        folders[:] = set(folders) - NOT_DOCUMENTED
        for path in Path(folder).glob("*.py"):
            module = ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__")
            documents[module + ".py"] = docstrings(path, module)
    names = sorted(documents, key=lambda name: hashlib.sha256(name.encode()).digest())
    return [documents[name] for name in names if documents[name]]


def docstrings(path: Path, module: str) -> str:
    """The docstrings of a source file, each after the declaration it belongs to."""
    try:
        with warnings.catch_warnings(action="ignore"):
            tree = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError):  # lib2to3 and others contain files for Python 2
        return ""
    parts = []
    nodes: list[Any] = sorted(ast.walk(tree), key=lambda node: getattr(node, "lineno", 0))
    for node in nodes:
        kind = DOCUMENTED.get(type(node))
        if not kind:
            continue
        text = ast.get_docstring(node)
        if text:
            name = getattr(node, "name", module)
            arguments = f"({ast.unparse(node.args)})" if kind == "def" else ""
            parts.append(f"{kind} {name}{arguments}")
            parts.append(text)
    return "\n\n".join(parts)
