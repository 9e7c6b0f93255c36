"""One step of a model: run eagerly, or captured once a shape as a CUDA graph and replayed with new inputs.

With static shapes (row bucket, sequences, pages) all that a step launches is the same from step to step but
for the values of its inputs. These are packed into one buffer: one copy to the device, one launch of the
graph, no wait in between.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from foredraft.kernels.tree_batch import TreeBatch

ALIGNMENT = 16  # bytes; Triton loads aligned pointers faster
NUM_WARM_UPS = 2  # the first compiles kernels and sizes workspaces, which must not happen in a capture

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class StepInputs:
    """All that a step reads of its plan."""

    tokens_R: torch.Tensor  # int64
    positions_R: torch.Tensor  # int64
    keep_rows: torch.Tensor | None  # int64, rows whose logits are wanted; None: all
    batch: TreeBatch

    def tensors(self) -> list[torch.Tensor]:
        """Every tensor, in a fixed order."""
        own = [self.tokens_R, self.positions_R, *([] if self.keep_rows is None else [self.keep_rows])]
        values = [getattr(self.batch, item.name) for item in dataclasses.fields(self.batch)]
        return own + [value for value in values if isinstance(value, torch.Tensor)]

    def with_tensors(self, tensors: list[torch.Tensor]) -> StepInputs:
        """The same step with other tensors, in the order of `tensors`; nothing is derived of them yet."""
        rest = iter(tensors)
        tokens_R, positions_R = next(rest), next(rest)
        keep_rows = None if self.keep_rows is None else next(rest)
        batch = dataclasses.replace(self.batch, derived={})
        for item in dataclasses.fields(batch):
            if isinstance(getattr(batch, item.name), torch.Tensor):
                setattr(batch, item.name, next(rest))
        return StepInputs(tokens_R, positions_R, keep_rows, batch)


class StepOutput(NamedTuple):
    """What a step makes."""

    logits_RV: torch.Tensor  # of the rows that are kept
    states_RS: torch.Tensor | None = None  # that entered chosen layers, of all rows

    def clone(self) -> StepOutput:
        """A copy that the next replay leaves alone."""
        return StepOutput(self.logits_RV.clone(), None if self.states_RS is None else self.states_RS.clone())


Forward = Callable[[StepInputs], StepOutput]
Capture = Callable[[Callable[[], StepOutput]], tuple[Callable[[], None], StepOutput]]


def capture_cuda_graph(run: Callable[[], StepOutput]) -> tuple[Callable[[], None], StepOutput]:
    """Record what `run` launches; returns what replays it, and the output that every replay fills."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(NUM_WARM_UPS):
            run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = run()
    return graph.replay, output


class PackedInputs:
    """Tensors of one step in one buffer on the device, with a twin on the host: they travel in one copy.

    The twin is written anew by the next step: its copy has ended by then, since between two steps the outcome
    of the first is read.
    """

    def __init__(self, inputs: StepInputs, device: torch.device) -> None:
        sizes = [tensor.numel() * tensor.element_size() for tensor in inputs.tensors()]
        starts = np.cumsum([0, *(-(-size // ALIGNMENT) * ALIGNMENT for size in sizes)]).tolist()
        self.host = torch.zeros(starts[-1], dtype=torch.uint8, pin_memory=device.type == "cuda")
        self.device = torch.zeros(starts[-1], dtype=torch.uint8, device=device)

        def views(buffer: torch.Tensor) -> list[torch.Tensor]:
            places = zip(inputs.tensors(), starts, sizes, strict=False)
            return [
                buffer[start : start + size].view(tensor.dtype).view(tensor.shape)
                for tensor, start, size in places
            ]

        self.host_views = views(self.host)
        self.inputs = inputs.with_tensors(views(self.device))

    def send(self, inputs: StepInputs) -> None:
        """Copy a step's tensors to the device, without waiting."""
        for view, tensor in zip(self.host_views, inputs.tensors(), strict=True):
            view.copy_(tensor)
        self.device.copy_(self.host, non_blocking=True)


@dataclass(frozen=True)
class _Captured:
    """A captured step: fill `packed`, replay, read `output`."""

    packed: PackedInputs
    replay: Callable[[], None]
    output: StepOutput


class GraphStep:
    """Runs steps by replay. A model that cannot be captured runs eagerly, which is said once.

    Args:
        forward: the model on one step's inputs.
        device: where it runs.
        capture: records a launch; another one than CUDA's is for tests.
    """

    def __init__(self, forward: Forward, device: torch.device, capture: Capture = capture_cuda_graph) -> None:
        self._forward = forward
        self._device = device
        self._capture = capture
        self._captured: dict[tuple, _Captured] = {}
        self._is_refused = False

    @property
    def num_captured(self) -> int:
        """Shapes that are replayed."""
        return len(self._captured)

    def __call__(self, inputs: StepInputs) -> StepOutput:
        """The output on the device, for inputs on the host."""
        key = (*(tensor.shape for tensor in inputs.tensors()), inputs.batch.is_prefill)
        captured = self._captured.get(key)
        if captured is None and not self._is_refused:
            captured = self._try_capture(inputs, key)
        if captured is None:
            tensors = [tensor.to(self._device) for tensor in inputs.tensors()]
            return self._forward(inputs.with_tensors(tensors))
        captured.packed.send(inputs)
        captured.replay()
        return captured.output.clone()

    def _try_capture(self, inputs: StepInputs, key: tuple) -> _Captured | None:
        packed = PackedInputs(inputs, self._device)
        packed.send(inputs)

        def run() -> StepOutput:
            # what is derived of a batch must be derived again in every replay
            return self._forward(packed.inputs.with_tensors(packed.inputs.tensors()))

        try:
            self._captured[key] = _Captured(packed, *self._capture(run))
        except RuntimeError as error:
            logger.warning("this model's step cannot be captured as a CUDA graph, it runs eagerly: %s", error)
            self._is_refused = True
        return self._captured.get(key)
