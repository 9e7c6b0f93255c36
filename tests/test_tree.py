"""The speculation tree against brute force: order, connectedness, nestedness, re-rooting, late results."""

import math
import random
from itertools import combinations

import pytest

from foredraft.infer.tree import NodeState, SpeculationTree


def draw_probs(rng: random.Random, n: int) -> list[float]:
    """n probabilities with sum below 1; half of the time multiples of 1/16, so that ties are common."""
    if rng.random() < 0.5:
        return [rng.randint(0, 16 // n) / 16 for _ in range(n)]
    weights = [rng.random() ** 3 for _ in range(n + 1)]
    return [weight / sum(weights) for weight in weights[:n]]


def grow(tree: SpeculationTree, rng: random.Random, expansions: int) -> None:
    """Expand random leaves, not the best ones, so that the shape owes nothing to ``select``."""
    for _ in range(expansions):
        leaves = [
            n for n in all_nodes(tree) if tree.state(n) is NodeState.LEAF and tree.depth(n) < tree.max_depth
        ]
        if leaves:
            num = rng.randint(1, 4)
            tree.add_children(rng.choice(leaves), rng.sample(range(100), num), draw_probs(rng, num))


def all_nodes(tree: SpeculationTree) -> list[int]:
    nodes = [tree.root]
    for node in nodes:
        nodes += tree.children(node)
    return nodes


def product_to_root(tree: SpeculationTree, node: int) -> float:
    factors = []
    step: int | None = node
    while step is not None and step != tree.root:
        factors.append(tree.prob(step))
        step = tree.parent(step)
    return math.prod(reversed(factors))


def random_tree(seed: int, expansions: int = 20) -> SpeculationTree:
    tree = SpeculationTree(7, max_depth=9)
    grow(tree, random.Random(seed), expansions)
    return tree


def by_probability(tree: SpeculationTree, nodes: list[int]) -> list[int]:
    return sorted(nodes, key=lambda node: (-product_to_root(tree, node), node))


@pytest.mark.parametrize("seed", range(30))
def test_block_is_the_n_most_probable_nodes_and_connected(seed):
    tree = random_tree(seed)
    expected = by_probability(tree, [node for node in all_nodes(tree) if node != tree.root])
    for n in range(len(expected) + 3):
        block = tree.block(n, "tree")
        assert block.nodes == expected[:n]  # nested too: a prefix of one list for every n
        assert block.tokens == [tree.token(node) for node in block.nodes]
        assert block.path_probs == [product_to_root(tree, node) for node in block.nodes]
        for row, (node, parent) in enumerate(zip(block.nodes, block.parents, strict=True)):
            assert -1 <= parent < row
            assert tree.parent(node) == (tree.root if parent == -1 else block.nodes[parent])


@pytest.mark.parametrize("seed", range(10))
def test_block_beats_every_connected_subtree_of_its_size(seed):
    tree = random_tree(seed, expansions=4)
    nodes = [node for node in all_nodes(tree) if node != tree.root]
    for n in range(1, min(5, len(nodes)) + 1):
        masses = [
            math.fsum(tree.path_prob(node) for node in chosen)
            for chosen in combinations(nodes, n)
            if all(tree.parent(node) in (*chosen, tree.root) for node in chosen)
        ]
        assert math.fsum(tree.block(n, "tree").path_probs) == pytest.approx(max(masses), abs=1e-12)


@pytest.mark.parametrize("seed", range(30))
def test_select_takes_the_most_probable_leaves_and_repeats_itself(seed):
    tree = random_tree(seed)
    rng = random.Random(seed)
    for width in (1, 3, 8, 3, 1000):
        leaves = [n for n in all_nodes(tree) if tree.state(n) is NodeState.LEAF and tree.depth(n) < 9]
        expected = by_probability(tree, leaves)[:width]
        assert tree.select(width) == tree.select(width) == expected
        tree.mark_in_flight(expected[:2])
        for node in rng.sample(
            all_nodes(tree), 3
        ):  # leaves again: their old heap entries must not show twice
            tree.unexpand(node)
        grow(tree, rng, 3)
    assert tree.select(0) == []


@pytest.mark.parametrize("seed", range(40))
def test_advance_equals_a_tree_grown_from_the_new_root(seed):
    rng = random.Random(seed)
    tree = random_tree(seed, expansions=40)
    for _ in range(4):
        old_root, tokens, walked = tree.root, [], [tree.root]
        while tree.children(walked[-1]) and (len(tokens) == 0 or rng.random() < 0.6):
            walked.append(rng.choice(tree.children(walked[-1])))
            tokens.append(tree.token(walked[-1]))
        if not tokens:
            break
        subtree = [walked[-1]]
        for node in subtree:
            subtree += tree.children(node)
        before = {n: (tree.token(n), tree.prob(n), tree.state(n), tree.children(n)) for n in subtree}
        result = tree.advance(tokens)

        assert result.kind == ("hit" if before[walked[-1]][3] else "leaf")
        assert result.path == walked[:-1]
        assert result.survivors == set(subtree) == set(all_nodes(tree))
        assert len(tree) == len(subtree) and old_root not in tree
        assert tree.root == walked[-1] and tree.parent(tree.root) is None
        assert (tree.depth(tree.root), tree.prob(tree.root), tree.path_prob(tree.root)) == (0, 1.0, 1.0)
        for node in subtree[1:]:
            assert (tree.token(node), tree.prob(node), tree.state(node), tree.children(node)) == before[node]
            assert tree.path_prob(node) == product_to_root(tree, node)
            assert tree.depth(node) == tree.depth(tree.parent(node)) + 1
        expected = by_probability(tree, subtree[1:])
        assert tree.block(len(subtree), "tree").nodes == expected
        leaves = [n for n in subtree if tree.state(n) is NodeState.LEAF and tree.depth(n) < 9]
        assert tree.select(len(subtree)) == by_probability(tree, leaves)
        grow(tree, rng, 10)


def small_tree() -> tuple[SpeculationTree, int, int, int]:
    """root -> a (0.6), b (0.3); a -> c (0.5)."""
    tree = SpeculationTree(1)
    a, b = tree.add_children(tree.root, [10, 11], [0.6, 0.3])
    (c,) = tree.add_children(a, [12], [0.5])
    return tree, a, b, c


def test_miss_starts_a_fresh_tree_and_reports_what_had_been_guessed():
    tree, a, _, c = small_tree()
    old_root = tree.root
    result = tree.advance([10, 12, 99])
    assert (result.kind, result.path) == ("miss", [old_root, a, c])
    assert result.survivors == {tree.root} and len(tree) == 1
    assert tree.root > c and tree.token(tree.root) == 99
    assert tree.select(4) == [tree.root] and tree.block(4, "tree").nodes == []


def test_a_guessed_last_token_after_a_wrong_one_is_a_miss():
    tree, _, _, c = small_tree()
    old_root = tree.root
    result = tree.advance([99, 12])
    assert (result.kind, result.path) == ("miss", [old_root]) and c not in tree


def test_other_mass_is_never_renormalised_away():
    tree, a, b, c = small_tree()
    assert sum(tree.prob(node) for node in tree.children(tree.root)) == pytest.approx(0.9)
    tree.advance([10])
    assert tree.path_prob(c) == 0.5
    assert tree.root == a and b not in tree


def test_children_are_unique_and_ordered_whatever_order_they_come_in():
    for tokens, probs in (([5, 3, 9, 3], [0.2, 0.1, 0.3, 0.1]), ([3, 9, 3, 5], [0.1, 0.3, 0.1, 0.2])):
        tree = SpeculationTree(0)
        children = tree.add_children(tree.root, tokens, probs)
        assert [tree.token(node) for node in children] == [9, 3, 5]
        assert [tree.prob(node) for node in children] == [0.3, 0.2, 0.2]
        assert children == sorted(children) == tree.children(tree.root)


def test_path_tokens_lead_from_below_the_root_to_the_node():
    tree, a, b, c = small_tree()
    assert [tree.path_tokens(node) for node in (tree.root, a, b, c)] == [[], [10], [11], [10, 12]]
    tree.advance([10])
    assert tree.path_tokens(c) == [12]


def test_late_results_are_ignored():
    tree, a, b, c = small_tree()
    tree.mark_in_flight([b, c])
    assert tree.select(8) == []
    tree.advance([10])
    assert tree.add_children(b, [1], [0.5]) == []
    assert tree.state(c) is NodeState.IN_FLIGHT and tree.select(8) == []
    (d,) = tree.add_children(c, [2], [0.5])
    assert tree.add_children(c, [3, 4], [0.5, 0.5]) == [d]
    assert tree.select(8) == [d] and tree.root == a


def test_unexpand_drops_descendants_and_frees_the_node():
    tree, a, b, c = small_tree()
    tree.mark_in_flight([b])
    tree.unexpand(a)
    tree.unexpand(b)
    tree.unexpand(c)  # is gone: nothing happens
    assert c not in tree and tree.children(a) == [] and tree.select(8) == [a, b]
    assert tree.advance([10]).kind == "leaf"


def test_an_expanded_node_without_children_is_a_leaf_outcome_and_not_selected():
    tree, _, b, _ = small_tree()
    assert tree.add_children(b, [], []) == []
    assert tree.state(b) is NodeState.EXPANDED and b not in tree.select(8)
    assert tree.advance([11]).kind == "leaf"


def test_chain_block_follows_the_best_child_even_past_a_better_sibling():
    tree = SpeculationTree(0)
    a, b = tree.add_children(tree.root, [1, 2], [0.5, 0.4])
    c, _ = tree.add_children(a, [3, 4], [0.3, 0.2])
    assert tree.block(2, "chain").nodes == [a, c]
    assert tree.block(2, "tree").nodes == [a, b]
    assert tree.block(9, "chain").parents == [-1, 0] and tree.block(1, "chain").nodes == [a]


def test_chain_select_puts_the_tip_first_until_chain_depth():
    tree = SpeculationTree(0)
    assert tree.select(2, shape="chain", chain_depth=2) == [tree.root]
    a, b = tree.add_children(tree.root, [1, 2], [0.5, 0.4])
    c, d = tree.add_children(a, [3, 4], [0.3, 0.2])  # path 0.15 and 0.1, below b
    assert tree.select(2) == [b, c]
    assert tree.select(2, shape="chain", chain_depth=3) == [c, b]
    assert tree.select(1, shape="chain", chain_depth=3) == [c]
    assert tree.select(4, shape="chain", chain_depth=2) == [b, c, d]
    tree.mark_in_flight([c])
    assert tree.select(2, shape="chain", chain_depth=3) == [b, d]


def test_nothing_grows_below_max_depth_until_an_advance_makes_room():
    tree = SpeculationTree(0, max_depth=2)
    (a,) = tree.add_children(tree.root, [1], [0.5])
    (b,) = tree.add_children(a, [2], [0.5])
    assert tree.select(4) == [] and tree.select(4, shape="chain", chain_depth=9) == []
    with pytest.raises(ValueError, match="max_depth 2"):
        tree.add_children(b, [3], [0.5])
    tree.mark_in_flight([b])
    tree.unexpand(b)
    assert tree.select(4) == []
    tree.advance([1])
    assert tree.select(4) == [b] and tree.depth(b) == 1


def test_underflowed_probabilities_keep_the_order_and_recover():
    tree = SpeculationTree(0)
    node, nodes = tree.root, []
    for token in range(40):
        node = tree.add_children(node, [token, 1000 + token], [1e-20, 1e-30])[0]
        nodes.append(node)
    assert tree.path_prob(node) == 0.0
    block = tree.block(80, "tree")
    assert len(block.nodes) == 80 and all(parent < row for row, parent in enumerate(block.parents))
    tree.advance(list(range(38)))
    assert tree.path_prob(node) == pytest.approx(1e-40)


@pytest.mark.parametrize(
    ("tokens", "probs", "message"),
    [
        ([1, 2], [0.5], "one probability a token"),
        ([1, 2], [0.5, -0.1], ">= 0"),
        ([1, 2], [0.9, 0.2], "sum <= 1"),
        ([1, 2], [math.nan, 0.2], "sum <= 1"),
        ([1, 2], [0.2, math.nan], "sum <= 1"),
    ],
)
def test_bad_children_are_refused_and_change_nothing(tokens, probs, message):
    tree = SpeculationTree(0)
    with pytest.raises(ValueError, match=message):
        tree.add_children(tree.root, tokens, probs)
    assert len(tree) == 1 and tree.state(tree.root) is NodeState.LEAF


def test_misuse_is_refused():
    tree, a, _, c = small_tree()
    with pytest.raises(ValueError, match="at least one token"):
        tree.advance([])
    with pytest.raises(ValueError, match="must be a leaf"):
        tree.mark_in_flight([a])
    with pytest.raises(ValueError, match="at least 1"):
        SpeculationTree(0, max_depth=0)
    tree.advance([11])
    with pytest.raises(KeyError):
        tree.token(c)
    with pytest.raises(KeyError):
        tree.mark_in_flight([c])
