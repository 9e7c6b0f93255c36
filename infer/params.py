"""What a user can ask of a decode: sampling, speculation and engine settings, validated once, then frozen."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

Mode = Literal["plain", "sync", "async"]
MODES: tuple[Mode, ...] = ("plain", "sync", "async")
BlockShape = Literal["chain", "tree"]
Verification = Literal["coupled", "rejection"]
MissPolicy = Literal["wait", "ngram", "plain"]
ExpandPolicy = Literal["auto", "confidence", "confidence-q", "predictor"]  # auto: the best that is there
Dtype = Literal["auto", "float32", "bfloat16", "float16"]
StepMode = Literal["auto", "eager", "graph"]  # auto: graph on a GPU, else eager


def require(condition: bool, name: str, expected: str, found: object) -> None:
    """Raise a ValueError that names the setting, what it must be and what was given."""
    if not condition:
        raise ValueError(f"{name} must be {expected}, got {found!r}")


def require_choice(choices: Any, name: str, found: object) -> None:
    """Raise a ValueError unless `found` is one of a Literal type's values."""
    values = get_args(choices)
    require(found in values, name, f"one of {', '.join(values)}", found)


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """How the target's token is chosen from its logits, and when a completion ends.

    The same values with the same seed give the same tokens in every mode (Gumbel coupling; see
    kernels/coupled_sample_ref.py).
    """

    max_new_tokens: int = 128
    temperature: float = 0.0
    top_k: int = 0  # 0: off
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token id, what is added to its logit)
    seed: int | None = None  # None: a random one is drawn and returned
    choice: int = 0  # index of the completion when several are drawn from one seed
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        require(self.max_new_tokens >= 1, "max_new_tokens", "at least 1", self.max_new_tokens)
        require(0.0 <= self.temperature < 100.0, "temperature", "in [0, 100)", self.temperature)
        require(self.top_k >= 0, "top_k", "0 (off) or positive", self.top_k)
        require(0.0 < self.top_p <= 1.0, "top_p", "in (0, 1]", self.top_p)
        require(0.0 <= self.min_p <= 1.0, "min_p", "in [0, 1]", self.min_p)
        require(self.repetition_penalty > 0.0, "repetition_penalty", "positive", self.repetition_penalty)
        for name in ("presence_penalty", "frequency_penalty"):
            require(-2.0 <= getattr(self, name) <= 2.0, name, "in [-2, 2]", getattr(self, name))
        is_bias = all(token >= 0 and -100.0 <= bias <= 100.0 for token, bias in self.logit_bias)
        require(is_bias, "logit_bias", "token ids with values in [-100, 100]", self.logit_bias)
        require(self.seed is None or 0 <= self.seed < 2**64, "seed", "in [0, 2^64)", self.seed)
        require(0 <= self.choice < 2**32, "choice", "in [0, 2^32)", self.choice)
        require(all(self.stop), "stop", "non-empty strings", self.stop)


