"""Figures of an outcome predictor on held-out prompts: what config.json holds under `calibration`.

    heldout:
      records, rounds, prompts, k, fan_out
      log_loss: {constant, depth, entropy, confidence, predictor}     nats a record
      auroc:    {entropy, confidence, predictor}                 of "the best candidate is right"
      ece:      {S_1, S_2, S_3}                                  of the predictor, NUM_BINS bins of equal mass
      ece_confidence, brier, brier_confidence: the same keys
      hit_rate: {T: {B: {uniform, geometric, confidence, predictor, oracle}}}     T a temperature or "all"
      gain:     {T: {B: {confidence, geometric}}}                predictor minus the other: [value, low, high]
      geometric: {acceptance, power}                             fitted on the prompts of the fit
    by_temperature: [{temperature, scale, shift}]                of the calibration
    prompts: {fit, calibration}, records: {fit, calibration}
    learning_curve: [{records, prompts, log_loss, ece_S_1, gain: {T: {B: ...}}}]      empty if not asked for

Constant and depth frequencies come from the records of the fit, and so does `entropy`: acceptance by a
logistic function of the drafter's entropy (what SVIP, arXiv 2411.18462, stops drafting by), other labels by
frequency. Intervals are 95 % of a paired bootstrap over prompts.

Shape letters: N records, M rounds, D = k + 1 depths, F candidates, P prompts.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from foredraft.infer.features import NODE_FEATURES
from foredraft.infer.outcome_records import OutcomeRecords
from foredraft.infer.predictor import OutcomePredictor
from foredraft.train.allocation import (
    Rounds,
    fit_geometric,
    geometric_counts,
    is_hit_by_counts,
    is_hit_by_mass,
    survival,
    uniform_counts,
)
from foredraft.train.predictor_fit import Examples, loss_of

NUM_BINS = 10
SURVIVALS = (1, 2, 3)
NUM_RESAMPLES = 1000
NEWTON_STEPS = 25
RIDGE = 1e-3
ALL = "all"


def report_heldout(
    predictor: OutcomePredictor,
    fitted: OutcomeRecords,
    heldout: OutcomeRecords,
    rounds: Rounds,
    budgets: Sequence[int],
) -> dict[str, Any]:
    """The part `heldout` of the figures.

    Args:
        predictor: calibrated.
        fitted: records of the fit, for the baselines that are fitted.
        heldout: labelled records.
        rounds: chain rounds on the same prompts.
        budgets: B of the hit rates.
    """
    k = rounds.labels_MD.shape[1] - 1
    probs = {"confidence": confidences(rounds), "predictor": predictions(predictor, rounds)}
    acceptance, power = fit_geometric(fitted)
    hits = {
        budget: {
            "uniform": is_hit_by_counts(rounds, uniform_counts(budget, k)),
            "geometric": is_hit_by_counts(rounds, geometric_counts(budget, k, acceptance, power)),
            **{name: is_hit_by_mass(rounds, probs[name], budget) for name in probs},
            "oracle": rounds.is_covered_M,
        }
        for budget in budgets
    }
    chosen = {f"{t:g}": rounds.temperature_M == t for t in np.unique(rounds.temperature_M)}
    chosen[ALL] = np.ones(len(rounds.labels_MD), bool)
    return {
        "records": len(heldout),
        "rounds": len(rounds.labels_MD),
        "prompts": len(np.unique(heldout.request_id_N)),
        "k": k,
        "fan_out": heldout.fan_out,
        "log_loss": log_losses(predictor, fitted, heldout),
        "auroc": discrimination(predictor, fitted, heldout),
        "ece": calibration_errors(rounds, probs["predictor"]),
        "ece_confidence": calibration_errors(rounds, probs["confidence"]),
        "brier": brier_scores(rounds, probs["predictor"]),
        "brier_confidence": brier_scores(rounds, probs["confidence"]),
        "geometric": {"acceptance": acceptance, "power": power},
        "hit_rate": {
            name: {
                str(budget): {policy: float(hit_M[mask_M].mean()) for policy, hit_M in found.items()}
                for budget, found in hits.items()
            }
            for name, mask_M in chosen.items()
        },
        "gain": {
            name: {
                str(budget): {
                    other: gain(rounds.request_M[mask_M], found["predictor"][mask_M], found[other][mask_M])
                    for other in ("confidence", "geometric")
                }
                for budget, found in hits.items()
            }
            for name, mask_M in chosen.items()
        },
    }


def confidences(rounds: Rounds) -> np.ndarray:
    """The drafter's confidences, [M, D, F]."""
    return np.exp(rounds.records.scores_NF).reshape(*rounds.labels_MD.shape, -1)


