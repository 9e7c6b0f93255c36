"""What an outcome predictor sees of an expanded node and of its candidates. NumPy only.

The list is versioned with the predictor's schema: a predictor is refused where its features are not these.

Shape letters: R nodes, K node features, F candidates.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from foredraft.infer.drafters import Candidates

NODE_FEATURES = (
    "temperature",
    "depth",
    "log_path_confidence",  # of the node's path below the root, by the drafter's confidences
    "log_last_rank",  # log(1 + place) of the node's token among its parent's candidates; 0 at the root
    "entropy",  # of the drafter's own distribution, nats
    "best_score",
    "gap",  # best score minus the second
    "log_other",  # log of the confidence outside the candidates
    "num_own",  # steps since a state of the target; 0 for drafters that read none
)
CANDIDATE_FEATURES = (
    "score",
    "log_prob",
    "log_rank",
    "gap_to_best",
    "is_other",
    "occurred",  # these three: foredraft.infer.echo
    "followed_one",
    "followed_two",
)
FEATURES = (*NODE_FEATURES, *CANDIDATE_FEATURES)
MIN_LOG = -20.0  # logarithms are cut here: what is less likely than e^-20 is all the same
NO_GAP = 20.0


@dataclass(frozen=True, slots=True)
class NodeContexts:
    """What the tree knows of R nodes before the drafter runs on them."""

    temperature_R: np.ndarray  # float32
    depth_R: np.ndarray  # int32
    log_path_confidence_R: np.ndarray  # float32, <= 0
    last_rank_R: np.ndarray  # int32
    num_own_R: np.ndarray  # int32, steps since a state of the target


def node_features(candidates: Candidates, contexts: NodeContexts) -> np.ndarray:
    """Features float32 [R, K] in the order of NODE_FEATURES."""
    scores_RF = candidates.scores_RF
    best_R = scores_RF[:, 0]
    second_R = scores_RF[:, 1] if scores_RF.shape[1] > 1 else np.full_like(best_R, -np.inf)
    columns = {
        "temperature": contexts.temperature_R,
        "depth": contexts.depth_R,
        "log_path_confidence": np.maximum(contexts.log_path_confidence_R, MIN_LOG),
        "log_last_rank": np.log1p(contexts.last_rank_R),
        "entropy": candidates.entropy_R,
        "best_score": np.maximum(best_R, MIN_LOG),
        "gap": np.minimum(best_R - second_R, NO_GAP),
        "log_other": log_other(scores_RF),
        "num_own": contexts.num_own_R,
    }
    return np.stack([columns[name].astype(np.float32) for name in NODE_FEATURES], axis=1)


def log_other(scores_RF: np.ndarray) -> np.ndarray:
    """Log of the confidence that the candidates leave, float32 [R]; at least MIN_LOG."""
    rest_R = 1.0 - np.exp(scores_RF.astype(np.float64)).sum(1)
    return np.log(np.maximum(rest_R, np.exp(MIN_LOG))).astype(np.float32)
