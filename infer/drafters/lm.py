"""Family `lm`: an independent causal LM with the target's tokenizer, on its own paged KV pool.

The folder keeps a full-width head, so that any tool can load it; here the head is cut to the draft vocabulary
at load.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file

from foredraft.infer.drafter_card import DrafterCard
from foredraft.infer.drafters import Candidates, Drawn
from foredraft.infer.kv_pool import KVPool
from foredraft.infer.paged_model import PagedModel
from foredraft.infer.params import EngineConfig
from foredraft.infer.sampler import greedy
from foredraft.infer.step_plan import Row, StepPlan
from foredraft.kernels import dispatch
from foredraft.kernels.draws import Draw

DEFAULT_MAX_DEPTH = 64
LAW_WIDTH = 64  # tokens of the law that a guess is drawn from: what travels to the verifier


class LMDrafter:
    """Drafts with a causal LM; candidates are the best perturbed scores over its (reduced) vocabulary."""

    def __init__(self, model: PagedModel, draft_vocab_C: torch.Tensor | None, max_depth: int) -> None:
        self.model = model
        self.token_ids_C = draft_vocab_C
        self.max_depth = max_depth
        if draft_vocab_C is not None:
            keep_head_rows(model.model, draft_vocab_C)

    @property
    def pool(self) -> KVPool:
        """Bookkeeping of the drafter's own KV."""
        return self.model.pool

    @property
    def row_bucket(self) -> int:
        """Rows of a step."""
        return self.model.row_bucket

    @property
    def max_positions(self) -> int:
        """Longest context."""
        return self.model.max_positions

    def prefill_room(self, seq: int) -> int:
        """Tokens up to the next multiple of the prefill chunk."""
        return self.model.prefill_room(seq)

    def plan_prefill(self, seq: int, token_ids: Sequence[int]) -> StepPlan:
        """Append certain tokens to the prefix and plan their chunk."""
        return self.model.plan_prefill(seq, token_ids)

    def plan_rows(self, rows: Sequence[Row]) -> StepPlan:
        """Plan one batched step."""
        return self.model.plan(rows)

    def prefill(self, plan: StepPlan, moves: Sequence[tuple[np.ndarray, np.ndarray]]) -> None:
        """Run a planned chunk; nothing is guessed from it."""
        self.model.run(plan, moves, keep_rows=[plan.num_rows - 1])

    @torch.inference_mode()
    def expand(
        self,
        plan: StepPlan,
        moves: Sequence[tuple[np.ndarray, np.ndarray]],
        draws: Sequence[Draw],
        fan_out: int,
    ) -> Candidates:
        """Run planned rows and guess after the last of them."""
        return self._candidates(self._logits(plan, moves, len(draws)), draws, fan_out)

    @torch.inference_mode()
    def expand_and_draw(
        self,
        plan: StepPlan,
        moves: Sequence[tuple[np.ndarray, np.ndarray]],
        draws: Sequence[Draw],
        fan_out: int,
        factor: float,
    ) -> tuple[Candidates, Drawn]:
        """Run planned rows; the most probable tokens and a drawn guess after the last of them."""
        logits_RC = self._logits(plan, moves, len(draws))
        drawn = dispatch.saguaro(logits_RC, draws, LAW_WIDTH, fan_out, factor, self.token_ids_C)
        candidates = self._candidates(logits_RC, [greedy(draw) for draw in draws], fan_out)
        return candidates, Drawn(*(tensor.cpu().numpy() for tensor in drawn))

    def _logits(
        self, plan: StepPlan, moves: Sequence[tuple[np.ndarray, np.ndarray]], num_rows: int
    ) -> torch.Tensor:
        """Logits after the last rows of a plan."""
        return self.model.run(plan, moves)[plan.num_rows - num_rows :]

    def _candidates(self, logits_RC: torch.Tensor, draws: Sequence[Draw], fan_out: int) -> Candidates:
        """The best perturbed scores of every row."""
        best = dispatch.top_candidates(logits_RC, draws, fan_out, self.token_ids_C)
        tokens_NF = best.token_ids_NF.int().view(torch.float32)  # the same bits: one copy from the device
        packed = torch.cat([tokens_NF, best.scores_NF, best.log_probs_NF, best.entropy_N[:, None]], 1).cpu()
        tokens_RF, scores_RF, log_probs_RF, entropy_R1 = packed.split([*[tokens_NF.shape[1]] * 3, 1], 1)
        return Candidates(
            token_ids_RF=tokens_RF.contiguous().view(torch.int32).numpy(),
            scores_RF=scores_RF.contiguous().numpy(),
            log_probs_RF=log_probs_RF.contiguous().numpy(),
            entropy_R=entropy_R1.flatten().numpy(),
        )


def keep_head_rows(model: torch.nn.Module, token_ids_C: torch.Tensor) -> None:
    """Replace the output head by its rows of the draft vocabulary."""
    head = model.get_output_embeddings()
    with torch.device("meta"):
        cut = torch.nn.Linear(head.in_features, len(token_ids_C), bias=head.bias is not None)
    cut.weight = torch.nn.Parameter(head.weight[token_ids_C].clone(), requires_grad=False)
    if head.bias is not None:
        cut.bias = torch.nn.Parameter(head.bias[token_ids_C].clone(), requires_grad=False)
    model.set_output_embeddings(cut)


def load(source: str, card: DrafterCard | None, config: EngineConfig) -> LMDrafter:
    """Load the family from a folder.

    Raises:
        ValueError: no model there, or a draft vocabulary that does not fit it.
    """
    model = PagedModel.load(source, config)
    if card is None or card.draft_vocab is None:
        return LMDrafter(model, None, card.max_depth if card else DEFAULT_MAX_DEPTH)
    path = Path(source) / card.draft_vocab
    if not path.is_file():
        raise ValueError(
            f"drafter {source} names the draft vocabulary {card.draft_vocab}, which is not there"
        )
    token_ids_C = load_file(path)["d2t"].to(model.device)
    if token_ids_C.ndim != 1 or int(token_ids_C.min()) < 0 or int(token_ids_C.max()) >= model.vocab_size:
        found = f"{tuple(token_ids_C.shape)} up to {int(token_ids_C.max())}"
        raise ValueError(f"{path}: expected target ids in 0..{model.vocab_size - 1}, found {found}")
    return LMDrafter(model, token_ids_C, card.max_depth)
