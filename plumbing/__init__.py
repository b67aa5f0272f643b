"""Files, processes, downloads and the command line: not needed to understand the training."""
