"""``python -m adaattn``: the same as the ``adaattn`` command."""

from adaattn.cli.app import main

if __name__ == "__main__":
    main()