def predictions(predictor: OutcomePredictor, rounds: Rounds) -> np.ndarray:
    """The predictor's probabilities, [M, D, F]."""
    records = rounds.records
    probs_NF = predictor.probs(records.features_NK, records.scores_NF, records.log_probs_NF, records.echo_NF)
    return probs_NF.reshape(*rounds.labels_MD.shape, -1)


def log_losses(
    predictor: OutcomePredictor, fitted: OutcomeRecords, heldout: OutcomeRecords
) -> dict[str, float]:
    """Mean cross-entropy of the labels under five models."""
    examples = Examples.of(heldout)
    labels_N, num_classes = heldout.labels_N, heldout.fan_out + 1
    depths = range(1 + max(fitted.depth_N.max(), heldout.depth_N.max()))
    by_depth = np.stack(
        [frequencies(fitted.labels_N[fitted.depth_N == depth], num_classes) for depth in depths]
    )
    constant = frequencies(fitted.labels_N, num_classes)
    rejected = frequencies(fitted.labels_N[fitted.labels_N > 0] - 1, num_classes - 1)
    accepted_N = acceptance_by_entropy(fitted, heldout)
    by_entropy_N = np.where(
        labels_N == 0, accepted_N, (1.0 - accepted_N) * rejected[np.maximum(labels_N - 1, 0)]
    )
    return {
        "constant": float(-np.log(constant[labels_N]).mean()),
        "depth": float(-np.log(by_depth[heldout.depth_N, labels_N]).mean()),
        "entropy": float(-np.log(by_entropy_N).mean()),
        "confidence": loss_of(OutcomePredictor(), examples),
        "predictor": loss_of(predictor, examples),
    }


def acceptance_by_entropy(fitted: OutcomeRecords, records: OutcomeRecords) -> np.ndarray:
    """Probability [N] that the best candidate is right: a logistic function of the drafter's entropy.

    Fitted by Newton's method with a little of a ridge, so that classes which entropy separates do no harm.
    """
    entropy = NODE_FEATURES.index("entropy")

    def inputs(of: OutcomeRecords) -> np.ndarray:
        return np.stack([of.features_NK[:, entropy].astype(np.float64), np.ones(len(of))], axis=1)

    fitted_N2, weights = inputs(fitted), np.zeros(2)
    is_right_N = fitted.labels_N == 0
    for _ in range(NEWTON_STEPS):
        probs_N = sigmoid(fitted_N2 @ weights)
        curvature = fitted_N2.T @ (fitted_N2 * (probs_N * (1 - probs_N))[:, None]) + RIDGE * np.eye(2)
        weights += np.linalg.solve(curvature, fitted_N2.T @ (is_right_N - probs_N) - RIDGE * weights)
    return sigmoid(inputs(records) @ weights)


def sigmoid(logits_N: np.ndarray) -> np.ndarray:
    """1 / (1 + exp(-x)), within (0, 1)."""
    return 1.0 / (1.0 + np.exp(-np.clip(logits_N, -30.0, 30.0)))


def discrimination(
    predictor: OutcomePredictor, fitted: OutcomeRecords, heldout: OutcomeRecords
) -> dict[str, float]:
    """Area under the ROC curve of three guesses at "the best candidate is right"."""
    inputs = (heldout.features_NK, heldout.scores_NF, heldout.log_probs_NF, heldout.echo_NF)
    guesses = {
        "entropy": acceptance_by_entropy(fitted, heldout),
        "confidence": heldout.scores_NF[:, 0],
        "predictor": predictor.probs(*inputs)[:, 0],
    }
    return {name: area_under_roc(guess_N, heldout.labels_N == 0) for name, guess_N in guesses.items()}


def area_under_roc(scores_N: np.ndarray, is_true_N: np.ndarray) -> float:
    """Probability that a true one's score is above a false one's, ties counting half; both are there."""
    _, place_N, counts = np.unique(scores_N, return_inverse=True, return_counts=True)
    rank_N = (np.cumsum(counts) - (counts - 1) / 2)[place_N]
    num_true = int(is_true_N.sum())
    above = rank_N[is_true_N].sum() - num_true * (num_true + 1) / 2
    return float(above / (num_true * (len(scores_N) - num_true)))


def frequencies(labels_N: np.ndarray, num_classes: int) -> np.ndarray:
    """Shares of the classes, each seen once more than it was."""
    counts = np.bincount(labels_N, minlength=num_classes) + 1.0
    return counts / counts.sum()


