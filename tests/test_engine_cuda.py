"""The engine on a GPU: one text in all modes, captured steps, and draft servers on either device."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from foredraft.infer.engine import Engine
from foredraft.infer.paged_model import PagedModel
from foredraft.infer.params import EngineConfig, SamplingParams, SpeculationParams
from foredraft.infer.sampler import CoupledSampler
from foredraft.infer.step_graph import GraphStep
from foredraft.infer.step_plan import Row
from foredraft.kernels import dispatch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

CASES = {
    "greedy": SamplingParams(max_new_tokens=48, ignore_eos=True),
    "nucleus": SamplingParams(max_new_tokens=48, temperature=0.7, top_p=0.95, seed=1, ignore_eos=True),
    "penalty": SamplingParams(
        max_new_tokens=48, temperature=1.0, repetition_penalty=1.1, seed=2, ignore_eos=True
    ),
}
# head dimension 64, as the matrix instructions of half precision want it
WIDE = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64, "initializer_range": 0.1}


@pytest.fixture(scope="module")
def wide_target(make_tiny_model) -> Path:
    return make_tiny_model("wide-target", **WIDE)


@pytest.fixture(scope="module")
def wide_drafter(make_tiny_model) -> Path:
    return make_tiny_model("wide-drafter", **WIDE | {"num_hidden_layers": 2})


def prompts(lengths: tuple[int, ...] = (1, 63, 65, 600)) -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(3, 320, (length,), generator=generator).tolist() for length in lengths]


def open_engine(target: Path, drafter: Path, draft_device: str = "cuda", **changes: object) -> Engine:
    speculation = SpeculationParams(block=changes.pop("block", "tree"))
    config = EngineConfig(device="cuda", draft_device=draft_device, speculation=speculation, **changes)
    return Engine.from_pretrained(str(target), str(drafter), mode="plain", config=config)


@pytest.mark.parametrize("draft_device", ["cuda", "cpu"])
@pytest.mark.parametrize("block", ["tree", "chain"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_modes_agree(
    wide_target: Path, wide_drafter: Path, dtype: str, block: str, draft_device: str
) -> None:
    """Two processes on one GPU, or a draft server on the CPU beside a target on the GPU."""
    with open_engine(wide_target, wide_drafter, draft_device, dtype=dtype, block=block) as engine:
        for name, params in CASES.items():
            plain = [completion.token_ids for completion in engine.generate(prompts(), params)]
            for mode in ("sync", "async"):
                found = engine.generate(prompts(), params, mode=mode)
                assert [completion.token_ids for completion in found] == plain, (name, mode)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_captured_steps_give_the_text_of_eager_ones(
    wide_target: Path, wide_drafter: Path, dtype: str
) -> None:
    texts = {}
    for step in ("eager", "graph"):
        with open_engine(wide_target, wide_drafter, dtype=dtype, step=step) as engine:
            found = engine.generate(prompts(), CASES["greedy"], mode="sync")
            texts[step] = [completion.token_ids for completion in found]
            forward = engine.target.model.forward
        assert isinstance(forward, GraphStep) == (step == "graph")
        if isinstance(forward, GraphStep):
            assert forward.num_captured == 2
    assert texts["eager"] == texts["graph"]


def test_the_gpu_runs_triton(wide_target: Path, wide_drafter: Path) -> None:
    dispatch.calls.clear()
    with open_engine(wide_target, wide_drafter, dtype="bfloat16", step="eager") as engine:
        engine.generate(prompts((70,)), CASES["nucleus"], mode="sync")
    operations = {
        "tree_attention",
        "kv_write",
        "kv_commit",
        "coupled_sample",
        "verify_walk",
        "top_candidates",
    }
    assert {(name, "triton") for name in operations} <= set(dispatch.calls)
    assert not [name for name, implementation in dispatch.calls if implementation != "triton"]


@pytest.mark.parametrize("name", CASES)
def test_nothing_waits_between_launch_and_outcome(wide_target: Path, name: str) -> None:
    """A captured step, the choice of tokens and the walk, under CUDA's check for synchronisation."""
    params = CASES[name]
    model = PagedModel.load(str(wide_target), EngineConfig(device="cuda", dtype="bfloat16"))
    prompt = list(range(3, 80))
    sampler = CoupledSampler(params, prompt)
    seq = model.pool.begin()
    model.prefill(seq, prompt)
    tokens_1N = torch.tensor([[7, 8]], device="cuda")
    parents_1N = torch.tensor([[-1, 0]], device="cuda")

    def verify() -> torch.Tensor:
        nodes = model.pool.append(seq, [None, -1, -2]).nodes
        rows = [Row(seq, token, node) for token, node in zip((5, 7, 8), nodes, strict=True)]
        logits_RV = model.step(rows)
        paths = [[5], [5, 7], [5, 7, 8]] if sampler.needs_outputs else []
        chosen_R = dispatch.coupled_sample(logits_RV, sampler.draws([78, 79, 80], paths))
        model.pool.rollback(seq)
        return dispatch.verify_walk(tokens_1N, parents_1N, chosen_R[None]).bonus_S

    verify()  # compiles kernels and captures the step
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        bonus_S = verify()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert 0 <= int(bonus_S) < model.vocab_size
