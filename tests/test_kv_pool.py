"""The KV pool, one rule a test; test_kv_pool_model.py has the random operations."""

import numpy as np
import pytest

from foredraft.infer.kv_pool import KVPool, PoolExhausted


def drain(pool: KVPool) -> list[tuple[list[int], list[int]]]:
    return [(source.tolist(), destination.tolist()) for source, destination in pool.drain_moves()]


def test_prefix_crosses_pages_and_never_uses_the_scratch_page() -> None:
    pool = KVPool(num_pages=4, page_size=4)
    seq = pool.begin()
    slots = np.concatenate([pool.extend(seq, n) for n in (3, 3, 0, 4)])
    assert slots.tolist() == pool.prefix_slots(seq).tolist() == [4, 5, 6, 7, 8, 9, 10, 11, 12, 13]
    assert (pool.num_committed(seq), pool.num_free_pages, pool.drain_moves()) == (10, 0, [])
    with pytest.raises(ValueError, match="read-only"):
        pool.prefix_slots(seq)[0] = 0


def test_parents_of_the_same_call_depths_and_ancestor_bits() -> None:
    pool = KVPool(num_pages=4, page_size=4)
    seq = pool.begin()
    a, b, c, d = pool.append(seq, [None, -1, None, -2]).nodes
    (e,) = pool.append(seq, [c]).nodes
    assert [pool.depth(seq, node) for node in (a, b, c, d, e)] == [0, 1, 0, 2, 1]
    assert [pool.ancestor_bits(seq, node) for node in (a, b, c, d, e)] == [0b1, 0b11, 0b100, 0b1011, 0b10100]
    assert pool.path_slots(seq, d).tolist() == [pool.slot(seq, node) for node in (a, b, d)]


def test_commit_moves_the_path_and_keeps_survivors_in_place_with_new_bits() -> None:
    pool = KVPool(num_pages=6, page_size=4)
    seq = pool.begin()
    pool.extend(seq, 3)
    a, x, b, c, d = pool.append(seq, [None, None, -1, -3, -3]).nodes  # a -> b -> c, d
    slots = {node: pool.slot(seq, node) for node in (a, b, c, d)}
    pool.commit(seq, [a, b], keep=[d, c])
    assert drain(pool) == [([slots[a], slots[b]], pool.prefix_slots(seq)[3:].tolist())]
    assert pool.suffix(seq) == [c, d] and x not in pool.suffix(seq)
    assert [pool.slot(seq, node) for node in (c, d)] == [slots[c], slots[d]]
    assert [pool.ancestor_bits(seq, node) for node in (c, d)] == [0b01, 0b10]
    assert [pool.depth(seq, node) for node in (c, d)] == [0, 0]
    assert pool.num_committed(seq) == 5


def test_empty_commit_prunes_to_the_kept_nodes_without_moves() -> None:
    pool = KVPool(num_pages=6, page_size=4)
    seq = pool.begin()
    a, b, _ = pool.append(seq, [None, -1, None]).nodes
    pool.commit(seq, [], keep=[a, b])
    assert pool.suffix(seq) == [a, b] and pool.ancestor_bits(seq, b) == 0b11
    assert pool.drain_moves() == [] and pool.num_committed(seq) == 0


def test_slots_are_reused_before_their_moves_are_executed() -> None:
    pool = KVPool(num_pages=4, page_size=2)
    one, two = pool.begin(), pool.begin()
    pool.extend(one, 1)
    (a,) = pool.append(one, [None]).nodes
    b, c = pool.append(two, [None, -1]).nodes
    contents = np.full(8, -1)
    for slot, value in ((pool.prefix_slots(one)[0], 10), (pool.slot(one, a), 11), (pool.slot(two, b), 20)):
        contents[slot] = value
    freed_first, freed_second = pool.slot(one, a), pool.slot(two, b)
    pool.commit(one, [a])
    pool.commit(two, [b], keep=[c])
    (d,) = pool.append(two, [c]).nodes
    assert pool.prefix_slots(two).tolist() == [
        freed_first
    ]  # the second move overwrites the first one's source
    assert pool.slot(two, d) == freed_second  # the next forward overwrites the second one's source
    for source, destination in pool.drain_moves():
        contents[destination] = contents[source]
    contents[pool.slot(two, d)] = 22
    assert contents[pool.prefix_slots(one)].tolist() == [10, 11]
    assert contents[pool.prefix_slots(two)].tolist() == [20]


