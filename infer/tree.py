"""The speculation tree of one request: all guesses beyond the last settled token. Pure Python, no torch.

The root is the last settled token. A child's ``prob`` is the probability that it is the target's token after
its parent; what the children leave of 1 is ``other``, which has no node and is never renormalised away.
``path_prob`` is the product of ``prob`` along the path from the root (root = 1). Invariants, from which the
rest follows:

* ids grow with age and siblings are stored most probable first, in order of id; so a node comes after its
  parent and its better siblings in the order (path_prob descending, id ascending), whatever ties or rounding;
* hence the first n nodes of that order are a connected subtree, the most probable one of its size, and
  contain the first n - 1: a best-first walk finds them in O(n log n) without a look at the rest of the tree;
* ``advance`` recomputes path_prob and depth from the conditional probabilities: no error accumulates over
  rounds, and the result equals a tree that was grown below the new root from the start.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from heapq import heapify, heappop, heappush
from typing import Literal

from foredraft.infer.params import BlockShape

SUM_TOLERANCE = 1e-3  # a softmax in float32 or bfloat16 may add up to slightly more than 1


class NodeState(Enum):
    """LEAF: not expanded. IN_FLIGHT: the drafter runs on it. EXPANDED: children known, maybe none."""

    LEAF = "leaf"
    IN_FLIGHT = "in_flight"
    EXPANDED = "expanded"


Law = tuple[list[int], list[float]]  # token ids and their probabilities; all others have none


@dataclass(frozen=True, slots=True)
class Block:
    """Guesses for the target to verify, one row a node, parents before children.

    parents[i] is the row of node i's parent, -1 for the root (which is no row).
    """

    nodes: list[int]
    tokens: list[int]
    parents: list[int]
    path_probs: list[float]
    laws: list[Law] = field(default_factory=list)  # what each guess was drawn from; of rejection only

    def first(self, n: int) -> Block:
        """The first n guesses: parents come before their children, so they are a block too."""
        return Block(self.nodes[:n], self.tokens[:n], self.parents[:n], self.path_probs[:n], self.laws[:n])


@dataclass(frozen=True, slots=True)
class Advance:
    """What an outcome did to the tree.

    kind: "hit" (the new root exists and has children), "leaf" (exists without), "miss" (was never guessed).
    path: nodes that left the tree by being settled, old root first, new root excluded.
    survivors: the nodes now in the tree, new root included.
    """

    kind: Literal["hit", "leaf", "miss"]
    path: list[int]
    survivors: set[int]


@dataclass(slots=True, eq=False)
class _Node:
    id: int
    token: int
    parent: int | None  # an id: references point down only, so that what is dropped is freed without the gc
    depth: int
    prob: float
    path_prob: float
    state: NodeState = NodeState.LEAF
    children: list[_Node] = field(default_factory=list)


class SpeculationTree:
    """Token tree that is expanded best first, cut into blocks, and re-rooted by outcomes.

    Node ids are unique for the life of the tree and never reused. Accessors raise KeyError for a node that is
    gone; ``node in tree`` asks. Not thread-safe.
    """

    def __init__(self, root_token: int, *, max_depth: int = 64) -> None:
        """max_depth: no node deeper than this is added. Raises ValueError if it is below 1."""
        if max_depth < 1:
            raise ValueError(f"max_depth must be at least 1, got {max_depth}")
        self.max_depth = max_depth
        self._ids = itertools.count()
        self._plant(self._new_root(root_token))

    @property
    def root(self) -> int:
        """Id of the last settled token's node."""
        return self._root.id

    def __contains__(self, node: int) -> bool:
        return node in self._nodes

    def __len__(self) -> int:
        """Number of nodes, root included."""
        return len(self._nodes)

    def token(self, node: int) -> int:
        """Token id."""
        return self._nodes[node].token

    def parent(self, node: int) -> int | None:
        """Id of the parent, None for the root."""
        return self._nodes[node].parent

    def prob(self, node: int) -> float:
        """Probability of the node given its parent; 1 for the root."""
        return self._nodes[node].prob

    def path_prob(self, node: int) -> float:
        """Probability of the node given the root."""
        return self._nodes[node].path_prob

    def path_tokens(self, node: int) -> list[int]:
        """Token ids from below the root to the node, its own last."""
        tokens: list[int] = []
        while (parent := self.parent(node)) is not None:
            tokens.append(self.token(node))
            node = parent
        return tokens[::-1]

    def depth(self, node: int) -> int:
        """Edges from the root; 0 for the root."""
        return self._nodes[node].depth

    def children(self, node: int) -> list[int]:
        """Ids of the children, most probable first."""
        return [child.id for child in self._nodes[node].children]

    def state(self, node: int) -> NodeState:
        """LEAF, IN_FLIGHT or EXPANDED."""
        return self._nodes[node].state

    def select(self, width: int, *, shape: BlockShape = "tree", chain_depth: int = 0) -> list[int]:
        """Up to ``width`` nodes to expand next: leaves above max_depth, best path_prob first.

        Ties go to the lower id. With shape "chain" the tip of the best-child chain comes first while its
        depth is below chain_depth. Repeating the call gives the same nodes: ``mark_in_flight`` takes them.
        O(width log leaves), amortised.
        """
        best = self._best_leaves(width)
        if shape == "chain":
            tip = self._root
            while tip.children:
                tip = tip.children[0]
            if tip.state is NodeState.LEAF and tip.depth < min(chain_depth, self.max_depth):
                best = [tip.id, *(node for node in best if node != tip.id)]
        return best[:width]

    def mark_in_flight(self, nodes: Iterable[int]) -> None:
        """The drafter starts on these leaves; ``add_children`` ends that, or ``unexpand`` if it failed.

        Raises KeyError for a node that is gone and ValueError for one that is not a leaf.
        """
        for node in nodes:
            state = self._nodes[node].state
            if state is not NodeState.LEAF:
                raise ValueError(f"node {node} must be a leaf to go in flight, but is {state.value}")
            self._nodes[node].state = NodeState.IN_FLIGHT

    def add_children(self, node: int, tokens: Sequence[int], probs: Sequence[float]) -> list[int]:
        """Expand ``node`` by children ``tokens`` with conditional ``probs``; returns their ids, best first.

        The probabilities of a token given twice are added; ties go to the lower token id. A late result
        changes nothing: [] if the node is gone, the present children if it is expanded. O(F log F).
        Raises ValueError unless probs are >= 0 with sum <= 1, one a token, and the node lies above max_depth.
        """
        parent = self._nodes.get(node)
        if parent is None:
            return []
        if parent.state is not NodeState.EXPANDED:
            self._check_children(parent, tokens, probs)
            mass: dict[int, float] = {}
            for token, prob in zip(tokens, probs, strict=True):
                mass[token] = mass.get(token, 0.0) + prob
            for token, prob in sorted(mass.items(), key=lambda item: (-item[1], item[0])):
                self._add_child(parent, token, min(prob, 1.0))
            parent.state = NodeState.EXPANDED
        return [child.id for child in parent.children]

    def unexpand(self, node: int) -> None:
        """Make ``node`` a leaf again and drop its descendants (its KV was evicted, or its job failed).

        Does nothing if the node is gone. O(descendants).
        """
        leaf = self._nodes.get(node)
        if leaf is None or leaf.state is NodeState.LEAF:
            return
        stack, leaf.children = leaf.children, []
        while stack:
            dropped = stack.pop()
            del self._nodes[dropped.id]
            stack += dropped.children
        leaf.state = NodeState.LEAF
        self._offer(leaf)

    def block(self, n: int, shape: BlockShape) -> Block:
        """The n most probable nodes below the root, or the first n of the best-child chain.

        Fewer if there are fewer. Rows come best first. block(n - 1) is a prefix of block(n), in both shapes.
        O(n log n).
        """
        nodes = list(itertools.islice(self._chain() if shape == "chain" else self._best_first(), n))
        row = {node.id: i for i, node in enumerate(nodes)}
        return Block(
            nodes=list(row),
            tokens=[node.token for node in nodes],
            parents=[-1 if node.parent is None else row.get(node.parent, -1) for node in nodes],
            path_probs=[node.path_prob for node in nodes],
        )

    def advance(self, tokens: Sequence[int]) -> Advance:
        """Re-root at the node of the settled ``tokens`` and keep what hangs below it; a fresh tree on a miss.

        Survivors keep id, state and conditional probability; path_prob and depth are counted from the new
        root. O(tokens * F + survivors). Raises ValueError if there are no tokens.
        """
        if not tokens:
            raise ValueError("an outcome settles at least one token, got none")
        path = [self._root]
        for token in tokens:
            child = next((child for child in path[-1].children if child.token == token), None)
            if child is None:
                break
            path.append(child)
        if len(path) == len(tokens) + 1:
            new_root = path.pop()
            kind: Literal["hit", "leaf", "miss"] = "hit" if new_root.children else "leaf"
        else:
            new_root, kind = self._new_root(tokens[-1]), "miss"
        self._plant(new_root)
        return Advance(kind, [node.id for node in path], set(self._nodes))

    def _new_root(self, token: int) -> _Node:
        return _Node(next(self._ids), token, parent=None, depth=0, prob=1.0, path_prob=1.0)

    def _plant(self, root: _Node) -> None:
        """Make ``root`` the root and its descendants the whole tree."""
        root.parent, root.depth, root.prob, root.path_prob = None, 0, 1.0, 1.0
        self._root = root
        self._nodes: dict[int, _Node] = {}
        # Heap of (-path_prob, id) with every selectable leaf; entries of other nodes are stale and skipped.
        self._frontier: list[tuple[float, int]] = []
        stack = [root]
        while stack:
            node = stack.pop()
            self._nodes[node.id] = node
            if node.state is NodeState.LEAF:  # and above max_depth, since it has come closer to the root
                self._frontier.append((-node.path_prob, node.id))
            for child in node.children:
                child.depth = node.depth + 1
                child.path_prob = node.path_prob * child.prob
            stack += node.children
        heapify(self._frontier)

    def _check_children(self, parent: _Node, tokens: Sequence[int], probs: Sequence[float]) -> None:
        if len(tokens) != len(probs):
            raise ValueError(f"expected one probability a token, got {len(probs)} for {len(tokens)} tokens")
        if tokens and not (min(probs) >= 0.0 and sum(probs) <= 1.0 + SUM_TOLERANCE):
            raise ValueError(f"expected probabilities >= 0 with sum <= 1, got {list(probs)}")
        if parent.depth >= self.max_depth:
            raise ValueError(f"node {parent.id} is at max_depth {self.max_depth} and can have no children")

    def _add_child(self, parent: _Node, token: int, prob: float) -> None:
        child = _Node(next(self._ids), token, parent.id, parent.depth + 1, prob, parent.path_prob * prob)
        parent.children.append(child)
        self._nodes[child.id] = child
        self._offer(child)

    def _offer(self, leaf: _Node) -> None:
        if leaf.depth < self.max_depth:
            heappush(self._frontier, (-leaf.path_prob, leaf.id))

    def _best_leaves(self, width: int) -> list[int]:
        best: list[tuple[float, int]] = []
        while self._frontier and len(best) < width:
            entry = heappop(self._frontier)
            node = self._nodes.get(entry[1])
            # A node that became a leaf again has two equal entries, which leave the heap one after the other.
            if node is not None and node.state is NodeState.LEAF and entry not in best[-1:]:
                best.append(entry)
        for entry in best:
            heappush(self._frontier, entry)
        return [node for _, node in best]

    def _chain(self) -> Iterator[_Node]:
        node = self._root
        while node.children:
            node = node.children[0]
            yield node

    def _best_first(self) -> Iterator[_Node]:
        """Nodes below the root by (path_prob descending, id ascending)."""
        heap: list[tuple[float, int, list[_Node], int]] = []

        def push(siblings: list[_Node], rank: int) -> None:
            if rank < len(siblings):
                heappush(heap, (-siblings[rank].path_prob, siblings[rank].id, siblings, rank))

        push(self._root.children, 0)
        while heap:
            *_, siblings, rank = heappop(heap)
            yield siblings[rank]
            push(siblings, rank + 1)
            push(siblings[rank].children, 0)
