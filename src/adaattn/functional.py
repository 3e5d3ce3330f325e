"""The public call: attention as PyTorch defines it, by the cheapest way that keeps the policy.

    from adaattn import scaled_dot_product_attention

Shape legend in `adaattn.spec`.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, Final, Literal, TypedDict, TypeVar, Unpack, cast, overload

import torch

from adaattn.backends.block_list import BlockList
from adaattn.call.arguments import Arguments, Companions
from adaattn.call.bind import Bound, bind, find
from adaattn.call.choose import decided
from adaattn.call.describe import as_autocast, build_call
from adaattn.call.found import Found, outside_autocast
from adaattn.call.history import History
from adaattn.call.key import NO_WINDOW, Choices, key_of
from adaattn.call.keywords import refuse_unknown
from adaattn.call.options import TENSORS
from adaattn.call.outputs import AuxOutput, AuxRequest
from adaattn.call.recent import Miss, again, note
from adaattn.call.traced import traced
from adaattn.errors import ArgumentTypeError
from adaattn.policies import PolicyLike, resolve_policy
from adaattn.spec import Align, Decision, Plan

__all__ = ["plan_attention", "scaled_dot_product_attention"]

is_compiling = torch.compiler.is_compiling
is_traced = torch.compiler.is_dynamo_compiling
_any_autocast = torch._C._is_any_autocast_enabled
_autocasts = torch.is_autocast_enabled
Tensor = torch.Tensor

_SEMANTICS: Final = tuple(name for name in Arguments.__dataclass_fields__ if name != "head_terms")
_KEYWORDS: Final = (
    *_SEMANTICS,
    "policy",
    "plan",
    "backend",
    "return_aux",
    "tag",
    "layer",
    "history",
)

_F = TypeVar("_F", bound=Callable[..., Any])


def _repeated(function: _F) -> _F:
    """Return the public call: what ``function`` finds is found again by the caller's own words."""

    @functools.wraps(function)
    def attention(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        **options: Any,
    ) -> Any:
        if is_traced():  # by Dynamo; other compilers' tensors are never those of a call before
            return function(query, key, value, attn_mask, dropout_p, is_causal, **options)
        tag = options.pop("tag", "") if options else ""
        known: Bound | Miss = Miss.SKIP
        if type(tag) is str:
            known = again(query, key, value, attn_mask, dropout_p, is_causal, options)
        if isinstance(known, Miss):
            found = function(query, key, value, attn_mask, dropout_p, is_causal, tag=tag, **options)
            if not isinstance(found, Found):
                return found
            if known is Miss.NOTE:
                given = query, key, value, attn_mask, dropout_p, is_causal, options
                window = options.get("window")
                note(found.bound, *given, reaches=() if window is None else window)
            return found.run()
        if not options:
            return known(query, key, value, attn_mask, None, None, None, None, None, None, tag)
        others = map(options.get, TENSORS)
        return known(query, key, value, attn_mask, *others, None, None, tag)

    return cast("_F", attention)


class _Options(TypedDict, total=False):
    """Keywords of the public call that do not decide what it returns, for type checkers."""

    scale: float | torch.Tensor | None
    enable_gqa: bool
    align: str | Align
    window: Sequence[int] | torch.Tensor | None
    dilation: int
    softcap: float | torch.Tensor | None
    sinks: torch.Tensor | None
    alibi_slopes: torch.Tensor | None
    cu_seqlens_q: torch.Tensor | None
    cu_seqlens_k: torch.Tensor | None
    blocks: BlockList | None
    max_seqlen_q: int | None
    max_seqlen_k: int | None
    batch_invariant: bool
    policy: PolicyLike | None
    plan: Plan | None
    backend: str
    tag: str
    layer: int
    history: History | None


@overload
def scaled_dot_product_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    return_aux: Literal[False] | None = None,
    **options: Unpack[_Options],
) -> torch.Tensor: ...


@overload
def scaled_dot_product_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    return_aux: AuxRequest | Literal[True],
    **options: Unpack[_Options],
) -> tuple[torch.Tensor, AuxOutput]: ...


@overload
def scaled_dot_product_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    return_aux: AuxRequest | bool | None,
    **options: Unpack[_Options],
) -> Any: ...


