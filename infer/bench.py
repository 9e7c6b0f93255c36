"""`foredraft bench`: the modes against each other on one loaded target, prompt by prompt, in rotating order.

Every mode decodes every prompt with the same seed, `--repeats` times; a warm-up of each mode is not counted.
All modes give the target the same threads. Where that leaves a core to the drafter, plain on all cores
is measured too: it is what a user would run instead.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import importlib.metadata
import json
import platform
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from foredraft.infer.atomic import write_text_atomic
from foredraft.infer.bench_summary import PLAIN, Arm, Case, Run, summarise, summarise_all_cores
from foredraft.infer.config import UserError, run_command
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
from foredraft.infer.hub import local_folder
from foredraft.infer.identity import identify_target, read_sha256
from foredraft.infer.machine import num_cores, processor_name
from foredraft.infer.params import MODES, EngineConfig, ExpandPolicy, SamplingParams
from foredraft.infer.prompts import Prompt, draw_seed, encode_all, line_seed, read_prompts

if TYPE_CHECKING:
    from foredraft.infer.engine import Engine

WARM_UP_TOKENS = 16
PACKAGES = ("foredraft", "torch", "transformers", "numpy")


def parser() -> FlagParser:
    """The flags of the command."""
    flags = build_parser("bench", "Measure plain, synchronous and asynchronous decoding against each other.")
    flags.add_argument(
        "--prompts", required=True, metavar="FILE", help="JSONL with `messages` or `prompt` in every line"
    )
    flags.add_argument(
        "--modes",
        type=parse_arms,
        metavar="M,M",
        help="modes, each with a policy where wanted (async:confidence); default: all with a drafter, "
        "else plain",
    )
    flags.add_argument(
        "--repeats", type=int, default=3, metavar="N", help="of every prompt in every mode (default: 3)"
    )
    flags.add_argument("--limit", type=int, metavar="N", help="only the first N prompts")
    flags.add_argument("--raw", action="store_true", help="no chat template: continue the text as it is")
    flags.add_argument("--json", action="store_true", help="print JSON instead of a table")
    flags.add_argument("--out", metavar="FILE", help="write the JSON there too")
    sampling = flags.add_argument_group("sampling")
    add_flags(sampling, SamplingParams, SAMPLING_FLAGS, skip=("temperature",))
    sampling.add_argument(
        "--temperature", type=float, nargs="+", default=[0.0], metavar="X", help="one or several (default: 0)"
    )
    return flags


def parse_arms(text: str) -> list[Arm]:
    """`async:predictor,plain` -> [plain, async:predictor]. ArgumentTypeError for unknown or repeated ones."""
    names = [name.strip() for name in text.split(",")]
    known = [Arm(mode) for mode in MODES]
    known += [Arm(mode, policy) for mode in MODES if mode != "plain" for policy in get_args(ExpandPolicy)]
    arms = sorted((arm for arm in known if str(arm) in names), key=lambda arm: MODES.index(arm.mode))
    if len(arms) < len(names):
        raise argparse.ArgumentTypeError(
            f"expected some of {','.join(MODES)}, with a policy where wanted (async:confidence), each once, "
            f"got {text!r}"
        )
    return arms


def main(argv: Sequence[str] | None = None) -> int:
    """Entry of the command; returns the exit code."""
    return run_command(lambda: bench(sys.argv[1:] if argv is None else argv))


def bench(argv: Sequence[str]) -> int:
    """Check the request, measure, report. Raises ValueError for the user's mistakes."""
    args = parser().read(argv)
    arms: list[Arm] = args.modes or [Arm(mode) for mode in (MODES if "drafter" in args else MODES[:1])]
    config = check(args, arms)
    prompts = read_prompts(args.prompts)[: args.limit]
    base_seed = draw_seed() if "seed" not in args else args.seed
    with load_engine(args, config, arms[-1].mode) as engine:
        cases = make_cases(args, engine, prompts, base_seed)
        runs, all_cores = measure(engine, cases, arms, args.repeats)
        environment = describe(engine, config)
    report = {
        "target": args.target,
        "drafter": getattr(args, "drafter", None),
        "predictor": getattr(args, "predictor", None),
        "prompts": args.prompts,
        "prompts_sha256": read_sha256(Path(args.prompts)),
        "num_prompts": len(prompts),
        "repeats": args.repeats,
        "seed": base_seed,
        "sampling": given(args, [*SAMPLING_FLAGS, "raw"]),
        **summarise(runs, arms, config),
        "plain_all_cores": summarise_all_cores(runs, all_cores, num_cores()),
        **environment,
    }
    text = json.dumps(report, indent=2, ensure_ascii=False)
    if args.out:
        write_text_atomic(args.out, text + "\n")
    if args.json:
        print(text)
    else:
        print_table(report, config)
    return 0


