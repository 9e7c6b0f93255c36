"""The draft server answers at once, whatever the drafter does, and outlives every bad message and bad job."""

import os
import runpy
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq

from foredraft.infer import messages
from foredraft.infer.draft_loop import DraftLoop, ServerOptions
from foredraft.infer.params import SamplingParams, SpeculationParams
from foredraft.infer.tracing import Trace, summarise

TABLE_SERVER = Path(__file__).with_name("table_server.py")
TABLE = runpy.run_path(str(TABLE_SERVER))
TableSpeculator, best, POISON = TABLE["TableSpeculator"], TABLE["best"], TABLE["POISON"]
PROMPT = [3, 1, 4]


class Peer:
    """An engine's socket, without its logic."""

    def __init__(self, context: zmq.Context, endpoint: str) -> None:
        self.socket = context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.RECONNECT_IVL, 5)
        self.socket.connect(endpoint)
        self.ready: messages.Ready | None = None

    def send(self, message: messages.Message) -> None:
        self.socket.send(messages.encode(message))

    def receive(self, timeout: float = 30.0) -> messages.Message | None:
        """The next message that is not `ready`."""
        while self.socket.poll(timeout * 1000):
            message = messages.decode(self.socket.recv())
            if not isinstance(message, messages.Ready):
                return message
            self.ready = message
        return None

    def ask(self, message: messages.Message) -> messages.Message | None:
        self.send(message)
        return self.receive()

    def open(
        self, request: str = "0", tokens: list[int] = PROMPT, **settings: Any
    ) -> messages.Message | None:
        return self.ask(
            messages.Open(
                request=request,
                token_ids=tokens,
                sampling=SamplingParams(seed=1),
                max_tokens=32,
                speculation=SpeculationParams(**settings),
            )
        )

    def outcome(self, round_number: int, base: int, settled: list[int], request: str = "0") -> Any:
        return self.ask(
            messages.Outcome(request=request, round=round_number, base_position=base, settled=settled)
        )

    def stats(self, request: str = "0") -> dict[str, float]:
        answer = self.ask(messages.Stats(request=request))
        assert isinstance(answer, messages.Stats)
        return answer.values

    def wait_for(self, is_so: Callable[[dict[str, float]], bool]) -> dict[str, float]:
        """Ask for stats until they satisfy."""
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            values = self.stats()
            if is_so(values):
                return values
            time.sleep(0.01)
        raise AssertionError(f"never came: {values}")


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Peer]]:
    """Starts a server loop in a thread and returns a peer of it."""
    loops: list[tuple[DraftLoop, threading.Thread]] = []
    context = zmq.Context()

    def start_loop(speculator: Any = None, **options: Any) -> Peer:
        endpoint = f"ipc://{tmp_path}/{len(loops)}"
        settings = ServerOptions(tick_seconds=0.02, **options)
        trace = Trace("draft-server", is_on=settings.trace_part is not None)
        loop = DraftLoop(speculator or TableSpeculator(), TABLE["READY"], endpoint, settings, trace)
        thread = threading.Thread(target=loop.serve)
        thread.start()
        loops.append((loop, thread))
        return Peer(context, endpoint)

    yield start_loop
    for loop, thread in loops:
        loop.stop()
        thread.join()
        loop.close()
    context.destroy(linger=0)


def test_ready_comes_first_and_every_question_is_answered(start: Callable[..., Peer]) -> None:
    peer = start()
    assert peer.ask(messages.Ping(round=7)) == messages.Pong(round=7)
    assert peer.ready == TABLE["READY"]
    assert peer.outcome(1, 3, [5]) == messages.Unknown(request="0", round=1)


