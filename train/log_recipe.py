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
class PromptSource:
    """One source of prompts."""

    kind: Literal["jsonl", "requests", "hub"]
    path: str  # JSONL file; folder of request/response logs; id of a dataset on the Hub, or its local folder
    limit: int = 0  # prompts taken from its beginning; 0: all
    subset: str | None = None  # hub: configuration of the dataset
    split: str = "train"  # hub
    column: str = "messages"  # hub: conversations (OpenAI or ShareGPT form), or the text of a user turn

    def __post_init__(self) -> None:
        require(self.limit >= 0, "limit", "0 (all) or positive", self.limit)


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerRecipe:
    """An OpenAI-compatible server (vLLM, SGLang) that runs the target. The key is OPENAI_API_KEY's."""

    url: str  # such as http://127.0.0.1:8000/v1
    model: str  # as the server calls the target
    concurrency: int = 16  # requests at once
    timeout_s: float = 600.0  # of one request
    retries: int = 3

    def __post_init__(self) -> None:
        require(self.url.startswith(("http://", "https://")), "url", "http:// or https://", self.url)
        require(self.concurrency >= 1, "concurrency", "at least 1", self.concurrency)
        require(self.timeout_s > 0.0, "timeout_s", "positive", self.timeout_s)
        require(self.retries >= 0, "retries", "0 or positive", self.retries)


@dataclass(frozen=True, kw_only=True, slots=True)
class LogRecipe:
    """`foredraft log`: what the target answers to which prompts, and what is kept of it."""

    target: str  # Hub id, folder or .gguf file
    # JSONL with `messages` or `prompt`, optional `id`, `split` and `response`; or several sources
    prompts: str | tuple[PromptSource, ...]
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
    responses: Literal["target", "given"] = "target"  # given: those of the data, which the target only scores
    server: ServerRecipe | None = None  # that decodes in place of this process
    hidden_layers: tuple[int, ...] = ()  # ids of states that are stored too, for drafters that feed on them

    def __post_init__(self) -> None:
        object.__setattr__(self, "hidden_layers", tuple(self.hidden_layers))
        # readers of YAML leave the members of a list as mappings
        groups = tuple(g if isinstance(g, ResponseGroup) else ResponseGroup(**vars(g)) for g in self.groups)
        object.__setattr__(self, "groups", groups)
        if not isinstance(self.prompts, str):
            sources = tuple(
                s if isinstance(s, PromptSource) else PromptSource(**vars(s)) for s in self.prompts
            )
            object.__setattr__(self, "prompts", sources)
        is_given = self.responses == "given"
        require(bool(self.sources), "prompts", "at least one source", self.prompts)
        is_grouped = bool(self.groups) != is_given
        require(is_grouped, "groups", "empty with given responses, else at least one group", self.groups)
        is_remote = self.server is not None
        require(not (is_remote and is_given), "server", "unset with given responses", self.server)
        no_states = not (is_remote and self.hidden_layers)
        require(no_states, "hidden_layers", "empty with a server, which sends no states", self.hidden_layers)
        require(self.max_new_tokens >= 1, "max_new_tokens", "at least 1", self.max_new_tokens)
        least = 0 if is_given or is_remote else 1
        is_width = least <= self.top_k_logprobs <= 1024
        require(is_width, "top_k_logprobs", f"in {least}..1024", self.top_k_logprobs)
        require(0.0 <= self.heldout_fraction < 1.0, "heldout_fraction", "in [0, 1)", self.heldout_fraction)
        require(0 <= self.seed < 2**64, "seed", "in [0, 2^64)", self.seed)
        require(self.prompts_per_shard >= 1, "prompts_per_shard", "at least 1", self.prompts_per_shard)
        require(2 <= self.rows <= 256, "rows", "in 2..256", self.rows)
        require(self.threads >= 0, "threads", "0 (automatic) or positive", self.threads)

    @property
    def sources(self) -> tuple[PromptSource, ...]:
        """Where prompts come from."""
        if isinstance(self.prompts, str):
            return (PromptSource(kind="jsonl", path=self.prompts),) if self.prompts else ()
        return self.prompts


@dataclass(frozen=True, kw_only=True, slots=True)
class OnPolicyRecipe:
    """`foredraft on-policy`: a drafter's own mistakes along a log, scored by the target."""

    log: str  # folder of the target log
    drafter: str  # folder or Hub id
    out: str  # folder of the log to be
    length: int  # guesses of a chain: the wrong one and those behind it
    mistakes_per_response: int
    seed: int  # which mistakes are taken where there are more
    reserved_fraction: float  # of the train prompts, kept for an outcome predictor: the drafter's own
    device: str = "cpu"
    rows: int = 64  # responses whose rounds run at once
    threads: int = 0  # 0: torch's choice

    def __post_init__(self) -> None:
        require(1 <= self.length <= 32, "length", "in 1..32", self.length)
        is_count = self.mistakes_per_response >= 1
        require(is_count, "mistakes_per_response", "at least 1", self.mistakes_per_response)
        require(0 <= self.seed < 2**64, "seed", "in [0, 2^64)", self.seed)
        is_share = 0.0 <= self.reserved_fraction < 1.0
        require(is_share, "reserved_fraction", "in [0, 1)", self.reserved_fraction)
        require(2 <= self.rows <= 256, "rows", "in 2..256", self.rows)
        require(self.threads >= 0, "threads", "0 (automatic) or positive", self.threads)
