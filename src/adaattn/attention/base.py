"""What every attention module shares: parameters, projections, shapes, masks, statistics.

A module has the parameters, the ``state_dict`` and the behaviour of
``torch.nn.MultiheadAttention``. It differs in this: ``batch_first`` is True and
``need_weights`` False unless said otherwise, ``is_causal`` needs no mask beside it, the
weights returned are those before dropout, and a row that sees no key gives zeros where
PyTorch gives NaN.

Shape legend: B batch, L queries, S keys, E embed_dim, H heads, D head_dim.
"""

import inspect
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, Unpack

import torch
from torch import nn
from torch.nn import functional

from adaattn._dtypes import precision_of
from adaattn._numbers import require_flag
from adaattn.attention._checks import (
    check_cache,
    check_ranks,
    check_self_attention,
    dense_keys_values,
    new_positions,
    unlike_weights,
)
from adaattn.attention._layout import Layout, check_inputs
from adaattn.attention._masks import mask_arguments
from adaattn.attention._projections import project_packed, project_separately
from adaattn.attention.config import AttentionConfig, AttentionOptions
from adaattn.attention.rotary import RotaryEmbedding
from adaattn.attention.runner import Runner
from adaattn.attention.statistics import AttentionStatistics
from adaattn.call.canonical import described
from adaattn.call.keywords import refuse_unknown
from adaattn.errors import ArgumentError

if TYPE_CHECKING:
    from adaattn.cache import LayerCache

__all__ = ["BaseAttention"]


