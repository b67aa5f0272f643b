"""A run: its settings, start, folder, checkpoints, logs and exports."""
