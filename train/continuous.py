"""Continuous decoding: prompts are prefilled once and forked, finished rows are replaced at once.

Prompts are read a few ahead of the rows that will take them, packed into full prefill steps.

Shape letters: R rows of a step, V vocabulary, K kept log-probabilities.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from operator import attrgetter
from typing import Any

import numpy as np
import torch

from foredraft.infer.paged_model import PagedModel
from foredraft.infer.params import EngineConfig, SamplingParams
from foredraft.infer.sampler import CoupledSampler
from foredraft.infer.step_plan import Row
from foredraft.infer.target_states import to_bits
from foredraft.kernels import dispatch
from foredraft.kernels.coupled_sample_fast import top_columns
from foredraft.kernels.draws import Draw

PAGE_SIZE = 64  # tokens of a KV page
READ_AHEAD = 8  # prompts read at once; a step of PREFILL_CHUNK rows holds one or two
PREFILL_CHUNK = 128  # rows of a prefill step: on a CPU a row costs a quarter less than in one of 64


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """One response to decode. Jobs of the same prompt come one after another and share its prefill."""

    key: tuple[int, int]  # of the caller
    prompt_ids: tuple[int, ...]
    params: SamplingParams


@dataclass(kw_only=True, slots=True, eq=False)
class Prompt:
    """A prompt that the model has read, and its responses that wait for a row."""

    seq: int
    jobs: deque[Job]
    logits_V: torch.Tensor
    states: np.ndarray | None  # [n, S], where the model catches them


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
    num_prompts = -(-rows // responses) + READ_AHEAD
    prompt_pages = sorted((-(-length // page_size) for length in lengths), reverse=True)[:num_prompts]
    return 1 + sum(prompt_pages) + rows * own_pages(max_new_tokens, page_size)


def own_pages(max_new_tokens: int, page_size: int) -> int:
    """Pages of a response beyond the prompt's full pages."""
    return -(-max_new_tokens // page_size) + 1


def continuous_config(
    lengths: Iterable[int], responses: int, max_new_tokens: int, rows: int, **loading: Any
) -> EngineConfig:
    """How the target of a `ContinuousDecoder` is loaded; arguments of `num_pages_for` and of EngineConfig."""
    return EngineConfig(
        row_bucket=rows,
        lanes=1,
        prefill_chunk=PREFILL_CHUNK,
        page_size=PAGE_SIZE,
        num_pages=num_pages_for(lengths, responses, max_new_tokens, rows, PAGE_SIZE),
        **loading,
    )


class ContinuousDecoder:
    """Decodes jobs in a full bucket of rows.

    Args:
        model: loaded as `continuous_config` says.
        eos_ids: tokens that end a response.
        num_kept: K, log-probabilities kept per token.
    """

    def __init__(self, model: PagedModel, eos_ids: frozenset[int], num_kept: int) -> None:
        self.model, self.eos_ids, self.num_kept = model, eos_ids, num_kept
        self.active: list[Response] = []
        self.ready: deque[Prompt] = deque()

    @property
    def num_started(self) -> float:
        """Unfinished responses, each counted as the part of its greatest length that is there."""
        return sum(len(response.tokens) / response.job.params.max_new_tokens for response in self.active)

    def run(self, jobs: Iterable[Job]) -> Iterator[list[Response]]:
        """Decode all jobs; after every step, the responses that it completed (often none).

        Raises:
            ValueError: a prompt and its response do not fit in the pool even alone.
        """
        waiting = deque(list(same) for _, same in groupby(jobs, key=attrgetter("prompt_ids")))
        while waiting or self.ready or self.active:
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

    def _admit(self, waiting: deque[list[Job]]) -> list[Response]:
        """Start jobs while rows and pages are free; their first token comes from the prompt's logits."""
        completed: list[Response] = []
        while len(self.active) < self.model.row_bucket:
            if not self.ready and not self._read_ahead(waiting):
                break
            prompt = self.ready[0]
            job = prompt.jobs[0]
            needed = own_pages(job.params.max_new_tokens, self.model.pool.page_size)
            if self._growth() + needed > self.model.pool.num_free_pages:
                break
            response = self._start(prompt.jobs.popleft(), prompt)
            completed += self._record(prompt.logits_V[None], [response])
            if not response.finish_reason:
                self.active.append(response)
            if not prompt.jobs:
                self.model.pool.free(prompt.seq)
                self.ready.popleft()
        return completed

    def _start(self, job: Job, prompt: Prompt) -> Response:
        size = job.params.max_new_tokens
        return Response(
            job=job,
            seq=self.model.pool.fork(prompt.seq),
            topk_ids=np.empty((size, self.num_kept), np.int32),
            topk_logprobs=np.empty((size, self.num_kept), np.float16),
            tail_mass=np.empty(size, np.float32),
            states=[] if prompt.states is None else [prompt.states],
        )

    def _read_ahead(self, waiting: deque[list[Job]]) -> bool:
        """Read the next prompts, as many as leave room for any of their responses; False if there is none.

        Raises:
            ValueError: the first one does not fit even alone.
        """
        pool, page_size = self.model.pool, self.model.pool.page_size
        num_free, num_prompt_pages, most_own = pool.num_free_pages - self._growth(), 0, 0
        chosen: list[list[Job]] = []
        while waiting and len(chosen) < READ_AHEAD:
            jobs = waiting[0]
            num_prompt_pages += -(-len(jobs[0].prompt_ids) // page_size)
            most_own = max(most_own, *(own_pages(job.params.max_new_tokens, page_size) for job in jobs))
            if num_prompt_pages + most_own > num_free:
                break
            chosen.append(waiting.popleft())
        if waiting and not chosen and not self.active:
            job = waiting[0][0]
            raise ValueError(
                f"a prompt of {len(job.prompt_ids)} tokens with {job.params.max_new_tokens} new ones "
                f"needs more than the {pool.num_pages - 1} KV pages of the pool"
            )
        if chosen:
            self.ready.extend(self._read(chosen))
        return bool(chosen)

    def _read(self, groups: Sequence[list[Job]]) -> Iterator[Prompt]:
        """Prompts that run through packed steps; each group's jobs are of one."""
        runs = [(self.model.pool.begin(), group[0].prompt_ids) for group in groups]
        logits_NV = self.model.prefill_packed(runs)
        states: list[np.ndarray] | list[None] = [None] * len(runs)
        if self.model.tap is not None:
            ends = np.cumsum([len(prompt_ids) for _, prompt_ids in runs])
            states = np.split(to_bits(self.model.take_states()), ends[:-1])
        for (seq, _), group, logits_V, state in zip(runs, groups, logits_NV, states, strict=True):
            yield Prompt(seq=seq, jobs=deque(group), logits_V=logits_V, states=state)

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

    def _growth(self) -> int:
        """Pages that the active responses may yet need, however long they become."""
        return sum(self._pages_to_come(response) for response in self.active)

    def _pages_to_come(self, response: Response) -> int:
        page_size, job = self.model.pool.page_size, response.job
        held = -(-self.model.pool.num_committed(response.seq) // page_size)
        final = -(-(len(job.prompt_ids) + job.params.max_new_tokens) // page_size)
        # the page that it shares with its prompt is copied by its first own token
        return final - held + (len(response.tokens) == 1)
