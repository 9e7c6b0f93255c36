"""Responses that the data holds: encoded as the target would have said them, and scored by it.

Shape letters: T response tokens, K kept log-probabilities, R rows of a prefill step.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from transformers import PreTrainedTokenizerBase

from foredraft.infer.paged_model import PagedModel
from foredraft.infer.target_states import to_bits
from foredraft.train.continuous import kept_distributions
from foredraft.train.prompt_sources import Sample


def encode_response(
    sample: Sample, prompt_ids: Sequence[int], tokenizer: PreTrainedTokenizerBase, *, is_raw: bool
) -> tuple[int, ...]:
    """Token ids of a given response, with the token that ends it where it ended by itself.

    The chat template renders the whole conversation; where its tokens do not begin with the prompt's, the
    text is encoded alone.
    """
    assert sample.response is not None, "the caller has seen one"
    eos = tokenizer.eos_token_id
    ids = list(tokenizer(sample.response, add_special_tokens=False)["input_ids"])
    if not is_raw:
        messages = [*map(dict, sample.prompt.messages), {"role": "assistant", "content": sample.response}]
        rendered = str(tokenizer.apply_chat_template(messages, tokenize=False))
        whole = list(tokenizer(rendered, add_special_tokens=False)["input_ids"])
        if whole[: len(prompt_ids)] == list(prompt_ids):
            ids = whole[len(prompt_ids) :]
    if eos in ids:
        ids = ids[: ids.index(eos)]
    return tuple([*ids, eos] if sample.is_ended and eos is not None else ids)


class Scorer:
    """Runs the target over given responses, one after another.

    Args:
        model: the target.
        num_kept: K; 0: nothing is run.
    """

    def __init__(self, model: PagedModel | None, num_kept: int) -> None:
        self.model, self.num_kept = model, num_kept

    def score(
        self, prompt_ids: Sequence[int], response_ids: Sequence[int]
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray | None]:
        """Ids int32 [T, K], log-probabilities float16 [T, K], tail mass [T]; states where they are caught."""
        length, model = len(response_ids), self.model
        if model is None:
            nothing = np.empty((length, 0))
            return nothing.astype(np.int32), nothing.astype(np.float16), np.ones(length, np.float32), None
        tokens, first = [*prompt_ids, *response_ids[:-1]], len(prompt_ids) - 1
        seq, start = model.pool.begin(), 0
        parts = []
        while start < len(tokens):
            chunk = tokens[start : start + model.prefill_room(seq)]
            wanted = range(max(first, start) - start, len(chunk))
            # a head over no rows at all is an edge that models need not know
            plan = model.plan_prefill(seq, chunk)
            logits_RV = model.run(plan, model.pool.drain_moves(), keep_rows=list(wanted) or [0])
            if wanted:
                parts.append(kept_distributions(logits_RV, self.num_kept))
            start += len(chunk)
        model.pool.free(seq)
        states = None if model.tap is None else to_bits(model.take_states())
        ids_TK, logprobs_TK, tail_T = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
        return ids_TK, logprobs_TK, tail_T, states
