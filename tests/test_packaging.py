"""The distribution: every source folder is listed, and the wheel built through the sdist is complete."""

import os
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

REPOSITORY = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))
PACKAGE_DIR = PROJECT["tool"]["setuptools"]["package-dir"]
DATA_SUFFIXES = {".yaml", ".jsonl", ".md"}


def packaged_files() -> list[Path]:
    """Modules and data of the package folders, relative to the repository."""
    roots = {folder.split("/")[0] for folder in PACKAGE_DIR.values()}
    files = [path for root in roots for path in (REPOSITORY / root).rglob("*") if path.is_file()]
    wanted = [path for path in files if path.suffix in {".py", *DATA_SUFFIXES} or path.name == "py.typed"]
    return sorted(path.relative_to(REPOSITORY) for path in wanted)


def test_every_folder_with_modules_is_a_listed_package() -> None:
    # an editable install works without the entry, a wheel is then silently incomplete
    folders = {path.parent.as_posix() for path in packaged_files() if path.suffix == ".py"}
    assert folders | {"model_cards"} == set(PACKAGE_DIR.values())
    assert PROJECT["tool"]["setuptools"]["packages"] == list(PACKAGE_DIR)
    for package, folder in PACKAGE_DIR.items():
        assert package == "foredraft." + folder.replace("/", ".")


def test_every_pinned_version_lies_in_the_declared_range() -> None:
    lines = (REPOSITORY / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = {
        name.lower().replace("_", "-"): pin
        for name, _, pin in (line.partition("==") for line in lines)
        if pin
    }
    extras = PROJECT["project"]["optional-dependencies"]
    tested = PROJECT["project"]["dependencies"] + extras["train"] + extras["gguf"] + extras["dev"]
    requirements = [r for r in map(Requirement, tested) if r.name not in ("foredraft", "triton")]
    assert not [r.name for r in requirements if canonicalize_name(r.name) not in pins]
    assert not [str(r) for r in requirements if pins[canonicalize_name(r.name)] not in r.specifier]


def test_wheel_holds_every_module_and_data_file(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    assert not [path for path in packaged_files() if f"foredraft/{path.as_posix()}" not in names]
    assert "foredraft/__init__.py" not in names
    assert "foredraft/kernels/__init__.py" not in names
    assert not [name for name in names if name.startswith(("tests/", "foredraft/tests", "foredraft/scripts"))]


@pytest.mark.slow
def test_modules_import_from_the_unpacked_wheel(wheel: Path, tmp_path: Path) -> None:
    zipfile.ZipFile(wheel).extractall(tmp_path)
    modules = [".".join(path.with_suffix("").parts) for path in packaged_files() if path.suffix == ".py"]
    modules = [f"foredraft.{name.removesuffix('.__init__')}" for name in modules]
    program = (
        "import importlib, sys\n"
        "for name in sys.argv[2:]:\n"
        "    origin = importlib.import_module(name).__spec__.origin\n"
        "    assert origin.startswith(sys.argv[1]), (name, origin)\n"
    )
    command = [sys.executable, "-c", program, str(tmp_path), *modules]
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    result = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, check=False)
    assert result.returncode == 0, result.stderr.decode()
