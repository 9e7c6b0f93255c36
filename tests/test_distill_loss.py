"""Distillation losses against definitions, finite differences and their written gradient."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from foredraft.kernels import distill_loss_fused, distill_loss_ref
from foredraft.kernels.distill_loss_ref import OUTSIDE, Teacher, distill_loss, map_teacher, token_loss

# (positions, draft vocabulary, kept teacher tokens, target vocabulary); one production size, one odd size
SIZES = {
    "N5-D8192-K32-V49152": (5, 8192, 32, 49152),
    "N7-D53-K5-V61": (7, 53, 5, 61),
    "N3-D9-K9-V9": (3, 9, 9, 9),
}


def make_case(size: str, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Student logits [N, D], teacher logits [N, V], top-k ids [N, K] and the map t2d [V]."""
    num_positions, num_draft, num_kept, num_target = SIZES[size]
    generator = torch.Generator().manual_seed(seed)
    logits_ND = 2.0 * torch.randn(num_positions, num_draft, generator=generator)
    teacher_NV = 3.0 * torch.randn(num_positions, num_target, generator=generator)
    d2t_D = torch.randperm(num_target, generator=generator)[:num_draft].sort().values
    t2d_V = torch.full((num_target,), OUTSIDE)
    t2d_V[d2t_D] = torch.arange(num_draft)
    return logits_ND, teacher_NV, teacher_NV.topk(num_kept).indices, t2d_V


def teacher_of(teacher_NV: torch.Tensor, ids_NK: torch.Tensor, t2d_V: torch.Tensor | None) -> Teacher:
    return map_teacher(ids_NK.int(), teacher_NV.log_softmax(-1).gather(-1, ids_NK), t2d_V)


@pytest.mark.parametrize("size", SIZES)
def test_equals_kl_between_buckets(size: str) -> None:
    logits_ND, teacher_NV, ids_NK, t2d_V = make_case(size)
    teacher = teacher_of(teacher_NV, ids_NK, t2d_V)
    loss_N = distill_loss(logits_ND, teacher)
    q_ND, p_NV = logits_ND.double().softmax(-1), teacher_NV.double().softmax(-1)
    for row in range(len(logits_ND)):
        kept = [int(i) for i in ids_NK[row] if t2d_V[i] != OUTSIDE]
        p = torch.tensor([p_NV[row, i] for i in kept] + [1 - sum(p_NV[row, i] for i in kept)])
        q = torch.tensor([q_ND[row, t2d_V[i]] for i in kept] + [1 - sum(q_ND[row, t2d_V[i]] for i in kept)])
        size_of_tail = logits_ND.shape[-1] - len(kept)
        terms = torch.special.xlogy(p, p) - p * q.clamp(min=1e-300).log()
        expected = terms.sum() if size_of_tail else terms[:-1].sum()
        torch.testing.assert_close(loss_N[row].double(), expected, rtol=1e-5, atol=2e-6)


def test_full_width_teacher_gives_plain_kl() -> None:
    logits_ND, teacher_NV, ids_NK, _ = make_case("N3-D9-K9-V9")
    expected_N = torch.nn.functional.kl_div(
        logits_ND.log_softmax(-1), teacher_NV.log_softmax(-1), log_target=True, reduction="none"
    ).sum(-1)
    torch.testing.assert_close(distill_loss(logits_ND, teacher_of(teacher_NV, ids_NK, None)), expected_N)


@pytest.mark.parametrize("size", SIZES)
def test_gradient_is_the_written_one(size: str) -> None:
    logits_ND, teacher_NV, ids_NK, t2d_V = make_case(size)
    teacher = teacher_of(teacher_NV, ids_NK, t2d_V)
    logits_ND.requires_grad_()
    upstream_N = torch.linspace(-1.0, 2.0, len(logits_ND))
    (distill_loss(logits_ND, teacher) * upstream_N).sum().backward()
    q_ND = logits_ND.detach().softmax(-1)
    p_ND, is_kept_ND = torch.zeros_like(q_ND), torch.zeros_like(q_ND, dtype=torch.bool)
    for row, (ids_K, probs_K) in enumerate(zip(teacher.ids_NK, teacher.probs_NK, strict=True)):
        inside_K = ids_K != OUTSIDE
        p_ND[row, ids_K[inside_K]] = probs_K[inside_K]
        is_kept_ND[row, ids_K[inside_K]] = True
    q_tail_N1 = q_ND.masked_fill(is_kept_ND, 0.0).sum(-1, keepdim=True)
    tail_scale_N1 = 1.0 - teacher.tail_N[:, None] / q_tail_N1
    expected_ND = torch.where(is_kept_ND, q_ND - p_ND, q_ND * tail_scale_N1) * upstream_N[:, None]
    torch.testing.assert_close(logits_ND.grad, expected_ND, rtol=1e-4, atol=1e-6)


