"""Benchmarks: each module runs with ``python -m`` and writes JSON under ``results/``."""
