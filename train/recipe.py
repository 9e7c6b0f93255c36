"""Recipes: one frozen, validated dataclass per stage of training; here those of the stages after the drafter.

A recipe is complete: what decides the result has no default, so the file says it. Paths are relative to the
working folder.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal, get_args

from foredraft.infer.params import require, require_choice
from foredraft.train.splits import Part


@dataclass(frozen=True, kw_only=True, slots=True)
class OutcomesRecipe:
    """`foredraft outcomes`: a drafter replayed over a target log."""

    log: str  # folder of the target log
    drafter: str  # folder or Hub id
    out: str  # folder of the outcome records
    parts: tuple[Part, ...]  # of the log: reserved and heldout, train only to look at
    fan_out: int  # F, candidates of a record
    depth: int  # records have depth 0 .. depth - 1
    k: int  # guesses of a chain round on held-out rows
    heldout_responses: int  # replayed of a held-out prompt at each temperature at most; 0: all
    rows: int = 64  # responses whose chain rounds run at once
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    device: str = "cpu"
    threads: int = 0  # 0: torch's choice

    def __post_init__(self) -> None:
        object.__setattr__(self, "parts", tuple(self.parts))
        require(bool(self.parts), "parts", f"some of {', '.join(get_args(Part))}", self.parts)
        for part in self.parts:
            require_choice(Part, "parts", part)
        require(16 <= self.fan_out <= 64, "fan_out", "in 16..64", self.fan_out)
        require(1 <= self.depth <= 32, "depth", "in 1..32", self.depth)
        require(1 <= self.k <= 32, "k", "in 1..32", self.k)
        is_count = self.heldout_responses >= 0
        require(is_count, "heldout_responses", "0 (all) or positive", self.heldout_responses)
        require(2 <= self.rows <= 256, "rows", "in 2..256", self.rows)
        require(self.threads >= 0, "threads", "0 (automatic) or positive", self.threads)


@dataclass(frozen=True, kw_only=True, slots=True)
class PredictorRecipe:
    """`foredraft train-predictor`: fit an outcome predictor to outcome records."""

    outcomes: str  # folder of the outcome records
    out: str  # folder of the predictor
    calibration_fraction: float  # of the reserved prompts, kept from the fit
    hidden_size: int
    epochs: int
    batch_size: int
    learning_rate: float
    weight_decay: float
    seed: int
    budgets: tuple[int, ...]  # B of the reported hit rates
    learning_curve: bool  # also fit to 1/16, 1/8, ... of the prompts
    overwrite: bool = False  # replace another predictor in `out`
    threads: int = 0  # 0: torch's choice

    def __post_init__(self) -> None:
        object.__setattr__(self, "budgets", tuple(self.budgets))
        is_share = 0.0 < self.calibration_fraction < 1.0
        require(is_share, "calibration_fraction", "in (0, 1)", self.calibration_fraction)
        for name in ("hidden_size", "epochs", "batch_size"):
            require(getattr(self, name) >= 1, name, "at least 1", getattr(self, name))
        require(self.learning_rate > 0.0, "learning_rate", "positive", self.learning_rate)
        require(self.weight_decay >= 0.0, "weight_decay", "0 or positive", self.weight_decay)
        require(0 <= self.seed < 2**63, "seed", "in [0, 2^63)", self.seed)
        is_set = bool(self.budgets) and min(self.budgets) >= 1
        require(is_set, "budgets", "at least one, each at least 1", self.budgets)
        require(self.threads >= 0, "threads", "0 (automatic) or positive", self.threads)


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportRecipe:
    """`foredraft export`: a drafter, and its outcome predictor, with model cards."""

    drafter: str  # folder or Hub id
    out: str  # gets the folder `drafter`, and `predictor` where there is one
    name: str  # of the drafter in its card: the Hub id it is to have
    base_model: str  # Hub id of the target, for the card
    license: str  # identifier of the Hub, such as apache-2.0
    language: tuple[str, ...]  # codes, such as en; may be empty
    predictor: str | None = None  # folder or Hub id of the drafter's outcome predictor
    bench: str | None = None  # report of `foredraft bench --out FILE` with this drafter
    overwrite: bool = False  # replace another export in `out`

    def __post_init__(self) -> None:
        object.__setattr__(self, "language", tuple(self.language))
        for name in ("name", "base_model", "license"):
            value = getattr(self, name)
            require(bool(re.fullmatch(r"[\w./@+-]+", value)), name, "one word", value)
        for code in self.language:
            require(bool(re.fullmatch(r"[a-z]{2,3}", code)), "language", "codes such as en", self.language)
