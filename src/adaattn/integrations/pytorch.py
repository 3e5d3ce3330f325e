"""This library in the place of PyTorch's own attention function, for code that cannot be changed.

    with adaattn.patch_sdpa():
        model(x)

Every loaded module that holds ``scaled_dot_product_attention`` of ``torch.nn.functional`` under
that name holds ours until the patch is undone; ``nn.MultiheadAttention`` calls it too.
"""

import sys
from collections.abc import Callable, Mapping
from typing import Any, Final

import torch

from adaattn.backends.masks import PLAIN_TENSORS
from adaattn.backends.sdpa_call import sdpa
from adaattn.call.history import History
from adaattn.errors import ArgumentTypeError
from adaattn.functional import scaled_dot_product_attention
from adaattn.policies import PolicyLike, resolve_policy
from adaattn.spec import Policy

__all__ = ["SdpaPatch", "is_sdpa", "patch_sdpa", "sdpa_like"]

_NAME: Final = "scaled_dot_product_attention"
_KEYWORDS: Final = frozenset({"scale", "enable_gqa"})
_DEVICES: Final = frozenset({"cpu", "cuda"})

_ACTIVE: "list[SdpaPatch]" = []
"""The patches that are not undone, the one in force last."""


class SdpaPatch:
    """A handle on `patch_sdpa`; also a context manager.

    Args:
        policy: policy of every patched call; None follows ``adaattn.use_policy``.

    Attributes:
        policy: the same.
        history: what the patched calls taught.
    """

    def __init__(self, policy: Policy | None) -> None:
        self.policy = policy
        self.history = History()
        self._function = sdpa_like(policy, self.history)

    @property
    def is_active(self) -> bool:
        """True until `undo`; an inner patch may be in force meanwhile."""
        return self in _ACTIVE

    def undo(self) -> None:
        """Put back what was there before; doing it twice is harmless."""
        if self.is_active:
            before = _ACTIVE[-1]._function
            _ACTIVE.remove(self)
            _put(_ACTIVE[-1]._function if _ACTIVE else sdpa, instead_of=before)

    def __enter__(self) -> "SdpaPatch":
        """Return the handle itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Undo the patch."""
        self.undo()

    def __repr__(self) -> str:
        """Return the policy and whether the patch is active."""
        name = "ambient" if self.policy is None else self.policy.name
        return f"SdpaPatch(policy={name!r}, is_active={self.is_active})"


def patch_sdpa(policy: PolicyLike | None = None) -> SdpaPatch:
    """Return a handle after putting our function in the place of PyTorch's; undo it with that.

    What this library does not take (other devices than CPUs and CUDA, nested tensors, other
    subclasses, a mask beside ``is_causal``) goes to PyTorch's function as before. A patch inside
    another is in force until it is undone. What holds PyTorch's function under another name, or in
    a closure, is not found.

    Args:
        policy: policy of every call; None follows ``adaattn.use_policy``, by default exact.

    Raises:
        PolicyError: no policy has that name.

    Example:
        >>> import torch, adaattn
        >>> q = torch.randn(1, 2, 16, 8)
        >>> plain = torch.nn.functional.scaled_dot_product_attention(q, q, q)
        >>> with adaattn.patch_sdpa() as patch:
        ...     ours = torch.nn.functional.scaled_dot_product_attention(q, q, q)
        >>> torch.allclose(ours, plain, atol=1e-5), patch.is_active
        (True, False)
    """
    made = SdpaPatch(None if policy is None else resolve_policy(policy))
    before = _ACTIVE[-1]._function if _ACTIVE else sdpa
    _ACTIVE.append(made)
    _put(made._function, instead_of=before)
    return made


def is_sdpa(thing: object) -> bool:
    """Return whether something is PyTorch's attention function, or stands in its place.

    Args:
        thing: anything.
    """
    return thing is sdpa or any(thing is patch._function for patch in _ACTIVE)


def sdpa_like(
    policy: Policy | None, history: History, *, layer: int = -1, tag: str = ""
) -> Callable[..., torch.Tensor]:
    """Return what can stand in the place of PyTorch's function, with its signature.

    Args:
        policy: policy of every call; None follows ``adaattn.use_policy``.
        history: what its calls teach, and learn from.
        layer: number of the layer that calls.
        tag: its name in events.
    """
    own: dict[str, Any] = {"policy": policy, "history": history}
    if layer >= 0:
        own["layer"] = layer
    if tag:
        own["tag"] = tag

    def patched(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        **keywords: Any,
    ) -> torch.Tensor:
        """Return attention of the inputs, [..., Hq, Sq, Dv]."""
        if not keywords.keys() <= _KEYWORDS:
            _refuse(keywords)
        given = (query, key, value, attn_mask, dropout_p, is_causal)
        is_ours = (
            type(query) in PLAIN_TENSORS and query.device.type in _DEVICES and not query.is_nested
        )
        if not is_ours or (is_causal and attn_mask is not None):  # PyTorch takes both on a CPU
            return sdpa(*given, **keywords)
        output: torch.Tensor = scaled_dot_product_attention(*given, **(keywords | own))
        return output

    patched.__name__ = patched.__qualname__ = _NAME
    return patched


def _refuse(keywords: Mapping[str, Any]) -> None:
    """Raise for keywords that PyTorch's function has and this one does not know."""
    names = ", ".join(repr(name) for name in sorted(keywords.keys() - _KEYWORDS))
    raise ArgumentTypeError.got(
        "keywords of a patched scaled_dot_product_attention",
        f"some of {', '.join(sorted(_KEYWORDS))}",
        names,
        "undo the patch for this call, or call adaattn.scaled_dot_product_attention",
    )


def _put(function: Callable[..., torch.Tensor], *, instead_of: Callable[..., torch.Tensor]) -> None:
    """Let every loaded module that holds one function under its name hold another."""
    for name, module in list(sys.modules.items()):
        own = name.startswith(("torch.", "adaattn."))
        if own and name != "torch.nn.functional":
            continue
        if getattr(module, "__dict__", {}).get(_NAME) is instead_of:
            setattr(module, _NAME, function)
