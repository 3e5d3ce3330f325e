"""Texts shipped with the package, for evaluation without a network. See README.md."""
