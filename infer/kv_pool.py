"""Paged KV memory with transactions: which slot holds which position. Bookkeeping only, no torch.

slot = page * page_size + offset. The slots of page 0 are scratch: padding rows write and read there. A
sequence has

* a committed prefix: certain positions in order, in pages that forks share and references count;
* a speculative suffix: at most ``max_suffix`` tree nodes after the prefix, in pages of its own that go back
  to the pool when they are empty. A page is taken only when all of them are full, so there are never more
  than ceil(max_suffix / page_size).

The tensor side follows two rules, and then no data is lost however slots are reused in between:

* Before a forward it drains and executes the moves, batch by batch in order, each batch gather (all sources)
  before scatter; only then the forward writes. So a slot freed by a commit may be handed out again before its
  move was executed: a later batch, or the forward, overwrites it only after the earlier batch has read it.
  Forwards that run later than planned run in the order of planning, and no drained batch is left out.
* The forward that writes what was extended or appended is planned before that is committed or forked, since a
  move copies what the slot holds.

Nothing changes when an operation raises. Not thread-safe.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush

import numpy as np
import numpy.typing as npt

MAX_SUFFIX = 256  # nodes of a speculative suffix, unless a pool is made for fewer

Slots = npt.NDArray[np.int64]


class PoolExhausted(RuntimeError):
    """Too few free pages, or no leaf that may be evicted. Raised before any state has changed."""


@dataclass(frozen=True, slots=True)
class Appended:
    """Ids of the nodes appended, in order, and of the nodes evicted to make room (least probable first)."""

    nodes: list[int]
    evicted: list[int]


@dataclass(slots=True, eq=False)
class _Node:
    parent: int | None
    slot: int
    weight: float
    depth: int = 0
    ancestor_bits: int = 0


@dataclass(slots=True, eq=False)
class _Sequence:
    pages: list[int] = field(default_factory=list)  # of the prefix, ceil(num_committed / page_size) of them
    num_committed: int = 0
    prefix: Slots = field(default_factory=lambda: np.empty(64, np.int64))  # num_committed are valid
    suffix: dict[int, _Node] = field(default_factory=dict)  # parents before children, in order of bit
    free_slots: dict[int, list[int]] = field(default_factory=dict)  # of each suffix page


class KVPool:
    """Pages of KV slots, shared by sequences with a committed prefix and a speculative suffix each.

    Methods raise KeyError for an unknown sequence or node. Node ids are unique in the pool and never reused.
    """

    def __init__(self, num_pages: int, page_size: int = 64, max_suffix: int = MAX_SUFFIX) -> None:
        """num_pages counts page 0, which is reserved. Raises ValueError if nothing could be stored."""
        if num_pages < 2 or page_size < 1 or max_suffix < 1:
            raise ValueError(
                "num_pages must be at least 2 (page 0 is scratch), page_size and max_suffix at least 1, "
                f"got {num_pages}, {page_size} and {max_suffix}"
            )
        self.num_pages = num_pages
        self.page_size = page_size
        self.max_suffix = max_suffix
        self._free_pages = list(range(num_pages - 1, 0, -1))
        self._references = [0] * num_pages
        self._sequences: dict[int, _Sequence] = {}
        self._next_sequence = 0
        self._next_node = 0
        self._moves: list[tuple[Slots, Slots]] = []

    def begin(self) -> int:
        """Start an empty sequence and return its id."""
        return self._register(_Sequence())

    def extend(self, seq: int, n: int) -> Slots:
        """Add n certain positions to the prefix; returns their slots, int64 [n].

        The suffix stays attached to the end of the prefix. A partial last page that is shared with a fork is
        copied first. O(n + page_size).
        Raises PoolExhausted, and ValueError if n < 0.
        """
        if n < 0:
            raise ValueError(f"cannot extend by {n} positions: expected at least 0")
        sequence = self._sequences[seq]
        self._require_pages(self._pages_to_extend(sequence, n))
        return self._grow(sequence, n)

    def append(
        self, seq: int, parents: Sequence[int | None], weights: Sequence[float] | None = None
    ) -> Appended:
        """Add one speculative node per entry of ``parents``.

        A parent is None (the end of the prefix), a node id, or -1-i for the i-th node of this call. weights
        are path probabilities (default 1). Beyond max_suffix the leaf of least weight is evicted, the
        youngest among equals, but never a new node or an ancestor of one. O(n); O(n + suffix) if it evicts.
        Raises PoolExhausted; ValueError for an unknown parent or a wrong number of weights.
        """
        sequence = self._sequences[seq]
        nodes = list(range(self._next_node, self._next_node + len(parents)))
        resolved = [self._resolve(sequence, nodes[:i], parent) for i, parent in enumerate(parents)]
        if weights is None:
            weights = [1.0] * len(parents)
        if len(weights) != len(parents):
            raise ValueError(f"expected one weight a node, got {len(weights)} weights, {len(parents)} nodes")
        evicted = self._choose_evicted(sequence, resolved)
        num_nodes = len(sequence.suffix) - len(evicted) + len(parents)
        self._require_pages(-(-num_nodes // self.page_size) - len(sequence.free_slots))

        self._drop(sequence, evicted)
        for node, parent, weight in zip(nodes, resolved, weights, strict=True):
            sequence.suffix[node] = _Node(parent, self._take_slot(sequence), weight)
            self._link(sequence, node, len(sequence.suffix) - 1)
        self._next_node += len(nodes)
        return Appended(nodes, evicted)

    def commit(self, seq: int, path: Sequence[int], keep: Iterable[int] = ()) -> None:
        """Move ``path`` to the end of the prefix, keep ``keep`` in the suffix, drop the rest.

        path is a chain from a root of the suffix. Kept nodes keep id and slot; children of the path's end
        become roots of the suffix, ancestor bits are counted anew, and weights are scaled so that the
        greatest is 1: the path probability of the new root. An empty path only prunes. O(suffix + page_size).
        Pages that the commit empties count as free, so without ``keep`` it succeeds unless a page shared with
        a fork must be copied: after a failure try again without.
        Raises PoolExhausted; ValueError if path is no such chain, or keep is not descended from its end and
        closed under parent.
        """
        sequence = self._sequences[seq]
        kept = set(keep)
        self._check_commit(sequence, path, kept)
        dropped = [node for node in sequence.suffix if node not in kept]
        num_emptied = self._num_emptied(sequence, dropped)
        self._require_pages(self._pages_to_extend(sequence, len(path)) - num_emptied)

        sources = [sequence.suffix[node].slot for node in path]
        self._drop(sequence, dropped)
        self._grow(sequence, len(path), sources)
        top = max((node.weight for node in sequence.suffix.values()), default=0.0) or 1.0
        for node in sequence.suffix.values():
            node.weight /= top

    def rollback(self, seq: int) -> None:
        """Drop the whole suffix. O(suffix)."""
        sequence = self._sequences[seq]
        self._drop(sequence, list(sequence.suffix))

    def fork(self, seq: int) -> int:
        """Start a sequence that shares the prefix of ``seq`` and has no suffix. O(prefix); takes no page."""
        source = self._sequences[seq]
        for page in source.pages:
            self._references[page] += 1
        return self._register(_Sequence(source.pages.copy(), source.num_committed, source.prefix.copy()))

    def free(self, seq: int) -> None:
        """End a sequence and release its pages."""
        self.rollback(seq)
        for page in self._sequences.pop(seq).pages:
            self._release_page(page)

    def drain_moves(self) -> list[tuple[Slots, Slots]]:
        """Hand over the copies to execute before the next forward: batches (source, destination), int64.

        In order. Within a batch read all sources before writing (``kv[dst] = kv[src]``): they may overlap.
        """
        moves, self._moves = self._moves, []
        return moves

    @property
    def num_free_pages(self) -> int:
        """Pages that no sequence holds."""
        return len(self._free_pages)

    def can_extend(self, seq: int, n: int) -> bool:
        """Whether extend(seq, n) finds its pages."""
        return self._pages_to_extend(self._sequences[seq], n) <= self.num_free_pages

    def can_append(self, seq: int, n: int) -> bool:
        """Whether append of n nodes finds its pages and n <= max_suffix.

        Whether their ancestors fit beside them shows only in append.
        """
        sequence = self._sequences[seq]
        num_nodes = min(len(sequence.suffix) + n, self.max_suffix)
        num_pages = -(-num_nodes // self.page_size) - len(sequence.free_slots)
        return n <= self.max_suffix and num_pages <= self.num_free_pages

    def num_committed(self, seq: int) -> int:
        """Positions in the prefix."""
        return self._sequences[seq].num_committed

    def prefix_slots(self, seq: int) -> Slots:
        """Slots of the prefix in order, int64 [num_committed]: a view, valid until the next change. O(1)."""
        sequence = self._sequences[seq]
        view = sequence.prefix[: sequence.num_committed]
        view.flags.writeable = False
        return view

    def suffix(self, seq: int) -> list[int]:
        """Nodes of the suffix, parents before children; the i-th has bit i in ancestor_bits."""
        return list(self._sequences[seq].suffix)

    def pages(self, seq: int) -> list[int]:
        """Pages of the prefix in order."""
        return list(self._sequences[seq].pages)

    def suffix_slots(self, seq: int) -> list[int]:
        """Slots of the suffix's nodes, in order of their bits."""
        return [node.slot for node in self._sequences[seq].suffix.values()]

    def slot(self, seq: int, node: int) -> int:
        """Slot of a suffix node."""
        return self._sequences[seq].suffix[node].slot

    def depth(self, seq: int, node: int) -> int:
        """Number of ancestors in the suffix: the node's position is num_committed + depth."""
        return self._sequences[seq].suffix[node].depth

    def ancestor_bits(self, seq: int, node: int) -> int:
        """Bit i is set if suffix(seq)[i] is the node or its ancestor. Valid until a commit or an eviction."""
        return self._sequences[seq].suffix[node].ancestor_bits

    def path_slots(self, seq: int, node: int) -> Slots:
        """Slots of the node's ancestors in depth order, its own last, int64 [depth + 1]."""
        suffix = self._sequences[seq].suffix
        slots = []
        step: int | None = node
        while step is not None:
            slots.append(suffix[step].slot)
            step = suffix[step].parent
        return np.array(slots[::-1], np.int64)

    def _register(self, sequence: _Sequence) -> int:
        seq = self._next_sequence
        self._next_sequence += 1
        self._sequences[seq] = sequence
        return seq

    def _require_pages(self, n: int) -> None:
        if n > self.num_free_pages:
            raise PoolExhausted(
                f"{n} KV pages of {self.page_size} positions are needed, {self.num_free_pages} of "
                f"{self.num_pages} are free: free a sequence or give the pool more pages"
            )

    def _take_page(self) -> int:
        page = self._free_pages.pop()
        self._references[page] = 1
        return page

    def _release_page(self, page: int) -> None:
        self._references[page] -= 1
        if self._references[page] == 0:
            self._free_pages.append(page)

    def _must_copy_tail(self, sequence: _Sequence) -> bool:
        return sequence.num_committed % self.page_size > 0 and self._references[sequence.pages[-1]] > 1

    def _pages_to_extend(self, sequence: _Sequence, n: int) -> int:
        num_pages = -(-(sequence.num_committed + n) // self.page_size)
        return num_pages - len(sequence.pages) + (n > 0 and self._must_copy_tail(sequence))

    def _grow(self, sequence: _Sequence, n: int, sources: Sequence[int] = ()) -> Slots:
        """Add n positions to the prefix and record the moves that fill them, if there are sources."""
        start, end = sequence.num_committed, sequence.num_committed + n
        if n == 0:
            return np.empty(0, np.int64)
        # Copied together with the sources, in one batch: the new page may be the one that the sources lie in.
        first = start - start % self.page_size if self._must_copy_tail(sequence) else start
        moved_from = np.concatenate([sequence.prefix[first:start], np.array(sources, np.int64)])
        if first < start:
            self._release_page(sequence.pages.pop())
        while len(sequence.pages) * self.page_size < end:
            sequence.pages.append(self._take_page())

        if end > len(sequence.prefix):
            sequence.prefix = np.concatenate([sequence.prefix[:start], np.empty(end, np.int64)])
        position = np.arange(first, end)
        first_page = first // self.page_size
        pages = np.array(sequence.pages[first_page:], np.int64)
        sequence.prefix[first:end] = (
            pages[position // self.page_size - first_page] * self.page_size + position % self.page_size
        )
        sequence.num_committed = end
        if len(moved_from):
            self._moves.append((moved_from, sequence.prefix[first : first + len(moved_from)].copy()))
        return sequence.prefix[start:end].copy()

    def _take_slot(self, sequence: _Sequence) -> int:
        for free in sequence.free_slots.values():
            if free:
                return free.pop()
        first = self._take_page() * self.page_size
        free = list(range(first + self.page_size - 1, first - 1, -1))
        sequence.free_slots[first // self.page_size] = free
        return free.pop()

    def _resolve(self, sequence: _Sequence, earlier: list[int], parent: int | None) -> int | None:
        if parent is not None and parent < 0 and -1 - parent < len(earlier):
            return earlier[-1 - parent]
        if parent is None or parent in sequence.suffix:
            return parent
        raise ValueError(
            f"unknown parent {parent}: expected None, a node of the suffix, or -1-i for an earlier new node"
        )

    def _link(self, sequence: _Sequence, node: int, index: int) -> None:
        entry = sequence.suffix[node]
        parent = None if entry.parent is None else sequence.suffix.get(entry.parent)
        if parent is None:  # also when the parent has just been committed
            entry.parent, entry.depth, entry.ancestor_bits = None, 0, 1 << index
        else:
            entry.depth, entry.ancestor_bits = parent.depth + 1, parent.ancestor_bits | 1 << index

    def _drop(self, sequence: _Sequence, nodes: list[int]) -> None:
        for node in nodes:
            slot = sequence.suffix.pop(node).slot
            page = slot // self.page_size
            sequence.free_slots[page].append(slot)
            if len(sequence.free_slots[page]) == self.page_size:
                del sequence.free_slots[page]
                self._release_page(page)
        if nodes:
            for index, node in enumerate(sequence.suffix):
                self._link(sequence, node, index)

    def _num_emptied(self, sequence: _Sequence, dropped: list[int]) -> int:
        """Suffix pages in use that hold nothing but ``dropped``."""
        num_dropped = Counter(sequence.suffix[node].slot // self.page_size for node in dropped)
        return sum(n + len(sequence.free_slots[page]) == self.page_size for page, n in num_dropped.items())

    def _choose_evicted(self, sequence: _Sequence, parents: list[int | None]) -> list[int]:
        suffix = sequence.suffix
        excess = len(suffix) + len(parents) - self.max_suffix
        if excess <= 0:
            return []
        protected: set[int | None] = {None}
        for parent in parents:
            while parent in suffix and parent not in protected:
                protected.add(parent)
                parent = suffix[parent].parent
        num_children = Counter(node.parent for node in suffix.values())
        unused = (node for node in suffix if not num_children[node] and node not in protected)
        leaves = [(suffix[node].weight, -node) for node in unused]
        heapify(leaves)
        evicted: list[int] = []
        while len(evicted) < excess:
            if not leaves:
                raise PoolExhausted(
                    f"{len(parents)} nodes and their ancestors do not fit a suffix of {self.max_suffix} nodes"
                )
            evicted.append(-heappop(leaves)[1])
            parent = suffix[evicted[-1]].parent
            num_children[parent] -= 1
            if parent is not None and parent not in protected and not num_children[parent]:
                heappush(leaves, (suffix[parent].weight, -parent))
        return evicted

    def _check_commit(self, sequence: _Sequence, path: Sequence[int], kept: set[int]) -> None:
        suffix = sequence.suffix
        end: int | None = None
        for node in path:
            if node not in suffix or suffix[node].parent != end:
                raise ValueError(f"path must be a chain in the suffix, but {node} is no child of {end}")
            end = node
        parents = kept | {end}
        for node in kept:
            if node not in suffix or node in path or suffix[node].parent not in parents:
                raise ValueError(
                    f"keep must descend from {end} and be closed under parent, but {node} is not"
                )