def test_commit_may_use_the_pages_that_it_empties() -> None:
    pool = KVPool(num_pages=3, page_size=2)
    seq = pool.begin()
    nodes = pool.append(seq, [None, -1, -2]).nodes
    contents = np.full(6, -1)
    contents[[pool.slot(seq, node) for node in nodes]] = [10, 11, 12]
    assert pool.num_free_pages == 0
    pool.commit(seq, nodes)
    for source, destination in pool.drain_moves():
        contents[destination] = contents[source]
    assert contents[pool.prefix_slots(seq)].tolist() == [10, 11, 12]
    assert pool.num_free_pages == 0 and pool.suffix(seq) == []


def test_extend_copies_a_shared_partial_page_once() -> None:
    pool = KVPool(num_pages=6, page_size=4)
    seq = pool.begin()
    first = pool.extend(seq, 6)
    other = pool.fork(seq)
    assert pool.num_free_pages == 3
    old = pool.prefix_slots(seq).tolist()
    new = pool.extend(seq, 1)
    assert drain(pool) == [(old[4:], pool.prefix_slots(seq)[4:6].tolist())]
    assert pool.prefix_slots(other).tolist() == old and new[0] // 4 != old[4] // 4
    assert first.tolist() == old  # what was returned does not change with the prefix
    pool.extend(other, 1)  # the page is its own now
    assert pool.drain_moves() == [] and pool.prefix_slots(other)[:6].tolist() == old


def test_commit_copies_a_shared_partial_page_in_the_same_batch() -> None:
    pool = KVPool(num_pages=6, page_size=4)
    seq = pool.begin()
    pool.extend(seq, 2)
    other = pool.fork(seq)
    shared = pool.prefix_slots(other).tolist()
    (a,) = pool.append(other, [None]).nodes
    moved = [*shared, pool.slot(other, a)]
    pool.commit(other, [a])
    assert drain(pool) == [(moved, pool.prefix_slots(other).tolist())]
    assert pool.prefix_slots(seq).tolist() == shared
    assert not set(shared) & set(pool.prefix_slots(other).tolist())


def test_no_copy_when_the_page_is_full_or_no_longer_shared() -> None:
    pool = KVPool(num_pages=6, page_size=4)
    seq = pool.begin()
    pool.extend(seq, 4)
    pool.extend(pool.fork(seq), 1)
    assert pool.drain_moves() == []
    pool.extend(seq, 1)
    pool.free(pool.fork(seq))
    pool.extend(seq, 1)
    assert pool.drain_moves() == []


def test_fork_shares_the_prefix_and_leaves_the_suffix() -> None:
    pool = KVPool(num_pages=6, page_size=4)
    seq = pool.begin()
    pool.extend(seq, 5)
    pool.append(seq, [None])
    other = pool.fork(seq)
    assert pool.prefix_slots(other).tolist() == pool.prefix_slots(seq).tolist()
    assert pool.suffix(other) == []
    pool.free(seq)
    assert pool.num_free_pages == 3
    pool.free(other)
    assert pool.num_free_pages == 5


def test_eviction_takes_the_least_probable_leaf_then_its_parent() -> None:
    pool = KVPool(num_pages=6, page_size=4, max_suffix=4)
    seq = pool.begin()
    a, b, c, d = pool.append(seq, [None, -1, None, None], [0.2, 0.1, 0.3, 0.3]).nodes
    assert pool.append(seq, [c], [0.05]).evicted == [b]
    assert pool.append(seq, [c, c], [0.01, 0.01]).evicted[0] not in (a, c)
    assert pool.suffix(seq)[:1] == [c] and d in pool.suffix(seq)


