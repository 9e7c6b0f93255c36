"""Time every kernel on a GPU against torch, as a share of its roofline, into a CSV.

    python scripts/bench_kernels.py --tests report.xml --out kernels.csv

`report.xml` is what `pytest --junitxml` wrote for the kernels' tests on the same machine: an operation whose
tests failed, or did not run, is not timed, and its row says so. Times are medians of triton's do_bench, which
empties the L2 cache between calls; inputs take turns besides, together larger than that cache.

`--dry-run` calls every case once at a small size, on the CPU under TRITON_INTERPRET=1 if need be, and times
nothing.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import numpy as np
import torch
import triton

from foredraft.infer.kv_pool import KVPool
from foredraft.infer.params import SamplingParams
from foredraft.infer.step_plan import Row, StepShape, plan_step
from foredraft.kernels import dispatch, roofline
from foredraft.kernels.distill_loss_ref import Head, map_teacher
from foredraft.kernels.draws import Draw
from foredraft.kernels.rejection_verify_ref import DraftLaw
from foredraft.kernels.roofline import Work
from foredraft.kernels.tree_batch import Scoring, TreeBatch

L2_BYTES = 128 << 20  # more than any chip's in the table
Run = Callable[[], object]


@dataclass(frozen=True)
class Timed:
    """One case: what runs, what it is compared with, what it must do at least."""

    operation: str
    case: str
    inputs: list[tuple[Run, Run]]  # own and baseline, on inputs that take turns
    baseline: str
    work: Work
    is_half: bool = True


@dataclass(frozen=True)
class Measured:
    """One row of the CSV; times in milliseconds, empty where nothing was timed."""

    operation: str
    case: str
    device: str
    torch: str
    triton: str
    git: str
    ms: float | str = ""
    baseline: str = ""
    baseline_ms: float | str = ""
    gigabytes_per_second: float | str = ""
    roofline_fraction: float | str = ""
    note: str = ""


def turns(num_bytes: float, *, is_dry: bool) -> range:
    """As many inputs as fill the L2 cache twice."""
    return range(1 if is_dry else max(2, min(64, int(2 * L2_BYTES / num_bytes) + 1)))


def attention_cases(device: str, *, is_dry: bool) -> Iterator[Timed]:
    """A verified block of 8 rows after a prefix, one layer of an 8B model, against SDPA with a dense mask."""
    heads, kv_heads, dim = (4, 2, 16) if is_dry else (32, 8, 128)
    dtype = torch.float32 if is_dry else torch.bfloat16
    for context in (70,) if is_dry else (1024, 8192, 32768):
        pool = KVPool(context // 64 + 3, 64)
        seq = pool.begin()
        pool.extend(seq, context)
        nodes = pool.append(seq, [None, -1, -1, -2, -2, -3, -4, -5]).nodes
        plan = plan_step(pool, [Row(seq, 0, node) for node in nodes], StepShape(8, 8))
        batch = batch_of(plan, device)
        slots = torch.from_numpy(np.concatenate([pool.prefix_slots(seq), plan.write_slots])).to(device)
        mask_RT = torch.zeros(8, context + 8, dtype=torch.bool, device=device)
        mask_RT[:, :context] = True
        for row, node in enumerate(nodes):
            own = torch.from_numpy(np.asarray(pool.path_slots(seq, node))).to(device)
            mask_RT[row, context:] = torch.isin(slots[context:], own)
        sizes = {"rows": 8, "heads": heads, "kv_heads": kv_heads, "dim": dim, "context": context, "nodes": 8}
        work = roofline.tree_attention(**sizes, item_bytes=dtype.itemsize)
        inputs = []
        for _ in turns(work.num_bytes, is_dry=is_dry):
            query = torch.randn(8, heads, dim, device=device, dtype=dtype)
            pools = [
                torch.randn(pool.num_pages * 64, kv_heads, dim, device=device, dtype=dtype) for _ in "kv"
            ]
            dense = [one[slots].transpose(0, 1)[None].contiguous() for one in pools]
            inputs.append((attend(query, pools, batch), sdpa(query, dense, mask_RT)))
        yield Timed("tree_attention", f"8 rows, context {context}", inputs, "torch SDPA, dense mask", work)


def attend(query: torch.Tensor, pools: list[torch.Tensor], batch: TreeBatch) -> Run:
    """Our attention."""
    return lambda: dispatch.tree_attention(query, *pools, batch, Scoring(query.shape[-1] ** -0.5))


def sdpa(query: torch.Tensor, dense: list[torch.Tensor], mask: torch.Tensor) -> Run:
    """Torch's, with keys laid out for it beforehand."""
    rows = query.transpose(0, 1)[None].contiguous()
    attention = torch.nn.functional.scaled_dot_product_attention
    return lambda: attention(rows, *dense, attn_mask=mask, enable_gqa=True)