class BaseAttention(nn.Module, ABC):
    """Base class of the attention modules; a subclass says what runs its calls.

    Parameters have the names, the order and the initial numbers (for the same seed) of
    ``torch.nn.MultiheadAttention``, so a ``state_dict`` loads in both directions:
    ``in_proj_weight``, or ``q_proj_weight``, ``k_proj_weight`` and ``v_proj_weight`` where
    their sizes differ, ``in_proj_bias``, ``bias_k``, ``bias_v``, ``out_proj.weight``,
    ``out_proj.bias``. Only what is asked for adds more: ``sinks``, ``q_norm.weight``,
    ``k_norm.weight``.

    Args:
        embed_dim: size of the query's and the output's last dimension.
        num_heads: query heads.
        dropout: probability of dropping a weight, in training only.
        bias: the projections have biases.
        runner: runs the calls and keeps their statistics.
        **options: `AttentionOptions`, as `AttentionConfig` describes them.

    Attributes:
        config: what the module was made of.
        runner: what runs its calls.
        dropout: the probability in use; may be changed.
        need_weights_by_default: what ``need_weights=None`` means; False unless
            `adaattn.convert` put the module in the place of one that
            returned its weights.

    Raises:
        ArgumentTypeError: an unknown option, or one of the wrong type.
        ShapeError: sizes that do not divide.
        ArgumentError: a number out of range, such as a rank that is not below the head
            dimension.
        DTypeError: a dtype that attention does not compute in.
    """

    __constants__ = ("batch_first",)
    in_proj_weight: nn.Parameter | None
    q_proj_weight: nn.Parameter | None
    k_proj_weight: nn.Parameter | None
    v_proj_weight: nn.Parameter | None
    in_proj_bias: nn.Parameter | None
    bias_k: nn.Parameter | None
    bias_v: nn.Parameter | None
    sinks: nn.Parameter | None

    @abstractmethod
    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        *,
        runner: Runner,
        **options: Unpack[AttentionOptions],
    ) -> None:
        super().__init__()
        if unknown := set(options) - set(AttentionOptions.__annotations__):
            refuse_unknown(unknown, _keywords_of(type(self)))
        fields: dict[str, Any] = dict(options)
        factory = {name: fields.pop(name, None) for name in ("device", "dtype")}
        if factory["dtype"] is not None:
            precision_of(factory["dtype"], subject="the module's parameters")
        config = AttentionConfig(
            embed_dim=embed_dim, num_heads=num_heads, dropout=dropout, bias=bias, **fields
        )
        if runner.policy is not None:
            check_ranks(runner.policy, config.size_of_head)
        self.config = config
        self.runner = runner
        self.need_weights_by_default = False
        self.embed_dim = embed_dim
        self.kdim = config.key_size
        self.vdim = config.value_size
        self.num_heads = num_heads
        self.head_dim = config.size_of_head
        self.dropout = dropout
        self.batch_first = config.batch_first
        self.add_zero_attn = config.add_zero_attn
        # False whatever the sizes: torch's encoder layers read it before they take the
        # weights past this module into a kernel of their own.
        self._qkv_same_embed_dim = False
        self._make_parameters(factory)
        self._reset_parameters()
        self._make_extras(factory)

    def _make_parameters(self, factory: dict[str, Any]) -> None:
        """Make the parameters of ``nn.MultiheadAttention``, in its order."""

        def empty(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(shape, **factory))

        config = self.config
        embed_dim, query_size, kv_size = config.embed_dim, config.query_size, config.kv_size
        if config.has_packed_weights:
            self.in_proj_weight = empty(query_size + 2 * kv_size, embed_dim)
            self.q_proj_weight = self.k_proj_weight = self.v_proj_weight = None
        else:
            self.q_proj_weight = empty(query_size, embed_dim)
            self.k_proj_weight = empty(kv_size, config.key_size)
            self.v_proj_weight = empty(kv_size, config.value_size)
            self.in_proj_weight = None
        self.in_proj_bias = empty(query_size + 2 * kv_size) if config.bias else None
        out_bias = config.bias if config.out_bias is None else config.out_bias
        self.out_proj = nn.Linear(query_size, embed_dim, bias=out_bias, **factory)
        self.bias_k = empty(1, 1, kv_size) if config.add_bias_kv else None
        self.bias_v = empty(1, 1, kv_size) if config.add_bias_kv else None

    def _make_extras(self, factory: dict[str, Any]) -> None:
        """Make what ``nn.MultiheadAttention`` does not have."""
        config = self.config
        self.sinks = (
            nn.Parameter(torch.zeros(config.num_heads, **factory)) if config.sinks else None
        )
        self.q_norm = self.k_norm = self.rotary = None
        if config.qk_norm:
            self.q_norm = nn.RMSNorm(config.size_of_head, eps=config.qk_norm_eps, **factory)
            self.k_norm = nn.RMSNorm(config.size_of_head, eps=config.qk_norm_eps, **factory)
        if config.rotary is not None:
            self.rotary = RotaryEmbedding(config.rotary)

    def _reset_parameters(self) -> None:
        """Draw the initial numbers as ``nn.MultiheadAttention`` does."""
        for weight in (
            self.in_proj_weight,
            self.q_proj_weight,
            self.k_proj_weight,
            self.v_proj_weight,
        ):
            if weight is not None:
                nn.init.xavier_uniform_(weight)
        if self.in_proj_bias is not None:
            nn.init.zeros_(self.in_proj_bias)
        if self.out_proj.bias is not None:
            nn.init.zeros_(self.out_proj.bias)
        for extra in (self.bias_k, self.bias_v):
            if extra is not None:
                nn.init.xavier_normal_(extra)

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor | None = None,
        value: torch.Tensor | None = None,
        key_padding_mask: torch.Tensor | None = None,
        need_weights: bool | None = None,
        attn_mask: torch.Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
        *,
        cache: "LayerCache | None" = None,
        positions: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return (output, weights or None).

        Args:
            query: [B, L, E]; [L, B, E] without ``batch_first``; [L, E] without a batch.
            key: the same with S for L and ``kdim`` for E; None is ``query``.
            value: the same with ``vdim``; None is ``key``.
            key_padding_mask: [B, S], or [S] without a batch: True = masked, or added.
            need_weights: return the softmax weights, which needs L x S memory; None is
                ``need_weights_by_default``, False unless the module replaced one of
                PyTorch's.
            attn_mask: [L, S] or [B * H, L, S]: True = masked, or added to the scores.
            average_attn_weights: weights are the mean over heads.
            is_causal: a query sees no key behind its own position. It holds beside
                ``attn_mask``, not instead of it, and hides none of the keys that
                ``add_bias_kv`` and ``add_zero_attn`` append; alone it is the cheapest.
            cache: keys and values of the tokens before, to which this call's are appended;
                S counts them all, and causal order and window count from the end.
            positions: int64 [B or 1, L], where ``rotary`` places the tokens; None counts
                from the length of the cache.

        Returns:
            The output in the query's shape, and the weights before dropout: [B, L, S], or
            [B, H, L, S] if not averaged; no B without a batch. S counts the keys that
            ``add_bias_kv`` and ``add_zero_attn`` append.

        Raises:
            ShapeError, DTypeError, DeviceError, ArgumentError, ArgumentTypeError: bad input.
            ArgumentError: a cache in a forward pass that activation checkpointing runs again,
                or one that dropped keys which the layer's window shows.
            UnsupportedError: nested tensors.
            NonFiniteError: NaN or infinity where an approximation was to be measured, only in
                a module that keeps off fused kernels. The others compute such a call exactly
                and count the reason in ``fallback_reasons``.
        """
        if key is None:
            if value is not None:
                raise ArgumentError.got("value without key", "None", described(value))
            key = query
        value = key if value is None else value
        layout = check_inputs(query, key, value, self.config, self.batch_first)
        if need_weights is not None:
            require_flag("need_weights", need_weights)
        if self.rotary is not None or cache is not None:
            check_self_attention(query, key, "rotary" if cache is None else "cache")
        if cache is not None:
            check_cache(cache, self.config.window[0])
        start = 0 if cache is None else cache.length
        # Made before the cache grows: a mask that does not fit must not change it.
        masks = mask_arguments(
            key_padding_mask,
            attn_mask,
            layout if cache is None else layout._replace(len_k=start + layout.len_k),
            is_causal=bool(is_causal),
            window=self.config.window,
            to_end=cache is not None,
            num_heads=self.num_heads,
            num_dropped=0 if cache is None else cache.start,
            num_extra=(self.bias_k is not None) + self.add_zero_attn,
            device=query.device,
        )
        try:
            q, k, v = self._heads(query, key, value, layout)
        except RuntimeError as error:
            given = {"query": query, "key": key, "value": value}
            if found := unlike_weights(given, next(self.parameters())):
                raise found from error
            raise
        if self.q_norm is not None and self.k_norm is not None:
            # Under autocast the norms stay in the dtype of their weights, and q as v is.
            wide = self.q_norm.weight.dtype
            q, k = self.q_norm(q.to(wide)).to(v.dtype), self.k_norm(k.to(wide)).to(v.dtype)
        if self.rotary is not None:
            q, k = self.rotary(q, k, new_positions(positions, start, layout, query.device))
        elif positions is not None:
            raise ArgumentError.got("positions", "None without rotary", described(positions))
        if cache is not None:
            k, v = dense_keys_values(cache.update(k, v))
        if self.bias_k is not None or self.add_zero_attn:
            k, v = self._with_extra_keys(k, v)
        wanted = self.need_weights_by_default if need_weights is None else need_weights
        if self.training and self.dropout:
            masks["dropout_p"] = self.dropout
        if self.sinks is not None:
            masks["sinks"] = self.sinks
        output, weights = self.runner.run(
            q, k, v, need_weights=wanted, training=self.training, **self.config.numbers(), **masks
        )
        output = self.out_proj(layout.merge_heads(output))
        if weights is None:
            return output, None
        weights = weights.mean(dim=1) if average_attn_weights else weights
        return output, layout.restore_weights(weights.to(query.dtype))

    def _heads(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, layout: Layout
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return projected q [B, H, L, D], k and v [B, Hkv, S, D]."""
        config = self.config
        packed = self.in_proj_weight
        if packed is not None and query is key is value:
            # Cut apart as heads: half of the views that cutting first takes.
            heads, kv_heads = config.num_heads, config.kv_heads
            projected = functional.linear(query, packed, self.in_proj_bias)
            together = projected.view(*query.shape[:-1], heads + 2 * kv_heads, self.head_dim)
            q, k, v = layout.heads_first(together).split_with_sizes((heads, kv_heads, kv_heads), 1)
            return q, k, v
        sizes = (config.query_size, config.kv_size, config.kv_size)
        if packed is not None:
            q, k, v = project_packed(query, key, value, packed, self.in_proj_bias, sizes)
        else:
            three = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
            weights = [weight for weight in three if weight is not None]
            q, k, v = project_separately((query, key, value), weights, self.in_proj_bias, sizes)
        q = layout.split_heads(q, config.num_heads)
        k, v = (layout.split_heads(item, config.kv_heads) for item in (k, v))
        return q, k, v

    def _with_extra_keys(
        self, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return k and v with what ``add_bias_kv`` and ``add_zero_attn`` append."""
        extra = []
        for heads, learned in ((key, self.bias_k), (value, self.bias_v)):
            rows = [heads]
            if learned is not None:
                row = learned.to(heads.dtype).view(1, heads.shape[1], 1, heads.shape[3])
                rows.append(row.expand(heads.shape[0], -1, -1, -1))
            if self.add_zero_attn:
                rows.append(heads.new_zeros((*heads.shape[:2], 1, heads.shape[3])))
            extra.append(torch.cat(rows, dim=2))
        return extra[0], extra[1]

    def get_statistics(self) -> AttentionStatistics:
        """Return the statistics of the calls made so far, a mapping."""
        return self.runner.statistics

    def reset_statistics(self) -> None:
        """Forget the calls made so far."""
        self.runner.statistics.reset()

    def extra_repr(self) -> str:
        """Return the settings that differ from the defaults."""
        shown = [f"{self.embed_dim}, {self.num_heads}"]
        default = AttentionConfig(embed_dim=self.num_heads, num_heads=self.num_heads)
        for name in AttentionConfig.__dataclass_fields__:
            value = getattr(self.config, name)
            if name not in ("embed_dim", "num_heads") and value != getattr(default, name):
                shown.append(f"{name}={value!r}")
        return ", ".join(shown)


def _keywords_of(kind: type[BaseAttention]) -> tuple[str, ...]:
    """Return what a module's constructor takes, its own keywords first."""
    named = inspect.signature(kind).parameters.values()
    own = [item.name for item in named if item.kind is item.KEYWORD_ONLY]
    rest = [item.name for item in named if item.kind is item.POSITIONAL_OR_KEYWORD]
    return (*own, *rest, *sorted(AttentionOptions.__annotations__))
