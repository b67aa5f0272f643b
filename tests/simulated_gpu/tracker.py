"""The memory of a micro-step as torch's own tracker counts it, beside the account that a dry run prints.

In the project's root, with flags of train_gpt2.py in each line:

    python tests/simulated_gpu/tracker.py < flags.txt

Tensors are fake ones on the simulated GPU, and so are the ranks: a step computes nothing. Counted are the bytes of live
tensors, without the CUDA context, workspaces and fragmentation.
"""

import contextlib
import json
import sys
from pathlib import Path
from unittest import mock


@contextlib.contextmanager
def flash_attention():
    """Context in which attention is a GPU's kernel, as fake tensors have none that computes."""
    import torch

    def attention(q, k, v, attn_mask=None, is_causal=False):
        return torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, is_causal)[0]

    with mock.patch.object(torch.nn.functional, "scaled_dot_product_attention", attention):
        yield


def account_of(flags):
    """A dry run's config, B and bytes on each rank."""
    import train_gpt2

    found = []
    with mock.patch.object(train_gpt2, "print_account", lambda start, parts: found.append(parts)):
        train_gpt2.main([*flags, "--dry-run", "--data", "none"])
    [parts] = found
    return parts.config, parts.found.B, parts.found.account


def tracked(config, B):
    """{kind: bytes} at the peak of a micro-step, before which gradients and optimizer state are there."""
    import torch
    import torch.distributed as dist
    import train_gpt2
    from plumbing.system.distributed import World
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.distributed import device_mesh
    from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
    from torch.distributed._tools.mem_tracker import MemTracker
    from torch.testing._internal.distributed.fake_pg import FakeStore

    class Stream:  # or an event: the simulated GPU does one thing after another
        def __init__(self, *args, **options):
            pass

        def __getattr__(self, name):
            return lambda *args, **options: Stream()

    cuda = torch.cuda
    with contextlib.ExitStack() as stack:
        for name in ("Stream", "Event", "current_stream", "default_stream"):
            stack.enter_context(mock.patch.object(cuda, name, Stream))
        stack.enter_context(mock.patch.object(cuda, "stream", contextlib.nullcontext))
        for owner in (torch, cuda):  # a fake state has no numbers
            stack.enter_context(mock.patch.object(owner, "set_rng_state"))
        ranks = config.gpus or 1
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
        stack.callback(dist.destroy_process_group)
        mesh = device_mesh.init_device_mesh("cuda", (ranks,))
        stack.enter_context(mock.patch.object(device_mesh, "init_device_mesh", lambda *args: mesh))
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        world = World(0, ranks, torch.device("cuda:0"))
        with world.device:
            model = train_gpt2.make_gpt(config)
        if config.shard:
            train_gpt2.shard(model, world, config)
        optimizers = train_gpt2.configure_optimizers(model, config)
        for p in model.parameters():
            p.grad = torch.zeros_like(p)  # with DDP, a view of its bucket
        for optimizer in optimizers:
            optimizer.step()  # outside of the tracker: fake tensors make copies here that a GPU does not make
        x, y = torch.zeros(2, B, config.sequence_length, dtype=torch.long, device=world.device)
        tracker = FSDPMemTracker(model, *optimizers) if config.shard else MemTracker()
        if not config.shard:
            tracker.track_external(model, *optimizers)
        with tracker:
            with train_gpt2.autocast(config, world):
                _, loss = model(x, y, return_logits=False)
            loss.backward()
        [counted] = [each for device, each in tracker.get_tracker_snapshot("peak").items() if device.type == "cuda"]
    return {str(getattr(kind, "value", kind)): number for kind, number in counted.items() if number}


def compare(lines, device="cuda"):
    """Print, for each line of flags, the bytes of the account, made on this device, and those of the tracker."""
    for line in lines:
        flags = [*line.split(), "--device", device]
        with contextlib.ExitStack() as stack:
            if device == "cuda":
                stack.enter_context(flash_attention())
            config, B, account = account_of(flags)
        with flash_attention():
            kinds = tracked(config, B)
        report = {"flags": line.strip(), "B": B, "account": account.total(B), "tracked": kinds["Total"]}
        print(json.dumps(report | {"parts": account._asdict(), "kinds": kinds}), flush=True)


if __name__ == "__main__":
    here = Path(__file__).resolve().parent
    sys.path[:0] = [str(here.parent.parent), str(here.parent)]
    from simulated_gpu import gpu

    gpu.load()
    gpu.insert("H200")
    compare(sys.stdin)
