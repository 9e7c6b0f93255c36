"""Live records: written a shard at a time, and kept where they could not be written."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import numpy as np
import pytest

from foredraft.infer import recorder as module
from foredraft.infer.expansions import Expansion
from foredraft.infer.features import NODE_FEATURES
from foredraft.infer.outcome_file import read_records
from foredraft.infer.recorder import OutcomeRecorder


def expansion(anchor: int, fan_out: int = 16) -> Expansion:
    scores = np.full(fan_out, -3.0, np.float32)
    return Expansion(
        anchor=anchor,
        depth=1,
        features_K=np.zeros(len(NODE_FEATURES), np.float32),
        candidate_ids_F=np.arange(fan_out, dtype=np.int32),
        scores_F=scores,
        log_probs_F=scores,
        echo_F=np.zeros(fan_out, np.uint8),
    )


def test_widths_have_shards_of_their_own(tmp_path: Path) -> None:
    recorder = OutcomeRecorder(tmp_path / "new", family="lm", drafter_sha256="d")
    recorder.add("p", 2**63, 1.0, [(expansion(3), 0), (expansion(4, 20), 20), (expansion(5), 16)])
    recorder.flush()
    recorder.flush()
    found = [read_records(path) for path in sorted((tmp_path / "new").iterdir())]
    assert [(records.fan_out, records.anchor_N.tolist()) for records in found] == [(16, [3, 5]), (20, [4])]
    assert found[0].labels_N.tolist() == [0, 16]
    assert found[0].seed_N.tolist() == [2**63] * 2


def test_a_full_disk_loses_no_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = OutcomeRecorder(tmp_path, family="lm", drafter_sha256="d")
    recorder.add("p", 1, 0.0, [(expansion(3), 0)])

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(module, "write_records", full)
        with pytest.raises(OSError, match=rf"No space left on device: '{tmp_path}/live-"):
            recorder.flush()
    assert list(tmp_path.iterdir()) == []
    recorder.flush()
    [path] = tmp_path.iterdir()
    assert read_records(path).anchor_N.tolist() == [3]
