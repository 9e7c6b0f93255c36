"""A whole asynchronous decode with every kernel in Triton gives the reference's tokens."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from foredraft.infer.engine import Engine
from foredraft.infer.params import EngineConfig, SamplingParams, SpeculationParams
from foredraft.infer.remote_guesser import RemoteGuesser
from foredraft.kernels import dispatch

PARAMS = SamplingParams(
    max_new_tokens=12,
    temperature=0.8,
    top_k=40,
    top_p=0.95,
    min_p=0.01,
    repetition_penalty=1.1,
    presence_penalty=0.2,
    logit_bias=((7, 1.0),),
    seed=2,
    ignore_eos=True,
)
# as the matrix products of the kernels want it
SIZES = {
    "head_dim": 16,
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 128,
}
TARGET_KERNELS = {"tree_attention", "kv_write", "kv_commit", "coupled_sample", "verify_walk"}
DRAFTER_KERNELS = {"tree_attention", "kv_write", "kv_commit", "top_candidates"}


def decode(target: Path, drafter: Path) -> tuple[list[int], dict[str, float]]:
    """Tokens, and what the draft server says it ran."""
    config = EngineConfig(
        dtype="float32",
        row_bucket=4,
        draft_rows=4,
        speculation=SpeculationParams(k=2, block_nodes=3, fan_out=4, lockstep=2, on_miss="wait"),
    )
    counters: dict[str, float] = {}
    with Engine.from_pretrained(str(target), str(drafter), config=config) as engine:
        guesser = engine._guesser("async")
        assert isinstance(guesser, RemoteGuesser)
        close = guesser.client.close

        def ask_then_close(request: str) -> None:
            counters.update(guesser.client.stats(request, timeout=60.0))
            close(request)

        guesser.client.close = ask_then_close
        prompt = list(range(3, 40))
        return engine.generate([prompt], PARAMS)[0].token_ids, counters


def test_all_kernels_in_triton_give_the_references_tokens(
    make_tiny_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    target = make_tiny_model("triton-target", **SIZES)
    drafter = make_tiny_model("triton-drafter", **SIZES)
    expected, _ = decode(target, drafter)
    # the draft server inherits the environment
    monkeypatch.setenv("FOREDRAFT_KERNELS", "triton")
    dispatch.calls.clear()
    with dispatch.forcing("triton"):
        found, counters = decode(target, drafter)
    assert found == expected
    assert {name for name, _ in dispatch.calls} == TARGET_KERNELS
    assert {implementation for _, implementation in dispatch.calls} == {"triton"}
    ran = {tuple(name.split(" ")) for name in counters if " " in name}
    assert ran == {(name, "triton") for name in DRAFTER_KERNELS}
