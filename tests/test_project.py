"""The project as a whole: what it says of itself is so."""

import ast
import functools
import graphlib
import inspect
import json
import pkgutil
import re
import runpy
import sys
from pathlib import Path

import pytest
import yaml
from matplotlib.figure import Figure
from plumbing.cli.console import output_of

from harness import ROOT, SCRIPTS, run

PROGRAM = (*SCRIPTS, "plumbing/**/*.py", "bench/*.py")
OPTIONAL = {
    "model",  # bench/ imports model.py of a checkout that the user names
    "wandb",  # for --wandb, which says what to install; nothing else imports it
    "yaml",  # huggingface_hub brings it; a test reads the workflows with it
    "openai",  # a test talks to transformers' server as a client would, and skips without it
}


def read(path):
    """The text of a file, whose path may begin at the root of the project."""
    return (ROOT / path).read_text(encoding="utf-8")


@functools.cache
def parse(path):
    return ast.parse(read(path))


def parsed(*patterns):
    """{dotted name: syntax tree} of our modules."""
    trees = {}
    for pattern in patterns:
        for path in ROOT.glob(pattern):
            name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
            trees[name] = parse(path)
    return trees


def imported(tree):
    """The pairs (name, dotted name) of all that is imported anywhere in it, as b and a.b by `from a import b`."""
    found = set()
    for node in ast.walk(tree):
        if not isinstance(node, (ast.Import, ast.ImportFrom)):
            continue
        package = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
        for alias in node.names:
            found.add((alias.asname or alias.name, package + alias.name))
    return found


def cells(name):
    """The syntax tree of a notebook's code cells, one after another."""
    found = json.loads(read(name))["cells"]
    return ast.parse("\n".join("".join(cell["source"]) for cell in found if cell["cell_type"] == "code"))


def test_requirements_name_every_package_that_is_imported():
    """Other than our own and Python's, also in the notebooks."""
    ours = parsed(*PROGRAM, "tests/**/*.py")
    packages = set()
    for tree in [*ours.values(), cells("play.ipynb"), cells("lessons.ipynb")]:
        packages |= {name.split(".")[0] for _, name in imported(tree)}
    known = {*sys.stdlib_module_names, *OPTIONAL}
    for name in ours:
        known |= {*name.split(".")}
    declared = re.findall(r"^[\w-]+", read("requirements.txt"), re.MULTILINE)
    imported_as = {"pillow": "PIL"}
    known |= {imported_as.get(name, name.replace("-", "_")) for name in declared}
    assert packages - known == set()


def test_every_week_the_tests_run_with_the_oldest_and_the_newest_torch_of_the_requirements():
    [oldest] = re.findall(r"^torch>=([\d.]+)$", read("requirements.txt"), re.MULTILINE)
    workflow = yaml.safe_load(read(".github/workflows/torch.yml"))
    assert workflow["jobs"]["tests"]["strategy"]["matrix"]["torch"] == [f"=={oldest}.0", ""]


def graph_of_imports():
    """{module: those of our modules that it imports}"""
    trees = parsed(*PROGRAM)
    graph = {}
    for name, tree in trees.items():
        found = {each for _, each in imported(tree)}
        found |= {each.rpartition(".")[0] for each in found}
        graph[name] = found & trees.keys()
    return graph


def test_a_wing_of_the_plumbing_imports_only_those_above_it():
    docstring = ast.get_docstring(parse(ROOT / "plumbing" / "__init__.py"), clean=False)
    wings = re.findall(r"^    (\w+) ", docstring, re.MULTILINE)
    assert len(wings) == 5
    for name, imports in graph_of_imports().items():
        if not name.startswith("plumbing.") or name == "plumbing.__init__":
            continue
        above = wings[: wings.index(name.split(".")[1]) + 1]
        for other in imports:
            assert other.startswith("plumbing."), f"{name} imports {other}"
            assert other == "plumbing" or other.split(".")[1] in above, f"{name} imports {other}"


def test_no_two_modules_import_each_other():
    graphlib.TopologicalSorter(graph_of_imports()).prepare()  # a circle is an error that names it


def test_the_public_workflow_runs_the_readmes_commands():
    workflow = yaml.safe_load(read(".github/workflows/ci.yml"))
    steps = workflow["jobs"]["readme"]["steps"]
    first, second = [step["run"] for step in steps if "run" in step]
    readme = " ".join(read("README.md").split())
    assert f"`{first}`" in readme
    assert f"`{second}`" in readme


