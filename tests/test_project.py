"""The project as a whole: what it says of itself is so."""

import ast
import importlib
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SCRIPTS = sorted(path.stem for path in ROOT.glob("*.py"))
COMMANDS = [name for name in SCRIPTS if "\n    cli.run(main" in (ROOT / f"{name}.py").read_text(encoding="utf-8")]

OPTIONAL = {
    "model",  # bench.py imports model.py of a checkout that the user names
    "triton",  # torch brings it where it has a GPU to compile kernels for
    "wandb",  # for --wandb, which says what to install; nothing else imports it
    "openai",  # a test talks to transformers' server as a client would, and skips without it
}


def imported_packages():
    """The top-level packages that any script or test imports, other than our own and Python's."""
    found = set()
    for path in [*ROOT.glob("*.py"), *ROOT.glob("plumbing/*.py"), *ROOT.glob("tests/*.py")]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module] if isinstance(node, ast.ImportFrom) and node.module and not node.level else []
            found |= {name.split(".")[0] for name in names}
    ours = {*SCRIPTS, "plumbing", *(path.stem for path in ROOT.glob("tests/*.py"))}
    return found - ours - set(sys.stdlib_module_names)


def test_requirements_name_every_package_that_is_imported():
    lines = (ROOT / "requirements.txt").read_text().splitlines()
    declared = {re.match(r"[\w-]+", line)[0] for line in lines if line and not line.startswith("#")}
    assert imported_packages() - declared <= OPTIONAL
    assert "torch==2.13.0" in lines


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_explains_itself(name, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", [f"{name}.py", "--help"])
    with pytest.raises(SystemExit) as leaving:
        importlib.import_module(name).main()
    assert leaving.value.code == 0
    assert "usage" in capsys.readouterr().out


def test_readme_is_short_and_what_it_links_to_is_there():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(readme.splitlines()) <= 200
    links = re.findall(r"\]\(([^)#:]+)\)", readme)
    assert links
    missing = [link for link in links if not (ROOT / link).exists()]
    assert not missing
    files = re.findall(r"^\| `([\w./]+)`", readme, re.MULTILINE)
    assert {f"{name}.py" for name in SCRIPTS} | {"plumbing/", "tests/", "records/", "play.ipynb"} == set(files)
    assert all((ROOT / name).exists() for name in files)
