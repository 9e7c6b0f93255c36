"""What a bench makes of its runs: figures pooled over prompts, ratios to plain, identity with plain.

Shape letters: R repeats, P prompts, N bootstrap resamples.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from foredraft.infer.params import EngineConfig, ExpandPolicy, Mode, SamplingParams
from foredraft.infer.prompts import Prompt
from foredraft.infer.stats import RequestStats, pool

NUM_RESAMPLES = 2000
LEVEL = 0.95


@dataclasses.dataclass(frozen=True, slots=True)
class Case:
    """One prompt at one temperature: what every mode is asked to decode."""

    prompt: Prompt
    token_ids: list[int]
    params: SamplingParams

    @property
    def key(self) -> tuple[float, int]:
        """Temperature and place of the prompt in its file."""
        return self.params.temperature, self.prompt.index


@dataclasses.dataclass(frozen=True, slots=True)
class Arm:
    """What is measured against the others: a mode, and where it was named, the policy."""

    mode: Mode
    policy: ExpandPolicy | None = None  # None: the engine's

    def __str__(self) -> str:
        return self.mode if self.policy is None else f"{self.mode}:{self.policy}"


PLAIN = Arm("plain")


@dataclasses.dataclass(frozen=True, slots=True)
class Run:
    """One decode."""

    arm: Arm
    repeat: int
    case: Case
    token_ids: list[int]
    stats: RequestStats


@dataclasses.dataclass(frozen=True, slots=True)
class Timing:
    """Decoded tokens and seconds of one arm at one temperature, [repeats, prompts]."""

    tokens_RP: np.ndarray
    seconds_RP: np.ndarray

    @classmethod
    def of(cls, runs: Sequence[Run], repeats: int) -> Timing:
        """Runs of one arm at one temperature, in the order of the prompts within each repeat."""
        tokens = [[run.stats.tokens for run in runs if run.repeat == repeat] for repeat in range(repeats)]
        seconds = [
            [run.stats.seconds_decode for run in runs if run.repeat == repeat] for repeat in range(repeats)
        ]
        return cls(np.array(tokens, float), np.array(seconds, float))

    def speed(self, chosen: np.ndarray | None = None) -> np.ndarray:
        """Tokens per second over the chosen prompts ([..., n] indices), pooled; the median over repeats."""
        tokens, seconds = self.tokens_RP, self.seconds_RP
        if chosen is not None:
            tokens, seconds = tokens[:, chosen], seconds[:, chosen]
        return np.median(tokens.sum(-1) / np.maximum(seconds.sum(-1), 1e-9), axis=0)


def summarise(runs: Sequence[Run], arms: Sequence[Arm], config: EngineConfig) -> dict[str, Any]:
    """The results of a bench: figures, ratios to plain, identity with plain."""
    repeats = 1 + max(run.repeat for run in runs)
    temperatures = list(dict.fromkeys(run.case.params.temperature for run in runs))
    groups = {
        (arm, temperature): [
            run for run in runs if run.arm == arm and run.case.params.temperature == temperature
        ]
        for temperature in temperatures
        for arm in arms
    }
    timings = {key: Timing.of(group, repeats) for key, group in groups.items()}
    others = [arm for arm in arms if arm != PLAIN] if PLAIN in arms else []
    return {
        "results": [summarise_group(key, group, timings[key], config) for key, group in groups.items()],
        "ratios": {
            str(arm): [
                {"temperature": t, **ratio_with_interval(timings[arm, t], timings[PLAIN, t])}
                for t in temperatures
            ]
            for arm in others
        },
        "identical_outputs": {str(arm): compare_outputs(runs, arm) for arm in others},
    }


def summarise_all_cores(runs: Sequence[Run], all_cores: Sequence[Run], threads: int) -> list[dict[str, Any]]:
    """Speed of plain decoding on all cores, and over plain's with the common number of threads."""
    result = []
    for temperature in dict.fromkeys(run.case.params.temperature for run in all_cores):
        reference, plain = (
            Timing.of(
                [r for r in group if r.arm == PLAIN and r.case.params.temperature == temperature],
                1 + max(r.repeat for r in group),
            )
            for group in (all_cores, runs)
        )
        figures = {"threads": threads, "tokens_per_second": float(reference.speed())}
        result.append({"temperature": temperature, **figures, **ratio_with_interval(reference, plain)})
    return result


def summarise_group(
    key: tuple[Arm, float], runs: Sequence[Run], timing: Timing, config: EngineConfig
) -> dict[str, Any]:
    """One arm at one temperature: all figures of the median repeat, but the speed is the median."""
    arm, temperature = key
    speculation = config.speculation
    if arm.policy is not None:
        speculation = dataclasses.replace(speculation, policy=arm.policy)
    speeds = timing.tokens_RP.sum(1) / np.maximum(timing.seconds_RP.sum(1), 1e-9)
    typical = int(np.argsort(speeds)[(len(speeds) - 1) // 2])
    stats = pool(run.stats for run in runs if run.repeat == typical).as_dict()
    stats["tokens_per_second"] = float(timing.speed())
    return {
        "arm": str(arm),
        "mode": arm.mode,
        "policy": None if arm == PLAIN else speculation.policy,
        "temperature": temperature,
        "stats": stats,
        "tokens_per_second_repeats": speeds.tolist(),
        "speculation": None if arm == PLAIN else dataclasses.asdict(speculation),
    }


def ratio_with_interval(timing: Timing, plain: Timing) -> dict[str, Any]:
    """Speed over plain's, with the percentile interval of a paired bootstrap over prompts."""
    num_prompts = plain.tokens_RP.shape[1]
    chosen_NP = np.random.default_rng(0).integers(num_prompts, size=(NUM_RESAMPLES, num_prompts))
    ratios_N = timing.speed(chosen_NP) / np.maximum(plain.speed(chosen_NP), 1e-9)
    tail = (1 - LEVEL) / 2
    return {
        "ratio": float(timing.speed() / max(float(plain.speed()), 1e-9)),
        "interval": np.quantile(ratios_N, [tail, 1 - tail]).tolist(),
        "level": LEVEL,
    }


def compare_outputs(runs: Sequence[Run], arm: Arm) -> dict[str, Any]:
    """How many cases gave plain's token ids in every repeat, and where the others first differ."""
    expected = {run.case.key: run.token_ids for run in runs if run.arm == PLAIN and run.repeat == 0}
    divergences: dict[tuple[float, int], dict[str, Any]] = {}
    for run in runs:
        if run.arm == arm and run.token_ids != expected[run.case.key]:
            divergences.setdefault(run.case.key, first_divergence(run, expected[run.case.key]))
    return {
        "same": len(expected) - len(divergences),
        "of": len(expected),
        "first_divergences": list(divergences.values()),
    }


def first_divergence(run: Run, expected: Sequence[int]) -> dict[str, Any]:
    """Where a run leaves plain's output; a token is None where one of the two has ended."""
    pairs = zip(run.token_ids, expected, strict=False)
    shorter = min(len(run.token_ids), len(expected))
    index = next((i for i, (found, wanted) in enumerate(pairs) if found != wanted), shorter)
    return {
        "id": run.case.prompt.id,
        "temperature": run.case.params.temperature,
        "seed": run.case.params.seed,
        "repeat": run.repeat,
        "index": index,
        "plain": expected[index] if index < len(expected) else None,
        "found": run.token_ids[index] if index < len(run.token_ids) else None,
    }
