"""One speculation tree a request, driven by a drafter: what draft server and synchronous engine both run.

Planning and merging touch bookkeeping only; `run` touches tensors only. So an I/O thread can answer outcomes
while a worker thread runs the planned jobs in order: a job writes the KV of its rows, moves decided later are
applied by later jobs, and results of nodes that have gone are dropped.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal, Self

import numpy as np

from foredraft.infer.drafter_card import drafter_sha256, family_of, read_drafter_card
from foredraft.infer.drafters import Candidates, Drafter, load_drafter
from foredraft.infer.echo import Echo
from foredraft.infer.expansions import Expansion
from foredraft.infer.features import node_features
from foredraft.infer.kv_pool import PoolExhausted
from foredraft.infer.outcome_records import NO_TOKEN
from foredraft.infer.params import EngineConfig, ExpandPolicy, SamplingParams, SpeculationParams
from foredraft.infer.predictor import OutcomePredictor, load_predictor
from foredraft.infer.prompts import hash_prompt
from foredraft.infer.recorder import MIN_FAN_OUT, OutcomeRecorder
from foredraft.infer.sampler import CoupledSampler, apart
from foredraft.infer.session import Expand, Expanded, Job, Session
from foredraft.infer.step_plan import Row
from foredraft.infer.tree import Advance, Block, SpeculationTree
from foredraft.kernels import dispatch


class Speculator:
    """One drafter of any family, many requests.

    Args:
        drafter: that guesses.
        predictor: turns its scores into probabilities, for requests with the policy `predictor`.
        fan_out: candidates that the predictor was trained with.
        recorder: gets an outcome record of every expanded node that the target reaches.
    """

    def __init__(
        self,
        drafter: Drafter,
        predictor: OutcomePredictor | None = None,
        fan_out: int = 0,
        recorder: OutcomeRecorder | None = None,
    ) -> None:
        self.drafter = drafter
        self.predictor = predictor
        self.fan_out = max(fan_out, MIN_FAN_OUT if recorder else 0)
        self.recorder = recorder
        self.sessions: dict[str, Session] = {}

    @classmethod
    def load(
        cls, drafter: str, config: EngineConfig, *, predictor: str | None = None, record: Path | None = None
    ) -> Self:
        """Load a drafter and what goes with it.

        Args:
            drafter: folder or Hub id.
            config: as for the target.
            predictor: folder or Hub id of its outcome predictor.
            record: folder that gets outcome records.

        Raises:
            ValueError: nothing there, a predictor of another drafter, records that cannot be written.
        """
        network, fan_out, recorder = None, 0, None
        if predictor is not None:
            network, card = load_predictor(predictor, drafter_sha256(drafter))
            fan_out = card.fan_out
        if record is not None:
            family = family_of(read_drafter_card(drafter))
            recorder = OutcomeRecorder(record, family=family, drafter_sha256=drafter_sha256(drafter))
        return cls(load_drafter(drafter, config), network, fan_out, recorder)

    def open(
        self,
        request_id: str,
        tokens: Sequence[int],
        sampling: SamplingParams,
        params: SpeculationParams,
        max_tokens: int | None = None,
        num_prompt: int | None = None,
    ) -> None:
        """Start (or restart) a request.

        Args:
            request_id: unique name.
            tokens: all token ids so far; the last is the root.
            sampling: with a seed.
            params: block shape and fan-out.
            max_tokens: tokens that may still follow; None: max_new_tokens of `sampling`.
            num_prompt: how many of the tokens are the prompt; None: all.

        Raises:
            ValueError: the context does not fit the drafter, or the policy needs another predictor.
            PoolExhausted: no KV pages left.
        """
        self.close(request_id)
        limit = self.drafter.max_positions
        max_tokens = sampling.max_new_tokens if max_tokens is None else max_tokens
        if len(tokens) + max_tokens > limit:
            raise ValueError(
                f"the drafter holds {limit} positions, the request needs {len(tokens)} + {max_tokens}; "
                "lower max_new_tokens or use a drafter with a longer context"
            )
        policy = self._policy_of(params)
        self.sessions[request_id] = Session(
            tokens=list(tokens),
            seq=self.drafter.pool.begin(),
            tree=SpeculationTree(tokens[-1], max_depth=self.drafter.max_depth),
            sampler=CoupledSampler(sampling, tokens[:num_prompt]),
            params=replace(params, policy=policy),
            pending=list(tokens[:-1]),
            prompt_hash=hash_prompt(tokens[:num_prompt]),
            echo=Echo(tokens),
        )

    def _policy_of(self, params: SpeculationParams) -> ExpandPolicy:
        """The policy, resolved; ValueError for `predictor` where there is none, or where F is beyond it."""
        policy = params.policy
        if params.verification == "rejection":
            return "confidence-q"
        if policy == "auto":
            policy = "predictor" if self.predictor else "confidence"
        if policy == "predictor" and self.predictor is None:
            raise ValueError("policy predictor needs a predictor; give one or use policy confidence")
        if policy == "predictor" and params.fan_out > self.fan_out:
            raise ValueError(
                f"the predictor knows {self.fan_out} candidates of a node, fan_out is {params.fan_out}; "
                f"use at most {self.fan_out}, or policy confidence"
            )
        return policy

    def close(self, request_id: str) -> None:
        """Forget a request; unknown ones are ignored."""
        session = self.sessions.pop(request_id, None)
        if session is not None:
            self.drafter.pool.free(session.seq)

    def advance(
        self, request_id: str, base_position: int, settled: Sequence[int]
    ) -> Literal["hit", "leaf", "miss"]:
        """Re-root at a verification outcome. Bookkeeping only.

        Args:
            request_id: an open request.
            base_position: absolute position of settled[0].
            settled: accepted guesses and the bonus token.

        Raises:
            KeyError: unknown request, or an outcome that does not follow the last one; the engine opens it
                again.
        """
        session = self.sessions[request_id]
        if base_position != len(session.tokens) or not settled:
            raise KeyError(
                f"outcome at {base_position} does not follow position {session.root_position} of {request_id}"
            )
        root_token = session.tokens[-1]
        if self.recorder is not None:
            sampling = session.sampler.params
            labelled = session.expansions.labelled(session.tree, settled)
            self.recorder.add(session.prompt_hash, sampling.seed or 0, sampling.temperature, labelled)
        outcome = session.tree.advance(list(settled))
        session.expansions.keep(outcome.survivors)
        self._commit(session, outcome, [root_token, *settled[:-1]])
        session.tokens.extend(settled)
        session.echo.extend(settled)
        session.block_nodes, session.num_spent = set(), 0
        return outcome.kind

    def _commit(self, session: Session, outcome: Advance, newly_settled: list[int]) -> None:
        """Move the settled path's KV into the prefix, keep the surviving subtree's, note what has none.

        `newly_settled`: the old root and all settled tokens but the new root.
        """
        path = [session.kv_nodes[node] for node in outcome.path if node in session.kv_nodes]
        kept = {node: kv for node, kv in session.kv_nodes.items() if node in outcome.survivors}
        try:
            self.drafter.pool.commit(session.seq, path, list(kept.values()))
        except PoolExhausted:  # the subtree is in the way of the prefix: it is computed again
            self.drafter.pool.commit(session.seq, path)
            session.evicted.update(kept)
            kept = {}
            session.tree.unexpand(session.tree.root)
        session.kv_nodes = kept
        session.pending.extend(newly_settled[len(path) :])
        session.evicted &= outcome.survivors
        session.laws = {node: law for node, law in session.laws.items() if node in outcome.survivors}

    def block(self, request_id: str) -> Block:
        """The most probable guesses that are ready; empty where there are none."""
        session = self.sessions[request_id]
        params = session.params
        size = params.block_nodes if params.block == "tree" else min(params.k, params.block_nodes)
        block = session.tree.block(size, params.block)
        if params.verification == "rejection":
            drawn_after = [session.tree.root, *block.nodes][: len(block.nodes)]
            block = replace(block, laws=[session.laws[node] for node in drawn_after])
        session.block_nodes = {session.tree.root, *block.nodes}
        return block

    def next_job(self, request_id: str | None = None) -> Job | None:
        """Plan the best work: prompts first, then the request with the most probable node; None without.

        Bookkeeping only; the jobs must be run in the order in which they were planned.
        """
        names = [request_id] if request_id is not None else list(self.sessions)
        ranked = []
        for name in names:
            session = self.sessions[name]
            if len(session.pending) >= self.drafter.row_bucket:
                if (job := self._plan_pending(name, session)) is not None:
                    return job
            elif session.has_budget and (first := self._select(session, 1)):
                ranked.append((session.tree.path_prob(first[0]), name))
        for _, name in sorted(ranked, reverse=True):
            if (job := self._plan_expansion(name, self.sessions[name])) is not None:
                return job
        return None

    def _select(self, session: Session, width: int) -> list[int]:
        """The most probable nodes within the context, and worth the KV that they may push out."""
        tree = session.tree
        nodes = tree.select(width, shape=session.params.block, chain_depth=session.params.k)
        room = self.drafter.max_positions - session.root_position
        weakest = 0.0
        if len(session.kv_nodes) + len(nodes) > self.drafter.pool.max_suffix:
            weakest = min(tree.path_prob(node) for node in session.kv_nodes)
        return [node for node in nodes if tree.depth(node) < room and tree.path_prob(node) > weakest]

    def _plan_pending(self, request_id: str, session: Session) -> Job | None:
        """A chunk of settled tokens without KV: the prompt."""
        chunk = session.pending[: self.drafter.prefill_room(session.seq)]
        try:
            plan = self.drafter.plan_prefill(session.seq, chunk)
        except PoolExhausted:
            return None
        del session.pending[: len(chunk)]
        return Job(request_id, plan, self.drafter.pool.drain_moves(), None)

    def _plan_expansion(self, request_id: str, session: Session) -> Job | None:
        """The best leaves of one request as one batched step.

        The few settled tokens that a miss left without KV go first: then the root has none either, and is the
        only leaf.
        """
        tree, pool = session.tree, self.drafter.pool
        nodes = self._select(session, self.drafter.row_bucket - len(session.pending))
        if not nodes:
            return None
        # a node is selected only after its parent was expanded: all parents but the root's have KV
        parents = [None if (up := tree.parent(node)) is None else session.kv_nodes[up] for node in nodes]
        try:
            appended = pool.append(session.seq, parents, [tree.path_prob(node) for node in nodes])
            pool.extend(session.seq, len(session.pending))  # below the suffix, which holds only the root then
        except PoolExhausted:
            if session.pending:
                pool.rollback(session.seq)
            return None
        self._forget_evicted(session, appended.evicted)
        session.kv_nodes.update(zip(nodes, appended.nodes, strict=True))
        session.num_recomputed += len(session.evicted.intersection(nodes))
        session.num_expansions += 1
        session.num_spent += sum(node not in session.block_nodes for node in nodes)
        tree.mark_in_flight(nodes)
        first = session.root_position - len(session.pending)
        rows = [
            Row(session.seq, token, position=first + index) for index, token in enumerate(session.pending)
        ]
        rows += [
            Row(session.seq, tree.token(node), kv) for node, kv in zip(nodes, appended.nodes, strict=True)
        ]
        session.pending.clear()
        return Job(
            request_id, self.drafter.plan_rows(rows), pool.drain_moves(), self._expand_of(session, nodes)
        )

    def _expand_of(self, session: Session, nodes: list[int]) -> Expand:
        """What is to be found out about nodes."""
        tree, sampler, params = session.tree, session.sampler, session.params
        paths = [tree.path_tokens(node) for node in nodes]
        positions = [session.root_position + tree.depth(node) + 1 for node in nodes]
        settled = session.tokens[len(sampler.prompt) :] if sampler.needs_outputs else []
        draws = sampler.draws(positions, [settled + path for path in paths])
        is_drawn = params.verification == "rejection"
        if is_drawn:  # with shared noise, which outcomes are prepared would tell of the guesses below them
            draws = [apart(draw, node) for draw, node in zip(draws, nodes, strict=True)]
        return Expand(
            nodes=nodes,
            anchor=session.root_position,
            paths=paths,
            echo=session.echo,
            contexts=session.expansions.contexts(tree, nodes, sampler.params.temperature),
            draws=draws,
            fan_out=max(params.fan_out, self.fan_out),
            factor=params.saguaro if is_drawn else None,
            policy=params.policy,
        )

    @staticmethod
    def _forget_evicted(session: Session, evicted: list[int]) -> None:
        """Make leaves of the nodes whose KV was given up."""
        gone = set(evicted)
        for node in [node for node, kv in session.kv_nodes.items() if kv in gone]:
            del session.kv_nodes[node]
            session.tree.unexpand(node)
            session.evicted.add(node)

    def run(self, job: Job) -> Expanded | None:
        """Run a job's tensors; the only method that a worker thread calls."""
        if job.expand is None:
            self.drafter.prefill(job.plan, job.moves)
            return None
        expand, drawn = job.expand, None
        work = job.plan, job.moves, expand.draws, expand.fan_out
        if expand.factor is None:
            candidates = self.drafter.expand(*work)
        else:
            candidates, drawn = self.drafter.expand_and_draw(*work, expand.factor)
        features_RK = node_features(candidates, expand.contexts)
        pairs = zip(expand.paths, candidates.token_ids_RF, strict=True)
        echo_RF = np.stack([expand.echo.bits(path, ids_F) for path, ids_F in pairs])
        probs_RF = self._probs(expand.policy, candidates, features_RK, echo_RF)
        return Expanded(candidates, features_RK, echo_RF, probs_RF, drawn)

    def _probs(
        self, policy: ExpandPolicy, candidates: Candidates, features_RK: np.ndarray, echo_RF: np.ndarray
    ) -> np.ndarray:
        """Probability of every candidate to be the target's token, float32 [R, F]."""
        if policy == "confidence":
            return np.exp(candidates.scores_RF)
        if policy == "confidence-q":
            return np.exp(candidates.log_probs_RF)
        assert self.predictor is not None, "_policy_of has seen a predictor"
        return self.predictor.probs(features_RK, candidates.scores_RF, candidates.log_probs_RF, echo_RF)

    def merge(self, job: Job, expanded: Expanded | None) -> None:
        """Hang a job's candidates below their nodes; those of nodes or requests that are gone are dropped."""
        session = self.sessions.get(job.request_id)
        if session is None or expanded is None or job.expand is None:
            return
        nodes, candidates = job.expand.nodes, expanded.candidates
        order_RF = np.argsort(-expanded.probs_RF, axis=1, kind="stable")[:, : session.params.fan_out]
        for row, node in enumerate(nodes):
            if node not in session.tree or node not in session.kv_nodes:
                continue
            ids, probs = candidates.token_ids_RF[row], expanded.probs_RF[row]
            chosen = [place for place in order_RF[row] if ids[place] != NO_TOKEN]
            children = ids[chosen].tolist(), probs[chosen].tolist()
            if expanded.drawn is not None:
                children = session.with_guess(node, expanded.drawn, row, *children)
            session.tree.add_children(node, *children)
            session.expansions.add(
                node,
                Expansion(
                    anchor=job.expand.anchor,
                    depth=int(job.expand.contexts.depth_R[row]),
                    features_K=expanded.features_RK[row],
                    candidate_ids_F=ids,
                    scores_F=candidates.scores_RF[row],
                    log_probs_F=candidates.log_probs_RF[row],
                    echo_F=expanded.echo_RF[row],
                ),
            )

    def expand(self, request_id: str, times: int) -> int:
        """Plan, run and merge `times` expansions in place, prefill steps not counted; the forwards done."""
        num_forwards = num_expansions = 0
        while num_expansions < times and (job := self.next_job(request_id)) is not None:
            self.merge(job, self.run(job))
            num_forwards += 1
            num_expansions += job.kind == "expand"
        return num_forwards

    def stats(self, request_id: str) -> dict[str, int]:
        """Counters of one request, and how often this process ran each kernel by each implementation."""
        session = self.sessions[request_id]
        return {
            "draft_expansions": session.num_expansions,
            "draft_tokens_recomputed": session.num_recomputed,
            **{f"{operation} {name}": count for (operation, name), count in dispatch.calls.items()},
        }

    def finish(self) -> None:
        """Write the records that are left; call it when no more requests come."""
        if self.recorder is not None:
            self.recorder.flush()
