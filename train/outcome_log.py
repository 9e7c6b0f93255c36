"""Outcome records on disk, made by replay: one shard for each shard of the target log.

A record's `part` says which prompt it is of (train, reserved, heldout) or, for chain rounds on held-out
prompts, `round`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from foredraft.infer.features import NODE_FEATURES
from foredraft.infer.outcome_file import read_records, write_records
from foredraft.infer.outcome_records import OutcomeRecords
from foredraft.train.shard_folder import Manifest, ShardFolder
from foredraft.train.splits import Part

ROUND = "round"


@dataclass(frozen=True, kw_only=True)
class OutcomeManifest(Manifest):
    """Content of an outcome log's manifest.json."""

    family: str  # of the drafter
    drafter_sha256: str
    log_sha256: str  # of the target log's shards
    features: list[str]
    fan_out: int
    depth: int  # records have depth 0 .. depth - 1
    k: int  # guesses of a chain round
    reserved_fraction: float


class OutcomeLog(ShardFolder[OutcomeManifest]):
    """A folder of outcome records. `start` for writing, `open` for reading."""

    manifest_class = OutcomeManifest
    schema = 1
    title = "a folder of outcome records"
    command = "foredraft outcomes"
    compared: ClassVar = {
        "drafter_sha256": "drafter",
        "log_sha256": "log",
        "features": "features",
        "num_shards": "num_shards",
    }

    def write_shard(self, index: int, parts: Sequence[tuple[str, OutcomeRecords]]) -> None:
        """Write one shard of records by part; appears whole or not at all."""
        empty = OutcomeRecords.empty(len(NODE_FEATURES), self.manifest.fan_out)
        records = OutcomeRecords.concatenate([empty, *(part for _, part in parts)])
        names = np.repeat([name for name, _ in parts], [len(part) for _, part in parts])
        num_labelled = int(records.is_labelled_N.sum())
        self._write_shard(
            index,
            len(records),
            num_labelled,
            lambda path: write_records(
                path,
                records,
                part=names,
                family=self.manifest.family,
                drafter_sha256=self.manifest.drafter_sha256,
            ),
        )

    def records(self, part: Part) -> OutcomeRecords:
        """Labelled records of one part.

        Raises:
            ValueError: there are none.
        """
        return self._read(part)

    def rounds(self) -> OutcomeRecords:
        """Chain rounds on held-out prompts: k + 1 records each, depth 0 .. k, one round after another.

        A record off the target's path has the label UNKNOWN.

        Raises:
            ValueError: there are none.
        """
        return self._read(ROUND)

    def _read(self, part: str) -> OutcomeRecords:
        records = OutcomeRecords.concatenate([read_records(path, part) for path in self.shard_paths])
        if not len(records):
            raise ValueError(
                f"outcome records {self.folder} have none of part {part!r}. The part `reserved` is what the "
                "drafter's recipe reserved (reserved_fraction), `heldout` what the target log held out "
                "(heldout_fraction, or `split` in its prompt file)"
            )
        return records
