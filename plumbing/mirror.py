"""--wandb: a copy of the run's log at Weights & Biases, which cannot stop the training and hardly delays it."""

import importlib.util
import itertools
import os
import uuid
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from plumbing.files import atomic_write
from plumbing.program import first_line


def is_installed():
    """Whether the package wandb is installed. A folder of that name, which wandb leaves behind, has no origin."""
    spec = importlib.util.find_spec("wandb")
    return spec is not None and spec.origin is not None


def start_wandb(config):
    """Start or resume the run at Weights & Biases; an offline one without a login, or if WANDB_MODE says so."""
    import wandb  # pyright: ignore[reportMissingImports]  # optional, and slow to import

    id_file = Path(config.out_dir, "wandb", "run_id.txt")  # a resumed run has the same id
    if not id_file.exists():
        id_file.parent.mkdir(exist_ok=True)
        with atomic_write(id_file, "w") as file:
            file.write(uuid.uuid4().hex[:12])
    # seconds: how long the start waits for the server, and the end for the last lines
    timeouts = dict(init_timeout=8, finish_timeout=20, finish_timeout_raises=True)
    # print nothing, and do not stop the training if the run is stopped or deleted on their page
    settings = wandb.Settings(silent=True, console="off", stop_fn=lambda: None, **timeouts)
    wandb.setup(settings)
    options = dict(project=config.wandb, name=config.out_dir, dir=config.out_dir, id=id_file.read_text())
    # a resumed run may have another B
    options |= dict(config=vars(config), resume="allow", allow_val_change=True, settings=settings)
    mode = os.environ.get("WANDB_MODE") or ("online" if wandb.login(prompt=False, verify=False) else "offline")
    run = wandb.init(mode=mode, **options)
    if run.offline:
        command = f"wandb sync {Path(run.dir).parent}"
        print(f"note: --wandb is offline. To upload the log later: {command}", flush=True)
    elif run.url:
        print(f"The log is mirrored at {run.url}.", flush=True)
    return run


class Mirror:
    """Hands the log to wandb, which sends it from a process of its own. Only the start and the end wait for that."""

    def __init__(self, config: Any, log_lines: Iterable[tuple[int, str, float]]):
        """log_lines: those already in log.txt, as read_log gives them."""
        self.run = self.attempt(start_wandb, config)
        for step, lines in itertools.groupby(log_lines, key=lambda line: line[0]):
            self.log(step, {stream: value for _, stream, value in lines})

    def attempt(self, function, *args, **options):
        """Call a function of wandb. An error becomes a warning, after which nothing is sent any more."""
        try:
            return function(*args, **options)
        except Exception as error:  # of whatever kind, in a large package that talks to a server
            self.run = None
            problem = f"Weights & Biases has failed ({type(error).__name__}: {first_line(error)})"
            print(f"warning: {problem}. Training does without it; log.txt has everything.", flush=True)
            print(
                "On a machine without a network, set WANDB_MODE=offline, and upload the log later.", flush=True
            )

    def log(self, step, values):
        # After a resume the server may already have steps after the checkpoint, and it takes each step only once. An
        # offline run gets the whole log: its upload replaces what the server has.
        if self.run and step >= self.run.starting_step:
            self.attempt(self.run.log, values, step=step)

    def finish(self, status):
        """End the run with an exit status, and wait a little for its last lines to arrive."""
        if self.run:
            self.attempt(self.run.finish, exit_code=status)
