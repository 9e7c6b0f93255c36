"""The whole path on one small model: unpack it, log its answers, distil a drafter, measure the three modes.

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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parent.parent
MODEL = "models/SmolLM2-135M-Instruct"
RUN = "runs/demo"
PROMPTS = "recipes/demo_prompts.jsonl"
HELDOUT = f"{RUN}/heldout.jsonl"
DRAFTER = f"{RUN}/drafter"
BENCH = f"{RUN}/bench.json"
BENCH_SETTINGS = {
    "--limit": "12",
    "--max-new-tokens": "48",
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
    models = ("--target", MODEL, "--drafter", DRAFTER)
    bench = ("--prompts", HELDOUT, "--modes", "plain,sync,async", "--temperature", "0", "1", "--out", BENCH)
    cli = (sys.executable, "-m", "foredraft.infer.cli")
    log_recipe, drafter_recipe = "recipes/demo_log.yaml", "recipes/demo_drafter.yaml"
    return [
        Stage(
            "model", (sys.executable, "scripts/fetch_smollm2.py", "--out", MODEL), (), f"{MODEL}/source.json"
        ),
        Stage(
            "log", (*cli, "log", "--config", log_recipe), (log_recipe, PROMPTS), f"{RUN}/log/manifest.json"
        ),
        Stage(
            "drafter",
            (*cli, "train-drafter", "--config", drafter_recipe),
            (drafter_recipe,),
            f"{DRAFTER}/foredraft.json",
        ),
        Stage("bench", (*cli, "bench", *models, *bench, *bench_flags), (HELDOUT,), BENCH),
    ]


def say(message: str) -> None:
    """Report progress."""
    print(message, file=sys.stderr, flush=True)


def write_heldout_prompts() -> int:
    """Write the prompts that the drafter never saw to a file of their own; returns their number."""
    lines = Path(PROMPTS).read_text(encoding="utf-8").splitlines()
    heldout = [line for line in lines if json.loads(line)["split"] == "heldout"]
    Path(HELDOUT).write_text("\n".join(heldout) + "\n", encoding="utf-8")
    return len(heldout)


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


def table_row(result: dict[str, Any], report: dict[str, Any]) -> str:
    """One mode at one temperature as a row of a Markdown table."""
    mode, temperature, stats = result["mode"], result["temperature"], result["stats"]
    speed_up, same = "1.00", "-"
    if mode in report["ratios"]:
        ratio = next(r for r in report["ratios"][mode] if r["temperature"] == temperature)
        speed_up = f"{ratio['ratio']:.2f} ({ratio['interval'][0]:.2f} to {ratio['interval'][1]:.2f})"
        divergences = report["identical_outputs"][mode]["first_divergences"]
        num_different = sum(d["temperature"] == temperature for d in divergences)
        same = f"{report['num_prompts'] - num_different} of {report['num_prompts']}"
    cells = [mode, f"{temperature:g}", number(stats["tokens_per_second"], 1), speed_up]
    cells += [number(stats["tokens_per_verify"]), number(stats["hit_rate"]), same]
    return f"| {' | '.join(cells)} |"


def all_cores_row(result: dict[str, Any]) -> str:
    """Plain decoding on all cores, the drafter's included, as a row of a Markdown table."""
    low, high = result["interval"]
    cells = [f"plain, {result['threads']} threads", f"{result['temperature']:g}"]
    cells += [number(result["tokens_per_second"], 1), f"{result['ratio']:.2f} ({low:.2f} to {high:.2f})"]
    return f"| {' | '.join([*cells, '1.00', '-', '-'])} |"


def circumstances(report: dict[str, Any], card: dict[str, Any], record: dict[str, Any]) -> str:
    """What the figures belong to: block, budget, prompts, machine, training, time."""
    spec, max_tokens = report["engine"]["speculation"], report["sampling"]["max_new_tokens"]
    seconds = ", ".join(f"{name} {stage['seconds']:.0f} s" for name, stage in record.items())
    return (
        f"Block: {spec['block']} of {spec['block_nodes']} guesses; F = {spec['fan_out']}; "
        f"budget: {spec['budget'] or 'until the outcome arrives'}; k = {spec['k']}; "
        f"on a miss: {spec['on_miss']}.\n"
        f"{report['num_prompts']} held-out prompts, at most {max_tokens} new tokens each; "
        f"{report['dtype']}, {report['cores']} cores, {report['threads']} of them for the target.\n"
        f"Drafter trained on {card['training']['tokens']:,} response tokens. Stages: {seconds}."
    )


def table(report: dict[str, Any], card: dict[str, Any], record: dict[str, Any]) -> str:
    """The measured table in Markdown."""
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
    rows += [all_cores_row(result) for result in report["plain_all_cores"]]
    header = [f"| {' | '.join(names)} |", "|---" * len(names) + "|"]
    return "\n".join([*header, *rows, "", circumstances(report, card, record)])


def main() -> int:
    """Returns the exit status: 0, that of the stage that failed, or 130 when interrupted."""
    (REPOSITORY / RUN).mkdir(parents=True, exist_ok=True)
    write_heldout_prompts()
    try:
        record = run_stages(Path(RUN, "stages.json"))
    except subprocess.CalledProcessError as error:
        say("the demo stopped; run it again to go on where it stopped")
        return error.returncode if error.returncode > 0 else 1
    except KeyboardInterrupt:
        say("interrupted; run it again to go on where it stopped")
        return 130
    report = json.loads(Path(BENCH).read_text(encoding="utf-8"))
    card = json.loads(Path(DRAFTER, "foredraft.json").read_text(encoding="utf-8"))
    text = table(report, card, record)
    Path(RUN, "table.md").write_text(text + "\n", encoding="utf-8")
    print(text)
    return 0


if __name__ == "__main__":
    os.chdir(REPOSITORY)
    sys.exit(main())