def calibration_errors(rounds: Rounds, probs_MDF: np.ndarray) -> dict[str, float]:
    """Expected calibration error of S_1, S_2, S_3 (fewer where the chain is shorter)."""
    survival_MD, right_M = survival(probs_MDF), rounds.num_right_M
    names = [k for k in SURVIVALS if k < survival_MD.shape[1]]
    return {f"S_{k}": expected_calibration_error(survival_MD[:, k], right_M >= k) for k in names}


def expected_calibration_error(probs_M: np.ndarray, is_true_M: np.ndarray) -> float:
    """Mean distance of predicted and found frequency over bins of equal mass."""
    order = np.argsort(probs_M, kind="stable")
    bins = [part for part in np.array_split(order, NUM_BINS) if len(part)]
    gaps = [abs(probs_M[part].mean() - is_true_M[part].mean()) * len(part) for part in bins]
    return float(sum(gaps) / len(probs_M))


def brier_scores(rounds: Rounds, probs_MDF: np.ndarray) -> dict[str, float]:
    """Mean squared error of S_1, S_2, S_3."""
    survival_MD, right_M = survival(probs_MDF), rounds.num_right_M
    names = [k for k in SURVIVALS if k < survival_MD.shape[1]]
    return {f"S_{k}": float(((survival_MD[:, k] - (right_M >= k)) ** 2).mean()) for k in names}


def gain(request_M: np.ndarray, hit_M: np.ndarray, other_M: np.ndarray) -> list[float]:
    """Hit rate minus another policy's, with the ends of its interval."""
    _, place_M = np.unique(request_M, return_inverse=True)
    sums_P = np.bincount(place_M, hit_M.astype(float) - other_M.astype(float))
    counts_P = np.bincount(place_M)
    rng = np.random.default_rng(0)
    chosen = rng.integers(len(counts_P), size=(NUM_RESAMPLES, len(counts_P)))
    resampled = sums_P[chosen].sum(1) / counts_P[chosen].sum(1)
    low, high = np.quantile(resampled, [0.025, 0.975])
    return [float(sums_P.sum() / counts_P.sum()), float(low), float(high)]


def by_temperature(predictor: OutcomePredictor) -> list[dict[str, float]]:
    """Scale and shift of every calibrated temperature."""
    columns = (predictor.temperature_B, predictor.scale_B, predictor.shift_B)
    rows = zip(*(column.tolist() for column in columns), strict=True)
    return [dict(zip(("temperature", "scale", "shift"), row, strict=True)) for row in rows]


def table(heldout: dict[str, Any]) -> str:
    """The figures for people."""
    losses = ", ".join(f"{name} {value:.3f}" for name, value in heldout["log_loss"].items())
    areas = ", ".join(f"{name} {value:.3f}" for name, value in heldout["auroc"].items())
    errors = ", ".join(
        f"{name} {value:.3f} (confidence {heldout['ece_confidence'][name]:.3f})"
        for name, value in heldout["ece"].items()
    )
    lines = [
        f"held out: {heldout['records']} records, {heldout['rounds']} chain rounds, "
        f"{heldout['prompts']} prompts",
        f"log loss: {losses}",
        f"area under ROC of the first guess: {areas}",
        f"calibration error: {errors}",
        f"hit rate, chain of {heldout['k']}, F = {heldout['fan_out']}:",
    ]
    for temperature, by_budget in heldout["hit_rate"].items():
        for budget, rates in by_budget.items():
            figures = "  ".join(f"{name} {value:.3f}" for name, value in rates.items())
            value, low, high = heldout["gain"][temperature][budget]["confidence"]
            interval = f"gain {value:+.3f} ({low:+.3f} to {high:+.3f})"
            lines.append(f"  T = {temperature:<4} B = {budget:<3} {figures}  {interval}")
    return "\n".join(lines)


def curve_sizes(num_prompts: int) -> list[int]:
    """Numbers of prompts of a learning curve: 1/16, 1/8, ... of all, each at least 2."""
    return sorted({max(2, round(num_prompts / 2**step)) for step in range(5)})


def first_prompts(records: OutcomeRecords, size: int) -> OutcomeRecords:
    """Records of the first so many prompts in the order of their hashes."""
    names = np.unique(records.request_id_N)[:size]
    return records.select(np.isin(records.request_id_N, names))


def seconds_of_call(predictor: OutcomePredictor, records: OutcomeRecords, num_nodes: int = 16) -> float:
    """Median time of one call for so many nodes on one thread."""
    part = records.select(np.arange(min(num_nodes, len(records))))
    threads, times = torch.get_num_threads(), []
    torch.set_num_threads(1)
    for _ in range(50):
        started = time.perf_counter()
        predictor.probs(part.features_NK, part.scores_NF, part.log_probs_NF, part.echo_NF)
        times.append(time.perf_counter() - started)
    torch.set_num_threads(threads)
    return float(np.median(times))
