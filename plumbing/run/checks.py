"""What the program needs of a model, examined before the first step."""

from collections.abc import Callable
from typing import Any

import torch

from plumbing.cli.console import print0
from plumbing.run.checkpoint import model_config
from plumbing.system.autofit import is_out_of_memory, random_batch, unchanged
from plumbing.system.distributed import World

SELF_CHECK_PARAMETERS = 10_000_000  # up to this size, the self-check takes less than half a second on a CPU


def self_check(
    raw_model: Any, from_state: Callable[[Any, Any], Any], num_ids: int, *, T: int, world: World
) -> None:
    """Warn if a second model with the saved weights computes something else, or if tokens see later ones.

    Only where that takes less than half a second, and where there is memory for it.
    """
    is_small = sum(p.numel() for p in raw_model.parameters()) <= SELF_CHECK_PARAMETERS
    if not world.is_master or not (is_small or world.device_type == "cuda"):
        return
    half = max(1, min(T, 64) // 2)
    try:
        with unchanged(raw_model, world), torch.no_grad():
            raw_model.eval()
            one, other = random_batch(num_ids, 1, 2 * half, world)
            other[:, :half] = one[:, :half]
            logits, of_other = raw_model(one)[0], raw_model(other)[0]
            # a model is loaded with GPTConfig's fields alone, so here it must not need other settings either
            second = from_state(model_config(raw_model.config), raw_model.state_dict()).to(world.device).eval()
            differences = [(second(one)[0] - logits).abs().max(), (of_other - logits)[:, :half].abs().max()]
            is_same, is_causal = [bool(difference <= 1e-3 * logits.std()) for difference in differences]
    except RuntimeError as error:
        if is_out_of_memory(error):
            return
        raise
    if not is_same:
        print0(
            "warning: A second model with the saved weights computes other logits, so a resumed run will not be the "
            "same. Keep all that the model computes with in its parameters and buffers."
        )
    if not is_causal:
        print0(
            "warning: A token's logits depend on later tokens, so the loss says little and samples are worthless."
        )
