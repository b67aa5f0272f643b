"""What nobody must read to understand the training: files, processes, downloads, the command line."""
