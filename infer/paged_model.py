"""A Hugging Face causal LM on a paged KV pool: target and `lm` drafters alike."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from foredraft.infer.attention import ATTENTION_NAME, PagedContext, ProbeContext, register
from foredraft.infer.gguf import load_gguf
from foredraft.infer.kv_storage import LayerShape
from foredraft.infer.paged_steps import DEFAULT_CONTEXT, PagedSteps
from foredraft.infer.params import EngineConfig
from foredraft.infer.state_tap import StateTap
from foredraft.infer.step_graph import GraphStep, StepInputs, StepOutput
from foredraft.infer.step_plan import Row, StepPlan


class PagedModel(PagedSteps):
    """A causal LM with its pool and KV tensors.

    `run` touches only tensors, so two threads can share the work: one plans, the other runs.
    """

    def __init__(self, model: PreTrainedModel, config: EngineConfig) -> None:
        self.model = model.eval()
        text_config = model.config.get_text_config()
        max_positions = getattr(text_config, "max_position_embeddings", None) or DEFAULT_CONTEXT
        device = next(model.parameters()).device
        super().__init__(probe(model), max_positions, model.dtype, device, config)
        self.vocab_size: int = text_config.vocab_size
        self.hidden_size: int = text_config.hidden_size
        self.forward = GraphStep(self._forward, self.device) if self.is_static else self._forward
        self.tap: StateTap | None = None
        self.caught: list[torch.Tensor] = []  # states of the rows that ran since they were taken
        self.num_forwards = 0
        self.num_prefill_chunks = 0

    @classmethod
    def load(cls, source: str, config: EngineConfig) -> PagedModel:
        """Load a Hub id or a local folder.

        Raises:
            ValueError: nothing to load there, or the family bypasses the attention interface.
        """
        return cls(load_causal_lm(source, config, config.device), config)

    def catch_states(self, layers: Sequence[int]) -> None:
        """From now on keep the states that enter some layers (none: no more); `take_states` hands them over.

        Raises:
            ValueError: layers that the model lacks.
        """
        if self.tap is not None:
            self.tap.remove()
        self.tap = StateTap(self.model, layers) if layers else None
        self.caught.clear()
        if self.is_static:  # what was captured has other outputs
            self.forward = GraphStep(self._forward, self.device)

    def take_states(self) -> torch.Tensor:
        """States of all rows that ran since the last call, in order: [n, S], side by side for all layers."""
        caught, self.caught = self.caught, []
        return torch.cat(caught)

    @torch.inference_mode()
    def run(
        self,
        plan: StepPlan,
        moves: Sequence[tuple[np.ndarray, np.ndarray]] = (),
        keep_rows: Sequence[int] | None = None,
    ) -> torch.Tensor:
        """Run the model on one plan.

        Args:
            plan: from `plan` or `plan_prefill`.
            moves: the pool's drained moves; applied first.
            keep_rows: rows whose logits are wanted; None: the whole bucket goes through the head, the real
                rows are returned.

        Returns:
            Logits float32 [rows, V].
        """
        self.storage.move(moves)
        # a step that sends its inputs itself takes them on the host
        device = "cpu" if isinstance(self.forward, GraphStep) else self.device
        output = self.forward(self.inputs(plan, keep_rows, device))
        self.num_forwards += 1
        if output.states_RS is not None:
            self.caught.append(output.states_RS[: plan.num_rows])
        logits_RV = output.logits_RV
        return (logits_RV[: plan.num_rows] if keep_rows is None else logits_RV).float()

    def _forward(self, inputs: StepInputs) -> StepOutput:
        """The model on one step's inputs, on its device."""
        output = self.model(
            input_ids=inputs.tokens_R[None],
            position_ids=inputs.positions_R[None],
            use_cache=False,
            logits_to_keep=0 if inputs.keep_rows is None else inputs.keep_rows,
            paged_context=PagedContext(inputs.batch, self.storage),
        )
        return StepOutput(output.logits[0], None if self.tap is None else self.tap.take()[0])

    def prefill(self, seq: int, token_ids: Sequence[int]) -> torch.Tensor:
        """Append tokens to the committed prefix; logits float32 [V] after the last one."""
        return self.prefill_packed([(seq, token_ids)])[0]

    def prefill_packed(self, runs: Sequence[tuple[int, Sequence[int]]]) -> torch.Tensor:
        """Append tokens to the committed prefixes of several sequences, their rows packed into full steps.

        Args:
            runs: (sequence, its next tokens).

        Returns:
            Logits float32 [len(runs), V] after the last token of each.

        Raises:
            ValueError: a sequence without tokens.
        """
        if not all(len(token_ids) for _, token_ids in runs):
            raise ValueError("a prompt needs at least one token, got none")
        ends = np.cumsum([len(token_ids) for _, token_ids in runs])
        logits_EV, first = [], 0
        for plan in self.plan_packed_prefill(runs):
            in_step = ends[(ends > first) & (ends <= first + plan.num_rows)] - first - 1
            # the head has as many rows in every step: bits do not depend on who is packed together
            kept = [*in_step.tolist(), *[plan.num_rows - 1] * (self.prefill_places - len(in_step))]
            logits_KV = self.run(plan, self.pool.drain_moves(), keep_rows=kept)
            logits_EV.append(logits_KV[: len(in_step)])
            self.num_prefill_chunks += 1
            first += plan.num_rows
        return torch.cat(logits_EV)

    def step(self, rows: Sequence[Row]) -> torch.Tensor:
        """Run rows of any sequences at once; logits float32 [len(rows), V]."""
        plan = self.plan(rows)
        return self.run(plan, self.pool.drain_moves())


