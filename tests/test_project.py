"""The project as a whole: what it says of itself is so."""

import ast
import re
import sys
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[1]
SCRIPTS = sorted(path.name for path in ROOT.glob("*.py"))
PACKAGES = ("plumbing", "bench", "tests")
OPTIONAL = {
    "model",  # bench/ imports model.py of a checkout that the user names
    "triton",  # torch brings it where it has a GPU to compile kernels for
    "wandb",  # for --wandb, which says what to install; nothing else imports it
    "yaml",  # huggingface_hub brings it; a test reads the model card with it
    "openai",  # a test talks to transformers' server as a client would, and skips without it
}


def imported_packages():
    """The top-level packages that any script or test imports, other than our own and Python's."""
    found, ours = set(), {name.removesuffix(".py") for name in SCRIPTS} | set(PACKAGES)
    files = [ROOT / name for name in SCRIPTS] + [path for name in PACKAGES for path in ROOT.glob(f"{name}/*.py")]
    for path in files:
        ours.add(path.stem)
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module] if isinstance(node, ast.ImportFrom) and node.module and not node.level else []
            found |= {name.split(".")[0] for name in names}
    return found - ours - set(sys.stdlib_module_names)


def test_requirements_name_every_package_that_is_imported():
    lines = (ROOT / "requirements.txt").read_text(encoding="utf-8").splitlines()
    declared = {re.match(r"[\w-]+", line)[0].replace("-", "_") for line in lines if line and line[0] != "#"}
    assert imported_packages() - declared <= OPTIONAL
    assert "torch==2.13.0" in lines


def test_the_public_workflow_runs_the_readmes_commands():
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text(encoding="utf-8"))
    runs = [step["run"] for step in workflow["jobs"]["readme"]["steps"] if "run" in step]
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(runs) == 2 and f"```bash\n{runs[0]}\n{runs[1]}\n```" in readme


def test_the_top_level_holds_seven_scripts_and_the_readme_lists_them():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    files = re.findall(r"^\| `(\w+(?:/|\.py|\.ipynb))`", readme, re.MULTILINE)
    assert len(SCRIPTS) <= 7
    assert {*SCRIPTS, "plumbing/", "bench/", "tests/", "records/", "play.ipynb"} == set(files)


def test_what_the_documents_link_to_is_there():
    """In the README, the index of the records and each record: pictures too."""
    for document in [*ROOT.glob("*.md"), *ROOT.glob("records/**/*.md")]:
        links = re.findall(r"\]\(([^)#:]+)\)", document.read_text(encoding="utf-8"))
        missing = [link for link in links if not (document.parent / link).exists()]
        assert not missing, f"{document}: {missing}"
    cited = set()
    for path in [*(ROOT / name for name in SCRIPTS), *ROOT.glob("plumbing/*.py"), ROOT / "play.ipynb"]:
        cited |= set(re.findall(r"records/(20[\w-]+)", path.read_text(encoding="utf-8")))
    assert all((ROOT / "records" / name).exists() for name in cited)
