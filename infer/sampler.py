"""One request's coupled choice of tokens; the same for target and drafters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import cast

from foredraft.infer.params import SamplingParams
from foredraft.kernels.draws import Draw, needs_tokens

SEED_STRIDE = 0x9E3779B97F4A7C15  # odd: no two nodes share a seed; large: seeds of other prompts are far


class CoupledSampler:
    """Names the draws of one request: score = z + T * g(seed, position, choice, token) over the kept tokens.

    Args:
        params: sampling settings with a seed.
        prompt: token ids of the prompt.
    """

    def __init__(self, params: SamplingParams, prompt: Sequence[int] = ()) -> None:
        assert params.seed is not None or params.temperature == 0.0, "a sampled request has a seed by now"
        self.params = params
        self.prompt = prompt

    @property
    def needs_outputs(self) -> bool:
        """Whether a draw depends on the tokens before it."""
        return needs_tokens(self.params)

    def draws(self, positions: Sequence[int], outputs: Sequence[Sequence[int]]) -> list[Draw]:
        """How the tokens of some rows are drawn.

        Args:
            positions: absolute position of the token being drawn, a row each.
            outputs: tokens of the response and of the row's own path, a row each; not read, and may be
                empty, unless `needs_outputs`.
        """
        params, seed = self.params, self.params.seed or 0
        if not self.needs_outputs:
            return [Draw(params, seed, position, params.choice) for position in positions]
        return [
            Draw(params, seed, position, params.choice, self.prompt, output)
            for position, output in zip(positions, outputs, strict=True)
        ]


def greedy(draw: Draw) -> Draw:
    """The same row at temperature 0: the most probable token after penalties."""
    return replace(draw, filters=replace(cast(SamplingParams, draw.filters), temperature=0.0))


def apart(draw: Draw, node: int) -> Draw:
    """The same row with noise of its own, independent of that of other nodes at the same position."""
    return replace(draw, seed=(draw.seed + (node + 1) * SEED_STRIDE) % 2**64)
