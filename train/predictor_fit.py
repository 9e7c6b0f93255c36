"""Fit an outcome predictor to records by cross-entropy, then calibrate it on records of other prompts.

Shape letters: N records, K node features, F candidates.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from foredraft.infer.outcome_records import OutcomeRecords
from foredraft.infer.predictor import OutcomePredictor, rescale
from foredraft.train.recipe import PredictorRecipe
from foredraft.train.splits import fraction_of

MIN_RECORDS = 200  # of a part, to be fitted or measured
VALIDATION_FRACTION = 0.15  # of the fitted prompts: they only tell when to stop


class TooFewPrompts(ValueError):
    """All prompts fall on one side of a split."""


@dataclass(frozen=True, slots=True)
class Examples:
    """Labelled records as tensors."""

    features_NK: torch.Tensor
    scores_NF: torch.Tensor
    log_probs_NF: torch.Tensor
    echo_NF: torch.Tensor
    labels_N: torch.Tensor  # int64, F = other

    @classmethod
    def of(cls, records: OutcomeRecords) -> Examples:
        """The labelled ones of some records."""
        records = records.select(records.is_labelled_N)
        return cls(
            torch.from_numpy(records.features_NK),
            torch.from_numpy(records.scores_NF),
            torch.from_numpy(records.log_probs_NF),
            torch.from_numpy(records.echo_NF),
            torch.from_numpy(records.labels_N).long(),
        )

    def __len__(self) -> int:
        return len(self.labels_N)

    @property
    def inputs(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Arguments of the predictor."""
        return self.features_NK, self.scores_NF, self.log_probs_NF, self.echo_NF

    def take(self, chosen: torch.Tensor) -> Examples:
        """Examples by index."""
        return Examples(*(getattr(self, name)[chosen] for name in Examples.__slots__))


def check_records(records: OutcomeRecords, part: str) -> None:
    """See that something can be learned from labelled records.

    Raises:
        ValueError: too few, features or scores that are no numbers, or one label everywhere.
    """
    if len(records) < MIN_RECORDS:
        raise ValueError(
            f"part {part!r} has {len(records)} outcome records, at least {MIN_RECORDS} are needed: log more "
            "prompts, or reserve or hold out more of them"
        )
    is_bad_N = ~np.isfinite(records.features_NK).all(1) | np.isnan(records.scores_NF).any(1)
    if is_bad_N.any():
        first = records.select(np.flatnonzero(is_bad_N)[:1])
        raise ValueError(
            f"{is_bad_N.sum()} of {len(records)} outcome records of part {part!r} have features or scores "
            f"that are no numbers, the first at position {first.position_N[0]} of request "
            f"{first.request_id_N[0][:12]}: the drafter's logits are not finite; run `foredraft outcomes` "
            "again with --dtype float32"
        )
    if (records.labels_N == records.labels_N[0]).all():
        label = records.labels_N[0]
        meaning = "no candidate is ever right" if label == records.fan_out else f"always candidate {label}"
        raise ValueError(
            f"all {len(records)} outcome records of part {part!r} have one label ({meaning}): there is "
            "nothing to learn; check that drafter and log belong together"
        )


def split_prompts(
    records: OutcomeRecords, fraction: float, purpose: str
) -> tuple[OutcomeRecords, OutcomeRecords]:
    """Records of most prompts, and of a share of them chosen by hash.

    Raises:
        TooFewPrompts: all prompts fall on one side.
    """
    names, place_N = np.unique(records.request_id_N, return_inverse=True)
    is_chosen_N = np.array([fraction_of(name, purpose) < fraction for name in names])[place_N]
    if is_chosen_N.all() or not is_chosen_N.any():
        raise TooFewPrompts(
            f"{len(names)} prompts are too few to keep a share of {fraction} for {purpose}; reserve more "
            "prompts (reserved_fraction of the drafter's recipe), or log more"
        )
    return records.select(~is_chosen_N), records.select(is_chosen_N)


def fit(
    records: OutcomeRecords, recipe: PredictorRecipe, tell: Callable[[int, float], None] | None = None
) -> OutcomePredictor:
    """A predictor for labelled records, not calibrated yet; deterministic by the recipe's seed.

    Args:
        records: to learn from; a share of their prompts only tells when to stop.
        recipe: network and optimizer.
        tell: called with every epoch's number and validation loss in nats.

    Returns:
        The predictor of the epoch with the least validation loss.
    """
    fitted, validation = map(Examples.of, split_prompts(records, VALIDATION_FRACTION, "validation"))
    temperatures = sorted({float(t) for t in np.unique(records.temperature_N)})
    torch.manual_seed(recipe.seed)
    predictor = OutcomePredictor(recipe.hidden_size, len(temperatures))
    predictor.temperature_B.copy_(torch.tensor(temperatures))
    predictor.mean_K.copy_(fitted.features_NK.mean(0))
    predictor.spread_K.copy_(fitted.features_NK.std(0).clamp(min=1e-2))
    optimizer = torch.optim.AdamW(
        predictor.parameters(), lr=recipe.learning_rate, weight_decay=recipe.weight_decay
    )
    num_steps = recipe.epochs * -(-len(fitted) // recipe.batch_size)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, num_steps)
    best_loss, best = loss_of(predictor, validation), copy.deepcopy(predictor.state_dict())
    for epoch in range(recipe.epochs):
        for batch in _batches(fitted, recipe.batch_size):
            loss = nn.functional.nll_loss(predictor.raw(*batch.inputs), batch.labels_N)
            if not torch.isfinite(loss):
                raise ValueError(f"the predictor's loss became {loss.item()}; lower learning_rate")
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
        validation_loss = loss_of(predictor, validation)
        if validation_loss < best_loss:
            best_loss, best = validation_loss, copy.deepcopy(predictor.state_dict())
        if tell is not None:
            tell(epoch + 1, validation_loss)
    predictor.load_state_dict(best)
    return predictor.eval()


def _batches(examples: Examples, size: int) -> Iterator[Examples]:
    for chosen in torch.randperm(len(examples)).split(size):
        yield examples.take(chosen)


@torch.no_grad()
def loss_of(predictor: OutcomePredictor, examples: Examples) -> float:
    """Mean cross-entropy in nats, calibration included."""
    return float(nn.functional.nll_loss(predictor(*examples.inputs), examples.labels_N))


def calibrate(predictor: OutcomePredictor, records: OutcomeRecords) -> None:
    """Set scale and shift of every temperature to those of the least cross-entropy on records.

    A temperature without records keeps scale 1 and shift 0.
    """
    for index, temperature in enumerate(predictor.temperature_B.tolist()):
        chosen = records.select(np.isclose(records.temperature_N, temperature))
        if len(chosen):
            scale, shift = _least_cross_entropy(predictor, Examples.of(chosen))
            predictor.scale_B[index], predictor.shift_B[index] = scale, shift


def _least_cross_entropy(predictor: OutcomePredictor, examples: Examples) -> tuple[float, float]:
    with torch.no_grad():
        log_probs_NF1 = predictor.raw(*examples.inputs)
    pair = torch.tensor([1.0, 0.0], requires_grad=True)
    optimizer = torch.optim.LBFGS([pair], line_search_fn="strong_wolfe")

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = nn.functional.nll_loss(rescale(log_probs_NF1, pair[0], pair[1]), examples.labels_N)
        loss.backward()
        return loss

    optimizer.step(closure)
    return float(pair[0].detach()), float(pair[1].detach())
