"""Replay: what the drafter would have said along a logged response, as outcome records.

The drafter of the decoder reads prompt and response once; its candidates after every token come from the code
that drafts live, with the row's own seed and filters. A causal LM's candidates depend on the tokens before
them alone, so one pass serves every root (anchor) and depth.

Shape letters: T nodes of a response, F candidates, K node features, N records.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from foredraft.infer.drafters import Candidates, Drafter, Step
from foredraft.infer.echo import Echo
from foredraft.infer.features import NodeContexts, node_features
from foredraft.infer.outcome_records import OutcomeRecords, label_of
from foredraft.infer.sampler import CoupledSampler
from foredraft.train.acceptance import sampling_of
from foredraft.train.log_rows import LogRow


@dataclass(frozen=True, slots=True)
class Followed:
    """The drafter along one response: node t is the last token before response token t."""

    row: LogRow
    candidates: Candidates  # of T nodes
    echo_TF: np.ndarray  # uint8
    labels_T: np.ndarray  # int32, place of response token t among the candidates of node t; F for none


def follow(drafter: Drafter, row: LogRow, fan_out: int) -> Followed:
    """Run the drafter over a row's prompt and response.

    Raises:
        ValueError: the row does not fit the drafter's context.
    """
    tokens = [*row.prompt_ids.tolist(), *row.response_ids.tolist()]
    if len(tokens) > drafter.max_positions:
        raise ValueError(
            f"response {row.request_id} has {len(tokens)} tokens with its prompt, the drafter's context is "
            f"{drafter.max_positions}"
        )
    sampler = CoupledSampler(sampling_of(row), tokens[: row.first_position])
    seq = drafter.pool.begin()
    parts: list[Candidates] = []
    start, first_node = 0, row.first_position - 1
    while start < len(tokens) - 1:
        chunk = tokens[start : min(start + drafter.prefill_room(seq), len(tokens) - 1)]
        step = Step(drafter.plan_prefill(seq, chunk), drafter.pool.drain_moves())
        end = start + len(chunk)
        nodes = range(max(start, first_node), end)
        if nodes:
            positions = [node + 1 for node in nodes]
            outputs = [tokens[row.first_position : position] for position in positions]
            parts.append(drafter.expand(step, sampler.draws(positions, outputs), fan_out))
        else:
            drafter.prefill(step)
        start = end
    drafter.pool.free(seq)
    candidates = concatenate(parts)
    echo = Echo(row.prompt_ids.tolist())
    echoes, labels = [], []
    for ids_F, token in zip(candidates.token_ids_RF, row.response_ids.tolist(), strict=True):
        echoes.append(echo.bits([], ids_F))
        labels.append(label_of(ids_F, token))
        echo.extend([token])
    return Followed(row, candidates, np.stack(echoes), np.array(labels, np.int32))


def concatenate(parts: Sequence[Candidates]) -> Candidates:
    """Candidates of the rows of several steps."""
    return Candidates(
        *(np.concatenate([getattr(part, name) for part in parts]) for name in Candidates.__slots__)
    )


def path_records(followed: Followed, depth: int) -> OutcomeRecords:
    """Records of every root of a response and every depth below `depth`.

    A record is there if every token between root and node is among the candidates before it: then a tree can
    reach the node.
    """
    labels_T, fan_out = followed.labels_T, followed.candidates.token_ids_RF.shape[1]
    num_nodes = len(labels_T)
    scores_TF1 = np.pad(followed.candidates.scores_RF, ((0, 0), (0, 1)), constant_values=-np.inf)
    own_score_T = scores_TF1[np.arange(num_nodes), labels_T]
    anchors_N, log_path_N = np.arange(num_nodes), np.zeros(num_nodes, np.float32)
    last_rank_N = np.zeros(num_nodes, np.int32)
    parts = []
    for level in range(depth):
        parts.append(_records_at(followed, anchors_N, level, log_path_N, last_rank_N))
        nodes_N = anchors_N + level
        is_longer_N = (nodes_N + 1 < num_nodes) & (labels_T[nodes_N] < fan_out)
        anchors_N, nodes_N = anchors_N[is_longer_N], nodes_N[is_longer_N]
        log_path_N = log_path_N[is_longer_N] + own_score_T[nodes_N]
        last_rank_N = labels_T[nodes_N]
    return OutcomeRecords.concatenate(parts)


def _records_at(
    followed: Followed, anchors_N: np.ndarray, depth: int, log_path_N: np.ndarray, last_rank_N: np.ndarray
) -> OutcomeRecords:
    """Records of one depth; anchors are nodes of the response."""
    row, nodes_N, size = followed.row, anchors_N + depth, len(anchors_N)
    candidates = Candidates(*(getattr(followed.candidates, name)[nodes_N] for name in Candidates.__slots__))
    contexts = NodeContexts(
        temperature_R=np.full(size, row.temperature, np.float32),
        depth_R=np.full(size, depth, np.int32),
        log_path_confidence_R=log_path_N.astype(np.float32),
        last_rank_R=last_rank_N,
        num_own_R=np.zeros(size, np.int32),
    )
    positions_N = anchors_N + row.first_position - 1
    return make_records(
        row, positions_N, candidates, contexts, followed.echo_TF[nodes_N], followed.labels_T[nodes_N]
    )


def make_records(
    row: LogRow,
    anchors_N: np.ndarray,
    candidates: Candidates,
    contexts: NodeContexts,
    echo_NF: np.ndarray,
    labels_N: np.ndarray,
) -> OutcomeRecords:
    """Records of one response; anchors are absolute positions."""
    size = len(labels_N)
    return OutcomeRecords(
        request_id_N=np.full(size, row.request_id),
        seed_N=np.full(size, row.seed, np.uint64),
        anchor_N=np.asarray(anchors_N, np.int32),
        depth_N=contexts.depth_R,
        temperature_N=contexts.temperature_R,
        features_NK=node_features(candidates, contexts),
        candidate_ids_NF=candidates.token_ids_RF,
        scores_NF=candidates.scores_RF,
        log_probs_NF=candidates.log_probs_RF,
        echo_NF=echo_NF,
        labels_N=np.asarray(labels_N, np.int32),
    )
