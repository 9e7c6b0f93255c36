"""Distillation losses: every implementation against the losses written out densely in float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import pytest
import torch

from foredraft.kernels import (
    dispatch,
    distill_loss_chunks,
    distill_loss_fast,
    distill_loss_ref,
    distill_loss_triton,
)
from foredraft.kernels.distill_loss_ref import LOSSES, OUTSIDE, TAIL_FLOOR, Head, Teacher, map_teacher

Loss = Callable[..., torch.Tensor]
pytestmark = pytest.mark.usefixtures("poisoned_empty")


@dataclass(frozen=True)
class Case:
    """Sizes, and what a head may have."""

    positions: int
    hidden: int
    draft: int
    kept: int
    target: int
    has_bias: bool = False
    scale: float = 1.0
    softcap: float | None = None


CASES = {
    "N5-H64-D8192-K32-V49152": Case(5, 64, 8192, 32, 49152),
    "N7-H19-D53-K5-V61-bias": Case(7, 19, 53, 5, 61, has_bias=True),
    "N7-H19-D53-K5-V53-scale-softcap": Case(7, 19, 53, 5, 53, has_bias=True, scale=0.5, softcap=3.0),
    "N3-H8-D9-K9-V9-no-tail": Case(3, 8, 9, 9, 9),
    "N4-H8-D11-K0-V23-tokens-only": Case(4, 8, 11, 0, 23),
}
ALL = dict(zip(LOSSES, (1.0, 0.5, 2.0, 0.25, 0.75), strict=True))
GRADIENTS = ("hidden", "weight", "bias")
# the same operations, in float32 and in other orders: sums over up to 8192 columns
CLOSE = {"rtol": 2e-4, "atol": 2e-5}


@dataclass
class Inputs:
    """One call, and what it was made of."""

    hidden_NH: torch.Tensor
    head: Head
    teacher: Teacher
    teacher_NV: torch.Tensor  # float64 logits
    t2d_V: torch.Tensor
    topk_NK: torch.Tensor  # target ids
    token_N: torch.Tensor  # target ids

    def to(self, dtype: torch.dtype) -> Inputs:
        bias_D = None if self.head.bias_D is None else self.head.bias_D.to(dtype)
        head = self.head._replace(weight_DH=self.head.weight_DH.to(dtype), bias_D=bias_D)
        return replace(self, hidden_NH=self.hidden_NH.to(dtype), head=head)


def make(name: str, seed: int = 0, spread: float = 1.0) -> Inputs:
    """A student near its teacher nowhere; the logged token is kept, not kept, or outside by turns."""
    case = CASES[name]
    generator = torch.Generator().manual_seed(seed)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    hidden_NH = randn(case.positions, case.hidden)
    weight_DH = 2.0 * spread * randn(case.draft, case.hidden) / case.hidden**0.5
    head = Head(weight_DH, randn(case.draft) if case.has_bias else None, case.scale, case.softcap)
    teacher_NV = 3.0 * spread * randn(case.positions, case.target).double()
    d2t_D = torch.randperm(case.target, generator=generator)[: case.draft].sort().values
    t2d_V = torch.full((case.target,), OUTSIDE)
    t2d_V[d2t_D] = torch.arange(case.draft)
    ranked_NV = teacher_NV.argsort(-1, descending=True)
    places_N = torch.tensor([(0, case.target // 2, case.kept)[row % 3] for row in range(case.positions)])
    token_N = ranked_NV.gather(-1, places_N.clamp(max=case.target - 1)[:, None])[:, 0]
    topk_NK = ranked_NV[:, : case.kept].contiguous()
    logprobs_NK = teacher_NV.log_softmax(-1).gather(-1, topk_NK)
    teacher = map_teacher(topk_NK.int(), logprobs_NK.float(), token_N, t2d_V)
    return Inputs(hidden_NH, head, teacher, teacher_NV, t2d_V, topk_NK, token_N)


def dense(inputs: Inputs, losses: dict[str, float]) -> torch.Tensor:
    """The definitions, row by row over lists of probabilities, in the type of the hidden states."""
    head = inputs.head
    logits_ND = head.scale * (inputs.hidden_NH @ head.weight_DH.T)
    if head.bias_D is not None:
        logits_ND = logits_ND + head.scale * head.bias_D
    if head.softcap is not None:
        logits_ND = head.softcap * (logits_ND / head.softcap).tanh()
    log_q_ND, p_NV = logits_ND.log_softmax(-1), inputs.teacher_NV.softmax(-1)
    totals = []
    for row, log_q_D in enumerate(log_q_ND):
        targets = inputs.topk_NK[row].tolist()
        pairs = [(target, int(inputs.t2d_V[target])) for target in targets]
        kept = [(p_NV[row, target], log_q_D[draft]) for target, draft in pairs if draft != OUTSIDE]
        outside = p_NV[row, [target for target, draft in pairs if draft == OUTSIDE]].sum()
        tail = 1.0 - sum((p for p, _ in kept), torch.zeros(()).double())
        chosen = {draft for _, draft in pairs}
        rest = [draft for draft in range(len(log_q_D)) if draft not in chosen]
        q_tail = log_q_D[rest].exp().sum()
        token = int(inputs.t2d_V[inputs.token_N[row]])
        both = [*kept, *([(tail, q_tail.log())] if rest else [])]
        floored = [*kept, *([(tail.clamp(min=TAIL_FLOOR), q_tail.log())] if rest else [])]
        shared = [torch.minimum(p, log_q.exp()) for p, log_q in kept]
        reachable = (tail - outside).clamp(min=0.0)
        overlap = sum(shared, torch.minimum(reachable, q_tail))
        at_least = sum(shared, torch.minimum(reachable.clamp(min=TAIL_FLOOR), q_tail))
        found = {
            "forward_kl": sum(p * (p.log() - log_q) for p, log_q in both if p > 0.0),
            "reverse_kl": sum(log_q.exp() * (log_q - p.log()) for p, log_q in floored),
            "total_variation": 1.0 - overlap,
            "lk": -at_least.log(),
            "cross_entropy": 0.0 if token == OUTSIDE else -log_q_D[token],
        }
        totals.append(
            sum((weight * found[name] for name, weight in losses.items()), torch.zeros(()).double())
        )
    return torch.stack(totals)


def run(loss: Loss, inputs: Inputs, losses: dict[str, float]) -> dict[str, torch.Tensor]:
    """The loss, and by name the gradients under an upstream gradient that is not one."""
    bias_D = inputs.head.bias_D
    tensors = {"hidden": inputs.hidden_NH, "weight": inputs.head.weight_DH}
    tensors |= {} if bias_D is None else {"bias": bias_D}
    leaves = {name: tensor.detach().clone().requires_grad_() for name, tensor in tensors.items()}
    head = inputs.head._replace(weight_DH=leaves["weight"], bias_D=leaves.get("bias"))
    leaf = replace(inputs, hidden_NH=leaves["hidden"], head=head)
    if loss is dense:
        loss_N = dense(leaf, losses)
    else:
        loss_N = loss(leaf.hidden_NH, leaf.head, leaf.teacher, losses)
        assert loss_N.dtype == torch.float32
    upstream_N = torch.linspace(-1.0, 2.0, len(loss_N)).to(loss_N)
    (loss_N * upstream_N).sum().backward()
    return {"loss": loss_N.detach()} | {name: leaf.grad for name, leaf in leaves.items()}


def assert_close(
    found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], *, rtol: float, atol: float
) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        scale = max(1.0, float(tensor.abs().max()))
        torch.testing.assert_close(
            found[name].float(),
            tensor.float(),
            rtol=rtol,
            atol=atol * scale,
            msg=lambda text, name=name: f"{name}: {text}",
        )


@pytest.fixture(params=["reference", "fast", "fast-chunks", "triton", "triton-chunks"])
def loss(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, kernel_device: str) -> Loss:
    """The definition; the CPU's way and Triton in one chunk; both in chunks of two rows, of small blocks."""
    name = request.param
    if name.endswith("chunks"):
        monkeypatch.setattr(distill_loss_chunks, "_chunks", lambda n, _: chunks_of_two(n))
        monkeypatch.setattr(distill_loss_fast, "MAX_BLOCK", 1)
        monkeypatch.setattr(distill_loss_triton, "MAX_BLOCK", 1024)
    if name.startswith("triton"):
        return partial(on_device, kernel_device)
    return distill_loss_ref.distill_loss if name == "reference" else distill_loss_fast.distill_loss


