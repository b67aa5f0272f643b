"""--wandb: a copy of the run's log at Weights & Biases, which cannot stop the training and hardly delays it."""

import importlib.util
import itertools
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from plumbing.cli.console import first_line


def is_installed() -> bool:
    """Whether the package wandb is installed. A folder of that name, which wandb leaves behind, has no origin."""
    spec = importlib.util.find_spec("wandb")
    return spec is not None and spec.origin is not None


def start_wandb(config: Any) -> Any:
    """Start or resume the run at Weights & Biases; an offline one without a login, or if WANDB_MODE says so."""
    import wandb  # pyright: ignore[reportMissingImports]  # optional, and slow to import

    # seconds: how long the start waits for the server, and the end for the last lines
    timeouts = dict(init_timeout=8, finish_timeout=20, finish_timeout_raises=True)
    wandb.setup(wandb.Settings(silent=True, console="off", **timeouts))
    mode = os.environ.get("WANDB_MODE") or ("online" if wandb.login(prompt=False, verify=False) else "offline")
    # wandb names its folders by the time and the run, such as run-20261124_180000-1a2b3c4d
    begun = [path.name.rpartition("-")[2] for path in Path(config.out_dir, "wandb").glob("*run-*-*")]
    run = wandb.init(
        **dict(project=config.wandb, name=config.out_dir, dir=config.out_dir, id=begun[0] if begun else None),
        **dict(config=vars(config), resume="allow", allow_val_change=True, mode=mode),  # B may have changed
    )
    place = f"at {run.url}" if run.url else f"offline; wandb sync {Path(run.dir).parent} uploads it later"
    print(f"The log is mirrored {place}.", flush=True)
    return run


class WandbLog:
    """Hands the log to wandb, which sends it from a process of its own. Only the start and the end wait for that."""

    def __init__(self, config: Any, log_lines: Iterable[tuple[int, str, float]]):
        """log_lines: those already in log.txt, as read_log gives them."""
        self.run = self.attempt(start_wandb, config)
        for step, lines in itertools.groupby(log_lines, key=lambda line: line[0]):
            self.log(step, {stream: value for _, stream, value in lines})

    def attempt(self, function: Any, *args: Any, **options: Any) -> Any:
        """Call a function of wandb. An error becomes a warning, after which nothing is sent any more."""
        try:
            return function(*args, **options)
        except Exception as error:  # of whatever kind, in a large package that talks to a server
            self.run = None
            reason = f"{type(error).__name__}: {first_line(error)}"
            advice = "log.txt has everything. Without a network, set WANDB_MODE=offline."
            print(f"warning: Weights & Biases has failed ({reason}). {advice}", flush=True)

    def log(self, step: int, values: dict[str, float]) -> None:
        # the server may have later steps than the checkpoint, and takes each only once; an offline run has none
        if self.run and step >= self.run.starting_step:
            self.attempt(self.run.log, values, step=step)

    def finish(self, status: int) -> None:
        """End the run with an exit status, and wait a little for its last lines to arrive."""
        if self.run:
            self.attempt(self.run.finish, exit_code=status)
