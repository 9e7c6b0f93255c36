"""`foredraft synthesise`: prompts drawn from the target itself, for who has no others.

    python -m foredraft.train.synthesise --config R.yaml

A chat model has seen user turns: with its template opened up to the user's first word it writes them by
itself (Magpie, arXiv:2406.08464). An *opening*, the first words of a turn, steers what is asked; what the
model makes of it is the prompt. Several processes share the parts; an interrupted run keeps finished parts.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from foredraft.infer.atomic import atomic_file, write_text_atomic
from foredraft.infer.config import read_config, run_command
from foredraft.infer.identity import identify_target, sha256_of_json
from foredraft.infer.params import EngineConfig
from foredraft.infer.target import Target, load_tokenizer
from foredraft.train.continuous import ContinuousDecoder, Job, Response, continuous_config
from foredraft.train.log_recipe import SynthesisRecipe
from foredraft.train.processes import join_processes
from foredraft.train.progress import ProgressReport

MARK = "\x1fMARK\x1f"  # stands where the turn goes on; no template and no tokenizer changes it
FREE_KEYS = ("target", "revision", "openings", "out", "rows", "threads", "device", "prompts_per_part")


@dataclass(frozen=True, slots=True)
class Opening:
    """The first words of a user turn, with what the model is told before it."""

    category: str
    text: str  # "": the model begins by itself
    system: str | None = None
    share: float = 1.0  # of the prompts, relative to the other openings


@dataclass(frozen=True, slots=True)
class OpenedTurn:
    """An opening as tokens: a prefix to continue, and the token that ends a turn."""

    opening: Opening
    token_ids: tuple[int, ...]
    end_id: int


def main(argv: list[str] | None = None) -> int:
    """Entry of `foredraft synthesise`; returns the exit code."""
    recipe, _ = read_config(SynthesisRecipe, sys.argv[1:] if argv is None else argv, "synthesise")
    synthesise(recipe)
    return 0


def synthesise(recipe: SynthesisRecipe) -> None:
    """Write the prompt file of a recipe, or find that it is there.

    Raises:
        ValueError: bad openings, a tokenizer without chat template, an `out` of another recipe.
    """
    state = join_processes()
    if recipe.threads:
        torch.set_num_threads(recipe.threads)
    openings = read_openings(recipe.openings)
    tokenizer = load_tokenizer(recipe.target, EngineConfig(revision=recipe.revision))
    turns = [open_turn(tokenizer, opening) for opening in openings]
    out, work = Path(recipe.out), Path(f"{recipe.out}.parts")
    fingerprint = _fingerprint(recipe, openings)
    with state.main_process_first():
        if _is_done(out, fingerprint):
            state.print(f"prompts {out}: complete already", file=sys.stderr)
            return
        _start(work, fingerprint)
    synthesis = Synthesis(recipe, turns, tokenizer)
    missing = [part for part in range(synthesis.num_parts) if not _part_path(work, part).is_file()]
    # nobody writes before everybody has seen what is missing
    state.wait_for_everyone()
    own = missing[state.process_index :: state.num_processes]
    with ProgressReport(
        "synthesise: turns", len(synthesis.turns_of(own)), is_enabled=state.is_main_process
    ) as report:
        if own:
            synthesis.write_parts(work, own, report)
        state.wait_for_everyone()
        lines = synthesis.lines_of(work)
        if not lines:
            raise ValueError(
                f"none of {len(synthesis.slots)} turns ended within max_new_tokens {recipe.max_new_tokens}: "
                "raise it, or lower the temperature"
            )
        if state.is_main_process:
            report.say(f"prompts {out}: {_join(work, out, lines, fingerprint)}")
    state.wait_for_everyone()


def read_openings(path: str) -> list[Opening]:
    """Openings of a JSONL file: `text`, and optionally `category`, `system` and `share`.

    Raises:
        ValueError: no such file, a line that is no opening.
    """
    if not Path(path).is_file():
        raise ValueError(f"openings {path}: no such file")
    openings = []
    for number, line in enumerate(Path(path).read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        try:
            fields = json.loads(line)
            opening = Opening(**{"category": "other", **fields})
            is_good = isinstance(opening.text, str) and opening.share > 0.0
        except (json.JSONDecodeError, TypeError) as error:
            raise ValueError(
                f"openings {path}, line {number}: expected an object with `text` ({error})"
            ) from None
        if not is_good:
            raise ValueError(
                f"openings {path}, line {number}: expected a `text` and a positive `share`, found {line}"
            )
        openings.append(opening)
    if not openings:
        raise ValueError(f"openings {path}: none in it, expected one JSON object a line")
    return openings


def open_turn(tokenizer: PreTrainedTokenizerBase, opening: Opening) -> OpenedTurn:
    """The chat template up to the end of an opening.

    Raises:
        ValueError: no chat template, or one that changes the user's words.
    """
    if not tokenizer.chat_template:
        raise ValueError("this tokenizer has no chat template: its model has seen no user turns to write")
    messages = [{"role": "system", "content": opening.system}] if opening.system else []
    messages.append({"role": "user", "content": opening.text + MARK})
    rendered = str(tokenizer.apply_chat_template(messages, tokenize=False))
    before, mark, after = rendered.partition(MARK)
    end_ids = tokenizer(after, add_special_tokens=False)["input_ids"]
    if not mark or not end_ids:
        raise ValueError(
            "the chat template does not end a user turn by a token of its own; give prompts of your own"
        )
    return OpenedTurn(opening, tuple(tokenizer(before, add_special_tokens=False)["input_ids"]), end_ids[0])


class Synthesis:
    """Which turns are drawn, in parts.

    Args:
        recipe: of the prompts.
        turns: opened ones.
        tokenizer: of the target.
    """

    def __init__(
        self, recipe: SynthesisRecipe, turns: Sequence[OpenedTurn], tokenizer: PreTrainedTokenizerBase
    ) -> None:
        self.recipe, self.tokenizer = recipe, tokenizer
        total = sum(turn.opening.share for turn in turns)
        self.slots: list[tuple[OpenedTurn, int]] = []  # every turn to draw: the opening and a number
        for turn in turns:
            count = max(1, round(recipe.count * turn.opening.share / total))
            self.slots += [(turn, number) for number in range(count)]

    @property
    def num_parts(self) -> int:
        """Parts of the file to be."""
        return -(-len(self.slots) // self.recipe.prompts_per_part)

    def turns_of(self, parts: Sequence[int]) -> list[int]:
        """Indices of the turns of some parts; those of one opening stand together, to share its prefill."""
        size = self.recipe.prompts_per_part
        return [
            index for part in parts for index in range(part * size, min((part + 1) * size, len(self.slots)))
        ]

    def jobs(self, parts: Sequence[int]) -> Iterator[Job]:
        """All turns of some parts; a job's key is (part, index of its turn)."""
        for index in self.turns_of(parts):
            turn, number = self.slots[index]
            digest = hashlib.sha256(f"{self.recipe.seed}/{turn.token_ids}/{number}".encode()).digest()
            params = self.recipe.sampling(int.from_bytes(digest[:8], "little"))
            yield Job(
                key=(index // self.recipe.prompts_per_part, index), prompt_ids=turn.token_ids, params=params
            )

    def write_parts(self, work: Path, parts: Sequence[int], report: ProgressReport) -> None:
        """Draw the turns of some parts; a part is written as soon as its last one is complete."""
        recipe = self.recipe
        lengths = [len(turn.token_ids) for turn, _ in self.slots]
        config = continuous_config(
            lengths,
            1,
            recipe.max_new_tokens,
            recipe.rows,
            dtype=recipe.dtype,
            device=recipe.device,
            revision=recipe.revision,
        )
        target = Target.load(recipe.target, config)
        end_ids = target.eos_ids | {turn.end_id for turn, _ in self.slots}
        decoder = ContinuousDecoder(target.model, end_ids, 1)
        found: dict[int, dict[int, dict[str, Any] | None]] = {part: {} for part in parts}
        num_done = 0
        for completed in decoder.run(self.jobs(parts)):
            for response in completed:
                part, index = response.job.key
                found[part][index] = self.prompt_of(index, response)
                num_done += 1
                if len(found[part]) == len(self.turns_of([part])):
                    done = found.pop(part)
                    lines = [json.dumps(done[key], ensure_ascii=False) for key in sorted(done) if done[key]]
                    write_text_atomic(_part_path(work, part), "".join(f"{line}\n" for line in lines))
            report.update(num_done + int(decoder.num_started))

    def lines_of(self, work: Path) -> list[str]:
        """What all parts hold."""
        paths = [_part_path(work, part) for part in range(self.num_parts)]
        return [line for path in paths for line in path.read_text(encoding="utf-8").splitlines()]

    def prompt_of(self, index: int, response: Response) -> dict[str, Any] | None:
        """The drawn turn as a line of a prompt file; None where it has no end, or is too short."""
        opening = self.slots[index][0].opening
        written = self.tokenizer.decode(response.tokens[:-1], skip_special_tokens=True)
        text = (opening.text + written).strip()
        is_whole = response.finish_reason == "stop" and "�" not in text
        if not is_whole or len(response.tokens) <= self.recipe.min_new_tokens:
            return None
        return {
            "id": f"{opening.category}-{index}",
            "category": opening.category,
            "messages": [{"role": "user", "content": text}],
        }


def _fingerprint(recipe: SynthesisRecipe, openings: Sequence[Opening]) -> str:
    """Hash of all that decides the prompts."""
    settings = {key: value for key, value in asdict(recipe).items() if key not in FREE_KEYS}
    target = identify_target(recipe.target, recipe.revision).weights_sha256
    return sha256_of_json(
        [settings, target, [asdict(opening) for opening in openings], recipe.prompts_per_part]
    )


def _is_done(out: Path, fingerprint: str) -> bool:
    """Whether the prompt file is there; ValueError where it is another one."""
    if not out.exists():
        return False
    made_by = _made_by(out)
    if not made_by.is_file() or json.loads(made_by.read_text())["fingerprint"] != fingerprint:
        raise ValueError(f"{out} holds prompts of another recipe; delete it or choose another `out`")
    return True


def _start(work: Path, fingerprint: str) -> None:
    """Begin the parts, or take up those of the same recipe."""
    made_by = work / "recipe.json"
    if made_by.is_file() and json.loads(made_by.read_text())["fingerprint"] != fingerprint:
        shutil.rmtree(work)
    if not made_by.is_file():
        write_text_atomic(made_by, json.dumps({"fingerprint": fingerprint}))


def _join(work: Path, out: Path, lines: Sequence[str], fingerprint: str) -> str:
    """Publish the prompts, each text once; says how many there are."""
    by_text = {json.loads(line)["messages"][0]["content"]: line for line in reversed(lines)}
    write_text_atomic(_made_by(out), json.dumps({"fingerprint": fingerprint}) + "\n")
    with atomic_file(out) as temporary:
        temporary.write_text("".join(f"{line}\n" for line in reversed(by_text.values())), encoding="utf-8")
    shutil.rmtree(work)
    return f"{len(by_text)} of {len(lines)} whole turns, without duplicates"


def _part_path(work: Path, part: int) -> Path:
    return work / f"part-{part:05d}.jsonl"


def _made_by(out: Path) -> Path:
    return out.with_name(f"{out.name}.made_by.json")


if __name__ == "__main__":
    sys.exit(run_command(main))
