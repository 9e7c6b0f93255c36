"""Who a model is: target, tokenizer and chat template by hash.

Names and folders lie (the same weights sit in many places), so models are compared by the SHA-256 of their
weights, and tokenizers by the SHA-256 of what maps text to ids: vocabulary, merges and added tokens.
"""

from __future__ import annotations

import hashlib
import json
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from huggingface_hub import constants, snapshot_download

WEIGHT_PATTERNS = ["model*.safetensors", "config.json"]
# files below this size are hashed in a fraction of a second: not worth an entry in the cache
CACHED_FROM_BYTES = 1 << 28


class Tokenizer(Protocol):
    """The part of a transformers tokenizer that the hashes read."""

    chat_template: Any

    def get_vocab(self) -> dict[str, int]: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class TargetIdentity:
    """A target model. `id` and `revision` are for people; equality of weights decides."""

    id: str  # Hub id, or the name of a local folder or file
    revision: str | None  # commit on the Hub
    weights_sha256: str

    def is_same(self, other: TargetIdentity) -> bool:
        """True where both have the same weights, wherever they came from."""
        return self.weights_sha256 == other.weights_sha256

    def __str__(self) -> str:
        revision = f" at {self.revision[:12]}" if self.revision else ""
        return f"{self.id}{revision} (weights {self.weights_sha256[:12]})"


def sha256_of_json(value: object) -> str:
    """SHA-256 of a value in canonical JSON."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, ensure_ascii=True).encode()).hexdigest()


def tokenizer_sha256(tokenizer: Tokenizer) -> str:
    """SHA-256 of vocabulary, merges and added tokens.

    The same after save and load, and for every chat template and padding setting.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    model = json.loads(backend.to_str()) if backend is not None else {}
    # older files write a merge as "a b", newer ones as ["a", "b"]
    merges = model.get("model", {}).get("merges") or []
    merges = [merge.split(" ", 1) if isinstance(merge, str) else merge for merge in merges]
    added = sorted((t["id"], t["content"], t["special"]) for t in model.get("added_tokens", []))
    return sha256_of_json({"vocabulary": tokenizer.get_vocab(), "merges": merges, "added": added})


def chat_template_sha256(tokenizer: Tokenizer) -> str | None:
    """SHA-256 of the chat template, None where the tokenizer has none."""
    return None if tokenizer.chat_template is None else sha256_of_json(tokenizer.chat_template)


def identify_target(source: str, revision: str | None = None) -> TargetIdentity:
    """Identity of a Hub id, a local model folder or a single weights file (.gguf, .safetensors).

    Raises:
        ValueError: the source has no safetensors weights.
    """
    path = Path(source)
    if path.is_file():
        return TargetIdentity(id=path.name, revision=None, weights_sha256=_combined_sha256([path]))
    if path.is_dir():
        identity, folder = path.resolve().name, path
        revision = None
    else:
        identity = source
        folder = Path(snapshot_download(source, revision=revision, allow_patterns=WEIGHT_PATTERNS))
        revision = folder.name
    files = sorted(folder.glob("model*.safetensors")) or sorted(folder.glob("*.safetensors"))
    if not files:
        raise ValueError(
            f"{source} has no *.safetensors weights, found {sorted(p.name for p in folder.iterdir())}; "
            "convert it with save_pretrained first"
        )
    return TargetIdentity(id=identity, revision=revision, weights_sha256=_combined_sha256(files))


def check_tokenizer(found_sha256: str, expected_sha256: str, owner: str, target_id: str) -> None:
    """Refuse another tokenizer than the target's.

    Raises:
        ValueError: the hashes differ.
    """
    if found_sha256 != expected_sha256:
        raise ValueError(
            f"{owner} has another tokenizer than target {target_id}: expected {expected_sha256[:12]}, "
            f"found {found_sha256[:12]}. Token ids would mean different text; use a drafter with "
            "the target's tokenizer"
        )


def _combined_sha256(files: list[Path]) -> str:
    """Hash of the files' hashes in order of their names; one file's hash is its own SHA-256."""
    hashes = [_file_sha256(path) for path in files]
    return hashes[0] if len(hashes) == 1 else hashlib.sha256("\n".join(hashes).encode()).hexdigest()


def _file_sha256(path: Path) -> str:
    path = path.resolve()
    # the Hub's cache names a large file by its SHA-256, which was checked on download
    in_hub_cache = Path(constants.HF_HUB_CACHE).resolve() in path.parents
    if in_hub_cache and path.parent.name == "blobs" and len(path.name) == 64:
        return path.name
    size, modified = path.stat().st_size, path.stat().st_mtime_ns
    if size < CACHED_FROM_BYTES:
        return read_sha256(path)
    key = sha256_of_json([str(path), size, modified])
    cache_path = Path(constants.HF_HOME) / "foredraft" / f"{key}.sha256"
    # another process may be writing it: only a whole digest counts
    if cache_path.is_file() and len(cached := cache_path.read_text()) == 64:
        return cached
    digest = read_sha256(path)
    # a read-only home costs the time of hashing again, nothing else
    with suppress(OSError):
        cache_path.parent.mkdir(parents=True, exist_ok=True)
        cache_path.write_text(digest)
    return digest


def read_sha256(path: Path) -> str:
    """SHA-256 of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
