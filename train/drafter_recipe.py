"""Recipe of `foredraft train-drafter`."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf
from typing import Literal

from foredraft.infer.params import require
from foredraft.kernels.distill_loss_ref import LOSSES

Precision = Literal["float32", "bfloat16"]


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
