"""Live outcome records: gathered where the trees are, written as Parquet shards to one folder."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from foredraft.infer.atomic import atomic_file
from foredraft.infer.expansions import Expansion
from foredraft.infer.outcome_file import require_pyarrow, write_records
from foredraft.infer.outcome_records import OutcomeRecords

MIN_FAN_OUT = 16  # candidates that a record has at least
ROWS_PER_SHARD = 8192


class OutcomeRecorder:
    """Takes labelled expansions and writes them, a shard at a time; `flush` writes the rest.

    Args:
        folder: of the records; made if missing. Other recorders may write there too.
        family: of the drafter.
        drafter_sha256: of its weights.

    Raises:
        ValueError: pyarrow is not installed, or the folder cannot be made.
    """

    def __init__(self, folder: Path, *, family: str, drafter_sha256: str) -> None:
        require_pyarrow()
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ValueError(f"outcome records cannot be written to {folder}: {error}") from error
        self.folder, self.family, self.drafter_sha256 = folder, family, drafter_sha256
        self._rows: list[tuple[str, int, float, Expansion, int]] = []
        self._num_shards = 0

    def add(
        self, request_id: str, seed: int, temperature: float, labelled: Iterable[tuple[Expansion, int]]
    ) -> None:
        """Take records of one response, named by the hash of its prompt and its seed."""
        self._rows += [(request_id, seed, temperature, expansion, label) for expansion, label in labelled]
        if len(self._rows) >= ROWS_PER_SHARD:
            self.flush()

    def flush(self) -> None:
        """Write what has been gathered; a shard appears whole or not at all.

        Requests with other fan-outs have records of another width: each width has a shard of its own.
        """
        for fan_out in sorted({len(row[3].candidate_ids_F) for row in self._rows}):
            chosen = [row for row in self._rows if len(row[3].candidate_ids_F) == fan_out]
            path = self.folder / f"live-{os.getpid()}-{self._num_shards:05d}.parquet"
            with atomic_file(path) as part:
                write_records(part, _records(chosen), family=self.family, drafter_sha256=self.drafter_sha256)
            self._num_shards += 1
            self._rows = [row for row in self._rows if len(row[3].candidate_ids_F) != fan_out]


def _records(rows: list[tuple[str, int, float, Expansion, int]]) -> OutcomeRecords:
    request_ids, seeds, temperatures, expansions, labels = zip(*rows, strict=True)
    return OutcomeRecords(
        request_id_N=np.array(request_ids),
        seed_N=np.array(seeds, np.uint64),
        anchor_N=np.array([known.anchor for known in expansions], np.int32),
        depth_N=np.array([known.depth for known in expansions], np.int32),
        temperature_N=np.array(temperatures, np.float32),
        features_NK=np.stack([known.features_K for known in expansions]),
        candidate_ids_NF=np.stack([known.candidate_ids_F for known in expansions]),
        scores_NF=np.stack([known.scores_F for known in expansions]),
        log_probs_NF=np.stack([known.log_probs_F for known in expansions]),
        echo_NF=np.stack([known.echo_F for known in expansions]),
        labels_N=np.array(labels, np.int32),
    )
