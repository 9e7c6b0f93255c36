"""Batches of log rows: which rows go together in which step, and their tensors.

The plan is a function of lengths, seed and epoch alone. Every process can work it out, so a step number is
the whole data position, and the number of tokens of a global batch needs no communication.

Shape letters: B sequences, T tokens, N trained positions, K kept teacher tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from foredraft.train.log_rows import LogRow

# few distinct shapes: oneDNN keeps what it compiled for each (2 GB after a few hundred steps of odd shapes)
WIDTH_STEP = 16
POSITIONS_STEP = 64
ROWS_PER_WINDOW = 512  # rows of like length are sought among these; windows keep epochs different


@dataclass(frozen=True, slots=True)
class Batch:
    """Tensors of one forward. Trained positions are those that predict a response token.

    The last positions may be padding: they point at token 0 and have weight 0.
    """

    ids_BT: torch.Tensor  # int64, padded at the end with 0
    positions_N: torch.Tensor  # int64, flat index b * T + t of the token before the predicted one
    weights_N: torch.Tensor  # float32, 1 for trained positions, 0 for padding
    targets_N: torch.Tensor  # int64, the response token, a target id
    topk_ids_NK: torch.Tensor  # int64, target ids; K = 0 in a log of tokens only
    topk_logprobs_NK: torch.Tensor  # float32

    def to(self, device: torch.device) -> Batch:
        """The batch on a device."""
        return Batch(*(getattr(self, name).to(device, non_blocking=True) for name in self.__slots__))


def trained_length(row: LogRow, max_length: int) -> int:
    """Response tokens of a row that are left when the sequence is cut to `max_length`."""
    return max(0, min(len(row.response_ids), max_length - row.first_position))


def collate(rows: Sequence[LogRow], max_length: int) -> Batch:
    """Tensors of some rows, sequences cut at `max_length`. The last response token is never an input."""
    lengths = [trained_length(row, max_length) for row in rows]
    pairs = list(zip(rows, lengths, strict=True))
    inputs = [np.concatenate([row.prompt_ids, row.response_ids[: length - 1]]) for row, length in pairs]
    width = round_up(max(map(len, inputs)), WIDTH_STEP)
    ids_BT = np.zeros((len(rows), width), np.int64)
    for row_ids, ids in zip(ids_BT, inputs, strict=True):
        row_ids[: len(ids)] = ids
    starts = [index * width + row.first_position - 1 for index, row in enumerate(rows)]
    positions = [np.arange(start, start + length) for start, length in zip(starts, lengths, strict=True)]
    num_positions = round_up(sum(lengths), POSITIONS_STEP)

    def join(arrays: Sequence[np.ndarray], dtype: type) -> torch.Tensor:
        joined: np.ndarray = np.concatenate(arrays).astype(dtype)
        padding = [(0, num_positions - len(joined))] + [(0, 0)] * (joined.ndim - 1)
        return torch.from_numpy(np.pad(joined, padding))

    return Batch(
        torch.from_numpy(ids_BT),
        join(positions, np.int64),
        join([np.ones(length) for length in lengths], np.float32),
        join([row.response_ids[:length] for row, length in pairs], np.int64),
        join([row.topk_ids[:length] for row, length in pairs], np.int64),
        join([row.topk_logprobs[:length] for row, length in pairs], np.float32),
    )


def round_up(number: int, step: int) -> int:
    """The least multiple of `step` that is not below `number`."""
    return -(-number // step) * step


class BatchPlan:
    """Which rows make up every forward of every step.

    Args:
        lengths: input tokens of every row, each >= 1.
        batch_tokens: padded tokens of a forward at most (a longer row stands alone).
        per_step: forwards of a step, over all processes.
        seed: of the shuffles.
    """

    def __init__(self, lengths: Sequence[int], *, batch_tokens: int, per_step: int, seed: int) -> None:
        self.lengths = np.asarray(lengths)
        self.batch_tokens, self.per_step, self.seed = batch_tokens, per_step, seed
        self.cached: tuple[int, list[list[int]]] = (-1, [])
        self.steps_per_epoch = -(-len(self.epoch(0)) // per_step)

    def step(self, step: int) -> list[list[int]]:
        """Row indices of each of the step's `per_step` forwards."""
        epoch, within = divmod(step, self.steps_per_epoch)
        groups = self.epoch(epoch)
        first = within * self.per_step
        # the last step of an epoch is filled up from its beginning
        return [groups[index % len(groups)] for index in range(first, first + self.per_step)]

    def epoch(self, epoch: int) -> list[list[int]]:
        """All forwards of an epoch: rows shuffled, those of like length put together, forwards shuffled."""
        if self.cached[0] == epoch:
            return self.cached[1]
        generator = np.random.default_rng([self.seed, epoch])
        order = generator.permutation(len(self.lengths))
        groups: list[list[int]] = []
        for start in range(0, len(order), ROWS_PER_WINDOW):
            window = order[start : start + ROWS_PER_WINDOW]
            window = window[np.argsort(self.lengths[window], kind="stable")]
            groups += self.fill(window.tolist())
        groups = [groups[index] for index in generator.permutation(len(groups))]
        self.cached = (epoch, groups)
        return groups

    def fill(self, rows: Sequence[int]) -> list[list[int]]:
        """Cut rows of rising length into forwards."""
        groups: list[list[int]] = []
        for row in rows:
            if groups and (len(groups[-1]) + 1) * self.lengths[row] <= self.batch_tokens:
                groups[-1].append(row)
            else:
                groups.append([row])
        return groups