def on_device(
    device: str, hidden_NH: torch.Tensor, head: Head, teacher: Teacher, losses: dict[str, float]
) -> torch.Tensor:
    """Triton on a GPU where there is one; autograd follows the copies."""
    moved = [value.to(device) if isinstance(value, torch.Tensor) else value for value in head]
    teacher = Teacher(*(tensor.to(device) for tensor in teacher))
    return distill_loss_triton.distill_loss(hidden_NH.to(device), Head(*moved), teacher, losses).cpu()


def chunks_of_two(num_rows: int) -> list[slice]:
    return [slice(start, min(start + 2, num_rows)) for start in range(0, num_rows, 2)]


@pytest.mark.parametrize("name", CASES)
def test_equals_the_dense_definition(name: str, loss: Loss) -> None:
    inputs = make(name)
    each = [{one: 1.0} for one in LOSSES]
    # without kept tokens nothing is known of the teacher but its token
    for losses in [*each, ALL] if CASES[name].kept else each[-1:]:
        expected = run(dense, inputs.to(torch.float64), losses)
        assert_close(run(loss, inputs, losses), expected, **CLOSE)


def test_a_teacher_of_all_tokens_gives_the_whole_divergences(loss: Loss) -> None:
    inputs = make("N3-H8-D9-K9-V9-no-tail").to(torch.float64)
    log_q = inputs.head.logits(inputs.hidden_NH).log_softmax(-1)
    log_p = inputs.teacher_NV.log_softmax(-1)
    expected = {
        "forward_kl": (log_p.exp() * (log_p - log_q)).sum(-1),
        "reverse_kl": (log_q.exp() * (log_q - log_p)).sum(-1),
        "total_variation": 0.5 * (log_p.exp() - log_q.exp()).abs().sum(-1),
        "lk": -torch.minimum(log_p.exp(), log_q.exp()).sum(-1).log(),
        "cross_entropy": -log_q.gather(-1, inputs.token_N[:, None])[:, 0],
    }
    single = inputs.to(torch.float32)
    for name, expected_N in expected.items():
        found_N = loss(single.hidden_NH, single.head, single.teacher, {name: 1.0})
        torch.testing.assert_close(found_N.double(), expected_N, rtol=1e-5, atol=1e-5, msg=name)


