"""Log collection: tokens are the engine's for the logged seed, distributions the target's."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from foredraft.infer.paged_model import PagedModel
from foredraft.infer.params import EngineConfig, SamplingParams
from foredraft.infer.prompts import hash_prompt
from foredraft.infer.sampler import CoupledSampler
from foredraft.infer.step_plan import Row
from foredraft.kernels import dispatch
from foredraft.train.acceptance import sampling_of
from foredraft.train.collect import collect
from foredraft.train.continuous import ContinuousDecoder, Job
from foredraft.train.log_recipe import LogRecipe, ResponseGroup
from foredraft.train.log_rows import LogRow
from foredraft.train.prompt_set import read_log_prompts
from foredraft.train.target_log import TargetLog

TEXTS = [
    "Explain rain.",
    "Count to five, please.",
    "Why?",
    "Write a line about a fox and its garden.",
    "2 + 2 =",
]
GROUPS = (
    ResponseGroup(responses=1, temperature=0.0),
    ResponseGroup(responses=2, temperature=1.0, top_p=0.9),
    ResponseGroup(responses=1, temperature=0.8, repetition_penalty=1.2),
)


@pytest.fixture
def prompts_file(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    splits = ["train", "heldout", "train", "train", "heldout"]
    lines = [json.dumps({"prompt": text, "split": split}) for text, split in zip(TEXTS, splits, strict=True)]
    path.write_text("\n".join([*lines, lines[0]]) + "\n")
    return path


@pytest.fixture
def recipe(tiny_target: Path, prompts_file: Path, tmp_path: Path) -> LogRecipe:
    return LogRecipe(
        target=str(tiny_target),
        prompts=str(prompts_file),
        out=str(tmp_path / "log"),
        groups=GROUPS,
        max_new_tokens=20,
        top_k_logprobs=8,
        heldout_fraction=0.1,
        seed=3,
        prompts_per_shard=2,
        dtype="float32",
        rows=4,
    )


def engine_tokens(model: PagedModel, row: LogRow, eos_id: int, limit: int) -> list[int]:
    """One sequence decoded alone with the row's seed."""
    sampler = CoupledSampler(sampling_of(row), row.prompt_ids.tolist())
    tokens = row.prompt_ids.tolist()
    seq = model.pool.begin()
    logits_1V = model.prefill(seq, tokens)[None]
    while True:
        tokens += dispatch.coupled_sample(
            logits_1V, sampler.draws([len(tokens)], [tokens[row.first_position :]])
        ).tolist()
        if tokens[-1] == eos_id or len(tokens) - row.first_position == limit:
            model.pool.free(seq)
            return tokens[row.first_position :]
        logits_1V = model.step([Row(seq, tokens[-1])])


def test_rows_are_what_the_target_says(recipe: LogRecipe, tiny_target: Path) -> None:
    log = collect(recipe, "recipe")
    rows = list(log.rows())
    assert len(rows) == len(TEXTS) * 4, "the repeated prompt is logged once"
    assert [row.split for row in rows[::4]] == ["train", "heldout", "train", "train", "heldout"]
    assert len({row.seed for row in rows}) == len(rows)
    assert [row.temperature for row in rows[:4]] == [0.0, 1.0, 1.0, 0.8]
    assert (Path(recipe.out) / "recipe.yaml").read_text() == "recipe"
    model = PagedModel.load(str(tiny_target), EngineConfig(dtype="float32", row_bucket=4, lanes=1))
    reference = AutoModelForCausalLM.from_pretrained(tiny_target)
    eos_id = AutoTokenizer.from_pretrained(tiny_target).eos_token_id
    for row in rows:
        assert row.request_id == hash_prompt(row.prompt_ids)
        assert row.response_ids.tolist() == engine_tokens(model, row, eos_id, recipe.max_new_tokens)
        assert row.finish_reason == ("stop" if row.response_ids[-1] == eos_id else "length")
        check_distribution(row, reference)
    assert any(row.finish_reason == "stop" for row in rows)
    assert any(row.finish_reason == "length" for row in rows)


def check_distribution(row: LogRow, reference: torch.nn.Module) -> None:
    ids = torch.from_numpy(np.concatenate([row.prompt_ids, row.response_ids]).astype(np.int64))
    with torch.no_grad():
        logprobs_TV = reference(ids[None]).logits[0, row.first_position - 1 : -1].log_softmax(-1)
    kept_TK = logprobs_TV.gather(1, torch.from_numpy(row.topk_ids.astype(np.int64)))
    torch.testing.assert_close(kept_TK, logprobs_TV.topk(8).values, rtol=0.0, atol=1e-4)
    # float16 keeps 11 bits
    torch.testing.assert_close(torch.tensor(row.topk_logprobs).float(), kept_TK, rtol=1e-3, atol=1e-3)
    tail_T = 1.0 - kept_TK.exp().sum(-1)
    torch.testing.assert_close(torch.tensor(row.tail_mass), tail_T, rtol=0.0, atol=1e-5)


