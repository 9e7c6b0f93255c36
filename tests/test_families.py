"""Model families of transformers as targets: one text in three modes, the model's own; or a refusal."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from foredraft.infer.engine import Engine
from foredraft.infer.generate import main as generate
from foredraft.infer.params import EngineConfig, SamplingParams, SpeculationParams

VOCAB = 320
WINDOW = 24
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
GPT2 = {"n_embd": 32, "n_layer": 4, "n_head": 4, "n_inner": 64, "n_positions": 512, "attn_pdrop": 0.0}
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
ALTERNATING = ["sliding_attention", "full_attention"] * 2
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {},
    "qwen3_moe": MOE,
    "gemma3_text": {"sliding_window": WINDOW, "layer_types": ALTERNATING, "query_pre_attn_scalar": 8},
    "gemma2": {"sliding_window": WINDOW, "layer_types": ALTERNATING, "query_pre_attn_scalar": 8},
    "mistral": {"sliding_window": WINDOW},
    "gpt2": GPT2,
    "gpt_neox": {"rotary_pct": 0.5, "num_key_value_heads": None},
    "phi3": {},
    "olmo2": {},
    "smollm3": {"no_rope_layers": [1, 1, 1, 0]},
}
IN_FAST_ASYNC = ("gemma3_text",)
REFUSED: dict[str, dict[str, Any]] = {
    "falcon": {"num_kv_heads": 2, "new_decoder_architecture": True},
    "bloom": {"n_layer": 2, "n_head": 4},
    "mamba": {"state_size": 4, "conv_kernel": 2},
    "stablelm": {},
}
DERIVED = {"falcon": ("head_dim",)}  # settings that a family works out by itself
# longer than the window, across multiples of 64, and one shorter than the window
PROMPT_LENGTHS = (5, 40, 61)
GREEDY = SamplingParams(max_new_tokens=24, ignore_eos=True)
SAMPLED = SamplingParams(max_new_tokens=24, temperature=1.0, seed=6, ignore_eos=True)


def build(family: str, settings: dict[str, Any]) -> PreTrainedModel:
    """A small random model."""
    sizes = {name: value for name, value in SIZES.items() if name not in DERIVED.get(family, ())}
    config = AutoConfig.for_model(family, **(sizes | settings))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()


def disturbed(model: PreTrainedModel, strength: float = 0.03) -> PreTrainedModel:
    """Noise on the matrices: the best guess is right now and then."""
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                noise = torch.randn(weight.shape, generator=generator)
                weight.add_(strength * weight.std() * noise)
    return model


@pytest.fixture(scope="module")
def make_pair(
    tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer: PreTrainedTokenizerFast
) -> Callable[[str], tuple[Path, Path]]:
    """`make_pair(family)` -> folders of a target and of its disturbed copy."""
    made: dict[str, tuple[Path, Path]] = {}

    def make(family: str) -> tuple[Path, Path]:
        if family not in made:
            root = tmp_path_factory.mktemp(family)
            folders = root / "target", root / "drafter"
            for folder, change in zip(folders, (lambda model: model, disturbed), strict=True):
                change(build(family, FAMILIES[family])).save_pretrained(folder)
                tiny_tokenizer.save_pretrained(folder)
            made[family] = folders
        return made[family]

    return make


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(3, VOCAB, (length,), generator=generator).tolist() for length in PROMPT_LENGTHS]


def open_engine(target: Path, drafter: Path, dtype: str = "float32") -> Engine:
    config = EngineConfig(dtype=dtype, threads=1, speculation=SpeculationParams(fan_out=8))
    return Engine.from_pretrained(str(target), str(drafter), mode="plain", config=config)


def texts(engine: Engine, params: SamplingParams, mode: str) -> list[list[int]]:
    return [completion.token_ids for completion in engine.generate(prompts(), params, mode=mode)]


def assert_is_own_text(model: PreTrainedModel, prompt: list[int], text: list[int]) -> None:
    """Every greedy token is the best of the model's own logits, but for rounding."""
    with torch.no_grad():
        logits_TV = model(torch.tensor([[*prompt, *text]]), use_cache=False).logits[0]
    rows = logits_TV[len(prompt) - 1 : -1]
    chosen = rows.gather(1, torch.tensor(text)[:, None])[:, 0]
    assert float((rows.amax(1) - chosen).max()) < 1e-3


@pytest.mark.parametrize("family", FAMILIES)
def test_sync_gives_plain_text_and_plain_the_models_own(
    family: str, make_pair: Callable[[str], tuple[Path, Path]]
) -> None:
    target, drafter = make_pair(family)
    with open_engine(target, drafter) as engine:
        plain = texts(engine, GREEDY, "plain")
        model = AutoModelForCausalLM.from_pretrained(target, attn_implementation="eager").eval()
        for prompt, text in zip(prompts(), plain, strict=True):
            assert_is_own_text(model, prompt, text)
        completions = engine.generate(prompts(), GREEDY, mode="sync")
        assert [completion.token_ids for completion in completions] == plain
        assert texts(engine, SAMPLED, "sync") == texts(engine, SAMPLED, "plain")
    stats = [completion.stats for completion in completions]
    settled = sum(s["tokens"] for s in stats) / sum(s["rounds"] for s in stats)
    print(f"{family}: {settled:.2f} tokens per verify")
    assert settled > 1.05
    assert len({tuple(text) for text in plain}) == len(plain)


@pytest.mark.parametrize(
    "family",
    [name if name in IN_FAST_ASYNC else pytest.param(name, marks=pytest.mark.slow) for name in FAMILIES],
)
def test_async_gives_plain_text(family: str, make_pair: Callable[[str], tuple[Path, Path]]) -> None:
    target, drafter = make_pair(family)
    with open_engine(target, drafter) as engine:
        for params in (GREEDY, SAMPLED):
            assert texts(engine, params, "async") == texts(engine, params, "plain")


@pytest.mark.parametrize(
    "family", ["gpt2", *(pytest.param(name, marks=pytest.mark.slow) for name in ("qwen3_moe", "gemma3_text"))]
)
def test_modes_agree_in_bfloat16(family: str, make_pair: Callable[[str], tuple[Path, Path]]) -> None:
    target, drafter = make_pair(family)
    with open_engine(target, drafter, "bfloat16") as engine:
        for params in (GREEDY, SAMPLED):
            assert texts(engine, params, "sync") == texts(engine, params, "plain")


@pytest.fixture(scope="module")
def make_refused(
    tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer: PreTrainedTokenizerFast
) -> Callable[[str], Path]:
    def make(family: str) -> Path:
        folder = tmp_path_factory.mktemp(family) / "target"
        build(family, REFUSED[family]).save_pretrained(folder)
        tiny_tokenizer.save_pretrained(folder)
        return folder

    return make


@pytest.mark.parametrize("family", REFUSED)
def test_what_bypasses_the_attention_interface_is_refused_by_name(
    family: str, make_refused: Callable[[str], Path]
) -> None:
    with pytest.raises(ValueError, match=f"model family '{family}' cannot be decoded: expected every layer"):
        Engine.from_pretrained(str(make_refused(family)), mode="plain", config=EngineConfig(threads=1))


def test_the_command_refuses_it_too(
    make_refused: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["--target", str(make_refused("falcon")), "--prompt", "hello", "--max-new-tokens", "2"]
    assert generate(argv) == 2
    assert "model family 'falcon' cannot be decoded" in capsys.readouterr().err
