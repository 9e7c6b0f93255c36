"""On-policy rows: the drafter's mistakes in the log, with what the target says there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from foredraft.train.drafter import _check_losses, mix_on_policy
from foredraft.train.drafter_recipe import DrafterRecipe, InitRecipe
from foredraft.train.log_recipe import OnPolicyRecipe
from foredraft.train.log_rows import LogRow
from foredraft.train.on_policy import collect_mistakes
from foredraft.train.splits import part_of
from foredraft.train.target_log import TargetLog

LENGTH = 3


@pytest.fixture(scope="module")
def log(make_log: Callable[..., TargetLog]) -> TargetLog:
    return make_log([f"word {n}" for n in range(12)], lambda n: n < 3)


@pytest.fixture(scope="module")
def recipe(log: TargetLog, tiny_drafter: Path, tmp_path_factory: pytest.TempPathFactory) -> OnPolicyRecipe:
    return OnPolicyRecipe(
        log=str(log.folder),
        drafter=str(tiny_drafter),
        out=str(tmp_path_factory.mktemp("mistakes") / "log"),
        length=LENGTH,
        mistakes_per_response=2,
        seed=0,
        reserved_fraction=0.25,
        rows=8,
        threads=1,
    )


@pytest.fixture(scope="module")
def mistakes(recipe: OnPolicyRecipe) -> list[LogRow]:
    return list(collect_mistakes(recipe, "recipe").rows())


def test_rows_go_on_behind_a_wrong_guess(log: TargetLog, mistakes: list[LogRow]) -> None:
    of_key = {row.key: row for row in log.rows()}
    assert len(mistakes) > 10
    for row in mistakes:
        source = of_key[row.key]
        assert part_of(row.request_id, row.split, 0.25) == "train"
        assert (row.source, row.is_targets) == ("drafter", False)
        said = [*source.prompt_ids.tolist(), *source.response_ids.tolist()]
        assert row.prompt_ids.tolist() == said[: row.first_position]
        assert row.first_position > source.first_position, "the first token comes from the prompt's prefill"
        assert row.response_ids[0] != said[row.first_position]
        assert 1 <= len(row.response_ids) <= LENGTH
    counts = np.unique([row.key for row in mistakes], return_counts=True)[1]
    assert counts.max() == 2


def test_the_target_scores_every_guess(tiny_target: Path, mistakes: list[LogRow]) -> None:
    target = AutoModelForCausalLM.from_pretrained(tiny_target)
    for row in mistakes[:5]:
        ids = torch.from_numpy(np.concatenate([row.prompt_ids, row.response_ids[:-1]]).astype(np.int64))
        with torch.no_grad():
            logprobs_TV = target(ids[None]).logits[0, row.first_position - 1 :].log_softmax(-1)
        expected = logprobs_TV.gather(1, torch.from_numpy(row.topk_ids.astype(np.int64)))
        np.testing.assert_allclose(row.topk_logprobs, expected, atol=1e-2)
        assert (row.topk_ids[:, 0] == logprobs_TV.argmax(-1).numpy()).all()


def test_a_second_run_finds_it_done(recipe: OnPolicyRecipe, mistakes: list[LogRow]) -> None:
    again = collect_mistakes(recipe, "recipe")
    assert [row.response_ids.tolist() for row in again.rows()] == [
        row.response_ids.tolist() for row in mistakes
    ]
    with pytest.raises(ValueError, match="was made with other settings"):
        collect_mistakes(replace(recipe, length=2), "recipe")


def test_the_mix_has_the_recipes_share(
    log: TargetLog, recipe: OnPolicyRecipe, mistakes: list[LogRow]
) -> None:
    drafter = DrafterRecipe(
        log=(str(log.folder), recipe.out),
        target="",
        out="",
        init=InitRecipe(source="target"),
        draft_vocab_size=0,
        freeze_embeddings=True,
        epochs=1.0,
        batch_tokens=512,
        accumulation=1,
        max_length=512,
        learning_rate=1e-3,
        warmup_fraction=0.1,
        final_fraction=0.0,
        weight_decay=0.0,
        clip_norm=1.0,
        precision="float32",
        seed=0,
        k=2,
        eval_every=0,
        eval_rows=1,
        save_every=0,
        on_policy_share=0.05,
    )
    own = list(log.rows("train"))
    mixed = mix_on_policy([*own, *mistakes], drafter)
    num_tokens = dict.fromkeys(("target", "drafter"), 0)
    for row in mixed:
        num_tokens[row.source] += len(row.response_ids)
    assert num_tokens["target"] == sum(len(row.response_ids) for row in own)
    share = num_tokens["drafter"] / sum(num_tokens.values())
    assert 0.05 <= share < 0.05 + LENGTH / num_tokens["target"]
    with pytest.raises(ValueError, match="holds a drafter's mistakes; make one with `foredraft on-policy`"):
        mix_on_policy(own, drafter)
    with pytest.raises(ValueError, match="cross_entropy would teach the drafter its own mistakes"):
        _check_losses(replace(drafter, losses={"cross_entropy": 1.0}), mixed)
