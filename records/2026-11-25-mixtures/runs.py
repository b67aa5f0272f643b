"""Every second run of a list, one after the other in this process, which saves imports: python runs.py 0|1 < FLAGS.

Each line has the flags of a run of train_gpt2.py; what it prints is in OUT_DIR.console.
"""

import contextlib
import shlex
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2]))

import train_gpt2

for line in sys.stdin.readlines()[int(sys.argv[1]) :: 2]:
    args = shlex.split(line)
    sys.argv = ["train_gpt2.py", *args]  # the command in run.txt
    out_dir = args[args.index("--out-dir") + 1]
    with open(f"{out_dir}.console", "w") as console, contextlib.redirect_stdout(console):
        train_gpt2.main(args)
