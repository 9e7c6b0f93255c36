"""Flags that `generate` and `bench` share, derived from the settings that they fill.

A flag that is not given leaves the value of `--engine-config`, else the default.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import typing
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from foredraft.infer.config import UserError, nearest, read_config
from foredraft.infer.params import EngineConfig, ExpandPolicy, Mode, SpeculationParams

if TYPE_CHECKING:
    from foredraft.infer.engine import Engine

SAMPLING_FLAGS = {
    "max_new_tokens": "tokens of a completion at most",
    "temperature": "0: the most likely token",
    "top_k": "keep the K most likely tokens; 0: off",
    "top_p": "keep the most likely tokens of total probability P",
    "min_p": "drop tokens less likely than P times the most likely one",
    "repetition_penalty": "divide the scores of tokens that have occurred; 1: off",
    "presence_penalty": "subtract from the scores of tokens that the answer has; 0: off",
    "frequency_penalty": "the same, times how often it has them; 0: off",
    "seed": "line i of a prompt file gets seed + i; not given: a random one, which is printed",
}
SPECULATION_FLAGS = {
    "k": "drafter forwards a round (sync; async with --on-miss wait); depth of a chain",
    "block": "shape of a block of guesses",
    "block_nodes": "guesses in a block",
    "fan_out": "children kept of an expanded node",
    "verification": "coupled: the target's own tokens decide; rejection: exact in law only, chains only",
    "saguaro": "rejection: the drafter scales its fan_out best tokens by it, for more hits; 1: off",
    "budget": "nodes expanded during one verification; 0: until the outcome arrives",
    "policy": "what a guess is believed; auto: predictor where one is given, else confidence",
    "on_miss": "when the draft server has nothing ready: wait for it, look the text up, or decode plainly",
    "draft_timeout_ms": "bound of a wait for the draft server; 0: twice the median verify time",
    "lockstep": "exactly N expansions a round instead of K, then the answer (deterministic); 0: free running",
}
ENGINE_FLAGS = {
    "dtype": "of the target and the drafter",
    "device": "of the target",
    "draft_device": "of the drafter",
    "threads": "of the target; 0: all cores but the draft server's",
    "draft_threads": "of the draft server",
    "step": "replay a captured step (CUDA graph) or launch it anew; auto: graph on a GPU",
    "revision": "of the target on the Hub",
    "allow_target_mismatch": "use a drafter that was trained for another target of the same tokenizer",
    "trust_remote_code": "run model code from the Hub",
}
ASYNC_ONLY = ("budget", "on_miss", "draft_timeout_ms")
DRAFTED_ONLY = (
    *("drafter", "predictor", "record", "k", "block", "block_nodes", "fan_out", "policy", "lockstep"),
    *("verification", "saguaro"),
    *("draft_device", "allow_target_mismatch"),
)
SAMPLED_ONLY = ("top_k", "top_p", "min_p", "saguaro")
COUPLED_ONLY = ("predictor", "policy")  # drawn guesses are all believed alike


class FlagParser(argparse.ArgumentParser):
    """argparse whose mistakes are UserErrors and whose unknown options name the nearest one."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message} (`{self.prog} --help` lists the options)")

    def read(self, argv: Sequence[str]) -> argparse.Namespace:
        """Parse `argv`. Raises UserError for anything that is not understood."""
        args, unknown = self.parse_known_args(argv)
        if unknown:
            name = unknown[0].partition("=")[0]
            raise UserError(f"unknown option {name}{nearest(name, self._option_string_actions)}")
        return args


def build_parser(command: str, about: str) -> FlagParser:
    """A parser with the flags that both commands have."""
    parser = FlagParser(prog=f"foredraft {command}", description=about, allow_abbrev=False)
    parser.add_argument("--target", required=True, metavar="T", help="Hub id, local folder or .gguf file")
    parser.add_argument(
        "--drafter",
        metavar="D",
        default=argparse.SUPPRESS,
        help="drafter: folder or Hub id (ID@BRANCH); any causal LM with the target's tokenizer will do",
    )
    parser.add_argument(
        "--predictor",
        metavar="P",
        default=argparse.SUPPRESS,
        help="the drafter's outcome predictor, likewise: orders its guesses, chooses the size of blocks",
    )
    parser.add_argument(
        "--record", metavar="FOLDER", default=argparse.SUPPRESS, help="write outcome records there"
    )
    parser.add_argument("--engine-config", metavar="FILE", help="engine settings (YAML); flags override them")
    add_flags(parser.add_argument_group("models"), EngineConfig, ENGINE_FLAGS)
    add_flags(parser.add_argument_group("speculation"), SpeculationParams, SPECULATION_FLAGS)
    return parser


