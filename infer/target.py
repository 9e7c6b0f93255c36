"""The target: model on the paged pool, tokenizer, end-of-sequence ids, identity."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from foredraft.infer.gguf import load_gguf_tokenizer
from foredraft.infer.identity import TargetIdentity, identify_target
from foredraft.infer.paged_model import PagedModel
from foredraft.infer.params import EngineConfig


@dataclass
class Target:
    """A loaded target.

    `eos_ids` end a completion: those of the generation config and of the tokenizer.
    """

    source: str
    revision: str | None
    model: PagedModel
    tokenizer: PreTrainedTokenizerBase
    eos_ids: frozenset[int]

    @classmethod
    def load(cls, source: str, config: EngineConfig) -> Target:
        """Load a Hub id, a local folder or a `.gguf` file.

        Args:
            source: what to load.
            config: dtype, device, buckets, KV pages.

        Raises:
            ValueError: nothing to load there, or a family that bypasses the attention interface.
        """
        tokenizer = load_tokenizer(source, config)
        model = PagedModel.load(source, config)
        generation_config = getattr(model.model, "generation_config", None)
        eos = getattr(generation_config, "eos_token_id", None)
        eos_ids = {eos} if isinstance(eos, int) else set(eos or ())
        if tokenizer.eos_token_id is not None:
            eos_ids.add(tokenizer.eos_token_id)
        return cls(source, config.revision, model, tokenizer, frozenset(eos_ids))

    @cached_property
    def identity(self) -> TargetIdentity:
        """Id, revision and weight hash."""
        return identify_target(self.source, self.revision)


def load_tokenizer(source: str, config: EngineConfig) -> PreTrainedTokenizerBase:
    """The tokenizer beside a model.

    Raises:
        ValueError: there is none.
    """
    path = Path(source)
    try:
        if path.suffix == ".gguf":
            return load_gguf_tokenizer(path)
        return AutoTokenizer.from_pretrained(source, **config.hub_options)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"no tokenizer at {source!r}: expected a model folder, a .gguf file or a Hub id ({error})"
        ) from error
