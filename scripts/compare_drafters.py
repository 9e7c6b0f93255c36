"""Tokens per verify of drafters on logs of their target, by replay: minutes where the engine takes hours.

    python scripts/compare_drafters.py runs/smollm2-135m/drafter --logs runs/eval/gsm8k runs/eval/humaneval

Every logged response is drafted for in chain rounds by the drafter that decodes, with the log in the target's
place. Under coupled verification these are the engine's own rounds, as the gate behind training has checked.
Prints a Markdown table, a row for every drafter, log and temperature.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from foredraft.infer.config import run_command
from foredraft.infer.drafters import load_drafter
from foredraft.infer.params import EngineConfig
from foredraft.train.chain_rounds import ChainedResponse, ChainRounds
from foredraft.train.continuous import PAGE_SIZE, num_pages_for
from foredraft.train.log_rows import LogRow
from foredraft.train.outcomes import check_drafter_of, states_of
from foredraft.train.target_log import TargetLog


@dataclass(slots=True)
class Rounds:
    """Chain rounds of the responses of one temperature."""

    k: int
    num_tokens: int = 0  # settled by rounds: all but each response's first
    right_R: list[int] = field(default_factory=list)  # accepted guesses of every round

    @property
    def tokens_per_verify(self) -> float:
        """With the bonus token; 1 where no response has a second token."""
        return self.num_tokens / len(self.right_R) if self.right_R else 1.0

    @property
    def acceptance(self) -> list[float]:
        """Share of the rounds that accept guesses 1 .. k."""
        count = max(1, len(self.right_R))
        return [sum(right >= step for right in self.right_R) / count for step in range(1, self.k + 1)]


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("drafters", nargs="+", metavar="DRAFTER", help="folders or Hub ids")
    parser.add_argument("--logs", nargs="+", required=True, metavar="LOG", help="folders of `foredraft log`")
    parser.add_argument("--split", choices=("train", "heldout"), help="default: all rows")
    parser.add_argument("--k", type=int, default=5, help="guesses of a chain (default: 5)")
    parser.add_argument("--rows", type=int, default=32, help="responses at once (default: 32)")
    parser.add_argument("--dtype", choices=("auto", "float32", "bfloat16"), default="auto")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=0, help="0: all cores")
    arguments = parser.parse_args(argv)
    if arguments.k < 1 or arguments.rows <= arguments.k:
        raise ValueError(f"--k is {arguments.k}, --rows {arguments.rows}: expected 1 <= k < rows")
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    columns = " | ".join(f"guess {step}" for step in range(1, arguments.k + 1))
    print(f"| drafter | log | T | responses | rounds | tokens per verify | {columns} |")
    print("|---" * (6 + arguments.k) + "|")
    for drafter in arguments.drafters:
        for folder in arguments.logs:
            for line in table_lines(drafter, folder, arguments):
                print(line, flush=True)
    return 0


def table_lines(drafter: str, folder: str, arguments: argparse.Namespace) -> Iterator[str]:
    """A line for every temperature of a log.

    Raises:
        ValueError: a log of another target, or without rows of the split.
    """
    log = TargetLog.open(folder)
    rows = [row for row in log.rows(arguments.split) if row.is_targets]
    if not rows:
        raise ValueError(
            f"target log {folder} has no {arguments.split or 'own'} rows of its target; leave --split out, "
            "or name a log with a heldout_fraction above 0"
        )
    for temperature in sorted({row.temperature for row in rows}):
        same = [row for row in rows if row.temperature == temperature]
        found = measure(drafter, log, same, arguments)
        shares = " | ".join(f"{share:.3f}" for share in found.acceptance)
        yield (
            f"| {Path(drafter).name} | {Path(folder).name} | {temperature:g} | {len(same)} | "
            f"{len(found.right_R)} | {found.tokens_per_verify:.3f} | {shares} |"
        )


def measure(drafter: str, log: TargetLog, rows: Sequence[LogRow], arguments: argparse.Namespace) -> Rounds:
    """Replay rows; ValueError for a drafter of another target."""
    card = check_drafter_of(log, drafter)
    states = states_of(arguments.device, log, card)
    longest = max(len(row.prompt_ids) + len(row.response_ids) for row in rows)
    config = EngineConfig(
        dtype=arguments.dtype,
        draft_device=arguments.device,
        draft_rows=arguments.rows,
        lanes=1 if states is None else arguments.k + 1,
        num_pages=num_pages_for([0], 1, longest + arguments.k + 1, arguments.rows, PAGE_SIZE),
        page_size=PAGE_SIZE,
    )
    found = Rounds(arguments.k)

    def observe(response: ChainedResponse, num_right: int) -> None:
        found.right_R.append(num_right)
        found.num_tokens += min(num_right + 1, len(response.tokens) - response.root - 1)

    rounds = ChainRounds(
        load_drafter(drafter, config), k=arguments.k, fan_out=1, states=states, observe=observe
    )
    for _ in rounds.run(rows):
        pass
    return found


if __name__ == "__main__":
    sys.exit(run_command(main))
