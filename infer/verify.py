"""Verification of a block: a comparison of token ids, at every temperature.

The target chose a token after the root and after every guess; the walk follows guesses while they equal the
choice. What it settles is what plain decoding would have chosen one by one, so no guess can change the text.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from foredraft.infer.params import Verification
from foredraft.infer.tree import Block
from foredraft.kernels import dispatch
from foredraft.kernels.draws import Draw
from foredraft.kernels.host_copy import to_device
from foredraft.kernels.rejection_verify_ref import NO_GUESS, DraftLaw


class Verdict(NamedTuple):
    """Outcome of a block of n guesses."""

    accepted: list[int]  # indices of the accepted guesses, from the root down
    settled: list[int]  # their tokens and the bonus token


def settle(
    block: Block, logits_MV: torch.Tensor, draws: Sequence[Draw], verification: Verification = "coupled"
) -> Verdict:
    """What the target says of a block.

    Args:
        block: n guesses; a chain with rejection.
        logits_MV: raw logits float32 [n + 1, V] after the root, then after every guess.
        draws: how the token of each place is drawn.
        verification: follow the target's own tokens, or accept each guess by its probabilities. Without
            guesses both are plain decoding.
    """
    if verification == "rejection" and block.tokens:
        return reject(block, logits_MV, draws)
    return walk(block, dispatch.coupled_sample(logits_MV, draws))


def reject(block: Block, logits_MV: torch.Tensor, draws: Sequence[Draw]) -> Verdict:
    """Accept the guesses of a chain one by one; one copy from the device.

    Guesses without laws (looked up in the text) are taken as drawn from one-hot laws. Arguments: `settle`.
    """
    device = logits_MV.device
    laws = block.laws or [([token], [1.0]) for token in block.tokens]
    width = max(len(ids) for ids, _ in laws)
    ids_1Km = np.array([[ids + [NO_GUESS] * (width - len(ids)) for ids, _ in laws]], np.int64)
    probs_1Km = np.array([[probs + [0.0] * (width - len(probs)) for _, probs in laws]], np.float32)
    tokens_1K = to_device(np.array([block.tokens], np.int64), device)
    law = DraftLaw(to_device(probs_1Km, device), to_device(ids_1Km, device))
    settled = dispatch.rejection_verify(logits_MV[None], tokens_1K, law, draws)
    num_accepted, bonus = torch.cat([settled.num_accepted_S, settled.bonus_S]).tolist()
    return Verdict(list(range(num_accepted)), [*block.tokens[:num_accepted], bonus])


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

    A guess that is left out takes its descendants with it. One whose law has unknown tokens is left out
    whichever token was drawn: to look at the token would change the law of what is settled.
    """
    place = {-1: -1}
    kept: list[int] = []
    laws = block.laws or [([token], [1.0]) for token in block.tokens]
    for index, (depth, token, parent, (ids, _)) in enumerate(
        zip(depths(block), block.tokens, block.parents, laws, strict=True)
    ):
        is_known = 0 <= token < vocab_size and max(ids) < vocab_size
        if depth <= max_depth and is_known and parent in place and len(kept) < max_nodes:
            place[index] = len(kept)
            kept.append(index)
    return Block(
        nodes=[block.nodes[i] for i in kept],
        tokens=[block.tokens[i] for i in kept],
        parents=[place[block.parents[i]] for i in kept],
        path_probs=[block.path_probs[i] for i in kept],
        laws=[block.laws[i] for i in kept] if block.laws else [],
    )
