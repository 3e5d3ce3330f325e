"""A function of foreign code, with our attention wherever it calls PyTorch's by name.

The clone shares code, defaults and closure with the original. Only what the names
``F``, ``torch`` or ``scaled_dot_product_attention`` stand for in it is different, and what
``dispatch_attention_fn`` of diffusers does. Functions that the original calls are not touched.
"""

import dis
import types
from collections.abc import Callable
from typing import Any, Final

import torch

from adaattn.integrations.conversion.change import Attend

__all__ = ["calls_attention", "with_attention"]

_SDPA: Final = "scaled_dot_product_attention"
_DISPATCH: Final = "dispatch_attention_fn"
_NATIVE: Final = "native"
_Tensor = torch.Tensor


def calls_attention(function: object) -> bool:
    """Return whether a function calls PyTorch's attention, or diffusers' dispatcher, by name.

    Args:
        function: anything; what is not written in Python calls nothing.
    """
    code = getattr(function, "__code__", None)
    if code is None or not {_SDPA, _DISPATCH}.intersection(code.co_names):
        return False
    return not any(step.opname == "STORE_GLOBAL" for step in dis.get_instructions(code))


def with_attention(function: types.FunctionType, attend: Attend) -> types.FunctionType:
    """Return a clone of a function that calls ``attend`` instead of PyTorch's attention.

    Args:
        function: one of which `calls_attention` is true.
        attend: what it is to call.
    """
    functional = _overlay(torch.nn.functional, **{_SDPA: attend})
    nn = _overlay(torch.nn, functional=functional)
    instead = {
        id(torch.nn.functional): functional,
        id(torch.nn): nn,
        id(torch): _overlay(torch, nn=nn),
    }
    names = dict(function.__globals__)
    names.pop("__name__", None)  # by which torch.compile would look names up in the real module
    for name in function.__code__.co_names:
        if name == _SDPA and name in names:
            names[name] = attend
        elif name == _DISPATCH and name in names:
            names[name] = _dispatcher(attend, names[name])
        elif id(names.get(name)) in instead:
            names[name] = instead[id(names[name])]
    clone = types.FunctionType(
        function.__code__, names, function.__name__, function.__defaults__, function.__closure__
    )
    clone.__kwdefaults__ = function.__kwdefaults__
    clone.__annotations__ = function.__annotations__
    clone.__doc__ = function.__doc__
    clone.__module__ = function.__module__
    clone.__qualname__ = function.__qualname__
    return clone


class _Overlay(types.ModuleType):
    """A module with some names of its own; all others are the real one's."""

    def __getattr__(self, name: str) -> Any:
        """Return what the real module makes when it is first asked for it."""
        return getattr(self.__dict__["__real__"], name)


def _overlay(module: types.ModuleType, **names: object) -> types.ModuleType:
    """Return a module that differs from another in these names."""
    made = _Overlay(module.__name__)
    vars(made).update(vars(module), **names, __real__=module)
    return made


def _dispatcher(attend: Attend, original: Callable[..., _Tensor]) -> Callable[..., _Tensor]:
    """Return diffusers' dispatcher; what asks for a kernel by name goes there as before."""

    def dispatch_attention_fn(
        query: _Tensor,
        key: _Tensor,
        value: _Tensor,
        attn_mask: _Tensor | None = None,
        *given: Any,
        attention_kwargs: dict[str, Any] | None = None,
        backend: Any = None,
        parallel_config: Any = None,
        **keywords: Any,
    ) -> _Tensor:
        """Return attention of q [B, Sq, Hq, D], k [B, Sk, Hkv, D] and v, as [B, Sq, Hq, Dv]."""
        wants_other = backend is not None and getattr(backend, "value", backend) != _NATIVE
        if wants_other or attention_kwargs or parallel_config is not None or len(given) > _PLAIN:
            return original(
                query,
                key,
                value,
                attn_mask,
                *given,
                attention_kwargs=attention_kwargs,
                backend=backend,
                parallel_config=parallel_config,
                **keywords,
            )
        if attn_mask is not None and attn_mask.shape == (query.shape[0], key.shape[1]):
            attn_mask = attn_mask[:, None, None]
        query, key, value = (tensor.transpose(1, 2) for tensor in (query, key, value))
        keywords.update(zip(_AFTER_MASK, given, strict=False))
        return attend(query, key, value, attn_mask=attn_mask, **keywords).transpose(1, 2)

    return dispatch_attention_fn


_AFTER_MASK: Final = ("dropout_p", "is_causal", "scale", "enable_gqa")
"""What the dispatcher takes by position after the mask, as PyTorch's function does."""

_PLAIN: Final = len(_AFTER_MASK)