def same_rows(first: TargetLog, second: TargetLog) -> bool:
    pairs = list(zip(first.rows(), second.rows(), strict=True))
    return all(a.seed == b.seed and a.response_ids.tolist() == b.response_ids.tolist() for a, b in pairs)


def test_a_rerun_repairs_only_what_is_bad(recipe: LogRecipe) -> None:
    log = collect(recipe, "recipe")
    untouched, damaged, missing = (Path(recipe.out) / log.shard_name(index) for index in range(3))
    before = untouched.stat().st_mtime_ns
    expected = collect(replace(recipe, out=recipe.out + "-again"), "recipe")
    damaged.write_bytes(damaged.read_bytes()[:-50])
    missing.unlink()
    repaired = collect(replace(recipe, rows=3), "recipe")
    assert untouched.stat().st_mtime_ns == before
    assert repaired.bad_shards() == []
    assert same_rows(repaired, expected)


def test_an_interruption_keeps_finished_shards(
    recipe: LogRecipe, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_shard = TargetLog.write_shard

    def interrupted(log: TargetLog, index: int, rows: list[LogRow]) -> None:
        if index == 1:
            raise KeyboardInterrupt
        write_shard(log, index, rows)

    monkeypatch.setattr(TargetLog, "write_shard", interrupted)
    with pytest.raises(KeyboardInterrupt):
        collect(recipe, "recipe")
    monkeypatch.undo()
    with pytest.raises(ValueError, match="2 of 3 shards missing"):
        TargetLog.open(recipe.out)
    collect(recipe, "recipe")
    assert "2 of 3 shards made now by 1 processes" in capsys.readouterr().err
    assert TargetLog.open(recipe.out).num_tokens > 0


def test_two_processes_write_the_same_log(
    recipe: LogRecipe, tmp_path: Path, launch_on_cpus: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    path = tmp_path / "recipe.yaml"
    groups = [
        {"responses": 1, "temperature": 0.0},
        {"responses": 2, "temperature": 1.0, "top_p": 0.9},
        {"responses": 1, "temperature": 0.8, "repetition_penalty": 1.2},
    ]
    settings = {name: getattr(recipe, name) for name in recipe.__slots__}
    path.write_text(json.dumps({**settings, "groups": groups, "out": str(tmp_path / "two"), "threads": 1}))
    result = launch_on_cpus(2, "-m", "foredraft.train.collect", "--config", str(path))
    assert "3 of 3 shards made now by 2 processes" in result.stderr
    assert same_rows(TargetLog.open(tmp_path / "two"), collect(recipe, "recipe"))


def test_prompts_that_do_not_fit_are_refused(recipe: LogRecipe) -> None:
    with pytest.raises(ValueError, match=r"longest prompt has \d+ tokens; with max_new_tokens 1020"):
        collect(replace(recipe, max_new_tokens=1020), "recipe")
    with pytest.raises(ValueError, match="top_k_logprobs 321 exceeds the vocabulary of 320"):
        collect(replace(recipe, out=recipe.out + "-2", top_k_logprobs=321), "recipe")


def test_a_bad_split_is_named(recipe: LogRecipe, tmp_path: Path, tiny_target: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "a"}\n\n{"prompt": "b", "split": "test"}\n')
    tokenizer = AutoTokenizer.from_pretrained(tiny_target)
    with pytest.raises(ValueError, match="line 3: split must be train or heldout, got 'test'"):
        read_log_prompts(replace(recipe, prompts=str(path)), tokenizer)


def test_hashed_split_is_about_the_fraction(recipe: LogRecipe, tmp_path: Path, tiny_target: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"number {number}"}) + "\n" for number in range(500)))
    tokenizer = AutoTokenizer.from_pretrained(tiny_target)
    prompts = read_log_prompts(replace(recipe, prompts=str(path), raw=True, heldout_fraction=0.2), tokenizer)
    assert 70 <= sum(prompt.split == "heldout" for prompt in prompts) <= 130


@pytest.fixture
def small_pool(tiny_target: Path) -> Callable[[int], PagedModel]:
    def load(num_pages: int) -> PagedModel:
        config = EngineConfig(dtype="float32", row_bucket=4, page_size=16, num_pages=num_pages)
        return PagedModel.load(str(tiny_target), replace(config, lanes=1))

    return load


def test_a_small_pool_only_slows_down(small_pool: Callable[[int], PagedModel]) -> None:
    jobs = [
        Job(
            key=(i, j),
            prompt_ids=tuple(range(3, 20 + 7 * i)),
            params=SamplingParams(max_new_tokens=25, seed=j),
        )
        for i in range(3)
        for j in range(3)
    ]
    found = []
    for num_pages in (60, 8):
        model = small_pool(num_pages)
        decoder = ContinuousDecoder(model, frozenset(), 4)
        completed = [response for step in decoder.run(jobs) for response in step]
        found.append({response.job.key: response.tokens for response in completed})
        assert model.pool.num_free_pages == num_pages - 1, "no page is left behind"
    assert found[0] == found[1]
    with pytest.raises(ValueError, match=r"needs more than the 3 KV pages of the pool"):
        list(ContinuousDecoder(small_pool(4), frozenset(), 4).run(jobs))
