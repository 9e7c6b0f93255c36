"""Recipes: one frozen, validated dataclass per stage of training.

A recipe is complete: what decides the result has no default, so the file says it. Paths are relative to the
working folder.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from math import inf
from typing import Literal, get_args

from foredraft.infer.params import SamplingParams, require, require_choice
from foredraft.kernels.distill_loss_ref import LOSSES
from foredraft.train.splits import Part

Precision = Literal["float32", "bfloat16"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ResponseGroup:
    """Responses drawn from the target for every prompt with the same sampling settings."""

    responses: int  # per prompt; at temperature 0 all would be equal, so 1
    temperature: float
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0

    def __post_init__(self) -> None:
        require(self.responses >= 1, "responses", "at least 1", self.responses)
        require(
            self.temperature > 0.0 or self.responses == 1,
            "responses",
            "1 at temperature 0 (all would be equal)",
            self.responses,
        )
        self.sampling(seed=0, max_new_tokens=1)

    def sampling(self, seed: int, max_new_tokens: int) -> SamplingParams:
        """Settings of one response."""
        return SamplingParams(
            max_new_tokens=max_new_tokens,
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            seed=seed,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class LogRecipe:
    """`foredraft log`: what the target answers to which prompts, and what is kept of it."""

    target: str  # Hub id, folder or .gguf file
    prompts: str  # JSONL with `messages` or `prompt`, optional `id` and `split`
    out: str  # folder of the log
    groups: tuple[ResponseGroup, ...]
    max_new_tokens: int
    top_k_logprobs: int  # most probable tokens kept per position
    heldout_fraction: float  # of the prompts without a `split` of their own, by hash
    seed: int  # every row's own seed derives from it
    prompts_per_shard: int
    revision: str | None = None
    raw: bool = False  # prompts as they are, without the chat template
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    device: str = "cpu"
    rows: int = 64  # sequences decoded at once
    threads: int = 0  # 0: torch's choice

    def __post_init__(self) -> None:
        # readers of YAML leave the members of a list as mappings
        groups = tuple(g if isinstance(g, ResponseGroup) else ResponseGroup(**vars(g)) for g in self.groups)
        object.__setattr__(self, "groups", groups)
        require(bool(self.groups), "groups", "at least one group of responses", self.groups)
        require(self.max_new_tokens >= 1, "max_new_tokens", "at least 1", self.max_new_tokens)
        require(1 <= self.top_k_logprobs <= 1024, "top_k_logprobs", "in 1..1024", self.top_k_logprobs)
        require(0.0 <= self.heldout_fraction < 1.0, "heldout_fraction", "in [0, 1)", self.heldout_fraction)
        require(0 <= self.seed < 2**64, "seed", "in [0, 2^64)", self.seed)
        require(self.prompts_per_shard >= 1, "prompts_per_shard", "at least 1", self.prompts_per_shard)
        require(2 <= self.rows <= 256, "rows", "in 2..256", self.rows)
        require(self.threads >= 0, "threads", "0 (automatic) or positive", self.threads)


@dataclass(frozen=True, kw_only=True, slots=True)
class InitRecipe:
    """Where the drafter's first weights come from."""

    source: Literal["target", "model", "scratch"]
    num_layers: int = 4  # source target or scratch: depth of the drafter
    layers: tuple[int, ...] = ()  # source target: which layers; empty: num_layers, evenly spaced
    model: str | None = None  # source model: Hub id or folder with the target's tokenizer
    config: dict[str, float | int | str | bool] | None = None  # source scratch: changes to the target's

    def __post_init__(self) -> None:
        require(self.num_layers >= 1, "num_layers", "at least 1", self.num_layers)
        require(all(i >= 0 for i in self.layers), "layers", "indices of the target's layers", self.layers)
        is_ordered = list(self.layers) == sorted(set(self.layers))
        require(is_ordered, "layers", "rising and distinct", self.layers)
        needs_model = self.source == "model"
        require((self.model is not None) == needs_model, "model", "set for source model only", self.model)
        is_scratch = self.source == "scratch"
        require(self.config is None or is_scratch, "config", "set for source scratch only", self.config)


@dataclass(frozen=True, kw_only=True, slots=True)
class DrafterRecipe:
    """`foredraft train-drafter`: distil a causal LM from a target log."""

    log: str  # folder of the target log
    target: str  # the log's target; its tokenizer goes into the artifact
    out: str  # folder of the drafter
    init: InitRecipe
    draft_vocab_size: int  # 0: the whole vocabulary
    freeze_embeddings: bool  # embeddings and head keep their first values
    epochs: float
    batch_tokens: int  # padded tokens of one forward on one process
    accumulation: int  # forwards per update
    max_length: int  # longer sequences are cut at the end
    learning_rate: float
    warmup_fraction: float  # of all updates; then cosine to final_fraction of the learning rate
    final_fraction: float
    weight_decay: float
    clip_norm: float
    precision: Precision  # of the forward; weights and optimizer are float32
    seed: int
    k: int  # chain depth of the reported tokens per verify
    eval_every: int  # updates; 0: at the end only
    eval_rows: int  # held-out rows of each report
    save_every: int  # updates between checkpoints; 0: none
    # weights by name; a log without distributions is learned by cross_entropy alone
    losses: dict[str, float] = field(default_factory=lambda: {"forward_kl": 1.0})
    revision: str | None = None
    trust_remote_code: bool = False
    reserved_fraction: float = 0.0  # of the train prompts, kept for an outcome predictor
    overwrite: bool = False  # replace another drafter in `out`
    attention: Literal["sdpa", "eager"] = "sdpa"  # eager is faster for short rows on CPUs
    wandb: Literal["off", "offline", "online"] = "off"
    wandb_project: str = "foredraft"
    log_every: int = 10
    threads: int = 0  # 0: torch's choice

    def __post_init__(self) -> None:
        require(self.draft_vocab_size >= 0, "draft_vocab_size", "0 (all) or positive", self.draft_vocab_size)
        require(self.epochs > 0.0, "epochs", "positive", self.epochs)
        require(self.max_length >= 2, "max_length", "at least 2", self.max_length)
        is_enough = self.batch_tokens >= self.max_length
        require(is_enough, "batch_tokens", f"at least max_length ({self.max_length})", self.batch_tokens)
        for name in ("accumulation", "k", "eval_rows", "log_every"):
            require(getattr(self, name) >= 1, name, "at least 1", getattr(self, name))
        for name in ("learning_rate", "clip_norm"):
            require(getattr(self, name) > 0.0, name, "positive", getattr(self, name))
        for name in ("warmup_fraction", "final_fraction"):
            require(0.0 <= getattr(self, name) <= 1.0, name, "in [0, 1]", getattr(self, name))
        for name in ("weight_decay", "eval_every", "save_every", "threads"):
            require(getattr(self, name) >= 0, name, "0 or positive", getattr(self, name))
        is_share = 0.0 <= self.reserved_fraction < 1.0
        require(is_share, "reserved_fraction", "in [0, 1)", self.reserved_fraction)
        require(0 <= self.seed < 2**63, "seed", "in [0, 2^63)", self.seed)
        is_known = self.losses.keys() <= LOSSES.keys()
        require(is_known, "losses", f"weights of some of {', '.join(LOSSES)}", ", ".join(self.losses))
        is_weight = all(0.0 <= weight < inf for weight in self.losses.values())
        require(is_weight and any(self.losses.values()), "losses", "0 or positive, not all 0", self.losses)


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