def add_flags(group: Any, cls: type[Any], flags: Mapping[str, str], skip: Collection[str] = ()) -> None:
    """One flag a field of the dataclass `cls`; its type, choices and shown default are the field's."""
    hints = typing.get_type_hints(cls)
    fields = {item.name: item for item in dataclasses.fields(cls)}
    for name in (name for name in flags if name not in skip):
        default = fields[name].default
        about = flags[name] + ("" if default is None or default is False else f" (default: {default})")
        group.add_argument(
            "--" + name.replace("_", "-"),
            default=argparse.SUPPRESS,
            help=about,
            **_value_options(hints[name]),
        )


def _value_options(hint: Any) -> dict[str, Any]:
    """How argparse reads a value of a type: bool, Literal, int, float, str, or one of them or None."""
    if hint is bool:
        return {"action": "store_true"}
    if typing.get_origin(hint) is typing.Literal:
        return {"choices": typing.get_args(hint)}
    kind = next(kind for kind in (int, float, str) if kind in (hint, *typing.get_args(hint)))
    return {"type": kind, "metavar": {int: "N", float: "X", str: "S"}[kind]}


def given(args: argparse.Namespace, names: Collection[str]) -> dict[str, Any]:
    """The flags among `names` that stand on the command line."""
    return {name: value for name, value in vars(args).items() if name in names}


def engine_config(args: argparse.Namespace) -> EngineConfig:
    """Defaults, then `--engine-config`, then flags. Raises ValueError for values out of range."""
    base = EngineConfig()
    if args.engine_config:
        base, _ = read_config(EngineConfig, ["--config", args.engine_config], "engine-config")
    speculation = dataclasses.replace(base.speculation, **given(args, SPECULATION_FLAGS))
    if speculation.policy == "auto" and speculation.verification == "coupled":
        policy: ExpandPolicy = "predictor" if "predictor" in args else "confidence"
        speculation = dataclasses.replace(speculation, policy=policy)
    return dataclasses.replace(base, **given(args, ENGINE_FLAGS), speculation=speculation)


def check_modes(args: argparse.Namespace, modes: Collection[str]) -> None:
    """Raise UserError if a mode needs a drafter and there is none."""
    drafted = [mode for mode in modes if mode != "plain"]
    if drafted and "drafter" not in args:
        raise UserError(
            f"mode {drafted[0]} needs --drafter FOLDER; without a drafter there is only mode plain"
        )


def check_policies(args: argparse.Namespace, policies: Collection[str | None]) -> None:
    """Raise UserError if the policy `predictor` is asked for without a predictor."""
    if "predictor" in policies and "predictor" not in args:
        raise UserError(
            "policy predictor needs --predictor FOLDER; make one with `foredraft train-predictor`"
        )


def check_writable(flag: str, file: str | None) -> None:
    """Raise UserError before the work rather than after it if a result could not be written."""
    if file is not None and (not Path(file).parent.is_dir() or Path(file).is_dir()):
        raise UserError(f"{flag} {file}: expected a file in an existing folder")


def unused_flags(
    args: argparse.Namespace, modes: Collection[str], config: EngineConfig, temperatures: Collection[float]
) -> list[str]:
    """One sentence for each flag on the command line that cannot change anything in this run."""
    spec = config.speculation
    waits = spec.on_miss == "wait" or "sync" in modes
    cases = [
        (DRAFTED_ONLY, set(modes) == {"plain"}, "mode plain"),
        (ASYNC_ONLY, "async" not in modes, f"mode {', '.join(modes)}"),
        (SAMPLED_ONLY, not any(temperatures), "temperature 0"),
        (COUPLED_ONLY, spec.verification == "rejection", "--verification rejection"),
        (("draft_timeout_ms",), spec.on_miss != "wait" and not spec.lockstep, f"--on-miss {spec.on_miss}"),
        (("k", "budget"), spec.lockstep > 0, "--lockstep"),
        (("k",), not waits and spec.block == "tree", f"a tree, mode async and --on-miss {spec.on_miss}"),
    ]
    found: dict[str, str] = {}
    for names, is_unused, reason in cases:
        for name in given(args, names) if is_unused else ():
            found.setdefault(name, f"--{name.replace('_', '-')} has no effect with {reason}")
    return list(found.values())


def warn(message: str) -> None:
    """Tell the user on stderr."""
    print(f"foredraft: warning: {message}", file=sys.stderr)


def load_engine(
    args: argparse.Namespace, config: EngineConfig, mode: Mode, trace: str | None = None
) -> Engine:
    """Load target and drafter."""
    # torch and transformers take seconds to import: mistakes in flags and prompt files are told before
    from foredraft.infer.engine import Engine

    record = getattr(args, "record", None)
    return Engine.from_pretrained(
        args.target,
        getattr(args, "drafter", None),
        getattr(args, "predictor", None),
        mode=mode,
        config=config,
        record=Path(record) if record else None,
        trace=Path(trace) if trace else None,
    )