def batch_of(plan: object, device: str) -> TreeBatch:
    """A plan's arrays as tensors."""
    names = {"row_position_R": "positions"}
    arrays = {}
    for item in fields(TreeBatch):
        name = names.get(item.name, item.name.rpartition("_")[0])
        if isinstance(array := getattr(plan, name, None), np.ndarray):
            array = array.astype(np.int32) if name == "positions" else array
            arrays[item.name] = torch.from_numpy(array).to(device)
    return TreeBatch(**arrays, page_size=64)


def move_cases(device: str, *, is_dry: bool) -> Iterator[Timed]:
    """A step's keys and values written, an accepted path moved, in an 8B model."""
    rows, kv_heads, dim, layers, slots = (3, 2, 16, 2, 64) if is_dry else (8, 8, 128, 32, 8192)
    dtype = torch.bfloat16
    places = torch.randperm(slots)[:rows].to(device)
    work = roofline.kv_write(rows=rows, kv_heads=kv_heads, dim=dim, item_bytes=2)
    pools = [torch.zeros(slots, kv_heads, dim, device=device, dtype=dtype) for _ in "kv"]
    values = [torch.randn(rows, kv_heads, dim, device=device, dtype=dtype) for _ in "kv"]

    def write() -> None:
        dispatch.kv_write(*pools, places, *values)

    yield Timed("kv_write", f"{rows} rows", [(write, eager(write))], "eager torch", work)
    pool = torch.zeros(2 * layers, slots, kv_heads, dim, device=device, dtype=dtype)
    work = roofline.kv_commit(tokens=rows, layers=layers, kv_heads=kv_heads, dim=dim, item_bytes=2)

    def commit() -> None:
        dispatch.kv_commit(pool, places, places.flip(0))

    yield Timed(
        "kv_commit", f"{rows} tokens, {layers} layers", [(commit, eager(commit))], "eager torch", work
    )


def sampling_cases(device: str, *, is_dry: bool) -> Iterator[Timed]:
    """Eight rows over a vocabulary, with and without filters; candidates; both verifications."""
    rows, vocab, fan_out = (2, 1000, 4) if is_dry else (8, 128256, 16)
    copies = turns(4 * rows * vocab, is_dry=is_dry)
    logits = [3.0 * torch.randn(rows, vocab, device=device) for _ in copies]
    filters = {
        "greedy": SamplingParams(),
        "temperature": SamplingParams(temperature=1.0),
        "nucleus": SamplingParams(temperature=0.7, top_p=0.95),
    }
    for name, params in filters.items():
        draws = [Draw(params, 1, 100 + row) for row in range(rows)]
        runs = [(lambda z=z, d=draws: dispatch.coupled_sample(z, d)) for z in logits]
        work = roofline.coupled_sample(rows=rows, vocab=vocab)
        case = f"{rows} rows, V {vocab}, {name}"
        yield Timed("coupled_sample", case, with_eager(runs), "eager torch", work, is_half=False)
        runs = [(lambda z=z, d=draws: dispatch.top_candidates(z, d, fan_out)) for z in logits]
        work = roofline.top_candidates(rows=rows, columns=vocab, fan_out=fan_out)
        yield Timed(
            "top_candidates", f"{case}, F {fan_out}", with_eager(runs), "eager torch", work, is_half=False
        )
    guesses = rows - 1
    tokens = torch.arange(guesses, device=device)[None]
    parents, chosen = tokens - 1, torch.arange(rows, device=device)[None]
    runs = [lambda: dispatch.verify_walk(tokens, parents, chosen)]
    work = roofline.verify_walk(sequences=1, guesses=guesses)
    yield Timed("verify_walk", f"{guesses} guesses", with_eager(runs), "eager torch", work)
    width = min(64, vocab)
    ids = torch.arange(width, device=device).expand(1, guesses, -1).contiguous()
    law = DraftLaw(torch.full((1, guesses, width), 1.0 / width, device=device), ids)
    draws = [Draw(filters["temperature"], 1, 100 + row) for row in range(rows)]
    runs = [(lambda z=z: dispatch.rejection_verify(z[None], tokens, law, draws)) for z in logits]
    work = roofline.rejection_verify(sequences=1, guesses=guesses, vocab=vocab, law_width=width)
    case = f"{guesses} guesses, V {vocab}"
    yield Timed("rejection_verify", case, with_eager(runs), "eager torch", work, is_half=False)


