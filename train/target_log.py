"""The target log on disk: what the target answered to which prompts, in shards of rows (log_rows.py)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

from foredraft.infer.identity import read_sha256
from foredraft.train.log_rows import LogRow, read_rows, write_rows
from foredraft.train.logged_states import states_path, write_states
from foredraft.train.shard_folder import Manifest, ShardEntry, ShardFolder


@dataclass(frozen=True, kw_only=True)
class LogManifest(Manifest):
    """Content of a log's manifest.json."""

    chat_template_sha256: str | None
    top_k_logprobs: int
    prompts_sha256: str
    hidden_layers: list[int] | None = None  # ids as in foredraft.infer.state_tap


class TargetLog(ShardFolder[LogManifest]):
    """A log folder. `start` for writing, `open` for reading."""

    manifest_class = LogManifest
    schema = 1
    title = "a target log"
    command = "foredraft log"
    compared: ClassVar = {
        "prompts_sha256": "prompts",
        "tokenizer_sha256": "tokenizer",
        "chat_template_sha256": "chat_template",
        "num_shards": "num_shards",
    }

    def write_shard(self, index: int, rows: Sequence[LogRow]) -> None:
        """Write one shard, then its entry; both appear whole or not at all."""
        num_tokens = sum(len(row.response_ids) for row in rows)
        kept, states_sha256 = self.manifest.top_k_logprobs, None
        if self.manifest.hidden_layers is not None:
            states_sha256 = write_states(states_path(self.folder / self.shard_name(index)), rows)
        self._write_shard(
            index, len(rows), num_tokens, lambda path: write_rows(path, rows, kept), states_sha256
        )

    def _is_good(self, entry: ShardEntry | None, name: str) -> bool:
        if self.manifest.hidden_layers is None or entry is None:
            return super()._is_good(entry, name)
        path = states_path(self.folder / name)
        has_states = path.is_file() and read_sha256(path) == entry.states_sha256
        return has_states and super()._is_good(entry, name)

    def rows(self, split: str | None = None) -> Iterator[LogRow]:
        """Rows in the order of the log, read shard by shard. `split` is train or heldout; None: all."""
        for path in self.shard_paths:
            yield from (row for row in read_rows(path) if split in (None, row.split))
