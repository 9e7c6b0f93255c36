"""What a verification of n guesses costs on this machine: T_v(n), measured on the loaded target."""

from __future__ import annotations

import time

import numpy as np

from foredraft.infer.paged_model import PagedModel
from foredraft.infer.planner import increasing
from foredraft.infer.step_plan import Row

CONTEXT_TOKENS = 128
REPEATS = 8  # with three, tables of one model in one minute rose by 6 to 18 %
NUM_SIZES = 4


def measure_verify_seconds(model: PagedModel) -> tuple[float, ...]:
    """T_v(n) in seconds for n = 0 .. row_bucket - 1 guesses; it never falls.

    A few sizes are timed in turns, the least disturbed time of each counts, those between are interpolated.
    Takes NUM_SIZES * REPEATS target steps and leaves the pool as it was.
    """
    largest = model.row_bucket - 1
    sizes = np.unique(np.linspace(0, largest, NUM_SIZES).round().astype(int)).tolist()
    seq = model.pool.begin()
    try:
        room = min(CONTEXT_TOKENS, model.max_positions - model.row_bucket, model.max_tokens)
        model.prefill(seq, [0] * max(1, room))
        best = dict.fromkeys(sizes, float("inf"))
        for _ in range(REPEATS):
            for size in sizes:
                best[size] = min(best[size], _seconds_of_step(model, seq, size + 1))
    finally:
        model.pool.free(seq)
    return increasing(np.interp(range(largest + 1), sizes, [best[size] for size in sizes]).tolist())


def _seconds_of_step(model: PagedModel, seq: int, num_rows: int) -> float:
    """One step over a chain of so many rows, undone afterwards."""
    parents = [None, *(-1 - index for index in range(num_rows - 1))]
    nodes = model.pool.append(seq, parents).nodes
    started = time.perf_counter()
    model.step([Row(seq, 0, node) for node in nodes])
    seconds = time.perf_counter() - started
    model.pool.rollback(seq)
    return seconds
