"""Which outcomes to prepare: the greatest masses are best, the rules of the paper are special cases."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from foredraft.infer.outcome_records import UNKNOWN, OutcomeRecords
from foredraft.train.allocation import (
    Rounds,
    fit_geometric,
    geometric_counts,
    is_hit_by_counts,
    is_hit_by_mass,
    outcome_masses,
    uniform_counts,
)


def make_rounds(labels_MD: np.ndarray, fan_out: int) -> Rounds:
    size = labels_MD.size
    empty = OutcomeRecords.empty(1, fan_out)
    records = OutcomeRecords(
        **{
            name: np.zeros((size, *getattr(empty, name).shape[1:]), getattr(empty, name).dtype)
            for name in OutcomeRecords.__slots__
            if name != "labels_N"
        },
        labels_N=labels_MD.reshape(-1),
    )
    return Rounds.of(records, labels_MD.shape[1] - 1)


def draw_rounds(rng: np.random.Generator, probs_DF: np.ndarray, size: int) -> Rounds:
    """Rounds whose outcomes follow the probabilities: place 0 is the guess, F another token."""
    num_depths, fan_out = probs_DF.shape
    labels_MD = np.full((size, num_depths), UNKNOWN)
    for row in labels_MD:
        for depth, probs_F in enumerate(probs_DF):
            row[depth] = rng.choice(fan_out + 1, p=[*probs_F, max(0.0, 1 - probs_F.sum())])
            if row[depth] != 0:
                break
    return make_rounds(labels_MD, fan_out)


def draw_probs(rng: np.random.Generator, num_depths: int, fan_out: int) -> np.ndarray:
    probs = rng.dirichlet(np.full(fan_out + 1, 0.6), size=num_depths)[:, :fan_out]
    return -np.sort(-probs, axis=1)


def expected_hits(probs_DF: np.ndarray, chosen: set[int]) -> float:
    return float(outcome_masses(probs_DF[None])[0].reshape(-1)[sorted(chosen)].sum())


def chosen_by_mass(probs_DF: np.ndarray, budget: int) -> set[int]:
    """The outcomes that the policy prepares, found by asking it about every outcome."""
    num_depths, fan_out = probs_DF.shape
    chosen = set()
    for depth, place in itertools.product(range(num_depths), range(fan_out)):
        if place == 0 and depth < num_depths - 1:
            continue
        labels_1D = np.full((1, num_depths), UNKNOWN)
        labels_1D[0, :depth], labels_1D[0, depth] = 0, place
        if is_hit_by_mass(make_rounds(labels_1D, fan_out), probs_DF[None], budget)[0]:
            chosen.add(depth * fan_out + place)
    return chosen


def test_the_greatest_masses_are_the_best_choice() -> None:
    rng = np.random.default_rng(0)
    for _ in range(10):
        probs_DF = draw_probs(rng, 3, 3)
        outcomes = [*range(1, 3), *range(4, 6), *range(6, 9)]
        for budget in (1, 2, 4):
            best = max(expected_hits(probs_DF, set(c)) for c in itertools.combinations(outcomes, budget))
            chosen = chosen_by_mass(probs_DF, budget)
            assert len(chosen) == budget
            assert expected_hits(probs_DF, chosen) == pytest.approx(best)


def test_choices_are_nested_and_cover_all_in_the_end() -> None:
    probs_DF = draw_probs(np.random.default_rng(1), 4, 5)
    sets = [chosen_by_mass(probs_DF, budget) for budget in range(1, 18)]
    assert all(smaller < larger for smaller, larger in itertools.pairwise(sets))
    assert len(sets[-1]) == 4 * 5 - 3


def test_equal_masses_are_prepared_in_one_order() -> None:
    probs_DF = np.full((3, 4), 0.2)
    probs_DF[:, 0] = 1.0  # the chain is certain, so all outcomes weigh the same
    assert [len(chosen_by_mass(probs_DF, budget)) for budget in range(1, 11)] == list(range(1, 11))


def test_wrong_probabilities_cost_at_most_twice_their_distance() -> None:
    rng = np.random.default_rng(2)
    for _ in range(20):
        true, believed = draw_probs(rng, 3, 4), draw_probs(rng, 3, 4)
        distance = 0.5 * np.abs(outcome_masses(true[None]) - outcome_masses(believed[None])).sum()
        for budget in (2, 5):
            best = expected_hits(true, chosen_by_mass(true, budget))
            found = expected_hits(true, chosen_by_mass(believed, budget))
            assert best - found <= 2 * distance + 1e-9


def test_hits_are_counted_where_the_round_ended() -> None:
    labels_MD = np.array([[0, 0, 3], [2, UNKNOWN, UNKNOWN], [0, 4, UNKNOWN], [0, 0, 0]])
    rounds = make_rounds(labels_MD, 4)
    assert rounds.num_right_M.tolist() == [2, 0, 1, 2]
    assert rounds.place_M.tolist() == [3, 2, 4, 0]
    assert rounds.is_covered_M.tolist() == [True, True, False, True]
    # at depth 0 place 2 is the second outcome; at the end of the chain place 3 is the fourth
    assert is_hit_by_counts(rounds, [2, 9, 4]).tolist() == [True, True, False, True]
    assert is_hit_by_counts(rounds, [1, 9, 3]).tolist() == [False, False, False, True]


def test_frequencies_of_hits_are_the_masses() -> None:
    rng = np.random.default_rng(3)
    probs_DF = draw_probs(rng, 4, 6)
    rounds = draw_rounds(rng, probs_DF, 4000)
    probs_MDF = np.broadcast_to(probs_DF, (4000, 4, 6))
    for budget in (1, 3, 8):
        expected = expected_hits(probs_DF, chosen_by_mass(probs_DF, budget))
        assert is_hit_by_mass(rounds, probs_MDF, budget).mean() == pytest.approx(expected, abs=0.035)


@pytest.mark.parametrize(("budget", "expected"), [(8, [2, 2, 2, 1, 1]), (4, [1, 1, 1, 1, 0]), (10, [2] * 5)])
def test_uniform_counts(budget: int, expected: list[int]) -> None:
    assert uniform_counts(budget, 4) == expected


def test_geometric_counts_of_the_paper() -> None:
    """K = 7, acceptance 0.8, r = 1, B = 60: theorem 12 and the greedy choice agree."""
    counts = geometric_counts(60, 7, 0.8, 1.0)
    assert sum(counts) == 60
    assert np.abs(np.array(counts) - [10, 9, 8, 7, 6, 5, 5, 10]).max() <= 1
    # P(miss) after F places falls as 1 / F: place i has the mass 1 / (i (i + 1)) of what the guess leaves
    places = np.arange(1, 40)
    law = 1.0 / (places * (places + 1))
    probs_DF = np.concatenate([np.full((8, 1), 0.8), 0.2 * np.broadcast_to(law, (8, 39))], axis=1)
    probs_DF[-1] = np.concatenate([law, [0.0]])
    greedy = np.array([outcome // 40 for outcome in chosen_by_mass(probs_DF, 60)])
    assert np.abs(np.bincount(greedy, minlength=8) - counts).max() <= 1


def test_geometric_rule_is_fitted() -> None:
    rng = np.random.default_rng(4)
    size, power = 40000, 1.3
    rejected = np.floor(rng.random(size) ** (-1 / power))  # P(place > F) = F^-r, roughly
    labels = np.where(rng.random(size) < 0.7, 0, np.minimum(rejected, 16)).astype(np.int32)
    acceptance, found = fit_geometric(make_rounds(labels[:, None], 16).records)
    assert acceptance == pytest.approx(0.7, abs=0.01)
    assert found == pytest.approx(power, abs=0.3)
