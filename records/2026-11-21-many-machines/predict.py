"""Step times and efficiency to expect of GPT-2 124M on 1 to 512 GPUs, from counted bytes and published rates.

    python records/2026-11-21-many-machines/predict.py > predict.txt

Nothing here is measured on a GPU. Every number that goes in has its source beside it.
"""

import itertools
import math

# ----------------------------------------------------------------------------------------------------------
# What goes in

T = 1024
RATE = 0.84 * 589e3  # tokens/s of one H200: the sum of floors counted from the compiler's code, and the share of such a
# sum that modded-nanogpt's track-3 trainer reaches, by its published log
FIXED = 0.5e-3  # s per micro-batch whatever its size: casts of the weights, sums of gradients (estimate)
LAUNCHES = 3e-3  # s: 600 to 800 kernels cannot be launched faster (estimate)
ADAMW = 0.8e-3 + 0.35e-3  # s per step: 28 bytes per parameter at 4.2 TB/s; the norm of the gradients
MUON = 0.25e-3 + 0.35e-3 + 1.0e-3  # s: AdamW of the embeddings, the norm, Muon's elementwise passes (estimate)
NEWTON_SCHULZ = 7.5e-3  # s for all matrices on one GPU (estimate: 5 to 10)
CASTS = 16 * 124.5e6 / 4.2e12  # s: the hook's four passes, 16 bytes per parameter at 4.2 TB/s

# DDP's buckets of at most 100 MB and the part of the backward pass after which each is ready: measured, ready.txt
BUCKETS = [106_309_632, 108_672_000, 106_318_848, 163_995_648, 12_607_488]  # bytes in float32
READY = [0.50, 0.72, 0.94, 1.0, 1.0]

NVLINK = 370e9  # bytes/s that a ring reaches of NVLink 4's 450 (NVIDIA/nccl-tests issue 212, a maintainer)
NIC = 47e9  # bytes/s that it reaches of 400 Gb/s, which are 50 (46 to 48: NVIDIA/nccl-tests issue 290, a maintainer)
PER_MACHINE = 8
# microseconds: at the start, per hop over NVLink, per hop over the network; share of the rate.
# From NCCL's own cost model, src/graph/tuning.cc at commit b647562
PROTOCOLS = {
    ("ring", "Simple"): (8.4, 3.4, 14.0, 1.0),
    ("ring", "LL128"): (14.0, 1.9, 4.0, 0.92),
    ("tree", "LL128"): (14.0, 1.25, 8.5, 0.92 * 0.94),
}

KINDS = ((36, 768 * 768), (12, 768 * 768), (12, 4 * 768 * 768), (12, 4 * 768 * 768))  # Muon: matrices, elements of each

PER_CORE = 5_264_915 / 2  # tokens/s of fineweb.py per core: measured, records/2026-11-28-data-preparation/data_idle.txt, at 3734ee5

# ----------------------------------------------------------------------------------------------------------
# The model


