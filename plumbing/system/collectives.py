"""Computations that the ranks share, whether each of them holds the full model or a shard."""

import math
from collections.abc import Callable

import torch
import torch.distributed as dist


def map_over_ranks(
    function: Callable[[torch.Tensor], torch.Tensor], stacks: torch.Tensor, *, rows: int
) -> torch.Tensor:
    """Apply a function to each matrix (rows, cols) in stacks (n, k * rows, cols). Each is computed on one rank.

    function takes any number of matrices (m, rows, cols) and treats each of them independently.
    """
    if type(stacks) is not torch.Tensor:  # the stacks of a sharded model
        from plumbing.system import sharding  # takes a second to import

        return sharding.map_over_ranks(function, stacks, rows=rows)
    matrices = stacks.view(-1, rows, stacks.size(-1))
    if dist.is_initialized():
        mapped = map_shares(function, matrices)
    else:
        mapped = function(matrices)
    return mapped.to(stacks.dtype).reshape(stacks.shape)


def map_shares(function: Callable[[torch.Tensor], torch.Tensor], matrices: torch.Tensor) -> torch.Tensor:
    """function(matrices). Each rank computes a share, and all ranks get everything."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    per_rank = math.ceil(len(matrices) / world_size)
    padding = matrices.new_zeros(per_rank * world_size - len(matrices), *matrices.shape[1:])
    padded = torch.cat([matrices, padding])
    local = function(padded[rank * per_rank : (rank + 1) * per_rank]).contiguous()
    mapped = local.new_empty(padded.shape)
    # the name since torch 2.13, which warns about the earlier one
    all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    all_gather(mapped, local)
    return mapped[: len(matrices)]
