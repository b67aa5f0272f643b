"""The project as a whole: what it says of itself is so."""

import ast
import functools
import graphlib
import json
import pkgutil
import re
import sys

import pytest
import yaml
from plumbing.cli.console import output_of

from harness import ROOT, SCRIPTS

PROGRAM = (*SCRIPTS, "plumbing/**/*.py", "bench/*.py")
OPTIONAL = {
    "model",  # bench/ imports model.py of a checkout that the user names
    "wandb",  # for --wandb, which says what to install; nothing else imports it
    "yaml",  # huggingface_hub brings it; a test reads the model card with it
    "openai",  # a test talks to transformers' server as a client would, and skips without it
}


def read(name):
    return (ROOT / name).read_text(encoding="utf-8")


@functools.cache
def parse(path):
    return ast.parse(path.read_text(encoding="utf-8"))


def parsed(*patterns):
    """{dotted name: syntax tree} of our modules."""
    paths = [path for pattern in patterns for path in ROOT.glob(pattern)]
    return {".".join(path.relative_to(ROOT).with_suffix("").parts): parse(path) for path in paths}


def imported(tree):
    """The pairs (name, dotted name) of all that is imported anywhere in it, as b and a.b by `from a import b`."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            package = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
            found |= {(alias.asname or alias.name, package + alias.name) for alias in node.names}
    return found


def test_requirements_name_every_package_that_is_imported():
    """Other than our own and Python's, in the notebooks, too."""
    trees = parsed(*PROGRAM, "tests/**/*.py")
    cells = [cell for name in ("play.ipynb", "lessons.ipynb") for cell in json.loads(read(name))["cells"]]
    code = [ast.parse("".join(cell["source"])) for cell in cells if cell["cell_type"] == "code"]
    packages = {name.split(".")[0] for tree in [*trees.values(), *code] for _, name in imported(tree)}
    packages = {{"PIL": "pillow"}.get(name, name) for name in packages}
    packages -= {part for name in trees for part in name.split(".")} | set(sys.stdlib_module_names)
    lines = read("requirements.txt").splitlines()
    declared = {re.match(r"[\w-]+", line)[0].replace("-", "_") for line in lines if line and line[0] != "#"}
    assert packages - declared <= OPTIONAL


def test_every_week_the_tests_run_with_the_oldest_and_the_newest_torch_of_the_requirements():
    [(oldest, end)] = re.findall(r"^torch>=([\d.]+),(<[\d.]+)$", read("requirements.txt"), re.MULTILINE)
    workflow = yaml.safe_load(read(".github/workflows/torch.yml"))
    assert workflow["jobs"]["tests"]["strategy"]["matrix"]["torch"] == [f"=={oldest}.0", end]


def test_a_wing_of_the_plumbing_imports_only_those_above_it_and_no_modules_import_each_other():
    trees = parsed(*PROGRAM)
    modules = {
        name: {part for _, each in imported(tree) for part in (each, each.rpartition(".")[0])}
        for name, tree in trees.items()
    }
    graph = {name: found & trees.keys() for name, found in modules.items()}
    wings = re.findall(r"^    (\w+) ", ast.get_docstring(trees["plumbing.__init__"], clean=False), re.MULTILINE)
    assert len(wings) == 5
    for name, imports in graph.items():
        if name.startswith("plumbing.") and name != "plumbing.__init__":
            above = wings[: wings.index(name.split(".")[1]) + 1]
            assert {other.split(".")[1] for other in imports if "." in other} <= {*above}, name
            assert all(other.startswith("plumbing.") for other in imports), name
    graphlib.TopologicalSorter(graph).prepare()  # a circle is an error that names it


def test_the_public_workflow_runs_the_readmes_commands():
    workflow = yaml.safe_load(read(".github/workflows/ci.yml"))
    runs = [step["run"] for step in workflow["jobs"]["readme"]["steps"] if "run" in step]
    readme = read("README.md")
    assert len(runs) == 2 and f"```bash\n{runs[0]}\n{runs[1]}\n```" in readme


def test_the_top_level_holds_seven_scripts_and_the_readme_lists_them():
    """Of the project's own; beside them lie the users' copies of the trainer."""
    tracked = output_of("git", "-C", str(ROOT), "ls-files", ":(glob)*.py").split()
    assert tracked in ([], SCRIPTS)  # none where the project was not cloned
    readme = read("README.md")
    built = readme.partition("## How it is built")[2]
    files = re.findall(r"(?:^|; )(\w+(?:/|\.py|\.ipynb))(?: |:)", built, re.MULTILINE)
    assert len(SCRIPTS) == 7
    assert {*SCRIPTS, "plumbing/", "bench/", "tests/", "records/", "play.ipynb", "lessons.ipynb"} == set(files)


def test_what_the_documents_link_to_is_there():
    """In the README, the index of the records and each record: pictures too."""
    for document in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *ROOT.glob("records/**/*.md")]:
        links = re.findall(r"\]\(([^)#:]+)\)", document.read_text(encoding="utf-8"))
        missing = [link for link in links if not (document.parent / link).exists()]
        assert not missing, f"{document}: {missing}"
    cited = set()
    notebooks = ("play.ipynb", "lessons.ipynb")
    for path in [*(ROOT / name for name in (*SCRIPTS, *notebooks)), *ROOT.glob("plumbing/**/*.py")]:
        cited |= set(re.findall(r"records/(20[\w-]+)", path.read_text(encoding="utf-8")))
    assert all((ROOT / "records" / name).exists() for name in cited)


@pytest.mark.parametrize("script", sorted(path.relative_to(ROOT) for path in ROOT.glob("records/*/*.py")), ids=str)
def test_all_that_a_record_takes_from_the_project_is_there_unless_it_says_at_which_commit_it_ran(script):
    if re.match(r'(# |""")[Rr]an at commits? [0-9a-f]{7}', read(script)):
        return
    tree = parse(ROOT / script)
    names = dict(imported(tree))
    attributes = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    used = {
        f"{names[ast.unparse(node.value)]}.{node.attr}" for node in attributes if ast.unparse(node.value) in names
    }
    own = {"harness", *(name.split(".")[0] for name in parsed(*PROGRAM))}
    for name in [name for name in {*names.values(), *used} if name.split(".")[0] in own]:
        pkgutil.resolve_name(name)  # an error names what is gone
