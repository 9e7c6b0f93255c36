"""The distillation loss of `distill_loss_ref.py` with its gradient written out: one pass of exponentials.

    e_j = exp(z_j - max z),  kept sum a = sum_i e_i,  tail sum b = sum of all other e_j,  s = a + b
    L = sum_i p_i (log p_i - log(e_i / s)) + p_o (log p_o - log(b / s))

    dL/dz_i = e_i / s - p_i               for a kept token
    dL/dz_j = e_j (1 / s - p_o / b)       for any other

Saved for the backward pass: e with the kept columns set to 0, whose storage becomes the gradient; the kept
columns with their e_i / s - p_i; per row the factor 1 / s - p_o / b. Autograd on the reference keeps several
matrices of that size.

A tail whose exponentials all underflow (it lies 87 or more below the row's greatest logit) gets no gradient.

Shape letters: N positions, D draft vocabulary, K kept teacher tokens.
"""

from __future__ import annotations

from typing import Any

import torch

from foredraft.kernels.distill_loss_ref import OUTSIDE, Teacher


def distill_loss(logits_ND: torch.Tensor, teacher: Teacher) -> torch.Tensor:
    """KL of the teacher's kept tokens and tail bucket against the student's, float32 [N].

    Args:
        logits_ND: student logits over the draft vocabulary, any float type [N, D].
        teacher: from `map_teacher`.
    """
    return _DistillLoss.apply(logits_ND, teacher.ids_NK, teacher.probs_NK, teacher.tail_N)


class _DistillLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits_ND: torch.Tensor, ids_NK: torch.Tensor, probs_NK: torch.Tensor, tail_N: torch.Tensor
    ) -> torch.Tensor:
        num_rows, num_draft = logits_ND.shape
        peak_N1 = logits_ND.amax(-1, keepdim=True).float()
        # one more column takes what belongs to tokens outside the draft vocabulary
        exp_NE = torch.empty(num_rows, num_draft + 1, dtype=torch.float32, device=logits_ND.device)
        torch.sub(logits_ND, peak_N1, out=exp_NE[:, :num_draft])
        exp_NE[:, num_draft] = -torch.inf
        exp_NE.exp_()
        columns_NK = torch.where(ids_NK == OUTSIDE, num_draft, ids_NK)
        kept_NK = exp_NE.gather(-1, columns_NK)
        exp_NE.scatter_(-1, columns_NK, 0.0)
        tiny = torch.finfo(torch.float32).tiny
        rest_N = exp_NE.sum(-1)
        has_tail_N = rest_N > 0.0
        rest_N = rest_N.clamp(min=tiny)
        total_N = kept_NK.sum(-1) + rest_N

        log_q_NK = kept_NK.clamp(min=tiny).log() - total_N.log()[:, None]
        log_q_tail_N = torch.where(has_tail_N, rest_N.log() - total_N.log(), 0.0)
        loss_N = (torch.special.xlogy(probs_NK, probs_NK) - probs_NK * log_q_NK).sum(-1)
        loss_N += torch.where(has_tail_N, torch.special.xlogy(tail_N, tail_N) - tail_N * log_q_tail_N, 0.0)
        kept_gradient_NK = kept_NK / total_N[:, None] - probs_NK
        ctx.save_for_backward(exp_NE, columns_NK, kept_gradient_NK, 1.0 / total_N - tail_N / rest_N)
        ctx.dtype = logits_ND.dtype
        return loss_N

    @staticmethod
    def backward(ctx: Any, upstream_N: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        exp_NE, columns_NK, kept_gradient_NK, factor_N = ctx.saved_tensors
        gradient_NE = exp_NE.mul_((factor_N * upstream_N)[:, None])
        gradient_NE.scatter_(-1, columns_NK, kept_gradient_NK * upstream_N[:, None])
        return gradient_NE[:, :-1].to(ctx.dtype), None, None, None
