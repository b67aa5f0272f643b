"""Do the tests notice when the program is wrong? This breaks a copy of it in one way after another and runs tests.

    python tests/mutants.py                   # all mutants of mutants.txt, in five minutes
    python tests/mutants.py milestone mask    # those with one of these words in their names

mutants.txt says how a mutant is written. It is noticed if one of its tests fails. In the end these tests are run on the
program as it is, where they must pass.
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def read_mutants(path):
    """{name: (path, arguments of pytest, text before, text after)}; SystemExit if a text is not there exactly once."""
    mutants, problems = {}, []
    lines = [line for line in path.read_text(encoding="utf-8").splitlines() if not line.startswith("#")]
    for block in filter(None, map(str.strip, "\n".join(lines).split("\n\n"))):
        name, where, *changes = block.splitlines()
        file, *tests = shlex.split(where)
        before, after = ("\n".join(line[2:] for line in changes if line[0] == sign) for sign in "-+")
        found = (ROOT / file).read_text(encoding="utf-8").count(before) if (ROOT / file).exists() else 0
        if found != 1 or not before or any(line[:2] not in ("- ", "+ ", "+") for line in changes) or name in mutants:
            problems.append(f"{name}: its text is {found} times in {file}, not once, or not in mutants.txt's form")
        mutants[name] = file, tests, before, after
    if problems:
        sys.exit("\n".join(problems))
    return mutants


def copy_tree(place):
    """A copy of the files that git tracks, with the shared data beside it, if there are any."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in listed.splitlines():
        target = place / "tree" / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, target)
    (place / "shared").symlink_to(ROOT.parent / "shared")  # leads nowhere in a clone, as if it were not there
    return place / "tree"


def failing(tree, tests):
    """The tests that fail in a tree, at most one; pytest must have run some."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-rfE", "-p", "no:cacheprovider", "-p", "no:xdist", *tests]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    run = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, timeout=1200)
    if run.returncode not in (0, 1):
        sys.exit(f"pytest {shlex.join(tests)} ended with status {run.returncode}:\n{run.stdout[-2000:]}{run.stderr}")
    return re.findall(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", run.stdout, re.MULTILINE)


def main(words):
    mutants = read_mutants(Path(__file__).with_suffix(".txt"))
    chosen = [name for name in mutants if not words or any(word in name for word in words)]
    with tempfile.TemporaryDirectory() as place:
        tree, noticed = copy_tree(Path(place)), {}  # name: the test that fails, in a list
        for name in chosen:
            file, tests, before, after = mutants[name]
            text = (tree / file).read_text(encoding="utf-8")
            (tree / file).write_text(text.replace(before, after), encoding="utf-8")
            noticed[name] = failing(tree, tests)
            (tree / file).write_text(text, encoding="utf-8")
            print(f"{name}: {'noticed by ' + noticed[name][0] if noticed[name] else 'NOT NOTICED'}", flush=True)
        killers = sorted({test for tests in noticed.values() for test in tests})
        wrong = failing(tree, killers) if killers else []
    print(f"the {len(killers)} tests that noticed one, on the unchanged program: {wrong or 'all pass'}")
    print(f"{len(chosen)} mutants, {sum(map(bool, noticed.values()))} noticed")
    sys.exit(bool(wrong) or not all(noticed.values()))


if __name__ == "__main__":
    main(sys.argv[1:])
