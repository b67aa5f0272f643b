"""What you need not read to understand the training: files, processes, downloads, the command line."""
