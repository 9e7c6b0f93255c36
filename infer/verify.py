"""Verification of a block: a comparison of token ids, at every temperature.

The target chose a token after the root and after every guess; the walk follows guesses while they equal the
choice. What it settles is what plain decoding would have chosen one by one, so no guess can change the text.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from foredraft.infer.tree import Block
from foredraft.kernels import dispatch
from foredraft.kernels.host_copy import to_device


class Verdict(NamedTuple):
    """Outcome of a block of n guesses."""

    accepted: list[int]  # indices of the accepted guesses, from the root down
    settled: list[int]  # their tokens and the bonus token


def walk(block: Block, chosen_M: torch.Tensor) -> Verdict:
    """Follow the guesses that equal the target's choices; one copy from the device.

    Args:
        block: n guesses.
        chosen_M: int64 [n + 1], the target's choice after the root, then after every guess.
    """
    guesses_2N = to_device(np.array([block.tokens, block.parents], np.int64), chosen_M.device)
    walked = dispatch.verify_walk(guesses_2N[:1], guesses_2N[1:], chosen_M[None])
    num_accepted, bonus, *path = torch.cat(
        [walked.num_accepted_S, walked.bonus_S, walked.path_SN[0]]
    ).tolist()
    accepted = path[:num_accepted]
    return Verdict(accepted, [*(block.tokens[index] for index in accepted), bonus])


def depths(block: Block) -> list[int]:
    """Depth of every guess; 1 below the root."""
    result: list[int] = []
    for parent in block.parents:
        result.append(1 if parent < 0 else result[parent] + 1)
    return result


def paths(block: Block) -> list[list[int]]:
    """Tokens of every guess's path from below the root, its own last."""
    result: list[list[int]] = []
    for parent, token in zip(block.parents, block.tokens, strict=True):
        result.append([*(result[parent] if parent >= 0 else []), token])
    return result


def prune(block: Block, max_depth: int, vocab_size: int, max_nodes: int) -> Block:
    """The part of a block that may be verified: known tokens, not too deep, at most `max_nodes`.

    A guess that is left out takes its descendants with it.
    """
    place = {-1: -1}
    kept: list[int] = []
    for index, (depth, token, parent) in enumerate(
        zip(depths(block), block.tokens, block.parents, strict=True)
    ):
        if depth <= max_depth and 0 <= token < vocab_size and parent in place and len(kept) < max_nodes:
            place[index] = len(kept)
            kept.append(index)
    return Block(
        nodes=[block.nodes[i] for i in kept],
        tokens=[block.tokens[i] for i in kept],
        parents=[place[block.parents[i]] for i in kept],
        path_probs=[block.path_probs[i] for i in kept],
    )