def test_hit_leaf_miss(start: Callable[..., Peer]) -> None:
    peer = start()
    opened = peer.open(block="chain", block_nodes=3, budget=2)
    assert opened == messages.Block(request="0", round=0, kind="open")
    peer.wait_for(lambda values: values.get("draft_expansions") == 2)

    first, second = best(4), best(best(4))
    hit = peer.outcome(1, 3, [first])
    assert (hit.kind, hit.ids, hit.parents) == ("hit", [second], [-1])
    assert hit.path_probs == pytest.approx([0.6])
    peer.wait_for(lambda values: values["draft_expansions"] == 4)

    leaf = peer.outcome(2, 4, [second + 1])
    assert leaf.kind == "leaf"
    miss = peer.outcome(3, 5, [best(second + 1) + 2, 60])
    assert (miss.kind, miss.round) == ("miss", 3)


@pytest.mark.parametrize(("delay", "is_ready"), [(0.002, True), (0.2, False)])
def test_a_miss_gets_one_expansion_if_that_is_quick(
    start: Callable[..., Peer], delay: float, is_ready: bool
) -> None:
    """Quick: within a small share of the time between answer and outcome, as the last expansions tell."""
    speculator = TableSpeculator(delay=delay)
    peer = start(speculator)
    peer.open(budget=3)
    peer.wait_for(lambda values: values.get("draft_expansions") == 3)
    start_time = time.monotonic()
    miss = peer.outcome(1, 3, [50])
    assert (miss.kind, miss.is_ready) == ("miss", is_ready)
    assert time.monotonic() - start_time < 0.15


def test_the_tree_keeps_growing_until_budget_or_depth(start: Callable[..., Peer]) -> None:
    peer = start()
    peer.open(budget=5)
    peer.wait_for(lambda values: values["draft_expansions"] == 5)
    time.sleep(0.05)
    assert peer.stats()["draft_expansions"] == 5
    peer.outcome(1, 3, [50])  # a new budget for the new tree
    peer.wait_for(lambda values: values["draft_expansions"] == 10)


@pytest.mark.parametrize("num_expansions", [1, 3])
def test_lockstep_expands_exactly_then_answers(start: Callable[..., Peer], num_expansions: int) -> None:
    peer = start()
    block = peer.open(block="chain", block_nodes=8, lockstep=num_expansions)
    assert (block.kind, len(block.ids)) == ("open", num_expansions)
    block = peer.outcome(1, 3, [50])
    assert (block.kind, len(block.ids)) == ("miss", num_expansions)
    time.sleep(0.05)
    assert peer.stats()["draft_expansions"] == 2 * num_expansions


def test_wait_answers_a_miss_after_k_expansions(start: Callable[..., Peer]) -> None:
    speculator = TableSpeculator(delay=0.01)
    peer = start(speculator)
    block = peer.open(block="chain", block_nodes=8, on_miss="wait", k=3)
    assert len(block.ids) >= 3
    block = peer.outcome(1, 3, [50])
    assert block.kind == "miss"
    assert 3 <= len(block.ids) <= 4  # the job that was running belongs to the old tree
    peer.wait_for(lambda values: values["draft_expansions"] >= 14)
    speculator.delay = 0.3
    start_time = time.monotonic()
    assert peer.outcome(2, 4, [best(50)]).kind == "hit"
    assert time.monotonic() - start_time < 0.3  # a hit waits for nothing


def test_waiting_is_overtaken_by_the_next_round(start: Callable[..., Peer]) -> None:
    peer = start(TableSpeculator(delay=0.05))
    peer.send(messages.Ping())
    assert peer.receive() == messages.Pong()
    peer.open(on_miss="wait", k=1)
    for round_number, base in ((1, 3), (2, 4)):
        message = messages.Outcome(request="0", round=round_number, base_position=base, settled=[50])
        peer.send(message)
    assert peer.receive().round == 2
    assert peer.receive(timeout=0.2) is None


def answer_times(peer: Peer, first_round: int) -> list[float]:
    """Seconds until each of five outcomes is answered, sent 50 ms apart; round r settles position r + 2."""
    seconds = []
    for round_number in range(first_round, first_round + 5):
        time.sleep(0.05)
        start_time = time.monotonic()
        block = peer.outcome(round_number, 2 + round_number, [50 + round_number])
        seconds.append(time.monotonic() - start_time)
        assert block.round == round_number
    return seconds


