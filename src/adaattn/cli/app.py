"""The entry point: says in one line what is missing, else hands over to the commands."""

import contextlib
import errno
import sys

__all__ = ["main"]

_OPTIONAL = ("typer", "rich")


def main() -> None:
    """Run the ``adaattn`` command on the arguments of this process.

    Exits with 0, with 2 for anything the user can mend, and with 130 after Ctrl-C.
    """
    try:
        from adaattn.cli.commands import app

        try:
            app()
        finally:
            if sys.stdout is not None:
                sys.stdout.flush()  # what cannot be written is told here, not while Python ends
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        print(f"error: the output cannot be written: {error.strerror}", file=sys.stderr)
        with contextlib.suppress(OSError):
            sys.stdout.close()
        sys.exit(2)
    except ModuleNotFoundError as error:
        missing = (error.name or "").split(".")[0]
        if missing not in _OPTIONAL:
            raise
        print(
            f"error: the adaattn command needs {missing}; run: pip install adaattn[cli]",
            file=sys.stderr,
        )
        sys.exit(2)
