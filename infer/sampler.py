"""One request's coupled choice of tokens: noise, seen tokens, filters; the same for target and drafters."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch

from foredraft.infer.params import SamplingParams
from foredraft.kernels.coupled_sample_ref import perturbed_scores
from foredraft.kernels.philox_ref import gumbel_row

NOISE_ROWS = 32  # positions whose noise is kept; a block and the tree below it span fewer


class CoupledSampler:
    """score = z + T * g(seed, position, choice, token) over the kept tokens; the chosen token is its arg-max.

    Args:
        params: sampling settings with a seed.
        vocab_size: V of the target, over which noise is defined.
        token_ids: target id of every logit column, int64 [C]; None: columns are target ids.
    """

    def __init__(
        self, params: SamplingParams, vocab_size: int, token_ids: torch.Tensor | None = None
    ) -> None:
        assert params.seed is not None or params.temperature == 0.0, "a sampled request has a seed by now"
        self.params = params
        self.vocab_size = vocab_size
        self.token_ids = token_ids
        self.noise_rows: dict[int, torch.Tensor] = {}

    @property
    def needs_seen(self) -> bool:
        """Whether choices depend on the tokens seen so far."""
        return self.params.repetition_penalty != 1.0

    def scores(
        self, logits_RC: torch.Tensor, positions: Sequence[int], seen: Sequence[Iterable[int]]
    ) -> torch.Tensor:
        """Perturbed scores float32 [R, C]; -inf where a filter removed the token.

        Args:
            logits_RC: raw logits float32 [R, C].
            positions: absolute position of the token being chosen, a row each.
            seen: tokens of prompt, output and own path, a row each; read only with a repetition penalty.
        """
        noise_RC = self.noise(positions).to(logits_RC.device) if self.params.temperature > 0 else None
        seen_RC = self.seen_mask(seen).to(logits_RC.device) if self.needs_seen else None
        return perturbed_scores(logits_RC, self.params, noise_RC, seen_RC)

    def choose(
        self, logits_RC: torch.Tensor, positions: Sequence[int], seen: Sequence[Iterable[int]]
    ) -> list[int]:
        """The chosen token of every row. Arguments as for `scores`."""
        columns_R = self.scores(logits_RC, positions, seen).argmax(-1)
        return (columns_R if self.token_ids is None else self.token_ids[columns_R]).tolist()

    def noise(self, positions: Sequence[int]) -> torch.Tensor:
        """Noise float32 [R, C]; one row a position, kept while decoding is near it."""
        for position in positions:
            if position not in self.noise_rows:
                row = gumbel_row(self.params.seed or 0, position, self.params.choice, self.vocab_size)
                row_V = torch.from_numpy(row)
                self.noise_rows[position] = row_V if self.token_ids is None else row_V[self.token_ids.cpu()]
        rows_RC = torch.stack([self.noise_rows[position] for position in positions])
        for position in sorted(self.noise_rows)[:-NOISE_ROWS]:
            del self.noise_rows[position]
        return rows_RC

    def seen_mask(self, seen: Sequence[Iterable[int]]) -> torch.Tensor:
        """bool [R, C]."""
        mask_RV = np.zeros((len(seen), self.vocab_size), dtype=bool)
        for row, tokens in zip(mask_RV, seen, strict=True):
            row[np.fromiter(tokens, dtype=np.int64)] = True
        mask = torch.from_numpy(mask_RV)
        return mask if self.token_ids is None else mask[:, self.token_ids.cpu()]