def test_the_top_level_holds_the_seven_scripts():
    """Of the project's own; beside them lie the users' copies of the trainer."""
    tracked = output_of("git", "-C", str(ROOT), "ls-files", ":(glob)*.py").split()
    assert tracked in ([], SCRIPTS)  # none where the project was not cloned


def test_the_readme_lists_what_lies_at_the_top_level():
    built = read("README.md").partition("## How it is built")[2]
    listed = re.findall(r"^(\w+(?:/|\.py|\.ipynb))  ", built, re.MULTILINE)
    others = ["plumbing/", "bench/", "tests/", "records/", "play.ipynb", "lessons.ipynb"]
    assert sorted(listed) == sorted([*SCRIPTS, *others])


DOCUMENTS = [*ROOT.glob("*.md"), *ROOT.glob("records/**/*.md")]


def anchors(text):
    """The names under which GitHub links to a document's headings."""
    names = set()
    for heading in re.findall(r"^#+ (.*)$", text, re.MULTILINE):
        plain = re.sub(r"[^\w\- ]", "", heading.lower())
        names.add(plain.replace(" ", "-"))
    return names


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_what_a_document_links_to_is_there(document):
    """Files, pictures and headings."""
    prose = re.sub(r"```.*?```", "", read(document), flags=re.DOTALL)
    for link, anchor in re.findall(r"\]\(([^)#:]*)#?([^):]*)\)", prose):
        target = document.parent / link if link else document
        assert target.exists(), link
        if anchor:
            assert anchor in anchors(read(target)), f"{link}#{anchor}"


def test_the_records_that_the_code_cites_are_there():
    cited = set()
    for path in [*ROOT.glob("*.py"), *ROOT.glob("*.ipynb"), *ROOT.glob("plumbing/**/*.py")]:
        cited |= {*re.findall(r"records/20[\w-]+", read(path))}
    assert cited
    assert [name for name in cited if not (ROOT / name).exists()] == []


RECORDED = sorted(path.relative_to(ROOT) for path in ROOT.glob("records/*/*.py"))
UNMARKED = [path for path in RECORDED if not re.match(r'(# |""")[Rr]an at commits? [0-9a-f]{7}', read(path))]
# the smallest arguments of the scripts that take seconds
CALLED = dict(levers="", make_chats="", measure="1 64 1 32 512", plot="", predict="", shares="")


def run_record(script, args):
    """Run the script of a record, which replaces no file of its own."""
    Path.write_text = Figure.savefig = lambda *args, **options: None
    sys.argv = [script.name, *args]
    sys.path.insert(0, str(ROOT / script.parent))
    runpy.run_path(str(ROOT / script), run_name="__main__")


@pytest.mark.parametrize("script", [path for path in UNMARKED if path.stem in CALLED], ids=str)
def test_a_script_of_a_record_runs_unless_it_says_at_which_commit_it_ran(script, monkeypatch):
    monkeypatch.setenv("MPLBACKEND", "Agg")
    run(run_record, script, CALLED[script.stem].split())


USERS = {"lessons.ipynb": cells("lessons.ipynb")} | {str(path): parse(ROOT / path) for path in UNMARKED}


@pytest.mark.parametrize("user", USERS)
def test_what_lessons_and_records_take_from_the_project_is_there(user):
    """Names, and those of arguments; unless a record says at which commit it ran."""
    ours = {name.split(".")[0] for name in parsed(*PROGRAM)} | {"harness"}
    names = {}
    for name, dotted in imported(USERS[user]):
        if dotted.split(".")[0] in ours or dotted.startswith("test_"):
            names[name] = pkgutil.resolve_name(dotted)  # an error names what is gone
    taken = {}
    for node in ast.walk(USERS[user]):
        text = ast.unparse(node) if isinstance(node, (ast.Name, ast.Attribute)) else ""
        if text.split(".")[0] in names and text.count(".") < 2:
            taken[text] = eval(text, names)
    for node in ast.walk(USERS[user]):
        if isinstance(node, ast.Call) and callable(function := taken.get(ast.unparse(node.func))):
            keywords = {keyword.arg for keyword in node.keywords}
            assert keywords <= {*inspect.signature(function).parameters, None}
