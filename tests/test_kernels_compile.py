"""Every kernel compiles for GPUs that are not here: no spills, shared memory that fits, tensor cores."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent
OPERATIONS = {
    "tree_attention",
    "kv_write",
    "kv_commit",
    "coupled_sample",
    "top_candidates",
    "verify_walk",
    "rejection_verify",
    "saguaro",
    "distill_loss",
}


def compile_for(arch: str, tmp_path: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Run the script, without the interpreter that other tests use."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path / "cache")
    command = [sys.executable, str(REPOSITORY / "scripts" / "compile_kernels.py"), "--arch", arch, *options]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500, check=False)


@pytest.mark.parametrize(
    "arch", ["sm_90", *(pytest.param(arch, marks=pytest.mark.slow) for arch in ("sm_80", "sm_100", "gfx942"))]
)
@pytest.mark.timeout(600)
def test_every_kernel_compiles(arch: str, tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    result = compile_for(arch, tmp_path, "--json", str(report))
    print(result.stdout)
    assert result.returncode == 0, result.stdout + result.stderr
    found: list[dict[str, Any]] = json.loads(report.read_text())
    assert {one["case"].partition("/")[0] for one in found} == OPERATIONS
    assert not [one for one in found if one["problem"]]
    halves = [one for one in found if "tree_attention" in one["case"] and "16 D" in one["case"]]
    assert len(halves) >= 14
    assert all(one["matrix_instructions"] for one in halves)


JUDGED = f"""
import sys, dataclasses
sys.path.insert(0, {str(REPOSITORY / "scripts")!r})
import compile_kernels
case = dataclasses.replace(
    compile_kernels.find_cases("verify_walk/N7")[0], allowed_spill=-1, uses_matrix_instructions=True
)
compile_kernels.ARCHITECTURES["sm_90"] = (compile_kernels.ARCHITECTURES["sm_90"][0], -1)
print(compile_kernels.compile_case(case, "sm_90").problem)
"""


def test_a_case_out_of_bounds_is_named(tmp_path: Path) -> None:
    """The judge itself, with bounds that nothing meets."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    command = [sys.executable, "-c", JUDGED]
    result = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=100, check=False
    )
    for problem in ("spills 0 bytes, allowed -1", "0 bytes of shared memory", "no matrix instructions"):
        assert problem in result.stdout, result.stderr


def test_an_unknown_case_is_refused(tmp_path: Path) -> None:
    result = compile_for("sm_90", tmp_path, "--only", "no such kernel")
    assert result.returncode == 2
    assert "no case contains" in result.stderr
