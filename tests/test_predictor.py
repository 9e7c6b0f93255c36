"""Outcome predictors: untrained they are confidence, trained they find the truth, strangers are refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from foredraft.infer.drafters import Candidates
from foredraft.infer.features import FEATURES, NODE_FEATURES, NodeContexts, node_features
from foredraft.infer.identity import TargetIdentity
from foredraft.infer.outcome_records import UNKNOWN, OutcomeRecords
from foredraft.infer.predictor import (
    OutcomePredictor,
    PredictorCard,
    load_predictor,
    read_predictor_card,
    save_predictor,
)
from foredraft.train.allocation import Rounds
from foredraft.train.outcome_log import OutcomeLog, OutcomeManifest
from foredraft.train.predictor import train_predictor
from foredraft.train.predictor_fit import Examples, calibrate, check_records, fit, loss_of, split_prompts
from foredraft.train.predictor_report import (
    acceptance_by_entropy,
    area_under_roc,
    expected_calibration_error,
    frequencies,
    gain,
    report_heldout,
)
from foredraft.train.recipe import PredictorRecipe

TARGET = TargetIdentity(id="target", revision=None, weights_sha256="a" * 64)
FAN_OUT, K = 16, 3
RECIPE = PredictorRecipe(
    outcomes="",
    out="",
    calibration_fraction=0.3,
    hidden_size=16,
    epochs=6,
    batch_size=128,
    learning_rate=5e-3,
    weight_decay=0.01,
    seed=0,
    budgets=(4, 8),
    learning_curve=False,
)


def draw_candidates(rng: np.random.Generator, size: int) -> Candidates:
    """Confidences of a drafter over 40 tokens, the best 16."""
    logits = rng.normal(size=(size, 40)) * 2.5
    log_probs = logits - np.log(np.exp(logits).sum(1, keepdims=True))
    best = np.argsort(-log_probs, axis=1)[:, :FAN_OUT]
    scores = np.take_along_axis(log_probs, best, 1).astype(np.float32)
    entropy = -(np.exp(log_probs) * log_probs).sum(1).astype(np.float32)
    return Candidates(best.astype(np.int32), scores, scores, entropy)


def true_probs(candidates: Candidates, temperature_N: np.ndarray, depth_N: np.ndarray) -> np.ndarray:
    """What the target says: flatter than the drafter believes, more so at T = 1 and deeper in the tree."""
    sharpness_N = np.where(temperature_N > 0, 0.5, 0.8) / (1 + 0.3 * depth_N)
    rest = 1.0 - np.exp(candidates.scores_RF).sum(1, keepdims=True)
    logits = np.concatenate([candidates.scores_RF, np.log(np.maximum(rest, 1e-9))], 1) * sharpness_N[:, None]
    return np.exp(logits) / np.exp(logits).sum(1, keepdims=True)


def draw_records(seed: int, num_rounds: int, num_prompts: int = 20) -> OutcomeRecords:
    """Chain rounds of a target that is known."""
    rng = np.random.default_rng(seed)
    size, depths = num_rounds * (K + 1), K + 1
    candidates = draw_candidates(rng, size)
    depth_N = np.tile(np.arange(depths, dtype=np.int32), num_rounds)
    temperature_N = np.repeat(rng.integers(0, 2, num_rounds), depths).astype(np.float32)
    probs = true_probs(candidates, temperature_N, depth_N)
    labels_N = (rng.random(size)[:, None] > probs.cumsum(1)).sum(1).astype(np.int32)
    labels_MD = labels_N.reshape(-1, depths)
    is_known_MD = np.concatenate(
        [np.ones((num_rounds, 1), bool), np.cumprod(labels_MD[:, :-1] == 0, axis=1).astype(bool)], axis=1
    )
    labels_N = np.where(is_known_MD, labels_MD, UNKNOWN).reshape(-1)
    contexts = NodeContexts(
        temperature_N, depth_N, np.zeros(size, np.float32), *np.zeros((2, size), np.int32)
    )
    prompts = np.repeat(rng.integers(0, num_prompts, num_rounds), depths)
    return OutcomeRecords(
        request_id_N=np.array([f"{seed}-{prompt}" for prompt in prompts]),
        seed_N=np.zeros(size, np.uint64),
        anchor_N=np.repeat(np.arange(num_rounds, dtype=np.int32), depths),
        depth_N=depth_N,
        temperature_N=temperature_N,
        features_NK=node_features(candidates, contexts),
        candidate_ids_NF=candidates.token_ids_RF,
        scores_NF=candidates.scores_RF,
        log_probs_NF=candidates.log_probs_RF,
        echo_NF=rng.integers(0, 8, candidates.scores_RF.shape).astype(np.uint8),
        labels_N=labels_N,
    )


@pytest.fixture(scope="module")
def reserved() -> OutcomeRecords:
    records = draw_records(1, 6000, 40)
    return records.select(records.is_labelled_N)


@pytest.fixture(scope="module")
def rounds() -> Rounds:
    return Rounds.of(draw_records(2, 6000, 40), K)


@pytest.fixture(scope="module")
def trained(reserved: OutcomeRecords) -> OutcomePredictor:
    fitted, calibration = split_prompts(reserved, 0.3, "calibration")
    predictor = fit(fitted, RECIPE)
    calibrate(predictor, calibration)
    return predictor


def test_untrained_it_is_confidence(reserved: OutcomeRecords) -> None:
    part = reserved.select(np.arange(200))
    probs = OutcomePredictor(16).probs(part.features_NK, part.scores_NF, part.log_probs_NF, part.echo_NF)
    assert probs == pytest.approx(np.exp(part.scores_NF), abs=1e-6)


def test_missing_candidates_have_no_probability() -> None:
    scores = np.log(np.array([[0.5, 0.3, 0.0]], np.float32), where=[[True, True, False]], out=None)
    scores[0, 2] = -np.inf
    candidates = Candidates(np.array([[3, 4, -1]]), scores, scores, np.ones(1, np.float32))
    contexts = NodeContexts(np.ones(1), *np.zeros((4, 1)))
    predictor = OutcomePredictor(16)
    torch.nn.init.normal_(predictor.bias_head.weight)
    probs = predictor.probs(node_features(candidates, contexts), scores, scores, np.zeros((1, 3), np.uint8))
    assert probs[0, 2] == 0.0
    assert 0.0 < probs.sum() < 1.0
    assert np.isfinite(probs).all()


def test_the_fit_finds_what_is_known(trained: OutcomePredictor, rounds: Rounds) -> None:
    records = rounds.records
    labelled = records.select(records.is_labelled_N)
    candidates = Candidates(
        labelled.candidate_ids_NF, labelled.scores_NF, labelled.log_probs_NF, labelled.features_NK[:, 4]
    )
    truth = true_probs(candidates, labelled.temperature_N, labelled.depth_N)
    entropy = float(-np.log(truth[np.arange(len(labelled)), labelled.labels_N]).mean())
    before, after = (loss_of(p, Examples.of(labelled)) for p in (OutcomePredictor(), trained))
    assert before - entropy > 0.1
    assert after - entropy < 0.02


def test_the_report_tells_the_gain(
    trained: OutcomePredictor, reserved: OutcomeRecords, rounds: Rounds
) -> None:
    labelled = rounds.records.select(rounds.records.is_labelled_N)
    figures = report_heldout(trained, reserved, labelled, rounds, (4, 8))
    assert figures["log_loss"]["predictor"] < figures["log_loss"]["confidence"]
    assert figures["log_loss"]["predictor"] < figures["log_loss"]["entropy"] < figures["log_loss"]["constant"]
    assert figures["log_loss"]["depth"] <= figures["log_loss"]["constant"] + 1e-3
    assert 0.5 < figures["auroc"]["entropy"] < figures["auroc"]["predictor"] < 1.0
    assert all(figures["ece"][name] < 0.03 for name in ("S_1", "S_2", "S_3"))
    assert figures["ece_confidence"]["S_1"] > 0.05
    for temperature in ("0", "1", "all"):
        rates = figures["hit_rate"][temperature]["8"]
        assert rates["oracle"] >= rates["predictor"] >= rates["confidence"] - 0.002
        assert rates["predictor"] > rates["geometric"]
        value, low, high = figures["gain"][temperature]["8"]["geometric"]
        assert low <= value <= high
        assert value == pytest.approx(rates["predictor"] - rates["geometric"])


def test_calibration_undoes_a_wrong_scale_by_temperature(
    trained: OutcomePredictor, reserved: OutcomeRecords
) -> None:
    """A network whose scores are twice too sharp is set right from its records alone."""
    sharp = OutcomePredictor(16, 2)
    sharp.temperature_B.copy_(torch.tensor([0.0, 1.0]))
    torch.nn.init.constant_(sharp.scale_head.bias, 1.0)
    untouched = loss_of(sharp, Examples.of(reserved))
    calibrate(sharp, reserved.select(reserved.temperature_N == 1.0))
    assert sharp.scale_B[0] == 1.0, "no record of T = 0 was seen"
    assert float(sharp.scale_B[1]) < 0.4
    assert loss_of(sharp, Examples.of(reserved)) < untouched - 0.1


def test_the_area_under_roc_is_the_share_of_pairs_in_order() -> None:
    rng = np.random.default_rng(3)
    is_true_N, scores_N = rng.random(60) < 0.3, rng.integers(0, 9, 60) / 8
    true_P, false_Q = scores_N[is_true_N, None], scores_N[~is_true_N]
    expected = ((true_P > false_Q) + 0.5 * (true_P == false_Q)).mean()
    assert area_under_roc(scores_N, is_true_N) == pytest.approx(expected)


def test_acceptance_follows_entropy_as_drawn(reserved: OutcomeRecords) -> None:
    rng = np.random.default_rng(4)
    entropy_N = reserved.features_NK[:, NODE_FEATURES.index("entropy")]
    probs_N = 1 / (1 + np.exp(2.0 * entropy_N - 1.5))
    drawn = replace(reserved, labels_N=(rng.random(len(reserved)) > probs_N).astype(np.int32))
    assert acceptance_by_entropy(drawn, reserved) == pytest.approx(probs_N, abs=0.03)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("features_NK", np.nan, r"1 of \d+ outcome records.*'reserved'.*no numbers.*position 9 of request"),
        ("scores_NF", np.nan, r"1 of \d+ .*no numbers"),
        ("labels_N", 0, r"all \d+ outcome records.*one label \(always candidate 0\)"),
        ("labels_N", 16, r"one label \(no candidate is ever right\)"),
    ],
)
def test_records_that_teach_nothing_are_refused(
    reserved: OutcomeRecords, name: str, value: float, message: str
) -> None:
    check_records(reserved, "reserved")
    spoilt = getattr(reserved, name).copy()
    if name == "labels_N":
        spoilt[:] = value
    else:
        spoilt[7, 1] = value
    changes = {name: spoilt, "anchor_N": np.full(len(reserved), 8, np.int32), "depth_N": 0 * reserved.depth_N}
    with pytest.raises(ValueError, match=message):
        check_records(replace(reserved, **changes), "reserved")


def test_too_few_records_say_how_many_are_needed(reserved: OutcomeRecords) -> None:
    with pytest.raises(ValueError, match=r"part 'reserved' has 199 outcome records, at least 200 are needed"):
        check_records(reserved.select(np.arange(199)), "reserved")


def test_parts_share_no_prompt(reserved: OutcomeRecords) -> None:
    fitted, calibration = split_prompts(reserved, 0.3, "calibration")
    assert not set(fitted.request_id_N) & set(calibration.request_id_N)
    assert len(fitted) + len(calibration) == len(reserved)
    one = reserved.select(reserved.request_id_N == reserved.request_id_N[0])
    with pytest.raises(ValueError, match=r"1 prompts are too few.*reserved_fraction"):
        split_prompts(one, 0.3, "calibration")


def test_calibration_error_of_known_cases() -> None:
    rng = np.random.default_rng(0)
    probs = rng.random(20000)
    assert expected_calibration_error(probs, rng.random(20000) < probs) < 0.015
    assert expected_calibration_error(np.full(1000, 0.8), np.arange(1000) % 2 == 0) == pytest.approx(0.3)
    assert expected_calibration_error(np.ones(10), np.ones(10, bool)) == 0.0


def test_intervals_are_over_prompts() -> None:
    requests = np.repeat(["a", "b", "c", "d"], 100)
    better, worse = np.ones(400, bool), np.zeros(400, bool)
    assert gain(requests, better, worse) == [1.0, 1.0, 1.0]
    mixed = np.where(np.isin(requests, ["a", "b"]), better, worse)
    value, low, high = gain(requests, mixed, worse)
    assert (value, low < 0.2, high > 0.8) == (0.5, True, True)
    assert frequencies(np.array([0, 0, 1]), 3) == pytest.approx([0.5, 1 / 3, 1 / 6])


def make_card(**changes: object) -> PredictorCard:
    card = PredictorCard(
        features=list(FEATURES),
        fan_out=FAN_OUT,
        hidden_size=16,
        drafter_sha256="d" * 64,
        target=TARGET,
        temperatures=[0.0, 1.0],
    )
    return replace(card, **changes)


def test_a_folder_gives_back_what_was_saved(
    trained: OutcomePredictor, reserved: OutcomeRecords, tmp_path: Path
) -> None:
    save_predictor(tmp_path, trained, make_card())
    loaded, card = load_predictor(tmp_path, "d" * 64)
    assert card == make_card()
    part = reserved.select(np.arange(50))
    inputs = part.features_NK, part.scores_NF, part.log_probs_NF, part.echo_NF
    assert np.array_equal(loaded.probs(*inputs), trained.probs(*inputs))


def test_strangers_are_refused(trained: OutcomePredictor, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"not an outcome predictor: no config\.json.*train-predictor"):
        read_predictor_card(tmp_path)
    save_predictor(tmp_path, trained, make_card())
    with pytest.raises(ValueError, match=r"trained for the drafter with weights dddd.*has eeee"):
        load_predictor(tmp_path, "e" * 64)
    save_predictor(tmp_path, trained, make_card(features=["temperature", "phase_of_moon"]))
    with pytest.raises(ValueError, match="reads the features temperature, phase_of_moon"):
        read_predictor_card(tmp_path)
    save_predictor(tmp_path, trained, make_card(hidden_size=8))
    with pytest.raises(ValueError, match=r"model\.safetensors does not fit its config\.json"):
        load_predictor(tmp_path, "d" * 64)
    save_predictor(tmp_path, trained, make_card())
    content = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**content, "schema": 7}))
    with pytest.raises(ValueError, match="schema 1 expected, found 7"):
        read_predictor_card(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(content))
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"has no model\.safetensors"):
        load_predictor(tmp_path, "d" * 64)


@pytest.fixture
def outcomes(reserved: OutcomeRecords, rounds: Rounds, tmp_path: Path) -> Path:
    """A folder as the stage before would write it."""
    manifest = OutcomeManifest(
        target=TARGET,
        tokenizer_sha256="t" * 64,
        recipe={},
        num_shards=1,
        family="lm",
        drafter_sha256="d" * 64,
        log_sha256="l" * 64,
        features=list(FEATURES),
        fan_out=FAN_OUT,
        depth=K + 1,
        k=K,
        reserved_fraction=0.2,
    )
    log = OutcomeLog.start(tmp_path / "outcomes", manifest)
    labelled = rounds.records.select(rounds.records.is_labelled_N)
    log.write_shard(0, [("reserved", reserved), ("heldout", labelled), ("round", rounds.records)])
    log.gather()
    return tmp_path / "outcomes"


def test_the_stage_writes_a_predictor_with_its_figures(
    outcomes: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = replace(RECIPE, outcomes=str(outcomes), out=str(tmp_path / "p"), epochs=2, learning_curve=True)
    train_predictor(recipe, "epochs: 2\n")
    assert "hit rate, chain of 3, F = 16" in capsys.readouterr().err
    _, card = load_predictor(tmp_path / "p", "d" * 64)
    assert card.temperatures == [0.0, 1.0]
    assert card.calibration["heldout"]["rounds"] == 6000
    curve = [point["records"] for point in card.calibration["learning_curve"]]
    assert curve == sorted(curve)
    assert len(curve) >= 3
    assert (tmp_path / "p" / "recipe.yaml").read_text() == "epochs: 2\n"
    first = (tmp_path / "p" / "model.safetensors").read_bytes()

    train_predictor(recipe, "")
    assert "complete already" in capsys.readouterr().err
    with pytest.raises(ValueError, match="holds a predictor of another recipe or other records"):
        train_predictor(replace(recipe, seed=1), "")
    train_predictor(replace(recipe, overwrite=True), "")
    assert (tmp_path / "p" / "model.safetensors").read_bytes() == first, "deterministic by seed"


def test_too_high_a_learning_rate_is_said(reserved: OutcomeRecords) -> None:
    with pytest.raises(ValueError, match="lower learning_rate"):
        fit(reserved, replace(RECIPE, learning_rate=1e30))
