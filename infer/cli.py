"""`foredraft COMMAND ...`: the one entry point. Only the module of the chosen command is imported."""

from __future__ import annotations

import importlib
import importlib.metadata
import sys
from collections.abc import Sequence

from foredraft.infer.config import UserError, nearest, run_command

# command: (module with `main(argv) -> exit code`, what it does); strings, as infer/ never imports train/
COMMANDS = {
    "synthesise": ("foredraft.train.synthesise", "prompts drawn from the target itself"),
    "log": ("foredraft.train.collect", "run the target over prompts, write the target log"),
    "inspect-log": ("foredraft.train.inspect_log", "what a target log holds, and what of it is trained"),
    "train-drafter": ("foredraft.train.drafter", "distil a drafter from the log"),
    "on-policy": ("foredraft.train.on_policy", "the drafter's own mistakes, scored by the target"),
    "outcomes": ("foredraft.train.outcomes", "replay the drafter over the log, write outcome records"),
    "export": ("foredraft.train.export", "folders with model cards; to the Hub with --push-to-hub"),
    "train-predictor": ("foredraft.train.predictor", "fit the outcome predictor to the records"),
    "generate": ("foredraft.infer.generate", "decode prompts: plain, synchronous or asynchronous"),
    "bench": ("foredraft.infer.bench", "measure the modes against each other on a prompt file"),
}


def version() -> str:
    """The installed version, or `unknown` when run from a tree that is not installed."""
    try:
        return importlib.metadata.version("foredraft")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def usage() -> str:
    """The help text: one line a command."""
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {about}" for name, (_, about) in COMMANDS.items()]
    return "\n".join(
        [
            "usage: foredraft COMMAND [options]",
            "",
            *lines,
            "",
            "foredraft COMMAND --help tells more; foredraft --version",
        ]
    )


def dispatch(argv: Sequence[str]) -> int:
    """Run the command that `argv` names; returns its exit code.

    Raises:
        UserError: no command, or an unknown one (names the nearest).
    """
    command, *rest = argv or ["--help"]
    if command in ("-h", "--help", "help"):
        print(usage())
        return 0
    if command in ("-V", "--version"):
        print(f"foredraft {version()}")
        return 0
    if command not in COMMANDS:
        raise UserError(
            f"unknown command {command!r}{nearest(command, COMMANDS) or '; commands: ' + ', '.join(COMMANDS)}"
        )
    return importlib.import_module(COMMANDS[command][0]).main(rest)


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of the console script."""
    return run_command(lambda: dispatch(sys.argv[1:] if argv is None else argv))


if __name__ == "__main__":
    sys.exit(main())
