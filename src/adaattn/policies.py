"""The policies by name, the ambient one, and policy files.

``quality`` is exact up to the rounding of the input's dtype. ``balanced`` allows an
estimated relative error of 0.01 of each head's output and ``speed`` 0.05, both checked on
sampled rows of the very call.
"""

import contextlib
import contextvars
import json
import math
import os
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Final

from adaattn._files import replace_file
from adaattn.errors import ArgumentTypeError, PolicyError
from adaattn.spec import Policy

__all__ = [
    "AMBIENT",
    "PRESETS",
    "PolicyLike",
    "current_policy",
    "load_policy",
    "resolve_policy",
    "save_policy",
    "use_policy",
]

PRESETS: Final[dict[str, Policy]] = {
    "quality": Policy(name="quality", error_budget=0.0),
    "balanced": Policy(name="balanced", error_budget=0.01),
    "speed": Policy(name="speed", error_budget=0.05),
}

PolicyLike = Policy | str | float | os.PathLike[str]
"""A policy, a preset's name, a policy file, or an error budget."""

_FORMAT: Final = "adaattn-policy"
_VERSION: Final = 1

AMBIENT: contextvars.ContextVar[Policy] = contextvars.ContextVar(
    "adaattn_policy", default=PRESETS["quality"]
)
"""The policy that calls without one follow."""


def current_policy() -> Policy:
    """Return the policy that calls without one follow."""
    return AMBIENT.get()


@contextlib.contextmanager
def use_policy(policy: PolicyLike) -> Iterator[Policy]:
    """Make ``policy`` the one that calls inside the ``with`` block follow, in this thread.

    A backward pass outside of the block does not see it, nor do autograd's threads on a GPU: give
    checkpointed calls their policy.

    Args:
        policy: a `Policy`, the name of a preset, the path of a policy file, or an error budget.

    Raises:
        PolicyError: no preset has that name, or the file is not a policy file.

    Example:
        >>> import adaattn
        >>> with adaattn.use_policy("balanced") as policy:
        ...     policy.error_budget
        0.01
    """
    resolved = resolve_policy(policy)
    token = AMBIENT.set(resolved)
    try:
        yield resolved
    finally:
        AMBIENT.reset(token)


def resolve_policy(policy: PolicyLike | None) -> Policy:
    """Return the policy meant by an argument.

    Args:
        policy: a policy itself, a preset's name, a file, an error budget (a number, or its text),
            or None: the ambient one.

    Raises:
        PolicyError: no preset has that name and no such file exists, or the number is no budget.
    """
    if policy is None:
        return current_policy()
    if isinstance(policy, Policy):
        return policy
    if isinstance(policy, str) and policy in PRESETS:
        return PRESETS[policy]
    if isinstance(policy, (str, os.PathLike)):
        path = Path(policy)
        if path.suffix == ".json" or os.path.isfile(path):
            return load_policy(path)
    budget = _number(policy)
    if 0 <= budget < 1:
        return _with_budget(budget)
    names = ", ".join(repr(name) for name in PRESETS)
    expected = f"{names}, a Policy, the path of a policy file or an error budget in [0, 1)"
    raise PolicyError.got("policy", expected, repr(policy))


def _number(policy: object) -> float:
    """Return a number that was given, as such or as text; NaN for anything else."""
    if isinstance(policy, (int, float, str)) and not isinstance(policy, bool):
        with contextlib.suppress(ValueError, OverflowError):
            return float(policy)
    return math.nan


@lru_cache(maxsize=256)
def _with_budget(error_budget: float) -> Policy:
    """Return the policy that a number stands for, one object for each."""
    return Policy(name=f"{error_budget:g}", error_budget=float(error_budget))


def load_policy(path: str | os.PathLike[str]) -> Policy:
    """Return the policy in a file that `save_policy` wrote.

    Raises:
        PolicyError: the file is missing, corrupt, of another kind or of a later version.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
        data = json.loads(text)
    except json.JSONDecodeError as error:
        raise PolicyError.got(
            f"policy file {path}",
            "JSON",
            f"text that breaks off at line {error.lineno}",
            "write it again with adaattn.save_policy",
        ) from error
    except (OSError, ValueError, RecursionError) as error:
        raise PolicyError.got(f"policy file {path}", "a readable file", repr(error)) from error
    if not isinstance(data, dict) or data.get("format") != _FORMAT:
        raise PolicyError.got(
            f"policy file {path}", f'an object with "format": "{_FORMAT}"', "another file"
        )
    if data.get("version") != _VERSION:
        raise PolicyError.got(
            f"version of policy file {path}",
            _VERSION,
            data.get("version"),
            "use the version of AdaAttn that wrote it",
        )
    policy = data.get("policy")
    if not isinstance(policy, dict):
        raise PolicyError.got(f"policy file {path}", 'an object under "policy"', policy)
    return Policy.from_dict(policy)


def save_policy(policy: Policy, path: str | os.PathLike[str]) -> None:
    """Write a policy as human-readable JSON; an existing file is replaced whole or not at all.

    Raises:
        ArgumentTypeError: it is no `Policy`.
        PolicyError: the file cannot be written.
    """
    if not isinstance(policy, Policy):
        hint = "resolve a preset's name with adaattn.policies.resolve_policy"
        raise ArgumentTypeError.got("policy", "a Policy", repr(policy), hint)
    document = {"format": _FORMAT, "version": _VERSION, "policy": policy.to_dict()}
    text = json.dumps(document, indent=2) + "\n"
    try:
        replace_file(Path(path), lambda temporary: temporary.write_text(text, encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise PolicyError.got(
            f"policy file {path}", "a place that can be written", repr(error)
        ) from error
