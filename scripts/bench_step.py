"""Time a target's step on a GPU: plain and verifying, launched anew and replayed as a CUDA graph.

    python scripts/bench_step.py --out steps.csv [--layers 32]

The model has the shapes of an 8B Llama and random weights made on the spot; nothing is loaded. A step has one
real row (plain decoding) or eight (a verified block); the bucket is the same, so their times should be too.
"""

from __future__ import annotations

import argparse
import csv
import statistics
import sys
import time
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from foredraft.infer.attention import ATTENTION_NAME, register
from foredraft.infer.paged_model import PagedModel
from foredraft.infer.params import EngineConfig
from foredraft.infer.step_plan import Row

NUM_STEPS = 50


def make_model(layers: int, device: str, *, is_dry: bool) -> LlamaForCausalLM:
    """Random weights in the model's own type."""
    config = LlamaConfig(
        vocab_size=512 if is_dry else 128256,
        hidden_size=64 if is_dry else 4096,
        intermediate_size=128 if is_dry else 14336,
        num_hidden_layers=layers,
        num_attention_heads=4 if is_dry else 32,
        num_key_value_heads=2 if is_dry else 8,
        head_dim=16 if is_dry else 128,
        max_position_embeddings=8192,
        attn_implementation=ATTENTION_NAME,
    )
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32 if is_dry else torch.bfloat16)
    try:
        with torch.device(device):
            return LlamaForCausalLM(config)
    finally:
        torch.set_default_dtype(before)


def step_seconds(model: PagedModel, num_rows: int, context: int) -> float:
    """Median seconds of a step of `num_rows` real rows after a prefix."""
    pool = model.pool
    seq = pool.begin()
    model.prefill(seq, [5] * context)
    times = []
    for _ in range(NUM_STEPS):
        nodes = pool.append(seq, [None, *(-1 - place for place in range(num_rows - 1))]).nodes
        started = time.perf_counter()
        logits = model.step([Row(seq, 5, node) for node in nodes])
        logits[-1, 0].item()  # waits for the step
        times.append(time.perf_counter() - started)
        pool.rollback(seq)
    pool.free(seq)
    return statistics.median(times[NUM_STEPS // 5 :])


def main() -> int:
    """Time all four, write the CSV."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("steps.csv"))
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--dry-run", action="store_true", help="a tiny model on the CPU")
    args = parser.parse_args()
    device = "cpu" if args.dry_run else "cuda"
    if device == "cuda" and not torch.cuda.is_available():
        parser.error("timing needs a GPU; --dry-run does not")
    register()
    llama = make_model(2 if args.dry_run else args.layers, device, is_dry=args.dry_run)
    rows = []
    with torch.inference_mode():
        for step in ("eager",) if args.dry_run else ("eager", "graph"):
            dtype = "float32" if args.dry_run else "bfloat16"
            config = EngineConfig(device=device, dtype=dtype, step=step)
            model = PagedModel(llama, config)
            for num_rows in (1, 8):
                seconds = step_seconds(model, num_rows, 100 if args.dry_run else args.context)
                rows.append({"step": step, "rows": num_rows, "context": args.context, "ms": 1e3 * seconds})
                print(rows[-1], flush=True)
    with args.out.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