def test_an_outcome_during_a_slow_forward_is_answered_at_once(start: Callable[..., Peer]) -> None:
    speculator = TableSpeculator(delay=0.0)
    peer = start(speculator)
    peer.open(budget=3)
    peer.wait_for(lambda values: values["draft_expansions"] == 3)
    speculator.delay = 1.0
    peer.outcome(1, 3, [best(4)])  # starts a forward of 1 s; the others arrive in its midst
    latencies = answer_times(peer, first_round=2)
    assert statistics.median(latencies) < 0.05
    assert max(latencies) < 0.5
    speculator.delay = 0.0


def test_an_outcome_during_a_long_computation_is_answered_at_once(start: Callable[..., Peer]) -> None:
    import torch

    class ComputingSpeculator(TableSpeculator):  # type: ignore[misc, valid-type]
        is_heavy = False
        was_running = threading.Event()

        def work(self) -> None:
            end = time.monotonic() + 1.0
            matrix_NN = torch.randn(256, 256)
            while self.is_heavy and time.monotonic() < end:
                self.was_running.set()
                matrix_NN = torch.softmax(matrix_NN @ matrix_NN, dim=-1)

    torch.set_num_threads(1)
    speculator = ComputingSpeculator()
    peer = start(speculator)
    peer.open(budget=3)
    peer.wait_for(lambda values: values["draft_expansions"] == 3)
    speculator.is_heavy = True
    peer.outcome(1, 3, [50])
    assert speculator.was_running.wait(timeout=5)
    latencies = answer_times(peer, first_round=2)
    assert statistics.median(latencies) < 0.05
    assert max(latencies) < 0.5
    speculator.is_heavy = False


def test_results_of_a_tree_that_was_replaced_are_dropped(start: Callable[..., Peer]) -> None:
    peer = start(TableSpeculator(delay=0.1))
    peer.open(tokens=[1, 2], budget=1)
    peer.wait_for(lambda values: values["draft_expansions"] == 1)  # the expansion of 2 is running
    peer.open(tokens=[1, 7], budget=1)
    peer.wait_for(lambda values: values["num_jobs"] == 4)  # two prompts, two expansions
    assert peer.outcome(1, 2, [best(7)]).kind == "leaf"


def test_a_lost_outcome_asks_for_a_reopening(start: Callable[..., Peer]) -> None:
    peer = start()
    peer.open()
    assert peer.outcome(2, 9, [5]) == messages.Unknown(request="0", round=2)
    assert peer.open(tokens=[*PROMPT, 5]).kind == "open"
    assert peer.outcome(4, 4, [6]).round == 4


def test_requests_of_two_engines_do_not_meet(start: Callable[..., Peer]) -> None:
    peer = start()
    other = Peer(zmq.Context.shadow(peer.socket.context), peer.socket.last_endpoint.decode())
    peer.open(tokens=[1, 2], lockstep=1)
    assert other.outcome(1, 2, [5]) == messages.Unknown(request="0", round=1)
    other.open(tokens=[8], lockstep=1)
    assert peer.outcome(1, 2, [best(2)]).ids == [best(best(2)), best(best(2)) + 1]
    assert other.stats()["num_open"] == 2


def test_context_too_long_is_refused(start: Callable[..., Peer]) -> None:
    peer = start()
    answer = peer.open(tokens=[1] * 5000)
    assert isinstance(answer, messages.Error)
    assert answer.code == "refused"
    assert "2000 positions" in answer.text


def test_a_failing_job_ends_its_request_only(start: Callable[..., Peer]) -> None:
    peer = start()
    peer.open("good", lockstep=1)
    answer = peer.open("bad", tokens=[POISON], lockstep=1)
    assert answer == messages.Error(request="bad", round=0, code="failed", text="RuntimeError: poisoned")
    assert peer.outcome(1, 3, [9], request="good").ids == [best(9), best(9) + 1]
    assert peer.stats("good")["num_failed"] == 1