def loss_cases(device: str, *, is_dry: bool) -> Iterator[Timed]:
    """Forward and backward of an 8B head over a reduced vocabulary, against the definition."""
    tokens, hidden, draft = (4, 16, 64) if is_dry else (2048, 4096, 32000)
    dtype = torch.float32 if is_dry else torch.bfloat16
    states = torch.randn(tokens, hidden, device=device, dtype=dtype, requires_grad=True)
    weight = torch.randn(draft, hidden, device=device, dtype=dtype).div_(hidden**0.5).requires_grad_()
    ids = torch.stack([torch.randperm(draft, device=device)[:8] for _ in range(tokens)])
    teacher = map_teacher(ids, torch.full((tokens, 8), 0.1, device=device).log(), ids[:, 0], None)

    def run() -> None:
        dispatch.distill_loss(states, Head(weight), teacher, {"forward_kl": 1.0}).sum().backward()
        states.grad = weight.grad = None

    work = roofline.distill_loss(
        tokens=tokens, hidden=hidden, draft_vocab=draft, item_bytes=dtype.itemsize, is_chunked=True
    )
    yield Timed("distill_loss", f"{tokens} tokens, D {draft}", [(run, eager(run))], "eager torch", work)


def eager(run: Run) -> Run:
    """The same by the definition in plain torch."""

    def baseline() -> object:
        with dispatch.forcing("reference"):
            return run()

    return baseline


def with_eager(runs: list[Run]) -> list[tuple[Run, Run]]:
    """Every run beside its definition."""
    return [(run, eager(run)) for run in runs]


def failed_operations(report: Path, operations: set[str]) -> dict[str, str]:
    """Why an operation must not be timed, by its tests in a junit report; those in order are left out."""
    cases = list(ElementTree.parse(report).iter("testcase"))
    reasons = {}
    for operation in operations:
        own = [case for case in cases if f"test_{operation}" in case.get("classname", "")]
        ran = [case for case in own if case.find("skipped") is None]
        bad = [case for case in ran if case.find("failure") is not None or case.find("error") is not None]
        if bad:
            reasons[operation] = f"not timed: {len(bad)} of {len(ran)} tests failed"
        elif not ran:
            reasons[operation] = "not timed: its tests did not run"
    return reasons


TESTS_OF = {"top_candidates": "coupled_sample"}  # tested in the same file


def measure(timed: Timed, base: Measured, *, is_dry: bool) -> dict[str, object]:
    """Times and shares of one case."""
    if is_dry:
        for own, baseline in timed.inputs:
            own(), baseline()
        return {"note": "dry run"}
    milliseconds = []
    for side in (0, 1):
        runs = itertools.cycle([pair[side] for pair in timed.inputs])
        milliseconds.append(triton.testing.do_bench(lambda runs=runs: next(runs)(), return_mode="median"))
    seconds = milliseconds[0] / 1e3
    chip = roofline.chip_of(base.device)
    share = roofline.fraction(seconds, timed.work, chip, is_half=timed.is_half) if chip else ""
    return {
        "ms": milliseconds[0],
        "baseline": timed.baseline,
        "baseline_ms": milliseconds[1],
        "gigabytes_per_second": timed.work.num_bytes / seconds / 1e9,
        "roofline_fraction": share,
    }


def git_commit() -> str:
    """The commit of this folder, empty outside of a repository."""
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


def main() -> int:
    """Run all cases, write the CSV."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tests", type=Path, help="junit report of the kernels' tests")
    parser.add_argument("--out", type=Path, default=Path("kernels.csv"))
    parser.add_argument("--dry-run", action="store_true", help="call everything once, time nothing")
    args = parser.parse_args()
    has_gpu = torch.cuda.is_available()
    if not args.dry_run and not (has_gpu and args.tests):
        parser.error("timing needs a GPU and --tests REPORT; --dry-run needs neither")
    device = "cuda" if has_gpu else "cpu"
    base = Measured(
        *("", "", torch.cuda.get_device_name() if has_gpu else "cpu"),
        *(torch.__version__, triton.__version__, git_commit()),
    )
    makers = (attention_cases, move_cases, sampling_cases, loss_cases)
    rows = []
    for timed in itertools.chain.from_iterable(make(device, is_dry=args.dry_run) for make in makers):
        tested = TESTS_OF.get(timed.operation, timed.operation)
        reason = "" if args.dry_run else failed_operations(args.tests, {tested}).get(tested, "")
        with dispatch.forcing("triton"):
            found = {"note": reason} if reason else measure(timed, base, is_dry=args.dry_run)
        rows.append(asdict(base) | {"operation": timed.operation, "case": timed.case} | found)
        print({name: value for name, value in rows[-1].items() if value != ""}, flush=True)
    with args.out.open("w", newline="") as file:
        writer = csv.DictWriter(file, [item.name for item in fields(Measured)])
        writer.writeheader()
        writer.writerows(rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
