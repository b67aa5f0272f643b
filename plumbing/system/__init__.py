"""The machine: devices, ranks, kernels, and what works and fits."""
