"""Functions of foreign code, with our attention wherever they call PyTorch's by name.

A clone shares code, defaults and closure with the original. Only what ``torch``, ``F`` or the
function's own name stand for in it is different, and what ``dispatch_attention_fn`` of diffusers
does. The other globals are those of the moment at which it was made. Functions that the original
calls are not touched.
"""

import dis
import inspect
import types
from collections.abc import Callable, Iterator
from typing import Any, Final, cast

import torch

from adaattn.integrations.conversion.change import Attend
from adaattn.integrations.pytorch import is_sdpa

__all__ = ["calling_methods", "method_with_attention"]

_SDPA: Final = "scaled_dot_product_attention"
_DISPATCH: Final = "dispatch_attention_fn"
_LOADS: Final = frozenset({"LOAD_ATTR", "LOAD_METHOD"})
_NATIVE: Final = "native"
_AFTER_MASK: Final = ("dropout_p", "is_causal", "scale", "enable_gqa")
"""What diffusers' dispatcher takes by position after the mask, as PyTorch's function does."""

_Tensor = torch.Tensor


def calling_methods(cls: type) -> list[str]:
    """Return the names of a class's methods that call PyTorch's attention.

    Seen is what the code loads from its globals: ``F.scaled_dot_product_attention``, by any alias
    of a module, the function itself, or diffusers' dispatcher. A method that a decorator has
    wrapped is not looked into, but for ``staticmethod`` and ``classmethod``.

    Args:
        cls: any class.
    """
    found = []
    for name in dir(cls):
        function = _function_of(inspect.getattr_static(cls, name, None))
        if function is not None and _globals_to_exchange(function):
            found.append(name)
    return found


def method_with_attention(cls: type, name: str, attend: Attend) -> Any:
    """Return what a class derived from another holds by a name, to call ``attend``.

    Args:
        cls: the other class.
        name: of a method of which `calling_methods` tells; a static one stays static, and one of
            the class of the class.
        attend: what it is to call instead of PyTorch's attention.
    """
    method = inspect.getattr_static(cls, name)
    function = _function_of(method)
    assert function is not None
    clone = _with_attention(function, attend)
    return clone if method is function else type(method)(clone)


def _function_of(method: object) -> types.FunctionType | None:
    """Return the function behind what a class holds by a name; None where there is none."""
    if type(method) in (staticmethod, classmethod):
        method = cast("Any", method).__func__
    return method if isinstance(method, types.FunctionType) else None


def _with_attention(function: types.FunctionType, attend: Attend) -> types.FunctionType:
    """Return a clone of a function that calls ``attend`` instead of PyTorch's attention."""
    names = dict(function.__globals__)
    for name in _globals_to_exchange(function):
        names[name] = _exchanged(names[name], attend)
    if "__name__" not in function.__code__.co_names:
        # By it torch.compile would look names up in the real module.
        names.pop("__name__", None)
    clone = types.FunctionType(
        function.__code__, names, function.__name__, function.__defaults__, function.__closure__
    )
    clone.__kwdefaults__ = function.__kwdefaults__
    clone.__annotations__ = function.__annotations__
    clone.__doc__ = function.__doc__
    clone.__module__ = function.__module__
    clone.__qualname__ = function.__qualname__
    return clone


def _globals_to_exchange(function: types.FunctionType) -> set[str]:
    """Return the global names through which a function reaches attention.

    None for code that writes globals, which a clone would write elsewhere.
    """
    found = set()
    for code in _codes(function.__code__):
        if not {_SDPA, _DISPATCH}.intersection(code.co_names):
            continue
        path: list[str] = []
        for step in dis.get_instructions(code):
            if step.opname == "STORE_GLOBAL":
                return set()
            if step.opname == "LOAD_GLOBAL":
                path = [step.argval]
            elif path and step.opname in _LOADS:
                path.append(step.argval)
            else:
                continue
            if _is_attention(function.__globals__, path):
                found.add(path[0])
    return found


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    """Yield a function's code and that of the functions inside it, which share its globals."""
    yield code
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            yield from _codes(inner)


def _is_attention(names: dict[str, Any], path: list[str]) -> bool:
    """Return whether a path of names leads to PyTorch's attention, or to diffusers' dispatcher."""
    if path[-1] not in (_SDPA, _DISPATCH):
        return False
    thing = names.get(path[0])
    for name in path[1:]:
        if not isinstance(thing, types.ModuleType):
            return False
        thing = getattr(thing, name, None)
    if path[-1] == _DISPATCH:
        return len(path) == 1 and getattr(thing, "__module__", "").startswith("diffusers.")
    return is_sdpa(thing)


def _exchanged(thing: Any, attend: Attend) -> Any:
    """Return what a global name is to stand for: attention, or a module that leads to it."""
    if is_sdpa(thing):
        return attend
    if not isinstance(thing, types.ModuleType):
        return _dispatcher(attend, thing)
    functional = _Overlay(torch.nn.functional, {_SDPA: attend})
    if thing is torch.nn.functional:
        return functional
    nn = _Overlay(torch.nn, {"functional": functional})
    return nn if thing is torch.nn else _Overlay(thing, {"nn": nn, _SDPA: attend})


class _Overlay(types.ModuleType):
    """A module with some names of its own; all others are the real one's."""

    def __init__(self, real: types.ModuleType, own: dict[str, object]) -> None:
        super().__init__(real.__name__)
        vars(self).update(own, __real__=real)

    def __getattr__(self, name: str) -> Any:
        """Return what the real module has by a name."""
        return getattr(vars(self)["__real__"], name)


def _dispatcher(attend: Attend, original: Callable[..., _Tensor]) -> Callable[..., _Tensor]:
    """Return diffusers' dispatcher; what is to run on another backend goes there as before."""

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
        is_plain = not attention_kwargs and parallel_config is None
        if not is_plain or len(given) > len(_AFTER_MASK) or not _is_native(backend, original):
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


def _is_native(backend: Any, dispatcher: Callable[..., _Tensor]) -> bool:
    """Return whether diffusers would call PyTorch's function: named here, or as its default."""
    if backend is None:
        registry = getattr(dispatcher, "__globals__", {}).get("_AttentionBackendRegistry")
        backend = _NATIVE if registry is None else registry.get_active_backend()[0]
    return bool(getattr(backend, "value", backend) == _NATIVE)
