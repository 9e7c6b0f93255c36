"""Recipes of `foredraft synthesise` and `foredraft log`: the prompts, and the target's answers to them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from foredraft.infer.params import SamplingParams, require

Dtype = Literal["auto", "float32", "bfloat16", "float16"]


@dataclass(frozen=True, kw_only=True, slots=True)
class SynthesisRecipe:
    """`foredraft synthesise`: user turns drawn from the target itself."""

    target: str  # Hub id, folder or .gguf file
    openings: str  # JSONL with `text`, the first words of a turn; optional `category`, `system`, `share`
    out: str  # JSONL file of the prompts
    count: int  # turns drawn; fewer prompts are left: turns without an end and repeated ones are dropped
    temperature: float
    top_p: float
    max_new_tokens: int
    min_new_tokens: int  # shorter turns are dropped
    seed: int  # every turn's own seed derives from it
    prompts_per_part: int
    revision: str | None = None
    dtype: Dtype = "auto"
    device: str = "cpu"
    rows: int = 64  # turns drawn at once
    threads: int = 0  # 0: torch's choice

    def __post_init__(self) -> None:
        require(
            self.temperature > 0.0,
            "temperature",
            "positive (else all turns of an opening are equal)",
            self.temperature,
        )
        for name in ("count", "max_new_tokens", "min_new_tokens", "prompts_per_part"):
            require(getattr(self, name) >= 1, name, "at least 1", getattr(self, name))
        require(0 <= self.seed < 2**64, "seed", "in [0, 2^64)", self.seed)
        require(2 <= self.rows <= 256, "rows", "in 2..256", self.rows)
        require(self.threads >= 0, "threads", "0 (automatic) or positive", self.threads)
        self.sampling(seed=0)

    def sampling(self, seed: int) -> SamplingParams:
        """Settings of one turn."""
        return SamplingParams(
            max_new_tokens=self.max_new_tokens, temperature=self.temperature, top_p=self.top_p, seed=seed
        )


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
    dtype: Dtype = "auto"
    device: str = "cpu"
    rows: int = 64  # sequences decoded at once
    threads: int = 0  # 0: torch's choice
    hidden_layers: tuple[int, ...] = ()  # ids of states that are stored too, for drafters that feed on them

    def __post_init__(self) -> None:
        object.__setattr__(self, "hidden_layers", tuple(self.hidden_layers))
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