@_repeated
def scaled_dot_product_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | torch.Tensor | None = None,
    enable_gqa: bool = False,
    align: str | Align = "top_left",
    window: Sequence[int] | torch.Tensor | None = NO_WINDOW,
    dilation: int = 1,
    softcap: float | torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k: torch.Tensor | None = None,
    blocks: BlockList | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    batch_invariant: bool = False,
    policy: PolicyLike | None = None,
    plan: Plan | None = None,
    backend: str = "auto",
    return_aux: AuxRequest | bool | None = None,
    tag: str = "",
    layer: int = -1,
    history: History | None = None,
    **unknown: Any,
) -> Any:
    """Return attention of the inputs, [..., Hq, Sq, Dv].

    The positional part and the result are those of
    ``torch.nn.functional.scaled_dot_product_attention`` (its math path), except that rows
    which see no key are zeros. The order of things is: scale, softcap, ALiBi and additive
    mask, hidden keys, sinks, softmax, dropout.

    Args:
        query: [..., Hq, Sq, D], 2-D to 5-D; float64, float32, bfloat16 or float16.
        key: [..., Hkv, Sk, D].
        value: [..., Hkv, Sk, Dv].
        attn_mask: broadcastable to [..., Hq, Sq, Sk]; boolean (True = attend) or added to the
            scores; a causal bias of ``torch.nn.attention.bias`` too.
        dropout_p: probability of dropping a weight.
        is_causal: key j is seen from position p only if j <= p.
        scale: factor of the scores; None is 1 / sqrt(D). A floating-point tensor [Hq] has one for
            each head.
        enable_gqa: Hq may be a multiple of Hkv.
        align: query i stands at key position p = i (``"top_left"``) or p = i + Sk - Sq
            (``"bottom_right"``); causal order, window, dilation and ALiBi count from p.
        window: ``(left, right)``; key j is seen when p - left <= j <= p + right; -1 is unlimited,
            and None is no window. An int32 or int64 tensor [Hq, 2] has one for each head.
        dilation: only keys with p - j divisible by it are seen.
        softcap: c in c * tanh(s / c), applied before masks; None or 0 is none. A floating-point
            tensor [Hq] has one for each head. On a GPU numbers in tensors are not read by the host,
            and checked only with ``ADAATTN_DEBUG=1``.
        sinks: [Hq] logits that join the softmax denominator.
        alibi_slopes: [Hq] or [B, Hq]; adds -slope * abs(p - j).
        cu_seqlens_q: int32 [N + 1], bounds of N sequences packed along [1, Hq, T, D]; on a GPU
            its numbers are neither read nor checked, unless ``ADAATTN_DEBUG=1``.
        cu_seqlens_k: the same for key and value.
        blocks: which blocks of keys each block of query rows sees, a `BlockList`; dense tensors.
        max_seqlen_q: longest packed query sequence, or more; None takes what is known without
            waiting for a GPU: the number of tokens.
        max_seqlen_k: the same for key and value.
        batch_invariant: a sequence's result is the same, bit for bit, whatever else is in the
            batch or packed beside it; the call is exact then. A `Policy` can ask for it too.
        policy: a `Policy`, a preset (``"quality"``, ``"balanced"``, ``"speed"``), a policy file, or
            a number: an error budget; None is the one set by `use_policy`, else ``"quality"``.
        plan: run this and plan nothing; audited as its ``audit_rows`` say.
        backend: ``"auto"``; ``"flash"``, any fused kernel; ``"unfused"``, scores written out;
            ``"sdpa"``, any of PyTorch's kernels; or
            the name of an executor. What is asked for never falls back on anything else.
        return_aux: an `AuxRequest`, or True for the decision alone.
        tag: a name for this call in events.
        layer: index of the layer that calls, for its budgets in a calibrated policy and for what
            is learnt of it; -1 is none.
        history: what earlier calls taught; attention modules keep one each, calls without one
            share one for the process.
        **unknown: nothing; a keyword of another library is refused with its name here.

    Returns:
        The output, or ``(output, AuxOutput)`` when ``return_aux`` is given.

    Raises:
        ShapeError, DTypeError, DeviceError, ArgumentError, ArgumentTypeError: bad input.
        PolicyError: an unknown policy or a broken policy file.
        NonFiniteError: NaN or infinity in q, k or v, where an approximation was to be measured on
            this very call: on a CPU, or with ``check="always"``.
        UnsupportedError: an explicit backend or plan cannot serve; every reason is listed.
        PlanError: nothing fits the memory budget.

    Example:
        >>> import torch, adaattn
        >>> q, k, v = (torch.randn(1, 4, 128, 64) for _ in range(3))
        >>> out, aux = adaattn.scaled_dot_product_attention(
        ...     q, k, v, is_causal=True, window=(31, 0),
        ...     return_aux=adaattn.AuxRequest(lse=True))
        >>> tuple(out.shape), tuple(aux.lse.shape)
        ((1, 4, 128, 64), (1, 4, 128))
    """
    if unknown:
        refuse_unknown(unknown, _KEYWORDS)
    if not isinstance(tag, str):
        raise ArgumentTypeError.got("tag", "a string", repr(tag))
    companions: Companions
    companions = (attn_mask, sinks, alibi_slopes, cu_seqlens_q, cu_seqlens_k, blocks, None)
    settings = (
        scale,
        softcap,
        dropout_p,
        is_causal,
        enable_gqa,
        align,
        dilation,
        max_seqlen_q,
        max_seqlen_k,
        batch_invariant,
    )
    choice = (policy, plan, history, backend, layer, return_aux)
    if is_compiling():
        return traced(query, key, value, Arguments.of(companions, settings, window), choice)
    if isinstance(scale, Tensor) or isinstance(softcap, Tensor) or isinstance(window, Tensor):
        given = Arguments.of(companions, settings, window)
        companions, settings, window = given.companions, given.settings, given.window
    if window is None:
        window = NO_WINDOW
    if not (_any_autocast() and isinstance(query, Tensor) and _autocasts(query.device.type)):
        bound = _bound(query, key, value, companions, settings, window, choice)
        return Found(bound, (query, key, value, *companions, tag))
    device_type = query.device.type
    cast = tuple(as_autocast(it, device_type) for it in (query, key, value, attn_mask))
    is_cast = any(a is not b for a, b in zip(cast, (query, key, value, attn_mask), strict=True))
    query, key, value, attn_mask = cast
    companions = (attn_mask, *companions[1:])
    inputs = query, key, value
    bound = outside_autocast(device_type, _bound, *inputs, companions, settings, window, choice)
    found = Found(bound, (*inputs, *companions, tag), device_type)
    return found.run() if is_cast else found


