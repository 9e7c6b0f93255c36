"""`foredraft on-policy`: the drafter's own mistakes, scored by the target, as rows that it can learn from.

    python -m foredraft.train.on_policy --config R.yaml

A drafter that guessed wrong goes on guessing behind its mistake, in text that the target never wrote and
training has never shown; there it prepares outcomes. Chain rounds along the log's responses find mistakes
(DAgger: Ross et al., arXiv:1011.0686; on-policy distillation: Agarwal et al., arXiv:2306.13649): a row is the
text up to a mistake, then the wrong guess and those behind it, with the target's distribution at each.
The result is a target log of its own, to be given to the drafter's recipe beside the first one.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import torch

from foredraft.infer.config import read_config, run_command, save_resolved
from foredraft.infer.drafter_card import drafter_sha256
from foredraft.infer.drafters import load_drafter
from foredraft.infer.params import EngineConfig
from foredraft.infer.target import Target
from foredraft.train.chain_rounds import ChainedResponse, ChainRounds, StatesOfRow
from foredraft.train.continuous import PAGE_SIZE, num_pages_for
from foredraft.train.given import Scorer
from foredraft.train.log_recipe import OnPolicyRecipe
from foredraft.train.log_rows import LogRow, read_rows
from foredraft.train.outcomes import check_drafter_of, states_of
from foredraft.train.processes import join_processes
from foredraft.train.progress import ProgressReport
from foredraft.train.splits import part_of
from foredraft.train.target_log import TargetLog

FREE_KEYS = ("log", "drafter", "out", "rows", "threads", "device")
MIN_FAN_OUT = 2  # candidates that are asked of the drafter; only the best is followed


def main(argv: list[str] | None = None) -> int:
    """Entry of `foredraft on-policy`; returns the exit code."""
    recipe, resolved = read_config(OnPolicyRecipe, sys.argv[1:] if argv is None else argv, "on-policy")
    collect_mistakes(recipe, resolved)
    return 0


def collect_mistakes(recipe: OnPolicyRecipe, resolved: str) -> TargetLog:
    """Write the log of a recipe, or what is missing of it.

    Raises:
        ValueError: a log that is incomplete, a drafter of another target, a folder with another log.
    """
    state = join_processes()
    if recipe.threads:
        torch.set_num_threads(recipe.threads)
    source = TargetLog.open(recipe.log)
    card = check_drafter_of(source, recipe.drafter)
    drafter_id = drafter_sha256(recipe.drafter)
    manifest = replace(
        source.manifest,
        recipe={**source.manifest.recipe, "on_policy": {**asdict(recipe), "drafter_sha256": drafter_id}},
        shards=[],
        hidden_layers=None,
    )
    with state.main_process_first():
        log = TargetLog.start(Path(recipe.out), manifest, FREE_KEYS)
        save_resolved(recipe.out, resolved)
    missing = log.bad_shards()
    # nobody writes before everybody has seen what is missing
    state.wait_for_everyone()
    own = missing[state.process_index :: state.num_processes]
    with ProgressReport("on-policy: shards", len(own), is_enabled=state.is_main_process) as report:
        if own:
            states = states_of(recipe.device, source, card)
            mistakes = Mistakes(recipe, source, states)
            for done, index in enumerate(own, 1):
                log.write_shard(index, list(mistakes.rows_of(index)))
                report.update(done)
        state.wait_for_everyone()
        if state.is_main_process:
            log.gather()
            report.say(f"on-policy log {recipe.out}: {log.num_tokens} guesses scored by the target")
    state.wait_for_everyone()
    return log


class Mistakes:
    """Finds a drafter's mistakes along responses, and has the target score what it guesses behind them."""

    def __init__(self, recipe: OnPolicyRecipe, source: TargetLog, states: StatesOfRow | None) -> None:
        self.recipe, self.source = recipe, source
        made_with = source.manifest.recipe
        longest = max((len(row.prompt_ids) + len(row.response_ids) for row in source.rows()), default=0)
        config = EngineConfig(
            dtype=made_with["dtype"],
            revision=made_with["revision"],
            device=recipe.device,
            draft_device=recipe.device,
            draft_rows=recipe.rows,
            lanes=1 if states is None else min(recipe.rows, recipe.length + 1),
            page_size=PAGE_SIZE,
            num_pages=num_pages_for([0], 1, longest + recipe.length + 1, recipe.rows, PAGE_SIZE),
        )
        self.rounds = ChainRounds(
            load_drafter(recipe.drafter, config),
            k=recipe.length,
            fan_out=MIN_FAN_OUT,
            states=states,
            observe=self.observe,
        )
        target = Target.load(made_with["target"], replace(config, row_bucket=2, lanes=0))
        self.scorer = Scorer(target.model, source.manifest.top_k_logprobs)
        self.found: dict[str, list[tuple[int, list[int]]]] = {}

    def observe(self, response: ChainedResponse, num_right: int) -> None:
        """Keep the guesses of a round from the first wrong one on."""
        if num_right < len(response.guesses) and response.root + num_right + 1 < len(response.tokens):
            place = response.root + 1 + num_right
            self.found.setdefault(response.row.key, []).append((place, response.guesses[num_right:]))

    def rows_of(self, index: int) -> Iterator[LogRow]:
        """The mistakes of one shard as rows, those of a response in order of their place."""
        rows = [row for row in read_rows(self.source.shard_paths[index]) if self.is_wanted(row)]
        self.found.clear()
        for _ in self.rounds.run(rows):
            pass
        for row in rows:
            for place, guesses in self.chosen(row):
                yield self.scored(row, place, guesses)

    def is_wanted(self, row: LogRow) -> bool:
        """Whether a drafter may learn from a row; only what the target said itself is replayed."""
        part = part_of(row.request_id, row.split, self.recipe.reserved_fraction)
        return part == "train" and row.source == "target"

    def chosen(self, row: LogRow) -> list[tuple[int, list[int]]]:
        """At most so many mistakes of a response, drawn by the row's own hash."""
        found = self.found.get(row.key, [])
        seed = hashlib.sha256(f"{self.recipe.seed}/{row.key}".encode()).digest()
        generator = np.random.default_rng(int.from_bytes(seed[:8], "little"))
        kept = generator.permutation(len(found))[: self.recipe.mistakes_per_response]
        return [found[place] for place in sorted(kept)]

    def scored(self, row: LogRow, place: int, guesses: list[int]) -> LogRow:
        """The text up to a mistake as prompt, the guesses as response, with the target's distributions."""
        tokens = [*row.prompt_ids.tolist(), *row.response_ids.tolist()][:place]
        ids, logprobs, tail, _ = self.scorer.score(tokens, guesses)
        return replace(
            row,
            prompt_ids=np.asarray(tokens, np.int32),
            response_ids=np.asarray(guesses, np.int32),
            first_position=place,
            topk_ids=ids,
            topk_logprobs=logprobs,
            tail_mass=tail,
            finish_reason="length",
            source="drafter",
        )


if __name__ == "__main__":
    sys.exit(run_command(main))
