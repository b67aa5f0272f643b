"""Measurements, each beside a reference in the same run: `python -m bench --help`. No other program needs them."""
