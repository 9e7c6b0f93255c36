"""An outcome predictor in the engine: it changes order, block and speed, and never the text."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from foredraft.infer.drafter_card import drafter_sha256
from foredraft.infer.engine import Engine
from foredraft.infer.features import FEATURES
from foredraft.infer.generate import main as generate
from foredraft.infer.identity import TargetIdentity
from foredraft.infer.outcome_file import read_records
from foredraft.infer.outcome_records import OutcomeRecords
from foredraft.infer.params import EngineConfig, SamplingParams, SpeculationParams
from foredraft.infer.predictor import OutcomePredictor, PredictorCard, save_predictor
from foredraft.infer.prompts import hash_prompt
from foredraft.infer.request import Completion

PROMPTS = [[1, 7, 7, 30, 31], list(range(40, 110)), [5, 6, 5, 6, 5]]
SAMPLED = SamplingParams(max_new_tokens=30, temperature=1.0, seed=5, ignore_eos=True)
CHEAP, DEAR = (0.010,) * 8, tuple(0.010 + 0.008 * n for n in range(8))

MakePredictor = Callable[..., str]


@pytest.fixture(scope="module")
def make_predictor(tmp_path_factory: pytest.TempPathFactory, tiny_drafter: Path) -> MakePredictor:
    """`make_predictor(scale)`: probabilities are the confidences to that power; -1 inverts their order."""

    def make(scale: float = 1.0, sha256: str = "") -> str:
        predictor = OutcomePredictor()
        torch.nn.init.constant_(predictor.scale_head.bias, scale - 1.0)
        folder = tmp_path_factory.mktemp("predictor")
        card = PredictorCard(
            features=list(FEATURES),
            fan_out=16,
            hidden_size=32,
            drafter_sha256=sha256 or drafter_sha256(str(tiny_drafter)),
            target=TargetIdentity(id="tiny", revision=None, weights_sha256="0"),
            temperatures=[0.0],
        )
        save_predictor(folder, predictor, card)
        return str(folder)

    return make


def open_engine(
    target: Path, drafter: Path, predictor: str | None, record: Path | None = None, **settings: object
) -> Engine:
    settings = {"lockstep": 4, "on_miss": "wait"} | settings
    seconds = settings.pop("verify_seconds", ())
    config = EngineConfig(threads=1, speculation=SpeculationParams(**settings), verify_seconds=seconds)
    return Engine.from_pretrained(
        str(target), str(drafter), predictor, mode="plain", config=config, record=record
    )


def decode(engine: Engine, mode: str) -> list[Completion]:
    return engine.generate(PROMPTS, SAMPLED, mode=mode)


def tokens_of(completions: list[Completion]) -> list[list[int]]:
    return [completion.token_ids for completion in completions]


def num_rounds(completions: list[Completion]) -> int:
    return sum(completion.stats["rounds"] for completion in completions)


def blocks_of(engine: Engine, mode: str = "sync") -> list[list[int]]:
    """Guesses of every block that the engine verifies."""
    seen: list[list[int]] = []
    verify = engine._verify

    def watch(request, guess):
        used, settled = verify(request, guess)
        seen.append(used.block.tokens)
        return used, settled

    engine._verify = watch
    try:
        decode(engine, mode)
    finally:
        del engine._verify
    return seen


@pytest.fixture(scope="module")
def plain(tiny_target: Path, tiny_drafter: Path) -> Iterator[list[list[int]]]:
    with open_engine(tiny_target, tiny_drafter, None) as engine:
        yield tokens_of(decode(engine, "plain"))


def test_untrained_it_is_the_policy_confidence(
    tiny_target: Path, tiny_drafter: Path, make_predictor: MakePredictor
) -> None:
    with open_engine(tiny_target, tiny_drafter, make_predictor()) as engine:
        by_predictor = blocks_of(engine)
        engine.config = replace(
            engine.config, speculation=replace(engine.config.speculation, policy="confidence")
        )
        assert blocks_of(engine) == by_predictor


def test_an_inverted_ranking_costs_only_speed(
    tiny_target: Path, tiny_drafter: Path, make_predictor: MakePredictor, plain: list[list[int]]
) -> None:
    with open_engine(tiny_target, tiny_drafter, make_predictor()) as right:
        right_blocks, right_sync = blocks_of(right), decode(right, "sync")
        right_async = decode(right, "async")
    with open_engine(tiny_target, tiny_drafter, make_predictor(-1.0)) as inverted:
        inverted_blocks, inverted_sync = blocks_of(inverted), decode(inverted, "sync")
        inverted_async = decode(inverted, "async")
    for completions in (right_sync, right_async, inverted_sync, inverted_async):
        assert tokens_of(completions) == plain
    assert right_blocks[0] != inverted_blocks[0]
    assert num_rounds(inverted_sync) > num_rounds(right_sync)
    assert num_rounds(inverted_async) > num_rounds(right_async)
    # lockstep is the same in both modes with a predictor too
    assert num_rounds(right_async) == num_rounds(right_sync)


def test_block_size_follows_the_table_of_times_and_the_probabilities(
    tiny_target: Path, tiny_drafter: Path, make_predictor: MakePredictor, plain: list[list[int]]
) -> None:
    sizes = {}
    for name, seconds, scale in (("cheap", CHEAP, 1.0), ("dear", DEAR, 1.0), ("inverted", DEAR, -1.0)):
        with open_engine(tiny_target, tiny_drafter, make_predictor(scale), verify_seconds=seconds) as engine:
            sizes[name] = [len(block) for block in blocks_of(engine)]
            assert tokens_of(decode(engine, "sync")) == plain
    assert np.mean(sizes["cheap"]) > 6  # cut only by the end of a request
    assert 0 < np.mean(sizes["dear"]) < 5
    assert sizes["inverted"] != sizes["dear"]


def test_times_are_measured_where_none_are_given(
    tiny_target: Path, tiny_drafter: Path, make_predictor: MakePredictor, plain: list[list[int]]
) -> None:
    with open_engine(tiny_target, tiny_drafter, make_predictor(), lockstep=0) as engine:
        free = engine.target.model.pool.num_free_pages
        assert tokens_of(decode(engine, "sync")) == plain
        table = engine.measured_verify_seconds
        assert engine.target.model.pool.num_free_pages == free
    assert len(table) == 8
    assert table[0] > 0
    assert list(table) == sorted(table)


def test_a_predictor_of_another_drafter_is_refused(
    tiny_target: Path,
    tiny_drafter: Path,
    make_predictor: MakePredictor,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(ValueError, match="trained for the drafter with weights 0123"):
        open_engine(tiny_target, tiny_drafter, make_predictor(sha256="0123456789ab"))
    argv = f"--target {tiny_target} --drafter {tiny_drafter} --prompt hello --max-new-tokens 2".split()
    assert generate([*argv, "--predictor", make_predictor(sha256="0123456789ab")]) == 2
    assert "foredraft train-predictor" in capsys.readouterr().err
    assert generate([*argv, "--policy", "predictor"]) == 2
    assert "policy predictor needs --predictor FOLDER" in capsys.readouterr().err


def test_more_candidates_than_the_predictor_knows_are_refused(
    tiny_target: Path, tiny_drafter: Path, make_predictor: MakePredictor
) -> None:
    with (
        open_engine(tiny_target, tiny_drafter, make_predictor(), fan_out=32) as engine,
        pytest.raises(ValueError, match="the predictor knows 16 candidates of a node, fan_out is 32"),
    ):
        decode(engine, "sync")


def read_all(folder: Path) -> OutcomeRecords:
    return OutcomeRecords.concatenate([read_records(path) for path in sorted(folder.glob("*.parquet"))])


def rows_by_name(records: OutcomeRecords) -> dict[tuple[str, int, int, int], tuple[object, ...]]:
    names = zip(records.request_id_N, records.seed_N, records.anchor_N, records.depth_N, strict=True)
    rows = zip(records.candidate_ids_NF.tolist(), records.labels_N.tolist(), strict=True)
    found = dict(zip(names, rows, strict=True))
    assert len(found) == len(records), "a node has one record"
    return found


def test_live_records_say_what_the_target_said(tiny_target: Path, tiny_drafter: Path, tmp_path: Path) -> None:
    with open_engine(tiny_target, tiny_drafter, None, record=tmp_path / "sync") as engine:
        completions = decode(engine, "sync")
    with open_engine(tiny_target, tiny_drafter, None, record=tmp_path / "async") as engine:
        decode(engine, "async")
    records = read_all(tmp_path / "sync")
    assert rows_by_name(records) == rows_by_name(read_all(tmp_path / "async"))
    assert records.fan_out == 16
    texts = {
        hash_prompt(prompt): [*prompt, *completion.token_ids]
        for prompt, completion in zip(PROMPTS, completions, strict=True)
    }
    for index in range(len(records)):
        said = texts[records.request_id_N[index]][records.position_N[index]]
        ids = records.candidate_ids_NF[index].tolist()
        label = records.labels_N[index]
        assert ids[label] == said if label < 16 else said not in ids
    # a token is guessed by one node at most; most were, but for those of the round that ends a request
    named = set(zip(records.request_id_N, records.position_N.tolist(), strict=True))
    assert len(named) == len(records) > 0.5 * sum(len(c.token_ids) for c in completions)
    assert (records.labels_N < 16).mean() > 0.3
