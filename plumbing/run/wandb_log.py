"""--wandb: a copy of the run's log at Weights & Biases. It cannot stop the training and hardly delays it."""

import importlib.util
import itertools
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from plumbing.cli.console import first_line, print0

START_SECONDS = 8  # how long the start waits for the server
FINISH_SECONDS = 20  # how long the end waits for the last lines


def is_installed() -> bool:
    """Whether the package wandb is installed. A mere folder called wandb, which wandb leaves behind, has no origin."""
    spec = importlib.util.find_spec("wandb")
    return spec is not None and spec.origin is not None


def start_wandb(config: Any) -> Any:
    """Start or resume the run at Weights & Biases, online if there is a login. WANDB_MODE overrides this."""
    import wandb  # pyright: ignore[reportMissingImports]  # optional, and slow to import

    settings = wandb.Settings(
        silent=True,
        console="off",
        init_timeout=START_SECONDS,
        finish_timeout=FINISH_SECONDS,
        finish_timeout_raises=True,
    )
    wandb.setup(settings)
    mode = os.environ.get("WANDB_MODE")
    if not mode:
        has_login = wandb.login(prompt=False, verify=False)
        mode = "online" if has_login else "offline"
    # wandb names its folders by time and id, such as run-20261124_180000-1a2b3c4d
    folders = [path.name for path in Path(config.out_dir, "wandb").glob("*run-*-*")]
    run = wandb.init(
        project=config.wandb,
        name=config.out_dir,
        dir=config.out_dir,
        id=folders[0].rpartition("-")[2] if folders else None,
        config=vars(config),
        resume="allow",
        allow_val_change=True,  # B may have changed
        mode=mode,
    )
    place = f"at {run.url}" if run.url else f"offline; wandb sync {Path(run.dir).parent} uploads it later"
    print(f"The log is mirrored {place}.", flush=True)
    return run


class WandbLog:
    """Hands the log to wandb, which sends it from another process. Only the start and the end wait for that."""

    def __init__(self, config: Any, log_lines: Iterable[tuple[int, str, float]]):
        """log_lines: the lines already in log.txt, as read_log yields them."""
        self.run = self.attempt(start_wandb, config)
        for step, lines in itertools.groupby(log_lines, key=lambda line: line[0]):
            self.log(step, {stream: value for _, stream, value in lines})

    def attempt(self, function: Any, *args: Any, **options: Any) -> Any:
        """Call a function of wandb. An error becomes a warning, and nothing more is sent."""
        try:
            return function(*args, **options)
        except Exception as error:  # a large package that talks to a server may raise anything
            self.run = None
            reason = f"{type(error).__name__}: {first_line(error)}"
            advice = "log.txt still gets everything. Without a network, set WANDB_MODE=offline."
            print0(f"warning: Weights & Biases failed ({reason}). {advice}")

    def log(self, step: int, values: dict[str, float]) -> None:
        # the server takes each step only once, and may have steps after the checkpoint; an offline run has none
        if self.run and step >= self.run.starting_step:
            self.attempt(self.run.log, values, step=step)

    def finish(self, status: int) -> None:
        """End the run with an exit status, and wait a little for its last lines to arrive."""
        if self.run:
            self.attempt(self.run.finish, exit_code=status)