@dataclass(frozen=True, kw_only=True, slots=True)
class SpeculationParams:
    """How the drafter guesses: shape and size of the block, expansions per round, what happens on a miss."""

    k: int = 4  # drafter forwards a round in sync mode and after a waited miss; depth of a chain
    block: BlockShape = "tree"
    block_nodes: int = 7  # guesses in a block; with the root it fills a bucket of 8 rows
    fan_out: int = 16  # children kept per expanded node (F)
    verification: Verification = "coupled"
    saguaro: float = 1.0  # rejection: the drafter scales its fan_out best tokens by it; 1: off
    budget: int = 0  # nodes expanded during one verification; 0: until the outcome arrives
    policy: ExpandPolicy = "auto"  # what a guess is believed; auto: predictor where there is one
    on_miss: MissPolicy = "ngram"
    draft_timeout_ms: float = 0.0  # bound of a wait for the draft server; 0: twice the median verify time
    lockstep: int = 0  # exactly this many expansions a round, then the answer; 0: free running

    def __post_init__(self) -> None:
        require(1 <= self.k <= 64, "k", "in 1..64", self.k)
        require_choice(BlockShape, "block", self.block)
        require(1 <= self.block_nodes <= 255, "block_nodes", "in 1..255", self.block_nodes)
        require(1 <= self.fan_out <= 64, "fan_out", "in 1..64", self.fan_out)
        require_choice(Verification, "verification", self.verification)
        is_rejection = self.verification == "rejection"
        require(not is_rejection or self.block == "chain", "block", "chain with rejection", self.block)
        is_drafters_own = self.policy != "predictor" or not is_rejection
        require(is_drafters_own, "policy", "auto, confidence or confidence-q with rejection", self.policy)
        require(0.0 < self.saguaro <= 1.0, "saguaro", "in (0, 1]", self.saguaro)
        require(self.saguaro == 1.0 or is_rejection, "saguaro", "1 without rejection", self.saguaro)
        require(self.budget >= 0, "budget", "0 (no limit) or positive", self.budget)
        require_choice(ExpandPolicy, "policy", self.policy)
        require_choice(MissPolicy, "on_miss", self.on_miss)
        require(
            self.draft_timeout_ms >= 0, "draft_timeout_ms", "0 (automatic) or positive", self.draft_timeout_ms
        )
        require(0 <= self.lockstep <= 64, "lockstep", "in 0..64", self.lockstep)


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineConfig:
    """Where and how the models run. What changes numerical results is here, so that all modes share it."""

    dtype: Dtype = "auto"
    device: str = "cpu"
    draft_device: str = "cpu"
    threads: int = 0  # of the target, the same in every mode; 0: all cores but the draft server's
    draft_threads: int = 1
    row_bucket: int = 8  # rows of every target step; padding rows write to scratch
    lanes: int = 0  # rows of one sequence in a step at most; 0: all of them
    draft_rows: int = 16  # rows of every drafter step: nodes that one expansion takes at most
    prefill_chunk: int = 64  # tokens of a prefill step, aligned to absolute position
    page_size: int = 64  # tokens of a KV page
    step: StepMode = "auto"  # graph: a step is captured once as a CUDA graph, then replayed
    num_pages: int = 0  # 0: enough for one context of the model's length, at most 16384 tokens
    revision: str | None = None  # of the target on the Hub
    trust_remote_code: bool = False
    allow_target_mismatch: bool = False
    # seconds of a verification of 0, 1, 2, ... guesses, for the choice of block size; none: measured
    verify_seconds: tuple[float, ...] = ()
    speculation: SpeculationParams = field(default_factory=SpeculationParams)

    def __post_init__(self) -> None:
        require_choice(Dtype, "dtype", self.dtype)
        require(self.threads >= 0, "threads", "0 (automatic) or positive", self.threads)
        require(0 <= self.lanes <= self.row_bucket, "lanes", "in 0..row_bucket", self.lanes)
        require(self.draft_threads >= 1, "draft_threads", "at least 1", self.draft_threads)
        require(2 <= self.row_bucket <= 256, "row_bucket", "in 2..256", self.row_bucket)
        require(
            self.prefill_chunk % 64 == 0 and self.prefill_chunk > 0,
            "prefill_chunk",
            "a multiple of 64",
            self.prefill_chunk,
        )
        require(
            16 <= self.page_size <= 256 and self.page_size & (self.page_size - 1) == 0,
            "page_size",
            "a power of two in 16..256",
            self.page_size,
        )
        is_time = all(seconds > 0.0 for seconds in self.verify_seconds)
        require(is_time, "verify_seconds", "positive seconds", self.verify_seconds)
        require_choice(StepMode, "step", self.step)
        require(self.num_pages >= 0, "num_pages", "0 (automatic) or positive", self.num_pages)

    @property
    def of_drafter(self) -> EngineConfig:
        """The settings under which the drafter is loaded: its own device and rows, its newest revision."""
        return replace(self, device=self.draft_device, row_bucket=self.draft_rows, revision=None)

    @property
    def hub_options(self) -> dict[str, Any]:
        """Keyword arguments of every `from_pretrained`; settings that are off are left to transformers."""
        options = {"revision": self.revision, "trust_remote_code": self.trust_remote_code}
        return {name: value for name, value in options.items() if value}
