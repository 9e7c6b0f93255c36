"""The kernel benchmark calls every operation here, and times none whose tests failed."""

from __future__ import annotations

import csv
import os
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent
SCRIPT = REPOSITORY / "scripts" / "bench_kernels.py"
REPORT = """<testsuites><testsuite>
<testcase classname="tests.test_kv_write_triton" name="a"/>
<testcase classname="tests.test_kv_commit_triton" name="a"/>
<testcase classname="tests.test_kv_commit_triton" name="b"><failure message="no"/></testcase>
<testcase classname="tests.test_verify_walk_triton" name="a"><skipped message="no GPU"/></testcase>
</testsuite></testsuites>"""


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    command = [sys.executable, str(SCRIPT), *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200, check=False)


def test_a_dry_run_calls_every_operation(tmp_path: Path) -> None:
    out = tmp_path / "kernels.csv"
    result = run("--dry-run", "--out", str(out))
    assert result.returncode == 0, result.stderr
    rows = list(csv.DictReader(out.open()))
    operations = {
        "tree_attention",
        "kv_write",
        "kv_commit",
        "coupled_sample",
        "top_candidates",
        "verify_walk",
    }
    assert {row["operation"] for row in rows} == operations | {"rejection_verify", "distill_loss"}
    assert {row["note"] for row in rows} == {"dry run"}
    assert not any(row["ms"] for row in rows)


def test_timing_needs_a_gpu_and_a_report(tmp_path: Path) -> None:
    result = run("--out", str(tmp_path / "kernels.csv"))
    assert result.returncode == 2
    assert "needs a GPU and --tests REPORT" in result.stderr


def test_what_failed_or_did_not_run_is_not_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    import bench_kernels

    report = tmp_path / "report.xml"
    report.write_text(REPORT)
    operations = {"kv_write", "kv_commit", "verify_walk", "distill_loss"}
    assert bench_kernels.failed_operations(report, operations) == {
        "kv_commit": "not timed: 1 of 2 tests failed",
        "verify_walk": "not timed: its tests did not run",
        "distill_loss": "not timed: its tests did not run",
    }
