"""What you need not read to understand the training. A module imports only those above it or in its own line.

    program, files      how a program begins and ends, and what it says; files that are never half written, and locks
    flags, kernels      flags from a dataclass; attention for CPUs, the cache of keys and values, float8
    machine             devices, dtypes, the speed of GPUs
    distributed         the ranks of a run
    sources             which files a data set has, on disk or on the hub
    shards, documents   token shards on disk; the texts that they are made of
    huggingface         GPT-2s in Hugging Face format, read and written
    trainer             the file that trains: what a run keeps of it, and whether it has changed
    checkpoint          checkpoints, found, read and written
    journal             log.txt and run.txt, written and read
    mirror, modelcard   copies of the log at Weights & Biases; the README of an exported model
    settings, trial     what settings may be; the trial step, which finds out what works on this machine
    runs, compare       the folder of a run, from its beginning to its end; what several runs show
    account             what a run will do and cost, said before its first step

No module here imports a program of the top level but tokenizer, which is a library, too.
"""
