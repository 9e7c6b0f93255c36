"""The engine: one loaded target, three ways to decode with it, one text.

    prefill -> first token -> rounds of (guess, verify, settle) -> completion

Every round is one target step over the root and a block of guesses. Plain decoding is the same loop with
empty blocks.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Self, cast

import torch

from foredraft.infer.belonging import check_drafter_of, check_predictor_of
from foredraft.infer.drafter_card import StateNeeds
from foredraft.infer.guessers import EMPTY_BLOCK, Guess, Guesser, PlainGuesser, SyncGuesser
from foredraft.infer.machine import num_cores
from foredraft.infer.params import (
    MODES,
    EngineConfig,
    ExpandPolicy,
    Mode,
    SamplingParams,
    SpeculationParams,
)
from foredraft.infer.planner import FLAT, BlockPlanner
from foredraft.infer.prompts import Message, Prompt, draw_seed, encode
from foredraft.infer.remote_guesser import RemoteGuesser
from foredraft.infer.request import Completion, Request
from foredraft.infer.sampler import CoupledSampler
from foredraft.infer.speculator import Speculator
from foredraft.infer.stats import RequestStats, RoundRecord
from foredraft.infer.step_plan import Row
from foredraft.infer.stopping import StopChecker
from foredraft.infer.target import Target
from foredraft.infer.target_states import TargetStates, to_bits
from foredraft.infer.tracing import Trace
from foredraft.infer.verify import depths, paths, prune, settle
from foredraft.infer.verify_times import measure_verify_seconds

PromptLike = str | Sequence[Message] | Sequence[int]  # one user turn, a conversation, or token ids


class Engine:
    """Decodes prompts with one target, alone or with a drafter; a context manager, as it may own a server.

    Args:
        target: loaded target.
        drafter: folder or Hub id; needed for the modes sync and async.
        mode: default mode of `generate` and `stream`.
        config: engine settings.
        predictor: folder or Hub id of the drafter's outcome predictor; orders guesses, sizes blocks.
        record: folder that gets outcome records.
        trace: file for a Perfetto trace, written by `close`.

    Raises:
        ValueError: mode without drafter, artifacts or settings that do not belong together.
    """

    def __init__(
        self,
        target: Target,
        drafter: str | None,
        mode: Mode,
        config: EngineConfig,
        *,
        predictor: str | None = None,
        record: Path | None = None,
        trace: Path | None = None,
    ) -> None:
        self.target = target
        if record is not None and config.speculation.verification == "rejection":
            raise ValueError("outcome records come from coupled verification; leave out one of the two")
        self.drafter = drafter
        self.predictor = predictor
        self.record = record
        self.mode = mode
        self.config = config
        self.trace_path = trace
        self.trace = Trace("engine", is_on=trace is not None)
        self.guessers: dict[Mode, Guesser] = {"plain": PlainGuesser()}
        self.request_ids = itertools.count()
        self.state_needs = StateNeeds()
        if drafter is not None:
            self.state_needs = check_drafter_of(target, drafter, config)
        if predictor is not None:
            check_predictor_of(drafter, predictor)
        self._check_mode(mode)
        target.model.catch_states(self.state_needs.layers)
        torch.set_num_threads(self.num_threads)

    @classmethod
    def from_pretrained(
        cls,
        target: str,
        drafter: str | None = None,
        predictor: str | None = None,
        *,
        mode: Mode = "async",
        config: EngineConfig | None = None,
        record: Path | None = None,
        trace: Path | None = None,
    ) -> Self:
        """Load a target (Hub id, folder or `.gguf`) and name its drafter; errors as for the class."""
        config = config or EngineConfig()
        loaded = Target.load(target, config)
        return cls(loaded, drafter, mode, config, predictor=predictor, record=record, trace=trace)

    @property
    def max_prompt_tokens(self) -> int:
        """Longest prompt that leaves room for one token in the model's context and in the KV pool."""
        return min(self.target.model.max_positions, self.target.model.max_tokens) - 1

    @property
    def num_threads(self) -> int:
        """Threads of the target: the same in every mode, since they may change the last bits."""
        return self.config.threads or max(1, num_cores() - self.config.draft_threads)

    @contextmanager
    def using_threads(self, num_threads: int) -> Iterator[None]:
        """Decode with other threads for a while; the last bits may differ from those of the modes."""
        torch.set_num_threads(num_threads)
        try:
            yield
        finally:
            torch.set_num_threads(self.num_threads)

    def _check_mode(self, mode: str) -> None:
        """Raise ValueError for an unknown mode, or one that lacks its drafter."""
        if mode not in MODES:
            raise ValueError(f"mode must be one of {', '.join(MODES)}, got {mode!r}")
        if mode != "plain" and self.drafter is None:
            raise ValueError(f"mode {mode} needs a drafter; give one or use mode plain")

    def generate(
        self,
        prompts: Sequence[PromptLike],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        mode: Mode | None = None,
        policy: ExpandPolicy | None = None,
        raw: bool = False,
    ) -> list[Completion]:
        """Decode prompts one after another.

        Args:
            prompts: each a string (one user turn, or plain text with `raw`), a list of messages, or token
                ids.
            params: for all prompts, or one each. A prompt without a seed draws one.
            mode: plain, sync or async; None: the engine's.
            policy: what a guess is believed; None: the engine's.
            raw: take strings as they are, without the chat template.

        Raises:
            ValueError: a prompt that is empty or too long, an unknown mode.
        """
        if params is None or isinstance(params, SamplingParams):
            params = [params or SamplingParams()] * len(prompts)
        if len(params) != len(prompts):
            raise ValueError(
                f"expected one SamplingParams a prompt, got {len(params)} for {len(prompts)} prompts"
            )
        completions = []
        for prompt, one in zip(prompts, params, strict=True):
            *_, completion = self.stream(prompt, one, mode=mode, policy=policy, raw=raw)
            assert isinstance(completion, Completion), "a stream ends with its completion"
            completions.append(completion)
        return completions

    def stream(
        self,
        prompt: PromptLike,
        params: SamplingParams | None = None,
        *,
        mode: Mode | None = None,
        policy: ExpandPolicy | None = None,
        raw: bool = False,
    ) -> Iterator[str | Completion]:
        """Yield text as it is settled, then the `Completion`. Arguments and errors as for `generate`."""
        mode = mode or self.mode
        self._check_mode(mode)
        speculation = self.config.speculation
        speculation = speculation if policy is None else replace(speculation, policy=policy)
        request = self._admit(self._encode(prompt, raw=raw), params or SamplingParams(), mode, speculation)
        try:
            yield from self._decode(request, self._guesser(mode))
        finally:
            self.target.model.pool.free(request.seq)
        yield self._complete(request)

    def _encode(self, prompt: PromptLike, *, raw: bool = False) -> list[int]:
        """Token ids of a prompt in any of its forms."""
        if isinstance(prompt, str):
            return encode(Prompt.from_text(prompt), self.target.tokenizer, raw=raw)
        if all(isinstance(item, int) for item in prompt):
            return list(cast("Sequence[int]", prompt))
        messages = tuple(cast("Sequence[Message]", prompt))
        return encode(Prompt(id="messages", messages=messages), self.target.tokenizer, raw=raw)

    def _admit(
        self, token_ids: list[int], params: SamplingParams, mode: Mode, speculation: SpeculationParams
    ) -> Request:
        """Check that a prompt fits and give it a seed and an empty sequence."""
        model = self.target.model
        if not 0 < len(token_ids) <= self.max_prompt_tokens:
            raise ValueError(
                f"a prompt must have 1..{self.max_prompt_tokens} tokens to leave room for an answer, "
                f"got {len(token_ids)}"
            )
        # the end of the context is a token limit like the user's own
        room = self.max_prompt_tokens + 1 - len(token_ids)
        params = replace(
            params,
            seed=draw_seed() if params.seed is None else params.seed,
            max_new_tokens=min(params.max_new_tokens, room),
        )
        return Request(
            id=str(next(self.request_ids)),
            num_prompt=len(token_ids),
            tokens=list(token_ids),
            params=params,
            seq=model.pool.begin(),
            sampler=CoupledSampler(params, token_ids),
            stopping=StopChecker(self.target.tokenizer, self.target.eos_ids, params),
            stats=RequestStats(mode),
            speculation=speculation,
            planner=BlockPlanner(self._verify_seconds(mode, speculation)),
            states=TargetStates(self.state_needs) if self.state_needs.layers and mode != "plain" else None,
        )

    def _verify_seconds(self, mode: Mode, speculation: SpeculationParams) -> tuple[float, ...]:
        """T_v(n) that sizes blocks; without calibrated probabilities, and in lockstep, they stay whole."""
        is_believed = self.predictor is not None and speculation.policy in ("auto", "predictor")
        if mode == "plain" or not is_believed or speculation.verification == "rejection":
            return FLAT
        if self.config.verify_seconds or speculation.lockstep:
            return self.config.verify_seconds or FLAT
        return self.measured_verify_seconds

    @cached_property
    def measured_verify_seconds(self) -> tuple[float, ...]:
        """T_v(n) of the target on this machine."""
        return measure_verify_seconds(self.target.model)

    def _decode(self, request: Request, guesser: Guesser) -> Iterator[str]:
        """Prefill, then rounds until the request ends; yields text deltas."""
        guesser.prepare(request)
        try:
            self._prefill(request)
            yield request.stopping.text_delta()
            if request.is_finished:
                return
            started = time.perf_counter()
            guesser.open(request)
            while not request.is_finished:
                self._round(request, guesser)
                request.stats.seconds_decode = time.perf_counter() - started
                yield request.stopping.text_delta()
        finally:
            request.stats.draft_tokens_recomputed = guesser.close(request)

    def _prefill(self, request: Request) -> None:
        """Run the prompt and choose the first token."""
        model, started = self.target.model, time.perf_counter()
        num_chunks = model.num_prefill_chunks
        model.caught.clear()
        with self.trace.span("prefill", request=request.id, tokens=request.num_prompt):
            logits_V = model.prefill(request.seq, request.tokens)
            draws = request.sampler.draws([request.num_prompt], [[]])
            first = settle(EMPTY_BLOCK, logits_V[None], draws).settled
        self._keep_states(request, range(request.num_prompt))
        self._settle(request, first)
        request.stats.prefill_chunks = model.num_prefill_chunks - num_chunks
        request.stats.seconds_prefill = time.perf_counter() - started

    def _round(self, request: Request, guesser: Guesser) -> None:
        """Guess, verify, settle."""
        started = time.perf_counter()
        with self.trace.span("wait", request=request.id):
            guess = guesser.guess(request)
        waited = time.perf_counter()
        with self.trace.span("verify", request=request.id):
            guess, settled = self._verify(request, guess)
        request.stats.seconds_waiting_for_draft += waited - started
        request.stats.seconds_verify += time.perf_counter() - waited
        num_kept = self._settle(request, settled)
        if not request.is_finished:
            guesser.outcome(request, settled)
        request.stats.add_round(
            RoundRecord(
                block_depth=max(depths(guess.block), default=0),
                accepted=len(settled) - 1,
                emitted=num_kept,
                outcome=guess.outcome,
                source=guess.source,
            )
        )

    def _verify(self, request: Request, guess: Guess) -> tuple[Guess, list[int]]:
        """One target step over the root and the block; commits the accepted path.

        Returns:
            The guess as it was verified (cut to what can be used) and the settled tokens.
        """
        model = self.target.model
        block = prune(guess.block, request.num_remaining - 1, model.vocab_size, model.row_bucket - 1)
        if guess.source == "draft":
            block = block.first(request.planner.block_size(block.path_probs))
        parents = [None, *(-1 - (parent + 1) for parent in block.parents)]
        nodes = model.pool.append(request.seq, parents).nodes
        tokens = [request.tokens[-1], *block.tokens]
        logits_RV = model.step(
            [Row(request.seq, token, node) for token, node in zip(tokens, nodes, strict=True)]
        )
        positions = [request.root_position + 1 + depth for depth in [0, *depths(block)]]
        said = request.tokens[request.num_prompt :]
        draws = request.sampler.draws(positions, [said + path for path in [[], *paths(block)]])
        verdict = settle(block, logits_RV, draws, request.speculation.verification)
        request.planner.observe(len(block.nodes), len(verdict.settled))
        path = [0, *(index + 1 for index in verdict.accepted)]
        self._keep_states(request, path)
        model.pool.commit(request.seq, [nodes[row] for row in path])
        return replace(guess, block=block), verdict.settled

    def _keep_states(self, request: Request, rows: Sequence[int]) -> None:
        """Keep the states of settled rows of what ran last, for a drafter that feeds on them."""
        if self.state_needs.layers:
            states_RS = self.target.model.take_states()
            if request.states is not None:
                request.states.extend(to_bits(states_RS[list(rows)]))

    def _settle(self, request: Request, tokens: list[int]) -> int:
        """Append settled tokens up to the end of the completion; the number kept."""
        num_kept = request.stopping.feed(tokens).num_kept
        request.tokens.extend(tokens[:num_kept])
        return num_kept

    @staticmethod
    def _complete(request: Request) -> Completion:
        """The finished request as the user sees it."""
        assert request.params.seed is not None, "admitted requests have a seed"
        assert request.stopping.finish_reason is not None, "only a finished request is completed"
        return Completion(
            text=request.stopping.text,
            token_ids=request.stopping.token_ids,
            prompt_tokens=request.num_prompt,
            finish_reason=request.stopping.finish_reason,
            seed=request.params.seed,
            request_stats=request.stats,
        )

    def _guesser(self, mode: Mode) -> Guesser:
        """The guesser of a mode; loads the drafter, or starts the draft server, on first use."""
        if mode not in self.guessers:
            assert self.drafter is not None, "_check_mode has seen a drafter"
            if mode == "sync":
                speculator = Speculator.load(
                    self.drafter, self.config, predictor=self.predictor, record=self.record
                )
                self.guessers[mode] = SyncGuesser(speculator, self.trace)
            else:
                self.guessers[mode] = RemoteGuesser(
                    self.drafter,
                    self.target,
                    self.config,
                    self.trace,
                    predictor=self.predictor,
                    record=self.record,
                )
        return self.guessers[mode]

    def close(self) -> None:
        """Stop the draft server, write records and trace."""
        for guesser in self.guessers.values():
            guesser.shutdown()
        self.guessers = {"plain": PlainGuesser()}
        if self.trace_path is not None:
            self.trace.write(self.trace_path)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
