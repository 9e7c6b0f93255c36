"""Rows of a target log and their Parquet form: one row a response, top-k arrays as flat buffers.

Shape letters: T response tokens, K kept tokens per position.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

SCALARS = {
    "request_id": pa.string(),
    "first_position": pa.int32(),
    "seed": pa.uint64(),
    "choice": pa.uint32(),
    "temperature": pa.float64(),
    "top_k": pa.int32(),
    "top_p": pa.float64(),
    "min_p": pa.float64(),
    "repetition_penalty": pa.float64(),
    "finish_reason": pa.string(),
    "split": pa.string(),
    "source": pa.string(),
}
LISTS: dict[str, Any] = {"prompt_ids": np.int32, "response_ids": np.int32, "tail_mass": np.float32}
MATRICES: dict[str, Any] = {"topk_ids": np.int32, "topk_logprobs": np.float16}


@dataclass(frozen=True, kw_only=True, slots=True)
class LogRow:
    """One response of the target. Arrays read from a file are views into its buffers."""

    request_id: str  # hash of the prompt
    prompt_ids: np.ndarray  # int32 [P]
    response_ids: np.ndarray  # int32 [T], with the EOS that ended it
    first_position: int  # absolute position of the first response token
    seed: int
    choice: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    topk_ids: np.ndarray  # int32 [T, K]; K = 0 in a log of tokens only
    topk_logprobs: np.ndarray  # float16 [T, K] of the raw logits at temperature 1
    tail_mass: np.ndarray  # float32 [T], probability of all other tokens
    finish_reason: str  # stop | length
    split: str  # train | heldout
    source: str = "target"  # target | given (not decoded by us) | server | drafter (its own guesses, scored)
    # of the target after every token but the last, bfloat16 bits [P + T - 1, S]; only while it is written
    states: np.ndarray | None = None

    @property
    def key(self) -> str:
        """Name of the row in a log: no two have one prompt and one seed."""
        return f"{self.request_id}-{self.seed}"

    @property
    def is_targets(self) -> bool:
        """Whether every token is the target's for the row's seed, or stands for it at temperature 0."""
        return self.source == "target" or (self.source != "drafter" and self.temperature == 0.0)


def write_rows(path: Path, rows: Sequence[LogRow], num_kept: int) -> None:
    """Write rows as one Parquet file; `num_kept` is K of all of them."""
    columns: dict[str, pa.Array] = {
        name: pa.array([getattr(row, name) for row in rows], dtype) for name, dtype in SCALARS.items()
    }
    for name, dtype in LISTS.items():
        arrays = [np.asarray(getattr(row, name), dtype) for row in rows]
        columns[name] = pa.ListArray.from_arrays(_offsets(arrays), pa.array(np.concatenate(arrays)))
    for name, dtype in MATRICES.items():
        arrays = [np.asarray(getattr(row, name), dtype) for row in rows]
        flat = pa.array(np.concatenate([array.reshape(-1) for array in arrays]))
        if num_kept == 0:
            columns[name] = pa.nulls(len(rows), pa.list_(pa.list_(flat.type)))
        else:
            matrix = pa.FixedSizeListArray.from_arrays(flat, num_kept)
            columns[name] = pa.ListArray.from_arrays(_offsets(arrays), matrix)
    pq.write_table(pa.table(columns), path, compression="zstd")


def read_rows(path: Path) -> list[LogRow]:
    """All rows of a Parquet file.

    Raises:
        ValueError: the file lacks a column of the log schema.
    """
    table = pq.read_table(path, memory_map=True)
    if "source" not in table.column_names:  # older logs hold decoded responses only
        table = table.append_column("source", pa.array(["target"] * len(table)))
    wanted = [*SCALARS, *LISTS, *MATRICES]
    missing = sorted(set(wanted) - set(table.column_names))
    if missing:
        raise ValueError(f"{path} is not a target log shard: columns {', '.join(missing)} are missing")
    columns = {name: table.column(name).combine_chunks() for name in wanted}
    parts: dict[str, list[Any]] = {name: columns[name].to_pylist() for name in SCALARS}
    parts |= {name: _split(columns[name], columns[name].values.to_numpy()) for name in LISTS}
    lengths = [len(ids) for ids in parts["response_ids"]]
    for name, dtype in MATRICES.items():
        column = columns[name]
        if column.null_count:
            parts[name] = [np.empty((length, 0), dtype) for length in lengths]
        else:
            matrix = column.values
            parts[name] = _split(column, matrix.values.to_numpy().reshape(-1, matrix.type.list_size))
    return [LogRow(**{name: parts[name][index] for name in wanted}) for index in range(len(table))]


def _offsets(arrays: Sequence[np.ndarray]) -> pa.Array:
    return pa.array(np.cumsum([0, *(len(array) for array in arrays)]), pa.int32())


def _split(column: pa.ListArray, values: np.ndarray) -> list[np.ndarray]:
    offsets = column.offsets.to_pylist()
    return [values[start:end] for start, end in pairwise(offsets)]
