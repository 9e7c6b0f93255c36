"""Held-out acceptance against training tokens, from the reports that a training run leaves in its drafter.

    python scripts/learning_curve.py runs/smollm2-135m/drafter --out recipes/smollm2-135m/learning_curve

Writes a Markdown table (.md) and a plot (.png); several drafters are compared in one plot. Tokens count every
pass over the log. The points of a run share its learning rate schedule: before the end the rate is higher
than where a run of so many tokens would end.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib

from foredraft.infer.config import run_command
from foredraft.infer.drafter_card import read_drafter_card

FIGURES = {"top1": "first guess right", "tokens_per_verify": "tokens per verify"}


@dataclass(frozen=True, slots=True)
class Curve:
    """Reports of one training run."""

    name: str
    k: int
    points: list[dict[str, Any]]  # step, tokens, heldout by temperature

    def line(self, temperature: str, figure: str) -> tuple[list[float], list[float]]:
        """Tokens and values."""
        points = [point for point in self.points if temperature in point["heldout"]]
        return [p["tokens"] for p in points], [p["heldout"][temperature][figure] for p in points]

    @property
    def temperatures(self) -> list[str]:
        """All that were reported."""
        return sorted({key for point in self.points for key in point["heldout"]}, key=float)


def main(argv: Sequence[str] | None = None) -> int:
    """Write table and plot; prints the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("drafters", nargs="+", metavar="DRAFTER", help="folders of `foredraft train-drafter`")
    parser.add_argument("--out", required=True, help="path of the results, without .md or .png")
    arguments = parser.parse_args(argv)
    curves = [read_curve(folder) for folder in arguments.drafters]
    table = "\n".join(table_lines(curves)) + "\n"
    Path(f"{arguments.out}.md").write_text(table, encoding="utf-8")
    plot(curves, Path(f"{arguments.out}.png"))
    print(table, end="")
    return 0


def read_curve(folder: str) -> Curve:
    """The reports of a drafter.

    Raises:
        ValueError: it has fewer than two.
    """
    card = read_drafter_card(folder)
    points = [] if card is None else card.training.get("curve", [])
    if card is None or len(points) < 2:
        raise ValueError(
            f"{folder} holds {len(points)} reports of its training, expected at least 2; "
            "train it with an `eval_every` above 0"
        )
    return Curve(Path(folder).name, card.training["recipe"]["k"], points)


def table_lines(curves: Sequence[Curve]) -> list[str]:
    """Markdown, a line for every report."""
    lines = ["| drafter | updates | training tokens | T | top-1 | top-8 | overlap | tokens per verify |"]
    lines.append("|---|---|---|---|---|---|---|---|")
    for curve in curves:
        for point in curve.points:
            for temperature, found in sorted(point["heldout"].items()):
                lines.append(
                    f"| {curve.name} | {point['step']:,} | {point['tokens']:,} | {temperature} | "
                    f"{found['top1']:.3f} | {found['top8']:.3f} | {found['overlap'][0]:.3f} | "
                    f"{found['tokens_per_verify']:.3f} |"
                )
    return [*lines, "", f"Held-out answers of the target; chains of {curves[0].k} guesses."]


def plot(curves: Sequence[Curve], path: Path) -> None:
    """One panel a figure, one line a drafter and temperature."""
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, len(FIGURES), figsize=(9, 3.6), constrained_layout=True)
    for axis, (key, title) in zip(axes, FIGURES.items(), strict=True):
        for curve in curves:
            for temperature in curve.temperatures:
                axis.plot(*curve.line(temperature, key), marker="o", label=f"{curve.name}, T = {temperature}")
        axis.set(xlabel="training tokens, all passes", title=title)
        axis.grid(alpha=0.3)
    axes[-1].legend(fontsize="small")
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    sys.exit(run_command(main))
