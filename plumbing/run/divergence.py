"""The error message when training diverges: where in the data it happened, and what to do."""

from typing import Any

import numpy as np

from plumbing.cli.console import UserError
from plumbing.run import checkpoint as checkpoints
from plumbing.run.summary import rate_flags


def diverged(step: int, parts: Any, *, loss: float, norm: float, start: int, batch_losses: Any) -> UserError:
    """The error for a loss or gradient norm that is not finite, in a step whose windows begin at position `start`.

    batch_losses: this rank's losses of its micro-batches, which all have the same number of windows.
    """
    config, loader = parts.config, parts.loader
    gathered = parts.world.gather(batch_losses.tolist())
    losses = np.array(gathered).T.flatten()  # in the order of the micro-batches
    B = (loader.position - start) // len(losses)
    # if all are finite, and only the norm is not, this is the first micro-batch
    first_bad = int(np.argmin(np.isfinite(losses)))
    positions = start + first_bad * B + np.arange(min(B, 4))
    where = loader.order.describe(positions)
    rates = " ".join(f"{flag} LOWER" for flag in rate_flags(parts.optimizers))
    # a checkpoint of this step does not help: training diverges from there
    good = [path for path in checkpoints.list_checkpoints(config.out_dir) if checkpoints.step_of(path) < step]
    remedy = f"--no-resume {rates}"
    if good:
        remedy = f"--branch-from {good[-1]} {rates} --out-dir NEW"
    return UserError(
        f"Training diverged in step {step}: the loss is {loss}, the gradient norm {norm}. The batch includes the "
        f"sequences at {where}. Train at a lower rate: {remedy}."
    )
