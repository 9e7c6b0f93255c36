"""The benchmark of training and collection runs through, with figures for both sides."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent


def test_dry_run_fills_every_figure(tmp_path: Path) -> None:
    out = tmp_path / "bench.json"
    command = [sys.executable, str(REPOSITORY / "scripts" / "bench_train.py"), "--dry-run", "--repeats", "1"]
    result = subprocess.run(
        [*command, "--threads", "1", "--out", str(out)],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    found = json.loads(out.read_text())
    assert min(found["training"]["peak_bytes"].values()) >= 0
    for part in ("training", "collection"):
        assert found[part]["speed_ratio"] > 0.0
        assert min(found[part]["tokens_per_second"].values()) > 0.0
    assert result.stdout.count("\n|") == 5
