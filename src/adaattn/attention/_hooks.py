"""Hooks of a module, moved to the one that takes its place."""

import functools
import weakref
from typing import Any, Final

from torch import nn

HOOK_DICTIONARIES: Final = tuple(sorted(name for name in vars(nn.Module()) if "_hooks" in name))
"""Where a module keeps its hooks."""


def bound_hooks(module: nn.Module) -> list[str]:
    """Return the names of hooks that hold the module itself, which a move would leave behind."""
    return [
        f"{dictionary.lstrip('_')}: {getattr(hook, '__qualname__', type(hook).__name__)}"
        for dictionary in HOOK_DICTIONARIES
        for hook in getattr(module, dictionary).values()
        if _holds(hook, module)
    ]


def move_hooks(old: nn.Module, new: nn.Module) -> None:
    """Hang the hooks of one module on another; handles made before still remove them."""
    for name in HOOK_DICTIONARIES:
        # A handle knows its dictionary, so the new module takes over the dictionary.
        hooks: Any = getattr(old, name)
        hooks.update(getattr(new, name))
        vars(new)[name] = hooks
        for hook in hooks.values():
            if getattr(hook, "with_module", False):
                # PyTorch wraps such a hook with the module that it is to be given.
                hook.module = weakref.ref(new)
    vars(new)["_is_full_backward_hook"] = old._is_full_backward_hook


def _holds(hook: Any, module: nn.Module) -> bool:
    """Return whether a hook is bound to the module."""
    if isinstance(hook, functools.partial):
        return module in (*hook.args, *hook.keywords.values()) or _holds(hook.func, module)
    inner = getattr(hook, "hook", None)
    return getattr(hook, "__self__", None) is module or (
        inner is not None and _holds(inner, module)
    )
