"""A draft server whose drafter is a table: each token has two known successors. Script, and parts for tests.

Faults are asked for by the drafter's name, or by tokens: POISON makes the drafter raise.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from foredraft.infer import messages
from foredraft.infer.draft_server import run_process
from foredraft.infer.params import SamplingParams, SpeculationParams
from foredraft.infer.tree import Block, SpeculationTree

VOCAB = 97
MAX_POSITIONS = 2000
POISON = 96
READY = messages.Ready(family="table", max_depth=16, max_positions=MAX_POSITIONS)


def best(token: int) -> int:
    """The likeliest successor; the second is one more."""
    return (token * 5 + 1) % (VOCAB - 2)


@dataclass
class Job:
    """A prompt, or one node to expand."""

    request_id: str
    kind: str
    node: int = -1
    token: int = 0
    num_rows: int = 1


@dataclass
class Session:
    """State of one request."""

    tree: SpeculationTree
    params: SpeculationParams
    num_tokens: int
    is_prefilled: bool = False
    num_spent: int = 0
    num_expansions: int = 0


def is_running(pid: int) -> bool:
    """Whether the process exists and has not ended."""
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False


class TableSpeculator:
    """Same interface as foredraft.infer.speculator.Speculator; a job takes `delay` seconds."""

    def __init__(self, delay: float = 0.0) -> None:
        self.delay = delay
        self.sessions: dict[str, Session] = {}

    def work(self) -> None:
        """What a forward does; replaced where a test wants computation."""
        time.sleep(self.delay)

    def open(
        self,
        request_id: str,
        tokens: Sequence[int],
        sampling: SamplingParams,
        params: SpeculationParams,
        max_tokens: int | None = None,
        num_prompt: int | None = None,
    ) -> None:
        if len(tokens) + (max_tokens or 0) > MAX_POSITIONS:
            raise ValueError(f"the drafter holds {MAX_POSITIONS} positions, got {len(tokens)} and more")
        tree = SpeculationTree(tokens[-1], max_depth=READY.max_depth)
        self.sessions[request_id] = Session(tree, params, len(tokens))

    def close(self, request_id: str) -> None:
        del self.sessions[request_id]

    def advance(self, request_id: str, base_position: int, settled: Sequence[int]) -> str:
        session = self.sessions[request_id]
        if base_position != session.num_tokens:
            raise KeyError(base_position)
        session.num_tokens += len(settled)
        session.num_spent = 0
        return session.tree.advance(settled).kind

    def block(self, request_id: str) -> Block:
        session = self.sessions[request_id]
        return session.tree.block(session.params.block_nodes, session.params.block)

    def next_job(self, request_id: str | None = None) -> Job | None:
        for name in [request_id] if request_id else list(self.sessions):
            session = self.sessions[name]
            if not session.is_prefilled:
                session.is_prefilled = True
                return Job(name, "prefill")
            budget = session.params.budget
            nodes = session.tree.select(1) if not budget or session.num_spent < budget else []
            if nodes:
                session.num_spent += 1
                session.num_expansions += 1
                session.tree.mark_in_flight(nodes)
                return Job(name, "expand", nodes[0], session.tree.token(nodes[0]))
        return None

    def run(self, job: Job) -> list[int]:
        self.work()
        if job.token == POISON:
            raise RuntimeError("poisoned")
        return [best(job.token), best(job.token) + 1]

    def merge(self, job: Job, result: list[int]) -> None:
        if job.kind == "expand":
            self.sessions[job.request_id].tree.add_children(job.node, result, [0.6, 0.3])

    def stats(self, request_id: str) -> dict[str, int]:
        return {"draft_expansions": self.sessions[request_id].num_expansions}

    def finish(self) -> None:
        pass


def build(arguments: argparse.Namespace) -> tuple[TableSpeculator, messages.Ready]:
    """`--drafter` is the delay in seconds, or the fault to start with."""
    if arguments.drafter == "missing":
        raise ValueError("no drafter at nowhere")
    if arguments.drafter == "crash":
        raise RuntimeError("internal trouble")
    return TableSpeculator(float(arguments.drafter or 0)), READY


if __name__ == "__main__":
    run_process(build)
