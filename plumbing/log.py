"""The one reader of a run's log.txt, which has `step stream value` on each line."""

import math
import re

from plumbing.files import open_regular

LINE = re.compile(r"(\d{1,15}) ([\w/.-]+) (-?\d{1,15}(\.\d{1,15})?(e[+-]\d{2,3})?|-?inf|nan)\n", re.ASCII)


def read_log(path, before=math.inf):
    """Yield (step, stream, value) of log.txt's lines below step `before`; damaged ones are left out, with a warning."""
    damaged, line = 0, "\n"
    with open_regular(path, "r", encoding="utf-8", errors="replace") as file:
        for line in file:
            match = LINE.fullmatch(line)
            if not match:
                damaged += 1
            elif int(match[1]) < before:
                yield int(match[1]), match[2], float(match[3])
    if damaged > (not line.endswith("\n")):  # no warning of a last line that a crash has cut short
        print(f"warning: {damaged} damaged lines of {path} are left out.", flush=True)
