"""The outcome predictor: a calibrated distribution over {a node's candidates, other} for the target's token.

    logit of candidate i   (1 + a) * s_i + b_i          s_i: log-confidence of the candidate
    logit of other         (1 + a) * s_other + b_other
    calibrated             log-softmax, then a scale and a shift of other by temperature, log-softmax again

with a, b_i, b_other from one small network on features of the node and of the candidate. Its last layer
begins at zero, so the untrained predictor is the policy `confidence`.

Shape letters: N nodes, K node features, F candidates, C features of a candidate, H hidden, B temperatures.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from foredraft.infer.echo import FOLLOWED_ONE, FOLLOWED_TWO, OCCURRED
from foredraft.infer.features import CANDIDATE_FEATURES, FEATURES, MIN_LOG, NO_GAP, NODE_FEATURES
from foredraft.infer.hub import local_folder
from foredraft.infer.identity import TargetIdentity

CONFIG_FILE, WEIGHTS_FILE = "config.json", "model.safetensors"
SCHEMA = 1
TEMPERATURE, LOG_OTHER = NODE_FEATURES.index("temperature"), NODE_FEATURES.index("log_other")


@dataclass(frozen=True, kw_only=True, slots=True)
class PredictorCard:
    """Content of a predictor's config.json."""

    features: list[str]
    fan_out: int  # F
    hidden_size: int
    drafter_sha256: str  # of the weights
    target: TargetIdentity
    temperatures: list[float]
    calibration: dict[str, Any] = field(default_factory=dict)  # measured figures
    training: dict[str, Any] = field(default_factory=dict)


class OutcomePredictor(nn.Module):
    """The network and its calibration."""

    mean_K: torch.Tensor
    spread_K: torch.Tensor
    temperature_B: torch.Tensor
    scale_B: torch.Tensor
    shift_B: torch.Tensor

    def __init__(self, hidden_size: int = 32, num_temperatures: int = 1) -> None:
        super().__init__()
        num_features = len(NODE_FEATURES)
        self.node_layer = nn.Linear(num_features, hidden_size)
        self.candidate_layer = nn.Linear(len(CANDIDATE_FEATURES), hidden_size, bias=False)
        self.hidden_layer = nn.Linear(hidden_size, hidden_size)
        self.bias_head = nn.Linear(hidden_size, 1)
        self.scale_head = nn.Linear(hidden_size, 1)
        for head in (self.bias_head, self.scale_head):
            nn.init.zeros_(head.weight)
            nn.init.zeros_(head.bias)
        self.register_buffer("mean_K", torch.zeros(num_features))
        self.register_buffer("spread_K", torch.ones(num_features))
        self.register_buffer("temperature_B", torch.zeros(num_temperatures))
        self.register_buffer("scale_B", torch.ones(num_temperatures))
        self.register_buffer("shift_B", torch.zeros(num_temperatures))

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        """Calibrated log-probabilities of the candidates and of `other`; arguments and shape as for `raw`."""
        return self.calibrate(self.raw(*inputs), inputs[0][:, TEMPERATURE])

    def raw(
        self,
        features_NK: torch.Tensor,
        scores_NF: torch.Tensor,
        log_probs_NF: torch.Tensor,
        echo_NF: torch.Tensor,
    ) -> torch.Tensor:
        """Log-probabilities before calibration.

        Args:
            features_NK: float32, in the order of NODE_FEATURES.
            scores_NF: float32 log-confidences, best first; -inf where there is no candidate.
            log_probs_NF: float32, the drafter's own; -inf where there is no candidate.
            echo_NF: uint8, bits of `foredraft.infer.echo`.

        Returns:
            float32 [N, F + 1], the last column is `other`; -inf where there is no candidate.
        """
        own_NF1 = torch.cat([scores_NF, features_NK[:, LOG_OTHER, None]], 1)
        node_NH = nn.functional.silu(self.node_layer((features_NK - self.mean_K) / self.spread_K))
        candidate_NF1H = self.candidate_layer(candidate_features(own_NF1, log_probs_NF, echo_NF))
        both_NF1H = nn.functional.silu(node_NH[:, None] + candidate_NF1H)
        bias_NF1 = self.bias_head(nn.functional.silu(self.hidden_layer(both_NF1H)))[..., 0]
        scale_N1 = 1.0 + self.scale_head(node_NH)
        is_there_NF1 = torch.isfinite(own_NF1)
        logits_NF1 = scale_N1 * own_NF1.clamp(min=MIN_LOG) + bias_NF1
        return logits_NF1.masked_fill(~is_there_NF1, -torch.inf).log_softmax(1)

    def calibrate(self, log_probs_NF1: torch.Tensor, temperature_N: torch.Tensor) -> torch.Tensor:
        """The scale and shift of the nearest calibrated temperature, [N, F + 1]."""
        nearest_N = (temperature_N[:, None] - self.temperature_B).abs().argmin(1)
        return rescale(log_probs_NF1, self.scale_B[nearest_N, None], self.shift_B[nearest_N, None])

    @torch.inference_mode()
    def probs(
        self, features_RK: np.ndarray, scores_RF: np.ndarray, log_probs_RF: np.ndarray, echo_RF: np.ndarray
    ) -> np.ndarray:
        """Probabilities of the candidates, float32 [R, F]; what they leave of 1 is `other`."""
        parts = [torch.from_numpy(part) for part in (features_RK, scores_RF, log_probs_RF, echo_RF)]
        return self(*parts)[:, :-1].exp().numpy()