def test_rubbish_is_counted_and_ignored(start: Callable[..., Peer]) -> None:
    peer = start()
    peer.open(lockstep=1)
    for frame in (b"", b"rubbish", b"\x92\x09\x80", messages.encode(messages.Pong()), os.urandom(1000)):
        peer.socket.send(frame)
    peer.socket.send_multipart([b"two", b"frames"])
    assert peer.outcome(1, 3, [5]).kind == "miss"
    assert peer.stats()["num_bad_messages"] == 6


def test_a_silent_request_is_closed(start: Callable[..., Peer]) -> None:
    peer = start(lease_seconds=0.6)
    peer.open()
    time.sleep(0.35)
    assert peer.outcome(1, 3, [5]).kind in ("hit", "leaf", "miss")  # renews the lease
    time.sleep(0.35)
    assert peer.stats()["num_open"] == 1
    time.sleep(0.8)
    values = peer.stats()
    assert (values["num_open"], values["num_expired"]) == (0, 1)
    assert isinstance(peer.outcome(2, 4, [5]), messages.Unknown)


def test_close_ends_a_request(start: Callable[..., Peer]) -> None:
    peer = start()
    peer.open()
    peer.send(messages.Close(request="0"))
    peer.send(messages.Close(request="never opened"))
    assert peer.stats()["num_open"] == 0


def test_trace_of_the_server(start: Callable[..., Peer], tmp_path: Path) -> None:
    part = tmp_path / "part"
    peer = start(TableSpeculator(delay=0.01), trace_part=part)
    peer.open(lockstep=2)
    peer.outcome(1, 3, [best(4)])
    peer.send(messages.Close(request="0"))
    peer.stats()
    engine = Trace("engine", is_on=True)
    engine.absorb(part)
    engine.write(tmp_path / "trace.json")
    summary = summarise(tmp_path / "trace.json")
    assert (summary.num_hits, summary.num_misses) == (1, 0)
    assert summary.seconds_expand >= 4 * 0.01


def test_slow_factor_stretches_every_job(start: Callable[..., Peer]) -> None:
    peer = start(TableSpeculator(delay=0.01), slow_factor=10.0)
    start_time = time.monotonic()
    peer.open(lockstep=2)
    assert time.monotonic() - start_time >= 3 * 0.1  # a prefill and two expansions


def spawn(tmp_path: Path, *flags: str) -> tuple[subprocess.Popen[bytes], str]:
    endpoint = f"ipc://{tmp_path}/socket"
    command = [sys.executable, str(TABLE_SERVER), "--endpoint", endpoint, *flags]
    return subprocess.Popen(command, stderr=subprocess.PIPE), endpoint


def test_process_sleeps_when_idle_and_ends_on_sigterm(tmp_path: Path) -> None:
    process, endpoint = spawn(tmp_path, "--trace", str(tmp_path / "part"), "--parent-pid", str(os.getpid()))
    with zmq.Context() as context:
        peer = Peer(context, endpoint)
        peer.open(budget=2)
        peer.wait_for(lambda values: values["draft_expansions"] == 2)

        def cpu_ticks() -> int:
            return sum(map(int, Path(f"/proc/{process.pid}/stat").read_text().split()[13:15]))

        before = cpu_ticks()
        time.sleep(1.0)
        assert cpu_ticks() - before <= 2  # hundredths of a second
        peer.socket.close(linger=0)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=30) == 0
    assert "expand" in (tmp_path / "part").read_text()


def test_process_ends_with_its_engine(tmp_path: Path) -> None:
    process, _ = spawn(tmp_path, "--parent-pid", "1")  # not its parent: the engine has gone
    assert process.wait(timeout=30) == 0


@pytest.mark.parametrize(
    ("flags", "code", "text"),
    [(("--drafter", "missing"), 2, "error: no drafter"), (("--drafter", "crash"), 1, "internal trouble")],
    ids=["user", "internal"],
)
def test_process_that_cannot_start(tmp_path: Path, flags: tuple[str, ...], code: int, text: str) -> None:
    process, _ = spawn(tmp_path, *flags)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == code
    assert text in errors.decode()
