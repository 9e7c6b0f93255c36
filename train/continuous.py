"""Continuous decoding: prompts are prefilled once and forked, finished rows are replaced at once.

Shape letters: R rows of a step, V vocabulary, K kept log-probabilities.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np
import torch

from foredraft.infer.paged_model import PagedModel
from foredraft.infer.params import SamplingParams
from foredraft.infer.sampler import CoupledSampler
from foredraft.infer.step_plan import Row
from foredraft.infer.target_states import to_bits
from foredraft.kernels import dispatch
from foredraft.kernels.coupled_sample_fast import top_columns
from foredraft.kernels.draws import Draw


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """One response to decode. Jobs of the same prompt come one after another and share its prefill."""

    key: tuple[int, int]  # of the caller
    prompt_ids: tuple[int, ...]
    params: SamplingParams


@dataclass(kw_only=True, slots=True, eq=False)
class Response:
    """A response being decoded, then complete."""

    job: Job
    seq: int
    topk_ids: np.ndarray  # int32 [max_new_tokens, K]
    topk_logprobs: np.ndarray  # float16 [max_new_tokens, K]
    tail_mass: np.ndarray  # float32 [max_new_tokens]
    tokens: list[int] = field(default_factory=list)
    states: list[np.ndarray] = field(default_factory=list)  # parts [n, S], where the model catches them
    finish_reason: str = ""

    @property
    def position(self) -> int:
        """Absolute position of the token to choose next."""
        return len(self.job.prompt_ids) + len(self.tokens)

    @property
    def draw(self) -> Draw:
        """Of that token."""
        return CoupledSampler(self.job.params, self.job.prompt_ids).draws([self.position], [self.tokens])[0]


def kept_distributions(logits_RV: torch.Tensor, num_kept: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """What a log keeps: ids int32 [R, K], log-probabilities float16 [R, K], mass of the rest [R]."""
    top = top_columns(logits_RV, num_kept)
    logprobs_RK = top.logits_NW - logits_RV.logsumexp(-1, keepdim=True)
    tail_R = (1.0 - logprobs_RK.exp().sum(-1)).clamp(min=0.0)
    return top.columns_NW.int().cpu().numpy(), logprobs_RK.half().cpu().numpy(), tail_R.cpu().numpy()


def num_pages_for(
    lengths: Iterable[int], responses: int, max_new_tokens: int, rows: int, page_size: int
) -> int:
    """Pages that keep `rows` rows busy: their own tokens, and the longest prompts that can be shared by them.

    Args:
        lengths: tokens of every prompt.
        responses: of each prompt.
        max_new_tokens: of each response.
        rows: decoded at once.
        page_size: tokens of a page.
    """
    num_prompts = -(-rows // responses) + 1
    prompt_pages = sorted((-(-length // page_size) for length in lengths), reverse=True)[:num_prompts]
    return 1 + sum(prompt_pages) + rows * _own_pages(max_new_tokens, page_size)


class ContinuousDecoder:
    """Decodes jobs in a full bucket of rows.

    Args:
        model: with a row bucket of the wanted width and one lane a sequence.
        eos_ids: tokens that end a response.
        num_kept: K, log-probabilities kept per token.
    """

    def __init__(self, model: PagedModel, eos_ids: frozenset[int], num_kept: int) -> None:
        self.model, self.eos_ids, self.num_kept = model, eos_ids, num_kept
        self.active: list[Response] = []
        self.prompt_seq: int | None = None
        self.prompt_ids: tuple[int, ...] = ()
        self.prompt_logits_V: torch.Tensor | None = None
        self.prompt_states: np.ndarray | None = None

    @property
    def num_started(self) -> float:
        """Unfinished responses, each counted as the part of its greatest length that is there."""
        return sum(len(response.tokens) / response.job.params.max_new_tokens for response in self.active)

    def run(self, jobs: Iterable[Job]) -> Iterator[list[Response]]:
        """Decode all jobs; after every step, the responses that it completed (often none).

        Raises:
            ValueError: a prompt and its response do not fit in the pool even alone.
        """
        waiting = deque(jobs)
        while waiting or self.active:
            completed = self._admit(waiting)
            if self.active:
                rows = [Row(seq=response.seq, token=response.tokens[-1]) for response in self.active]
                logits_RV = self.model.step(rows)
                if self.model.tap is not None:
                    for response, state in zip(self.active, to_bits(self.model.take_states()), strict=True):
                        response.states.append(state[None])
                completed += self._record(logits_RV, self.active)
                self.active = [response for response in self.active if not response.finish_reason]
            yield completed

    def _admit(self, waiting: deque[Job]) -> list[Response]:
        """Start jobs while rows and pages are free; their first token comes from the prompt's logits."""
        completed: list[Response] = []
        while waiting and len(self.active) < self.model.row_bucket:
            if not self._has_room(waiting[0]):
                if not self.active and self.prompt_seq is None:
                    job = waiting[0]
                    raise ValueError(
                        f"a prompt of {len(job.prompt_ids)} tokens with {job.params.max_new_tokens} new ones "
                        f"needs more than the {self.model.pool.num_pages - 1} KV pages of the pool"
                    )
                self._leave_prompt()
                break
            job = waiting.popleft()
            self._enter_prompt(job.prompt_ids)
            assert self.prompt_seq is not None and self.prompt_logits_V is not None
            size = job.params.max_new_tokens
            response = Response(
                job=job,
                seq=self.model.pool.fork(self.prompt_seq),
                topk_ids=np.empty((size, self.num_kept), np.int32),
                topk_logprobs=np.empty((size, self.num_kept), np.float16),
                tail_mass=np.empty(size, np.float32),
                states=[] if self.prompt_states is None else [self.prompt_states],
            )
            completed += self._record(self.prompt_logits_V[None], [response])
            if not response.finish_reason:
                self.active.append(response)
            if not waiting or waiting[0].prompt_ids != job.prompt_ids:
                self._leave_prompt()
        return completed

    def _record(self, logits_RV: torch.Tensor, responses: list[Response]) -> list[Response]:
        """Choose each row's token and keep its distribution; ends the responses that it completes."""
        ids_RK, logprobs_RK, tail_R = kept_distributions(logits_RV, self.num_kept)
        tokens = dispatch.coupled_sample(logits_RV, [response.draw for response in responses]).tolist()
        for row, (response, token) in enumerate(zip(responses, tokens, strict=True)):
            index = len(response.tokens)
            response.topk_ids[index], response.topk_logprobs[index] = ids_RK[row], logprobs_RK[row]
            response.tail_mass[index] = tail_R[row]
            response.tokens.append(token)
            is_end = token in self.eos_ids
            if is_end or len(response.tokens) == response.job.params.max_new_tokens:
                response.finish_reason = "stop" if is_end else "length"
                self.model.pool.free(response.seq)
        return [response for response in responses if response.finish_reason]

    def _enter_prompt(self, prompt_ids: tuple[int, ...]) -> None:
        if self.prompt_seq is not None and self.prompt_ids == prompt_ids:
            return
        self._leave_prompt()
        self.prompt_seq, self.prompt_ids = self.model.pool.begin(), prompt_ids
        self.prompt_logits_V = self.model.prefill(self.prompt_seq, list(prompt_ids))
        if self.model.tap is not None:
            self.prompt_states = to_bits(self.model.take_states())

    def _leave_prompt(self) -> None:
        if self.prompt_seq is not None:
            self.model.pool.free(self.prompt_seq)
        self.prompt_seq = self.prompt_logits_V = None

    def _has_room(self, job: Job) -> bool:
        """Whether the job can run to its end beside the active ones, however long these become."""
        page_size = self.model.pool.page_size
        growth = sum(self._pages_to_come(response) for response in self.active)
        needed = _own_pages(job.params.max_new_tokens, page_size)
        if self.prompt_seq is None or self.prompt_ids != job.prompt_ids:
            needed += -(-len(job.prompt_ids) // page_size)
        return growth + needed <= self.model.pool.num_free_pages

    def _pages_to_come(self, response: Response) -> int:
        page_size, job = self.model.pool.page_size, response.job
        held = -(-self.model.pool.num_committed(response.seq) // page_size)
        final = -(-(len(job.prompt_ids) + job.params.max_new_tokens) // page_size)
        # the page that it shares with its prompt is copied by its first own token
        return final - held + (len(response.tokens) == 1)


def _own_pages(max_new_tokens: int, page_size: int) -> int:
    """Pages of a response beyond the prompt's full pages."""
    return -(-max_new_tokens // page_size) + 1
