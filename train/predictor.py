"""`foredraft train-predictor`: fit an outcome predictor to outcome records, calibrate it, measure it.

    python -m foredraft.train.predictor --config R.yaml

Fitted and calibrated on different reserved prompts, measured on held-out ones. A fit takes seconds: where
several processes were launched the first one does it, and an interrupted run begins again. The predictor
appears in `out` when it is complete.
"""

from __future__ import annotations

import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

from foredraft.infer.atomic import atomic_folder
from foredraft.infer.config import read_config, run_command, save_resolved
from foredraft.infer.features import FEATURES
from foredraft.infer.identity import sha256_of_json
from foredraft.infer.outcome_records import OutcomeRecords
from foredraft.infer.predictor import (
    CONFIG_FILE,
    PredictorCard,
    read_predictor_card,
    save_predictor,
)
from foredraft.train import predictor_report
from foredraft.train.allocation import Rounds
from foredraft.train.outcome_log import OutcomeLog
from foredraft.train.predictor_fit import TooFewPrompts, calibrate, check_records, fit, split_prompts
from foredraft.train.processes import join_processes
from foredraft.train.progress import ProgressReport
from foredraft.train.provenance import git_commit, versions
from foredraft.train.recipe import PredictorRecipe

# settings that change neither the predictor nor its figures
FREE_KEYS = ("outcomes", "out", "overwrite", "threads")


def main(argv: list[str] | None = None) -> int:
    """Entry of `foredraft train-predictor`; returns the exit code."""
    recipe, resolved = read_config(PredictorRecipe, sys.argv[1:] if argv is None else argv, "train-predictor")
    train_predictor(recipe, resolved)
    return 0


def train_predictor(recipe: PredictorRecipe, resolved: str) -> None:
    """Train the predictor of a recipe and write it, or find that this has been done.

    Raises:
        ValueError: records that are incomplete or too few, an `out` that holds something else.
    """
    state = join_processes()
    if recipe.threads:
        torch.set_num_threads(recipe.threads)
    if state.is_main_process:
        log = OutcomeLog.open(recipe.outcomes)
        if is_done(recipe, fingerprint_of(recipe, log)):
            print(f"predictor {recipe.out}: complete already", file=sys.stderr)
        else:
            write(recipe, log, resolved)
    state.wait_for_everyone()


def fingerprint_of(recipe: PredictorRecipe, log: OutcomeLog) -> str:
    """Hash of all that decides the result: recipe and records."""
    settings = {key: value for key, value in asdict(recipe).items() if key not in FREE_KEYS}
    return sha256_of_json([settings, [shard.sha256 for shard in log.manifest.shards]])


def is_done(recipe: PredictorRecipe, fingerprint: str) -> bool:
    """Whether `out` holds this very predictor.

    Raises:
        ValueError: it holds something else, and the recipe does not say overwrite.
    """
    out = Path(recipe.out)
    if not out.exists() or recipe.overwrite:
        return False
    if not (out / CONFIG_FILE).is_file():
        raise ValueError(f"{out} exists and holds no {CONFIG_FILE}; choose another `out`")
    if read_predictor_card(out).training.get("fingerprint") != fingerprint:
        raise ValueError(
            f"{out} holds a predictor of another recipe or other records; choose another `out`, or pass "
            "--overwrite true"
        )
    return True


def write(recipe: PredictorRecipe, log: OutcomeLog, resolved: str) -> None:
    """Fit, calibrate, measure, and write the folder."""
    reserved, heldout, rounds = log.records("reserved"), log.records("heldout"), log.rounds()
    check_records(reserved, "reserved")
    check_records(heldout, "heldout")
    fitted, calibration = split_prompts(reserved, recipe.calibration_fraction, "calibration")
    chains, started = Rounds.of(rounds, log.manifest.k), time.monotonic()
    with ProgressReport("predictor: epochs", recipe.epochs) as report:
        predictor = fit(
            fitted, recipe, lambda epoch, loss: report.update(epoch, f"validation loss {loss:.4f}")
        )
        calibrate(predictor, calibration)
        seconds = time.monotonic() - started
        figures = predictor_report.report_heldout(predictor, fitted, heldout, chains, recipe.budgets)
        report.say(predictor_report.table(figures))
        curve = learning_curve(recipe, fitted, calibration, heldout, chains) if recipe.learning_curve else []
        for point in curve:
            report.say(
                f"{point['prompts']} prompts, {point['records']} records: log loss {point['log_loss']:.3f}, "
                f"error of S_1 {point['ece_S_1']:.3f}"
            )
    parts = {"fit": fitted, "calibration": calibration}
    card = PredictorCard(
        features=list(FEATURES),
        fan_out=log.manifest.fan_out,
        hidden_size=recipe.hidden_size,
        drafter_sha256=log.manifest.drafter_sha256,
        target=log.manifest.target,
        temperatures=predictor.temperature_B.tolist(),
        calibration={
            "heldout": figures,
            "by_temperature": predictor_report.by_temperature(predictor),
            "prompts": {name: len(np.unique(part.request_id_N)) for name, part in parts.items()},
            "records": {name: len(part) for name, part in parts.items()},
            "learning_curve": curve,
        },
        training={
            "recipe": {**asdict(recipe), "budgets": list(recipe.budgets)},
            "seconds": round(seconds, 1),
            "seconds_of_call": predictor_report.seconds_of_call(predictor, heldout),
            "versions": versions(),
            "git": git_commit(),
            "fingerprint": fingerprint_of(recipe, log),
        },
    )
    with atomic_folder(Path(recipe.out)) as folder:
        save_predictor(folder, predictor, card)
        save_resolved(folder, resolved)


def learning_curve(
    recipe: PredictorRecipe,
    fitted: OutcomeRecords,
    calibration: OutcomeRecords,
    heldout: OutcomeRecords,
    rounds: Rounds,
) -> list[dict[str, Any]]:
    """The same fit to fewer prompts; calibration prompts and figures stay."""
    curve = []
    for size in predictor_report.curve_sizes(len(np.unique(fitted.request_id_N))):
        part = predictor_report.first_prompts(fitted, size)
        try:
            predictor = fit(part, recipe)
        except TooFewPrompts:  # none is left to tell when to stop
            continue
        calibrate(predictor, calibration)
        figures = predictor_report.report_heldout(predictor, part, heldout, rounds, recipe.budgets)
        curve.append(
            {
                "prompts": size,
                "records": len(part),
                "log_loss": figures["log_loss"]["predictor"],
                "ece_S_1": figures["ece"]["S_1"],
                "gain": figures["gain"],
            }
        )
    return curve


if __name__ == "__main__":
    sys.exit(run_command(main))
