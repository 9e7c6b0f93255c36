"""One request's coupled choice of tokens: noise, seen tokens, filters; the same for target and drafters."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

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

    @property
    def rule(self) -> SamplingParams:
        """The parameters without what names the noise: rows of samplers with one rule go together."""
        return replace(self.params, seed=None, choice=0)

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


def joint_scores(
    samplers: Sequence[CoupledSampler],
    logits: Sequence[torch.Tensor],
    positions: Sequence[Sequence[int]],
    seen: Sequence[Sequence[Iterable[int]]],
) -> torch.Tensor:
    """Perturbed scores float32 [R, C] of the rows of several requests over one vocabulary.

    Args:
        samplers: one a request.
        logits: of its rows, float32 [rows, C].
        positions: of its rows.
        seen: of its rows; read only with a repetition penalty.
    """
    parts: list[torch.Tensor | None] = [None] * len(samplers)
    groups: dict[SamplingParams, list[int]] = {}
    for index, sampler in enumerate(samplers):
        if sampler.needs_seen:
            parts[index] = sampler.scores(logits[index], positions[index], seen[index])
        else:
            groups.setdefault(sampler.rule, []).append(index)
    for rule, members in groups.items():
        rows_RC = torch.cat([logits[index] for index in members])
        noise_RC = None
        if rule.temperature > 0:
            noise_RC = torch.cat([samplers[index].noise(positions[index]) for index in members])
            noise_RC = noise_RC.to(rows_RC.device)
        scores_RC = perturbed_scores(rows_RC, rule, noise_RC, None)
        found = scores_RC.split([len(logits[index]) for index in members])
        for index, part in zip(members, found, strict=True):
            parts[index] = part
    return torch.cat([part for part in parts if part is not None])