def load_causal_lm(source: str, config: EngineConfig, device: str) -> PreTrainedModel:
    """A causal LM of transformers with our attention function.

    Raises:
        ValueError: no such folder or Hub model, an architecture without a causal LM.
    """
    register()
    dtype = None if config.dtype == "auto" else getattr(torch, config.dtype)
    if source.endswith(".gguf"):
        model = load_gguf(Path(source), dtype)
        model.set_attn_implementation(ATTENTION_NAME)
        return model.to(device)
    try:
        model = AutoModelForCausalLM.from_pretrained(
            source, dtype=dtype or "auto", attn_implementation=ATTENTION_NAME, **config.hub_options
        )
    except OSError as error:
        raise ValueError(
            f"no model at {source!r}: expected a folder with config.json, a .gguf file or a Hub id ({error})"
        ) from error
    except KeyError as error:  # a family with a table of attention classes of its own
        family = AutoConfig.from_pretrained(source, **config.hub_options).model_type
        raise ValueError(f"{refusal_of(family)}; found {type(error).__name__}: {error}") from error
    return model.to(device)


def refusal_of(family: str) -> str:
    """How a family is refused that does its attention in a way of its own."""
    return (
        f"model family {family!r} cannot be decoded: expected every layer to call transformers' attention "
        "interface with the step's context"
    )


@torch.inference_mode()
def probe(model: PreTrainedModel) -> dict[int, LayerShape]:
    """Run one token and see that every layer calls the attention function with the step's context.

    Returns:
        What each layer stores of a token.

    Raises:
        ValueError: the family bypasses the attention interface, so it cannot be decoded here.
    """
    context = ProbeContext()
    refusal = refusal_of(model.config.model_type)
    token = torch.zeros(1, 1, dtype=torch.long, device=model.device)
    try:
        model(input_ids=token, position_ids=token, use_cache=False, logits_to_keep=0, paged_context=context)
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{refusal}; found {type(error).__name__}: {error}") from error
    num_layers = model.config.get_text_config().num_hidden_layers
    if sorted(context.layers) != list(range(num_layers)):
        raise ValueError(f"{refusal}; found {len(context.layers)} of {num_layers} layers that do")
    return context.layers
