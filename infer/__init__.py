"""Decoding: `from foredraft.infer import Engine, SamplingParams`; imports nothing heavy before it is used."""

from __future__ import annotations

import importlib
from typing import Any

_EXPORTS = {
    "Completion": "foredraft.infer.request",
    "Engine": "foredraft.infer.engine",
    "EngineConfig": "foredraft.infer.params",
    "SamplingParams": "foredraft.infer.params",
    "SpeculationParams": "foredraft.infer.params",
}

__all__ = sorted(_EXPORTS)


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_EXPORTS[name]), name)