def test_coarse_losses_bound_the_whole_ones() -> None:
    """With the draft vocabulary the target's, more kept tokens bring every loss nearer to the whole one."""
    inputs = make("N7-H19-D53-K5-V53-scale-softcap")
    logprobs_NV, ids_NV = inputs.teacher_NV.log_softmax(-1).float().sort(-1, descending=True)
    before = torch.zeros(7)
    for name in ("forward_kl", "reverse_kl", "total_variation", "lk"):
        for num_kept in (1, 5, 20, 53):
            kept_NK, logprobs_NK = ids_NV[:, :num_kept].contiguous(), logprobs_NV[:, :num_kept]
            teacher = map_teacher(kept_NK, logprobs_NK, inputs.token_N, None)
            now = distill_loss_ref.distill_loss(inputs.hidden_NH, inputs.head, teacher, {name: 1.0})
            assert (now >= before - 1e-5).all(), (name, num_kept)
            before = now
        before = torch.zeros(7)


def test_equal_distributions_have_no_loss_and_no_gradient(loss: Loss) -> None:
    """Ties everywhere: each min(p, q) is of two equal numbers."""
    inputs = make("N7-H19-D53-K5-V61-bias")
    log_q_ND = inputs.head.logits(inputs.hidden_NH).log_softmax(-1)
    logprobs_NK, ids_NK = log_q_ND.topk(5)
    teacher = map_teacher(ids_NK, logprobs_NK, ids_NK[:, 0], None)
    for name in ("forward_kl", "reverse_kl", "total_variation", "lk"):
        found = run(loss, replace(inputs, teacher=teacher), {name: 1.0})
        torch.testing.assert_close(found["loss"], torch.zeros(7), rtol=0.0, atol=2e-6, msg=name)
        if name in ("forward_kl", "reverse_kl"):
            for gradient in GRADIENTS:
                assert found[gradient].abs().max() < 1e-5, (name, gradient)


def test_equal_logits_share_the_mass_evenly(loss: Loss) -> None:
    """A head of zeros: q is uniform, whatever the hidden states."""
    inputs = make("N7-H19-D53-K5-V53-scale-softcap")
    zeros = Head(torch.zeros(53, 19), torch.zeros(53), softcap=3.0)
    found_N = loss(inputs.hidden_NH, zeros, inputs.teacher, {"cross_entropy": 1.0})
    torch.testing.assert_close(found_N, torch.full((7,), 53.0).log())


