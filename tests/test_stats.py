"""The published figures against hand counts."""

from __future__ import annotations

import json

import pytest

from foredraft.infer.stats import RequestStats, RoundRecord, pool

PINNED = {
    "mode", "rounds", "tokens", "tokens_per_verify", "mean_accepted", "acc_marginal", "acc_conditional",
    "hits", "leaves", "misses", "hit_rate", "tokens_per_second", "seconds_prefill", "seconds_verify",
    "seconds_waiting_for_draft", "draft_tokens_recomputed",
}  # fmt: skip


def request(mode: str, *rounds: RoundRecord, **seconds: float) -> RequestStats:
    stats = RequestStats(mode=mode, **seconds)
    for record in rounds:
        stats.add_round(record)
    return stats


def test_plain_is_exactly_one() -> None:
    figures = request("plain", *[RoundRecord(0, 0, 1)] * 9, seconds_decode=3.0, prefill_chunks=2).as_dict()
    assert set(figures) >= PINNED
    assert figures["tokens_per_verify"] == 1
    assert figures["mean_accepted"] == 0
    assert figures["acc_marginal"] == figures["acc_conditional"] == []
    assert figures["tokens_per_second"] == 3
    assert figures["target_forwards"] == 11
    assert [figures[name] for name in ("hits", "leaves", "misses", "hit_rate")] == [None] * 4


def test_acceptance_by_depth() -> None:
    # blocks of depth 3, 3, 2 and 0 accept 3, 1, 0 and 0 guesses
    stats = request(
        "sync", RoundRecord(3, 3, 4), RoundRecord(3, 1, 2), RoundRecord(2, 0, 1), RoundRecord(0, 0, 1)
    )
    assert stats.rounds == 4
    assert stats.tokens == 8
    assert stats.mean_accepted == 1.0
    assert stats.acc_marginal == [2 / 4, 1 / 4, 1 / 4]
    assert sum(stats.acc_marginal) == stats.mean_accepted
    # depth 1 was reached in three rounds and accepted in two; depth 2 in two and one; depth 3 in one and one
    assert stats.acc_conditional == [2 / 3, 1 / 2, 1.0]


def test_a_depth_that_nothing_got_to_has_no_conditional_rate() -> None:
    assert request("sync", RoundRecord(2, 0, 1)).acc_conditional == [0.0, None]


def test_what_a_stop_cut_off_is_not_counted() -> None:
    # four guesses equalled the target's tokens, but the second one ended the request
    stats = request("sync", RoundRecord(4, 4, 2))
    assert stats.tokens == 2
    assert stats.mean_accepted == 2
    assert stats.acc_marginal == [1.0, 1.0]
    assert stats.acc_conditional == [1.0, 1.0]
    # here only the bonus token is kept or the bonus token is the one that stops: nothing is cut
    assert request("sync", RoundRecord(4, 1, 2)).acc_conditional == [1.0, 0.0, None, None]


def test_outcomes_and_ngram_rounds() -> None:
    stats = request(
        "async",
        RoundRecord(2, 1, 2),
        RoundRecord(2, 2, 3, "hit"),
        RoundRecord(3, 3, 4, "miss", source="ngram"),
        RoundRecord(0, 0, 1, "leaf"),
    )
    figures = stats.as_dict()
    assert [figures[name] for name in ("hits", "leaves", "misses")] == [1, 1, 1]
    assert figures["hit_rate"] == pytest.approx(1 / 3)
    assert figures["rounds_ngram"] == 1
    assert figures["mean_accepted"] == 1.5
    assert figures["acc_marginal"] == [3 / 4, 2 / 4, 1 / 4]
    assert figures["acc_conditional"] == [1.0, 1 / 2]


def test_pool_sums_counts_instead_of_averaging_ratios() -> None:
    short = request("sync", RoundRecord(1, 1, 2), seconds_decode=1.0, seconds_verify=0.5, prefill_chunks=1)
    long = request(
        "sync", *[RoundRecord(1, 0, 1)] * 3, seconds_decode=1.0, seconds_verify=0.5, prefill_chunks=2
    )
    both = pool([short, long]).as_dict()
    assert both["tokens_per_verify"] == 5 / 4
    assert both["tokens_per_second"] == 2.5
    assert both["acc_marginal"] == [1 / 4]
    assert both["seconds_verify"] == 1.0
    assert both["target_forwards"] == 7
    assert short.rounds == 1


def test_pool_refuses_several_modes() -> None:
    with pytest.raises(ValueError, match="one mode"):
        pool([RequestStats(mode="plain"), RequestStats(mode="sync")])
    with pytest.raises(ValueError, match="none"):
        pool([])


def test_no_round_gives_null_not_an_error() -> None:
    figures = RequestStats(mode="async").as_dict()
    assert figures["tokens_per_verify"] is None
    assert figures["hit_rate"] is None
    assert json.loads(json.dumps(figures)) == figures
