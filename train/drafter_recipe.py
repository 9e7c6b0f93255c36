"""Recipe of `foredraft train-drafter`."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf
from typing import Literal

from foredraft.infer.drafters import FAMILIES
from foredraft.infer.params import require
from foredraft.kernels.distill_loss_ref import LOSSES
from foredraft.train.log_recipe import Dtype

Precision = Literal["float32", "bfloat16"]
Family = Literal["lm", "mlp", "eagle3", "ngram"]
StateSource = Literal["target", "log"]


@dataclass(frozen=True, kw_only=True, slots=True)
class LoraRecipe:
    """Low-rank adapters that are trained in place of the weights, and merged into them at the end."""

    rank: int
    alpha: float  # the adapters' product is scaled by alpha / rank
    dropout: float = 0.0
    # names of linear layers, as peft takes them; empty: all but the head
    modules: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "modules", tuple(self.modules))
        require(self.rank >= 1, "rank", "at least 1", self.rank)
        require(self.alpha > 0.0, "alpha", "positive", self.alpha)
        require(0.0 <= self.dropout < 1.0, "dropout", "in [0, 1)", self.dropout)


@dataclass(frozen=True, kw_only=True, slots=True)
class InitRecipe:
    """Where an `lm` drafter's first weights come from."""

    source: Literal["target", "model", "scratch"]
    num_layers: int = 4  # source target or scratch: depth of the drafter
    layers: tuple[int, ...] = ()  # source target: which layers; empty: num_layers, evenly spaced
    model: str | None = None  # source model: Hub id or folder with the target's tokenizer
    config: dict[str, float | int | str | bool] | None = None  # source scratch: changes to the target's
    lora: LoraRecipe | None = None  # source model or target

    def __post_init__(self) -> None:
        require(self.num_layers >= 1, "num_layers", "at least 1", self.num_layers)
        require(all(i >= 0 for i in self.layers), "layers", "indices of the target's layers", self.layers)
        is_ordered = list(self.layers) == sorted(set(self.layers))
        require(is_ordered, "layers", "rising and distinct", self.layers)
        needs_model = self.source == "model"
        require((self.model is not None) == needs_model, "model", "set for source model only", self.model)
        is_scratch = self.source == "scratch"
        require(self.config is None or is_scratch, "config", "set for source scratch only", self.config)
        has_weights = self.lora is None or not is_scratch
        require(has_weights, "lora", "unset for source scratch, whose weights are random", self.lora)


@dataclass(frozen=True, kw_only=True, slots=True)
class MLPRecipe:
    """Sizes of an `mlp` drafter."""

    inner_size: int  # of the state
    num_steps: int  # stages unrolled in training: at least twice k

    def __post_init__(self) -> None:
        for name in ("inner_size", "num_steps"):
            require(getattr(self, name) >= 1, name, "at least 1", getattr(self, name))


@dataclass(frozen=True, kw_only=True, slots=True)
class Eagle3Recipe:
    """Sizes of an `eagle3` drafter; what is not here is the target's."""

    num_steps: int  # steps unrolled in training: at least twice k
    intermediate_size: int = 0  # of its MLP; 0: the target's
    layers: tuple[int, ...] = ()  # ids of the target's states; empty: 2, L / 2, L - 3

    def __post_init__(self) -> None:
        object.__setattr__(self, "layers", tuple(self.layers))
        require(self.num_steps >= 1, "num_steps", "at least 1", self.num_steps)
        require(self.intermediate_size >= 0, "intermediate_size", "0 or positive", self.intermediate_size)


@dataclass(frozen=True, kw_only=True, slots=True)
class NgramRecipe:
    """An `ngram` drafter, which is not trained."""

    longest: int = 4  # tokens of an ending that is looked up
    shortest: int = 1
    max_depth: int = 16
    uses_log: bool = True  # looks into the log's responses too, not just into the request's own text

    def __post_init__(self) -> None:
        is_range = 1 <= self.shortest <= self.longest <= 8
        require(is_range, "shortest", "in 1..longest, longest at most 8", (self.shortest, self.longest))
        require(1 <= self.max_depth <= 64, "max_depth", "in 1..64", self.max_depth)


