"""The suites of ``benchmarks/gpu_benchmark.py``, and what they share."""
