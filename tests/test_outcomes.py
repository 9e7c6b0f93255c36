"""Replay over a log makes the records that live decoding makes, and keeps them through every accident."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from foredraft.infer.engine import Engine
from foredraft.infer.outcome_file import read_records
from foredraft.infer.outcome_records import UNKNOWN, OutcomeRecords
from foredraft.infer.params import EngineConfig, SpeculationParams
from foredraft.train.acceptance import chain_rounds, sampling_of
from foredraft.train.allocation import Rounds
from foredraft.train.log_recipe import ResponseGroup
from foredraft.train.log_rows import LogRow
from foredraft.train.outcome_log import OutcomeLog
from foredraft.train.outcomes import replay
from foredraft.train.recipe import OutcomesRecipe
from foredraft.train.splits import part_of
from foredraft.train.target_log import TargetLog

NEAR = 1e-4
K, DEPTH, FAN_OUT = 3, 4, 16

Key = tuple[str, int, int, int]


@pytest.fixture(scope="module")
def log(make_log: Callable[..., TargetLog]) -> TargetLog:
    """Ten prompts in five shards, greedy and sampled, one group with a repetition penalty."""
    return make_log(
        [f"item {n**3}" for n in range(10)],
        lambda n: n % 3 == 0,
        groups=(
            ResponseGroup(responses=1, temperature=0.0),
            ResponseGroup(responses=1, temperature=1.0, top_p=0.95),
            ResponseGroup(responses=1, temperature=0.7, repetition_penalty=1.2),
        ),
        prompts_per_shard=2,
    )


def make_recipe(log: TargetLog, drafter: Path, out: Path) -> OutcomesRecipe:
    return OutcomesRecipe(
        log=str(log.folder),
        drafter=str(drafter),
        out=str(out),
        parts=("train", "heldout"),
        fan_out=FAN_OUT,
        depth=DEPTH,
        k=K,
        heldout_responses=0,
        rows=8,
        dtype="float32",
    )


@pytest.fixture
def recipe(log: TargetLog, tiny_drafter: Path, tmp_path: Path) -> OutcomesRecipe:
    return make_recipe(log, tiny_drafter, tmp_path / "outcomes")


@pytest.fixture(scope="module")
def outcomes(log: TargetLog, tiny_drafter: Path, tmp_path_factory: pytest.TempPathFactory) -> OutcomeLog:
    out = tmp_path_factory.mktemp("replayed") / "outcomes"
    return replay(make_recipe(log, tiny_drafter, out), "recipe")


def all_records(outcomes: OutcomeLog) -> OutcomeRecords:
    return OutcomeRecords.concatenate([outcomes.records("train"), outcomes.records("heldout")])


def places(records: OutcomeRecords) -> dict[Key, int]:
    keys = zip(
        records.request_id_N,
        records.seed_N.tolist(),
        records.anchor_N.tolist(),
        records.depth_N.tolist(),
        strict=True,
    )
    found = {key: index for index, key in enumerate(keys)}
    assert len(found) == len(records), "a root has one record of a depth on the target's path"
    return found


def live_records(target: Path, drafter: Path, rows: list[LogRow], folder: Path, mode: str) -> OutcomeRecords:
    """What an engine in lockstep records while it decodes the log's prompts with the log's seeds."""
    speculation = SpeculationParams(lockstep=3, on_miss="wait", fan_out=FAN_OUT)
    config = EngineConfig(dtype="float32", threads=1, draft_rows=32, speculation=speculation)
    with Engine.from_pretrained(str(target), str(drafter), mode=mode, config=config, record=folder) as engine:
        for row in rows:
            params = replace(sampling_of(row), max_new_tokens=24)
            [completion] = engine.generate([row.prompt_ids.tolist()], [params])
            assert completion.token_ids == row.response_ids.tolist()
    return OutcomeRecords.concatenate([read_records(path) for path in sorted(folder.glob("*.parquet"))])


def is_near_tie(first: np.ndarray, second: np.ndarray) -> bool:
    """Whether two rows of scores belong to the same candidates but for the order of equals."""
    return bool(np.allclose(first, second, atol=NEAR))


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_replay_makes_the_records_of_live_decoding(
    outcomes: OutcomeLog, log: TargetLog, tiny_target: Path, tiny_drafter: Path, tmp_path: Path, mode: str
) -> None:
    rows = list(log.rows())[: 9 if mode == "sync" else 3]
    live = live_records(tiny_target, tiny_drafter, rows, tmp_path / mode, mode)
    replayed = all_records(outcomes)
    place_of, live_places = places(replayed), places(live)
    # a tree may be deeper than the replay's records
    common = [key for key in live_places if key[3] < DEPTH]
    assert len(common) > 0.5 * sum(len(row.response_ids) for row in rows)
    mine = replayed.select(np.array([place_of[key] for key in common]))
    theirs = live.select(np.array([live_places[key] for key in common]))
    is_same_N = (mine.candidate_ids_NF == theirs.candidate_ids_NF).all(1)
    ties = np.flatnonzero(~is_same_N)
    print(f"{mode}: {len(common)} records compared, {len(ties)} near ties")
    assert all(is_near_tie(mine.scores_NF[index], theirs.scores_NF[index]) for index in ties)
    assert len(ties) <= 0.01 * len(common)
    assert np.array_equal(mine.labels_N[is_same_N], theirs.labels_N[is_same_N])
    for name in ("features_NK", "scores_NF", "log_probs_NF", "echo_NF", "temperature_N"):
        assert np.allclose(getattr(mine, name), getattr(theirs, name), atol=NEAR), name


def test_live_decoding_leaves_out_only_what_the_tree_did_not_expand(
    outcomes: OutcomeLog, log: TargetLog, tiny_target: Path, tiny_drafter: Path, tmp_path: Path
) -> None:
    """Where a tree was begun afresh, its root and all its children were expanded: both sides have them."""
    rows = [row for row in log.rows() if row.temperature == 0.0][:5]
    live = live_records(tiny_target, tiny_drafter, rows, tmp_path / "live", "sync")
    named = {(row.request_id, row.seed) for row in rows}
    last = {(row.request_id, row.seed): row.first_position + len(row.response_ids) - 1 for row in rows}
    found, expected = set(places(live)), set(places(all_records(outcomes)))
    roots = {key for key in found if key[3] == 0}
    assert roots
    positions = {(name, seed, anchor + depth) for name, seed, anchor, depth in found}
    for name, seed, anchor, _ in roots:
        child = (name, seed, anchor, 1)
        # the round that ended the request told the draft side nothing
        is_told = any((name, seed, later) in positions for later in range(anchor + 2, last[name, seed]))
        if child in expected and is_told:
            assert child in found
    assert {key[:2] for key in found} == named


def test_records_are_what_the_log_says(outcomes: OutcomeLog, log: TargetLog) -> None:
    texts = {
        (row.request_id, row.seed): [*row.prompt_ids.tolist(), *row.response_ids.tolist()]
        for row in log.rows()
    }
    records = all_records(outcomes)
    for index in range(len(records)):
        text = texts[records.request_id_N[index], int(records.seed_N[index])]
        token, ids = text[records.position_N[index]], records.candidate_ids_NF[index].tolist()
        label = records.labels_N[index]
        assert token not in ids if label == FAN_OUT else ids[label] == token
    num_tokens = sum(len(row.response_ids) for row in log.rows())
    assert int((records.depth_N == 0).sum()) == num_tokens
    sizes = [int((records.depth_N == depth).sum()) for depth in range(DEPTH)]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[-1] > 0


def test_chain_rounds_settle_what_the_drafters_guesses_allow(outcomes: OutcomeLog, log: TargetLog) -> None:
    records, rounds = all_records(outcomes), Rounds.of(outcomes.rounds(), K)
    place_of = places(records)
    for row in (row for row in log.rows() if row.split == "heldout"):
        first = row.first_position - 1
        keys = [(row.request_id, row.seed, first + index, 0) for index in range(len(row.response_ids))]
        is_match = [records.labels_N[place_of[key]] == 0 for key in keys]
        is_own = (rounds.request_M == row.request_id) & (
            rounds.records.seed_N.reshape(-1, K + 1)[:, 0] == row.seed
        )
        settled = (rounds.num_right_M[is_own] + 1).tolist()
        expected = chain_rounds(np.array([is_match]), K)
        # a last round whose outcome lies beyond the response is left out
        assert settled == expected[: len(settled)]
        assert len(expected) - len(settled) <= 1
    off_path = rounds.labels_MD[:, 1:][np.cumprod(rounds.labels_MD[:, :-1] == 0, axis=1) == 0]
    assert set(off_path.tolist()) == {UNKNOWN}


def test_parts_follow_the_drafters_reserve(log: TargetLog, recipe: OutcomesRecipe, tmp_path: Path) -> None:
    outcomes = replay(recipe, "recipe")
    with pytest.raises(ValueError, match=r"none of part 'reserved'.*reserved_fraction"):
        outcomes.records("reserved")
    found = set(outcomes.records("train").request_id_N)
    assert found == {row.request_id for row in log.rows() if part_of(row.request_id, row.split, 0) == "train"}


def test_few_heldout_responses_can_be_asked_for(recipe: OutcomesRecipe) -> None:
    outcomes = replay(replace(recipe, heldout_responses=1, parts=("heldout",)), "recipe")
    records = outcomes.records("heldout")
    named = set(zip(records.request_id_N, records.temperature_N.tolist(), strict=True))
    assert len(named) == len(set(zip(records.request_id_N, records.seed_N.tolist(), strict=True)))


def test_a_damaged_shard_is_named_and_redone_alone(recipe: OutcomesRecipe) -> None:
    outcomes = replay(recipe, "recipe")
    before = {path.name: path.stat().st_mtime_ns for path in outcomes.shard_paths}
    whole = outcomes.shard_paths[1].read_bytes()
    outcomes.shard_paths[1].write_bytes(whole[:-7] + b"rubbish")
    with pytest.raises(ValueError, match=r"1 of 5 .*: shard-00001-of-00005\.parquet.*foredraft outcomes"):
        OutcomeLog.open(recipe.out)
    replay(recipe, "recipe")
    after = {path.name: path.stat().st_mtime_ns for path in OutcomeLog.open(recipe.out).shard_paths}
    assert [name for name in before if before[name] != after[name]] == ["shard-00001-of-00005.parquet"]


def test_an_interrupted_replay_goes_on(recipe: OutcomesRecipe, monkeypatch: pytest.MonkeyPatch) -> None:
    write_shard = OutcomeLog.write_shard

    def interrupted(log: OutcomeLog, index: int, parts: object) -> None:
        if index == 3:
            raise KeyboardInterrupt
        write_shard(log, index, parts)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(OutcomeLog, "write_shard", interrupted)
        replay(recipe, "recipe")
    done = sorted(Path(recipe.out).glob("*.parquet"))
    assert len(done) == 3
    times = [path.stat().st_mtime_ns for path in done]
    replay(recipe, "recipe")
    assert [path.stat().st_mtime_ns for path in done] == times
    assert len(OutcomeLog.open(recipe.out).records("heldout")) > 0


@pytest.fixture
def other_drafter(tiny_target: Path, tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "other"
    shutil.copytree(tiny_target, folder)
    yield folder


def test_other_records_are_not_mixed(recipe: OutcomesRecipe, other_drafter: Path) -> None:
    replay(recipe, "recipe")
    with pytest.raises(ValueError, match=r"made with other settings \(drafter\)"):
        replay(replace(recipe, drafter=str(other_drafter)), "recipe")
    with pytest.raises(ValueError, match=r"made with other settings \(k\)"):
        replay(replace(recipe, k=2), "recipe")
    path = Path(recipe.out) / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "schema": 9}))
    with pytest.raises(ValueError, match="schema 1 expected, found 9"):
        OutcomeLog.open(recipe.out)
