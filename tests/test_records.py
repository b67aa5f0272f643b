"""The evidence in records/: its scripts run, or say that they no longer do."""

import ast
import pkgutil
import re
from pathlib import Path

import pytest

from harness import ROOT, SCRIPTS

OWN = {"plumbing", "bench", *(path.stem for path in [*map(Path, SCRIPTS), *ROOT.glob("tests/*.py")])}


def taken(tree):
    """The dotted names that a script imports of the project, and those that it takes from a module of the project."""
    modules, found = {}, set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules |= {alias.asname or alias.name: alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names = {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
            found |= set(names.values())
            modules |= names
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) in modules:
            found.add(f"{modules[ast.unparse(node.value)]}.{node.attr}")
    return {name for name in {*found, *modules.values()} if name.split(".")[0] in OWN}


@pytest.mark.parametrize("script", sorted(path.relative_to(ROOT) for path in ROOT.glob("records/*/*.py")), ids=str)
def test_all_that_a_script_takes_from_the_project_is_there_unless_its_first_line_says_at_which_commit_it_ran(script):
    text = (ROOT / script).read_text(encoding="utf-8")
    if not re.match(r'(# |""")[Rr]an at commits? [0-9a-f]{7}', text):
        for name in taken(ast.parse(text)):
            pkgutil.resolve_name(name)  # an error names what is gone
