"""Whether a drafter and a predictor belong to a target."""

from __future__ import annotations

from foredraft.infer.drafter_card import StateNeeds, check_drafter, drafter_sha256, read_drafter_card
from foredraft.infer.hub import local_folder
from foredraft.infer.identity import check_tokenizer, tokenizer_sha256
from foredraft.infer.params import EngineConfig
from foredraft.infer.predictor import check_predictor, read_predictor_card
from foredraft.infer.target import Target, load_tokenizer


def check_drafter_of(target: Target, drafter: str, config: EngineConfig) -> StateNeeds:
    """Refuse a drafter that does not belong to the target; what it reads of the target.

    Args:
        target: loaded.
        drafter: folder or Hub id.
        config: engine settings.

    Raises:
        ValueError: another tokenizer; another target, where that is not allowed; states of another width.
    """
    expected = tokenizer_sha256(target.tokenizer)
    card = read_drafter_card(drafter)
    if card is None:
        found = tokenizer_sha256(load_tokenizer(str(local_folder(drafter)), config.of_drafter))
        check_tokenizer(found, expected, "the drafter", target.source)
        return StateNeeds()
    check_drafter(card, target.identity, expected, allow_target_mismatch=config.allow_target_mismatch)
    width = len(card.states.layers) * target.model.hidden_size
    if card.states.width != width:
        raise ValueError(
            f"drafter {drafter} feeds on states of {card.states.width} numbers a token, layers "
            f"{list(card.states.layers)} of the target have {width}; use the drafter's own target"
        )
    return card.states


def check_predictor_of(drafter: str | None, predictor: str) -> None:
    """Refuse a predictor without drafter, or of another one, with ValueError."""
    if drafter is None:
        raise ValueError("a predictor needs its drafter; give both or none")
    check_predictor(read_predictor_card(predictor), predictor, drafter_sha256(drafter))
