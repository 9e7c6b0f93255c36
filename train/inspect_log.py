"""`foredraft inspect-log`: what a target log holds, and a sample with the trained tokens marked.

    foredraft inspect-log --log runs/demo/log --sample 2

Only the tokens of the saved response are trained, whatever a chat template makes of them.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from foredraft.infer.config import read_config, run_command
from foredraft.infer.params import EngineConfig, require
from foredraft.infer.target import load_tokenizer
from foredraft.train.log_rows import LogRow
from foredraft.train.target_log import TargetLog

COVERAGES = (0.9, 0.95, 0.99)
TABLE_WIDTH = 100  # a pipe has none of its own
SHADES = ((0.5, "bold green"), (0.1, "green"), (0.0, "yellow"))  # by the target's probability of the token


@dataclass(frozen=True, kw_only=True, slots=True)
class InspectRecipe:
    """`foredraft inspect-log`: what a target log holds."""

    log: str  # folder of the target log
    sample: int = 1  # rows that are printed
    first: int = 0  # index of the first of them
    tokenizer: str | None = None  # folder or Hub id; none: that of the log's target
    as_json: bool = False  # statistics as JSON on standard output, without a sample

    def __post_init__(self) -> None:
        for name in ("sample", "first"):
            require(getattr(self, name) >= 0, name, "0 or positive", getattr(self, name))


def main(argv: list[str] | None = None) -> int:
    """Entry of `foredraft inspect-log`; returns the exit code."""
    recipe, _ = read_config(InspectRecipe, sys.argv[1:] if argv is None else argv, "inspect-log")
    log = TargetLog.open(recipe.log)
    rows = list(log.rows())
    statistics = describe(log, rows)
    if recipe.as_json:
        print(json.dumps(statistics, indent=2))
        return 0
    console = Console(highlight=False, soft_wrap=True)
    console.width = max(console.width, TABLE_WIDTH)
    chosen = rows[recipe.first : recipe.first + recipe.sample]
    if chosen:
        source = recipe.tokenizer or log.manifest.recipe["target"]
        tokenizer = load_tokenizer(source, EngineConfig(revision=log.manifest.recipe.get("revision")))
        for row in chosen:
            console.print(heading(row))
            console.print(marked(row, tokenizer, is_plain=not console.is_terminal))
            console.print()
    print_statistics(console, statistics)
    return 0


def describe(log: TargetLog, rows: Sequence[LogRow]) -> dict[str, Any]:
    """Statistics of a log, ready for JSON."""
    groups: dict[tuple[str, float, str], list[LogRow]] = {}
    for row in rows:
        groups.setdefault((row.split, row.temperature, row.source), []).append(row)
    tokens = np.concatenate([row.response_ids for row in rows]) if rows else np.zeros(0, np.int64)
    counts = np.sort(np.bincount(tokens))[::-1]
    shares = np.cumsum(counts) / max(1, counts.sum())
    manifest = log.manifest
    return {
        "log": str(log.folder),
        "target": str(manifest.target),
        "rows": len(rows),
        "prompts": len({row.request_id for row in rows}),
        "prompt_tokens": int(sum(len(row.prompt_ids) for row in rows)),
        "response_tokens": len(tokens),
        "bytes": sum(path.stat().st_size for path in log.folder.iterdir() if path.is_file()),
        "top_k_logprobs": manifest.top_k_logprobs,
        "hidden_layers": manifest.hidden_layers,
        "repeated_responses": len(rows) - len({(row.request_id, row.response_ids.tobytes()) for row in rows}),
        "distinct_tokens": int((counts > 0).sum()),
        # how large a draft vocabulary must be to hold this share of what was said
        "draft_vocabulary": {f"{share:g}": int(np.searchsorted(shares, share)) + 1 for share in COVERAGES},
        "groups": [
            {"split": split, "temperature": temperature, "source": source, **_describe_group(members)}
            for (split, temperature, source), members in sorted(groups.items())
        ],
    }


def _describe_group(rows: Sequence[LogRow]) -> dict[str, Any]:
    lengths = np.array([len(row.response_ids) for row in rows])
    has_distributions = rows[0].topk_ids.shape[1] > 0
    best = (
        np.concatenate([row.topk_ids[:, 0] == row.response_ids for row in rows])
        if has_distributions
        else None
    )
    return {
        "rows": len(rows),
        "prompts": len({row.request_id for row in rows}),
        "tokens": int(lengths.sum()),
        "tokens_median": float(np.median(lengths)),
        "tokens_90": float(np.quantile(lengths, 0.9)),
        "stopped": float(np.mean([row.finish_reason == "stop" for row in rows])),
        "most_probable": None if best is None else float(best.mean()),
        "tail_mass": float(np.concatenate([row.tail_mass for row in rows]).mean()),
    }


def heading(row: LogRow) -> Text:
    """One line that names a row."""
    return Text(
        f"{row.request_id}  {row.split}, {row.source}, temperature {row.temperature:g}, seed {row.seed}, "
        f"{len(row.prompt_ids)} + {len(row.response_ids)} tokens, {row.finish_reason}",
        style="bold",
    )


def marked(row: LogRow, tokenizer: Any, *, is_plain: bool) -> Text:
    """A row's text: prompt dim, trained tokens by the target's probability; [[ ]] where colour is lost."""
    text = Text(tokenizer.decode(row.prompt_ids.tolist()), style="dim")
    start = len(row.prompt_ids)
    ids = [*row.prompt_ids.tolist(), *row.response_ids.tolist()]
    if is_plain:
        text.append(f"[[{tokenizer.decode(row.response_ids.tolist())}]]")
        return text
    shown = tokenizer.decode(ids[:start])
    probs_T = probabilities(row)
    for place, prob in enumerate(probs_T):
        whole = tokenizer.decode(ids[: start + place + 1])
        # half a character is shown with its other half
        if whole.endswith("\N{REPLACEMENT CHARACTER}") and place + 1 < len(probs_T):
            continue
        style = next(style for least, style in SHADES if prob >= least)
        text.append(whole[len(shown) :], style=f"not dim {style}")
        shown = whole
    return text


def probabilities(row: LogRow) -> np.ndarray:
    """The target's probability of every response token, 0 where it is not among the kept; float64 [T]."""
    is_own_TK = row.topk_ids == row.response_ids[:, None]
    return (np.exp(row.topk_logprobs.astype(np.float64)) * is_own_TK).sum(1)


