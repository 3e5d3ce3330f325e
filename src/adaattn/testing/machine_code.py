"""Machine code of our kernels, without a GPU: what Triton and its assembler made of a variant."""

import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from adaattn.backends.hopper.launch import Tiling, Variant

__all__ = ["Loop", "MachineCode", "machine_code"]

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
        spills: accesses to local memory.
        warnings: what the assembler reported, such as products that it serialised.
        loops: the loops over blocks of keys, of each warpgroup.
    """

    sass: str
    registers: int
    products: int
    spills: int
    warnings: tuple[str, ...]
    loops: tuple[Loop, ...]


def machine_code(variant: Variant) -> MachineCode:
    """Return the machine code of a variant of the Hopper forward kernel; needs Triton alone.

    Args:
        variant: from `adaattn.backends.hopper.launch.choose`.
    """
    import triton
    from triton.backends.nvidia.compiler import get_ptxas

    from adaattn.backends.hopper.compiled import compile_variant

    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    built = compile_variant(variant)
    with tempfile.TemporaryDirectory() as folder:
        binary, source = Path(folder, "kernel.cubin"), Path(folder, "kernel.ptx")
        binary.write_bytes(built.asm["cubin"])
        source.write_text(built.asm["ptx"])
        sass = _output(tools / "cuobjdump", "-sass", binary)
        usage = _output(tools / "cuobjdump", "-res-usage", binary)
        target = ("--gpu-name", "sm_90a", "-o", Path(folder, "again.cubin"))
        report = _output(Path(get_ptxas(90).path), "-v", *target, source)
    instructions = [(int(place, 16), text) for place, text in _INSTRUCTION.findall(sass)]
    return MachineCode(
        sass=sass,
        registers=max(int(number) for number in re.findall(r"REG:(\d+)", usage)),
        products=sum("HGMMA" in text for _, text in instructions),
        spills=sum(bool(_LOCAL.search(text)) for _, text in instructions),
        warnings=tuple(line for line in report.splitlines() if re.search(r"C75\d\d|warning", line)),
        loops=_loops(instructions, variant.tiling),
    )


def _output(program: Path, *arguments: object) -> str:
    """Return what a program of the toolchain prints, both ways."""
    command = [str(program), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{program.name} failed: {done.stderr[-2000:]}")
    return done.stdout + done.stderr


def _loops(instructions: list[tuple[int, str]], tiling: Tiling) -> tuple[Loop, ...]:
    """Return the loops over blocks of keys: those that hold the products of one block.

    Other backward branches lead out of waits that stand behind the code that waits.
    """
    products = tiling.block_d // _DEPTH + tiling.block_n // _DEPTH
    found: dict[int, Loop] = {}
    for place, text in instructions:
        target = _TARGET.search(text)
        if target is None or int(target[1], 16) >= place:
            continue
        first = int(target[1], 16)
        body = [text for at, text in instructions if first <= at <= place]
        if sum("HGMMA" in text for text in body) == products:
            spills = sum(bool(_LOCAL.search(text)) for text in body)
            loop = Loop(instructions=len(body), spills=spills)
            found[first] = min(found.get(first, loop), loop, key=lambda it: it.instructions)
    return tuple(found.values())
