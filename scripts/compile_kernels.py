"""Compile every Triton kernel for a GPU that need not be there, and say what the machine code takes.

    python scripts/compile_kernels.py --arch sm_90 [--only tree_attention] [--json FILE]

Registers and spills are read from the cubin by the cuobjdump that triton bundles (for gfx942 from the
assembly's metadata), matrix instructions are counted in the PTX. The exit code is 1 where a case spills more
than it may, needs more shared memory than the chip has for a block, or lacks matrix instructions.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

import triton
from rich.console import Console
from rich.table import Table
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from foredraft import kernels
from foredraft.kernels.compile_case import CompileCase

os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")  # today's default; without it every process warns
KIB = 1024
# shared memory of one block at most: CUDA programming guide, compute capabilities; CDNA 3 ISA, LDS
ARCHITECTURES = {
    "sm_80": (GPUTarget("cuda", 80, 32), 163 * KIB),
    "sm_90": (GPUTarget("cuda", 90, 32), 227 * KIB),
    "sm_100": (GPUTarget("cuda", 100, 32), 227 * KIB),
    "gfx942": (GPUTarget("hip", "gfx942", 64), 64 * KIB),
}
MATRIX_INSTRUCTIONS = {
    "wgmma": r"wgmma\.mma_async",
    "mma": r"\bmma\.sync",
    "tcgen05": r"tcgen05\.mma",
    "mfma": r"v_mfma",
}


@dataclass(frozen=True)
class Compiled:
    """One case on one architecture."""

    case: str
    arch: str
    registers: int
    spilled_bytes: int  # of a thread
    shared_bytes: int  # of a block
    matrix_instructions: dict[str, int]
    problem: str  # empty where there is none


def find_cases(only: str = "") -> list[CompileCase]:
    """The cases of all kernel modules whose name contains `only`, in order of their names."""
    folder = Path(next(iter(kernels.__path__)))
    modules = [
        importlib.import_module(f"foredraft.kernels.{path.stem}") for path in folder.glob("*_triton.py")
    ]
    cases = [
        case for module in modules if hasattr(module, "compile_cases") for case in module.compile_cases()
    ]
    return sorted((case for case in cases if only in case.name), key=lambda case: case.name)


def compile_case(case: CompileCase, arch: str) -> Compiled:
    """Compile and measure one case."""
    target, shared_limit = ARCHITECTURES[arch]
    names = case.kernel.arg_names
    source = ASTSource(
        fn=case.kernel,
        signature={name: "constexpr" if name in case.constants else case.signature[name] for name in names},
        constexprs={(names.index(name),): value for name, value in case.constants.items()},
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in case.aligned},
    )
    options = {"num_warps": case.num_warps, "num_stages": case.num_stages}
    if target.backend == "hip":
        options["num_stages"] = min(2, case.num_stages)  # as its backend advises
    binary = triton.compile(source, target=target, options=options)
    if target.backend == "cuda":
        registers, spilled = cuda_usage(binary.asm["cubin"])
        text = binary.asm["ptx"]
    else:
        text = binary.asm["amdgcn"]
        registers = largest(text, r"\.vgpr_count:\s+(\d+)")
        spilled = largest(text, r"\.private_segment_fixed_size:\s+(\d+)")
    found = {name: len(re.findall(pattern, text)) for name, pattern in MATRIX_INSTRUCTIONS.items()}
    found = {name: count for name, count in found.items() if count}
    shared = binary.metadata.shared
    problems = []
    if target.backend == "cuda" and spilled > case.allowed_spill:
        problems.append(f"spills {spilled} bytes, allowed {case.allowed_spill}")
    if shared > shared_limit:
        problems.append(f"{shared} bytes of shared memory, {arch} has {shared_limit}")
    if case.uses_matrix_instructions and not found:
        problems.append("no matrix instructions")
    return Compiled(case.name, arch, registers, spilled, shared, found, "; ".join(problems))


def cuda_usage(cubin: bytes) -> tuple[int, int]:
    """(registers of a thread, bytes of its stack: spills) of a cubin."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        output = subprocess.run(
            [tool, "-res-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    return largest(output, r"REG:(\d+)"), largest(output, r"STACK:(\d+)") + largest(output, r"LOCAL:(\d+)")


def largest(text: str, pattern: str) -> int:
    """The greatest number that a pattern finds; 0 without one."""
    return max(map(int, re.findall(pattern, text)), default=0)


def show(results: Iterable[Compiled]) -> None:
    """The table for people."""
    table = Table(title=f"triton {triton.__version__}")
    for column in (
        "kernel",
        "arch",
        "registers",
        "spilled bytes",
        "shared bytes",
        "matrix instructions",
        "problem",
    ):
        table.add_column(column, justify="left" if column in ("kernel", "arch", "problem") else "right")
    for one in results:
        instructions = ", ".join(f"{count} {name}" for name, count in one.matrix_instructions.items())
        numbers = (one.registers, one.spilled_bytes, one.shared_bytes)
        table.add_row(one.case, one.arch, *map(str, numbers), instructions, one.problem)
    # wide: a report for files too
    Console(width=150).print(table)


def main() -> int:
    """Compile, print, judge."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--arch", nargs="+", choices=ARCHITECTURES, default=["sm_90"])
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--json", type=Path, help="write the figures there too")
    args = parser.parse_args()
    if os.environ.get("TRITON_INTERPRET") == "1":
        parser.error("TRITON_INTERPRET=1 replaces the compiler by the interpreter; unset it")
    cases = find_cases(args.only)
    if not cases:
        parser.error(
            f"no case contains {args.only!r}; there are: {', '.join(case.name for case in find_cases())}"
        )
    jobs = [(case.name, arch) for arch in args.arch for case in cases]
    with ProcessPoolExecutor() as pool:
        results = list(pool.map(compile_named, jobs))
    show(results)
    if args.json:
        args.json.write_text(json.dumps([asdict(one) for one in results], indent=1) + "\n")
    return int(any(one.problem for one in results))


def compile_named(job: tuple[str, str]) -> Compiled:
    """`compile_case` by name: kernels do not travel between processes."""
    name, arch = job
    return next(compile_case(case, arch) for case in find_cases(name) if case.name == name)


if __name__ == "__main__":
    sys.exit(main())
