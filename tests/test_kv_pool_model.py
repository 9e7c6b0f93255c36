"""The KV pool against a plain list model: contents after lazily executed moves, counts, leaks, exhaustion."""

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import pytest

from foredraft.infer.kv_pool import KVPool, PoolExhausted

MAX_SEQUENCES = 5
MAX_PREFIX = 150


@dataclass
class Model:
    """What one sequence must hold: values of the prefix, and node -> (value, parent, weight), in order."""

    prefix: list[int] = field(default_factory=list)
    nodes: dict[int, tuple[int, int | None, float]] = field(default_factory=dict)
    unwritten_prefix: list[tuple[int, int]] = field(default_factory=list)  # (slot, value)
    unwritten_nodes: set[int] = field(default_factory=set)

    @property
    def is_unwritten(self) -> bool:
        return bool(self.unwritten_prefix or self.unwritten_nodes)

    def ancestors(self, node: int | None) -> list[int]:
        """The node's path from the top, itself last."""
        path: list[int] = []
        while node is not None:
            path.append(node)
            node = self.nodes[node][1]
        return path[::-1]

    def drop(self, nodes: set[int]) -> None:
        self.nodes = {node: entry for node, entry in self.nodes.items() if node not in nodes}
        self.unwritten_nodes -= nodes

    def evict_one(self, protected: set[int]) -> int | None:
        """Drop the leaf of least weight, the youngest among equals, and return it."""
        parents = {parent for _, parent, _ in self.nodes.values()}
        leaves = [node for node in self.nodes if node not in parents and node not in protected]
        if not leaves:
            return None
        leaf = min(leaves, key=lambda node: (self.nodes[node][2], -node))
        self.drop({leaf})
        return leaf