def test_gradient_matches_finite_differences() -> None:
    logits_ND, teacher_NV, ids_NK, t2d_V = make_case("N7-D53-K5-V61")
    teacher = teacher_of(teacher_NV, ids_NK, t2d_V)
    logits_ND.requires_grad_()
    distill_loss(logits_ND, teacher).sum().backward()
    step = 1e-2
    with torch.no_grad():
        for column in range(0, logits_ND.shape[-1], 4):
            shift_ND = torch.zeros_like(logits_ND)
            shift_ND[:, column] = step
            above_N = distill_loss(logits_ND + shift_ND, teacher)
            below_N = distill_loss(logits_ND - shift_ND, teacher)
            slope_N = (above_N - below_N) / (2 * step)
            torch.testing.assert_close(logits_ND.grad[:, column], slope_N, rtol=1e-2, atol=3e-4)


def test_mass_outside_the_draft_vocabulary_goes_to_the_tail() -> None:
    t2d_V = torch.tensor([OUTSIDE, 0, 1, 2])
    teacher = map_teacher(torch.tensor([[0, 1]]), torch.tensor([[0.5, 0.3]]).log(), t2d_V)
    assert teacher.ids_NK.tolist() == [[OUTSIDE, 0]]
    torch.testing.assert_close(teacher.probs_NK, torch.tensor([[0.0, 0.3]]))
    torch.testing.assert_close(teacher.tail_N, torch.tensor([0.7]))
    torch.testing.assert_close(teacher.outside_N, torch.tensor([0.5]))


def test_half_precision_log_never_exceeds_one() -> None:
    logprobs_NK = torch.tensor([[0.0, -8.0]]).half()
    teacher = map_teacher(torch.tensor([[3, 1]]), logprobs_NK, None)
    assert teacher.tail_N.item() >= 0.0
    assert teacher.probs_NK.sum().item() <= 1.0 + 1e-6


@pytest.mark.parametrize("size", SIZES)
def test_fused_equals_reference(size: str) -> None:
    logits_ND, teacher_NV, ids_NK, t2d_V = make_case(size)
    teacher = teacher_of(teacher_NV, ids_NK, t2d_V)
    upstream_N = torch.linspace(-1.0, 2.0, len(logits_ND))
    losses, gradients = [], []
    for implementation in (distill_loss_ref, distill_loss_fused):
        leaf_ND = logits_ND.clone().requires_grad_()
        loss_N = implementation.distill_loss(leaf_ND, teacher)
        (loss_N * upstream_N).sum().backward()
        losses.append(loss_N.detach())
        gradients.append(leaf_ND.grad)
    # sums of up to 8192 exponentials in another order
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("distill_loss", [distill_loss_ref.distill_loss, distill_loss_fused.distill_loss])
@pytest.mark.parametrize("scale", [1.0, 80.0], ids=["plain", "saturated"])
def test_finite_in_bfloat16_and_saturated(scale: float, distill_loss: Callable[..., torch.Tensor]) -> None:
    logits_ND, teacher_NV, ids_NK, t2d_V = make_case("N5-D8192-K32-V49152")
    logits_ND = (scale * logits_ND).bfloat16().requires_grad_()
    loss_N = distill_loss(logits_ND, teacher_of(scale * teacher_NV, ids_NK, t2d_V))
    loss_N.sum().backward()
    assert loss_N.dtype == torch.float32
    assert torch.isfinite(loss_N).all() and (loss_N > -1e-5).all()
    assert torch.isfinite(logits_ND.grad).all()


def test_zero_where_student_equals_teacher() -> None:
    _, teacher_NV, ids_NK, _ = make_case("N7-D53-K5-V61")
    loss_N = distill_loss(teacher_NV, teacher_of(teacher_NV, ids_NK, None))
    torch.testing.assert_close(loss_N, torch.zeros_like(loss_N), rtol=0.0, atol=2e-6)


def test_token_loss_skips_tokens_outside() -> None:
    logits_ND = torch.randn(3, 5)
    loss_N = token_loss(logits_ND, torch.tensor([2, OUTSIDE, 0]))
    assert loss_N[1] == 0.0
    torch.testing.assert_close(loss_N[0], -logits_ND.log_softmax(-1)[0, 2])
