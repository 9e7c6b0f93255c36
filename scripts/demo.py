"""The whole path on one small model: log its answers, distil a drafter, learn when to trust it, measure.

Each stage is a command of its own, as a user would run it. A stage whose command, inputs and preceding stages
are unchanged since its last success is not run again; remove runs/demo to start afresh. Results lie in
runs/demo; the table goes to standard output, everything else to standard error.
"""

import hashlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parent.parent
CLI = (sys.executable, "-m", "foredraft.infer.cli")
MODEL = "models/SmolLM2-135M-Instruct"
RUN = "runs/demo"
PROMPTS = "recipes/demo_prompts.jsonl"
HELDOUT = f"{RUN}/heldout.jsonl"
DRAFTER = f"{RUN}/drafter"
PREDICTOR = f"{RUN}/predictor"
BENCH = f"{RUN}/bench.json"
REPORTED_BUDGET = "8"  # prepared outcomes of the hit rates
BENCH_SETTINGS = {
    "--modes": "plain,sync,async:confidence,async:predictor",
    "--limit": "8",
    "--max-new-tokens": "32",
    "--repeats": "1",
    "--seed": "0",
    "--block": "tree",
    "--block-nodes": "7",
    "--fan-out": "16",
    "--k": "4",
}


@dataclass(frozen=True, slots=True)
class Stage:
    """One command, the files it reads besides earlier results, and the file that proves its success."""

    name: str
    command: tuple[str, ...]
    inputs: tuple[str, ...]
    result: str


def stages() -> list[Stage]:
    """The demo in order."""
    bench_flags = [part for flag in BENCH_SETTINGS.items() for part in flag]
    models = ("--target", MODEL, "--drafter", DRAFTER, "--predictor", PREDICTOR)
    bench = ("--prompts", HELDOUT, "--temperature", "0", "1", "--out", BENCH)
    fetch = (sys.executable, "scripts/fetch_smollm2.py", "--out", MODEL)
    return [
        Stage("model", fetch, (), f"{MODEL}/source.json"),
        recipe_stage("log", "log", f"{RUN}/log/manifest.json", PROMPTS),
        recipe_stage("drafter", "train-drafter", f"{DRAFTER}/foredraft.json"),
        recipe_stage("outcomes", "outcomes", f"{RUN}/outcomes/manifest.json"),
        recipe_stage("predictor", "train-predictor", f"{PREDICTOR}/config.json"),
        Stage("bench", (*CLI, "bench", *models, *bench, *bench_flags), (HELDOUT,), BENCH),
        recipe_stage("export", "export", f"{RUN}/export/drafter/README.md"),
    ]


def recipe_stage(name: str, command: str, result: str, *inputs: str) -> Stage:
    """A stage whose command takes the demo's recipe of that name."""
    recipe = f"recipes/demo_{name}.yaml"
    return Stage(name, (*CLI, command, "--config", recipe), (recipe, *inputs), result)


def say(message: str) -> None:
    """Report progress."""
    print(message, file=sys.stderr, flush=True)


def write_heldout_prompts() -> int:
    """Write the prompts that no stage learns from to a file of their own; returns their number.

    The categories take turns, so that any beginning of the file has all of them alike.
    """
    heldout: dict[str, list[str]] = {}
    for line in Path(PROMPTS).read_text(encoding="utf-8").splitlines():
        prompt = json.loads(line)
        if prompt["split"] == "heldout":
            heldout.setdefault(prompt["category"], []).append(line)
    turns = [line for turn in zip_longest(*heldout.values()) for line in turn if line is not None]
    Path(HELDOUT).write_text("\n".join(turns) + "\n", encoding="utf-8")
    return len(turns)


def key_of(stage: Stage, previous: str) -> str:
    """Hash of what decides a stage's result: command, inputs, and the key of the stage before it."""
    digest = hashlib.sha256(previous.encode())
    # the interpreter's own path decides nothing
    digest.update("\0".join(stage.command[1:]).encode())
    for path in stage.inputs:
        digest.update(hashlib.sha256(Path(path).read_bytes()).digest())
    return digest.hexdigest()


def run_stages(record_path: Path) -> dict[str, Any]:
    """Run what is missing; returns {stage: {"key", "seconds"}}, seconds of the run that made the result.

    Raises:
        subprocess.CalledProcessError: a stage failed; it has said why on standard error.
    """
    record = json.loads(record_path.read_text()) if record_path.exists() else {}
    key = ""
    for stage in stages():
        key = key_of(stage, key)
        if record.get(stage.name, {}).get("key") == key and Path(stage.result).exists():
            say(f"[{stage.name}] reused from {Path(stage.result).parent}")
            continue
        say(f"[{stage.name}] {' '.join(stage.command[1:])}")
        started = time.monotonic()
        subprocess.run(stage.command, stdout=sys.stderr, check=True)
        seconds = round(time.monotonic() - started, 1)
        record[stage.name] = {"key": key, "seconds": seconds}
        record_path.write_text(json.dumps(record, indent=2) + "\n")
        say(f"[{stage.name}] done in {seconds:.0f} s")
    return record


def number(value: float | None, digits: int = 2) -> str:
    """A figure for the table, a dash where there is none."""
    return "-" if value is None else f"{value:.{digits}f}"


def with_interval(value: float, interval: Sequence[float], form: str = ".2f") -> str:
    """A figure with the ends of its interval."""
    low, high = interval
    return f"{value:{form}} ({low:{form}} to {high:{form}})"