class Simulation:
    """Random operations on a pool and on the model. The contents array learns of them only in ``forward``."""

    def __init__(self, seed: int, page_size: int, num_pages: int, max_suffix: int) -> None:
        self.rng = random.Random(seed)
        self.pool = KVPool(num_pages, page_size, max_suffix)
        self.contents = np.full(num_pages * page_size, -1)
        self.models: dict[int, Model] = {}
        self.next_value = 0
        self.seen: Counter[str] = Counter()

    def new_values(self, n: int) -> list[int]:
        self.next_value += n
        return list(range(self.next_value - n, self.next_value))

    def forward(self) -> None:
        """Execute all moves since the last forward, then write the new rows, then check everything."""
        for source, destination in self.pool.drain_moves():
            self.contents[destination] = self.contents[source]
            self.seen["batches"] += 1
        for seq, model in self.models.items():
            for slot, value in model.unwritten_prefix:
                self.contents[slot] = value
            for node in model.unwritten_nodes:
                self.contents[self.pool.slot(seq, node)] = model.nodes[node][0]
            model.unwritten_prefix, model.unwritten_nodes = [], set()
        for seq in self.models:
            self.check_contents(seq)
        self.check_pages()

    def check_contents(self, seq: int) -> None:
        pool, model = self.pool, self.models[seq]
        assert self.contents[pool.prefix_slots(seq)].tolist() == model.prefix
        suffix = pool.suffix(seq)
        assert suffix == list(model.nodes)
        for node in self.rng.sample(suffix, min(3, len(suffix))):
            path = model.ancestors(node)
            assert self.contents[pool.path_slots(seq, node)].tolist() == [model.nodes[n][0] for n in path]
            assert pool.depth(seq, node) == len(path) - 1
            bits = pool.ancestor_bits(seq, node)
            assert [n for i, n in enumerate(suffix) if bits >> i & 1] == path

    def check_pages(self) -> None:
        """References equal use, only prefix pages are shared, nothing leaks."""
        pool, references, suffix_pages = self.pool, Counter[int](), set[int]()
        for seq in self.models:
            slots = [pool.slot(seq, node) for node in pool.suffix(seq)]
            pages = {slot // pool.page_size for slot in slots}
            assert len(set(slots)) == len(slots)
            assert len(pages) <= -(-pool.max_suffix // pool.page_size)
            suffix_pages |= pages
            references.update(pages)
            references.update(set((pool.prefix_slots(seq) // pool.page_size).tolist()))
        assert 0 not in references
        assert all(references[page] == 1 for page in suffix_pages)
        assert [references[page] for page in range(pool.num_pages)] == pool._references
        assert pool.num_free_pages == pool.num_pages - 1 - len(references)

    def state(self, seq: int) -> tuple[object, ...]:
        pool = self.pool
        nodes = [(node, pool.slot(seq, node)) for node in pool.suffix(seq)]
        return pool.prefix_slots(seq).tolist(), nodes, pool.num_free_pages, len(pool._moves)

    def step(self) -> None:
        if not self.models or (len(self.models) < MAX_SEQUENCES and self.rng.random() < 0.05):
            self.models[self.pool.begin()] = Model()
        seq = self.rng.choice(list(self.models))
        operations = [self.extend, self.append, self.commit, self.rollback, self.fork, self.free]
        (operation,) = self.rng.choices(operations, [15, 45, 30, 2, 5, 3])
        if len(self.models[seq].prefix) > MAX_PREFIX:
            operation = self.free
        if operation in (self.commit, self.fork) and self.models[seq].is_unwritten:
            self.forward()
        operation(seq)
        self.seen[operation.__name__] += 1
        if self.rng.random() < 0.15:
            self.forward()

    def extend(self, seq: int) -> None:
        n = self.rng.choice([0, 1, 1, 2, 3, 7, self.pool.page_size])
        if not self.pool.can_extend(seq, n):
            self.expect_exhausted(seq, lambda: self.pool.extend(seq, n))
            return
        model, values = self.models[seq], self.new_values(n)
        num_batches = len(self.pool._moves)
        slots = self.pool.extend(seq, n)
        assert slots.dtype == np.int64
        self.seen["copy on extend"] += len(self.pool._moves) - num_batches
        model.prefix += values
        model.unwritten_prefix += zip(slots.tolist(), values, strict=True)

    def append(self, seq: int) -> None:
        model, n = self.models[seq], self.rng.randint(0, 8)
        parents: list[int | None] = []
        for i in range(n):
            known = self.rng.sample(list(model.nodes), min(2, len(model.nodes)))
            parents.append(self.rng.choice([None, *known, *known, *(-1 - j for j in range(i))]))
        weights = [self.rng.choice([0.1, 0.25, self.rng.random()]) for _ in parents]
        needed = {a for parent in parents if parent is None or parent >= 0 for a in model.ancestors(parent)}
        if not self.pool.can_append(seq, n) or len(needed) + n > self.pool.max_suffix:
            self.expect_exhausted(seq, lambda: self.pool.append(seq, parents, weights))
            return
        result = self.pool.append(seq, parents, weights)
        excess = max(0, len(model.nodes) + n - self.pool.max_suffix)
        assert result.evicted == [model.evict_one(needed) for _ in range(excess)]
        entries = zip(result.nodes, parents, weights, self.new_values(n), strict=True)
        for node, parent, weight, value in entries:
            resolved = result.nodes[-1 - parent] if parent is not None and parent < 0 else parent
            model.nodes[node] = (value, resolved, weight)
        model.unwritten_nodes |= set(result.nodes)
        self.seen["evictions"] += excess

    def commit(self, seq: int) -> None:
        model = self.models[seq]
        path = model.ancestors(self.rng.choice([None, *model.nodes]))[: self.rng.choice([0, 1, 1, 2, 9])]
        end = path[-1] if path else None
        keep: set[int] = set()
        keep_rate = self.rng.choice([0.0, 0.8, 1.0, 1.0])
        for node, (_, parent, _) in model.nodes.items():
            if node not in path and (parent == end or parent in keep) and self.rng.random() < keep_rate:
                keep.add(node)
        before = self.state(seq)
        try:
            self.pool.commit(seq, path, keep)
        except PoolExhausted:
            assert self.state(seq) == before
            self.seen["exhausted"] += 1
            return
        if path:
            self.seen["copy on commit"] += len(self.pool._moves[-1][0]) > len(path)
        model.prefix += [model.nodes[node][0] for node in path]
        model.drop(set(model.nodes) - keep)
        top = max((weight for _, _, weight in model.nodes.values()), default=1.0)
        for node, (value, parent, weight) in model.nodes.items():
            model.nodes[node] = (value, None if parent == end else parent, weight / top)
        self.seen["kept"] += len(keep)

    def rollback(self, seq: int) -> None:
        self.pool.rollback(seq)
        self.models[seq].drop(set(self.models[seq].nodes))

    def fork(self, seq: int) -> None:
        if len(self.models) <= MAX_SEQUENCES:
            self.models[self.pool.fork(seq)] = Model(prefix=self.models[seq].prefix.copy())

    def free(self, seq: int) -> None:
        self.pool.free(seq)
        del self.models[seq]

    def expect_exhausted(self, seq: int, operation: Callable[[], object]) -> None:
        before = self.state(seq)
        with pytest.raises(PoolExhausted):
            operation()
        assert self.state(seq) == before
        self.seen["exhausted"] += 1


@pytest.mark.parametrize(
    ("page_size", "num_pages", "max_suffix"),
    [(1, 250, 24), (3, 90, 20), (4, 60, 40), (16, 20, 30), (64, 12, 24)],
)
def test_20k_random_operations_equal_the_list_model(page_size: int, num_pages: int, max_suffix: int) -> None:
    simulation = Simulation(page_size, page_size, num_pages, max_suffix)
    for _ in range(20_000):
        simulation.step()
    simulation.forward()
    for seq in list(simulation.models):
        simulation.free(seq)
    assert simulation.pool.num_free_pages == num_pages - 1
    print(simulation.seen)
    copies = [] if page_size == 1 else ["copy on extend", "copy on commit"]  # a page of one is never partial
    for event in ("fork", "free", "rollback", "kept", "evictions", "exhausted", "batches", *copies):
        assert simulation.seen[event] >= 50, event
