"""The gate behind training: a drafter that is good on paper must be as good in the engine.

Under coupled verification a decode is a function of prompt, seed and target. So are its rounds: a guess
either is the target's token or it is not. The engine decodes held-out prompts of the log with the logged
seeds and the new drafter, synchronously and in chains; the trainer's unrolled network foretells the rounds
along the same text. Both counts must agree but for numerics.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from foredraft.infer.drafters.network import DraftNetwork
from foredraft.infer.engine import Engine
from foredraft.infer.params import EngineConfig, SpeculationParams
from foredraft.train.acceptance import chain_rounds, follow_row, sampling_of
from foredraft.train.drafter_recipe import DrafterRecipe
from foredraft.train.log_rows import LogRow
from foredraft.train.progress import ProgressReport
from foredraft.train.target_runner import States

TOLERANCE = 0.02  # of the rounds


def check_in_engine(
    recipe: DrafterRecipe,
    folder: Path,
    network: DraftNetwork,
    rows: Sequence[LogRow],
    states: States | None,
) -> dict[str, dict[str, float]]:
    """Decode rows' prompts with a drafter, and compare its rounds with those that its network foretells.

    Args:
        recipe: of the drafter; its `k` is the depth of the chains.
        folder: the drafter as it will be published.
        network: with the weights as they were saved.
        rows: logged responses of the target itself.
        states: of the target, for a family that feeds on them.

    Returns:
        For each temperature (as text): prompts, rounds, rounds_simulated, tokens_per_verify of the engine.

    Raises:
        ValueError: the counts differ by more than 2 %.
    """
    speculation = SpeculationParams(
        k=recipe.k, block="chain", block_nodes=recipe.k, on_miss="plain", policy="confidence"
    )
    config = EngineConfig(
        dtype=recipe.target_dtype,
        revision=recipe.revision,
        row_bucket=max(8, recipe.k + 1),
        threads=torch.get_num_threads(),
        speculation=speculation,
        trust_remote_code=recipe.trust_remote_code,
    )
    found: dict[str, dict[str, float]] = {}
    title = "gate: responses decoded by the engine"
    with (
        Engine.from_pretrained(recipe.target, str(folder), mode="sync", config=config) as engine,
        ProgressReport(title, len(rows)) as report,
    ):
        for index, row in enumerate(rows):
            sampling = replace(sampling_of(row), max_new_tokens=len(row.response_ids))
            [completion] = engine.generate([row.prompt_ids.tolist()], sampling)
            said = torch.tensor(completion.token_ids).numpy()
            # the engine's own text: another bucket than the log's may decide a near tie in another way
            simulated = follow_row(network, replace(row, response_ids=said), engine.max_prompt_tokens, states)
            counts = found.setdefault(
                f"{row.temperature:g}", {"prompts": 0, "rounds": 0, "rounds_simulated": 0, "tokens": 0}
            )
            counts["prompts"] += 1
            counts["rounds"] += completion.request_stats.rounds
            counts["rounds_simulated"] += len(chain_rounds(simulated.ranks_ST == 0, recipe.k))
            counts["tokens"] += len(said) - 1
            report.update(index + 1)
    for temperature, counts in found.items():
        _check(temperature, counts)
        counts["tokens_per_verify"] = counts.pop("tokens") / max(1, counts["rounds"])
    return found


def _check(temperature: str, counts: dict[str, float]) -> None:
    measured, simulated = counts["rounds"], counts["rounds_simulated"]
    if abs(measured - simulated) > max(1.0, TOLERANCE * simulated):
        raise ValueError(
            f"gate: at temperature {temperature} the engine needed {measured:g} rounds for "
            f"{counts['prompts']:g} held-out prompts, the trained network foretells {simulated:g}; they must "
            f"agree within {TOLERANCE:.0%}. The engine drafts otherwise than training unrolls: look at the "
            "position ids and states of the family's `unroll` and `logits`, at the draft vocabulary, and at "
            "target_dtype, which must be the log's. With gate_prompts 0 the drafter is written all the same"
        )