def check(args: argparse.Namespace, arms: Sequence[Arm]) -> EngineConfig:
    """The engine settings, once every flag is known to make sense."""
    modes = list(dict.fromkeys(arm.mode for arm in arms))
    check_modes(args, modes)
    check_writable("--out", args.out)
    for name, least in (("repeats", 1), ("limit", 1)):
        value = getattr(args, name)
        if value is not None and value < least:
            raise UserError(f"--{name} must be at least {least}, got {value}")
    config = engine_config(args)
    check_policies(args, [config.speculation.policy, *(arm.policy for arm in arms)])
    for message in unused_flags(args, modes, config, args.temperature):
        warn(message)
    for arm in arms:
        dataclasses.replace(config.speculation, policy=arm.policy or config.speculation.policy)
    if config.speculation.verification == "rejection" and any(args.temperature):
        warn("with --verification rejection sampled texts have plain's law, not its tokens")
    if "plain" not in modes:
        warn("without mode plain there are no ratios and no comparison of outputs")
    return config


def make_cases(
    args: argparse.Namespace, engine: Engine, prompts: Sequence[Prompt], base_seed: int
) -> list[Case]:
    """Every prompt at every temperature, encoded and seeded. Raises ValueError if one does not fit."""
    sampling = SamplingParams(**given(args, SAMPLING_FLAGS.keys() - {"temperature", "seed"}))
    tokenizer, limit = engine.target.tokenizer, engine.max_prompt_tokens
    encoded = encode_all(prompts, tokenizer, raw=args.raw, max_tokens=limit)
    return [
        Case(
            prompt,
            ids,
            dataclasses.replace(sampling, temperature=temperature, seed=line_seed(base_seed, prompt)),
        )
        for temperature in dict.fromkeys(args.temperature)
        for prompt, ids in zip(prompts, encoded, strict=True)
    ]


def measure(
    engine: Engine, cases: Sequence[Case], arms: Sequence[Arm], repeats: int
) -> tuple[list[Run], list[Run]]:
    """Decode every case in every arm; the one that goes first rotates, so that drift hits all alike.

    Returns:
        The runs, and those of plain decoding on all cores (none without plain or where all modes use them).
    """
    warm_up(engine, cases[0], arms)
    runs: list[Run] = []
    all_cores: list[Run] = []
    has_reference = PLAIN in arms and num_cores() > engine.num_threads
    with Progress(console=Console(stderr=True)) as progress:
        task = progress.add_task("bench", total=repeats * len(cases) * (len(arms) + has_reference))
        for repeat in range(repeats):
            for number, case in enumerate(cases):
                first = (repeat + number) % len(arms)
                for arm in (*arms[first:], *arms[:first]):
                    runs.append(decode(engine, case, arm, repeat))
                    progress.advance(task)
                if has_reference:
                    with engine.using_threads(num_cores()):
                        all_cores.append(decode(engine, case, PLAIN, repeat))
                    progress.advance(task)
    return runs, all_cores


def decode(engine: Engine, case: Case, arm: Arm, repeat: int) -> Run:
    """One counted decode."""
    [completion] = engine.generate([case.token_ids], [case.params], mode=arm.mode, policy=arm.policy)
    return Run(arm, repeat, case, completion.token_ids, completion.request_stats)


def warm_up(engine: Engine, case: Case, arms: Sequence[Arm]) -> None:
    """Compile, load the drafter and start the server outside the measurement."""
    params = dataclasses.replace(case.params, max_new_tokens=min(WARM_UP_TOKENS, case.params.max_new_tokens))
    for arm in arms:
        engine.generate([case.token_ids], [params], mode=arm.mode, policy=arm.policy)


