"""Which outcomes of a chain round to prepare with a budget of B, by several policies, and who would have hit.

An outcome is (a, t): the first a of k guesses are right and the target's next token is t. The guess at every
depth is the candidate with the best score, place 0. Outcome (a, t) has mass S_a * P_a(t) with S_a the product
of the guesses' probabilities before depth a; for a < k the guess itself is no outcome there.

The B greatest masses are the best choice, as masses add and costs are equal. `uniform` and `geometric`
(Kumar, Dao, May, arXiv 2603.03251, theorem 12) give each depth a number of places instead.

Shape letters: M rounds, D = k + 1 depths, F candidates.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from foredraft.infer.outcome_records import OutcomeRecords


@dataclass(frozen=True, slots=True)
class Rounds:
    """Chain rounds whose outcomes are known."""

    records: OutcomeRecords  # M * D of them
    labels_MD: np.ndarray

    @classmethod
    def of(cls, records: OutcomeRecords, k: int) -> Rounds:
        """Rounds of k guesses, each with its k + 1 records one after another."""
        assert len(records) % (k + 1) == 0, "rounds are written whole"
        return cls(records, records.labels_N.reshape(-1, k + 1))

    @property
    def num_right_M(self) -> np.ndarray:
        """Guesses that the target followed, int64."""
        return np.cumprod(self.labels_MD[:, :-1] == 0, axis=1).sum(1)

    @property
    def place_M(self) -> np.ndarray:
        """Place of the outcome's token among its node's candidates; F where it is none of them."""
        return self.labels_MD[np.arange(len(self.labels_MD)), self.num_right_M]

    @property
    def is_covered_M(self) -> np.ndarray:
        """Whether the outcome is among the candidates at all: what an oracle hits."""
        return self.place_M < self.records.fan_out

    @property
    def temperature_M(self) -> np.ndarray:
        """Temperature of every round."""
        return self.records.temperature_N.reshape(self.labels_MD.shape)[:, 0]

    @property
    def request_M(self) -> np.ndarray:
        """Prompt of every round."""
        return self.records.request_id_N.reshape(self.labels_MD.shape)[:, 0]


def survival(probs_MDF: np.ndarray) -> np.ndarray:
    """S_0 .. S_k: probability that the first a guesses are right, [M, D]."""
    guesses_MK = probs_MDF[:, :-1, 0]
    return np.concatenate([np.ones((len(guesses_MK), 1)), np.cumprod(guesses_MK, axis=1)], axis=1)


def outcome_masses(probs_MDF: np.ndarray) -> np.ndarray:
    """Probability of every outcome, [M, D, F]; 0 for the guess of a depth that has one."""
    masses_MDF = survival(probs_MDF)[:, :, None] * probs_MDF
    masses_MDF[:, :-1, 0] = 0.0
    return masses_MDF


def is_hit_by_mass(rounds: Rounds, probs_MDF: np.ndarray, budget: int) -> np.ndarray:
    """Whether the outcome is one of the `budget` most probable, bool [M]; ties go to the earlier depth."""
    masses_MO = outcome_masses(probs_MDF).reshape(len(rounds.labels_MD), -1)
    fan_out, rows = rounds.records.fan_out, np.arange(len(masses_MO))
    own_M = rounds.num_right_M * fan_out + np.minimum(rounds.place_M, fan_out - 1)
    mass_M1 = masses_MO[rows, own_M][:, None]
    is_earlier_MO = np.arange(masses_MO.shape[1]) < own_M[:, None]
    rank_M = (masses_MO > mass_M1).sum(1) + ((masses_MO == mass_M1) & is_earlier_MO).sum(1)
    return rounds.is_covered_M & (rank_M < budget)


def is_hit_by_counts(rounds: Rounds, counts: Sequence[int]) -> np.ndarray:
    """Whether the outcome is among the best counts[a] outcomes of its depth, bool [M]."""
    k = rounds.labels_MD.shape[1] - 1
    # before the end of the chain place 0 is the guess
    order_M = rounds.place_M - (rounds.num_right_M < k)
    return rounds.is_covered_M & (order_M < np.asarray(counts)[rounds.num_right_M])


def uniform_counts(budget: int, k: int) -> list[int]:
    """The same number of outcomes at every depth; what is left goes to the first ones."""
    return [budget // (k + 1) + (depth < budget % (k + 1)) for depth in range(k + 1)]


def geometric_counts(budget: int, k: int, acceptance: float, power: float) -> list[int]:
    """F_a = F_0 * acceptance^(a / (1 + r)), the last depth times (1 - acceptance)^(-1 / (1 + r)).

    Rounded so that they add up to the budget, the largest remainders upwards.

    Args:
        budget: B.
        k: guesses of a round.
        acceptance: probability that a guess is right.
        power: r of the law miss(F) = F^-r.
    """
    weights = np.array([acceptance ** (depth / (1 + power)) for depth in range(k + 1)])
    weights[-1] *= (1 - acceptance) ** (-1 / (1 + power))
    shares = budget * weights / weights.sum()
    counts = np.floor(shares).astype(int)
    for depth in np.argsort(counts - shares, kind="stable")[: budget - counts.sum()]:
        counts[depth] += 1
    return counts.tolist()


def fit_geometric(records: OutcomeRecords) -> tuple[float, float]:
    """Acceptance and r of the geometric rule, from labelled records.

    r is the least-squares slope through the origin of -log miss(F) over log F, where miss(F) is the share of
    rejected guesses whose token is not among the next F candidates.
    """
    labels_N = records.labels_N[records.is_labelled_N]
    acceptance = float(np.clip((labels_N == 0).mean(), 1e-3, 1 - 1e-3))
    rejected_N = labels_N[labels_N > 0]
    sizes = np.arange(2, records.fan_out)
    miss = np.array([max(float((rejected_N > size).mean()), 1e-6) for size in sizes])
    log_size = np.log(sizes)
    return acceptance, float(max((-np.log(miss) * log_size).sum() / (log_size**2).sum(), 1e-3))