bind_attention: Final[Callable[..., Any]] = scaled_dot_product_attention.__wrapped__  # type: ignore[attr-defined]
"""The same call, which leaves what its key found to be run: a `Found`; or the result, in a graph
and of tensors that autocast casts."""


def _bound(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    companions: Companions,
    settings: tuple[Any, ...],
    window: Sequence[int] | torch.Tensor,
    choice: Choices,
) -> Bound:
    """Return what was bound for calls like this one, bound first if need be."""
    known_by = known = None
    try:
        known_by = key_of(query, key, value, companions, settings, window, choice)
        known = find(known_by)
    except (AttributeError, IndexError, TypeError, ValueError, RuntimeError):
        known_by = None  # no tensor, a nested one, no number, too few: binding says which
    if known is not None:
        return known
    arguments = Arguments.of(companions, settings, window)
    return bind(query, key, value, arguments, choice, known_by)


def plan_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    policy: PolicyLike | None = None,
    backend: str = "auto",
    layer: int = -1,
    history: History | None = None,
    **semantics: Any,
) -> Decision:
    """Return the decision that a call with these arguments would follow, without running it.

    Its ``plan`` can be passed to `scaled_dot_product_attention` for tensors of the same
    shapes, inside ``torch.compile(fullgraph=True)`` too.

    Args:
        query: as in `scaled_dot_product_attention`.
        key: likewise.
        value: likewise.
        attn_mask: likewise.
        dropout_p: likewise.
        is_causal: likewise.
        policy: likewise.
        backend: likewise.
        layer: which layer's budgets to take from a calibrated policy.
        history: what earlier calls taught.
        **semantics: the other keywords of `scaled_dot_product_attention` that say what is to
            be computed; unknown ones are refused.

    Raises:
        ArgumentTypeError: an unknown keyword.
        AdaAttnError: as `scaled_dot_product_attention`.

    Example:
        >>> import torch, adaattn
        >>> q = k = v = torch.randn(1, 2, 64, 32)
        >>> decision = adaattn.plan_attention(q, k, v, is_causal=True)
        >>> decision.plan.is_exact
        True
    """
    if unknown := set(semantics) - set(_SEMANTICS):
        refuse_unknown(unknown, (*_SEMANTICS, "policy", "backend", "layer", "history"))
    arguments = Arguments(
        attn_mask=attn_mask, dropout_p=dropout_p, is_causal=is_causal, **semantics
    )
    resolved = resolve_policy(policy)
    call = build_call(query, key, value, arguments.under(resolved))
    return decided(call, resolved, backend, layer, history)