def describe(engine: Engine, config: EngineConfig) -> dict[str, Any]:
    """The circumstances that a speed belongs to."""
    return {
        "weights_sha256": weights_sha256(engine),
        "dtype": str(engine.target.model.model.dtype).removeprefix("torch."),
        "threads": engine.num_threads,
        "cores": num_cores(),
        "processor": processor_name(),
        "machine": platform.platform(),
        "versions": {"python": platform.python_version(), **dict(package_versions(PACKAGES))},
        "engine": dataclasses.asdict(config),
        "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def weights_sha256(engine: Engine) -> dict[str, str]:
    """Hash of the weights of target, drafter and predictor: whose figures these are, whatever the names."""
    sources = {"drafter": engine.drafter, "predictor": engine.predictor}
    hashes = {
        name: identify_target(str(local_folder(source, name))).weights_sha256
        for name, source in sources.items()
        if source is not None
    }
    return {"target": engine.target.identity.weights_sha256, **hashes}


def package_versions(names: Iterable[str]) -> Iterable[tuple[str, str | None]]:
    """Installed versions; None for a package that is not installed."""
    for name in names:
        try:
            yield name, importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            yield name, None


def print_table(report: dict[str, Any], config: EngineConfig) -> None:
    """The report for people, on stdout."""
    spec = config.speculation
    table = Table(title=f"{report['num_prompts']} prompts x {report['repeats']} repeats, {report['dtype']}")
    for name in (
        "mode",
        "T",
        "tokens/s",
        "vs plain (95 %)",
        "tokens/verify",
        "hit rate",
        "waiting",
        "same as plain",
    ):
        table.add_column(name, justify="left" if name == "mode" else "right", no_wrap=True)
    for result in report["results"]:
        table.add_row(*table_row(result, report))
    for result in report["plain_all_cores"]:
        table.add_row(*all_cores_row(result))
    terminal = Console()
    # a pipe has no width: never cut columns there
    (terminal if terminal.is_terminal else Console(width=120)).print(table)
    budget = spec.budget or "until the outcome arrives"
    print(
        f"block: {spec.block} of {spec.block_nodes} guesses; F = {spec.fan_out}; B = {budget}; k = {spec.k};"
        f" lockstep {spec.lockstep or 'off'}; on miss: {spec.on_miss}; seed {report['seed']};"
        f" {report['threads']} of {report['cores']} cores for the target; {report['processor']}"
    )
    for arm, outputs in report["identical_outputs"].items():
        for divergence in outputs["first_divergences"]:
            print(f"{arm} differs: {json.dumps(divergence)}")


def table_row(result: dict[str, Any], report: dict[str, Any]) -> list[str]:
    """One result as the cells of the table."""
    arm, temperature, stats = result["arm"], result["temperature"], result["stats"]
    ratio = next((r for r in report["ratios"].get(arm, []) if r["temperature"] == temperature), None)
    outputs = report["identical_outputs"].get(arm)
    num_prompts = report["num_prompts"]
    differing = (
        [d for d in outputs["first_divergences"] if d["temperature"] == temperature] if outputs else []
    )
    low, high = ratio["interval"] if ratio else (0.0, 0.0)
    return [
        arm,
        f"{temperature:g}",
        f"{stats['tokens_per_second'] or 0:.1f}",
        f"{ratio['ratio']:.2f} ({low:.2f} to {high:.2f})" if ratio else "-",
        "-" if stats["tokens_per_verify"] is None else f"{stats['tokens_per_verify']:.2f}",
        "-" if stats["hit_rate"] is None else f"{stats['hit_rate']:.2f}",
        f"{stats['seconds_waiting_for_draft']:.1f} s",
        f"{num_prompts - len(differing)} of {num_prompts}" if outputs else "-",
    ]


def all_cores_row(result: dict[str, Any]) -> list[str]:
    """Plain decoding on all cores as the cells of the table."""
    low, high = result["interval"]
    speed, ratio = f"{result['tokens_per_second']:.1f}", f"{result['ratio']:.2f} ({low:.2f} to {high:.2f})"
    return [
        f"plain, {result['threads']} threads",
        f"{result['temperature']:g}",
        speed,
        ratio,
        "1.00",
        "-",
        "-",
        "-",
    ]


if __name__ == "__main__":
    sys.exit(main())
