"""From the trees of all requests to the drafter's next step: which rows run, and what they are to find out.

Bookkeeping only: jobs are run by whoever holds the tensors, in the order in which they were planned.
"""

from __future__ import annotations

from collections.abc import Mapping

from foredraft.infer.drafters import Drafter, Feed, Step
from foredraft.infer.kv_pool import PoolExhausted
from foredraft.infer.sampler import apart
from foredraft.infer.session import Expand, Job, Session
from foredraft.infer.step_plan import Row


class JobPlanner:
    """Plans the work of one drafter.

    Args:
        drafter: that runs the jobs.
        sessions: the open requests, as the speculator keeps them.
        fan_out: candidates of a node that are wanted whatever the request asks for.
    """

    def __init__(self, drafter: Drafter, sessions: Mapping[str, Session], fan_out: int) -> None:
        self.drafter = drafter
        self.sessions = sessions
        self.fan_out = fan_out

    def next_job(self, request_id: str | None = None) -> Job | None:
        """The best work: prompts first, then the request with the most probable node; None without."""
        names = [request_id] if request_id is not None else list(self.sessions)
        ranked = []
        for name in names:
            session = self.sessions[name]
            if len(session.pending) >= self.drafter.row_bucket:
                if (job := self._plan_pending(name, session)) is not None:
                    return job
            elif session.can_expand and (first := self._select(session, 1)):
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
        start = session.root_position - len(session.pending)
        num_tokens = self.drafter.prefill_room(session.seq)
        if session.feeding is not None:
            num_tokens = session.feeding.num_ready(start, num_tokens)
        chunk = session.pending[:num_tokens]
        if not chunk:
            return None
        try:
            plan = self.drafter.plan_prefill(session.seq, chunk)
        except PoolExhausted:
            return None
        del session.pending[: len(chunk)]
        feed = None
        if session.feeding is not None:
            feed = session.feeding.feed(range(start, start + len(chunk)), [])
        return Job(request_id, Step(plan, self.drafter.pool.drain_moves(), feed), None)

    def _plan_expansion(self, request_id: str, session: Session) -> Job | None:
        """The best leaves of one request as one batched step.

        The few settled tokens that a miss left without KV go first: then the root has none either, and is the
        only leaf. So do those whose KV is stale.
        """
        tree, pool = session.tree, self.drafter.pool
        room = self.drafter.row_bucket - len(session.pending)
        stale = session.feeding.stale[: room - 1] if session.feeding is not None else []
        nodes = self._select(session, room - len(stale))
        if not nodes:
            return None
        # a node is selected only after its parent was expanded: all parents but the root's have KV
        ups = [tree.parent(node) for node in nodes]
        parents = [None if up is None else session.kv_nodes[up] for up in ups]
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
        settled = [*stale, *range(first, session.root_position)]
        rows = [Row(session.seq, session.tokens[position], position=position) for position in settled]
        rows += [
            Row(session.seq, tree.token(node), kv) for node, kv in zip(nodes, appended.nodes, strict=True)
        ]
        session.pending.clear()
        feed, num_own = self._feed_of(session, settled, nodes, parents)
        step = Step(self.drafter.plan_rows(rows), pool.drain_moves(), feed)
        return Job(request_id, step, self._expand_of(session, nodes, num_own))

    def _feed_of(
        self, session: Session, settled: list[int], nodes: list[int], parents: list[int | None]
    ) -> tuple[Feed | None, list[int]]:
        """What the rows of an expansion start from; of every node, the steps since a state of the target."""
        if session.feeding is None:
            return None, [0] * len(nodes)
        session.feeding.refresh(settled)
        num_own = session.feeding.start(nodes, [session.tree.parent(node) for node in nodes])
        # the root alone has no parent in the suffix, and it is the first node wherever it is one
        roots = [session.root_position for parent in parents if parent is None]
        slots = [self.drafter.pool.slot(session.seq, parent) for parent in parents if parent is not None]
        return session.feeding.feed([*settled, *roots], slots), num_own

    def _expand_of(self, session: Session, nodes: list[int], num_own: list[int]) -> Expand:
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
            contexts=session.expansions.contexts(tree, nodes, sampler.params.temperature, num_own),
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