def rescale(log_probs_NF1: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
    """Log-probabilities times a scale, `other` (the last column) plus a shift, log-softmax again.

    Args:
        log_probs_NF1: float32 [N, F + 1]; -inf stays.
        scale: of all, or [N, 1].
        shift: of all, or [N, 1].
    """
    is_other_F1 = torch.zeros(log_probs_NF1.shape[1])
    is_other_F1[-1] = 1.0
    # the gradient of the scale is no number at -inf
    logits_NF1 = log_probs_NF1.clamp(min=3 * MIN_LOG) * scale + is_other_F1 * shift
    return logits_NF1.masked_fill(torch.isinf(log_probs_NF1), -torch.inf).log_softmax(1)


def candidate_features(
    own_NF1: torch.Tensor, log_probs_NF: torch.Tensor, echo_NF: torch.Tensor
) -> torch.Tensor:
    """Features float32 [N, F + 1, C] of the candidates and of `other`, of the order of one."""
    own_NF1 = own_NF1.clamp(min=MIN_LOG)
    log_probs_NF1 = torch.cat([log_probs_NF.clamp(min=MIN_LOG), own_NF1[:, -1:]], 1)
    num_candidates = log_probs_NF.shape[1]
    log_rank_F1 = torch.arange(num_candidates + 1, dtype=own_NF1.dtype).log1p()
    is_other_F1 = torch.zeros(num_candidates + 1)
    is_other_F1[-1] = 1.0
    gap_NF1 = (own_NF1[:, :1] - own_NF1).clamp(max=NO_GAP)
    bits_3 = torch.tensor([OCCURRED, FOLLOWED_ONE, FOLLOWED_TWO], dtype=torch.uint8)
    echo_NF3 = ((echo_NF[..., None] & bits_3) != 0).float()
    echo_NF13 = nn.functional.pad(echo_NF3, (0, 0, 0, 1))
    own_features_NF15 = torch.stack(
        [
            own_NF1 / 5,
            log_probs_NF1 / 5,
            log_rank_F1.expand_as(own_NF1),
            gap_NF1 / 5,
            is_other_F1.expand_as(own_NF1),
        ],
        dim=-1,
    )
    return torch.cat([own_features_NF15, echo_NF13], -1)


def save_predictor(folder: str | Path, predictor: OutcomePredictor, card: PredictorCard) -> None:
    """Write config.json and model.safetensors into an existing folder."""
    content = {"schema": SCHEMA, **asdict(card)}
    (Path(folder) / CONFIG_FILE).write_text(json.dumps(content, indent=2) + "\n")
    save_file(
        {name: value.contiguous() for name, value in predictor.state_dict().items()},
        Path(folder) / WEIGHTS_FILE,
    )


def read_predictor_card(folder: str | Path) -> PredictorCard:
    """The config.json of a predictor (folder or Hub id).

    Raises:
        ValueError: there is none, or it is not one that this version understands.
    """
    path = local_folder(folder, "predictor") / CONFIG_FILE
    if not path.is_file():
        raise ValueError(
            f"{folder} is not an outcome predictor: no {CONFIG_FILE}. "
            "Make one with `foredraft train-predictor`"
        )
    try:
        content = json.loads(path.read_text())
        schema = content.pop("schema")
        if schema != SCHEMA:
            raise ValueError(f"schema {SCHEMA} expected, found {schema!r}")
        card = PredictorCard(**{**content, "target": TargetIdentity(**content["target"])})
    except (json.JSONDecodeError, KeyError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(
            f"{path} is not a predictor description ({error}); train the predictor again or use a matching "
            "version of foredraft"
        ) from error
    if card.features != list(FEATURES):
        raise ValueError(
            f"predictor {folder} reads the features {', '.join(card.features)}; this version computes "
            f"{', '.join(FEATURES)}. Train the predictor again"
        )
    return card


def check_predictor(card: PredictorCard, folder: str | Path, drafter_sha256: str) -> None:
    """Raise ValueError for a predictor of another drafter."""
    if card.drafter_sha256 != drafter_sha256:
        raise ValueError(
            f"predictor {folder} was trained for the drafter with weights {card.drafter_sha256[:12]}, the "
            f"drafter has {drafter_sha256[:12]}: its probabilities would mean nothing. Run `foredraft "
            "outcomes` and `foredraft train-predictor` for this drafter"
        )


def load_predictor(folder: str | Path, drafter_sha256: str) -> tuple[OutcomePredictor, PredictorCard]:
    """Load a predictor for a drafter.

    Args:
        folder: of the predictor, or a Hub id.
        drafter_sha256: weight hash of the drafter that it is to serve.

    Raises:
        ValueError: no predictor there, or one of another drafter or version.
    """
    card = read_predictor_card(folder)
    check_predictor(card, folder, drafter_sha256)
    path = local_folder(folder, "predictor") / WEIGHTS_FILE
    if not path.is_file():
        raise ValueError(f"predictor {folder} has no {WEIGHTS_FILE}; train the predictor again")
    predictor = OutcomePredictor(card.hidden_size, len(card.temperatures))
    try:
        predictor.load_state_dict(load_file(path))
    except Exception as error:
        raise ValueError(
            f"{path} does not fit its {CONFIG_FILE} ({error}); train the predictor again"
        ) from error
    return predictor.eval(), card
