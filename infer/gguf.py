"""GGUF files as dense Hugging Face models: load one, or unpack it once to a safetensors folder.

Quantised blocks are expanded on load: a GGUF target and its unpacked folder are the same model bit for bit.
"""

from __future__ import annotations

import importlib.util
import tempfile
from pathlib import Path

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GgufConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)


def load_gguf(path: Path, dtype: torch.dtype | None = None) -> PreTrainedModel:
    """The causal LM in a GGUF file, its weights expanded to `dtype` (default bfloat16), on the CPU.

    Raises:
        ValueError: no such file, not a GGUF file, an architecture that transformers cannot read, or the extra
            `gguf` is not installed.
    """
    _check_readable(path)
    model = AutoModelForCausalLM.from_pretrained(
        str(path.parent),
        gguf_file=path.name,
        dtype=dtype or torch.bfloat16,
        quantization_config=GgufConfig(dequantize=True),
    )
    return model.eval()


def load_gguf_tokenizer(path: Path) -> PreTrainedTokenizerBase:
    """The tokenizer in a GGUF file, with its chat template.

    Raises:
        ValueError: as for `load_gguf`.
    """
    _check_readable(path)
    return AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)


def dequantise_gguf(path: Path, folder: Path, dtype: torch.dtype = torch.bfloat16) -> None:
    """Write model and tokenizer of a GGUF file as a Hugging Face folder, which appears whole or not at all.

    Raises:
        ValueError: as for `load_gguf`; also when `folder` exists.
    """
    if folder.exists():
        raise ValueError(f"{folder} exists already; remove it or choose another folder")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}.", dir=folder.parent) as temporary:
        unpacked = Path(temporary) / folder.name
        load_gguf(path, dtype).save_pretrained(unpacked)
        load_gguf_tokenizer(path).save_pretrained(unpacked)
        unpacked.rename(folder)


def _check_readable(path: Path) -> None:
    if not path.is_file():
        raise ValueError(f"no GGUF file at {path}")
    missing = [name for name in ("gguf", "accelerate") if importlib.util.find_spec(name) is None]
    if missing:
        raise ValueError(
            f"reading {path} needs {' and '.join(missing)}, which transformers uses for GGUF files: "
            "pip install 'foredraft[gguf]'"
        )
    with path.open("rb") as file:
        magic = file.read(4)
    if magic != b"GGUF":
        raise ValueError(f"{path} is not a GGUF file: expected it to begin with b'GGUF', found {magic!r}")
