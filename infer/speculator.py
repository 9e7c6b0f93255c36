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
from foredraft.infer.feeding import Feeding
from foredraft.infer.job_planner import JobPlanner
from foredraft.infer.kv_pool import PoolExhausted
from foredraft.infer.outcome_records import NO_TOKEN
from foredraft.infer.params import EngineConfig, ExpandPolicy, SamplingParams, SpeculationParams
from foredraft.infer.predictor import OutcomePredictor, load_predictor
from foredraft.infer.prompts import hash_prompt
from foredraft.infer.recorder import MIN_FAN_OUT, OutcomeRecorder
from foredraft.infer.sampler import CoupledSampler
from foredraft.infer.session import Expanded, Job, Session
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
        self.planner = JobPlanner(drafter, self.sessions, self.fan_out)

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
            feeding=Feeding(self.drafter.states) if self.drafter.states.layers else None,
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
        if session.feeding is not None:
            computed = outcome.path[: len(path)]
            session.feeding.commit(session.root_position, computed, outcome.survivors)
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

    def start_from_target(self, request_id: str) -> None:
        """Forget what hangs below a root that started from the drafter's own state: the target's is there.

        For who drafts anew in every round anyway; on a hit of asynchronous decoding it is what was prepared.
        """
        session = self.sessions[request_id]
        root = session.tree.root
        if session.feeding is not None and session.feeding.is_own(root):
            self.drafter.pool.rollback(session.seq)
            session.kv_nodes.clear()
            session.tree.unexpand(root)
            session.expansions.keep({root})

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
        """Plan the best work of one request, or of all; None without. Bookkeeping only."""
        return self.planner.next_job(request_id)

    def feed(self, request_id: str, base_position: int, bits_NS: np.ndarray) -> None:
        """Take in states of the target, for a drafter that feeds on them. Bookkeeping only.

        Args:
            request_id: an open request.
            base_position: position of the first of them.
            bits_NS: bfloat16 bits, uint16 [N, S], all layers side by side.

        Raises:
            KeyError: unknown request, or states that do not follow the last ones.
            ValueError: another width, or a drafter that wants none.
        """
        feeding = self.sessions[request_id].feeding
        if feeding is None:
            raise ValueError("this drafter does not feed on states of the target")
        feeding.take(base_position, bits_NS)

    def run(self, job: Job) -> Expanded | None:
        """Run a job's tensors; the only method that a worker thread calls."""
        if job.expand is None:
            self.drafter.prefill(job.step)
            return None
        expand, drawn = job.expand, None
        work = job.step, expand.draws, expand.fan_out
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

    def warm_up(self) -> None:
        """Run what a request runs, so that the first one does not pay for what is made once."""
        needs = self.drafter.states
        self.open("warm-up", [0, 0], SamplingParams(seed=0, max_new_tokens=1), SpeculationParams())
        if needs.layers:
            self.feed("warm-up", 0, np.zeros((1, needs.width), np.uint16))
        self.expand("warm-up", 2)
        self.close("warm-up")

    def stats(self, request_id: str) -> dict[str, int]:
        """Counters of one request, and how often this process ran each kernel by each implementation."""
        session = self.sessions[request_id]
        return {
            "draft_expansions": session.num_expansions,
            "draft_tokens_recomputed": session.num_recomputed,
            "draft_states_refreshed": session.feeding.num_refreshed if session.feeding else 0,
            **{f"{operation} {name}": count for (operation, name), count in dispatch.calls.items()},
        }

    def finish(self) -> None:
        """Write the records that are left; call it when no more requests come."""
        if self.recorder is not None:
            self.recorder.flush()
