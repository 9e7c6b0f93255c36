"""`foredraft log`: run the target over prompts and write the target log.

    python -m foredraft.train.collect --config R.yaml

Several processes (accelerate launch) share the shards. An interrupted run keeps its finished shards; a second
run does what is missing or damaged.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, PreTrainedTokenizerBase

from foredraft.infer.config import read_config, run_command, save_resolved
from foredraft.infer.identity import chat_template_sha256, identify_target, tokenizer_sha256
from foredraft.infer.params import EngineConfig
from foredraft.infer.target import Target, load_tokenizer
from foredraft.train.collect_server import ServerDecoder
from foredraft.train.continuous import ContinuousDecoder, Job, Response, continuous_config
from foredraft.train.given import Scorer
from foredraft.train.log_recipe import LogRecipe, ResponseGroup
from foredraft.train.log_rows import LogRow
from foredraft.train.processes import join_processes
from foredraft.train.progress import ProgressReport
from foredraft.train.prompt_set import prompts_sha256, read_log_prompts
from foredraft.train.state_plan import StatePlan
from foredraft.train.target_log import LogManifest, TargetLog

# settings that may change between a run and the one that takes it up; prompts and target are compared by hash
FREE_KEYS = (
    *("target", "revision", "prompts", "heldout_fraction", "out"),
    *("rows", "threads", "device", "server"),
)
GIVEN = ResponseGroup(responses=1, temperature=0.0)  # how given responses are entered: as what must be said


def main(argv: list[str] | None = None) -> int:
    """Entry of `foredraft log`; returns the exit code."""
    recipe, resolved = read_config(LogRecipe, sys.argv[1:] if argv is None else argv, "log")
    collect(recipe, resolved)
    return 0


def collect(recipe: LogRecipe, resolved: str) -> TargetLog:
    """Write the log of a recipe, or what is missing of it.

    Raises:
        ValueError: bad prompts, a prompt that does not fit the target's context, a folder with another log.
    """
    state = join_processes()
    if recipe.threads:
        torch.set_num_threads(recipe.threads)
    tokenizer = load_tokenizer(recipe.target, EngineConfig(revision=recipe.revision))
    collection = Collection(recipe, tokenizer)
    with state.main_process_first():
        log = TargetLog.start(Path(recipe.out), collection.manifest(tokenizer), FREE_KEYS)
        save_resolved(recipe.out, resolved)
    missing = log.bad_shards()
    # nobody writes before everybody has seen what is missing
    state.wait_for_everyone()
    own = missing[state.process_index :: state.num_processes]
    num_rows, is_main = collection.num_rows(own), state.is_main_process
    with ProgressReport("log: responses", num_rows, is_enabled=is_main) as report:
        if own and recipe.hidden_layers:
            report.say(collection.state_plan(missing).stored(log.folder))
        if own:
            collection.write_shards(log, own, report)
        state.wait_for_everyone()
        if is_main:
            log.gather()
            report.say(
                f"target log {recipe.out}: {len(collection.prompts)} prompts, {log.num_tokens} response "
                f"tokens; {len(missing)} of {collection.num_shards} shards made now by "
                f"{state.num_processes} processes"
            )
    state.wait_for_everyone()
    return log


class Collection:
    """What a log consists of: prompts, responses and their seeds, in shards."""

    def __init__(self, recipe: LogRecipe, tokenizer: PreTrainedTokenizerBase) -> None:
        self.recipe = recipe
        self.prompts = read_log_prompts(recipe, tokenizer)
        groups = recipe.groups or (GIVEN,)
        self.slots = [(group, number) for group in groups for number in range(group.responses)]

    @property
    def num_shards(self) -> int:
        """Shards of the whole log."""
        return -(-len(self.prompts) // self.recipe.prompts_per_shard)

    def num_rows(self, shards: list[int]) -> int:
        """Responses in some shards."""
        return len(self.slots) * sum(len(self.prompts_of(shard)) for shard in shards)

    def state_plan(self, shards: list[int]) -> StatePlan:
        """What the states of some shards cost at most."""
        recipe = self.recipe
        hidden_size = (
            AutoConfig.from_pretrained(recipe.target, revision=recipe.revision).get_text_config().hidden_size
        )
        lengths = [len(self.prompts[index].token_ids) for shard in shards for index in self.prompts_of(shard)]
        num_tokens = len(self.slots) * sum(length + recipe.max_new_tokens for length in lengths)
        return StatePlan(num_tokens, hidden_size * len(recipe.hidden_layers))

    def prompts_of(self, shard: int) -> range:
        """Indices of a shard's prompts."""
        size = self.recipe.prompts_per_shard
        return range(shard * size, min((shard + 1) * size, len(self.prompts)))

    def manifest(self, tokenizer: PreTrainedTokenizerBase) -> LogManifest:
        """The manifest of the log to be."""
        recipe = self.recipe
        return LogManifest(
            target=identify_target(recipe.target, recipe.revision),
            tokenizer_sha256=tokenizer_sha256(tokenizer),
            chat_template_sha256=None if recipe.raw else chat_template_sha256(tokenizer),
            top_k_logprobs=recipe.top_k_logprobs,
            # as JSON gives it back
            recipe=json.loads(json.dumps(asdict(recipe))),
            prompts_sha256=prompts_sha256(self.prompts),
            num_shards=self.num_shards,
            hidden_layers=list(recipe.hidden_layers) or None,
        )

    def load_target(self) -> Target:
        """The target with room for the longest prompts.

        Raises:
            ValueError: a prompt leaves no room for a response, or more log-probabilities than tokens.
        """
        recipe = self.recipe
        lengths = [len(prompt.token_ids) for prompt in self.prompts]
        config = continuous_config(
            lengths,
            len(self.slots),
            recipe.max_new_tokens,
            recipe.rows,
            dtype=recipe.dtype,
            device=recipe.device,
            revision=recipe.revision,
        )
        target = Target.load(recipe.target, config)
        target.model.catch_states(recipe.hidden_layers)
        if max(lengths) + recipe.max_new_tokens > target.model.max_positions:
            raise ValueError(
                f"the longest prompt has {max(lengths)} tokens; with max_new_tokens {recipe.max_new_tokens} "
                f"it exceeds the target's context of {target.model.max_positions}"
            )
        if recipe.top_k_logprobs > target.model.vocab_size:
            raise ValueError(
                f"top_k_logprobs {recipe.top_k_logprobs} exceeds the vocabulary of {target.model.vocab_size}"
            )
        return target

    def jobs(self, shards: list[int]) -> Iterator[Job]:
        """All responses of some shards; a job's key is (index of the prompt, index of its response)."""
        for shard in shards:
            for index in self.prompts_of(shard):
                prompt = self.prompts[index]
                for slot, (group, _) in enumerate(self.slots):
                    seed = derive_seed(self.recipe.seed, prompt.request_id, slot)
                    params = group.sampling(seed, self.recipe.max_new_tokens)
                    yield Job(key=(index, slot), prompt_ids=prompt.token_ids, params=params)

    def write_shards(self, log: TargetLog, shards: list[int], report: ProgressReport) -> None:
        """Get the responses of some shards; a shard is written as soon as its last one is complete."""
        rows: dict[int, dict[tuple[int, int], LogRow]] = {shard: {} for shard in shards}
        num_done = num_tokens = 0
        for key, row, num_started in self.responses(shards):
            if row is not None:
                shard = key[0] // self.recipe.prompts_per_shard
                rows[shard][key] = row
                num_done, num_tokens = num_done + 1, num_tokens + len(row.response_ids)
                if len(rows[shard]) == self.num_rows([shard]):
                    done = rows.pop(shard)
                    log.write_shard(shard, [done[key] for key in sorted(done)])
            report.update(num_done + int(num_started), f"{num_tokens} tokens")

    def responses(self, shards: list[int]) -> Iterator[tuple[tuple[int, int], LogRow | None, float]]:
        """Complete responses: key, row, how many more are under way; a row of None tells progress only."""
        recipe = self.recipe
        if recipe.server is not None:
            for job, fields in ServerDecoder(recipe.server, recipe.top_k_logprobs).run(self.jobs(shards)):
                yield job.key, self.row_of(job, "server", **fields), 0.0
            return
        if recipe.responses == "given":
            target = self.load_target() if recipe.top_k_logprobs else None
            scorer = Scorer(None if target is None else target.model, recipe.top_k_logprobs)
            for job in self.jobs(shards):
                yield job.key, self.given_row(job, scorer), 0.0
            return
        target = self.load_target()
        decoder = ContinuousDecoder(target.model, target.eos_ids, recipe.top_k_logprobs)
        for completed in decoder.run(self.jobs(shards)):
            yield (-1, -1), None, decoder.num_started
            for response in completed:
                yield response.job.key, self.decoded_row(response), decoder.num_started

    def decoded_row(self, response: Response) -> LogRow:
        """The row of a response that the target decoded here."""
        length = len(response.tokens)
        return self.row_of(
            response.job,
            "target",
            response_ids=np.asarray(response.tokens, np.int32),
            topk_ids=response.topk_ids[:length],
            topk_logprobs=response.topk_logprobs[:length],
            tail_mass=response.tail_mass[:length],
            finish_reason=response.finish_reason,
            states=np.concatenate(response.states) if response.states else None,
        )

    def given_row(self, job: Job, scorer: Scorer) -> LogRow:
        """The row of a response of the data."""
        response_ids = self.prompts[job.key[0]].response_ids
        topk_ids, topk_logprobs, tail_mass, states = scorer.score(job.prompt_ids, response_ids)
        return self.row_of(
            job,
            "given",
            response_ids=np.asarray(response_ids, np.int32),
            topk_ids=topk_ids,
            topk_logprobs=topk_logprobs,
            tail_mass=tail_mass,
            finish_reason="length" if len(response_ids) == self.recipe.max_new_tokens else "stop",
            states=states,
        )

    def row_of(self, job: Job, source: str, **fields: Any) -> LogRow:
        """A log row: what the job says, and what is known of its response."""
        prompt, params = self.prompts[job.key[0]], job.params
        assert params.seed is not None, "every row has a seed of its own"
        return LogRow(
            request_id=prompt.request_id,
            prompt_ids=np.asarray(prompt.token_ids, np.int32),
            first_position=len(prompt.token_ids),
            seed=params.seed,
            choice=params.choice,
            temperature=params.temperature,
            top_k=params.top_k,
            top_p=params.top_p,
            min_p=params.min_p,
            repetition_penalty=params.repetition_penalty,
            split=prompt.split,
            source=source,
            **fields,
        )


def derive_seed(base: int, request_id: str, slot: int) -> int:
    """A seed of its own for every row, the same whenever the row is decoded."""
    digest = hashlib.sha256(f"{base}/{request_id}/{slot}".encode()).digest()
    return int.from_bytes(digest[:8], "little")


if __name__ == "__main__":
    sys.exit(run_command(main))