def test_mass_outside_the_draft_vocabulary_is_counted() -> None:
    t2d_V = torch.tensor([OUTSIDE, 0, 1, 2])
    teacher = map_teacher(torch.tensor([[0, 1]]), torch.tensor([[0.5, 0.3]]).log(), torch.tensor([0]), t2d_V)
    assert teacher.ids_NK.tolist() == [[OUTSIDE, 0]]
    assert teacher.token_N.tolist() == [OUTSIDE]
    torch.testing.assert_close(teacher.probs_NK, torch.tensor([[0.0, 0.3]]))
    torch.testing.assert_close(teacher.tail_N, torch.tensor([0.7]))
    torch.testing.assert_close(teacher.outside_N, torch.tensor([0.5]))
    # q = 0.3, 0.35, 0.35: as near as the draft vocabulary allows, so only what is outside is lost
    head = Head(torch.tensor([[0.3], [0.35], [0.35]]).log())
    hidden_11 = torch.ones(1, 1)
    expected = {"forward_kl": 0.0, "reverse_kl": 0.0, "total_variation": 0.5, "cross_entropy": 0.0}
    for name, value in expected.items():
        found_N = distill_loss_ref.distill_loss(hidden_11, head, teacher, {name: 1.0})
        torch.testing.assert_close(found_N, torch.tensor([value]), rtol=0.0, atol=1e-6, msg=name)


def test_a_log_of_tokens_counts_tokens_outside() -> None:
    t2d_V = torch.tensor([OUTSIDE, 0, 1])
    nothing_N0 = torch.empty(3, 0)
    teacher = map_teacher(nothing_N0.long(), nothing_N0, torch.tensor([2, 0, 1]), t2d_V)
    assert teacher.outside_N.tolist() == [0.0, 1.0, 0.0]
    assert teacher.tail_N.tolist() == [1.0, 1.0, 1.0]


def test_half_precision_log_never_exceeds_one() -> None:
    teacher = map_teacher(torch.tensor([[3, 1]]), torch.tensor([[0.0, -8.0]]).half(), torch.tensor([3]), None)
    assert teacher.tail_N.item() >= 0.0
    assert teacher.probs_NK.sum().item() <= 1.0 + 1e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_saturated_logits_stay_finite(dtype: torch.dtype, loss: Loss) -> None:
    inputs = make("N5-H64-D8192-K32-V49152", spread=80.0).to(dtype)
    for name in LOSSES:
        for key, tensor in run(loss, inputs, {name: 1.0}).items():
            assert torch.isfinite(tensor).all(), (name, key)


def test_far_tokens_and_a_far_tail_keep_their_gradients(loss: Loss) -> None:
    """One logit far above all others, of a token that the teacher does not want."""
    topk_NK, logprobs_NK = torch.tensor([[0, 1, 2]]), torch.tensor([[1e-44, 0.5, 0.25]]).log()
    teacher = map_teacher(topk_NK, logprobs_NK, torch.tensor([4]), None)
    hidden_11 = torch.ones(1, 1, requires_grad=True)
    # exp(-200) underflows; the least p that lk tells from 0 is exp(-87)
    for name, far in {"forward_kl": 200.0, "cross_entropy": 200.0, "lk": 80.0}.items():
        weight_DH = torch.zeros(6, 1)
        weight_DH[0] = far
        loss_N = loss(hidden_11, Head(weight_DH), teacher, {name: 1.0})
        (slope_11,) = torch.autograd.grad(loss_N.sum(), hidden_11)
        assert far - 2.0 < loss_N.item() <= far, name
        assert slope_11.item() == pytest.approx(far, rel=1e-3), name


def test_tokens_ruled_out_by_the_bias(loss: Loss) -> None:
    """Columns of -inf, in the first row the whole tail: no loss or gradient becomes NaN."""
    bias_D = torch.zeros(7)
    bias_D[3:] = -torch.inf
    ids_NK = torch.tensor([[0, 1, 2], [2, 4, 0]])
    teacher = map_teacher(ids_NK, torch.full((2, 3), 0.3).log(), torch.tensor([1, 1]), None)
    inputs = replace(make("N3-H8-D9-K9-V9-no-tail"), hidden_NH=torch.randn(2, 4), teacher=teacher)
    inputs = replace(inputs, head=Head(torch.randn(7, 4), bias_D))
    for name in ("forward_kl", "cross_entropy", "total_variation"):
        found = run(loss, inputs, {name: 1.0})
        assert not any(tensor.isnan().any() for tensor in found.values()), name
        assert not found["weight"][5:].any(), name


