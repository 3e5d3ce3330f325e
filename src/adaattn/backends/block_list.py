"""Which blocks of keys each block of query rows sees: a list for each, on the device."""

from dataclasses import dataclass, field, replace
from typing import Final

import torch

from adaattn._numbers import require_integer
from adaattn.errors import ArgumentError, ArgumentTypeError, DeviceError, DTypeError, ShapeError

__all__ = ["ALL_BLOCKS", "BlockList", "list_strides", "listed_first"]

ALL_BLOCKS: Final = -1
"""The count of a block of rows that sees every block of keys."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BlockList:
    """Which blocks of keys each block of query rows sees.

    Causal order, windows and masks hide keys of a listed block as they do everywhere. Numbers on
    a CPU are checked here; those on a GPU only where ``ADAATTN_DEBUG`` is set, and kernels keep
    inside of the tensors whatever they say. The tensors must not be changed afterwards.

    Args:
        counts: int32 [B or 1, Hq or 1, Nq], how many blocks of keys are listed for each of the
            ``Nq = ceil(Sq / block_q)`` blocks of rows; -1 is all of them, so that dense heads
            can stand beside sparse ones. Rows of 0 see nothing.
        indices: int32 [B or 1, Hq or 1, Nq, K], their numbers, ascending; those behind the first
            ``counts`` are not looked at.
        block_q: query rows of a block.
        block_k: keys of a block.
        num_key_blocks: blocks of keys of its calls, ``ceil(Sk / block_k)``; 0 if any.

    Raises:
        ArgumentTypeError: what is no tensor, or no size.
        ShapeError: shapes do not belong together, or there are no blocks.
        DTypeError: not int32.
        DeviceError: tensors on two devices.
        ArgumentError: a number is out of range or out of order.

    Example:
        >>> import torch, adaattn
        >>> local = torch.eye(4, dtype=torch.bool) | torch.eye(4, dtype=torch.bool).roll(1, 0)
        >>> blocks = adaattn.BlockList.from_mask(local, block_q=32, block_k=32)
        >>> q, k, v = (torch.randn(1, 2, 128, 16) for _ in range(3))
        >>> adaattn.scaled_dot_product_attention(q, k, v, blocks=blocks).shape
        torch.Size([1, 2, 128, 16])
    """

    counts: torch.Tensor
    indices: torch.Tensor
    block_q: int = 128
    block_k: int = 128
    num_key_blocks: int = 0
    _needed: int = field(default=0, init=False, repr=False)

    def __post_init__(self) -> None:
        """Refuse what is no list of blocks."""
        for name in ("block_q", "block_k"):
            require_integer(name, getattr(self, name), least=1)
        for name in ("counts", "indices"):
            item = getattr(self, name)
            if not isinstance(item, torch.Tensor):
                raise ArgumentTypeError.got(
                    f"{name} of a BlockList", "a tensor", type(item).__name__
                )
            if item.dtype != torch.int32:
                raise DTypeError.got(
                    f"dtype of {name}", "int32", item.dtype, "use .to(torch.int32)"
                )
        counts, indices = self.counts, self.indices
        sizes = (*indices.shape[:2], indices.shape[-1])
        if indices.dim() != 4 or counts.shape != indices.shape[:3] or 0 in sizes:
            got = f"{list(counts.shape)} and {list(indices.shape)}"
            raise ShapeError.got(
                "counts and indices", "[B, H, Nq] and [B, H, Nq, K], none empty", got
            )
        if counts.device != indices.device:
            raise DeviceError.got(
                "counts and indices", "one device", f"{counts.device}, {indices.device}"
            )
        object.__setattr__(self, "counts", counts.contiguous())
        object.__setattr__(self, "indices", indices.contiguous())
        if not torch.compiler.is_compiling() and counts.device.type == "cpu":
            object.__setattr__(self, "_needed", self.check())

    @property
    def needed_blocks(self) -> int:
        """Blocks of keys that there must be for these numbers; 0 where they are not known."""
        return self.num_key_blocks or self._needed

    def check(self) -> int:
        """Return the blocks of keys that the numbers ask for; on a GPU this waits for it.

        Raises:
            ArgumentError: a number is out of range or out of order.
        """
        counts, indices = self.counts, self.indices
        most = indices.shape[-1]
        if counts.numel() == 0:
            return 0
        low, high = int(counts.min()), int(counts.max())
        if low < ALL_BLOCKS or high > most:
            raise ArgumentError.got("counts of a BlockList", f"-1 to {most}", f"{low} to {high}")
        listed = torch.arange(most, device=counts.device) < counts.unsqueeze(-1)
        steps = torch.where(listed, indices, 0)
        if int(steps.min()) < 0:
            raise ArgumentError.got("indices of a BlockList", "at least 0", int(steps.min()))
        falls = listed[..., 1:] & (indices.diff(dim=-1) <= 0)
        if bool(falls.any()):
            place = tuple(falls.nonzero()[0].tolist())
            pair = indices[place].item(), indices[(*place[:-1], place[-1] + 1)].item()
            raise ArgumentError.got(
                "indices of a BlockList",
                "ascending numbers",
                f"{pair[0]} before {pair[1]} at {list(place)}",
                "sort them, each block once",
            )
        return int(steps.max()) + 1 if bool(listed.any()) else 0

    @classmethod
    def from_mask(
        cls, mask: torch.Tensor, *, block_q: int = 128, block_k: int = 128
    ) -> "BlockList":
        """Return the list of a mask of blocks. Nothing is read from a GPU.

        Args:
            mask: boolean [Nq, Nk], [H, Nq, Nk] or [B, H, Nq, Nk]; True is a block that is seen.
            block_q: query rows of a block.
            block_k: keys of a block.

        Raises:
            ArgumentTypeError: no tensor.
            DTypeError: not boolean.
            ShapeError: not of 2 to 4 dimensions.
        """
        if not isinstance(mask, torch.Tensor):
            raise ArgumentTypeError.got("a mask of blocks", "a tensor", type(mask).__name__)
        if mask.dtype != torch.bool:
            raise DTypeError.got("dtype of a mask of blocks", "bool", mask.dtype)
        if not 2 <= mask.dim() <= 4:
            shape = "[Nq, Nk], [H, Nq, Nk] or [B, H, Nq, Nk]"
            raise ShapeError.got("a mask of blocks", shape, list(mask.shape))
        mask = mask[(None,) * (4 - mask.dim())]
        counts, order = listed_first(mask)
        if mask.device.type == "cpu" and counts.numel():
            order = order[..., : max(int(counts.max()), 1)]
        return cls(
            counts=counts,
            indices=order,
            block_q=block_q,
            block_k=block_k,
            num_key_blocks=mask.shape[-1],
        )

    def to(self, device: torch.device | str) -> "BlockList":
        """Return the list on a device."""
        return replace(self, counts=self.counts.to(device), indices=self.indices.to(device))

    def to_mask(self, num_blocks: int) -> torch.Tensor:
        """Return the mask of blocks: boolean [B or 1, Hq or 1, Nq, num_blocks]."""
        return _mask_of(self.counts, self.indices, num_blocks)

    def seen(self, rows: range, cols: range) -> torch.Tensor:
        """Return which keys are in listed blocks: boolean [B or 1, Hq or 1, R, C].

        Args:
            rows: numbers of query rows.
            cols: numbers of keys.
        """
        first, last = rows.start // self.block_q, -(-rows.stop // self.block_q)
        counts, indices = self.counts[:, :, first:last], self.indices[:, :, first:last]
        mask = _mask_of(counts, indices, -(-cols.stop // self.block_k))
        keys = mask.repeat_interleave(self.block_k, -1)[..., cols.start : cols.stop]
        numbers = torch.arange(rows.start, rows.stop, device=counts.device)
        return keys.index_select(2, numbers // self.block_q - first)

    def of_heads(self, heads: torch.Tensor) -> "BlockList":
        """Return the lists of some query heads, by their numbers."""
        if self.counts.shape[1] == 1:
            return self
        counts, indices = (item.index_select(1, heads) for item in (self.counts, self.indices))
        return replace(self, counts=counts, indices=indices)


def list_strides(shape: tuple[int, ...]) -> tuple[int, int]:
    """Return the lists from one sequence to the next, and from one head; 0 where one serves all.

    Args:
        shape: of the numbers: [B or 1, Hq or 1, Nq, K].
    """
    batch, heads, rows, _ = shape
    return heads * rows if batch > 1 else 0, rows if heads > 1 else 0


def listed_first(mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return how many blocks of keys each row of a mask has, and all numbers, those first: int32.

    Both are contiguous, of a transposed mask too: FlexAttention's kernels take that for granted.

    Args:
        mask: boolean [..., Nk].
    """
    mask = mask.contiguous()
    order = mask.to(torch.int8).argsort(dim=-1, descending=True, stable=True)
    return mask.sum(-1, dtype=torch.int32), order.to(torch.int32)


def _mask_of(counts: torch.Tensor, indices: torch.Tensor, num_blocks: int) -> torch.Tensor:
    """Return which of a number of blocks are listed: boolean [B, H, Nq, num_blocks]."""
    most = indices.shape[-1]
    listed = torch.arange(most, device=counts.device) < counts.unsqueeze(-1)
    places = torch.where(listed, indices, num_blocks).clamp(0, num_blocks).long()
    mask = listed.new_zeros((*counts.shape, num_blocks + 1))
    mask = mask.scatter(-1, places, True)[..., :num_blocks]
    return mask | (counts < 0).unsqueeze(-1)
