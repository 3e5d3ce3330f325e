"""Machine code of our kernels for sm_90a, without a GPU: what Triton and its assembler made."""

import contextlib
import importlib
import io
import re
import subprocess
import tempfile
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from adaattn.backends.device.launch import Launch
from adaattn.backends.hopper.gradient_launch import BLOCK_KEYS, choose_gradients
from adaattn.backends.hopper.launch import choose
from adaattn.backends.interface import STATISTICS
from adaattn.backends.triton.arguments import Arguments, MaskLayout
from adaattn.backends.triton.gradient_launch import GradientArguments, Layout
from adaattn.spec import AttentionProblem, Aux, HeadTerm, MaskKind, Precision

__all__ = [
    "TYPES",
    "Loop",
    "MachineCode",
    "built",
    "hopper_code",
    "hopper_finish_code",
    "hopper_gradients_code",
    "hopper_keys_code",
    "hopper_prepare_code",
    "hopper_queries_code",
    "key_gradients_code",
    "mask_gradients_code",
    "mask_layout",
    "row_gradients_code",
    "slopes_and_seed",
    "triton_code",
]

TYPES: Final = {Precision.FP32: "fp32", Precision.BF16: "bf16", Precision.FP16: "fp16"}
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Loop:
    """A loop over blocks of keys.

    Args:
        instructions: in one pass.
        spills: accesses to local memory among them.
    """

    instructions: int
    spills: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineCode:
    """What the assembler made of a kernel.

    Args:
        sass: the disassembled instructions.
        registers: of a thread at entry; warpgroups exchange them later.
        products: wgmma instructions (``HGMMA``).
        small_products: those of a warp (``HMMA``).
        copies: to shared memory, asynchronous (``LDGSTS``, ``UTMALDG``).
        spills: accesses to local memory.
        shared_bytes: of a block.
        warnings: what the assembler reported, such as products that it serialised.
        loops: the loops over blocks of keys, of each warpgroup.
    """

    sass: str
    registers: int
    products: int
    small_products: int
    copies: int
    spills: int
    shared_bytes: int
    warnings: tuple[str, ...]
    loops: tuple[Loop, ...]


def hopper_code(problem: AttentionProblem) -> MachineCode:
    """Return the machine code of the Hopper kernel for a problem; needs Triton alone."""
    from adaattn.backends.hopper.compiled import compile_variant

    variant = choose(problem)
    tiling = variant.tiling
    products = tiling.block_d // _DEPTH + tiling.block_n // _DEPTH
    return examined(lambda: compile_variant(variant), products)


def hopper_gradients_code(problem: AttentionProblem) -> MachineCode:
    """Return that of the main kernel of its backward pass."""
    return _hopper_backward(problem, "main")


def hopper_keys_code(problem: AttentionProblem) -> MachineCode:
    """Return that of the kernel of keys and values, of more than 128 columns."""
    return _hopper_backward(problem, "keys")


def hopper_queries_code(problem: AttentionProblem) -> MachineCode:
    """Return that of the kernel of queries, of more than 128 columns."""
    return _hopper_backward(problem, "queries")


def hopper_prepare_code(problem: AttentionProblem) -> MachineCode:
    """Return that of the kernel before it."""
    return _hopper_backward(problem, "prepare")


def hopper_finish_code(problem: AttentionProblem) -> MachineCode:
    """Return that of the kernel behind it."""
    return _hopper_backward(problem, "finish")


