"""foredraft.json: what ties a drafter folder to its target, its tokenizer and its training."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from foredraft.infer.hub import local_folder
from foredraft.infer.identity import TargetIdentity, check_tokenizer, identify_target

CARD_FILE = "foredraft.json"
SCHEMA = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class StateNeeds:
    """Which hidden states of the target a drafter feeds on; ids as in foredraft.infer.state_tap."""

    layers: tuple[int, ...] = ()  # none: it reads tokens only
    width: int = 0  # numbers of one token, all layers together
    keeps_all: bool = False  # every token's states, not just the last one's

    @property
    def num_bytes(self) -> int:
        """Of one token, as bfloat16."""
        return 2 * self.width


@dataclass(frozen=True, kw_only=True, slots=True)
class DrafterCard:
    """Content of foredraft.json."""

    family: str
    target: TargetIdentity
    tokenizer_sha256: str
    draft_vocab: str | None  # name of the file that holds d2t, None: the whole vocabulary
    max_depth: int  # the tree is never expanded beyond it
    states: StateNeeds = field(default_factory=StateNeeds)
    training: dict[str, Any] = field(default_factory=dict)  # recipe, tokens, seconds, versions, git
    measured: dict[str, Any] = field(default_factory=dict)


def read_drafter_card(source: str | Path) -> DrafterCard | None:
    """The foredraft.json of a drafter (folder or Hub id); None where there is none (a plain causal LM).

    Raises:
        ValueError: no such drafter, or the file is not one that this version understands.
    """
    path = local_folder(source) / CARD_FILE
    if not path.is_file():
        return None
    try:
        content = json.loads(path.read_text())
        schema = content.pop("schema")
        if schema != SCHEMA:
            raise ValueError(f"schema {SCHEMA} expected, found {schema!r}")
        states = content.pop("states", {})
        needs = StateNeeds(**{**states, "layers": tuple(states.get("layers", ()))})
        return DrafterCard(**{**content, "target": TargetIdentity(**content["target"]), "states": needs})
    except (json.JSONDecodeError, KeyError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(
            f"{path} is not a drafter description ({error}); "
            "train the drafter again or use a matching version of foredraft"
        ) from error


def write_drafter_card(folder: str | Path, card: DrafterCard) -> None:
    """Write foredraft.json into a folder that nobody reads yet (folders are published by one rename)."""
    content = {"schema": SCHEMA, **asdict(card)}
    (Path(folder) / CARD_FILE).write_text(json.dumps(content, indent=2) + "\n")


def check_drafter(
    card: DrafterCard, target: TargetIdentity, tokenizer_sha256: str, *, allow_target_mismatch: bool = False
) -> None:
    """Refuse a drafter that cannot serve the target, or that was not made for it.

    Args:
        card: of the drafter.
        target: the model to be served.
        tokenizer_sha256: of the target's tokenizer.
        allow_target_mismatch: accept a drafter that was trained for another target of the same tokenizer.

    Raises:
        ValueError: another tokenizer, or another target where that is not allowed.
    """
    check_tokenizer(card.tokenizer_sha256, tokenizer_sha256, "the drafter", target.id)
    if not allow_target_mismatch and not card.target.is_same(target):
        raise ValueError(
            f"the drafter was trained for target {card.target}, the target is {target}: its guesses "
            "would fit less well. Train a drafter for this target, or pass --allow-target-mismatch "
            "(the output stays exact, only speed suffers)"
        )


def family_of(card: DrafterCard | None) -> str:
    """Family of a drafter; a plain Hugging Face causal LM, which has no card, is one of family `lm`."""
    return card.family if card else "lm"


def drafter_sha256(drafter: str) -> str:
    """Hash of a drafter's weights: what predictors and outcome records belong to."""
    return identify_target(str(local_folder(drafter))).weights_sha256