def test_eviction_spares_ancestors_and_new_nodes_and_breaks_ties_by_age() -> None:
    pool = KVPool(num_pages=6, page_size=4, max_suffix=4)
    seq = pool.begin()
    a, b, c, d = pool.append(seq, [None, -1, None, None], [0.9, 0.01, 0.5, 0.5]).nodes
    result = pool.append(seq, [b, -1], [0.001, 0.0001])
    assert result.evicted == [d, c] and pool.suffix(seq) == [a, b, *result.nodes]
    assert pool.ancestor_bits(seq, result.nodes[1]) == 0b1111
    with pytest.raises(PoolExhausted, match="suffix of 4"):
        pool.append(seq, [result.nodes[1]])
    assert pool.suffix(seq) == [a, b, *result.nodes]


def test_weights_of_survivors_count_from_the_new_root() -> None:
    pool = KVPool(num_pages=6, page_size=4, max_suffix=3)
    seq = pool.begin()
    a, b, c = pool.append(seq, [None, -1, -2], [1.0, 0.1, 0.08]).nodes
    pool.commit(seq, [a], keep=[b, c])  # b is the new root, c has 0.8 of it
    result = pool.append(seq, [b], [0.3])
    assert pool.append(seq, [c], [0.7]).evicted == result.nodes


def test_exhaustion_changes_nothing_and_asking_first_agrees() -> None:
    pool = KVPool(num_pages=3, page_size=4)
    seq = pool.begin()
    pool.extend(seq, 4)
    a, b, _ = pool.append(seq, [None, -1, None]).nodes
    assert pool.can_append(seq, 1) and not pool.can_append(seq, 2)
    assert pool.can_extend(seq, 0) and not pool.can_extend(seq, 1)
    before = pool.suffix(seq), pool.prefix_slots(seq).tolist(), pool.num_free_pages
    for operation in (
        lambda: pool.append(seq, [a, -1]),
        lambda: pool.extend(seq, 1),
        lambda: pool.commit(seq, [a], keep=[b]),
    ):
        with pytest.raises(PoolExhausted, match="free a sequence"):
            operation()
        assert (pool.suffix(seq), pool.prefix_slots(seq).tolist(), pool.num_free_pages) == before
    pool.commit(seq, [a])  # without keep the page of the suffix becomes one of the prefix
    assert (pool.num_committed(seq), pool.num_free_pages) == (5, 0)


def test_rollback_returns_the_suffix_pages() -> None:
    pool = KVPool(num_pages=4, page_size=2)
    seq = pool.begin()
    pool.extend(seq, 1)
    pool.append(seq, [None, None, None])
    assert pool.num_free_pages == 0
    pool.rollback(seq)
    assert pool.num_free_pages == 2 and pool.suffix(seq) == [] and pool.num_committed(seq) == 1


def test_misuse_is_refused_before_anything_changes() -> None:
    pool = KVPool(num_pages=6, page_size=4)
    seq = pool.begin()
    a, b, c, d = pool.append(seq, [None, -1, None, -2]).nodes  # a -> b -> d, c
    for path, keep, message in (
        ([b], [], "path must be a chain"),
        ([a, c], [], "path must be a chain"),
        ([99], [], "path must be a chain"),
        ([a], [c], "keep must descend"),
        ([a], [d], "keep must descend"),
        ([a], [a, b], "keep must descend"),
        ([a], [99], "keep must descend"),
    ):
        with pytest.raises(ValueError, match=message):
            pool.commit(seq, path, keep)
    for parents, weights in (([99], None), ([-1], None), ([None, -2], None), ([None], [0.1, 0.2])):
        with pytest.raises(ValueError, match=r"unknown parent|one weight a node"):
            pool.append(seq, parents, weights)
    with pytest.raises(ValueError, match="at least 0"):
        pool.extend(seq, -1)
    with pytest.raises(ValueError, match="scratch"):
        KVPool(num_pages=1)
    assert pool.suffix(seq) == [a, b, c, d] and pool.num_committed(seq) == 0
    pool.free(seq)
    with pytest.raises(KeyError):
        pool.extend(seq, 1)
    assert pool.num_free_pages == 5
