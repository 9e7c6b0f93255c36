"""A Hugging Face causal LM on a paged KV pool: target and `lm` drafters alike.

Every step runs in one static bucket of rows, every prefill step in one static chunk, whatever they hold: the
same rows have the same bits in plain, synchronous and asynchronous decoding.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from foredraft.infer.attention import ATTENTION_NAME, PagedContext, ProbeContext, register
from foredraft.infer.gguf import load_gguf
from foredraft.infer.kv_pool import MAX_SUFFIX, KVPool
from foredraft.infer.kv_storage import KVStorage, LayerShape
from foredraft.infer.params import EngineConfig
from foredraft.infer.step_graph import GraphStep, StepInputs
from foredraft.infer.step_plan import Row, StepPlan, StepShape, plan_prefill, plan_step
from foredraft.kernels.tree_batch import TreeBatch

DEFAULT_CONTEXT = 16384  # positions that the default pool holds at most


class PagedModel:
    """Model, pool bookkeeping and KV tensors.

    `plan` and `plan_prefill` touch only bookkeeping, `run` only tensors, so two threads can share the work.
    """

    def __init__(self, model: PreTrainedModel, config: EngineConfig) -> None:
        self.model = model.eval()
        self.row_bucket = config.row_bucket
        self.prefill_chunk = config.prefill_chunk
        self.device = next(model.parameters()).device
        layers = probe(model)
        text_config = model.config.get_text_config()
        self.vocab_size: int = text_config.vocab_size
        self.max_positions: int = getattr(text_config, "max_position_embeddings", None) or DEFAULT_CONTEXT
        context_pages = -(-min(self.max_positions, DEFAULT_CONTEXT) // config.page_size)
        num_pages = config.num_pages or context_pages + num_reserved_pages(config.page_size)
        self.pool = KVPool(num_pages, config.page_size)
        self.storage = KVStorage(layers, num_pages * config.page_size, model.dtype, self.device)
        is_static = uses_graphs(config, self.device)
        sizes = {"num_pages": context_pages, "num_nodes": MAX_SUFFIX} if is_static else {}
        num_sequences = config.row_bucket if is_static else 0
        lanes = config.lanes or config.row_bucket
        self.step_shape = StepShape(config.row_bucket, lanes, num_sequences=num_sequences, **sizes)
        self.prefill_shape = StepShape(config.prefill_chunk, config.prefill_chunk, num_sequences=1, **sizes)
        self.forward = GraphStep(self._forward, self.device) if is_static else self._forward
        self.num_forwards = 0
        self.num_prefill_chunks = 0

    @property
    def max_tokens(self) -> int:
        """Committed positions for which the pool has room beside one request's suffix."""
        page_size = self.pool.page_size
        return (self.pool.num_pages - num_reserved_pages(page_size)) * page_size

    @classmethod
    def load(cls, source: str, config: EngineConfig) -> PagedModel:
        """Load a Hub id or a local folder.

        Raises:
            ValueError: nothing to load there, or the family bypasses the attention interface.
        """
        return cls(load_causal_lm(source, config, config.device), config)

    def plan(self, rows: Sequence[Row]) -> StepPlan:
        """Bookkeeping of one step; rows with neither node nor position are appended to their prefix."""
        for row in rows:
            if row.node is None and row.position is None:
                self.pool.extend(row.seq, 1)
        return plan_step(self.pool, rows, self.step_shape)

    def prefill_room(self, seq: int) -> int:
        """Tokens that the next prefill step can take: up to the next multiple of `prefill_chunk`."""
        return self.prefill_chunk - self.pool.num_committed(seq) % self.prefill_chunk

    def plan_prefill(self, seq: int, token_ids: Sequence[int]) -> StepPlan:
        """Bookkeeping of one prefill step; appends at most `prefill_room(seq)` tokens to the prefix."""
        self.pool.extend(seq, len(token_ids))
        return plan_prefill(self.pool, seq, token_ids, self.prefill_shape)

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
        logits_RV = self.forward(self._inputs(plan, keep_rows))
        self.num_forwards += 1
        return (logits_RV[: plan.num_rows] if keep_rows is None else logits_RV).float()

    def _forward(self, inputs: StepInputs) -> torch.Tensor:
        """The model on one step's inputs, on its device; logits [rows, V]."""
        output = self.model(
            input_ids=inputs.tokens_R[None],
            position_ids=inputs.positions_R[None],
            use_cache=False,
            logits_to_keep=0 if inputs.keep_rows is None else inputs.keep_rows,
            paged_context=PagedContext(inputs.batch, self.storage),
        )
        return output.logits[0]

    def prefill(self, seq: int, token_ids: Sequence[int]) -> torch.Tensor:
        """Append tokens to the committed prefix; logits float32 [V] after the last one."""
        if not token_ids:
            raise ValueError("a prompt needs at least one token, got none")
        start = 0
        while start < len(token_ids):
            plan = self.plan_prefill(seq, token_ids[start : start + self.prefill_room(seq)])
            logits_1V = self.run(plan, self.pool.drain_moves(), keep_rows=[plan.num_rows - 1])
            self.num_prefill_chunks += 1
            start += plan.num_rows
        return logits_1V[0]

    def step(self, rows: Sequence[Row]) -> torch.Tensor:
        """Run rows of any sequences at once; logits float32 [len(rows), V]."""
        plan = self.plan(rows)
        return self.run(plan, self.pool.drain_moves())

    def _inputs(self, plan: StepPlan, keep_rows: Sequence[int] | None) -> StepInputs:
        """A plan as tensors: on the host for a step that sends them itself, else on the model's device."""
        device = "cpu" if isinstance(self.forward, GraphStep) else self.device

        def tensor(array: np.ndarray) -> torch.Tensor:
            return torch.from_numpy(array).to(device)

        batch = TreeBatch(
            write_slots_R=tensor(plan.write_slots),
            row_seq_R=tensor(plan.row_seq),
            row_lane_R=tensor(plan.row_lane),
            row_position_R=tensor(plan.positions.astype(np.int32)),
            row_prefix_R=tensor(plan.row_prefix),
            row_ancestors_RW=tensor(plan.row_ancestors),
            lane_rows_SL=tensor(plan.lane_rows),
            num_shared_S=tensor(plan.num_shared),
            pages_SP=tensor(plan.pages),
            suffix_slots_SX=tensor(plan.suffix_slots),
            page_size=self.pool.page_size,
            is_prefill=plan.is_prefill,
        )
        kept = None if keep_rows is None else tensor(np.asarray(keep_rows))
        return StepInputs(tensor(plan.tokens), tensor(plan.positions), kept, batch)


def uses_graphs(config: EngineConfig, device: torch.device) -> bool:
    """Whether steps are captured.

    Raises:
        ValueError: asked for where there is no GPU.
    """
    is_gpu = device.type == "cuda"
    if config.step == "graph" and not is_gpu:
        raise ValueError(f"step graph needs a CUDA device, the model is on {device}; use step eager or auto")
    return is_gpu and config.step != "eager"


def num_reserved_pages(page_size: int) -> int:
    """Pages beside those of a longest context: scratch, one full suffix, and two to spare."""
    return 1 + -(-MAX_SUFFIX // page_size) + 2


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
