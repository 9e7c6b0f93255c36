"""Replayed steps: the same logits as eager ones, with CUDA's capture replaced by running again."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from foredraft.infer.paged_model import PagedModel
from foredraft.infer.params import EngineConfig
from foredraft.infer.step_graph import Forward, GraphStep, PackedInputs, StepInputs, StepOutput
from foredraft.infer.step_plan import Row, StepShape

CPU = torch.device("cpu")
CONFIG = EngineConfig(num_pages=32)


def rerun(run: Callable[[], StepOutput]) -> tuple[Callable[[], None], StepOutput]:
    """A capture that fills its output by running again: what a replay reads is what the buffers hold."""
    output = run()
    return lambda: output.logits_RV.copy_(run().logits_RV), output


def with_replay(model: PagedModel) -> PagedModel:
    """The model as it is on a GPU: static shapes, one captured step for each."""
    sizes = {"num_pages": 20, "num_nodes": 256}
    model.step_shape = StepShape(8, 8, num_sequences=8, **sizes)
    model.prefill_shape = StepShape(64, 64, num_sequences=4, **sizes)
    model.forward = GraphStep(model._forward, CPU, rerun)
    return model


def decode(model: PagedModel) -> list[torch.Tensor]:
    """Logits of two prefills, steps of chains and branches, a commit between them."""
    first, second = model.pool.begin(), model.pool.begin()
    found = [model.prefill(first, list(range(3, 90))), model.prefill(second, [5, 6, 7])]
    for step in range(3):
        nodes = model.pool.append(first, [None, -1, -1, -2]).nodes
        rows = [Row(first, 10 + step + i, node) for i, node in enumerate(nodes)]
        found.append(model.step([*rows, Row(second, 40 + step)]).clone())
        model.pool.commit(first, [nodes[0], nodes[1 + step % 2]])
    return found


def test_replayed_steps_have_the_bits_of_eager_ones(tiny_target: Path) -> None:
    expected = decode(PagedModel.load(str(tiny_target), CONFIG))
    model = with_replay(PagedModel.load(str(tiny_target), CONFIG))
    found = decode(model)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    assert model.forward.num_captured == 2  # a prefill and a decoding step, whatever they held


def test_a_model_that_cannot_be_captured_runs_eagerly_and_says_so_once(
    tiny_target: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(run: Callable[[], StepOutput]) -> tuple[Callable[[], None], StepOutput]:
        raise RuntimeError("operation not permitted when stream is capturing")

    expected = decode(PagedModel.load(str(tiny_target), CONFIG))
    model = with_replay(PagedModel.load(str(tiny_target), CONFIG))
    model.forward = GraphStep(model._forward, CPU, refuse)
    with caplog.at_level(logging.WARNING):
        found = decode(model)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    assert model.forward.num_captured == 0
    assert [record.message for record in caplog.records] == [
        "this model's step cannot be captured as a CUDA graph, it runs eagerly: "
        "operation not permitted when stream is capturing"
    ]


def test_inputs_travel_in_one_buffer(tiny_target: Path) -> None:
    seen: list[StepInputs] = []
    model = PagedModel.load(str(tiny_target), CONFIG)
    forward: Forward = model.forward

    def spy(inputs: StepInputs) -> StepOutput:
        seen.append(inputs)
        return forward(inputs)

    model.forward = spy
    decode(model)
    for inputs in seen:
        packed = PackedInputs(inputs, CPU)
        packed.send(inputs)
        assert packed.inputs.batch.derived == {}
        pairs = zip(packed.inputs.tensors(), inputs.tensors(), strict=True)
        assert all(one.dtype == other.dtype and torch.equal(one, other) for one, other in pairs)
        storages = {tensor.untyped_storage().data_ptr() for tensor in packed.inputs.tensors()}
        assert len(storages) == 1


def test_graphs_need_a_gpu(tiny_target: Path) -> None:
    with pytest.raises(ValueError, match="step graph needs a CUDA device, the model is on cpu"):
        PagedModel.load(str(tiny_target), EngineConfig(num_pages=8, step="graph"))
