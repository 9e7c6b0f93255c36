"""`foredraft generate`: decode a prompt or a file of prompts. A thin layer over the Engine.

Results go to stdout, everything else to stderr.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import track

from foredraft.infer.config import run_command
from foredraft.infer.flags import (
    SAMPLING_FLAGS,
    FlagParser,
    add_flags,
    build_parser,
    check_modes,
    check_policies,
    check_writable,
    engine_config,
    given,
    load_engine,
    unused_flags,
    warn,
)
from foredraft.infer.params import MODES, Mode, SamplingParams
from foredraft.infer.prompts import Prompt, draw_seed, encode_all, line_seed, read_prompts

if TYPE_CHECKING:
    from foredraft.infer.engine import Engine
    from foredraft.infer.request import Completion


def parser() -> FlagParser:
    """The flags of the command."""
    flags = build_parser("generate", "Decode prompts; the text does not depend on mode or drafter.")
    flags.add_argument("--mode", choices=MODES, help="default: async with a drafter, else plain")
    source = flags.add_mutually_exclusive_group(required=True)
    source.add_argument("--prompt", metavar="TEXT", help="one user turn")
    source.add_argument("--prompts", metavar="FILE", help="JSONL with `messages` or `prompt` in every line")
    flags.add_argument("--raw", action="store_true", help="no chat template: continue the text as it is")
    flags.add_argument("--json", action="store_true", help="one JSON object a prompt, in input order")
    flags.add_argument("--trace", metavar="FILE", help="write a Perfetto trace of engine and draft server")
    sampling = flags.add_argument_group("sampling")
    add_flags(sampling, SamplingParams, SAMPLING_FLAGS)
    sampling.add_argument(
        "--stop", action="append", default=[], metavar="S", help="end before this string; may be given again"
    )
    return flags


def main(argv: Sequence[str] | None = None) -> int:
    """Entry of the command; returns the exit code."""
    return run_command(lambda: generate(sys.argv[1:] if argv is None else argv))


def generate(argv: Sequence[str]) -> int:
    """Check all that can be checked, load the models, decode. Raises ValueError for the user's mistakes."""
    args = parser().read(argv)
    mode: Mode = args.mode or ("async" if "drafter" in args else "plain")
    check_modes(args, [mode])
    check_writable("--trace", args.trace)
    config = engine_config(args)
    check_policies(args, [config.speculation.policy])
    sampling = SamplingParams(stop=tuple(args.stop), **given(args, SAMPLING_FLAGS))
    prompts = [Prompt.from_text(args.prompt)] if args.prompts is None else read_prompts(args.prompts)
    for message in unused_flags(args, [mode], config, [sampling.temperature]):
        warn(message)
    base_seed = draw_seed() if sampling.seed is None else sampling.seed
    params = [dataclasses.replace(sampling, seed=line_seed(base_seed, prompt)) for prompt in prompts]
    with load_engine(args, config, mode, args.trace) as engine:
        tokenizer, limit = engine.target.tokenizer, engine.max_prompt_tokens
        requests = encode_all(prompts, tokenizer, raw=args.raw, max_tokens=limit)
        write = write_json if args.json else write_text
        write(engine, prompts, requests, params)
    return 0


def write_json(
    engine: Engine, prompts: Sequence[Prompt], requests: Sequence[list[int]], params: Sequence[SamplingParams]
) -> None:
    """One line a prompt on stdout, each as soon as it is there."""
    console = Console(stderr=True)
    jobs = list(zip(prompts, requests, params, strict=True))
    is_hidden = len(jobs) == 1 or not console.is_terminal
    for prompt, token_ids, one in track(jobs, "generate", console=console, disable=is_hidden):
        [completion] = engine.generate([token_ids], [one])
        print(json.dumps(as_record(prompt, completion), ensure_ascii=False), flush=True)


def write_text(
    engine: Engine, prompts: Sequence[Prompt], requests: Sequence[list[int]], params: Sequence[SamplingParams]
) -> None:
    """The text of every prompt on stdout as it comes; ids, seeds and speed on stderr."""
    for prompt, token_ids, one in zip(prompts, requests, params, strict=True):
        text = ""
        for part in engine.stream(token_ids, one):
            if isinstance(part, str):
                text += part
                print(part, end="", flush=True)
            else:
                print("" if text.endswith("\n") else "\n", end="", flush=True)
                print(summary(prompt, part), file=sys.stderr)


def as_record(prompt: Prompt, completion: Completion) -> dict[str, object]:
    """A completion as one line of `--json`."""
    return {
        "id": prompt.id,
        "text": completion.text,
        "token_ids": completion.token_ids,
        "prompt_tokens": completion.prompt_tokens,
        "finish_reason": completion.finish_reason,
        "seed": completion.seed,
        "stats": completion.stats,
    }


def summary(prompt: Prompt, completion: Completion) -> str:
    """One line about a completion for people."""
    stats = completion.stats
    parts = [
        f"prompt {prompt.id}",
        f"seed {completion.seed}",
        f"{len(completion.token_ids)} tokens ({completion.finish_reason})",
        f"mode {stats['mode']}",
    ]
    for name, label in (
        ("tokens_per_second", "tokens/s"),
        ("tokens_per_verify", "tokens/verify"),
        ("hit_rate", "hit rate"),
    ):
        if stats[name] is not None:
            parts.append(f"{stats[name]:.2f} {label}")
    if stats["state_bytes"]:
        parts.append(f"{stats['state_bytes'] / 2**20:.2f} MiB of states")
    return "[" + ", ".join(parts) + "]"


if __name__ == "__main__":
    sys.exit(main())
