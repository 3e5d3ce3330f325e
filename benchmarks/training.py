"""Trains with AdaAttn beside what a PyTorch user has: losses, the time of a step, memory.

    python -m benchmarks.training --device cuda --part decoder mixed memory growth

``decoder`` trains a decoder of 100M parameters on *Opticks*, byte by byte: twins with the same
first weights and the same passages, whose steps take turns in an order drawn anew each time, so
that their times are of one run and none always follows the same other. ``--batch`` is how many
passages a step takes: few leave the GPU waiting for the host. They differ in the function of q, k
and v alone, each held to the definition before: `F.scaled_dot_product_attention`, the same once
more, which shows how far times of equals are apart, by another of its kernels, which shows what
rounding alone does to a loss, and AdaAttn.
``mixed`` is the same with packed documents, a window and a softcap, which need FlexAttention in
PyTorch.
``memory`` is the peak of one forward and backward pass, ``growth`` what many steps leave behind.
``--plot`` draws the losses, if plotly is there.
"""

import argparse
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention import flex_attention as flex

import adaattn
from adaattn import hardware
from adaattn.evaluation.corpus import load_text
from adaattn.models import Decoder, TransformerConfig
from adaattn.testing import assert_matches
from benchmarks.timing import arguments, save, synchronize
from benchmarks.written_out import written_out

OURS: Final = "adaattn"
PEER, AGAIN, ROUNDED = "F.sdpa", "F.sdpa, once more", "F.sdpa, another kernel"
FLEX, NAIVE = "flex", "naive"
SOFTCAP: Final = 30.0
_DOCUMENT: Final = 700
"""Mean tokens of a packed document."""
_WARM_STEPS: Final = 10
"""Whose times do not count: kernels are compiled, and AdaAttn measures."""

Attend = Callable[..., torch.Tensor]
Row = dict[str, Any]


def sizes(options: argparse.Namespace) -> dict[str, Any]:
    """Return the sizes of all parts."""
    if options.tiny:
        model = {"num_layers": 2, "embed_dim": 64, "num_heads": 2}
        batch = options.batch or 2
        return {"model": model, "batch": batch, "length": 48, "lengths": (32, 64), "heads": 2}
    model = {"num_layers": 14, "embed_dim": 768, "num_heads": 12}
    lengths, batch = tuple(2**power for power in range(11, 16)), options.batch or 8
    return {"model": model, "batch": batch, "length": 2048, "lengths": lengths, "heads": 16}


def twins(
    ways: dict[str, Attend], options: argparse.Namespace, positions: int
) -> dict[str, tuple[Decoder, torch.optim.Optimizer]]:
    """Return a decoder for each way, all with the same weights, and its optimizer."""
    config = TransformerConfig(
        vocab_size=256, max_positions=positions, attention="dense", **sizes(options)["model"]
    )
    found = {}
    for name, attend in ways.items():
        torch.manual_seed(0)
        model = Decoder(config).to(options.device)
        for module in model.attention_modules():
            module.runner.run = partial(_without_weights, attend)  # type: ignore[method-assign]
        fused = options.device == "cuda"
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=fused)
        found[name] = model, optimizer
    return found


def _without_weights(attend: Attend, *tensors: torch.Tensor, **_: Any) -> tuple[torch.Tensor, None]:
    return attend(*tensors), None


def passages(options: argparse.Namespace, batch: int, length: int) -> Iterator[torch.Tensor]:
    """Yield passages [batch, length] of *Opticks*, the same in every run."""
    text = torch.tensor(list(load_text("opticks").encode()), device=options.device)
    generator = torch.Generator().manual_seed(0)
    while True:
        starts = torch.randint(len(text) - length, (batch, 1), generator=generator)
        yield text[(starts + torch.arange(length)).to(options.device)]


