"""Executors timed in turns on this machine, one problem at a time, and the problems to time."""

from adaattn.tuning.run import tune

__all__ = ["tune"]
