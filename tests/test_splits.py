"""Which prompts train a drafter: the parts are disjoint and stable, and reserved prompts reach no batch."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from foredraft.infer.config import read_config
from foredraft.infer.drafter_card import read_drafter_card
from foredraft.train import trainer
from foredraft.train.batches import Batch
from foredraft.train.drafter import train_drafter
from foredraft.train.drafter_recipe import DrafterRecipe
from foredraft.train.log_recipe import ResponseGroup
from foredraft.train.log_rows import LogRow
from foredraft.train.prompt_set import split_of
from foredraft.train.splits import fraction_of, part_of
from foredraft.train.target_log import TargetLog

REPOSITORY = Path(__file__).resolve().parent.parent
REQUEST_IDS = [hashlib.sha256(str(n).encode()).hexdigest()[:32] for n in range(4000)]


def test_parts_have_their_share() -> None:
    counts = Counter(part_of(request_id, "train", 0.2) for request_id in REQUEST_IDS)
    assert counts.keys() == {"train", "reserved"}
    # four standard deviations of a binomial share
    assert counts["reserved"] / len(REQUEST_IDS) == pytest.approx(0.2, abs=0.026)
    assert {part_of(request_id, "train", 0.0) for request_id in REQUEST_IDS} == {"train"}
    assert {part_of(request_id, "heldout", 0.99) for request_id in REQUEST_IDS} == {"heldout"}


def test_a_larger_fraction_keeps_what_a_smaller_one_reserved() -> None:
    few, many = (
        {request_id for request_id in REQUEST_IDS if part_of(request_id, "train", fraction) == "reserved"}
        for fraction in (0.1, 0.3)
    )
    assert few < many


def test_every_purpose_has_a_hash_of_its_own() -> None:
    heldout = [request_id for request_id in REQUEST_IDS if split_of(request_id, 0.5) == "heldout"]
    reserved = [request_id for request_id in REQUEST_IDS if fraction_of(request_id, "reserved") < 0.5]
    for chosen, purpose in ((heldout, "reserved"), (reserved, "calibration")):
        share = sum(fraction_of(request_id, purpose) < 0.5 for request_id in chosen) / len(chosen)
        assert share == pytest.approx(0.5, abs=0.05)


@pytest.fixture
def recipe(make_log: Callable[..., TargetLog], tiny_target: Path, tmp_path: Path) -> DrafterRecipe:
    """The smoke recipe over a log of 40 prompts, an eighth of them held out."""
    groups = (ResponseGroup(responses=2, temperature=1.0),)
    words = [f"word {n * n}" for n in range(40)]
    log = make_log(words, lambda n: n % 8 == 0, groups=groups, max_new_tokens=8)
    smoke = ["--config", str(REPOSITORY / "recipes" / "smoke_drafter.yaml")]
    found, _ = read_config(DrafterRecipe, smoke, "train-drafter")
    return replace(found, log=str(log.folder), target=str(tiny_target), out=str(tmp_path / "drafter"))


def test_reserved_prompts_reach_no_batch(recipe: DrafterRecipe, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = replace(recipe, reserved_fraction=0.3, epochs=2.0)
    parts: dict[str, set[str]] = {"train": set(), "reserved": set(), "heldout": set()}
    for row in TargetLog.open(recipe.log).rows():
        parts[part_of(row.request_id, row.split, 0.3)].add(row.request_id)
    seen: set[str] = set()

    def spying_collate(lines: Sequence[Sequence[LogRow]], max_length: int) -> Batch:
        seen.update(row.request_id for line in lines for row in line)
        return collate(lines, max_length)

    collate = trainer.collate
    monkeypatch.setattr(trainer, "collate", spying_collate)
    train_drafter(recipe, "x")
    assert 5 <= len(parts["reserved"]) <= 18
    assert seen == parts["train"]
    card = read_drafter_card(recipe.out)
    assert card is not None
    assert card.training["recipe"]["reserved_fraction"] == 0.3
    tokens = sum(len(r.response_ids) for r in TargetLog.open(recipe.log).rows() if r.request_id in seen)
    assert card.training["tokens"] == 2 * tokens


def test_a_drafter_with_other_reserved_prompts_is_another(recipe: DrafterRecipe) -> None:
    train_drafter(recipe, "x")
    with pytest.raises(ValueError, match="holds a drafter of another recipe"):
        train_drafter(replace(recipe, reserved_fraction=0.2), "x")


@pytest.mark.parametrize("fraction", [-0.1, 1.0])
def test_a_fraction_outside_its_range_is_refused(fraction: float) -> None:
    settings = yaml.safe_load((REPOSITORY / "recipes" / "smoke_drafter.yaml").read_text())
    with pytest.raises(ValueError, match=r"reserved_fraction must be in \[0, 1\), got"):
        DrafterRecipe(**{**settings, "reserved_fraction": fraction})


def test_a_log_whose_prompts_are_all_reserved_is_refused(recipe: DrafterRecipe) -> None:
    with pytest.raises(ValueError, match=r"no train row .*reserved_fraction 0\.999"):
        train_drafter(replace(recipe, reserved_fraction=0.999), "x")