def compare(
    name: str,
    ways: dict[str, Attend],
    defined: Attend,
    options: argparse.Namespace,
    shape: tuple[int, int],
    before: Callable[[int], None] = lambda step: None,
) -> Row:
    """Return the losses of twins that train in turns, and the median time of a step.

    Args:
        name: of the row.
        ways: functions of q, k and v; AdaAttn is compared with the first.
        defined: what they are to compute, in the dtype of its tensors.
        options: of the command line.
        shape: rows and tokens of a batch.
        before: is called with a number ahead of each step of a twin, within its time.
    """
    before(0)
    peer, models = next(iter(ways)), twins(ways, options, shape[1])
    losses: dict[str, list[float]] = {way: [] for way in ways}
    times: dict[str, list[float]] = {way: [] for way in ways}
    names, texts, order = list(ways), passages(options, *shape), random.Random(0)
    adaattn.warmup(partial(_loss, models[OURS][0], next(texts), options.device))
    hold(ways, defined, options, shape[1])
    for step in range(options.steps):
        tokens = next(texts)
        for way in order.sample(names, len(names)):
            model, optimizer = models[way]
            synchronize(options.device)
            begin = time.perf_counter()
            before(step)
            loss = _loss(model, tokens, options.device)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses[way].append(float(loss.detach()))
            times[way].append(1e3 * (time.perf_counter() - begin))
    events: list[adaattn.AttentionEvent] = []
    with adaattn.record_events(events.append):
        _loss(models[OURS][0], next(texts), options.device)
    late = {way: statistics.median(found[_WARM_STEPS:] or found) for way, found in times.items()}
    apart = {
        way: max(abs(a - b) for a, b in zip(losses[way], losses[peer], strict=True))
        for way in ways
        if way != peer
    }
    model = models[peer][0]
    row = {
        "cell": name,
        "peer": peer,
        "parameters": sum(item.numel() for item in model.parameters()),
        "shape": shape,
        "step_ms": late,
        "speedup": late[peer] / late[OURS],
        "executors": sorted({it.label for event in events for it in event.decision.plan.groups}),
        "largest_difference_of_losses": apart,
        "last_loss": {way: found[-1] for way, found in losses.items()},
        "losses": losses,
    }
    print(
        name,
        {key: row[key] for key in ("step_ms", "speedup", "executors", "last_loss")},
        apart,
        flush=True,
    )
    return row


def _loss(model: Decoder, tokens: torch.Tensor, device: str) -> torch.Tensor:
    """Return the loss of one passage's next bytes, in bf16 where autocast says so."""
    with torch.autocast(device, dtype=torch.bfloat16):
        loss: torch.Tensor = model(tokens, labels=tokens).loss
    return loss


def hold(
    ways: dict[str, Attend], defined: Attend, options: argparse.Namespace, tokens: int
) -> None:
    """Raise unless all ways compute in bf16 what is defined, by the rule of `adaattn.testing`.

    They get all heads in the model's layout, so that what trains is what is held; one head is
    computed as defined, since scores in float64 are large.

    Raises:
        AssertionError: a way is wrong.
    """
    model = sizes(options)["model"]
    heads, dim = model["num_heads"], model["embed_dim"] // model["num_heads"]
    generator = torch.Generator(options.device).manual_seed(0)
    wide = torch.randn(1, tokens, 3, heads, dim, generator=generator, device=options.device)
    wide[:, :, 0] *= 16.0  # scores that a softcap moves
    half = [item.transpose(1, 2) for item in wide.bfloat16().requires_grad_().unbind(2)]
    one = [item[:, :1].detach() for item in half]
    exact, eager = defined(*(item.double() for item in one)), defined(*one)
    for name, attend in ways.items():
        with torch.autocast(options.device, dtype=torch.bfloat16):  # else torch.compile starts anew
            found = attend(*half).detach()[:, :1]
        assert_matches(found, exact, eager, name=name, summands=dim + tokens)


