"""The size of a block: worth its time, by calibrated probabilities and a table of verification times."""

from __future__ import annotations

import random

import pytest

from foredraft.infer.planner import FLAT, BlockPlanner, increasing


def test_where_time_is_flat_every_guess_is_verified() -> None:
    assert BlockPlanner(FLAT).block_size([0.5, 0.1, 1e-6]) == 3
    assert BlockPlanner((0.02,)).block_size([]) == 0


def test_a_guess_must_be_worth_its_time() -> None:
    # one token in 10 ms: a guess that adds 2 ms must be worth 0.2 tokens
    planner = BlockPlanner((0.010, 0.012, 0.014, 0.016))
    assert planner.block_size([0.6, 0.3, 0.1]) == 2
    assert planner.block_size([0.15, 0.1, 0.1]) == 0


def test_a_high_step_is_taken_for_several_guesses_or_not_at_all() -> None:
    planner = BlockPlanner((0.010, 0.018, 0.018, 0.018))
    assert planner.block_size([0.5, 0.4, 0.3]) == 3
    assert planner.block_size([0.5, 0.2, 0.05]) == 0


def test_a_faster_request_asks_more_of_a_guess() -> None:
    slow, fast = BlockPlanner((0.010, 0.012)), BlockPlanner((0.010, 0.012))
    for _ in range(10):
        fast.observe(1, 2)
        slow.observe(0, 1)
    assert fast.rate > 1.5 * slow.rate
    assert slow.block_size([0.25]) == 1
    assert fast.block_size([0.25]) == 0


def test_the_rule_finds_the_best_ratio() -> None:
    """At its fixed point no other fixed size has a greater ratio of tokens to seconds."""
    rng = random.Random(0)
    for _ in range(50):
        seconds = increasing([rng.uniform(1, 2) for _ in range(8)])
        probs = sorted((rng.random() for _ in range(7)), reverse=True)
        ratios = [(1 + sum(probs[:n])) / seconds[n] for n in range(8)]
        planner = BlockPlanner(seconds)
        for _ in range(300):
            n = planner.block_size(probs)
            planner._tokens += 100 * (1 + sum(probs[:n]))
            planner._seconds += 100 * seconds[n]
        assert ratios[planner.block_size(probs)] == pytest.approx(max(ratios))


@pytest.mark.parametrize(
    ("measured", "expected"),
    [
        ([1.0, 2.0, 3.0], [1.0, 2.0, 3.0]),
        ([1.0, 3.0, 2.0], [1.0, 2.5, 2.5]),
        ([3.0, 2.0, 1.0], [2.0, 2.0, 2.0]),
        ([], []),
    ],
)
def test_a_measured_table_loses_its_noise(measured: list[float], expected: list[float]) -> None:
    assert list(increasing(measured)) == pytest.approx(expected)