@pytest.mark.parametrize("limit", [1, 2 * 53, 53 * 7, 1 << 26], ids=["one-row", "two-rows", "exact", "all"])
def test_chunks_do_not_change_the_result(limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = make("N7-H19-D53-K5-V61-bias")
    expected = run(distill_loss_ref.distill_loss, inputs, ALL)
    monkeypatch.setattr(distill_loss_chunks, "MAX_CHUNK", limit)
    assert_close(run(distill_loss_fast.distill_loss, inputs, ALL), expected, rtol=1e-5, atol=1e-6)


def test_no_more_logits_than_a_chunk_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs, sizes = make("N7-H19-D53-K5-V61-bias"), []

    def linear(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        sizes.append(len(hidden) * len(weight))
        return torch.nn.functional.linear(hidden, weight, bias)

    monkeypatch.setattr(distill_loss_chunks, "linear", linear)
    monkeypatch.setattr(distill_loss_chunks, "MAX_CHUNK", 3 * 53 + 52)
    run(distill_loss_fast.distill_loss, inputs, ALL)
    assert sizes == 2 * [3 * 53, 3 * 53, 53]


def test_bfloat16_rounds_logits_and_gradients(loss: Loss) -> None:
    """The head in bfloat16 has 8 bits of a logit up to 8: an error of 2^-6 in it, and in log q."""
    inputs = make("N7-H19-D53-K5-V61-bias").to(torch.bfloat16)
    expected = run(dense, inputs.to(torch.float64), ALL)
    found = run(loss, inputs, ALL)
    assert {found[name].dtype for name in GRADIENTS} == {torch.bfloat16}
    assert_close(found, expected, rtol=4e-2, atol=2e-2)


@pytest.mark.parametrize("frozen", GRADIENTS)
def test_what_is_frozen_gets_no_gradient(frozen: str) -> None:
    inputs = make("N7-H19-D53-K5-V61-bias")
    leaves = [inputs.hidden_NH, inputs.head.weight_DH, inputs.head.bias_D]
    for name, leaf in zip(GRADIENTS, leaves, strict=True):
        leaf.requires_grad_(name != frozen)
    distill_loss_fast.distill_loss(leaves[0], Head(*leaves[1:]), inputs.teacher, ALL).sum().backward()
    assert [name for name, leaf in zip(GRADIENTS, leaves, strict=True) if leaf.grad is None] == [frozen]


def test_a_second_backward_pass_is_refused() -> None:
    inputs = make("N7-H19-D53-K5-V61-bias")
    inputs.hidden_NH.requires_grad_()
    total = distill_loss_fast.distill_loss(inputs.hidden_NH, inputs.head, inputs.teacher, ALL).sum()
    total.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        total.backward()


def test_unfit_inputs_are_refused(loss: Loss) -> None:
    inputs = make("N7-H19-D53-K5-V61-bias")
    hidden_NH, head, teacher = inputs.hidden_NH, inputs.head, inputs.teacher
    turned = teacher._replace(ids_NK=teacher.ids_NK.t().contiguous().t())
    bad_head = head._replace(weight_DH=head.weight_DH.t().contiguous().t())
    for message, arguments in {
        "losses must be some of forward_kl, .*; got kl": (hidden_NH, head, teacher, {"kl": 1.0}),
        "hidden_NH must be contiguous": (hidden_NH.t().contiguous().t(), head, teacher, ALL),
        "weight_DH must be contiguous": (hidden_NH, bad_head, teacher, ALL),
        "teacher.ids_NK must be contiguous": (hidden_NH, head, turned, ALL),
        "weight_DH must be torch.bfloat16": (hidden_NH.bfloat16(), head, teacher, ALL),
        r"expected a weight \[D, 18\], got \[53, 19\]": (hidden_NH[:, :18].contiguous(), head, teacher, ALL),
        r"expected a bias \[53\], got \[5\]": (hidden_NH, head._replace(bias_D=torch.ones(5)), teacher, ALL),
        "expected a teacher of 6 positions, got 7": (hidden_NH[:6], head, teacher, ALL),
    }.items():
        with pytest.raises(ValueError, match=message):
            loss(*arguments)


def test_the_cpu_takes_the_fast_way(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = make("N3-H8-D9-K9-V9-no-tail")
    monkeypatch.setattr(dispatch, "_forced", "")
    before = dispatch.calls["distill_loss", "fast"]
    dispatch.distill_loss(inputs.hidden_NH, inputs.head, inputs.teacher, ALL)
    assert dispatch.calls["distill_loss", "fast"] == before + 1
