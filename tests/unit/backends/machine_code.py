"""Machine code of our kernels for sm_90a, without a GPU: what Triton and its assembler made."""

import contextlib
import importlib
import io
import re
import subprocess
import tempfile
from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path
from typing import Any, Final
from unittest.mock import patch

import torch

from adaattn._dtypes import torch_dtype
from adaattn.backends.device.launch import Launch
from adaattn.backends.hopper import mask_lists
from adaattn.backends.hopper.gradient_launch import BLOCK_KEYS, choose_gradients
from adaattn.backends.hopper.launch import choose
from adaattn.backends.interface import STATISTICS
from adaattn.backends.streamed import arguments as streamed_arguments
from adaattn.backends.streamed.chunks import Chunk, pitch_of
from adaattn.backends.streamed.fused_launch import Kind, Variant
from adaattn.backends.streamed.split import choose_splits, partials, slices
from adaattn.backends.triton.arguments import Arguments, MaskLayout
from adaattn.backends.triton.gradient_launch import GradientArguments, Layout
from adaattn.backends.triton.launch import is_halved
from adaattn.spec import Align, AttentionProblem, Aux, HeadTerm, MaskKind, Precision
from adaattn.testing import make_problem

_TYPES: Final = {Precision.FP32: "fp32", Precision.BF16: "bf16", Precision.FP16: "fp16"}
_ALIGNED_BYTES: Final = 16
_ROWS: Final = (
    *("query", "key", "value", "output", "upstream"),
    *("query_gradient", "key_gradient", "value_gradient"),
)
"""What lies in rows of 1024 numbers here."""

_INSTRUCTION = re.compile(r"/\*([0-9a-f]{4,})\*/\s+(.*?);")
_TARGET = re.compile(r"\bBRA\b.*?(0x[0-9a-f]+)")
# Columns that one wgmma instruction multiplies, in 16-bit formats.
_DEPTH = 16
_LOCAL = re.compile(r"\b(STL|LDL)\b")
_BARRIERS = re.compile(r"(%\w+) = ttg\.local_alloc : \(\) -> !ttg\.memdesc<[0-9x]*xi64")
_MADE = re.compile(r"\s*(%\w+) = ")

_Loop = dict[str, int]


def code_of(kernel: str, problem: AttentionProblem) -> dict[str, Any]:
    """Return what the assembler made of a kernel of `_KERNELS` for a problem.

    ``registers`` are a thread's at entry, ``products`` wgmma instructions, ``small_products`` those
    of a warp, ``copies`` asynchronous ones to shared memory, ``spills`` accesses to local memory,
    ``wide`` accesses of 16 bytes to main memory, ``warnings`` what the assembler reported, such as
    products that it serialised, and ``loops`` the loops over blocks of keys, of each warpgroup.
    ``idle`` are mbarriers that nobody waits at. Of a forward pass for Hopper, ``frozen`` are bounds
    of loops that should be each tile's.
    """
    return _KERNELS[kernel](problem)


def _hopper(problem: AttentionProblem) -> dict[str, Any]:
    """Return the machine code of the Hopper kernel of the forward pass."""
    from adaattn.backends.hopper.compiled import compile_variant

    variant = choose(problem)
    tiling = variant.tiling
    products = tiling.block_d // _DEPTH + tiling.block_n // _DEPTH
    built: list[Any] = []

    def build() -> Any:
        built.append(compile_variant(variant))
        return built[0]

    found = _examined(build, products)
    by_tile = variant.list_ratio > 0 or variant.is_packed
    frozen = frozen_bounds(built[0].asm["ttgir"]) if by_tile else []
    return {**found, "warpgroups": tiling.warpgroups, "frozen": frozen}


def frozen_bounds(text: str) -> list[str]:
    """Return bounds of loops that are the same for all turns of the loop around them.

    Triton 3.6 and 3.7 put a number's first value in its place where one turn of a loop hands it to
    the next and nothing but bounds of loops inside depends on it.

    Args:
        text: in the language of Triton's compiler behind its own passes.
    """
    lines = text.splitlines()
    loops = [number for number, line in enumerate(lines) if " scf.for " in f" {line}"]
    found = []
    for first in loops:
        indent = re.match(" *", lines[first])[0]  # type: ignore[index]
        last = next(n for n in range(first + 1, len(lines)) if lines[n].startswith(f"{indent}}}"))
        inside = [number for number in loops if first < number < last]
        turns = set(re.findall(r"(%\w+) = ", lines[first].split("scf.for")[1]))
        made = {}
        for line in lines[first + 1 : last]:
            if match := re.match(r" *(%\w+)(?::\d+)? = (.*)", line):
                made[match[1]] = match[2]
        for number in inside:
            bounds = re.search(r"scf\.for %\w+ = (%\w+) to (%\w+)", lines[number])
            assert bounds is not None
            named = [bound for bound in bounds.groups() if not re.match(r"%c-?\d", bound)]
            found += [bound for bound in named if not _changes(bound, made, turns)]
    return found


