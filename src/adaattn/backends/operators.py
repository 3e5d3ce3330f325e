"""A kernel as one operator of `torch.library`: graphs hold it whole, and look at its fake.

An operator takes tensors and numbers. The problem is taken apart into them, and described again
from the tensors that arrive when the graph runs, whose lengths may be others.
"""

from collections.abc import Callable
from typing import Final

import torch

from adaattn._dtypes import precision_of
from adaattn.backends.common import layout_facts
from adaattn.backends.interface import Result, Tensors
from adaattn.spec import Align, AttentionProblem, Aux, MaskKind

__all__ = ["operator"]

_Run = Callable[[Tensors, AttentionProblem], Result]

_STATISTICS: Final = (Aux.LSE, Aux.ROW_MAX, Aux.ENTROPY)


def operator(name: str, run: _Run) -> _Run:
    """Return what calls ``run`` through the operator ``adaattn::<name>``.

    Args:
        name: of the operator.
        run: computes a problem; it has no gradient.
    """

    def call(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        sinks: torch.Tensor | None,
        slopes: torch.Tensor | None,
        starts_q: torch.Tensor | None,
        starts_k: torch.Tensor | None,
        scale: float,
        softcap: float,
        dropout_p: float,
        is_causal: bool,
        to_end: bool,
        window: list[int],
        dilation: int,
        longest: list[int],
        aux: int,
    ) -> list[torch.Tensor]:
        tensors = Tensors.of(
            query,
            key,
            value,
            mask=mask,
            sinks=sinks,
            alibi_slopes=slopes,
            cu_seqlens_q=starts_q,
            cu_seqlens_k=starts_k,
        )
        mask_kind = MaskKind.NONE
        if mask is not None:
            mask_kind = MaskKind.BOOLEAN if mask.dtype == torch.bool else MaskKind.ADDITIVE
        problem = AttentionProblem(
            batch=query.shape[0],
            num_heads=query.shape[1],
            num_kv_heads=key.shape[1],
            len_q=query.shape[2],
            len_k=key.shape[2],
            head_dim=query.shape[3],
            value_dim=value.shape[3],
            precision=precision_of(query.dtype),
            device_type=query.device.type,
            scale=scale,
            is_causal=is_causal,
            align=Align.BOTTOM_RIGHT if to_end else Align.TOP_LEFT,
            window=(window[0], window[1]),
            dilation=dilation,
            mask=mask_kind,
            mask_shape=() if mask is None else tuple(mask.shape),
            softcap=softcap,
            has_sinks=sinks is not None,
            has_alibi=slopes is not None,
            dropout_p=dropout_p,
            num_sequences=0 if starts_q is None else starts_q.shape[0] - 1,
            max_len_q=longest[0],
            max_len_k=longest[1],
            aux=Aux(aux),
            **layout_facts(query, key, value),
        )
        result = run(tensors, problem)
        found = (result.output, result.lse, result.row_max, result.entropy)
        return [query.new_empty(0) if item is None else item for item in found]

    made = torch.library.custom_op(f"adaattn::{name}", call, mutates_args=())

    @made.register_fake
    def _(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *rest: object) -> object:
        aux = Aux(rest[-1])  # type: ignore[arg-type]
        shape = query.shape[:-1]
        statistics = [
            query.new_empty(shape if flag in aux else (0,), dtype=torch.float32)
            for flag in _STATISTICS
        ]
        return [query.new_empty((*shape, value.shape[-1])), *statistics]

    def through(tensors: Tensors, problem: AttentionProblem) -> Result:
        output, *statistics = made(
            tensors.query,
            tensors.key,
            tensors.value,
            tensors.mask,
            tensors.sinks,
            tensors.alibi_slopes,
            tensors.cu_seqlens_q,
            tensors.cu_seqlens_k,
            problem.scale,
            problem.softcap,
            problem.dropout_p,
            problem.is_causal,
            problem.align is Align.BOTTOM_RIGHT,
            list(problem.window),
            problem.dilation,
            [problem.max_len_q, problem.max_len_k],
            int(problem.aux),
        )
        asked = [flag in problem.aux for flag in _STATISTICS]
        lse, row_max, entropy = (
            item if wanted else None for item, wanted in zip(statistics, asked, strict=True)
        )
        return Result(output=output, lse=lse, row_max=row_max, entropy=entropy)

    return through
