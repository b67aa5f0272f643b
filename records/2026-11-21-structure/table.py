"""The figures of the table: lines, characters per line of code, where things begin, who imports whom.

python records/2026-11-21-structure/table.py FOLDER, of a checkout.
"""

import ast
import sys
from pathlib import Path

root = Path(sys.argv[1])
files = sorted([*root.glob("*.py"), *root.glob("plumbing/*.py")])
names = {path.stem for path in files}
for path in files:
    text = path.read_text()
    tree = ast.parse(text)
    docstrings = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(node):
            docstrings.update(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    lines = text.splitlines()
    code = [line.strip() for number, line in enumerate(lines, 1) if number not in docstrings]
    code = [line for line in code if line and not line.startswith("#")]
    imported = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names}
        if isinstance(node, ast.ImportFrom) and node.module:
            imported |= {node.module.split(".")[-1]} | {alias.name for alias in node.names if node.module == "plumbing"}
    ours = ", ".join(sorted((imported & names) - {"plumbing", path.stem}))
    average = sum(map(len, code)) / max(1, len(code))
    print(f"| `{path.relative_to(root)}` | {len(lines)} | {average:.1f} | {ours} |")
