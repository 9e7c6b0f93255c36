"""The walk down a block: reference against a search by hand, Triton against the reference."""

from __future__ import annotations

import random

import pytest
import torch

from foredraft.kernels import dispatch, verify_walk_ref, verify_walk_triton
from foredraft.kernels.verify_walk_ref import NO_GUESS, PADDING, ROOT

pytestmark = pytest.mark.usefixtures("poisoned_empty")

SHAPES = [
    pytest.param(1, 7, id="one-request-default-bucket"),
    pytest.param(3, 0, id="no-guesses"),
    pytest.param(2, 1, id="one-guess"),
    pytest.param(5, 13, id="odd"),
    pytest.param(2, 256, id="largest-block"),
]


def random_blocks(num_sequences: int, num_guesses: int, seed: int = 0) -> list[torch.Tensor]:
    """Blocks of random trees, some guesses of padding at their ends, and choices that follow them far."""
    generator = random.Random(seed)
    tokens, parents, chosen = [], [], []
    for _ in range(num_sequences):
        size = generator.randint(num_guesses // 2, num_guesses)
        ups = [max(ROOT, index - generator.choice((1, 1, 1, 2, 5))) for index in range(size)]
        ids = [3 * index + 7 for index in range(size)]
        picks = []
        for node in range(-1, num_guesses):
            children = [index for index, up in enumerate(ups) if up == node]
            picks.append(
                ids[generator.choice(children)] if children and generator.random() < 0.95 else 2**31 - 1
            )
        tokens.append(ids + [0] * (num_guesses - size))
        parents.append(ups + [PADDING] * (num_guesses - size))
        chosen.append(picks)
    shape = (num_sequences, num_guesses)
    return [
        torch.tensor(tokens).view(shape).long(),
        torch.tensor(parents).view(shape).long(),
        torch.tensor(chosen),
    ]


@pytest.mark.parametrize(("num_sequences", "num_guesses"), SHAPES)
def test_triton_equals_the_reference(num_sequences: int, num_guesses: int, kernel_device: str) -> None:
    for seed in range(4):
        blocks = random_blocks(num_sequences, num_guesses, seed)
        expected = verify_walk_ref.verify_walk(*blocks)
        found = verify_walk_triton.verify_walk(*(tensor.to(kernel_device) for tensor in blocks))
        for name in expected._fields:
            assert torch.equal(getattr(found, name).cpu(), getattr(expected, name)), name


@pytest.mark.parametrize("implementation", ["reference", "triton"])
def test_walks_by_hand(implementation: str, kernel_device: str) -> None:
    """A tree 0 -> (1, 2), 2 -> 3; another root child 4; the last place is padding."""
    tokens = [10, 11, 12, 13, 14, 0]
    parents = [ROOT, 0, 0, 2, ROOT, PADDING]
    cases = {
        "all of a path": ([10, 12, 0, 13, 99, 0, 0], [0, 2, 3], 99),
        "the second root child": ([14, 0, 0, 0, 0, 77, 0], [4], 77),
        "nothing": ([55, 11, 0, 13, 99, 0, 0], [], 55),
        "a token that is guessed elsewhere": ([11, 0, 0, 0, 0, 0, 0], [], 11),
        "the token of padding": ([0, 0, 0, 0, 0, 0, 0], [], 0),
    }
    with dispatch.forcing(implementation):
        walked = dispatch.verify_walk(
            torch.tensor([tokens] * len(cases), device=kernel_device),
            torch.tensor([parents] * len(cases), device=kernel_device),
            torch.tensor([chosen for chosen, _, _ in cases.values()], device=kernel_device),
        )
    for row, (name, (_, path, bonus)) in enumerate(cases.items()):
        assert walked.num_accepted_S[row] == len(path), name
        assert walked.path_SN[row].tolist() == path + [NO_GUESS] * (len(tokens) - len(path)), name
        assert walked.bonus_S[row] == bonus, name


@pytest.mark.parametrize("implementation", ["reference", "triton"])
def test_unfit_inputs_are_refused(implementation: str, kernel_device: str) -> None:
    tokens, parents, chosen = (tensor.to(kernel_device) for tensor in random_blocks(2, 6))
    with dispatch.forcing(implementation):
        with pytest.raises(ValueError, match="contiguous"):
            dispatch.verify_walk(tokens.t().contiguous().t(), parents, chosen)
        with pytest.raises(ValueError, match="int64"):
            dispatch.verify_walk(tokens.int(), parents, chosen)
        with pytest.raises(ValueError, match=r"expected .*'chosen_SM': \(2, 7\)"):
            dispatch.verify_walk(tokens, parents, chosen[:, :6].contiguous())
