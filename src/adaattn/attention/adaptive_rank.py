"""Attention that switches each head between dense and low rank, at run time, where it pays.

Entropy at several scales and the spectra of scores and values predict the rank that a head
needs (`adaattn.backends.low_rank.ranks`); sampled exact rows measure the error at the ranks that
may do; the cost model says whether the saving covers the projections on this device. A head goes
to low rank only if all three agree, and comes back at once when an audit finds its error over
budget.

Low rank pays for keys and queries that span few dimensions, for large head dimensions and
for models trained with it. Pretrained weights with D up to 256 rarely have such heads: there
the statistics show every head dense and the decision says which rank would have been needed.
"""

from collections.abc import Sequence
from typing import Unpack

from adaattn.attention.base import BaseAttention
from adaattn.attention.config import AttentionOptions
from adaattn.attention.runner import Runner
from adaattn.errors import ArgumentTypeError
from adaattn.spec import Method, Policy

__all__ = ["AdaptiveRankAttention"]


class AdaptiveRankAttention(BaseAttention):
    """Multi-head attention whose heads are dense or of low rank, decided at run time.

    Args:
        embed_dim: model dimension.
        num_heads: query heads.
        dropout: probability of dropping a weight in training. With dropout errors cannot be
            checked, and every head stays dense.
        bias: projections have biases.
        error_budget: allowed relative Frobenius error of each head's output; 0 is dense.
        ranks: ranks that may be used, each below the head dimension; None is an eighth, a
            quarter and a half of it.
        measure_every: calls from one measurement to the next; between them the running
            statistics decide, and low-rank results are still audited on exact rows.
        momentum: share of the old value in each running statistic.
        **options: the other settings of `adaattn.attention.config.AttentionConfig`.

    The call, parameters and ``state_dict`` are those of
    `adaattn.attention.base.BaseAttention`.

    Raises:
        ArgumentError: a number out of range, such as a rank that is not below the head
            dimension.
        ShapeError, ArgumentTypeError: as `adaattn.attention.base.BaseAttention`.

    Example:
        >>> import torch
        >>> attention = AdaptiveRankAttention(64, 4, error_budget=0.02)
        >>> output, _ = attention(torch.randn(2, 100, 64))
        >>> attention.get_statistics()["share_by_method"]
        {'exact': 1.0}
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        *,
        error_budget: float = 0.01,
        ranks: tuple[int, ...] | None = None,
        measure_every: int = 8,
        momentum: float = 0.5,
        **options: Unpack[AttentionOptions],
    ) -> None:
        if ranks is not None and not isinstance(ranks, Sequence):
            raise ArgumentTypeError.got("ranks", "None or a tuple of integers", ranks)
        policy = Policy(
            name="adaptive_rank",
            error_budget=error_budget,
            methods=(Method.EXACT, Method.LOW_RANK),
            precisions=(),
            ranks=tuple(ranks or ()),
        )
        runner = Runner(
            policy,
            layer=options.get("layer", -1),
            measure_every=measure_every,
            momentum=momentum,
        )
        super().__init__(embed_dim, num_heads, dropout, bias, runner=runner, **options)
