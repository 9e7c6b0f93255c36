"""Batches of log rows: which rows go together in which step, and their tensors.

The plan is a function of lengths, seed and epoch alone. Every process can work it out, so a step number is
the whole data position, and the number of tokens of a global batch needs no communication.

A *line* is one row of a batch: one document padded to the longest, or, packed, as many as fit. Positions
start at 0 in every document, which is how models of transformers and our own tell documents apart.

Shape letters: B lines, T tokens, N trained positions, K kept teacher tokens.
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

Line = list[int]  # indices of the rows of one line


@dataclass(frozen=True, slots=True)
class Batch:
    """Tensors of one forward. Trained positions are those that predict a response token.

    The last positions may be padding: they point at token 0 and have weight 0.
    """

    ids_BT: torch.Tensor  # int64, padded at the end with 0
    positions_BT: torch.Tensor  # int64, from 0 in every document; padding goes on with the last one
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


def collate(lines: Sequence[Sequence[LogRow]], max_length: int) -> Batch:
    """Tensors of some lines, sequences cut at `max_length`. The last response token is never an input."""
    inputs = [[_input_ids(row, max_length) for row in line] for line in lines]
    width = round_up(max(sum(map(len, line)) for line in inputs), WIDTH_STEP)
    ids_BT = np.zeros((len(lines), width), np.int64)
    positions_BT = np.zeros((len(lines), width), np.int64)
    trained: list[np.ndarray] = []
    for index, (line, documents) in enumerate(zip(lines, inputs, strict=True)):
        start = 0
        for row, ids in zip(line, documents, strict=True):
            ids_BT[index, start : start + len(ids)] = ids
            positions_BT[index, start:] = np.arange(width - start)
            first = index * width + start + row.first_position - 1
            trained.append(np.arange(first, first + trained_length(row, max_length)))
            start += len(ids)
    rows = [row for line in lines for row in line]
    lengths = [len(positions) for positions in trained]
    pairs = list(zip(rows, lengths, strict=True))
    num_positions = round_up(sum(lengths), POSITIONS_STEP)

    def join(arrays: Sequence[np.ndarray], dtype: type) -> torch.Tensor:
        joined: np.ndarray = np.concatenate(arrays).astype(dtype)
        padding = [(0, num_positions - len(joined))] + [(0, 0)] * (joined.ndim - 1)
        return torch.from_numpy(np.pad(joined, padding))

    return Batch(
        torch.from_numpy(ids_BT),
        torch.from_numpy(positions_BT),
        join(trained, np.int64),
        join([np.ones(length) for length in lengths], np.float32),
        join([row.response_ids[:length] for row, length in pairs], np.int64),
        join([row.topk_ids[:length] for row, length in pairs], np.int64),
        join([row.topk_logprobs[:length] for row, length in pairs], np.float32),
    )


def _input_ids(row: LogRow, max_length: int) -> np.ndarray:
    """Prompt and response up to the last token that predicts another."""
    return np.concatenate([row.prompt_ids, row.response_ids[: trained_length(row, max_length) - 1]])


def input_length(row: LogRow, max_length: int) -> int:
    """Input tokens of a row."""
    return row.first_position + trained_length(row, max_length) - 1


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
        line_tokens: tokens of a line that documents are packed into; 0: one document a line.
    """

    def __init__(
        self, lengths: Sequence[int], *, batch_tokens: int, per_step: int, seed: int, line_tokens: int = 0
    ) -> None:
        self.lengths = np.asarray(lengths)
        self.batch_tokens, self.per_step, self.seed = batch_tokens, per_step, seed
        self.line_tokens = line_tokens
        self.cached: tuple[int, list[list[Line]]] = (-1, [])
        self.steps_per_epoch = -(-len(self.epoch(0)) // per_step)

    def step(self, step: int) -> list[list[Line]]:
        """Lines of each of the step's `per_step` forwards."""
        epoch, within = divmod(step, self.steps_per_epoch)
        groups = self.epoch(epoch)
        first = within * self.per_step
        # the last step of an epoch is filled up from its beginning
        return [groups[index % len(groups)] for index in range(first, first + self.per_step)]

    def epoch(self, epoch: int) -> list[list[Line]]:
        """All forwards of an epoch: rows shuffled, those that fit together joined, forwards shuffled."""
        if self.cached[0] == epoch:
            return self.cached[1]
        generator = np.random.default_rng([self.seed, epoch])
        order = generator.permutation(len(self.lengths))
        groups: list[list[Line]] = []
        for start in range(0, len(order), ROWS_PER_WINDOW):
            window = order[start : start + ROWS_PER_WINDOW]
            window = window[np.argsort(self.lengths[window], kind="stable")]
            groups += self.packed(window.tolist()) if self.line_tokens else self.bucketed(window.tolist())
        groups = [groups[index] for index in generator.permutation(len(groups))]
        self.cached = (epoch, groups)
        return groups

    def bucketed(self, rows: Sequence[int]) -> list[list[Line]]:
        """Cut rows of rising length into forwards of one document a line."""
        groups: list[list[Line]] = []
        for row in rows:
            if groups and (len(groups[-1]) + 1) * self.lengths[row] <= self.batch_tokens:
                groups[-1].append([row])
            else:
                groups.append([[row]])
        return groups

    def packed(self, rows: Sequence[int]) -> list[list[Line]]:
        """Fill lines with documents, the longest first, each into the first line with room."""
        lines: list[Line] = []
        room: list[int] = []
        for row in reversed(rows):
            length = int(self.lengths[row])
            place = next((index for index, left in enumerate(room) if left >= length), len(lines))
            if place == len(lines):
                lines.append([])
                room.append(max(self.line_tokens, length))
            lines[place].append(row)
            room[place] -= length
        size = max(1, self.batch_tokens // self.line_tokens)
        return [lines[start : start + size] for start in range(0, len(lines), size)]
