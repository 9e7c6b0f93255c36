"""Coupled verification of blocks: follow the guesses that equal what the target chose, in plain torch.

    current = root;  while some child of current has the token chosen after current: current = that child

The accepted guesses are the nodes that the walk visits, the bonus token is the choice after the last of them.
A block is a tree: chosen[0] is the choice after the root, chosen[i + 1] the one after guess i.

Shape letters: S sequences, N guesses of a block at most, M = N + 1.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

NO_GUESS = -1  # in a path: there is no further guess
ROOT = -1  # as a parent
PADDING = -2  # as a parent: no guess at all


class Walked(NamedTuple):
    """What a verification settled: the accepted guesses' tokens in order, then the bonus token."""

    num_accepted_S: torch.Tensor  # int64
    path_SN: torch.Tensor  # int64, indices of the accepted guesses, NO_GUESS beyond
    bonus_S: torch.Tensor  # int64


def verify_walk(tokens_SN: torch.Tensor, parents_SN: torch.Tensor, chosen_SM: torch.Tensor) -> Walked:
    """Walk down every block.

    Args:
        tokens_SN: int64, guessed tokens; the children of one parent differ.
        parents_SN: int64, index of each guess's parent, which comes before it; ROOT, or PADDING.
        chosen_SM: int64, the target's tokens after the root and after every guess.

    Raises:
        ValueError: shapes or types that do not fit.
    """
    check_blocks(tokens_SN, parents_SN, chosen_SM)
    num_accepted, paths, bonus = [], [], []
    for tokens, parents, chosen in zip(
        tokens_SN.tolist(), parents_SN.tolist(), chosen_SM.tolist(), strict=True
    ):
        child_of = {
            place: index for index, place in reversed(list(enumerate(zip(parents, tokens, strict=True))))
        }
        path: list[int] = []
        current = ROOT
        while (current, chosen[current + 1]) in child_of:
            current = child_of[current, chosen[current + 1]]
            path.append(current)
        num_accepted.append(len(path))
        bonus.append(chosen[current + 1])
        paths.append(path + [NO_GUESS] * (len(tokens) - len(path)))
    return Walked(
        tokens_SN.new_tensor(num_accepted),
        tokens_SN.new_tensor(paths).view_as(tokens_SN),
        tokens_SN.new_tensor(bonus),
    )


def check_blocks(tokens_SN: torch.Tensor, parents_SN: torch.Tensor, chosen_SM: torch.Tensor) -> None:
    """Raise ValueError unless the three fit together."""
    num_sequences, num_guesses = tokens_SN.shape
    expected = {"parents_SN": (num_sequences, num_guesses), "chosen_SM": (num_sequences, num_guesses + 1)}
    found = {"parents_SN": tuple(parents_SN.shape), "chosen_SM": tuple(chosen_SM.shape)}
    if found != expected:
        raise ValueError(f"with tokens_SN {tuple(tokens_SN.shape)} expected {expected}, got {found}")
    for name, tensor in {"tokens_SN": tokens_SN, "parents_SN": parents_SN, "chosen_SM": chosen_SM}.items():
        if tensor.dtype != torch.int64 or not tensor.is_contiguous():
            raise ValueError(
                f"{name} must be contiguous int64, got {tensor.dtype} of strides {tensor.stride()}; "
                "use .contiguous()"
            )
