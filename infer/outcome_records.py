"""Outcome records: what the drafter knew at an expanded node, and what the target then said. NumPy only.

Replay over a target log and live decoding make the same records through the same functions.

Shape letters: N records, K node features, F candidates.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np

UNKNOWN = -1  # label of a guess off the target's path: what the target would have said is not known
NO_TOKEN = -1  # candidate where a node had fewer than F


@dataclass(frozen=True, kw_only=True, slots=True)
class OutcomeRecords:
    """N expanded nodes as columns.

    A response is named by request_id (hash of its prompt) and seed; a record by response, anchor, depth. The
    guessed token's position is anchor + depth + 1.
    """

    request_id_N: np.ndarray  # str
    seed_N: np.ndarray  # uint64
    anchor_N: np.ndarray  # int32, absolute position of the tree's root when the node was expanded
    depth_N: np.ndarray  # int32, 0 = the root itself
    temperature_N: np.ndarray  # float32
    features_NK: np.ndarray  # float32, see foredraft.infer.features
    candidate_ids_NF: np.ndarray  # int32, best perturbed score first
    scores_NF: np.ndarray  # float32, log-confidence: perturbed score minus log-sum-exp over the vocabulary
    log_probs_NF: np.ndarray  # float32, the drafter's own log-probabilities
    echo_NF: np.ndarray  # uint8, see foredraft.infer.echo
    labels_N: np.ndarray  # int32: place of the target's token among the candidates, F for another, UNKNOWN

    def __len__(self) -> int:
        return len(self.labels_N)

    @property
    def fan_out(self) -> int:
        """F."""
        return self.candidate_ids_NF.shape[1]

    @property
    def position_N(self) -> np.ndarray:
        """Absolute position of the token that each record guesses, int32."""
        return self.anchor_N + self.depth_N + 1

    @property
    def is_labelled_N(self) -> np.ndarray:
        """Records on the target's path, bool."""
        return self.labels_N != UNKNOWN

    def select(self, chosen: np.ndarray) -> OutcomeRecords:
        """Records by mask or index."""
        return OutcomeRecords(**{item.name: getattr(self, item.name)[chosen] for item in fields(self)})

    @classmethod
    def empty(cls, num_features: int, fan_out: int) -> OutcomeRecords:
        """No records."""
        return cls(
            request_id_N=np.empty(0, np.str_),
            seed_N=np.empty(0, np.uint64),
            anchor_N=np.empty(0, np.int32),
            depth_N=np.empty(0, np.int32),
            temperature_N=np.empty(0, np.float32),
            features_NK=np.empty((0, num_features), np.float32),
            candidate_ids_NF=np.empty((0, fan_out), np.int32),
            scores_NF=np.empty((0, fan_out), np.float32),
            log_probs_NF=np.empty((0, fan_out), np.float32),
            echo_NF=np.empty((0, fan_out), np.uint8),
            labels_N=np.empty(0, np.int32),
        )

    @classmethod
    def concatenate(cls, parts: Sequence[OutcomeRecords]) -> OutcomeRecords:
        """All records of several batches with one F; at least one batch."""
        return cls(
            **{
                item.name: np.concatenate([getattr(part, item.name) for part in parts])
                for item in fields(cls)
            }
        )


def label_of(candidate_ids_F: np.ndarray, token: int) -> int:
    """Place of the target's token among a node's candidates; F where it is none of them."""
    places = np.flatnonzero(candidate_ids_F == token)
    return int(places[0]) if len(places) else len(candidate_ids_F)