def _hopper_backward(problem: AttentionProblem, kind: str) -> MachineCode:
    """Return the machine code of a kernel of the backward pass for Hopper GPUs."""
    from adaattn.backends.hopper.gradient_compiled import compile_gradients

    variant = choose_gradients(problem)
    depths = {2 * variant.block_d + 2 * variant.block_m + BLOCK_KEYS}
    if kind == "keys":  # a loop of scores and values, and one of the other two products
        depths = {variant.block_d + variant.block_m, variant.block_v + variant.block_m}
    if kind == "queries":
        depths = {variant.block_d + variant.block_v + variant.block_n}
    return examined(
        lambda: compile_gradients(variant, kind), *(depth // _DEPTH for depth in depths)
    )


def triton_code(problem: AttentionProblem) -> MachineCode:
    """Return the machine code of the portable forward kernel for a problem, on the same GPU.

    Args:
        problem: what is computed. Its mask, if it has one, has adjacent and aligned columns.
    """
    return built(*_portable(problem))


def key_gradients_code(problem: AttentionProblem) -> MachineCode:
    """Return that of the portable kernel of the gradients of keys and values."""
    return _gradient_code(problem, "keys", 2)


def row_gradients_code(problem: AttentionProblem) -> MachineCode:
    """Return that of the portable kernel of the gradients of queries, and of slopes if wanted."""
    return _gradient_code(problem, "rows", 1)


def mask_gradients_code(problem: AttentionProblem) -> MachineCode:
    """Return that of the portable kernel of the gradient of an added mask."""
    return _gradient_code(problem, "mask", 1)


def slopes_and_seed(problem: AttentionProblem) -> tuple[str | None, str | None]:
    """Return the types of ALiBi's slopes and of dropout's seed."""
    return "*fp32" if problem.has_alibi else None, "*i64" if problem.dropout_p else None


def built(pointers: tuple[str | None, ...], launch: Launch) -> MachineCode:
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
    return examined(lambda: triton.compile(source, target=target, options=options))


def _gradient_code(problem: AttentionProblem, name: str, outputs: int) -> MachineCode:
    """Return the machine code of one of the backward kernels."""
    kind = f"*{TYPES[problem.precision]}"
    mask, seen = mask_layout(problem)
    given = (
        *(kind, kind, kind, kind, "*fp32", "*fp32", mask),
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
        return built((*given, kind), arguments.mask(layout, problem.mask_shape))
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
    return built((*given, *[kind] * outputs, *of_rows), launch)


def mask_layout(problem: AttentionProblem) -> tuple[str | None, MaskLayout]:
    """Return the type of a problem's mask, and how it lies."""
    if problem.mask is MaskKind.NONE:
        return None, MaskLayout()
    boolean = problem.mask is MaskKind.BOOLEAN
    row = problem.len_k if problem.mask_shape[-2] > 1 else 0
    kind = "*u8" if boolean else f"*{TYPES[problem.precision]}"
    return kind, MaskLayout(1 if boolean else 2, (0, 0, row, 1))


def _beside(problem: AttentionProblem) -> tuple[str | None, ...]:
    """Return the types of slopes, starts, the seed and lists, for the backward kernels."""
    starts = "*i32" if problem.num_sequences else None
    lists = "*i32" if problem.has_blocks else None
    slopes, seed = slopes_and_seed(problem)
    return slopes, starts, starts, seed, lists, lists


def _of_heads(problem: AttentionProblem) -> tuple[str | None, ...]:
    """Return the types of the numbers of each head."""
    return (
        "*fp32" if problem.by_head(HeadTerm.SCALE) else None,
        "*i32" if problem.by_head(HeadTerm.WINDOW) else None,
        "*fp32" if problem.by_head(HeadTerm.SOFTCAP) else None,
    )


def _portable(problem: AttentionProblem) -> tuple[tuple[str | None, ...], Launch]:
    """Return the types of the portable kernel's pointers for a problem, and its launch."""
    arguments = Arguments(problem)
    kind = "fp16" if arguments.is_halved else TYPES[problem.precision]
    is_split = problem.len_q == 1
    result = "fp32" if is_split else TYPES[problem.precision]
    rows = ["*fp32" if is_split or problem.wants(flag) else None for flag in STATISTICS[:3]]
    if is_split and not problem.wants(Aux.ENTROPY):
        rows[2] = None
    mask, seen = mask_layout(problem)
    starts = "*i32" if problem.num_sequences else None
    lists = "*i32" if problem.has_blocks else None
    pointers = (
        *(f"*{TYPES[problem.precision]}", f"*{kind}", f"*{kind}", f"*{result}", *rows, mask),
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
    return pointers, arguments.forward(grid, strides, sizes, (1, 1, 64, 1), seen, listed)


def examined(build: Callable[[], Any], *products_of_block: int) -> MachineCode:
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
    return MachineCode(
        sass=sass,
        registers=max(int(number) for number in re.findall(r"REG:(\d+)", usage)),
        products=sum("HGMMA" in text for _, text in instructions),
        small_products=sum("HMMA" in text for _, text in instructions),
        copies=sum("LDGSTS" in text or "UTMALDG" in text for _, text in instructions),
        spills=sum(bool(_LOCAL.search(text)) for _, text in instructions),
        shared_bytes=int(built.metadata.shared),
        warnings=tuple(line for line in report.splitlines() if re.search(r"C75\d\d|warning", line)),
        loops=_loops(instructions, products_of_block),
    )


def _output(program: Path, *arguments: object) -> str:
    """Return what a program of the toolchain prints, both ways."""
    command = [str(program), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{program.name} failed: {done.stderr[-2000:]}")
    return done.stdout + done.stderr


def _loops(instructions: list[tuple[int, str]], products: Collection[int]) -> tuple[Loop, ...]:
    """Return the loops over blocks of keys: those that hold the products of one block.

    Other backward branches lead out of waits that stand behind the code that waits. A loop that
    stores is one over tiles.
    """
    found: dict[int, Loop] = {}
    for place, text in instructions:
        target = _TARGET.search(text)
        if not products or target is None or int(target[1], 16) >= place:
            continue
        first = int(target[1], 16)
        body = [text for at, text in instructions if first <= at <= place]
        stores = any("UTMASTG" in text for text in body)
        if not stores and sum("HGMMA" in text for text in body) in products:
            spills = sum(bool(_LOCAL.search(text)) for text in body)
            loop = Loop(instructions=len(body), spills=spills)
            found[first] = min(found.get(first, loop), loop, key=lambda it: it.instructions)
    return tuple(found.values())
