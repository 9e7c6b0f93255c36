"""What all drafters with a network share: steps over a paged pool in, candidates out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file

from foredraft.infer.drafter_card import DrafterCard, StateNeeds
from foredraft.infer.drafters import Candidates, Drawn, Step
from foredraft.infer.kv_pool import KVPool
from foredraft.infer.paged_steps import PagedSteps
from foredraft.infer.sampler import greedy
from foredraft.infer.step_plan import Row, StepPlan
from foredraft.kernels import dispatch
from foredraft.kernels.draws import Draw

LAW_WIDTH = 64  # tokens of the law that a guess is drawn from: what travels to the verifier


class PagedDrafter(ABC):
    """A drafter whose network runs in steps over a paged pool.

    Args:
        steps: bookkeeping and tensors.
        draft_vocab_C: target ids of the draft vocabulary, int64; None: the whole vocabulary.
        max_depth: deepest guess.
        states: what it reads of the target.
    """

    def __init__(
        self, steps: PagedSteps, draft_vocab_C: torch.Tensor | None, max_depth: int, states: StateNeeds
    ) -> None:
        self.steps = steps
        self.token_ids_C = draft_vocab_C
        self.max_depth = max_depth
        self.states = states

    @property
    def pool(self) -> KVPool:
        """Bookkeeping of the drafter's own KV."""
        return self.steps.pool

    @property
    def row_bucket(self) -> int:
        """Rows of a step."""
        return self.steps.row_bucket

    @property
    def max_positions(self) -> int:
        """Longest context."""
        return self.steps.max_positions

    def prefill_room(self, seq: int) -> int:
        """Tokens up to the next multiple of the prefill chunk."""
        return self.steps.prefill_room(seq)

    def plan_prefill(self, seq: int, token_ids: Sequence[int]) -> StepPlan:
        """Append certain tokens to the prefix and plan their chunk."""
        return self.steps.plan_prefill(seq, token_ids)

    def plan_rows(self, rows: Sequence[Row]) -> StepPlan:
        """Plan one batched step."""
        return self.steps.plan(rows)

    @abstractmethod
    def logits(self, step: Step, num_rows: int) -> torch.Tensor:
        """Run a step; float32 logits [num_rows, C] after its last rows."""

    @torch.inference_mode()
    def prefill(self, step: Step) -> None:
        """Run a planned chunk; nothing is guessed from it."""
        self.logits(step, 1)

    @torch.inference_mode()
    def expand(self, step: Step, draws: Sequence[Draw], fan_out: int) -> Candidates:
        """Run planned rows and guess after the last of them."""
        return best_candidates(self.logits(step, len(draws)), draws, fan_out, self.token_ids_C)

    @torch.inference_mode()
    def expand_and_draw(
        self, step: Step, draws: Sequence[Draw], fan_out: int, factor: float
    ) -> tuple[Candidates, Drawn]:
        """Run planned rows; the most probable tokens and a drawn guess after the last of them."""
        logits_RC = self.logits(step, len(draws))
        drawn = dispatch.saguaro(logits_RC, draws, LAW_WIDTH, fan_out, factor, self.token_ids_C)
        candidates = best_candidates(logits_RC, [greedy(draw) for draw in draws], fan_out, self.token_ids_C)
        return candidates, Drawn(*(tensor.cpu().numpy() for tensor in drawn))


def best_candidates(
    logits_RC: torch.Tensor, draws: Sequence[Draw], fan_out: int, token_ids_C: torch.Tensor | None
) -> Candidates:
    """The best perturbed scores of every row, on the host."""
    best = dispatch.top_candidates(logits_RC, draws, fan_out, token_ids_C)
    tokens_NF = best.token_ids_NF.int().view(torch.float32)  # the same bits: one copy from the device
    packed = torch.cat([tokens_NF, best.scores_NF, best.log_probs_NF, best.entropy_N[:, None]], 1).cpu()
    tokens_RF, scores_RF, log_probs_RF, entropy_R1 = packed.split([*[tokens_NF.shape[1]] * 3, 1], 1)
    return Candidates(
        token_ids_RF=tokens_RF.contiguous().view(torch.int32).numpy(),
        scores_RF=scores_RF.contiguous().numpy(),
        log_probs_RF=log_probs_RF.contiguous().numpy(),
        entropy_R=entropy_R1.flatten().numpy(),
    )


def read_draft_vocab(
    source: str, card: DrafterCard, vocab_size: int, device: torch.device
) -> torch.Tensor | None:
    """Target ids of a drafter's vocabulary, int64 [C]; None: the whole vocabulary.

    Raises:
        ValueError: the file that the card names is missing, or does not fit the target.
    """
    if card.draft_vocab is None:
        return None
    path = Path(source) / card.draft_vocab
    if not path.is_file():
        raise ValueError(
            f"drafter {source} names the draft vocabulary {card.draft_vocab}, which is not there"
        )
    token_ids_C = load_file(path)["d2t"].to(device)
    if token_ids_C.ndim != 1 or int(token_ids_C.min()) < 0 or int(token_ids_C.max()) >= vocab_size:
        found = f"{tuple(token_ids_C.shape)} up to {int(token_ids_C.max())}"
        raise ValueError(f"{path}: expected target ids in 0..{vocab_size - 1}, found {found}")
    return token_ids_C
