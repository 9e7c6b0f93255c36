"""The figures of model cards: from the files that hold them, and only of the models that are exported."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from safetensors import safe_open

from foredraft.infer.drafter_card import CARD_FILE, read_drafter_card
from foredraft.infer.identity import identify_target
from foredraft.infer.params import SamplingParams
from foredraft.train.model_card import Origin
from foredraft.train.recipe import ExportRecipe

Figures = dict[str, Any]


def collect_figures(recipe: ExportRecipe, folders: Mapping[str, Path]) -> tuple[Figures, dict[str, Origin]]:
    """What the templates may name, and where it comes from.

    Args:
        recipe: of the export.
        folders: `drafter`, and `predictor` where there is one.

    Raises:
        ValueError: a drafter, predictor or bench report that is missing, incomplete or of another model.
    """
    figures: Figures = {"export": asdict(recipe), "drafter": describe_drafter(folders["drafter"])}
    sha256 = figures["drafter"]["weights_sha256"]
    figures["predictor"] = (
        describe_predictor(folders["predictor"], sha256) if "predictor" in folders else None
    )
    figures["bench"] = describe_bench(Path(recipe.bench)) if recipe.bench else None
    if recipe.bench:
        check_bench(recipe.bench, figures)
    return figures, {
        "export": Origin("the recipe", "foredraft export"),
        "drafter": Origin(f"{recipe.drafter}/{CARD_FILE}", "foredraft train-drafter"),
        "predictor": Origin(f"{recipe.predictor}/config.json", "foredraft train-predictor"),
        "bench": Origin(f"{recipe.bench}", "foredraft bench --out"),
    }


def describe_drafter(folder: Path) -> Figures:
    """foredraft.json, with the hash and the number of the weights.

    Raises:
        ValueError: there is none, or another file is missing.
    """
    card = read_drafter_card(folder)
    if card is None:
        raise ValueError(
            f"{folder} has no {CARD_FILE}, so nothing is known of it; train a drafter with `foredraft "
            "train-drafter`"
        )
    needed = ["config.json", "tokenizer_config.json", *([card.draft_vocab] if card.draft_vocab else [])]
    if missing := [name for name in needed if not (folder / name).is_file()]:
        raise ValueError(f"drafter {folder} is incomplete: no {', '.join(missing)}; train it again")
    content = json.loads((folder / CARD_FILE).read_text())
    sha256 = identify_target(str(folder)).weights_sha256
    return {
        **content,
        "weights_sha256": sha256,
        "num_parameters": num_parameters(folder),
        "library": "transformers" if card.family == "lm" else "foredraft",  # that loads it
        "state_bytes": card.states.num_bytes,
    }


def num_parameters(folder: Path) -> int:
    """Weights of a model folder; those that two layers share count once."""
    count = 0
    for path in folder.glob("model*.safetensors"):
        with safe_open(path, framework="np") as file:
            count += sum(math.prod(file.get_slice(name).get_shape()) for name in file.keys())  # noqa: SIM118
    return count


def describe_predictor(folder: Path, drafter_sha256: str) -> Figures:
    """config.json of a predictor, with the hash of its weights.

    Raises:
        ValueError: not a predictor, or one of another drafter.
    """
    # it imports torch, which takes seconds that most exports do not need
    from foredraft.infer.predictor import CONFIG_FILE, check_predictor, read_predictor_card

    check_predictor(read_predictor_card(folder), folder, drafter_sha256)
    content = json.loads((folder / CONFIG_FILE).read_text())
    return {**content, "weights_sha256": identify_target(str(folder)).weights_sha256}


def describe_bench(path: Path) -> Figures:
    """A report of `foredraft bench`: defaults filled in, the ratio to plain beside every result.

    Raises:
        ValueError: not a report that this version understands.
    """
    try:
        report = json.loads(path.read_text(encoding="utf-8"))
        ratios = {
            (arm, ratio["temperature"]): ratio for arm, found in report["ratios"].items() for ratio in found
        }
        results = [
            {**result, "ratio": ratios.get((result["arm"], result["temperature"]))}
            for result in report["results"]
        ]
        sampling = {**asdict(SamplingParams()), **report["sampling"]}
        hashes = {**report["weights_sha256"]}
        return {**report, "results": results, "sampling": sampling, "weights_sha256": hashes}
    except FileNotFoundError:
        raise ValueError(f"no bench report {path}; make one with `foredraft bench --out {path}`") from None
    except (json.JSONDecodeError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{path} is not a bench report that this version reads ({type(error).__name__}: {error}); "
            f"measure again with `foredraft bench --out {path}`"
        ) from error


def check_bench(path: str, figures: Figures) -> None:
    """Refuse figures of other models. Raises ValueError if one differs."""
    measured = figures["bench"]["weights_sha256"]
    exported = {
        "target": figures["drafter"]["target"]["weights_sha256"],
        "drafter": figures["drafter"]["weights_sha256"],
        "predictor": (figures["predictor"] or {}).get("weights_sha256"),
    }
    for role, expected in exported.items():
        found = measured.get(role)
        # figures without the predictor are figures of the drafter all the same
        if found != expected and not (role == "predictor" and found is None):
            raise ValueError(
                f"bench report {path} is of a {role} with weights {str(found)[:12]}, the export's has "
                f"{str(expected)[:12]}; measure again with `foredraft bench --out {path}`"
            )
