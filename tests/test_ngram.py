"""Prompt lookup against a plain search, and its cost."""

from __future__ import annotations

import random
import time

import pytest

from foredraft.infer.ngram import NgramIndex


def plain_search(tokens: list[int], num_tokens: int, longest: int, shortest: int) -> list[int]:
    """The definition: longest ending first, then its most recent earlier occurrence."""
    for length in range(longest, shortest - 1, -1):
        ending = tokens[-length:]
        for end in range(len(tokens) - 1, length - 1, -1):
            if len(ending) == length and tokens[end - length : end] == ending:
                text = list(tokens)
                for i in range(num_tokens):
                    text.append(text[end + i])
                return text[len(tokens) :]
    return []


@pytest.mark.parametrize(("longest", "shortest"), [(4, 2), (3, 1), (2, 2)])
def test_equals_a_plain_search(longest: int, shortest: int) -> None:
    rng = random.Random(0)
    tokens = [rng.randrange(3) for _ in range(10)]
    index = NgramIndex(tokens, longest=longest, shortest=shortest)
    num_found = 0
    for _ in range(200):
        guess = index.guess(5)
        assert guess == plain_search(tokens, 5, longest, shortest)
        num_found += bool(guess)
        new = [rng.randrange(6) for _ in range(rng.randrange(1, 4))]
        tokens += new
        index.extend(new)
    assert num_found > 20


def test_the_most_recent_occurrence_wins() -> None:
    assert NgramIndex([1, 2, 7, 1, 2, 8, 1, 2]).guess(1) == [8]


def test_a_longer_ending_wins_over_a_more_recent_one() -> None:
    assert NgramIndex([5, 1, 2, 7, 6, 1, 2, 8, 5, 1, 2]).guess(1) == [7]


def test_a_repetition_goes_on() -> None:
    assert NgramIndex([9, 1, 2, 3, 1, 2, 3]).guess(7) == [1, 2, 3, 1, 2, 3, 1]


def test_nothing_known() -> None:
    assert NgramIndex([]).guess(3) == []
    assert NgramIndex([1]).guess(3) == []
    assert NgramIndex([1, 2, 3, 4]).guess(3) == []
    assert NgramIndex([1, 2, 1, 2]).guess(0) == []


def test_bad_lengths() -> None:
    with pytest.raises(ValueError, match="shortest 3 and longest 2"):
        NgramIndex([], longest=2, shortest=3)


def test_a_round_costs_microseconds() -> None:
    rng = random.Random(1)
    index = NgramIndex([rng.randrange(50) for _ in range(20_000)])
    start = time.thread_time()
    for _ in range(1000):
        index.extend(index.guess(7)[:2] or [rng.randrange(50)])
    assert (time.thread_time() - start) / 1000 < 200e-6
