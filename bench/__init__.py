"""Benchmarks, each against a reference in the same run: see `python -m bench --help`. No other program needs them."""
