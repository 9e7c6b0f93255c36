"""The target log on disk: a manifest and Parquet shards, written atomically, resumable shard by shard.

    out/manifest.json                     what was logged from which target; hash of every finished shard
    out/shard-00003-of-00014.parquet      rows (log_rows.py)
    out/shard-00003-of-00014.json         entry of a shard that no manifest lists yet

Each process writes its own shards and their entries; one process gathers the entries into the manifest.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from foredraft.infer.identity import TargetIdentity
from foredraft.train.atomic import atomic_file
from foredraft.train.log_rows import LogRow, read_rows, write_rows
from foredraft.train.provenance import versions

MANIFEST_FILE = "manifest.json"
SCHEMA = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardEntry:
    """A finished shard in the manifest."""

    file: str
    rows: int
    tokens: int  # response tokens
    sha256: str


@dataclass(frozen=True, kw_only=True, slots=True)
class LogManifest:
    """Content of manifest.json."""

    target: TargetIdentity
    tokenizer_sha256: str
    chat_template_sha256: str | None
    top_k_logprobs: int
    recipe: dict[str, Any]
    prompts_sha256: str
    num_shards: int
    hidden_layers: list[int] | None = None
    created: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))
    versions: dict[str, str] = field(default_factory=versions)
    shards: list[ShardEntry] = field(default_factory=list)


class TargetLog:
    """A log folder. `start` for writing, `open` for reading."""

    def __init__(self, folder: Path, manifest: LogManifest) -> None:
        self.folder = folder
        self.manifest = manifest

    @classmethod
    def start(cls, folder: Path, manifest: LogManifest, free_keys: Sequence[str] = ()) -> TargetLog:
        """Begin a log, or take up an unfinished one that was begun with the same settings.

        Args:
            folder: of the log; made if missing.
            manifest: of the log to be, without shards.
            free_keys: keys of the recipe that may differ from the unfinished log's.

        Raises:
            ValueError: the folder holds a log of another target, other prompts or another recipe.
        """
        folder.mkdir(parents=True, exist_ok=True)
        for abandoned in folder.glob(".*.part"):
            abandoned.unlink()
        if (folder / MANIFEST_FILE).is_file():
            log = cls(folder, read_manifest(folder))
            log._check_same(manifest, free_keys)
            return log
        log = cls(folder, manifest)
        log._write_manifest([])
        return log

    @classmethod
    def open(cls, folder: str | Path) -> TargetLog:
        """A finished log, its shards checked against their hashes.

        Raises:
            ValueError: no log there, shards that are missing or damaged.
        """
        log = cls(Path(folder), read_manifest(Path(folder)))
        bad = log.bad_shards()
        if bad:
            names = ", ".join(log.shard_name(index) for index in bad)
            raise ValueError(
                f"target log {folder}: {len(bad)} of {log.manifest.num_shards} shards missing or damaged: "
                f"{names}. Run `foredraft log` with the log's recipe again: it redoes only these"
            )
        return log

    @property
    def num_tokens(self) -> int:
        """Response tokens of all finished shards."""
        return sum(entry.tokens for entry in self._entries().values())

    def shard_name(self, index: int) -> str:
        """File of a shard."""
        return f"shard-{index:05d}-of-{self.manifest.num_shards:05d}.parquet"

    def bad_shards(self) -> list[int]:
        """Indices of shards that are missing, or that differ from the hash they were written with."""
        entries = self._entries()
        names = {index: self.shard_name(index) for index in range(self.manifest.num_shards)}
        return [index for index, name in names.items() if not self._is_good(entries.get(name), name)]

    def write_shard(self, index: int, rows: Sequence[LogRow]) -> None:
        """Write one shard, then its entry; both appear whole or not at all."""
        path = self.folder / self.shard_name(index)
        with atomic_file(path) as temporary:
            write_rows(temporary, rows, self.manifest.top_k_logprobs)
            digest = _sha256(temporary)
        num_tokens = sum(len(row.response_ids) for row in rows)
        entry = ShardEntry(file=path.name, rows=len(rows), tokens=num_tokens, sha256=digest)
        with atomic_file(path.with_suffix(".json")) as temporary:
            temporary.write_text(json.dumps(asdict(entry)))

    def gather(self) -> None:
        """Move the entries of finished shards into the manifest. One process calls this."""
        entries = self._entries()
        self._write_manifest([entries[name] for name in sorted(entries)])
        for name in entries:
            (self.folder / name).with_suffix(".json").unlink(missing_ok=True)

    def rows(self, split: str | None = None) -> Iterator[LogRow]:
        """Rows in the order of the log, read shard by shard. `split` is train or heldout; None: all."""
        for index in range(self.manifest.num_shards):
            for row in read_rows(self.folder / self.shard_name(index)):
                if split in (None, row.split):
                    yield row

    def _entries(self) -> dict[str, ShardEntry]:
        """Entries by file; one beside its shard is newer than the manifest's."""
        entries = {entry.file: entry for entry in self.manifest.shards}
        for path in sorted(self.folder.glob("shard-*.json")):
            entry = ShardEntry(**json.loads(path.read_text()))
            entries[entry.file] = entry
        return entries

    def _is_good(self, entry: ShardEntry | None, name: str) -> bool:
        path = self.folder / name
        return entry is not None and path.is_file() and _sha256(path) == entry.sha256

    def _write_manifest(self, shards: list[ShardEntry]) -> None:
        content = {"schema": SCHEMA, **asdict(self.manifest), "shards": [asdict(entry) for entry in shards]}
        with atomic_file(self.folder / MANIFEST_FILE) as temporary:
            temporary.write_text(json.dumps(content, indent=2) + "\n")
        self.manifest = read_manifest(self.folder)

    def _check_same(self, wanted: LogManifest, free_keys: Sequence[str]) -> None:
        found = self.manifest
        if not found.target.is_same(wanted.target):
            raise ValueError(
                f"{self.folder} is a log of target {found.target}, the recipe's target is {wanted.target}; "
                "choose another `out`"
            )
        recipes = [{k: v for k, v in m.recipe.items() if k not in free_keys} for m in (found, wanted)]
        keys = recipes[0].keys() | recipes[1].keys()
        changed = sorted(key for key in keys if recipes[0].get(key) != recipes[1].get(key))
        for name in ("prompts_sha256", "tokenizer_sha256", "chat_template_sha256", "num_shards"):
            if getattr(found, name) != getattr(wanted, name):
                changed.append(name.removesuffix("_sha256"))
        if changed:
            raise ValueError(
                f"{self.folder} was logged with other settings ({', '.join(changed)}); "
                "choose another `out`, or delete the folder"
            )


def read_manifest(folder: Path) -> LogManifest:
    """The manifest of a log folder.

    Raises:
        ValueError: there is none, or this version does not understand it.
    """
    path = folder / MANIFEST_FILE
    if not path.is_file():
        raise ValueError(f"{folder} is not a target log: no {MANIFEST_FILE}. Make one with `foredraft log`")
    try:
        content = json.loads(path.read_text())
        schema = content.pop("schema")
        if schema != SCHEMA:
            raise ValueError(f"schema {SCHEMA} expected, found {schema!r}")
        content["target"] = TargetIdentity(**content["target"])
        content["shards"] = [ShardEntry(**entry) for entry in content["shards"]]
        return LogManifest(**content)
    except (json.JSONDecodeError, KeyError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(f"{path} is not a manifest that this version reads ({error})") from error


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
