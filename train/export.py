"""`foredraft export`: drafter and outcome predictor as folders with model cards, and on the Hub if asked.

    python -m foredraft.train.export --config R.yaml [--push-to-hub REPO [--private] [--revision BRANCH]]

    out/drafter/      the artifact and its README.md: loads with AutoModelForCausalLM.from_pretrained
    out/predictor/    likewise, where the recipe names a predictor; goes to the repository REPO-predictor
    out/recipe.yaml   the resolved recipe

Both appear by one rename. The same command again finds the export complete and only pushes it.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from foredraft.infer.atomic import atomic_folder
from foredraft.infer.config import UserError, read_config, run_command
from foredraft.infer.flags import FlagParser, warn
from foredraft.infer.hub import local_folder
from foredraft.infer.identity import read_sha256
from foredraft.train.card_figures import collect_figures
from foredraft.train.hub_push import MAIN, Destination, push_folder
from foredraft.train.model_card import fill_cards
from foredraft.train.recipe import ExportRecipe

RECIPE_FILE, MODEL_CARD_FILE = "recipe.yaml", "README.md"
PARTS = ("drafter", "predictor")
COPIED_SUFFIXES = (".safetensors", ".json", ".jinja", ".txt", ".model", ".yaml")

Files = dict[str, Path | str]  # path in the export: the file to copy, or the text


def main(argv: list[str] | None = None) -> int:
    """Entry of `foredraft export`; returns the exit code."""
    destination, others = read_destination(sys.argv[1:] if argv is None else argv)
    recipe, resolved = read_config(ExportRecipe, others, "export")
    if os.environ.get("RANK", "0") != "0":
        return 0  # under accelerate the first process does it all
    export(recipe, resolved)
    if destination is not None:
        push(recipe, destination)
    return 0


def read_destination(argv: Sequence[str]) -> tuple[Destination | None, list[str]]:
    """The flags of the push, and the arguments that belong to the recipe.

    Raises:
        UserError: a repository that is none, or flags of a push without one.
    """
    flags = FlagParser(prog="foredraft export", usage=argparse.SUPPRESS, add_help=False, allow_abbrev=False)
    group = flags.add_argument_group("push, on the command line only")
    group.add_argument("--push-to-hub", metavar="REPO", help="then push it; a predictor to REPO-predictor")
    group.add_argument("--private", action="store_true", help="to private repositories only")
    group.add_argument("--revision", metavar="BRANCH", help=f"made if missing (default: {MAIN})")
    args, others = flags.parse_known_args(argv)
    if {"-h", "--help"} & set(others):
        flags.print_help()
    if args.push_to_hub is None:
        if args.private or args.revision:
            raise UserError("--private and --revision belong to --push-to-hub REPO")
        return None, others
    return Destination(args.push_to_hub, args.private, args.revision or MAIN), others


def export(recipe: ExportRecipe, resolved: str) -> None:
    """Write the export of a recipe, or find that this has been done.

    Args:
        recipe: of the export.
        resolved: the recipe as text, saved beside the result.

    Raises:
        ValueError: a drafter, predictor or bench report that is missing, incomplete or of another model; a
            figure that a card needs and nobody has measured; an `out` that holds something else.
    """
    out = Path(recipe.out)
    files = collect_files(recipe)
    if holds(out, files):
        print(f"export {out}: complete already", file=sys.stderr)
        return
    _check_out(recipe)
    with atomic_folder(out) as folder:
        for name, content in {**files, RECIPE_FILE: resolved}.items():
            (folder / name).parent.mkdir(exist_ok=True)
            if isinstance(content, Path):
                shutil.copyfile(content, folder / name)
            else:
                (folder / name).write_text(content, encoding="utf-8")
    print(f"export {out}: {', '.join(part for part in PARTS if (out / part).is_dir())}", file=sys.stderr)


def push(recipe: ExportRecipe, destination: Destination) -> None:
    """Push what `export` wrote; prints the URL of each commit. Raises ValueError as `push_folder` does."""
    if destination.repository != recipe.name:
        warn(f"the model card calls the drafter {recipe.name}, it is pushed to {destination.repository}")
    repositories = {"drafter": destination.repository, "predictor": destination.predictor_repository}
    for part, repository in repositories.items():
        folder = Path(recipe.out) / part
        if folder.is_dir():
            print(push_folder(folder, repository, destination, f"Export {part} of {recipe.name}"), flush=True)


def collect_files(recipe: ExportRecipe) -> Files:
    """All files of the export. Raises ValueError as `export` does, but for `out`."""
    folders = {"drafter": local_folder(recipe.drafter)}
    if recipe.predictor is not None:
        folders["predictor"] = local_folder(recipe.predictor, "predictor")
    figures, origins = collect_figures(recipe, folders)
    cards = fill_cards(list(folders), figures, origins)
    files: Files = {}
    for part, folder in folders.items():
        copied = [path for path in sorted(folder.iterdir()) if path.suffix in COPIED_SUFFIXES]
        files |= {f"{part}/{path.name}": path for path in copied}
        files[f"{part}/{MODEL_CARD_FILE}"] = cards[part]
    return files


def holds(out: Path, files: Files) -> bool:
    """Whether a folder holds exactly these files, whatever recipe.yaml says."""
    found = [path for part in PARTS for path in (out / part).rglob("*") if path.is_file()]
    if {path.relative_to(out).as_posix() for path in found} != files.keys():
        return False
    return all(_digest(out / name) == _digest(content) for name, content in files.items())


def _digest(content: Path | str) -> str:
    if isinstance(content, str):
        return hashlib.sha256(content.encode()).hexdigest()
    return read_sha256(content)


def _check_out(recipe: ExportRecipe) -> None:
    """Refuse an `out` that may not be replaced. Raises ValueError if so."""
    out = Path(recipe.out)
    if not out.exists():
        return
    foreign = sorted({path.name for path in out.iterdir()} - {*PARTS, RECIPE_FILE})
    sources = [Path(source).resolve() for source in (recipe.drafter, recipe.predictor) if source]
    if foreign or any(out.resolve() in source.parents for source in sources):
        what = f"holds {', '.join(foreign)}" if foreign else "holds what is to be exported"
        raise ValueError(f"{out} {what}; choose an `out` of its own")
    if not recipe.overwrite:
        raise ValueError(f"{out} holds another export; choose another `out`, or pass --overwrite true")


if __name__ == "__main__":
    sys.exit(run_command(main))