def table_row(result: dict[str, Any], report: dict[str, Any]) -> list[str]:
    """One arm at one temperature as cells."""
    arm, temperature, stats = result["arm"], result["temperature"], result["stats"]
    speed_up, same = "1.00", "-"
    if arm in report["ratios"]:
        ratio = next(r for r in report["ratios"][arm] if r["temperature"] == temperature)
        speed_up = with_interval(ratio["ratio"], ratio["interval"])
        divergences = report["identical_outputs"][arm]["first_divergences"]
        num_different = sum(d["temperature"] == temperature for d in divergences)
        same = f"{report['num_prompts'] - num_different} of {report['num_prompts']}"
    cells = [arm, f"{temperature:g}", number(stats["tokens_per_second"], 1), speed_up]
    return [*cells, number(stats["tokens_per_verify"]), number(stats["hit_rate"]), same]


def all_cores_row(result: dict[str, Any]) -> list[str]:
    """Plain decoding on all cores, the drafter's included, as cells."""
    speed_up = with_interval(result["ratio"], result["interval"])
    cells = [f"plain, {result['threads']} threads", f"{result['temperature']:g}"]
    return [*cells, number(result["tokens_per_second"], 1), speed_up, "1.00", "-", "-"]


def circumstances(report: dict[str, Any], card: dict[str, Any], record: dict[str, Any]) -> str:
    """What the figures belong to: block, budget, prompts, machine, training, time."""
    spec, max_tokens = report["engine"]["speculation"], report["sampling"]["max_new_tokens"]
    seconds = ", ".join(f"{name} {stage['seconds']:.0f} s" for name, stage in record.items())
    return (
        f"Block: {spec['block']} of {spec['block_nodes']} guesses; F = {spec['fan_out']}; "
        f"budget: {spec['budget'] or 'until the outcome arrives'}; k = {spec['k']}; "
        f"on a miss: {spec['on_miss']}.\n"
        f"{report['num_prompts']} held-out prompts, at most {max_tokens} new tokens each; "
        f"{report['dtype']}, {report['processor']}, {report['cores']} cores, {report['threads']} of them "
        "for the target.\n"
        f"Drafter trained on {card['training']['tokens']:,} response tokens. Stages: {seconds}."
    )


def bench_table(report: dict[str, Any]) -> str:
    """Speed and outputs of the modes."""
    names = (
        "mode",
        "T",
        "tokens/s",
        "against plain (95 %)",
        "tokens per verify",
        "hit rate",
        "same as plain",
    )
    rows = [table_row(result, report) for result in report["results"]]
    return markdown(names, [*rows, *map(all_cores_row, report["plain_all_cores"])])


def predictor_table(calibration: dict[str, Any]) -> str:
    """What the outcome predictor is worth on held-out prompts, whatever the machine's speed."""
    heldout, records, prompts = calibration["heldout"], calibration["records"], calibration["prompts"]
    policies = ("uniform", "geometric", "confidence", "predictor", "oracle")
    rows = []
    for temperature, by_budget in heldout["hit_rate"].items():
        rates = [number(by_budget[REPORTED_BUDGET][policy], 3) for policy in policies]
        value, *interval = heldout["gain"][temperature][REPORTED_BUDGET]["confidence"]
        rows.append([temperature, *rates, with_interval(value, interval, "+.3f")])
    errors = (
        f"{name} {value:.3f} (confidence {heldout['ece_confidence'][name]:.3f})"
        for name, value in heldout["ece"].items()
    )
    losses = (f"{name} {value:.3f}" for name, value in heldout["log_loss"].items())
    lines = (
        f"Hit rate with {REPORTED_BUDGET} prepared outcomes, chain of {heldout['k']} guesses, "
        f"F = {heldout['fan_out']}, by policy ({heldout['rounds']:,} rounds of {heldout['prompts']} held-out "
        "prompts):",
        "",
        markdown(("T", *policies, "predictor minus confidence (95 %)"), rows),
        "",
        f"Calibration error of S_a, the probability that a guesses are right: {', '.join(errors)}.",
        f"Log loss in nats: {', '.join(losses)}.",
        f"Predictor fitted to {records['fit']:,} records of {prompts['fit']} prompts, calibrated on "
        f"{prompts['calibration']} others; the drafter saw none of them.",
    )
    return "\n".join(lines)


def markdown(names: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    return "\n".join(f"| {' | '.join(row)} |" for row in (names, ["---"] * len(names), *rows))


def main() -> int:
    """Returns the exit status: 0, that of the stage that failed, or 130 when interrupted."""
    (REPOSITORY / RUN).mkdir(parents=True, exist_ok=True)
    write_heldout_prompts()
    try:
        record = run_stages(Path(RUN, "stages.json"))
    except subprocess.CalledProcessError as error:
        say(f"the demo stopped; run it again to go on where it stopped, or remove {RUN} to start afresh")
        return error.returncode if error.returncode > 0 else 1
    except KeyboardInterrupt:
        say("interrupted; run it again to go on where it stopped")
        return 130
    report, drafter, predictor = (
        json.loads(Path(path).read_text(encoding="utf-8"))
        for path in (BENCH, f"{DRAFTER}/foredraft.json", f"{PREDICTOR}/config.json")
    )
    parts = (
        bench_table(report),
        circumstances(report, drafter, record),
        predictor_table(predictor["calibration"]),
    )
    text = "\n\n".join(parts)
    Path(RUN, "table.md").write_text(text + "\n", encoding="utf-8")
    print(text)
    return 0


if __name__ == "__main__":
    os.chdir(REPOSITORY)
    sys.exit(main())
