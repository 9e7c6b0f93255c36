"""`foredraft outcomes`: replay a drafter over a target log and write outcome records.

    python -m foredraft.train.outcomes --config R.yaml

No target is run, the log says what it answered; only for a drafter that feeds on its states it runs, where
the log does not hold them. Several processes (accelerate launch) share the shards. An
interrupted run keeps its finished shards; a second run does what is missing or damaged.
"""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import torch

from foredraft.infer.config import read_config, run_command, save_resolved
from foredraft.infer.drafter_card import DrafterCard, drafter_sha256, family_of, read_drafter_card
from foredraft.infer.drafters import Drafter, load_drafter
from foredraft.infer.features import FEATURES
from foredraft.infer.identity import check_tokenizer, sha256_of_json
from foredraft.infer.outcome_records import OutcomeRecords
from foredraft.infer.paged_model import load_causal_lm
from foredraft.infer.params import EngineConfig
from foredraft.train.chain_rounds import ChainRounds, StatesOfRow
from foredraft.train.continuous import PAGE_SIZE, num_pages_for
from foredraft.train.log_rows import LogRow, read_rows
from foredraft.train.logged_states import LoggedStates
from foredraft.train.outcome_log import ROUND, OutcomeLog, OutcomeManifest
from foredraft.train.processes import join_processes
from foredraft.train.progress import ProgressReport
from foredraft.train.recipe import OutcomesRecipe
from foredraft.train.replay import follow, path_records
from foredraft.train.splits import part_of
from foredraft.train.target_log import TargetLog
from foredraft.train.target_runner import TargetRunner

# settings that change no record; log and drafter are compared by hash
FREE_KEYS = ("log", "drafter", "out", "rows", "threads", "device")
REPLAY_CHUNK = 256  # tokens that the drafter reads at once


def main(argv: list[str] | None = None) -> int:
    """Entry of `foredraft outcomes`; returns the exit code."""
    recipe, resolved = read_config(OutcomesRecipe, sys.argv[1:] if argv is None else argv, "outcomes")
    replay(recipe, resolved)
    return 0


def replay(recipe: OutcomesRecipe, resolved: str) -> OutcomeLog:
    """Write the outcome records of a recipe, or what is missing of them.

    Raises:
        ValueError: a log that is incomplete, a drafter of another target, a folder with other records.
    """
    state = join_processes()
    if recipe.threads:
        torch.set_num_threads(recipe.threads)
    log = TargetLog.open(recipe.log)
    card = check_drafter_of(log, recipe.drafter)
    with state.main_process_first():
        outcomes = OutcomeLog.start(Path(recipe.out), make_manifest(recipe, log, card), FREE_KEYS)
        save_resolved(recipe.out, resolved)
    missing = outcomes.bad_shards()
    # nobody writes before everybody has seen what is missing
    state.wait_for_everyone()
    own = missing[state.process_index :: state.num_processes]
    rows = {index: wanted_rows(log, outcomes, index, recipe) for index in own}
    num_rows = sum(map(len, rows.values()))
    with ProgressReport("outcomes: responses", num_rows, is_enabled=state.is_main_process) as report:
        if own:
            ShardWriter(recipe, outcomes, rows, report, states_of(recipe.device, log, card)).write()
        state.wait_for_everyone()
        if state.is_main_process:
            outcomes.gather()
            warning = "" if outcomes.manifest.reserved_fraction else NOTHING_RESERVED
            report.say(
                f"outcome records {recipe.out}: {outcomes.num_tokens} labelled; {len(missing)} of "
                f"{log.manifest.num_shards} shards made now by {state.num_processes} processes{warning}"
            )
    state.wait_for_everyone()
    return outcomes


NOTHING_RESERVED = (
    "\nwarning: the drafter's recipe reserved no prompts (reserved_fraction 0): a predictor has nothing to "
    "learn from, as a drafter's confidence on its own training prompts is too high"
)


def check_drafter_of(log: TargetLog, drafter: str) -> DrafterCard | None:
    """The drafter's card, None for a plain model; ValueError for a drafter of another target or tokenizer."""
    card = read_drafter_card(drafter)
    if card is not None:
        check_tokenizer(
            card.tokenizer_sha256, log.manifest.tokenizer_sha256, "the drafter", log.manifest.target.id
        )
        if not card.target.is_same(log.manifest.target):
            raise ValueError(
                f"drafter {drafter} was trained for target {card.target}, the log is of "
                f"{log.manifest.target}; replay a drafter over the log of its own target"
            )
    return card


def states_of(device: str, log: TargetLog, card: DrafterCard | None) -> StatesOfRow | None:
    """The target's states of a row, for a drafter that feeds on them: from the log, else the target runs."""
    if card is None or not card.states.layers:
        return None
    found = log.manifest.hidden_layers
    if found is not None and set(card.states.layers) <= set(found):
        return LoggedStates([log], card.states).bits_of
    made_with = log.manifest.recipe
    config = EngineConfig(dtype=made_with["dtype"], revision=made_with["revision"])
    model = load_causal_lm(made_with["target"], config, device)
    model.set_attn_implementation("sdpa")
    return TargetRunner(model, card.states, torch.device(device)).bits_of


