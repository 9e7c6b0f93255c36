"""Outcome records as Parquet: one row a record. Needs pyarrow, which comes with the extra `train`."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np

from foredraft.infer.outcome_records import OutcomeRecords

SCALARS = {
    "request_id": "string",
    "seed": "uint64",
    "anchor": "int32",
    "depth": "int32",
    "temperature": "float32",
    "labels": "int32",
}
MATRICES = {
    "features": "float32",
    "candidate_ids": "int32",
    "scores": "float32",
    "log_probs": "float32",
    "echo": "uint8",
}


def require_pyarrow() -> None:
    """Raise ValueError where records cannot be written or read."""
    try:
        import pyarrow.parquet  # noqa: F401
    except ImportError as error:
        raise ValueError(
            "outcome records are Parquet files and need pyarrow, which is not installed: "
            "pip install 'foredraft[train]'"
        ) from error


def write_records(path: Path, records: OutcomeRecords, **names: str | np.ndarray) -> None:
    """Write records as one file.

    Args:
        path: of the file.
        records: N of them; their position becomes a column too.
        names: further columns of text, one value for all records or str [N]: family, drafter_sha256, part.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    size = len(records)
    columns: dict[str, Any] = {
        name: pa.array(_column(records, name), pa.type_for_alias(alias)) for name, alias in SCALARS.items()
    }
    columns["position"] = pa.array(records.position_N, pa.int32())
    for name, alias in MATRICES.items():
        matrix = _column(records, name)
        flat = pa.array(np.ascontiguousarray(matrix).reshape(-1), pa.type_for_alias(alias))
        columns[name] = pa.FixedSizeListArray.from_arrays(flat, matrix.shape[1])
    for name, value in names.items():
        columns[name] = pa.array(np.broadcast_to(value, size).tolist(), pa.string()).dictionary_encode()
    pq.write_table(pa.table(columns), path, compression="zstd")


def read_records(path: Path, part: str | None = None) -> OutcomeRecords:
    """The records of one file, or those whose column `part` has a value.

    Raises:
        ValueError: the file lacks a column of the schema.
    """
    import pyarrow.parquet as pq

    table = pq.read_table(path, filters=None if part is None else [("part", "=", part)])
    missing = sorted((SCALARS.keys() | MATRICES.keys()) - set(table.column_names))
    if missing:
        raise ValueError(f"{path} holds no outcome records: columns {', '.join(missing)} are missing")
    found: dict[str, np.ndarray] = {}
    for name in SCALARS:
        found[name] = table.column(name).to_numpy()
    for name in MATRICES:
        column = table.column(name)
        flat = column.combine_chunks().flatten().to_numpy() if len(table) else np.empty(0, MATRICES[name])
        found[name] = flat.reshape(len(table), column.type.list_size)
    return OutcomeRecords(**{item.name: found[_stem(item.name)] for item in fields(OutcomeRecords)})


def _column(records: OutcomeRecords, name: str) -> np.ndarray:
    suffix = {"features": "NK"}.get(name, "NF" if name in MATRICES else "N")
    return getattr(records, f"{name}_{suffix}")


def _stem(field_name: str) -> str:
    """Column of a field: its name without the shape."""
    return field_name.rpartition("_")[0]
