"""What you need not read to understand the training, in wings. A wing imports only those above it in this list.

    cli     how a program begins, ends and speaks; flags from a dataclass
    files   files that are never half written, and locks on folders
    system  devices, the ranks of a run, kernels, and what works and fits on this machine
    data    which files a data set has, the texts in them, tokenizers, token shards, and the order of their windows
    run     a run's settings, start, folder, checkpoints, logs and exports, and what several runs show

No module here imports a program of the top level.
"""