def latency(algorithm, protocol, n, hops_per_rank):
    """Seconds until the first byte is through. hops_per_rank: 2 for an all-reduce, 1 for an all-gather."""
    start, nvlink_hop, network_hop, _ = PROTOCOLS[algorithm, protocol]
    machines = max(1, n // PER_MACHINE)
    if algorithm == "ring":
        network = hops_per_rank * machines if machines > 1 else 0
        nvlink = hops_per_rank * (n - 1) - network
    else:
        network = hops_per_rank * math.log2(machines)
        nvlink = hops_per_rank * (min(n, PER_MACHINE) - 1)
    return (start + nvlink * nvlink_hop + network * network_hop) * 1e-6


def bus_rate(n, nics):
    """Bytes/s through the narrowest place of a ring over n GPUs with so many network cards per machine."""
    return NVLINK if n <= PER_MACHINE else min(NVLINK, nics * NIC)


def all_reduce(size, n, nics):
    """Seconds, by the protocol that is fastest for this size."""
    times = []
    for algorithm, protocol in PROTOCOLS:
        share = PROTOCOLS[algorithm, protocol][3]
        wire = 2 * size * ((n - 1) / n if algorithm == "ring" else 1)
        times.append(latency(algorithm, protocol, n, 2) + wire / (share * bus_rate(n, nics)))
    return min(times)


def all_gather(received, n, nics):
    """Seconds until every rank has received so many bytes."""
    times = []
    for protocol in ("Simple", "LL128"):
        share = PROTOCOLS["ring", protocol][3]
        times.append(latency("ring", protocol, n, 1) + received / (share * bus_rate(n, nics)))
    return min(times)


def exposed(backward, n, nics, bytes_per_parameter):
    """Seconds for which the last bucket's sum outlasts the backward pass. Buckets are summed one after the other."""
    free = 0.0
    for size, ready in zip(BUCKETS, READY):
        free = max(free, ready * backward) + all_reduce(size * bytes_per_parameter / 4, n, nics)
    return max(0.0, free - backward)


def muon_bytes(ranks):
    """Bytes of updates that a rank receives in bfloat16, with `ranks` sharing the work; each kind is padded."""
    return sum((ranks - 1) * math.ceil(matrices / ranks) * elements * 2 for matrices, elements in KINDS)


def muon_share(ranks):
    """The share of the orthogonalization's arithmetic that the busiest rank has."""
    mine = sum(math.ceil(matrices / ranks) * elements for matrices, elements in KINDS)
    return mine / sum(matrices * elements for matrices, elements in KINDS)


def optimizer_seconds(optimizer, n, nics):
    if optimizer == "adamw":
        return ADAMW
    ranks = n if optimizer == "muon" else min(n, PER_MACHINE)  # "muon by machine": every machine for itself
    gathers = all_gather(muon_bytes(ranks), ranks, nics) if ranks > 1 else 0.0
    return MUON + muon_share(ranks) * NEWTON_SCHULZ + gathers


def micro_batch(B, rate=None):
    """Seconds of a forward and backward pass over B windows."""
    full = 64 * T / (rate or RATE)
    return max(LAUNCHES, FIXED + (full - FIXED) * B / 64)


def step_seconds(n, windows, nics, optimizer="adamw", bytes_per_parameter=4, rate=None):
    """Seconds of a step in which every GPU has so many windows, in micro-batches of at most 64."""
    B = max(d for d in range(1, 65) if windows % d == 0)
    micro = micro_batch(B, rate)
    seconds = windows // B * micro + optimizer_seconds(optimizer, n, nics)
    if n > 1:
        seconds += exposed(2 / 3 * micro, n, nics, bytes_per_parameter)
        seconds += CASTS if bytes_per_parameter == 2 else 0.0
    return seconds


def efficiency(n, windows, nics, *args, **kwargs):
    """Tokens/s per GPU, beside one GPU with the preset's 512 windows."""
    optimizer = args[0] if args else kwargs.get("optimizer", "adamw")
    alone = 512 / step_seconds(1, 512, nics, optimizer.split()[0], rate=kwargs.get("rate"))
    return windows / step_seconds(n, windows, nics, *args, **kwargs) / alone


# ----------------------------------------------------------------------------------------------------------
# The tables

NETWORKS = {"8 x 400 Gb/s": 8, "1 x 400 Gb/s": 1}  # per machine of 8 GPUs
COLUMNS = (("adamw", 4), ("adamw", 2), ("muon", 4), ("muon by machine", 4))


def print_steps(title, cases):
    print(f"\n{title}\n")
    print("| GPUs | between machines | B, micro-steps | tokens per step | AdamW ms | efficiency | tok/s "
          "| gradients in bfloat16 ms | gain | Muon ms | Muon within each machine ms |")  # fmt: skip
    print("|" + "---|" * 11)
    for n, windows in cases:
        for network, nics in NETWORKS.items() if n > PER_MACHINE else [("", 8)]:
            ms = [1e3 * step_seconds(n, windows, nics, optimizer, size) for optimizer, size in COLUMNS]
            B = min(64, windows)
            tokens = n * windows * T
            print(f"| {n} | {network} | {B}, {windows // B} | {tokens:,} | {ms[0]:.1f} | "
                  f"{efficiency(n, windows, nics):.0%} | {tokens / ms[0] / 1e3:.1f}M | {ms[1]:.1f} | "
                  f"{ms[0] / ms[1] - 1:+.0%} | {ms[2]:.1f} | {ms[3]:.1f} |")  # fmt: skip


def print_bytes():
    print("\nBytes that a rank sends per step, and receives (formula), GB\n")
    print("| GPUs | gradients, float32 | bfloat16 | Muon's updates as they are | within each machine |")
    print("|" + "---|" * 5)
    for n in (2, 8, 16, 64, 512):
        gradients = 2 * (n - 1) / n * sum(BUCKETS) / 1e9
        print(f"| {n} | {gradients:.3f} | {gradients / 2:.3f} | {muon_bytes(n) / 1e9:.3f} | "
              f"{muon_bytes(min(n, PER_MACHINE)) / 1e9:.3f} |")  # fmt: skip


def print_smallest():
    print("\nThe smallest number of windows of 1,024 tokens per GPU and step with 90% efficiency (tokens per step)\n")
    print("| GPUs | between machines | AdamW | gradients in bfloat16 | Muon | Muon within each machine |")
    print("|" + "---|" * 6)
    for n in (8, 16, 64, 512):
        for network, nics in NETWORKS.items() if n > PER_MACHINE else [("", 8)]:
            cells = []
            for optimizer, size in COLUMNS:
                few = (2**k for k in itertools.count())
                windows = next(w for w in few if w > 4096 or efficiency(n, w, nics, optimizer, size) >= 0.9)
                cells.append(f"{windows} ({windows * n * T / 2**20:g}M)" if windows <= 4096 else "none")
            print(f"| {n} | {network} | " + " | ".join(cells) + " |")


def print_sensitivity():
    print("\nEfficiency at the preset's 524,288 tokens per step, if what is uncertain is otherwise\n")
    print("| GPUs | between machines | as above | compute at the floors, 589K tok/s | no overlap "
          "| a quarter more bytes/s |")  # fmt: skip
    print("|" + "---|" * 6)
    global READY, NVLINK, NIC
    for n, windows in ((8, 64), (16, 32), (64, 8), (512, 1)):
        for network, nics in NETWORKS.items() if n > PER_MACHINE else [("", 8)]:
            cells = [efficiency(n, windows, nics), efficiency(n, windows, nics, rate=589e3)]
            before, READY = READY, [1.0] * len(BUCKETS)
            cells.append(efficiency(n, windows, nics))
            READY = before
            NVLINK, NIC = NVLINK * 1.25, NIC * 1.25
            cells.append(efficiency(n, windows, nics))
            NVLINK, NIC = NVLINK / 1.25, NIC / 1.25
            print(f"| {n} | {network} | " + " | ".join(f"{cell:.0%}" for cell in cells) + " |")


def print_data():
    """1.3T tokens by fineweb.py --part: time and disk. 2 bytes per token."""
    tokens = 1.3e12
    print("\n1.3T tokens of FineWeb-Edu by fineweb.py --part I/N on N machines\n")
    print("| machines | cores each | hours | if one process made 38M tokens/s at most | at 1M tokens/s a core | "
          "shards per machine, TB | written by each, MB/s |")  # fmt: skip
    print("|" + "---|" * 7)
    for machines in (1, 4, 16, 64):
        for cores in (16, 64):
            rate = cores * PER_CORE
            seconds, bounded, cautious = (tokens / machines / r for r in (rate, min(rate, 38e6), cores * 1e6))
            print(f"| {machines} | {cores} | {seconds / 3600:.2g} | {bounded / 3600:.2g} | {cautious / 3600:.2g} | "
                  f"{2 * tokens / machines / 1e12:.3f} | {2 * rate / 1e6:.0f} |")  # fmt: skip


if __name__ == "__main__":
    print_bytes()
    print_steps("The preset's step of 524,288 tokens, spread over more GPUs",
                [(1, 512), (8, 64), (16, 32), (64, 8), (512, 1)])  # fmt: skip
    print_steps("64 windows for every GPU: the step grows with them", [(16, 64), (64, 64), (512, 64)])
    print_smallest()
    print_sensitivity()
    print_data()
