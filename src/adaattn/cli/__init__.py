"""The ``adaattn`` command."""
