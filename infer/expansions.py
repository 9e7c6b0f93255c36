"""What is known of the expanded nodes of one request's tree: features of the next ones, labels of the last.

Shape letters: R nodes, K node features, F candidates.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from foredraft.infer.features import MIN_LOG, NodeContexts
from foredraft.infer.outcome_records import label_of
from foredraft.infer.tree import SpeculationTree


@dataclass(frozen=True, slots=True)
class Expansion:
    """One expanded node as an outcome record without its label; see foredraft.infer.outcome_records."""

    anchor: int
    depth: int
    features_K: np.ndarray
    candidate_ids_F: np.ndarray
    scores_F: np.ndarray
    log_probs_F: np.ndarray
    echo_F: np.ndarray


class Expansions:
    """By tree node. A record keeps anchor, depth and features of the time when its node was expanded."""

    def __init__(self) -> None:
        self._of: dict[int, Expansion] = {}

    def contexts(
        self, tree: SpeculationTree, nodes: Sequence[int], temperature: float, num_own: Sequence[int]
    ) -> NodeContexts:
        """What the tree knows of nodes that are about to be expanded.

        `num_own`: for each, the steps since a state of the target; 0 for drafters that read none.
        """
        paths = [self._path(tree, node) for node in nodes]
        return NodeContexts(
            temperature_R=np.full(len(nodes), temperature, np.float32),
            depth_R=np.array([tree.depth(node) for node in nodes], np.int32),
            log_path_confidence_R=np.array([sum(score for score, _ in path) for path in paths], np.float32),
            last_rank_R=np.array([path[0][1] if path else 0 for path in paths], np.int32),
            num_own_R=np.array(num_own, np.int32),
        )

    def _path(self, tree: SpeculationTree, node: int) -> list[tuple[float, int]]:
        """(log-confidence, rank) of the guesses from the node up to below the root."""
        path = []
        while (parent := tree.parent(node)) is not None:
            known = self._of[parent]
            rank = label_of(known.candidate_ids_F, tree.token(node))
            is_candidate = rank < len(known.scores_F)  # a drawn guess may be none of them
            path.append((float(known.scores_F[rank]) if is_candidate else MIN_LOG, rank))
            node = parent
        return path

    def add(self, node: int, expansion: Expansion) -> None:
        """Keep what is known of a node."""
        self._of[node] = expansion

    def keep(self, survivors: set[int]) -> None:
        """Forget the nodes that have left the tree."""
        self._of = {node: known for node, known in self._of.items() if node in survivors}

    def labelled(self, tree: SpeculationTree, settled: Sequence[int]) -> Iterator[tuple[Expansion, int]]:
        """Expanded nodes on the path of an outcome that the tree has not seen yet, each with its label."""
        node: int | None = tree.root
        for token in settled:
            known = self._of.get(node) if node is not None else None
            if node is None or known is None:
                return
            yield known, label_of(known.candidate_ids_F, token)
            node = next((child for child in tree.children(node) if tree.token(child) == token), None)
