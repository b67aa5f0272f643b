"""What OPERATIONS.md says of Slurm and of warnings is so."""

import ast
import os
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest
from torch.distributed.run import get_args_parser

from harness import ROOT, SCRIPTS, needs

OPERATIONS = (ROOT / "OPERATIONS.md").read_text(encoding="utf-8")
COMMANDS = {  # stand-ins for Slurm's
    "srun": """#!/bin/bash
trap 'echo stopped >> said; exit' TERM
sleep 1 # until the script waits
echo "$@" >> said
while :; do sleep 0.1; done
""",
    "scontrol": """#!/bin/bash
if [ "$1" = show ]; then echo node1; else echo "$*" >> said; fi
""",
}


@pytest.mark.slow
@needs("bash")
def test_the_script_for_slurm_stops_the_run_before_its_time_is_up_and_requeues_the_job():
    for name, text in COMMANDS.items():
        Path(name).write_text(text, encoding="utf-8")
        os.chmod(name, 0o755)
    [script] = re.findall(r"```sh\n(.*?)```", OPERATIONS, re.DOTALL)
    path = os.pathsep.join([os.getcwd(), os.environ["PATH"]])
    slurm = dict(PATH=path, SLURM_NNODES="2", SLURM_JOB_ID="7")
    job = subprocess.Popen(["bash", "-c", script], env=os.environ | slurm)
    said = Path("said")
    while not said.exists():
        assert job.poll() is None
        time.sleep(0.1)
    job.send_signal(signal.SIGTERM)
    job.wait(60)
    command, *then = said.read_text(encoding="utf-8").splitlines()
    assert then == ["stopped", "requeue 7"]
    options = get_args_parser().parse_args(command.removeprefix("torchrun ").split())
    assert (options.nnodes, options.rdzv_endpoint, options.rdzv_id) == ("2", "node1:29500", "7")


def text_of(node):
    """A string of the source, with … for the values in it; "" for anything else."""
    if isinstance(node, ast.JoinedStr):
        return "".join(text_of(value) or "…" for value in node.values)
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


def messages():
    """(all strings of the program, those of its warnings and notes)"""
    strings, said = set(), set()
    for path in [*(ROOT / name for name in SCRIPTS), *ROOT.glob("plumbing/**/*.py")]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            strings.add(text_of(node))
            if isinstance(node, ast.Call) and node.args:
                text = text_of(node.args[0])
                if ast.unparse(node.func).endswith("note"):
                    said.add(f"note: {text}")
                elif text.startswith(("warning: ", "note: ")):
                    said.add(text)
    return strings, said


def test_every_warning_and_note_is_explained():
    strings, said = messages()
    table = OPERATIONS.partition("## Warnings and notes")[2].partition("\n## ")[0].replace("\\|", "|")
    rows = re.findall(r"^\| `(.*?)` \|", table, re.MULTILINE)
    assert len(rows) > 30
    patterns = [re.escape(row).replace("…\\ ", "(.+ )?").replace("…", ".+") for row in rows]
    in_words = {text for text in said if re.search("[a-z]{3}", text.partition(": ")[2])}
    assert [text for text in in_words if not any(re.match(pattern, text) for pattern in patterns)] == []
    # some are put together from several strings
    parts = strings | said
    gone = [p for p in patterns if not any(re.search(p.removeprefix("note:\\ "), text) for text in parts)]
    assert gone == []
