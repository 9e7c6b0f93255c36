"""The prompts of a target log: encoded, named by hash, split into train and heldout, without duplicates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from foredraft.infer.identity import sha256_of_json
from foredraft.infer.params import require
from foredraft.infer.prompts import encode, hash_prompt
from foredraft.train.given import encode_response
from foredraft.train.log_recipe import LogRecipe
from foredraft.train.prompt_sources import read_samples

SPLITS = ("train", "heldout")


@dataclass(frozen=True, slots=True)
class LogPrompt:
    """A prompt to be logged."""

    request_id: str  # hash of its tokens
    token_ids: tuple[int, ...]
    split: str  # train | heldout
    response_ids: tuple[int, ...] = ()  # of the data, where responses are given


def read_log_prompts(recipe: LogRecipe, tokenizer: PreTrainedTokenizerBase) -> list[LogPrompt]:
    """Prompts of all sources in order, each once.

    A record's own `split` wins; other prompts are held out by their hash, so that a prompt is on the same
    side in every log.

    Raises:
        ValueError: what the sources and `encode` refuse, a `split` that is neither train nor heldout, no
            responses where they are to be given.
    """
    found: dict[str, LogPrompt] = {}
    for source in recipe.sources:
        for sample in read_samples(source):
            token_ids = encode(sample.prompt, tokenizer, raw=recipe.raw)
            request_id = hash_prompt(token_ids)
            split = sample.split or split_of(request_id, recipe.heldout_fraction)
            require(split in SPLITS, f"{sample.where}: split", "train or heldout", split)
            response_ids: tuple[int, ...] = ()
            if recipe.responses == "given":
                if sample.response is None:
                    continue
                response_ids = encode_response(sample, token_ids, tokenizer, is_raw=recipe.raw)
                response_ids = response_ids[: recipe.max_new_tokens]
            if recipe.responses == "target" or response_ids:
                found.setdefault(request_id, LogPrompt(request_id, tuple(token_ids), split, response_ids))
    if not found:
        names = ", ".join(source.path for source in recipe.sources)
        raise ValueError(
            f"no prompt with a response in {names}: with `responses: given` a conversation ends with the "
            "assistant's turn, or a line has a `response`; use `responses: target` to let the target answer"
        )
    return list(found.values())


def split_of(request_id: str, heldout_fraction: float) -> str:
    """Side of a prompt: its hash decides."""
    return "heldout" if int(request_id[:8], 16) < heldout_fraction * 2**32 else "train"


def prompts_sha256(prompts: Sequence[LogPrompt]) -> str:
    """Hash of a list of prompts with their splits and given responses."""
    return sha256_of_json([(prompt.request_id, prompt.split, *prompt.response_ids) for prompt in prompts])
