"""Steps over a paged KV pool: bookkeeping, KV tensors, and the tensors of a planned step.

Every step runs in one static bucket of rows, every prefill step in one static chunk, whatever they hold: the
same rows have the same bits in plain, synchronous and asynchronous decoding.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch

from foredraft.infer.kv_pool import MAX_SUFFIX, KVPool
from foredraft.infer.kv_storage import KVStorage, LayerShape
from foredraft.infer.params import EngineConfig
from foredraft.infer.step_graph import StepInputs
from foredraft.infer.step_plan import (
    SPLIT,
    Piece,
    Row,
    StepPlan,
    StepShape,
    cut_pieces,
    plan_prefill,
    plan_step,
)
from foredraft.kernels.tree_batch import TreeBatch

DEFAULT_CONTEXT = 16384  # positions that the default pool holds at most
SHORT_PIECE = 16  # tokens: a prefill step has places for so short pieces, and not for more of them


class PagedSteps:
    """Pool bookkeeping and KV tensors of one model.

    `plan` and `plan_prefill` touch only bookkeeping, so that another thread can run what was planned.

    Args:
        layers: what each attention layer stores of a token.
        max_positions: longest context of the model.
        dtype: of keys and values.
        device: of all tensors.
        config: buckets and pages.
        state_dim: numbers that a drafter keeps of every token for its own use; 0: none.
    """

    def __init__(
        self,
        layers: Mapping[int, LayerShape],
        max_positions: int,
        dtype: torch.dtype,
        device: torch.device,
        config: EngineConfig,
        state_dim: int = 0,
    ) -> None:
        self.row_bucket = config.row_bucket
        self.prefill_chunk = config.prefill_chunk
        self.device = device
        self.max_positions = max_positions
        context_pages = -(-min(max_positions, DEFAULT_CONTEXT) // config.page_size)
        num_pages = config.num_pages or context_pages + num_reserved_pages(config.page_size)
        self.pool = KVPool(num_pages, config.page_size)
        self.storage = KVStorage(layers, num_pages * config.page_size, dtype, device, state_dim)
        self.is_static = uses_graphs(config, device)
        sizes = {"num_pages": context_pages, "num_nodes": MAX_SUFFIX} if self.is_static else {}
        num_sequences = config.row_bucket if self.is_static else 0
        lanes = config.lanes or config.row_bucket
        self.step_shape = StepShape(config.row_bucket, lanes, num_sequences=num_sequences, **sizes)
        self.prefill_places = config.prefill_chunk // SHORT_PIECE
        num_sequences = self.prefill_places if self.is_static else 0
        self.prefill_shape = StepShape(config.prefill_chunk, SPLIT, num_sequences=num_sequences, **sizes)

    @property
    def max_tokens(self) -> int:
        """Committed positions for which the pool has room beside one request's suffix."""
        page_size = self.pool.page_size
        return (self.pool.num_pages - num_reserved_pages(page_size)) * page_size

    def plan(self, rows: Sequence[Row]) -> StepPlan:
        """Bookkeeping of one step; rows with neither node nor position are appended to their prefix."""
        for row in rows:
            if row.node is None and row.position is None:
                self.pool.extend(row.seq, 1)
        return plan_step(self.pool, rows, self.step_shape)

    def prefill_room(self, seq: int) -> int:
        """Tokens that the next prefill step can take: up to the next multiple of `prefill_chunk`."""
        return self.prefill_chunk - self.pool.num_committed(seq) % self.prefill_chunk

    def plan_prefill(self, seq: int, token_ids: Sequence[int]) -> StepPlan:
        """Bookkeeping of one prefill step; appends at most `prefill_room(seq)` tokens to the prefix."""
        start = self.pool.num_committed(seq)
        self.pool.extend(seq, len(token_ids))
        return plan_prefill(self.pool, cut_pieces(seq, start, token_ids), self.prefill_shape)

    def plan_packed_prefill(self, runs: Sequence[tuple[int, Sequence[int]]]) -> Iterator[StepPlan]:
        """Steps that append tokens to several sequences, each step as full as it can be.

        A step's bookkeeping is done as the iteration comes to it. Rows come in the order of `runs`.

        Args:
            runs: (sequence, its next tokens).
        """
        waiting = deque(
            piece for seq, ids in runs for piece in cut_pieces(seq, self.pool.num_committed(seq), ids)
        )
        while waiting:
            pieces: list[Piece] = []
            room = self.prefill_chunk
            while waiting and room and len(pieces) < self.prefill_places:
                seq, start, token_ids = waiting.popleft()
                if len(token_ids) > room:
                    waiting.appendleft(Piece(seq, start + room, token_ids[room:]))
                pieces.append(Piece(seq, start, token_ids[:room]))
                self.pool.extend(seq, len(pieces[-1].token_ids))
                room -= len(pieces[-1].token_ids)
            yield plan_prefill(self.pool, pieces, self.prefill_shape)

    def inputs(
        self, plan: StepPlan, keep_rows: Sequence[int] | None, device: str | torch.device
    ) -> StepInputs:
        """A plan as tensors on a device."""

        def tensor(array: np.ndarray) -> torch.Tensor:
            return torch.from_numpy(array).to(device)

        batch = TreeBatch(
            write_slots_R=tensor(plan.write_slots),
            row_seq_R=tensor(plan.row_seq),
            row_lane_R=tensor(plan.row_lane),
            row_position_R=tensor(plan.positions.astype(np.int32)),
            row_prefix_R=tensor(plan.row_prefix),
            row_ancestors_RW=tensor(plan.row_ancestors),
            lane_rows_SL=tensor(plan.lane_rows),
            num_shared_S=tensor(plan.num_shared),
            pages_SP=tensor(plan.pages),
            suffix_slots_SX=tensor(plan.suffix_slots),
            page_size=self.pool.page_size,
            is_prefill=plan.is_prefill,
        )
        kept = None if keep_rows is None else tensor(np.asarray(keep_rows))
        return StepInputs(tensor(plan.tokens), tensor(plan.positions), kept, batch)


def uses_graphs(config: EngineConfig, device: torch.device) -> bool:
    """Whether steps are captured.

    Raises:
        ValueError: asked for where there is no GPU.
    """
    is_gpu = device.type == "cuda"
    if config.step == "graph" and not is_gpu:
        raise ValueError(f"step graph needs a CUDA device, the model is on {device}; use step eager or auto")
    return is_gpu and config.step != "eager"


def num_reserved_pages(page_size: int) -> int:
    """Pages beside those of a longest context: scratch, one full suffix, and two to spare."""
    return 1 + -(-MAX_SUFFIX // page_size) + 2
