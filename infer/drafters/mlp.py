"""Family `mlp`: the MLP speculator, whose stages turn a state and a token into the next state.

Wertheimer et al., arXiv:2404.19124. With h the target's state that enters its head, x a token, e(x) its
embedding, all stages after the first tied:

    s_1 = f(A h, x),   s_d = f(B s_{d-1}, x),   f(z, x) = gelu(norm(a z + b E e(x))),   logits = head(O s)

a^2 keeps the variance of the state over all stages, b that of token and state together. No attention and no
context: one row costs two small products and the head over the draft vocabulary, the target's own rows.

Shape letters: R rows, B sequences, T tokens, H target's hidden size, I inner size, D draft vocabulary.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from foredraft.infer.drafter_card import DrafterCard, StateNeeds
from foredraft.infer.drafters import Step
from foredraft.infer.drafters.network import DraftNetwork, Sequences, gathered
from foredraft.infer.drafters.paged import PagedDrafter, read_draft_vocab
from foredraft.infer.paged_steps import PagedSteps
from foredraft.infer.params import EngineConfig
from foredraft.infer.target_states import from_bits
from foredraft.kernels.distill_loss_ref import Head

CONFIG_FILE, WEIGHTS_FILE = "config.json", "model.safetensors"
MODEL_TYPE = "foredraft_mlp"


@dataclass(frozen=True, kw_only=True, slots=True)
class MLPConfig:
    """Content of config.json."""

    hidden_size: int  # H
    inner_size: int  # I
    vocab_size: int  # of the target
    draft_vocab_size: int  # D
    num_steps: int  # stages that it was trained for
    layer: int  # id of the target's state: the one that enters the head
    max_positions: int  # of the target
    model_type: str = MODEL_TYPE


class MLPNetwork(DraftNetwork):
    """The speculator. Embeddings and head are the target's and stay as they are.

    Args:
        config: sizes.
        d2t_D: target ids of the draft vocabulary; None: the whole vocabulary.
        head_dtype: of the product of hidden states and head.
    """

    def __init__(
        self, config: MLPConfig, d2t_D: torch.Tensor | None, head_dtype: torch.dtype = torch.float32
    ) -> None:
        super().__init__(d2t_D, head_dtype)
        hidden, inner = config.hidden_size, config.inner_size
        self.config = config
        self.num_steps = self.max_depth = config.num_steps
        self.states = StateNeeds(layers=(config.layer,), width=hidden)
        self.embed = nn.Embedding(config.vocab_size, hidden).requires_grad_(False)
        self.lm_head = nn.Linear(hidden, config.draft_vocab_size, bias=False).requires_grad_(False)
        self.from_target = nn.Linear(hidden, inner, bias=False)
        self.from_state = nn.Linear(inner, inner, bias=False)
        self.from_token = nn.Linear(hidden, inner, bias=False)
        self.norm = nn.LayerNorm(inner)
        self.to_head = nn.Linear(inner, hidden, bias=False)
        self.scale_state = 0.5 ** (0.5 / config.num_steps)
        self.scale_token = math.sqrt(1.0 - self.scale_state**2)

    def next_states(self, projected_RI: torch.Tensor, tokens_R: torch.Tensor) -> torch.Tensor:
        """States after tokens, any leading shape; `projected_RI` is A h or B s."""
        token_RI = self.from_token(self.embed(tokens_R))
        mixed_RI = self.scale_state * projected_RI + self.scale_token * token_RI
        return nn.functional.gelu(self.norm(mixed_RI))

    def unroll(self, sequences: Sequences, num_steps: int) -> Iterator[torch.Tensor]:
        """Hidden states [B, T, H] of each step."""
        dtype = self.from_target.weight.dtype
        states_BTI = self.from_target(sequences.states_before_BTS.to(dtype))
        for step in range(num_steps):
            if step:
                # entries whose anchor lies in another document are not used
                states_BTI = self.from_state(states_BTI.roll(1, 1))
            states_BTI = self.next_states(states_BTI, sequences.ids_BT)
            yield self.to_head(states_BTI)

    @property
    def head_parameter(self) -> nn.Parameter:
        """The head's weight."""
        return self.lm_head.weight

    def head(self, dtype: torch.dtype | None = None) -> Head:
        """The target's rows of the draft vocabulary."""
        return Head(gathered(self.lm_head.weight).to(dtype or self.head_dtype))

    def save(self, folder: Path, dtype: torch.dtype) -> None:
        """Write config.json and model.safetensors."""
        (folder / CONFIG_FILE).write_text(json.dumps(asdict(self.config), indent=2) + "\n")
        weights = {name: value.detach().to(dtype).cpu() for name, value in self.state_dict().items()}
        save_file({name: value.contiguous() for name, value in weights.items()}, folder / WEIGHTS_FILE)


class MLPDrafter(PagedDrafter):
    """Drafts with the speculator: a row's state lies in the pool slot of its token."""

    def __init__(
        self, network: MLPNetwork, steps: PagedSteps, draft_vocab_C: torch.Tensor | None, max_depth: int
    ) -> None:
        super().__init__(steps, draft_vocab_C, max_depth, network.states)
        self.network = network

    def prefill(self, step: Step) -> None:
        """Settled tokens before the root are nothing to it; only what lies in the pool moves."""
        self.steps.storage.move(step.moves)

    def logits(self, step: Step, num_rows: int) -> torch.Tensor:
        """Run a step; logits after its last rows."""
        storage, network, feed = self.steps.storage, self.network, step.feed
        assert feed is not None, "the speculator feeds drafters that read states"
        storage.move(step.moves)
        num_given = len(feed.given_GS)
        device, dtype = self.steps.device, storage.states.dtype
        given_GI = network.from_target(from_bits(feed.given_GS, device).to(dtype))
        slots = torch.from_numpy(feed.source_n[num_given:]).to(device)
        own_nI = network.from_state(storage.states[slots])
        plan = step.plan
        tokens_n = torch.from_numpy(plan.tokens[: plan.num_rows]).to(device)
        states_nI = network.next_states(torch.cat([given_GI, own_nI]), tokens_n)
        storage.states[torch.from_numpy(plan.write_slots[: plan.num_rows]).to(device)] = states_nI
        hidden_RH = network.to_head(states_nI[plan.num_rows - num_rows :])
        return network.head(dtype).logits(hidden_RH).float()


def load(source: str, card: DrafterCard | None, config: EngineConfig) -> MLPDrafter:
    """Load the family from a folder.

    Raises:
        ValueError: files that are missing or do not fit together.
    """
    assert card is not None, "a folder without a card is of family lm"
    folder, device = Path(source), torch.device(config.device)
    sizes = MLPConfig(**json.loads((folder / CONFIG_FILE).read_text()))
    weights = load_file(folder / WEIGHTS_FILE)
    with torch.device("meta"):
        network = MLPNetwork(sizes, None)
    found = weights["from_state.weight"].dtype
    dtype = found if config.dtype == "auto" else getattr(torch, config.dtype)
    weights = {name: value.to(device, dtype) for name, value in weights.items()}
    try:
        network.load_state_dict(weights, assign=True)
    except RuntimeError as error:
        raise ValueError(f"{folder / WEIGHTS_FILE} does not fit its {CONFIG_FILE}: {error}") from error
    network.requires_grad_(False).eval()
    network.head_dtype = dtype
    draft_vocab_C = read_draft_vocab(source, card, sizes.vocab_size, device)
    steps = PagedSteps({}, sizes.max_positions, dtype, device, config, state_dim=sizes.inner_size)
    return MLPDrafter(network, steps, draft_vocab_C, card.max_depth)
