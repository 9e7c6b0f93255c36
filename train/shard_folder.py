"""A folder of Parquet shards under one manifest: atomic, checked by hash, resumable shard by shard.

    out/manifest.json                     what the shards are of; hash of every finished shard
    out/shard-00003-of-00014.parquet
    out/shard-00003-of-00014.json         entry of a shard that no manifest lists yet

Each process writes its own shards and their entries; one process gathers the entries into the manifest.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, ClassVar, Generic, Self, TypeVar

from foredraft.infer.atomic import atomic_file
from foredraft.infer.identity import TargetIdentity, read_sha256
from foredraft.train.provenance import versions

MANIFEST_FILE = "manifest.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardEntry:
    """A finished shard in the manifest."""

    file: str
    rows: int
    tokens: int  # response tokens of a target log; labelled records of outcomes
    sha256: str
    states_sha256: str | None = None  # of the file of states beside it, in a target log that has them


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What every manifest says."""

    target: TargetIdentity
    tokenizer_sha256: str
    recipe: dict[str, Any]
    num_shards: int
    created: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))
    versions: dict[str, str] = field(default_factory=versions)
    shards: list[ShardEntry] = field(default_factory=list)


M = TypeVar("M", bound=Manifest)


class ShardFolder(Generic[M]):
    """Base of the folders. `start` for writing, `open` for reading."""

    manifest_class: ClassVar[type[Manifest]]
    schema: ClassVar[int]
    title: ClassVar[str]  # in messages
    command: ClassVar[str]  # that makes it
    compared: ClassVar[dict[str, str]]  # keys of the manifest that must not change, each with its name

    def __init__(self, folder: Path, manifest: M) -> None:
        self.folder = folder
        self.manifest = manifest

    @classmethod
    def start(cls, folder: Path, manifest: M, free_keys: Sequence[str] = ()) -> Self:
        """Begin a folder, or take up an unfinished one that was begun with the same settings.

        Args:
            folder: made if missing.
            manifest: of the folder to be, without shards.
            free_keys: keys of the recipe that may differ from the unfinished folder's.

        Raises:
            ValueError: the folder is of another target, or was begun with other settings.
        """
        folder.mkdir(parents=True, exist_ok=True)
        for abandoned in folder.glob(".*.part"):
            abandoned.unlink()
        if (folder / MANIFEST_FILE).is_file():
            found = cls(folder, cls.read_manifest(folder))
            found._check_same(manifest, free_keys)
            return found
        new = cls(folder, manifest)
        new._write_manifest([])
        return new

    @classmethod
    def open(cls, folder: str | Path) -> Self:
        """A finished folder, its shards checked against their hashes.

        Raises:
            ValueError: no such folder, or shards that are missing or damaged.
        """
        found = cls(Path(folder), cls.read_manifest(Path(folder)))
        bad = found.bad_shards()
        if bad:
            names = ", ".join(found.shard_name(index) for index in bad)
            raise ValueError(
                f"{folder}: {len(bad)} of {found.manifest.num_shards} shards missing or damaged: "
                f"{names}. Run `{cls.command}` with the same recipe again: it redoes only these"
            )
        return found

    @property
    def num_tokens(self) -> int:
        """Response tokens, or labelled records, of all finished shards."""
        return sum(entry.tokens for entry in self._entries().values())

    @property
    def shard_paths(self) -> list[Path]:
        """All shards in order, finished or not."""
        return [self.folder / self.shard_name(index) for index in range(self.manifest.num_shards)]

    def shard_name(self, index: int) -> str:
        """File of a shard."""
        return f"shard-{index:05d}-of-{self.manifest.num_shards:05d}.parquet"

    def bad_shards(self) -> list[int]:
        """Indices of shards that are missing, or that differ from the hash they were written with."""
        entries = self._entries()
        names = {index: self.shard_name(index) for index in range(self.manifest.num_shards)}
        return [index for index, name in names.items() if not self._is_good(entries.get(name), name)]

    def gather(self) -> None:
        """Move the entries of finished shards into the manifest. One process calls this."""
        entries = self._entries()
        self._write_manifest([entries[name] for name in sorted(entries)])
        for name in entries:
            (self.folder / name).with_suffix(".json").unlink(missing_ok=True)

    @classmethod
    def read_manifest(cls, folder: Path) -> M:
        """The manifest of a folder.

        Raises:
            ValueError: there is none, or this version does not understand it.
        """
        path = folder / MANIFEST_FILE
        if not path.is_file():
            raise ValueError(f"{folder} is not {cls.title}: no {MANIFEST_FILE}. Make it with `{cls.command}`")
        try:
            content = json.loads(path.read_text())
            schema = content.pop("schema")
            if schema != cls.schema:
                raise ValueError(f"schema {cls.schema} expected, found {schema!r}")
            content["target"] = TargetIdentity(**content["target"])
            content["shards"] = [ShardEntry(**entry) for entry in content["shards"]]
            return cls.manifest_class(**content)  # type: ignore[return-value]
        except (json.JSONDecodeError, KeyError, TypeError, AttributeError, ValueError) as error:
            raise ValueError(f"{path} is not a manifest that this version reads ({error})") from error

    def _write_shard(
        self,
        index: int,
        rows: int,
        tokens: int,
        write: Callable[[Path], None],
        states_sha256: str | None = None,
    ) -> None:
        """Write one shard, then its entry; both appear whole or not at all."""
        path = self.folder / self.shard_name(index)
        with atomic_file(path) as temporary:
            write(temporary)
            digest = read_sha256(temporary)
        entry = ShardEntry(
            file=path.name, rows=rows, tokens=tokens, sha256=digest, states_sha256=states_sha256
        )
        with atomic_file(path.with_suffix(".json")) as temporary:
            temporary.write_text(json.dumps(asdict(entry)))

    def _entries(self) -> dict[str, ShardEntry]:
        """Entries by file; one beside its shard is newer than the manifest's."""
        entries = {entry.file: entry for entry in self.manifest.shards}
        for path in sorted(self.folder.glob("shard-*.json")):
            entry = ShardEntry(**json.loads(path.read_text()))
            entries[entry.file] = entry
        return entries

    def _is_good(self, entry: ShardEntry | None, name: str) -> bool:
        path = self.folder / name
        return entry is not None and path.is_file() and read_sha256(path) == entry.sha256

    def _write_manifest(self, shards: list[ShardEntry]) -> None:
        content = {
            "schema": self.schema,
            **asdict(self.manifest),
            "shards": [asdict(entry) for entry in shards],
        }
        with atomic_file(self.folder / MANIFEST_FILE) as temporary:
            temporary.write_text(json.dumps(content, indent=2) + "\n")
        self.manifest = self.read_manifest(self.folder)

    def _check_same(self, wanted: M, free_keys: Sequence[str]) -> None:
        found = self.manifest
        if not found.target.is_same(wanted.target):
            raise ValueError(
                f"{self.folder} is {self.title} of target {found.target}, the recipe's target is "
                f"{wanted.target}; choose another `out`"
            )
        recipes = [{k: v for k, v in m.recipe.items() if k not in free_keys} for m in (found, wanted)]
        keys = recipes[0].keys() | recipes[1].keys()
        changed = sorted(key for key in keys if recipes[0].get(key) != recipes[1].get(key))
        changed += [
            name for key, name in self.compared.items() if getattr(found, key) != getattr(wanted, key)
        ]
        if changed:
            raise ValueError(
                f"{self.folder} was made with other settings ({', '.join(changed)}); "
                "choose another `out`, or delete the folder"
            )
