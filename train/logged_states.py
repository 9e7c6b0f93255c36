"""States of the target stored with its log: one safetensors file beside a shard, one tensor a row.

Shape letters: B lines, T tokens, S numbers of a token's states.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from safetensors import safe_open
from safetensors.numpy import save_file

from foredraft.infer.atomic import atomic_file
from foredraft.infer.drafter_card import StateNeeds
from foredraft.infer.identity import read_sha256
from foredraft.infer.target_states import from_bits
from foredraft.train.batches import Batch
from foredraft.train.log_rows import LogRow

if TYPE_CHECKING:
    from foredraft.train.target_log import TargetLog


def states_path(shard: Path) -> Path:
    """File of a shard's states."""
    return shard.with_suffix(".states.safetensors")


def write_states(path: Path, rows: Sequence[LogRow]) -> str:
    """Write the states of rows, uint16 [P + T - 1, S] each; returns the file's SHA-256."""
    assert all(row.states is not None for row in rows), "every row of such a log has them"
    with atomic_file(path) as temporary:
        save_file({row.key: np.ascontiguousarray(row.states) for row in rows}, temporary)
        return read_sha256(temporary)


class LoggedStates:
    """Reads states of batches from logs.

    Raises:
        ValueError: a log holds none, or others than are needed.
    """

    def __init__(self, logs: Sequence[TargetLog], needs: StateNeeds) -> None:
        self.needs = needs
        self.files: dict[str, Path] = {}
        self.layers: dict[Path, list[int]] = {}
        for log in logs:
            found = log.manifest.hidden_layers
            if found is None or not set(needs.layers) <= set(found):
                held = "none" if found is None else f"those entering layers {found}"
                raise ValueError(
                    f"states of layers {list(needs.layers)} are to come from the log; {log.folder} holds "
                    f"{held}: make a log with hidden_layers {list(needs.layers)}, or use states: target"
                )
            for shard in log.shard_paths:
                path = states_path(shard)
                self.layers[path] = found
                with safe_open(path, "numpy") as file:
                    self.files |= dict.fromkeys(file.keys(), path)

    def of(self, lines: Sequence[Sequence[LogRow]], batch: Batch) -> torch.Tensor:
        """States after every token [B, T, S], float32; zeros for padding."""
        bits_BTS = np.zeros((*batch.ids_BT.shape, self.needs.width), np.uint16)
        starts_BT = (batch.positions_BT == 0).cpu().numpy()
        for states_TS, line, is_start_T in zip(bits_BTS, lines, starts_BT, strict=True):
            for start, row in zip(np.flatnonzero(is_start_T), line, strict=False):
                found_NS = self.bits_of(row)[: len(states_TS) - start]
                states_TS[start : start + len(found_NS)] = found_NS
        return from_bits(bits_BTS, batch.ids_BT.device).float()

    def bits_of(self, row: LogRow) -> np.ndarray:
        """The wanted layers' states of a row, uint16 [P + T - 1, S]."""
        path = self.files[row.key]
        with safe_open(path, "numpy") as file:
            stored = file.get_tensor(row.key)
        layers = self.layers[path]
        size = stored.shape[1] // len(layers)
        parts = [layers.index(layer) for layer in self.needs.layers]
        return np.concatenate([stored[:, part * size : (part + 1) * size] for part in parts], axis=1)