def _changes(name: str, made: dict[str, str], turns: set[str]) -> bool:
    """Return whether a number depends on the turn of a loop: on what it hands on, or on memory."""
    if name in turns:
        return True
    how = made.get(name)
    if how is None:
        return False
    if re.match(r"tt\.load|scf\.", how):
        return True
    return any(_changes(other, made, turns) for other in re.findall(r"%\w+", how))


def problem_of(values: str) -> AttentionProblem:
    """Return the problem that differs from the usual one by the values of some source."""
    names = {item.__name__: item for item in (Align, Aux, HeadTerm, MaskKind, Precision)}
    layout = {"device_type": "cuda", "dense_columns": True, "stride_bytes": 16}
    usual: dict[str, Any] = {"precision": Precision.BF16, "len_q": 4096} | layout
    return make_problem(**usual | eval(values, {"dict": dict, **names}))


def _hopper_backward(problem: AttentionProblem, kind: str) -> dict[str, Any]:
    """Return the machine code of a kernel of the backward pass for Hopper GPUs."""
    from adaattn.backends.hopper.gradient_compiled import compile_gradients

    variant = choose_gradients(problem)
    depths = {2 * variant.block_d + 2 * variant.block_m + BLOCK_KEYS}
    if kind == "keys":  # a loop of scores and values, and one of the other two products
        depths = {variant.block_d + variant.block_m, variant.block_v + variant.block_m}
    if kind == "queries":
        depths = {variant.block_d + variant.block_v + variant.block_n}
    return _examined(
        lambda: compile_gradients(variant, kind), *(depth // _DEPTH for depth in depths)
    )


def _slopes_and_seed(problem: AttentionProblem) -> tuple[str | None, str | None]:
    """Return the types of ALiBi's slopes and of dropout's seed."""
    return "*fp32" if problem.has_alibi else None, "*i64" if problem.dropout_p else None


def _built(pointers: tuple[str | None, ...], launch: Launch) -> dict[str, Any]:
    """Return what Triton makes of a launch.

    Args:
        pointers: the types of its tensors; all begin at multiples of 16 bytes.
        launch: the function, its numbers and constants.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    module = importlib.import_module(f"adaattn.backends.{launch.module}")
    function = getattr(module, launch.name)
    sources = {}
    constants: dict[tuple[int, ...], Any] = {}
    aligned = {}
    arguments = (*pointers, *launch.numbers, *launch.constants)
    for place, (name, argument) in enumerate(zip(function.arg_names, arguments, strict=True)):
        if place < len(pointers) and argument is not None:
            sources[name] = argument
            aligned[place,] = [["tt.divisibility", _ALIGNED_BYTES]]
        elif len(pointers) <= place < len(pointers) + len(launch.numbers):
            sources[name] = "fp32" if isinstance(argument, float) else "i32"
        else:
            sources[name] = "constexpr"
            constants[place,] = argument
    source = ASTSource(function, sources, constants, aligned)
    target = GPUTarget("cuda", 90, 32)
    options = dict(launch.options)
    return _examined(lambda: triton.compile(source, target=target, options=options))


def _gradients(
    problem: AttentionProblem, name: str, written: tuple[bool, ...], apart: tuple[bool, ...] = ()
) -> dict[str, Any]:
    """Return the machine code of one of the backward kernels.

    Args:
        problem: what is differentiated.
        name: of the kernel.
        written: whether it writes each of its outputs.
        apart: the same where keys and values have launches of their own.
    """
    kind = f"*{_TYPES[problem.precision]}"
    mask, seen = _mask_layout(problem)
    read = ["*fp16" if is_halved(problem) else kind] * 4
    low = [*read, *["*fp32"] * 4] if is_halved(problem) else [None] * 8
    given = (
        *(*read, "*fp32", "*fp32", mask),
        *_beside(problem),
        *(*_of_heads(problem), "*fp32" if problem.precision is Precision.FP32 else None),
    )
    sizes = (1, problem.num_heads, problem.num_kv_heads, problem.len_q, problem.len_k)
    layout = Layout(
        sizes=sizes,
        **dict.fromkeys(_ROWS, (1024, 1024, 1024)),
        mask=seen,
        slope=0,
        sequences=problem.num_sequences,
        listed=(1, 1, problem.most_blocks),
        listing=(1, 1, problem.most_blocks),
    )
    arguments = GradientArguments(problem)
    if name == "mask":
        return _built((*given, kind), arguments.mask(layout, problem.mask_shape))
    launch = arguments.keys(layout) if name == "keys" else arguments.rows(layout)
    sums = [
        "*fp32" if wanted else None
        for wanted in (
            problem.alibi_requires_grad,
            problem.head_terms_require_grad and problem.by_head(HeadTerm.SCALE),
            problem.head_terms_require_grad and problem.by_head(HeadTerm.SOFTCAP),
        )
    ]
    delta = "*fp32" if any(sums) or problem.mask_requires_grad else None
    of_rows = (*sums, None, delta) if name == "rows" else ()
    outputs = apart if apart and arguments.keys_apart else written
    made = (kind if wanted else None for wanted in outputs)
    return _built((*given, *low, *made, *of_rows), launch)


def _mask_layout(problem: AttentionProblem) -> tuple[str | None, MaskLayout]:
    """Return the type of a problem's mask, and how it lies."""
    if problem.mask is MaskKind.NONE:
        return None, MaskLayout()
    boolean = problem.mask is MaskKind.BOOLEAN
    row = problem.len_k if problem.mask_shape[-2] > 1 else 0
    kind = "*u8" if boolean else f"*{_TYPES[problem.precision]}"
    return kind, MaskLayout(1 if boolean else 2, (0, 0, row, 1))


def _beside(problem: AttentionProblem) -> tuple[str | None, ...]:
    """Return the types of slopes, starts, the seed and lists, for the backward kernels."""
    starts = "*i32" if problem.num_sequences else None
    lists = "*i32" if problem.has_blocks else None
    slopes, seed = _slopes_and_seed(problem)
    return slopes, starts, starts, seed, lists, lists


def _of_heads(problem: AttentionProblem) -> tuple[str | None, ...]:
    """Return the types of the numbers of each head."""
    return (
        "*fp32" if problem.by_head(HeadTerm.SCALE) else None,
        "*i32" if problem.by_head(HeadTerm.WINDOW) else None,
        "*fp32" if problem.by_head(HeadTerm.SOFTCAP) else None,
    )


def _portable(problem: AttentionProblem) -> dict[str, Any]:
    """Return the machine code of the portable forward kernel.

    Masks have adjacent and aligned columns.
    """
    arguments = Arguments(problem)
    kind = "fp16" if arguments.is_halved else _TYPES[problem.precision]
    is_split = problem.len_q == 1
    result = "fp32" if is_split else _TYPES[problem.precision]
    rows = ["*fp32" if is_split or problem.wants(flag) else None for flag in STATISTICS[:3]]
    if is_split and not problem.wants(Aux.ENTROPY):
        rows[2] = None
    mask, seen = _mask_layout(problem)
    starts = "*i32" if problem.num_sequences else None
    lists = "*i32" if problem.has_blocks else None
    pointers = (
        *(f"*{_TYPES[problem.precision]}", f"*{kind}", f"*{kind}", f"*{result}", *rows, mask),
        "*fp32" if problem.has_sinks else None,
        "*fp32" if problem.has_alibi else None,
        *(starts, starts),
        "*i64" if problem.dropout_p else None,
        "*fp32" if arguments.is_halved else None,
        *(lists, lists),
        "*fp32" if problem.wants(Aux.DROPPED_MASS) else None,
        *(*_of_heads(problem), None),
    )
    sizes = (problem.num_heads, problem.len_q, problem.len_k)
    grid = (1, 2 if is_split else 1, 1)
    strides = (*[1024] * 12, *seen.strides, 0)
    listed = (1, 1, problem.most_blocks)
    return _built(pointers, arguments.forward(grid, strides, sizes, (1, 1, 64, 1), seen, listed))


def _examined(build: Callable[[], Any], *products_of_block: int) -> dict[str, Any]:
    """Return what a kernel is made of.

    Args:
        build: compiles it, with nothing of it in a cache; returns Triton's compiled kernel.
        products_of_block: wgmma instructions of the loops that are looked at.

    Raises:
        RuntimeError: the assembler reported nothing, or a program of the toolchain failed.
    """
    import triton

    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    said = io.StringIO()
    with triton.knobs.nvidia.scope(), contextlib.redirect_stdout(said):
        triton.knobs.nvidia.dump_ptxas_log = True
        built = build()
    report = said.getvalue()
    if "registers" not in report:
        raise RuntimeError("the assembler said nothing of the kernel: was it in a cache?")
    with tempfile.TemporaryDirectory() as folder:
        binary = Path(folder, "kernel.cubin")
        binary.write_bytes(built.asm["cubin"])
        sass = _output(tools / "cuobjdump", "-sass", binary)
        usage = _output(tools / "cuobjdump", "-res-usage", binary)
    instructions = [(int(place, 16), text) for place, text in _INSTRUCTION.findall(sass)]
    texts = [text for _, text in instructions]
    wide = [line for line in sass.splitlines() if ".128" in line]
    return {
        "registers": max(int(number) for number in re.findall(r"REG:(\d+)", usage)),
        "products": sum("HGMMA" in text for text in texts),
        "small_products": sum("HMMA" in text for text in texts),
        "copies": sum("LDGSTS" in text or "UTMALDG" in text for text in texts),
        "spills": _spills(texts),
        "wide": sum("LDG" in line or "STG" in line for line in wide),
        "shared_bytes": int(built.metadata.shared),
        "warnings": [line for line in report.splitlines() if re.search(r"C75\d\d|warning", line)],
        "idle": idle_barriers(built.asm["ttgir"]),
        "loops": _loops(instructions, products_of_block),
    }


def _output(program: Path, *arguments: object) -> str:
    """Return what a program of the toolchain prints, both ways."""
    command = [str(program), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{program.name} failed: {done.stderr[-2000:]}")
    return done.stdout + done.stderr


def idle_barriers(text: str) -> list[str]:
    """Return the mbarriers of a kernel in Triton's own language that nobody waits or arrives at.

    Triton gives their memory to what it hands to other warps, and what makes the mbarrier may be
    written behind that.
    """
    return [name for name in _BARRIERS.findall(text) if not _is_met(text.splitlines(), name)]


def _is_met(lines: list[str], name: str) -> bool:
    """Return whether an mbarrier, or one of several, is more than made."""
    for line in lines:
        made = _MADE.match(line)
        uses = re.search(rf"{name}\b", line.partition(" = ")[2] if made else line)
        if uses and made and "memdesc_index" in line:
            if _is_met(lines, made[1]):
                return True
        elif uses and "init_barrier" not in line:
            return True
    return False


def _loops(instructions: list[tuple[int, str]], products: Collection[int]) -> list[_Loop]:
    """Return the loops over blocks of keys: those that hold the products of one block.

    Other backward branches lead out of waits that stand behind the code that waits. A loop that
    stores is one over tiles.
    """
    found: dict[int, _Loop] = {}
    for place, text in instructions:
        target = _TARGET.search(text)
        if not products or target is None or int(target[1], 16) >= place:
            continue
        first = int(target[1], 16)
        body = [text for at, text in instructions if first <= at <= place]
        stores = any("UTMASTG" in text for text in body)
        if not stores and sum("HGMMA" in text for text in body) in products:
            loop = {"instructions": len(body), "spills": _spills(body)}
            found[first] = min(found.get(first, loop), loop, key=lambda it: it["instructions"])
    return list(found.values())


def _spills(instructions: list[str]) -> int:
    """Return how many of them read or write local memory."""
    return sum(bool(_LOCAL.search(text)) for text in instructions)


def _softmax(problem: AttentionProblem) -> dict[str, Any]:
    """Return the machine code of the softmax of written-out scores of all rows of a head."""
    kind = _TYPES[problem.precision]
    rows = ("*fp32" if problem.wants(flag) else None for flag in STATISTICS[:3])
    mask, arguments, chunk, beside = _chunked(problem)
    rest = "*fp32" if problem.precision is Precision.FP32 and problem.wants(Aux.LSE) else None
    sinks = "*fp32" if problem.has_sinks else None
    pointers = ("*fp32", f"*{kind}", *rows, rest, mask, sinks, *_slopes_and_seed(problem))
    return _built(pointers, arguments.softmax(chunk, beside))


def _score_changes(problem: AttentionProblem) -> dict[str, Any]:
    """Return that of the gradients of written-out scores, likewise."""
    kind = f"*{_TYPES[problem.precision]}"
    mask, arguments, chunk, beside = _chunked(problem)
    rest = "*fp32" if problem.precision is Precision.FP32 else None
    scores = ("*fp32", "*fp32", kind, kind)
    pointers = (*scores, "*fp32", "*fp32", None, rest, mask, *_slopes_and_seed(problem))
    return _built(pointers, arguments.changes(chunk, beside))


def _fused(problem: AttentionProblem, kind: Kind) -> dict[str, Any]:
    """Return that of a kernel that writes no scores, for Hopper GPUs."""
    from adaattn.backends.streamed.fused_compiled import compile_weights

    return _examined(lambda: compile_weights(Variant.of(problem, kind)))


def _partial_products(problem: AttentionProblem) -> dict[str, Any]:
    """Return that of products of few rows whose sums are split over 132 multiprocessors."""
    query, key, pitch, pointers = _few_rows(problem)
    found = choose_splits(problem, problem.head_dim, 132)
    launch = partials(problem, query, key, pitch, found, follows=True, overlaps=True)
    return _built((*pointers[:2], "*fp32"), launch)


def _slice_products(problem: AttentionProblem) -> dict[str, Any]:
    """Return that of products with weights of few rows; transposed ones in training."""
    query, key, pitch, pointers = _few_rows(problem)
    right, out = (query, key) if problem.requires_grad else (key, query)
    transposed = problem.requires_grad
    launch = slices(problem, right, out, pitch=pitch, is_transposed=transposed, overlaps=True)
    return _built(pointers, launch)


def _few_rows(problem: AttentionProblem) -> tuple[torch.Tensor, torch.Tensor, int, tuple[str, ...]]:
    """Return queries and keys without numbers, what lines of scores are apart, and types."""
    rows, keys = (
        torch.empty(1, heads, length, problem.head_dim, dtype=torch_dtype(problem.precision))
        for heads, length in (
            (problem.num_heads, problem.len_q),
            (problem.num_kv_heads, problem.len_k),
        )
    )
    *_, chunk, _ = _chunked(problem)
    return rows, keys, pitch_of(chunk), (f"*{_TYPES[problem.precision]}",) * 3


def _chunked(
    problem: AttentionProblem,
) -> tuple[str | None, streamed_arguments.Arguments, Chunk, streamed_arguments.Beside]:
    """Return the type of a problem's mask, what launches take, and one chunk."""
    mask, seen = _mask_layout(problem)
    chunk = Chunk(planes=range(1), rows=range(problem.len_q), keys=range(problem.len_k))
    beside = streamed_arguments.Beside(mask=seen.strides)
    return mask, streamed_arguments.Arguments(problem), chunk, beside


def _of_mask(problem: AttentionProblem, read: str, by_columns: bool) -> dict[str, Any]:
    """Return the machine code of what reads a boolean mask once, for one way of reading it."""
    mask = torch.empty(problem.mask_shape, dtype=torch.bool, device="meta")
    launched: list[tuple[Launch, tuple[torch.Tensor, ...]]] = []
    with patch.object(Launch, "__call__", lambda launch, *given: launched.append((launch, given))):
        words = mask_lists._packed(mask, by_columns)
        if read == "lists":
            mask_lists._listed(words, 128, 64 if by_columns else 128)
    launch, tensors = launched[-1]
    types = {torch.uint8: "*u8", torch.int8: "*i8", torch.int32: "*i32"}
    return _built(tuple(types[tensor.dtype] for tensor in tensors), launch)


_KERNELS: Final[dict[str, Callable[[AttentionProblem], dict[str, Any]]]] = {
    "hopper": _hopper,
    "hopper_gradients": partial(_hopper_backward, kind="main"),
    # Where they are split.
    "hopper_keys": partial(_hopper_backward, kind="keys"),
    "hopper_queries": partial(_hopper_backward, kind="queries"),
    "hopper_prepare": partial(_hopper_backward, kind="prepare"),
    "hopper_finish": partial(_hopper_backward, kind="finish"),
    "triton": _portable,
    "key_gradients": partial(_gradients, name="keys", written=(True, True), apart=(True, False)),
    "value_gradients": partial(_gradients, name="keys", written=(False, True)),
    "row_gradients": partial(_gradients, name="rows", written=(True,)),
    "mask_gradients": partial(_gradients, name="mask", written=(True,)),
    "softmax": _softmax,
    "score_changes": _score_changes,
    "fused_sums": partial(_fused, kind=Kind.SUMS),
    "fused_weights": partial(_fused, kind=Kind.GIVEN),
    "fused_changes": partial(_fused, kind=Kind.CHANGES),
    **{
        f"mask_{read}_of_{lines}": partial(_of_mask, read=read, by_columns=lines == "keys")
        for read in ("lists", "tiles")
        for lines in ("rows", "keys")
    },
    "partial_products": _partial_products,
    "slice_products": _slice_products,
}