def make_manifest(recipe: OutcomesRecipe, log: TargetLog, card: DrafterCard | None) -> OutcomeManifest:
    """The manifest of the records to be."""
    trained_with = card.training.get("recipe", {}) if card else {}
    return OutcomeManifest(
        target=log.manifest.target,
        tokenizer_sha256=log.manifest.tokenizer_sha256,
        recipe={**asdict(recipe), "parts": list(recipe.parts)},
        num_shards=log.manifest.num_shards,
        family=family_of(card),
        drafter_sha256=drafter_sha256(recipe.drafter),
        log_sha256=sha256_of_json([entry.sha256 for entry in log.manifest.shards]),
        features=list(FEATURES),
        fan_out=recipe.fan_out,
        depth=recipe.depth,
        k=recipe.k,
        reserved_fraction=trained_with.get("reserved_fraction", 0.0),
    )


def wanted_rows(log: TargetLog, outcomes: OutcomeLog, index: int, recipe: OutcomesRecipe) -> list[LogRow]:
    """Rows of one shard of the log that the recipe wants replayed."""
    wanted = []
    num_seen: Counter[tuple[str, float]] = Counter()  # a prompt's responses are all in one shard
    for row in read_rows(log.shard_paths[index]):
        part = part_of(row.request_id, row.split, outcomes.manifest.reserved_fraction)
        num_seen[row.request_id, row.temperature] += 1
        is_enough = num_seen[row.request_id, row.temperature] > (recipe.heldout_responses or math.inf)
        if row.is_targets and part in recipe.parts and not (part == "heldout" and is_enough):
            wanted.append(row)
    return wanted


class ShardWriter:
    """Replays the rows of some shards: `rows` by index of their shard.

    What a drafter that feeds on states guesses depends on how far the last true state is: its records are
    those of chain rounds alone, where others have one for every anchor and depth.
    """

    def __init__(
        self,
        recipe: OutcomesRecipe,
        outcomes: OutcomeLog,
        rows: dict[int, list[LogRow]],
        report: ProgressReport,
        states: StatesOfRow | None,
    ) -> None:
        self.recipe, self.outcomes, self.rows, self.report = recipe, outcomes, rows, report
        self.states = states
        self.drafter = self._load()
        self.num_rows = self.num_records = self.num_rounds = 0

    def _load(self) -> Drafter:
        recipe = self.recipe
        rows = (row for shard in self.rows.values() for row in shard)
        longest = max((len(row.prompt_ids) + len(row.response_ids) for row in rows), default=0)
        config = EngineConfig(
            dtype=recipe.dtype,
            draft_device=recipe.device,
            draft_rows=recipe.rows,
            lanes=1 if self.states is None else min(recipe.rows, recipe.k + 1),
            prefill_chunk=REPLAY_CHUNK,
            num_pages=num_pages_for([0], 1, longest + recipe.k + 1, recipe.rows, PAGE_SIZE),
            page_size=PAGE_SIZE,
        )
        return load_drafter(recipe.drafter, config)

    def write(self) -> None:
        """Write all records; a shard is written as soon as its last row is done."""
        rounds = self._rounds()
        for index, rows in self.rows.items():
            parts = [*self._path_records(rows)] if self.states is None else []
            for row, found in rounds[index]:
                if self.states is not None:
                    parts.append((self._part(row), found.select(found.is_labelled_N)))
                if row.split == "heldout":
                    parts.append((ROUND, found))
            self.outcomes.write_shard(index, parts)

    def _part(self, row: LogRow) -> str:
        return part_of(row.request_id, row.split, self.outcomes.manifest.reserved_fraction)

    def _rounds(self) -> dict[int, list[tuple[LogRow, OutcomeRecords]]]:
        """Chain rounds of held-out rows (with states: of all) by shard.

        Those of all shards together fill the drafter's bucket.
        """
        pairs = [
            (index, row)
            for index, rows in self.rows.items()
            for row in rows
            if row.split == "heldout" or self.states is not None
        ]
        found: dict[tuple[str, int], OutcomeRecords] = {}
        recipe = self.recipe
        rounds = ChainRounds(self.drafter, k=recipe.k, fan_out=recipe.fan_out, states=self.states)
        for row, records in rounds.run(row for _, row in pairs):
            found[row.request_id, row.seed] = records
            self.num_rounds += len(records) // (self.recipe.k + 1)
            self.report.update(self.num_rows, f"{self.num_rounds} chain rounds")
        # the log's order: which rows end first depends on the rows of other shards
        by_shard: dict[int, list[tuple[LogRow, OutcomeRecords]]] = {index: [] for index in self.rows}
        for index, row in pairs:
            if (row.request_id, row.seed) in found:
                by_shard[index].append((row, found[row.request_id, row.seed]))
        return by_shard

    def _path_records(self, rows: list[LogRow]) -> Iterator[tuple[str, OutcomeRecords]]:
        for row in rows:
            followed = follow(self.drafter, row, self.recipe.fan_out)
            records = path_records(followed, self.recipe.depth)
            self.num_rows += 1
            self.num_records += len(records)
            self.report.update(self.num_rows, f"{self.num_records} records")
            yield self._part(row), records


if __name__ == "__main__":
    sys.exit(run_command(main))
