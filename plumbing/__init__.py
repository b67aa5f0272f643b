"""Everything that you need not read to understand the training. A wing imports only wings above it in this list.

    cli     the console, and flags made from a dataclass
    files   files that are never half written, and locks on folders
    system  devices, ranks, kernels, and a trial of what works and fits on this machine
    data    input files, their texts, tokenizers, token shards, and the order of their windows
    run     a run's settings, start, folder, checkpoints, logs and exports; comparisons of runs

No module here imports one of the programs that people run.
"""
