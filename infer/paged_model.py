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
from foredraft.infer.step_plan import Row, StepPlan, plan_prefill, plan_step
from foredraft.kernels.tree_attention_ref import AttentionPlan

DEFAULT_CONTEXT = 16384  # positions that the default pool holds at most


class PagedModel:
    """Model, pool bookkeeping and KV tensors.

    `plan` and `plan_prefill` touch only bookkeeping, `run` only tensors, so two threads can share the work.
    """

    def __init__(self, model: PreTrainedModel, config: EngineConfig) -> None:
        self.model = model.eval()
        self.row_bucket = config.row_bucket
        self.prefill_chunk = config.prefill_chunk
        self.num_lanes = config.lanes or config.row_bucket
        self.device = next(model.parameters()).device
        layers = probe(model)
        text_config = model.config.get_text_config()
        self.vocab_size: int = text_config.vocab_size
        self.max_positions: int = getattr(text_config, "max_position_embeddings", None) or DEFAULT_CONTEXT
        context_pages = -(-min(self.max_positions, DEFAULT_CONTEXT) // config.page_size)
        num_pages = config.num_pages or context_pages + num_reserved_pages(config.page_size)
        self.pool = KVPool(num_pages, config.page_size)
        self.storage = KVStorage(layers, num_pages * config.page_size, model.dtype, self.device)
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
        return plan_step(self.pool, rows, self.row_bucket, self.num_lanes)

    def prefill_room(self, seq: int) -> int:
        """Tokens that the next prefill step can take: up to the next multiple of `prefill_chunk`."""
        return self.prefill_chunk - self.pool.num_committed(seq) % self.prefill_chunk

    def plan_prefill(self, seq: int, token_ids: Sequence[int]) -> StepPlan:
        """Bookkeeping of one prefill step; appends at most `prefill_room(seq)` tokens to the prefix."""
        self.pool.extend(seq, len(token_ids))
        return plan_prefill(self.pool, seq, token_ids, self.prefill_chunk)

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
        context = PagedContext(self._to_tensors(plan), self.storage)
        output = self.model(
            input_ids=self._tensor(plan.tokens)[None],
            position_ids=self._tensor(plan.positions)[None],
            use_cache=False,
            logits_to_keep=0 if keep_rows is None else self._tensor(np.asarray(keep_rows)),
            paged_context=context,
        )
        self.num_forwards += 1
        logits_RV = output.logits[0]
        return (logits_RV[: plan.num_rows] if keep_rows is None else logits_RV).float()

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

    def _tensor(self, array: np.ndarray) -> torch.Tensor:
        """An array of a plan on the model's device."""
        return torch.from_numpy(array).to(self.device)

    def _to_tensors(self, plan: StepPlan) -> AttentionPlan:
        """The attention part of a step plan on the model's device."""
        return AttentionPlan(
            write_slots_R=self._tensor(plan.write_slots),
            item_slots_I64=self._tensor(plan.item_slots),
            item_seq_I=self._tensor(plan.item_seq),
            item_start_I=self._tensor(plan.item_start),
            tail_mask_JL64=self._tensor(plan.tail_mask),
            lane_rows_SL=self._tensor(plan.lane_rows),
            lane_positions_SL=self._tensor(plan.lane_positions),
            row_lane_R=self._tensor(plan.row_lane),
            part_items_RP=self._tensor(plan.part_items),
            part_missing_RP=self._tensor(plan.part_missing),
        )


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
