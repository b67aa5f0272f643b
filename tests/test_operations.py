"""What OPERATIONS.md says of Slurm and of warnings is so."""

import ast
import os
import re
import signal
import subprocess
import sys
import time

import pytest
import train_gpt2

from harness import ROOT, SCRIPTS, free_port, needs, steps_of, tiny_flags

OPERATIONS = (ROOT / "OPERATIONS.md").read_text(encoding="utf-8")
SRUN = """#!/bin/bash
# runs one task, and passes SIGTERM on to it, as srun does
trap 'kill -TERM $task' TERM
"$@" & task=$!
wait $task; wait $task
"""
SCONTROL = """#!/bin/bash
if [ "$1" = show ]; then echo 127.0.0.1; else echo "$*" >> requeued; fi
"""


@pytest.mark.slow
@needs("SIGKILL")
def test_the_script_for_slurm_stops_the_run_before_its_time_is_up_and_requeues_the_job(data, tmp_path):
    """With one node and two processes on a CPU, and stand-ins for Slurm's commands."""
    for name, text in {"srun": SRUN, "scontrol": SCONTROL}.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
        (tmp_path / name).chmod(0o755)
    [script] = re.findall(r"```sh\n(.*?)```", OPERATIONS, re.DOTALL)
    args = tiny_flags(data, "out", batch_size=2, max_steps=10**6, checkpoint_every=10**6, val_every=0, sample_every=0)
    command = " ".join([train_gpt2.__file__, *args])
    for written, here in {"-node=8 \\": "-node=2 \\", ":29500": f":{free_port()}", "train_gpt2.py": command}.items():
        assert written in script
        script = script.replace(written, here)
    path = os.pathsep.join([str(tmp_path), os.path.dirname(sys.executable), os.environ["PATH"]])
    slurm = dict(PATH=path, SLURM_NNODES="1", SLURM_NTASKS="2", SLURM_JOB_ID="7")
    with open(tmp_path / "slurm-7.out", "w") as output:
        job = subprocess.Popen(["bash", "-c", script], stdout=output, cwd=tmp_path, env=os.environ | slurm)
    log = tmp_path / "out" / "log.txt"
    while not (log.exists() and "5 train" in log.read_text(encoding="utf-8")):
        assert job.poll() is None
        time.sleep(0.1)
    job.send_signal(signal.SIGTERM)
    job.wait(60)
    assert "Stopped after" in (tmp_path / "slurm-7.out").read_text(encoding="utf-8")
    assert (tmp_path / "requeued").read_text(encoding="utf-8") == "requeue 7\n"
    assert steps_of(tmp_path / "out")[-1] >= 5


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
