"""What the command lines of the examples share: options that refuse what cannot work."""

import argparse
import contextlib

from adaattn.errors import AdaAttnError

MANY = 2**31
NUMBERS = {  # what each is, the least and the most that it may be
    "steps": ("training steps", 1, MANY),
    "batch": ("sequences in a batch", 1, MANY),
    "length": ("length of a sequence", 2, MANY),
    "layers": ("layers of the encoder", 1, MANY),
    "width": ("embedding dimension", 1, MANY),
    "heads": ("attention heads", 1, MANY),
    "head-dim": ("dimension of a head", 1, MANY),
    "window": ("earlier tokens that a token sees", 0, MANY),
    "mib": ("memory budget in MiB", 1, MANY),
    "tokens": ("most tokens to add", 1, MANY),
    "temperature": ("0 always takes the likeliest token", 0.0, 100.0),
    "error-budget": ("relative error that a head's output may have in low rank", 0.0, 0.99),
    "seed": ("seed of the random numbers", 0, MANY),
}


def number(kind, least, most):
    """Return what reads a number of an option, from ``least`` to ``most``."""

    def read(text):
        if least <= (value := kind(text)) <= most:
            return value
        raise argparse.ArgumentTypeError(f"expected a number from {least} to {most}, got {text}")

    read.__name__ = kind.__name__  # argparse names it where the text is no number
    return read


def add_numbers(parser, longest=MANY, **defaults):
    """Add some of `NUMBERS` with their defaults, and the seed; ``--length`` is at most longest."""
    for name, default in {**defaults, "seed": 0}.items():
        words, least, most = NUMBERS[option := name.replace("_", "-")]
        kind = number(type(default), least, longest if name == "length" else most)
        words = f"{words} (default {default})"
        parser.add_argument(f"--{option}", type=kind, default=default, metavar="N", help=words)


@contextlib.contextmanager
def one_line_errors(parser):
    """Tell what the library refuses as argparse tells a wrong option."""
    try:
        yield
    except AdaAttnError as error:
        parser.error(str(error).partition("\n")[0])