def print_statistics(console: Console, statistics: Mapping[str, Any]) -> None:
    """The statistics as two tables."""
    table = Table(
        "split", "T", "source", "rows", "prompts", "tokens", "median", "90 %", "stopped", "top-1", "tail"
    )
    for group in statistics["groups"]:
        best = group["most_probable"]
        table.add_row(
            group["split"],
            f"{group['temperature']:g}",
            group["source"],
            *(f"{group[name]:,}" for name in ("rows", "prompts", "tokens")),
            *(f"{group[name]:.0f}" for name in ("tokens_median", "tokens_90")),
            f"{group['stopped']:.0%}",
            "-" if best is None else f"{best:.0%}",
            f"{group['tail_mass']:.1%}",
        )
    console.print(table)
    for name in ("target", "rows", "prompts", "response_tokens", "bytes", "top_k_logprobs", "hidden_layers"):
        console.print(f"{name}: {statistics[name]}")
    console.print(
        f"responses that say the same as another one to their prompt: {statistics['repeated_responses']}"
    )
    sizes = ", ".join(
        f"{float(share):.0%}: {size:,}" for share, size in statistics["draft_vocabulary"].items()
    )
    console.print(f"distinct tokens: {statistics['distinct_tokens']:,}; tokens that make up {sizes} of all")


if __name__ == "__main__":
    sys.exit(run_command(main))
