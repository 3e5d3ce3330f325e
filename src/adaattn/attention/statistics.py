"""What a module's attention calls were: counted, summed, and merged over layers and ranks."""

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

import torch.distributed as dist

from adaattn import hardware
from adaattn._events import AttentionEvent
from adaattn.attention._digest import Digest, digest_of
from adaattn.errors import ArgumentTypeError, UnsupportedError
from adaattn.spec import Method, Precision, Variant

__all__ = ["AttentionStatistics"]

_KEPT_NAMES: Final = 64
_Sums = defaultdict[str, float]

_SHARES = {
    "share_by_method": "heads_by_method",
    "share_by_precision": "heads_by_precision",
}
_TIMES = ("measure_ms", "time_ms", "time_saved_ms")
_COUNTED = (
    "calls_by_executor",
    "calls_by_plan",
    "heads_by_rank",
    "fallback_reasons",
    "precision_notes",
)


class AttentionStatistics(Mapping[str, Any]):
    """Statistics of attention calls, as a mapping from names to plain values.

    ``print`` shows a verdict in one line, then a table. Before the first call everything is zero,
    empty or None; times that were not taken are None.

    The names:

    - ``calls``; ``flash_calls``, served by a fused kernel on any device; ``fallback_calls``,
      exact but without one, with the sentences in ``fallback_reasons``; ``approximate_calls``,
      where no head was exact; ``flash_ratio``, the share of fused ones in all calls (0.0
      before the first);
    - ``share_by_method`` and ``share_by_precision``: shares of the heads computed;
      ``heads_by_rank``, ``calls_by_executor``, ``calls_by_plan``: counts; ``precision_notes``:
      why the device gains nothing by a number format that was asked for by name;
    - ``measured_calls``, on which numbers were taken from the tensors; ``recomputed_calls``,
      run again in backward by activation checkpointing and counted nowhere else;
      ``step_downs``: executors that failed and audits that were not passed;
      ``repaired_heads``: heads that an audit had computed again exactly; ``switches``: heads
      computed in another way than in the call before;
    - ``mean_entropy_bits``, ``mean_effective_rank``: means over measured heads, else None;
    - ``mean_estimated_error``, ``max_estimated_error``: what planning expected of the
      approximations; ``mean_audited_error``, ``max_audited_error``: what exact rows showed of
      those that were kept;
    - ``flops``, ``bytes_moved``: by the cost model; ``flops_saved``, ``bytes_saved``: less than
      the cheapest exact way; ``peak_workspace_bytes``: predicted memory beside inputs and
      output; ``peak_memory_bytes``: on a CPU the peak of the whole process by then, on CUDA
      that of PyTorch's allocations, None if unknown;
    - ``measure_ms``: host time of measuring; ``time_ms``: of calls that a sink timed;
      ``time_saved_ms``: measured, what approximations took less than exact attention, choosing
      and checking counted (negative is a loss);
    - ``per_head``: for each layer and head the calls by method, switches, mean entropy, mean
      effective rank and the last rank (0 is full).
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget every call."""
        self._numbers: _Sums = defaultdict(float)
        self._kinds: defaultdict[str, Counter[str]] = defaultdict(Counter)
        self._largest: dict[str, float] = {}
        self._heads: defaultdict[tuple[str, int], _Sums] = defaultdict(_new_sums)
        self._last: dict[str, tuple[Variant, ...]] = {}
        self._event: AttentionEvent | None = None
        self._repeats = 0

    def record(self, event: AttentionEvent, calls: int = 1) -> None:
        """Count one call, or several exact ones that were all alike.

        Exact calls that are all alike come with one and the same event: they are only counted,
        and added up when the next other call comes or somebody looks.
        """
        if event is self._event:
            self._repeats += calls
            return
        self._settle()
        digest = digest_of(event)
        self._event = event if _is_plain(event, digest) else None
        self._repeats = calls - 1
        _add(self._numbers, dict(digest.numbers))
        for kind, name, count in digest.kinds:
            self._tally(kind, name, count)
        for head in event.repaired_heads:
            self._count_repaired(event.problem.precision, digest, head)
        self._numbers["step_downs"] += len(event.fallbacks)
        self._numbers["repaired_heads"] += len(event.repaired_heads)
        if event.saved_ms:
            self._numbers["time_saved_ms"] += event.saved_ms
        if event.time_ms is not None:
            self._numbers["time_ms"] += event.time_ms
        for error in digest.errors:
            self._add_error("estimated", error)
        own = (Method.EXACT, event.problem.precision)
        for head, error in enumerate(event.head_errors):
            if digest.variants[head] != own and head not in event.repaired_heads:
                self._add_error("audited", error)
        for error in filter(None, event.earlier_errors):
            self._add_error("audited", error)
        self._numbers["step_downs"] += bool(event.earlier_over)
        self._raise("peak_workspace_bytes", event.workspace_bytes)
        self._raise("peak_memory_bytes", hardware.peak_so_far(event.problem.device_type))
        self._record_heads(event, digest)

    def _settle(self) -> None:
        """Add up the calls that were like the last one."""
        event, times = self._event, self._repeats
        if event is None or not times:
            return
        self._repeats = 0
        digest = digest_of(event)
        for name, value in digest.numbers:
            self._numbers[name] += times * value
        for kind, name, count in digest.kinds:
            self._tally(kind, name, times * count)
        for head, variant in enumerate(digest.variants):
            self._heads[event.tag, head][f"calls {variant[0].name.lower()}"] += times
        self._raise("peak_memory_bytes", hardware.peak_so_far(event.problem.device_type))

    def __getstate__(self) -> dict[str, Any]:
        """Return what is copied and pickled: sums, without the last event."""
        self._settle()
        return self.__dict__ | {"_event": None}

    def record_recomputed(self) -> None:
        """Count a call that activation checkpointing ran again."""
        self._numbers["recomputed_calls"] += 1

    def note_precision(self, reason: str) -> None:
        """Count a call in a number format by which the device gains nothing, and why."""
        self._tally("precision_notes", reason, 1)

    def note_fallback(self, reason: str) -> None:
        """Count a reason why a call was exact that its event does not hold."""
        self._tally("fallback_reasons", reason, 1)

    @classmethod
    def merge(cls, parts: "Iterable[AttentionStatistics]") -> "AttentionStatistics":
        """Return the statistics of several modules, layers or ranks together.

        Raises:
            ArgumentTypeError: a part is something else.
        """
        whole = cls()
        for part in parts:
            if not isinstance(part, AttentionStatistics):
                got = type(part).__name__
                raise ArgumentTypeError.got("statistics", "AttentionStatistics", got)
            part._settle()
            _add(whole._numbers, part._numbers)
            for kind, counts in part._kinds.items():
                whole._kinds[kind].update(counts)
            for name, value in part._largest.items():
                whole._raise(name, value)
            for key, sums in part._heads.items():
                _add(whole._heads[key], sums)
                whole._heads[key]["last_rank"] = sums["last_rank"]
        return whole

    def gather(self, group: Any = None) -> "AttentionStatistics":
        """Return the statistics of all ranks together; every rank of the group must call it.

        Args:
            group: a ``torch.distributed`` process group; None is the default one.

        Raises:
            UnsupportedError: there is no process group.
        """
        if not (dist.is_available() and dist.is_initialized()):
            raise UnsupportedError(
                "gather",
                ["torch.distributed has no process group in this process"],
                "Call torch.distributed.init_process_group first.",
            )
        parts: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(parts, self, group=group)
        return self.merge(parts)

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values under the names that the class lists."""
        self._settle()
        numbers = self._numbers
        calls = int(numbers["calls"])
        found: dict[str, Any] = {
            "calls": calls,
            "flash_calls": int(numbers["flash_calls"]),
            "fallback_calls": int(numbers["fallback_calls"]),
            "approximate_calls": int(numbers["approximate_calls"]),
            "flash_ratio": numbers["flash_calls"] / calls if calls else 0.0,
        }
        for name, kind in _SHARES.items():
            total = sum(self._kinds[kind].values())
            found[name] = {key: count / total for key, count in self._kinds[kind].items()}
        for kind in _COUNTED:
            found[kind] = dict(self._kinds[kind])
        for name in ("measured_calls", "recomputed_calls", "step_downs", "repaired_heads"):
            found[name] = int(numbers[name])
        found["switches"] = int(numbers["switches"])
        found["mean_entropy_bits"] = _mean(numbers, "entropy")
        found["mean_effective_rank"] = _mean(numbers, "effective_rank")
        for kind in ("estimated", "audited"):
            found[f"mean_{kind}_error"] = _mean(numbers, f"{kind}_error")
            found[f"max_{kind}_error"] = self._largest.get(f"{kind}_error")
        found["flops"] = numbers["flops"]
        found["bytes_moved"] = numbers["bytes_moved"]
        found["flops_saved"] = numbers["flops_exact"] - numbers["flops"]
        found["bytes_saved"] = numbers["bytes_moved_exact"] - numbers["bytes_moved"]
        for name in ("peak_workspace_bytes", "peak_memory_bytes"):
            value = self._largest.get(name)
            found[name] = None if value is None else int(value)
        for name in _TIMES:
            found[name] = numbers.get(name)
        found["per_head"] = {
            f"{tag or 'attention'} head {head}": _head_dict(counts)
            for (tag, head), counts in sorted(self._heads.items())
        }
        return found

    def __getitem__(self, key: str) -> Any:
        """Return one statistic."""
        return self.to_dict()[key]

    def __iter__(self) -> Iterator[str]:
        """Return the names."""
        return iter(self.to_dict())

    def __len__(self) -> int:
        """Return how many there are."""
        return len(self.to_dict())

    def verdict(self) -> str:
        """Return one line: calls, share by method, time saved as measured, worst audited error."""
        found = self.to_dict()
        if not found["calls"]:
            return "no calls yet"
        shares = found["share_by_method"]
        by_share = Counter(shares).most_common()
        heads = ", ".join(f"{share:.0%} {name.replace('_', ' ')}" for name, share in by_share)
        calls = f"{found['calls']} call{'s' if found['calls'] > 1 else ''}"
        saved, error = found["time_saved_ms"], found["max_audited_error"]
        words = [f"{calls}: heads {heads}"]
        if saved is not None:
            words.append(f"{abs(saved):.3g} ms {'saved' if saved >= 0 else 'lost'}, as measured")
        elif set(shares) != {"exact"}:
            words.append("time saved not measured yet")
        if error is not None:
            words.append(f"worst audited error {error:.2g}")
        return "; ".join(words)

    def __repr__(self) -> str:
        """Return the verdict in brackets."""
        return f"<AttentionStatistics of {self.verdict()}>"

    def __str__(self) -> str:
        """Return the verdict, and a table: a line for each statistic and for each head."""
        rows: list[tuple[str, str]] = []
        for name, value in self.to_dict().items():
            if value is None and name in _TIMES:
                continue
            if name != "per_head":
                rows += _rows(name, value)
                continue
            for head, values in value.items():
                shown = ", ".join(f"{key} {_shown(item)}" for key, item in values.items())
                rows.append((head, shown))
        width = max(len(name) for name, _ in rows)
        lines = (f"{name:<{width}}  {value}".rstrip() for name, value in rows)
        return "\n".join([self.verdict(), "", *lines])

    def _record_heads(self, event: AttentionEvent, digest: Digest) -> None:
        """Count what became of each head, and what was measured of it."""
        variants = event.decision.plan.variants(event.problem.precision, event.repaired_heads)
        before = self._last.get(event.tag, variants)
        self._last[event.tag] = variants
        stats = event.stats
        if stats is not None:
            self._numbers["measured_calls"] += 1
            self._numbers["measure_ms"] += stats.measure_ms
        for head, variant in enumerate(variants):
            counts = self._heads[event.tag, head]
            counts[f"calls {variant[0].name.lower()}"] += 1
            counts["last_rank"] = digest.ranks[head] if variant[0] is Method.LOW_RANK else 0
            if len(before) == len(variants) and before[head] != variant:
                counts["switches"] += 1
                self._numbers["switches"] += 1
            if stats is None:
                continue
            for name, values in (
                ("entropy", stats.entropy_bits),
                ("effective_rank", stats.effective_ranks),
            ):
                if values:
                    for counter in (counts, self._numbers):
                        counter[f"{name}_sum"] += values[head]
                        counter[f"{name}_count"] += 1

    def _count_repaired(self, own: Precision, digest: Digest, head: int) -> None:
        """Count a head as exact that was computed so after all."""
        method, precision = digest.variants[head]
        moves = [("heads_by_method", method.name.lower(), "exact")]
        moves.append(("heads_by_precision", precision.label, own.label))
        if digest.ranks[head]:
            moves.append(("heads_by_rank", str(digest.ranks[head]), ""))
        for kind, before, after in moves:
            self._kinds[kind][before] -= 1
            if after:
                self._kinds[kind][after] += 1
            self._kinds[kind] += Counter()  # drops what has come to zero

    def _add_error(self, kind: str, error: float) -> None:
        """Add one error to a mean and a maximum."""
        if math.isfinite(error):
            self._numbers[f"{kind}_error_sum"] += error
            self._numbers[f"{kind}_error_count"] += 1
        self._raise(f"{kind}_error", error)

    def _tally(self, kind: str, name: str, count: int) -> None:
        """Count something by name; names past the first 64 are counted together."""
        counts = self._kinds[kind]
        counts[name if name in counts or len(counts) < _KEPT_NAMES else "others"] += count

    def _raise(self, name: str, value: float | None) -> None:
        """Keep the larger of a maximum and a value."""
        if value is not None:
            self._largest[name] = max(self._largest.get(name, value), value)


def _is_plain(event: AttentionEvent, digest: Digest) -> bool:
    """Return whether an event says nothing but its decision, and that is exact."""
    noted = event.fallbacks or event.head_errors or event.earlier_errors
    noted = noted or event.repaired_heads or digest.errors
    unlike = event.stats is not None or event.time_ms is not None or event.saved_ms != 0.0
    return not noted and not unlike


def _new_sums() -> _Sums:
    """Return sums of nothing; a named function, so that statistics can be pickled."""
    return defaultdict(float)


def _add(into: _Sums, more: Mapping[str, float]) -> None:
    """Add numbers by name."""
    for name, value in more.items():
        into[name] += value


def _mean(counts: _Sums, name: str) -> float | None:
    """Return the mean of what was added under a name, or None."""
    count = counts[f"{name}_count"]
    return counts[f"{name}_sum"] / count if count else None


def _head_dict(counts: _Sums) -> dict[str, Any]:
    """Return what is counted of one head."""
    calls = {name: int(count) for name, count in counts.items() if name.startswith("calls ")}
    return {
        **calls,
        "switches": int(counts["switches"]),
        "last_rank": int(counts["last_rank"]),
        "mean_entropy_bits": _mean(counts, "entropy"),
        "mean_effective_rank": _mean(counts, "effective_rank"),
    }


def _rows(name: str, value: Any) -> list[tuple[str, str]]:
    """Return one table row, or one for each entry of a mapping."""
    if not isinstance(value, dict):
        return [(name, _shown(value))]
    if not value:
        return [(name, "none")]
    items = list(value.items())
    first = (name, f"{_shown(items[0][1])}  {items[0][0]}")
    return [first, *(("", f"{_shown(item)}  {key}") for key, item in items[1:])]


def _shown(value: Any) -> str:
    """Return a number with four significant digits; None is a dash."""
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