@dataclass(frozen=True, kw_only=True, slots=True)
class DrafterRecipe:
    """`foredraft train-drafter`: distil a drafter from a target log."""

    log: str | tuple[str, ...]  # folder of the target log, or several of the same target
    target: str  # the log's target; its tokenizer goes into the artifact
    out: str  # folder of the drafter
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
    family: Family = "lm"
    # one section for the family
    init: InitRecipe | None = None
    mlp: MLPRecipe | None = None
    eagle3: Eagle3Recipe | None = None
    ngram: NgramRecipe | None = None
    # weights by name; a log of tokens only is learned by cross_entropy
    losses: dict[str, float] = field(default_factory=lambda: {"forward_kl": 1.0})
    final_losses: dict[str, float] | None = None  # weights at the end; they change linearly over all updates
    step_weights: tuple[float, ...] = ()  # of the unrolled steps; the last one stands for all further ones
    # share of the trained tokens that come from an on-policy log; 0: all of its rows, whatever that is
    on_policy_share: float = 0.0
    packing: bool = False  # several documents in a line of max_length tokens
    states: StateSource = "target"  # whence states come that a family feeds on: run the target, or the log
    target_dtype: Dtype = "auto"  # of the target, where it runs
    compile: bool = False  # torch.compile of the network
    max_skipped: int = 10  # updates skipped for numbers that are not finite, before the run stops
    gate_prompts: int = 8  # held-out prompts that the engine decodes to confirm the figures; 0: no gate
    revision: str | None = None
    trust_remote_code: bool = False
    reserved_fraction: float = 0.0  # of the train prompts, kept for an outcome predictor
    overwrite: bool = False  # replace another drafter in `out`
    attention: Literal["sdpa", "eager"] = "sdpa"  # eager is faster for short rows on CPUs
    wandb: Literal["off", "offline", "online"] = "off"
    wandb_project: str = "foredraft"
    tensorboard: bool = False  # event files in <out>.tensorboard
    log_every: int = 10
    threads: int = 0  # 0: torch's choice

    def __post_init__(self) -> None:
        object.__setattr__(self, "step_weights", tuple(self.step_weights))
        require(bool(self.logs), "log", "at least one folder", self.log)
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
        for name in ("weight_decay", "eval_every", "save_every", "threads", "max_skipped", "gate_prompts"):
            require(getattr(self, name) >= 0, name, "0 or positive", getattr(self, name))
        is_share = 0.0 <= self.reserved_fraction < 1.0
        require(is_share, "reserved_fraction", "in [0, 1)", self.reserved_fraction)
        is_part = 0.0 <= self.on_policy_share < 1.0
        require(is_part, "on_policy_share", "in [0, 1)", self.on_policy_share)
        require(0 <= self.seed < 2**63, "seed", "in [0, 2^63)", self.seed)
        self._check_family()
        for name in ("losses", "final_losses"):
            self._check_losses(name)
        is_weight = all(0.0 <= weight < inf for weight in self.step_weights)
        require(is_weight, "step_weights", "0 or positive", self.step_weights)

    @property
    def logs(self) -> tuple[str, ...]:
        """Folders of all target logs."""
        return (self.log,) if isinstance(self.log, str) else tuple(self.log)

    @property
    def num_steps(self) -> int:
        """Steps unrolled in training."""
        section = self.mlp or self.eagle3
        return section.num_steps if section is not None else 1

    def weight_of_step(self, step: int) -> float:
        """Weight of the loss of an unrolled step, counted from 1."""
        weights = self.step_weights or (1.0,)
        return weights[min(step, len(weights)) - 1]

    def _check_family(self) -> None:
        """The section of the family is there, and no other."""
        sections = {"lm": "init", **{name: name for name in FAMILIES if name != "lm"}}
        for family, section in sections.items():
            is_due, value = family == self.family, getattr(self, section)
            expected = "a section of keys" if is_due else f"unset for family {self.family}"
            require((value is not None) == is_due, section, expected, value)
        if self.mlp is not None or self.eagle3 is not None:
            # what is prepared during a verification lies below a block of k guesses
            is_deep = self.num_steps >= 2 * self.k
            expected = f"at least 2 k = {2 * self.k}: preparing an outcome drafts from the block's depth on"
            require(is_deep, "num_steps", expected, self.num_steps)

    def _check_losses(self, name: str) -> None:
        losses = getattr(self, name)
        if losses is None:
            return
        is_known = losses.keys() <= LOSSES.keys()
        require(is_known, name, f"weights of some of {', '.join(LOSSES)}", ", ".join(losses))
        is_weight = all(0.0 <= weight < inf for weight in losses.values())
        require(is_weight and any(losses.values()), name, "0 or positive, not all 0", losses)
