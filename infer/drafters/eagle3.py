"""Family `eagle3`: one decoder layer over fused states of the target, or its own where these are missing.

Li et al., arXiv:2503.01840. A row takes the embedding of its token and a state z: the projected states of the
target after the token before it, or, below the root where these do not exist yet, what the layer itself made
of its parent. With x the token's embedding:

    [q, k, v] = W [norm(x); norm(z)],   a = z + attention(q, k, v),   y = a + mlp(norm(a)),
    logits = head(norm(y))

y is the state of the row's children. Training unrolls the same (training-time test): step s attends to keys
of step 1, made of true states, up to the anchor, and from there on to the keys of steps 2 .. s, one each.

The folder has the tensors and the configuration of the speculators format, which vLLM reads too.

Shape letters: R rows, B sequences, T tokens, S states of all layers, H hidden size, Q query and K key-value
heads, E head dimension, D draft vocabulary.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import (
    LlamaMLP,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
    apply_rotary_pos_emb,
)

from foredraft.infer.drafter_card import DrafterCard, StateNeeds
from foredraft.infer.drafters import Step
from foredraft.infer.drafters.network import DraftNetwork, Sequences, gathered
from foredraft.infer.drafters.paged import PagedDrafter, read_draft_vocab
from foredraft.infer.kv_storage import LayerShape
from foredraft.infer.paged_steps import PagedSteps
from foredraft.infer.params import EngineConfig
from foredraft.infer.target_states import from_bits
from foredraft.kernels.dispatch import kv_write, tree_attention
from foredraft.kernels.distill_loss_ref import Head
from foredraft.kernels.tree_batch import Scoring, TreeBatch

CONFIG_FILE, WEIGHTS_FILE = "config.json", "model.safetensors"
LAYERS_KEY = "eagle_aux_hidden_state_layer_ids"


def default_layers(num_layers: int) -> tuple[int, int, int]:
    """Low, middle and high state of a target, the ids that every engine falls back to.

    Raises:
        ValueError: a target too shallow for three.
    """
    if num_layers < 6:
        raise ValueError(f"eagle3 fuses states of three layers: expected at least 6 layers, got {num_layers}")
    return 2, num_layers // 2, num_layers - 3


class Attention(nn.Module):
    """Projections of one layer whose input is twice as wide as its output."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        wide, size = 2 * config.hidden_size, config.head_dim
        self.heads, self.kv_heads, self.size = config.num_attention_heads, config.num_key_value_heads, size
        self.q_proj = nn.Linear(wide, self.heads * size, bias=False)
        self.k_proj = nn.Linear(wide, self.kv_heads * size, bias=False)
        self.v_proj = nn.Linear(wide, self.kv_heads * size, bias=False)
        self.o_proj = nn.Linear(self.heads * size, config.hidden_size, bias=False)

    def project(
        self, input_BTX: torch.Tensor, cos_sin: Any
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Rotated queries [B, Q, T, E] and keys [B, K, T, E], values [B, K, T, E]."""
        shape = (*input_BTX.shape[:-1], -1, self.size)
        query, key, value = (
            layer(input_BTX).view(shape).transpose(1, 2) for layer in (self.q_proj, self.k_proj, self.v_proj)
        )
        return *apply_rotary_pos_emb(query, key, *cos_sin), value


class Layer(nn.Module):
    """The decoder layer without its attention's inner part, which training and decoding do differently."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = LlamaRMSNorm(size, eps)
        self.hidden_norm = LlamaRMSNorm(size, eps)
        self.post_attention_layernorm = LlamaRMSNorm(size, eps)
        self.self_attn = Attention(config)
        self.mlp = LlamaMLP(config)

    def project(
        self, embedded_BTH: torch.Tensor, states_BTH: torch.Tensor, cos_sin: Any
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries, keys and values of tokens and the states that they start from."""
        pair = torch.cat([self.input_layernorm(embedded_BTH), self.hidden_norm(states_BTH)], -1)
        return self.self_attn.project(pair, cos_sin)

    def finish(self, states_BTH: torch.Tensor, attended_BTX: torch.Tensor) -> torch.Tensor:
        """The layer's output from its attention's."""
        output_BTH = states_BTH + self.self_attn.o_proj(attended_BTX)
        return output_BTH + self.mlp(self.post_attention_layernorm(output_BTH))


class Eagle3Network(DraftNetwork):
    """The network; its embeddings are the target's and stay as they are.

    Args:
        config: of the layer; `vocab_size` is the target's.
        draft_vocab_size: D.
        layers: ids of the target's states, as in foredraft.infer.state_tap.
        num_steps: that it is unrolled in training.
        d2t_D: target ids of the draft vocabulary; None: the whole vocabulary.
    """

    def __init__(
        self,
        config: LlamaConfig,
        draft_vocab_size: int,
        layers: tuple[int, ...],
        num_steps: int,
        d2t_D: torch.Tensor | None = None,
        head_dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__(d2t_D, head_dtype)
        size = config.hidden_size
        self.config = config
        self.num_steps = self.max_depth = num_steps
        self.states = StateNeeds(layers=layers, width=len(layers) * size, keeps_all=True)
        self.embed_tokens = nn.Embedding(config.vocab_size, size).requires_grad_(False)
        self.fc = nn.Linear(len(layers) * size, size, bias=False)
        self.layers = nn.ModuleList([Layer(config)])
        self.norm = LlamaRMSNorm(size, config.rms_norm_eps)
        self.lm_head = nn.Linear(size, draft_vocab_size, bias=False)
        self.rotary = LlamaRotaryEmbedding(config)

    def unroll(self, sequences: Sequences, num_steps: int) -> Iterator[torch.Tensor]:
        """Hidden states [B, T, H] of each step."""
        embedded_BTH = self.embed_tokens(sequences.ids_BT)
        cos_sin = self.rotary(embedded_BTH, sequences.positions_BT)
        documents_BT = sequences.documents_BT
        is_same_BTT = documents_BT[:, :, None] == documents_BT[:, None, :]
        states_BTH = self.fc(sequences.states_before_BTS.to(self.fc.weight.dtype))
        keys: list[torch.Tensor] = []
        values: list[torch.Tensor] = []
        for step in range(1, num_steps + 1):
            if step > 1:
                # entries whose anchor lies in another document are not used
                states_BTH = states_BTH.roll(1, 1)
            query, key, value = self.layers[0].project(embedded_BTH, states_BTH, cos_sin)
            keys.append(key)
            values.append(value)
            # true keys up to the anchor; an entry without an anchor sees its own document's first
            sees_BTT = is_same_BTT & is_up_to_anchor(query.shape[2], step, query.device)
            attended_BTX = unrolled_attention(query, keys, values, sees_BTT)
            states_BTH = self.layers[0].finish(states_BTH, attended_BTX)
            yield self.norm(states_BTH)

    @property
    def head_parameter(self) -> nn.Parameter:
        """The head's weight."""
        return self.lm_head.weight

    def head(self, dtype: torch.dtype | None = None) -> Head:
        """The trained head."""
        return Head(gathered(self.lm_head.weight).to(dtype or self.head_dtype))

    def step(
        self, tokens_R: torch.Tensor, positions_R: torch.Tensor, states_RH: torch.Tensor, paged: PagedLayer
    ) -> torch.Tensor:
        """Decode rows over the paged pool; the layer's output [R, H], whose norm goes into the head."""
        embedded_1RH = self.embed_tokens(tokens_R)[None]
        cos_sin = self.rotary(embedded_1RH, positions_R[None])
        query, key, value = self.layers[0].project(embedded_1RH, states_RH[None], cos_sin)
        attended_RX = paged.attend(query[0], key[0], value[0])
        return self.layers[0].finish(states_RH[None], attended_RX[None])[0]

    def save(self, folder: Path, dtype: torch.dtype) -> None:
        """Write config.json and model.safetensors."""
        content = {
            "architectures": ["Eagle3Speculator"],
            "speculators_model_type": "eagle3",
            "draft_vocab_size": self.lm_head.out_features,
            "norm_before_residual": False,
            "norm_before_fc": False,
            "fc_norm": False,
            "norm_output": False,
            "target_hidden_size": None,
            LAYERS_KEY: list(self.states.layers),
            "num_unroll_steps": self.num_steps,
            "tie_word_embeddings": False,
            "dtype": str(dtype).removeprefix("torch."),
            "transformer_layer_config": {**self.config.to_diff_dict(), "vocab_size": self.config.vocab_size},
        }
        (folder / CONFIG_FILE).write_text(json.dumps(content, indent=2) + "\n")
        weights = {name: value.detach().to(dtype).cpu() for name, value in self.state_dict().items()}
        if self.d2t_D is not None:
            d2t_D = self.d2t_D.cpu()
            weights["d2t"] = d2t_D - torch.arange(len(d2t_D))  # offsets, as that format wants them
            weights["t2d"] = torch.zeros(self.config.vocab_size, dtype=torch.bool).index_fill_(0, d2t_D, True)
        save_file({name: value.contiguous() for name, value in weights.items()}, folder / WEIGHTS_FILE)


def is_up_to_anchor(num_tokens: int, step: int, device: torch.device) -> torch.Tensor:
    """Which true keys an entry of a step sees, bool [1, T, T]; the first one where there is no anchor."""
    place = torch.arange(num_tokens, device=device)
    return (place[None, :] <= (place[:, None] - step + 1).clamp(min=0))[None]


def unrolled_attention(
    query: torch.Tensor, keys: list[torch.Tensor], values: list[torch.Tensor], sees_BTT: torch.Tensor
) -> torch.Tensor:
    """Attention of step s = len(keys): true keys where seen, then one key of each later step.

    Entry t sees of step j = 2 .. s the key of position t - s + j.

    Args:
        query: [B, Q, T, E].
        keys: of every step so far, [B, K, T, E].
        values: the same.
        sees_BTT: which keys of step 1 an entry sees; at least one.

    Returns:
        [B, T, Q * E].
    """
    group, num_steps = query.shape[1] // keys[0].shape[1], len(keys)

    def of_heads(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.repeat_interleave(group, 1)

    scale = query.shape[-1] ** -0.5
    scores_BQTT = query @ of_heads(keys[0]).transpose(2, 3) * scale
    scores = [scores_BQTT.float().masked_fill(~sees_BTT[:, None], -torch.inf)]
    later = [(of_heads(keys[j].roll(num_steps - 1 - j, 2)), j) for j in range(1, num_steps)]
    scores += [((query * key).sum(-1, keepdim=True) * scale).float() for key, _ in later]
    weights = torch.cat(scores, -1).softmax(-1).to(query.dtype)
    num_tokens = query.shape[2]
    output = weights[..., :num_tokens] @ of_heads(values[0])
    for place, (_, j) in enumerate(later):
        weight = weights[..., num_tokens + place, None]
        output = output + weight * of_heads(values[j].roll(num_steps - 1 - j, 2))
    return output.transpose(1, 2).flatten(2)


class PagedLayer:
    """Attention of one step's rows over the pool."""

    def __init__(self, steps: PagedSteps, batch: TreeBatch) -> None:
        self.keys, self.values, self.batch = steps.storage.keys(0), steps.storage.values(0), batch

    def attend(self, query_QRE: torch.Tensor, key_KRE: torch.Tensor, value_KRE: torch.Tensor) -> torch.Tensor:
        """Write keys and values, then attend; [R, Q * E]."""
        key_RKE, value_RKE = key_KRE.transpose(0, 1), value_KRE.transpose(0, 1)
        kv_write(self.keys, self.values, self.batch.write_slots_R, key_RKE, value_RKE)
        scoring = Scoring(query_QRE.shape[-1] ** -0.5)
        query_RQE = query_QRE.transpose(0, 1)
        return tree_attention(query_RQE, self.keys, self.values, self.batch, scoring).flatten(1)


class Eagle3Drafter(PagedDrafter):
    """Drafts with the network; what the layer makes of a token lies in the token's pool slot."""

    def __init__(
        self, network: Eagle3Network, steps: PagedSteps, draft_vocab_C: torch.Tensor | None, max_depth: int
    ) -> None:
        super().__init__(steps, draft_vocab_C, max_depth, network.states)
        self.network = network

    @torch.inference_mode()
    def prefill(self, step: Step) -> None:
        """Run a planned chunk, without the head."""
        self._states(step)

    def logits(self, step: Step, num_rows: int) -> torch.Tensor:
        """Run a step; logits after its last rows."""
        last_RH = self._states(step)[step.plan.num_rows - num_rows : step.plan.num_rows]
        return self.network.head().logits(self.network.norm(last_RH)).float()

    def _states(self, step: Step) -> torch.Tensor:
        """The layer's output of all rows, kept in their slots."""
        storage, network, feed = self.steps.storage, self.network, step.feed
        assert feed is not None, "the speculator feeds drafters that read states"
        storage.move(step.moves)
        inputs = self.steps.inputs(step.plan, None, self.steps.device)
        num_given, device = len(feed.given_GS), self.steps.device
        states_RH = torch.zeros(len(inputs.tokens_R), storage.states.shape[1], device=device)
        states_RH = states_RH.to(storage.states.dtype)
        states_RH[:num_given] = network.fc(from_bits(feed.given_GS, device).to(states_RH.dtype))
        slots = torch.from_numpy(feed.source_n[num_given:]).to(device)
        states_RH[num_given : len(feed.source_n)] = storage.states[slots]
        paged = PagedLayer(self.steps, inputs.batch)
        output_RH = network.step(inputs.tokens_R, inputs.positions_R, states_RH, paged)
        storage.states[inputs.batch.write_slots_R] = output_RH
        return output_RH


def load(source: str, card: DrafterCard | None, config: EngineConfig) -> Eagle3Drafter:
    """Load the family from a folder.

    Raises:
        ValueError: files that are missing or do not fit together.
    """
    assert card is not None, "a folder without a card is of family lm"
    folder, device = Path(source), torch.device(config.device)
    content = json.loads((folder / CONFIG_FILE).read_text())
    layer_config = LlamaConfig(**content["transformer_layer_config"])
    weights = load_file(folder / WEIGHTS_FILE)
    found = weights["fc.weight"].dtype
    dtype = found if config.dtype == "auto" else getattr(torch, config.dtype)
    network = Eagle3Network(
        layer_config,
        content["draft_vocab_size"],
        tuple(content[LAYERS_KEY]),
        content["num_unroll_steps"],
        head_dtype=dtype,
    )
    kept = {name: value for name, value in weights.items() if name not in ("d2t", "t2d")}
    try:
        network.load_state_dict(kept)
    except RuntimeError as error:
        raise ValueError(f"{folder / WEIGHTS_FILE} does not fit its {CONFIG_FILE}: {error}") from error
    network.requires_grad_(False).eval().to(device, dtype)
    draft_vocab_C = read_draft_vocab(source, card, layer_config.vocab_size, device)
    attention = network.layers[0].self_attn
    shapes = {0: LayerShape(attention.kv_heads, attention.size, attention.size)}
    steps = PagedSteps(
        shapes,
        layer_config.max_position_embeddings,
        dtype,
        device,
        config,
        state_dim=layer_config.hidden_size,
    )
    return Eagle3Drafter(network, steps, draft_vocab_C, card.max_depth)
