"""Run mypy over the package: `python scripts/typecheck.py [mypy options]`.

mypy cannot follow the mapping of the flat folders to `foredraft.*`, so it is given a throw-away tree in which
each folder is a symbolic link, and its messages are rewritten to the paths of the repository.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
FOLDERS = ("train", "infer", "kernels", "recipes")


def typecheck(options: list[str]) -> int:
    """Check the four folders as one package; returns mypy's exit status."""
    with tempfile.TemporaryDirectory() as temporary:
        package = Path(temporary) / "foredraft"
        package.mkdir()
        for folder in FOLDERS:
            (package / folder).symlink_to(REPOSITORY / folder, target_is_directory=True)
        result = subprocess.run(
            [
                *(sys.executable, "-m", "mypy"),
                *("--config-file", str(REPOSITORY / "pyproject.toml")),
                *("--cache-dir", str(REPOSITORY / ".mypy_cache")),
                *("--explicit-package-bases", "-p", "foredraft"),
                *options,
            ],
            cwd=temporary,
            stdout=subprocess.PIPE,
            text=True,
            check=False,
        )
    print(result.stdout.replace("foredraft/", ""), end="")
    return result.returncode


if __name__ == "__main__":
    sys.exit(typecheck(sys.argv[1:]))