def decoder(options: argparse.Namespace) -> list[Row]:
    """Train in causal order."""
    other = SDPBackend.EFFICIENT_ATTENTION if options.device == "cuda" else SDPBackend.MATH

    def rounded(*tensors: torch.Tensor) -> torch.Tensor:
        with sdpa_kernel(other):
            return F.scaled_dot_product_attention(*tensors, is_causal=True)

    ways: dict[str, Attend] = {
        PEER: partial(F.scaled_dot_product_attention, is_causal=True),
        AGAIN: partial(F.scaled_dot_product_attention, is_causal=True),
        ROUNDED: rounded,
        OURS: partial(adaattn.scaled_dot_product_attention, is_causal=True),
    }
    known = sizes(options)
    shape = known["batch"], known["length"]
    later = torch.ones(shape[1], shape[1], dtype=torch.bool, device=options.device).triu(1)

    def defined(*tensors: torch.Tensor) -> torch.Tensor:
        return written_out(tensors[0], tensors[1], tensors[2], hidden=later)()

    return [compare("decoder", ways, defined, options, shape)]


def mixed(options: argparse.Namespace) -> list[Row]:
    """Train on packed documents in a window, with a softcap: one row of all tokens."""
    known = sizes(options)
    total = known["batch"] * known["length"]
    documents = Documents(total, known["length"] // 4, options.device)
    peer, attend = (
        (FLEX, documents.by_flex) if options.device == "cuda" else (NAIVE, documents.naive)
    )
    ways: dict[str, Attend] = {peer: attend, OURS: documents.ours}
    return [compare("mixed", ways, documents.naive, options, (1, total), documents.cut)]


class Documents:
    """Attention inside documents of other lengths at each step, in a window, with a softcap.

    Args:
        total: tokens of all documents.
        window: tokens that one sees before itself.
        device: of the tensors.
    """

    def __init__(self, total: int, window: int, device: str) -> None:
        self._total, self._window, self._device = total, window, device
        self._flex = torch.compile(flex.flex_attention, dynamic=False)
        self._make_blocks = torch.compile(flex.create_block_mask)
        self._blocks: Any = None

    def cut(self, step: int) -> None:
        """Choose where the documents of a step begin."""
        generator = torch.Generator().manual_seed(step)
        cuts = torch.randint(
            1, self._total, (max(self._total // _DOCUMENT, 3),), generator=generator
        ).unique()
        ends = torch.cat([torch.tensor([0]), cuts, torch.tensor([self._total])])
        self._starts = ends.to(self._device, torch.int32)
        tokens = torch.arange(self._total, device=self._device, dtype=torch.int32)
        self._document = torch.bucketize(tokens, self._starts, right=True)
        self._blocks = None

    def _rule(self) -> Callable[..., Any]:
        """Return what says whether a row sees a key, as FlexAttention takes it."""
        document, window = self._document, self._window

        def sees(batch: Any, head: Any, row: Any, key: Any) -> Any:
            del batch, head
            return (document[row] == document[key]) & (row >= key) & (row - key <= window)

        return sees

    def by_flex(self, *tensors: torch.Tensor) -> torch.Tensor:
        """FlexAttention; the block mask of a step is made once for all layers."""
        if self._blocks is None:
            sizes = (self._total, self._total)
            self._blocks = self._make_blocks(self._rule(), None, None, *sizes, device=self._device)
        found: torch.Tensor = self._flex(*tensors, score_mod=_capped, block_mask=self._blocks)
        return found

    def naive(self, *tensors: torch.Tensor) -> torch.Tensor:
        """Attention written out."""
        tokens = torch.arange(self._total, device=self._device)
        hidden = ~self._rule()(None, None, tokens[:, None], tokens)
        return written_out(tensors[0], tensors[1], tensors[2], hidden=hidden, softcap=SOFTCAP)()

    def ours(self, *tensors: torch.Tensor) -> torch.Tensor:
        """AdaAttn."""
        found: torch.Tensor = adaattn.scaled_dot_product_attention(
            *tensors,
            is_causal=True,
            window=(self._window, 0),
            softcap=SOFTCAP,
            cu_seqlens_q=self._starts,
            cu_seqlens_k=self._starts,
            max_seqlen_q=self._total,
            max_seqlen_k=self._total,
        )
        return found


def _capped(score: Any, *place: Any) -> Any:
    del place
    return SOFTCAP * torch.tanh(score / SOFTCAP)


def memory(options: argparse.Namespace) -> list[Row]:
    """Measure what one forward and backward pass adds at its peak, in causal order."""
    known, rows = sizes(options), []
    for length in known["lengths"]:
        leaves = [
            torch.randn(
                *(1, known["heads"], length, 64),
                device=options.device,
                dtype=torch.bfloat16,
                requires_grad=True,
            )
            for _ in range(3)
        ]
        later = torch.ones(length, length, dtype=torch.bool, device=options.device).triu(1)
        ways: dict[str, Callable[[], torch.Tensor]] = {
            OURS: partial(adaattn.scaled_dot_product_attention, *leaves, is_causal=True),
            PEER: partial(F.scaled_dot_product_attention, *leaves, is_causal=True),
            NAIVE: written_out(leaves[0], leaves[1], leaves[2], hidden=later),
        }
        peaks: dict[str, int | None] = {}
        for way, run in ways.items():
            try:
                for _ in range(2):  # the first one compiles
                    with hardware.peak_memory(options.device) as peak:
                        found = torch.autograd.grad(run().sum(), leaves)
                        del found
                peaks[way] = peak.added_bytes
            except torch.OutOfMemoryError:
                peaks[way] = None
        row: Row = {"cell": f"memory S{length}", "peak_bytes": peaks}
        ours, naive = peaks[OURS], peaks[NAIVE]
        if ours and naive:
            row["saved_of_naive"] = 1 - ours / naive
        rows.append(row)
        print(row, flush=True)
    return rows


def growth(options: argparse.Namespace) -> list[Row]:
    """Measure what many steps over changing lengths leave behind."""
    module = adaattn.AdaAttention(64, 4, policy="quality").to(options.device)
    steps, marks = options.many_steps, {}
    for step in range(1, steps + 1):
        x = torch.randn(2, 32 + step % 64, 64, device=options.device)
        module(x, is_causal=True)[0].square().mean().backward()
        module.zero_grad()
        if step in (steps // 10, steps // 2, steps):
            marks[step] = _held_bytes(options.device)
    row = {"cell": "growth", "held_bytes_after": marks}
    print(row, flush=True)
    return [row]


def _held_bytes(device: str) -> int:
    """Return the bytes that are allocated on a GPU; on a CPU those of the process, 0 if unknown."""
    if device == "cuda":
        torch.cuda.synchronize()
        return torch.cuda.memory_allocated()
    status = Path("/proc/self/statm")
    return 4096 * int(status.read_text().split()[1]) if status.exists() else 0


def plot(path: Path, rows: list[Row]) -> None:
    """Write the losses of all twins to a page."""
    import plotly.graph_objects as go

    lines = [
        go.Scatter(y=losses, name=f"{row['cell']}: {way}, {row['step_ms'][way]:.1f} ms a step")
        for row in rows
        for way, losses in row.get("losses", {}).items()
    ]
    axes = {"xaxis_title": "step", "yaxis_title": "loss in nats a byte"}
    go.Figure(lines, axes).write_html(path)


PARTS = {"decoder": decoder, "mixed": mixed, "memory": memory, "growth": growth}


def main(given: list[str] | None = None) -> int:
    """Run the parts asked for; return 0."""
    parser = arguments((__doc__ or "").splitlines()[0])
    parser.add_argument("--part", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--steps", type=int, default=300, help="of the decoders")
    parser.add_argument("--batch", type=int, help="passages that a step takes, else 8")
    parser.add_argument("--many-steps", type=int, default=5000, help="of growth")
    parser.add_argument("--plot", type=Path, help="page for the losses, by plotly")
    parser.add_argument("--tiny", action="store_true", help="toy sizes")
    options = parser.parse_args(given)
    rows: list[Row] = []
    for part in options.part:
        rows += PARTS[part](options)
        path = save(f"training_{options.device}", options, rows)
    print(path)
    if options.plot:
        plot(options.plot, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
