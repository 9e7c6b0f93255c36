"""The process of the draft server; it is exec'ed, never forked, and says ready once the drafter is warm.

python -m foredraft.infer.draft_server --endpoint ipc:///run/draft --drafter FOLDER
"""

from __future__ import annotations

import argparse
import gc
import logging
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from foredraft.infer import messages
from foredraft.infer.draft_loop import DraftLoop, ServerOptions
from foredraft.infer.draft_worker import Drafting
from foredraft.infer.drafter_card import family_of, read_drafter_card
from foredraft.infer.hub import local_folder
from foredraft.infer.identity import check_tokenizer, tokenizer_sha256
from foredraft.infer.params import EngineConfig
from foredraft.infer.tracing import Trace

SWITCH_SECONDS = 1e-4  # how long the worker may keep the interpreter from the I/O thread
USER_ERROR = 2  # exit code: the drafter cannot be served, and starting again will not help

Build = Callable[[argparse.Namespace], tuple[Drafting, messages.Ready]]


def load_speculator(arguments: argparse.Namespace) -> tuple[Drafting, messages.Ready]:
    """Load and warm the drafter that the command line names.

    Raises:
        ValueError: no drafter there, or one with another tokenizer than the target's.
    """
    config = msgspec.json.decode(arguments.engine_config, type=EngineConfig)
    # OpenMP reads this once, when torch is imported.
    os.environ["OMP_NUM_THREADS"] = str(config.draft_threads)
    card = read_drafter_card(arguments.drafter)
    found_sha256 = card.tokenizer_sha256 if card else ""
    if arguments.target_tokenizer_sha256:
        if card is None:
            from foredraft.infer.target import load_tokenizer

            folder = str(local_folder(arguments.drafter))
            found_sha256 = tokenizer_sha256(load_tokenizer(folder, config.of_drafter))
        check_tokenizer(found_sha256, arguments.target_tokenizer_sha256, "the drafter", arguments.target)

    import torch

    from foredraft.infer.speculator import Speculator

    torch.set_num_threads(config.draft_threads)
    speculator = Speculator.load(
        arguments.drafter, config, predictor=arguments.predictor, record=arguments.record
    )
    drafter = speculator.drafter
    speculator.warm_up()
    return speculator, messages.Ready(
        family=family_of(card),
        max_depth=drafter.max_depth,
        max_positions=drafter.max_positions,
        tokenizer_sha256=found_sha256,
    )


def run_server(build: Build, argv: Sequence[str] | None = None) -> int:
    """Build what is served, serve it, and return the exit code. Ends by SIGTERM or with its parent.

    Args:
        build: gives what is served; ValueError and OSError from it are user errors.
        argv: flags; None: those of the process.
    """
    started = time.monotonic()
    arguments = _parser().parse_args(argv)
    logging.basicConfig(level=logging.WARNING, format="draft server: %(message)s")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    sys.setswitchinterval(SWITCH_SECONDS)
    options = ServerOptions(
        lease_seconds=arguments.lease_seconds,
        parent_pid=arguments.parent_pid,
        slow_factor=arguments.slow_factor,
        trace_part=arguments.trace,
    )
    trace = Trace("draft-server", is_on=arguments.trace is not None)
    try:
        speculator, ready = build(arguments)
    except (ValueError, OSError, msgspec.MsgspecError) as error:
        print(f"error: {error}", file=sys.stderr)
        return USER_ERROR
    # What is loaded stays: a collection that walks it would stop the I/O thread for 100 ms.
    gc.collect()
    gc.freeze()
    ready = msgspec.structs.replace(ready, seconds_loading=time.monotonic() - started)
    try:
        DraftLoop(speculator, ready, arguments.endpoint, options, trace).serve()
        # It returns when the engine has gone, which so could not clean up itself.
        if arguments.scratch is not None:
            shutil.rmtree(arguments.scratch, ignore_errors=True)
    finally:
        speculator.finish()
        if arguments.trace is not None and arguments.trace.parent.exists():
            trace.flush(arguments.trace)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="foredraft.infer.draft_server", description=__doc__)
    parser.add_argument("--endpoint", required=True, help="ipc:// or tcp:// address to bind")
    parser.add_argument("--drafter", default="", help="folder of the drafter")
    parser.add_argument("--predictor", help="folder of its outcome predictor")
    parser.add_argument("--record", type=Path, help="folder that gets outcome records")
    parser.add_argument("--engine-config", default="{}", help="EngineConfig as JSON")
    parser.add_argument("--target", default="the target", help="name of the target in messages")
    parser.add_argument(
        "--target-tokenizer-sha256", default="", help="refuse a drafter with another tokenizer"
    )
    parser.add_argument("--scratch", type=Path, help="folder to remove when the parent has gone")
    parser.add_argument("--parent-pid", type=int, default=0, help="end with this process; 0: serve on")
    parser.add_argument(
        "--lease-seconds", type=float, default=60.0, help="close a request silent for so long"
    )
    parser.add_argument("--trace", type=Path, help="append trace events to this file")
    # For tests: pretend a drafter that is this much slower.
    parser.add_argument("--slow-factor", type=float, default=1.0, help=argparse.SUPPRESS)
    return parser


def run_process(build: Build) -> None:
    """Run the server as this process; leave without waiting for the worker's forward, which may be long."""
    code = 1
    try:
        code = run_server(build)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    except BaseException:
        logging.exception("ended by an error")
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    run_process(load_speculator)
