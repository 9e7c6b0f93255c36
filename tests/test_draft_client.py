"""The engine's side: bounded waits, and decoding goes on whatever happens to the draft server."""

import os
import runpy
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from foredraft.infer import messages
from foredraft.infer.draft_client import ClientLimits, DraftClient
from foredraft.infer.draft_link import LinkLimits
from foredraft.infer.params import SamplingParams, SpeculationParams
from foredraft.infer.tracing import Trace, summarise

TABLE_SERVER = Path(__file__).with_name("table_server.py")
TABLE = runpy.run_path(str(TABLE_SERVER))
best, is_running, VOCAB = TABLE["best"], TABLE["is_running"], TABLE["VOCAB"]
TABLE_COMMAND = [sys.executable, str(TABLE_SERVER)]
FREE = SpeculationParams(block="chain", block_nodes=4)
LOCKSTEP = SpeculationParams(block="chain", block_nodes=4, lockstep=2)
IMPATIENT = ClientLimits(link=LinkLimits(start=20.0, silence=0.5))

# A server of the worst kind: answers every frame with what its first argument says.
ROGUE_SERVER = """
import os, sys, zmq
from foredraft.infer import messages
_, what, _, endpoint, _, parent_pid, *_ = sys.argv
socket = zmq.Context().socket(zmq.ROUTER)
socket.bind(endpoint)

def block(message, round_number, ids):
    return messages.encode(messages.Block(request=message.request, round=round_number, kind="hit", ids=ids,
        parents=list(range(-1, len(ids) - 1)), path_probs=[0.5] * len(ids)))

is_ready = False
while os.getppid() == int(parent_pid):
    if not socket.poll(100):
        continue
    peer, frame = socket.recv_multipart()
    message = messages.decode(frame)
    answers = []
    if not is_ready:
        is_ready = True
        answers = [messages.encode(messages.Ready(family="rogue", max_depth=1, max_positions=99))]
    elif what == "rubbish":
        answers = [os.urandom(50), b"", b"\\x92\\x01\\xc0"]
    elif what == "wrong blocks":
        if isinstance(message, messages.Outcome):
            answers = [block(message, message.round - 1, [1]), block(message, message.round, [10**6]),
                       messages.encode(messages.Ping()), b"rubbish", block(message, message.round, [7, 8])]
    for answer in answers:
        socket.send_multipart([peer, answer])
"""


@pytest.fixture
def scratch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """Where clients make their folders; short, for socket paths; must be empty at the end."""
    folder = Path(tempfile.mkdtemp(prefix="fd", dir="/tmp"))
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    yield folder
    left = list(folder.iterdir())
    shutil.rmtree(folder)
    assert left == []


@pytest.fixture
def connect(scratch: Path) -> Iterator[Callable[..., DraftClient]]:
    """Starts clients and shuts them down at the end."""
    clients: list[DraftClient] = []

    def start(
        *flags: str,
        command: list[str] = TABLE_COMMAND,
        params: SpeculationParams = FREE,
        limits: ClientLimits = IMPATIENT,
        trace: Trace | None = None,
    ) -> DraftClient:
        client = DraftClient([*command, *flags], params, VOCAB, limits, trace)
        clients.append(client)
        client.wait_ready()
        return client

    yield start
    for client in clients:
        client.shutdown()
        assert not is_running(client.server_pid)


def wait_until(is_so: Callable[[], bool], seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < deadline, "never came"
        time.sleep(0.005)


def opening(tokens: list[int], round_number: int, params: SpeculationParams = FREE) -> messages.Open:
    settings = {"sampling": SamplingParams(seed=1), "max_tokens": 100, "speculation": params}
    return messages.Open(request="0", round=round_number, token_ids=tokens, **settings)


class Decode:
    """A stand-in for the engine's loop: the target follows the table, so that guesses are right."""

    def __init__(self, client: DraftClient, params: SpeculationParams = FREE) -> None:
        self.client = client
        self.params = params
        self.tokens = [1]
        self.round = 0
        self.blocks: list[messages.Block | None] = []
        self.longest_round = 0.0

    def step(self, seconds_verify: float = 0.0) -> None:
        start = time.monotonic()
        self.round += 1
        if self.client.needs_open("0"):
            self.client.open(opening(self.tokens, self.round, self.params))
        else:
            self.tokens.append(best(self.tokens[-1]))
            self.client.outcome("0", self.round, len(self.tokens) - 1, self.tokens[-1:])
            self.blocks.append(self.client.receive_block("0", self.round))
        self.longest_round = max(self.longest_round, time.monotonic() - start)
        time.sleep(seconds_verify)
        self.client.observe_verify(seconds_verify)

    @property
    def is_guessing(self) -> bool:
        block = self.blocks[-1] if self.blocks else None
        return block is not None and block.is_ready


def test_decode_with_hits(connect: Callable[..., DraftClient]) -> None:
    client = connect()
    assert client.wait_ready().family == "table"
    decode = Decode(client)
    for _ in range(20):
        decode.step(seconds_verify=0.01)
    kinds = [block.kind for block in decode.blocks if block is not None]
    assert kinds.count("hit") >= 10  # all, but for a machine that is busy with other things
    assert decode.blocks[-1].ids[0] == best(decode.tokens[-1])
    assert client.seconds_waiting < 0.5
    assert client.stats("0")["draft_expansions"] >= 15
    client.close("0")
    assert client.stats()["num_open"] == 0


def test_a_slow_drafter_is_never_waited_for(connect: Callable[..., DraftClient]) -> None:
    client = connect("--drafter", "0.02", "--slow-factor", "10")
    decode = Decode(client)
    for _ in range(30):
        decode.step(seconds_verify=0.01)
    assert client.seconds_waiting / 30 < 0.02  # a job takes 0.2 s
    assert client.num_timeouts < 10


def test_lockstep_waits_for_exact_blocks(connect: Callable[..., DraftClient]) -> None:
    client = connect("--drafter", "0.02", params=LOCKSTEP)
    client.open(opening([1], 0, LOCKSTEP))
    assert len(client.receive_block("0", 0).ids) == 2
    client.outcome("0", 1, 1, [50])
    assert len(client.receive_block("0", 1).ids) == 2
    assert client.seconds_waiting >= 5 * 0.02


@pytest.mark.parametrize(
    ("params", "verify", "seconds"),
    [
        (SpeculationParams(), [], 0.01),
        (SpeculationParams(), [0.1, 0.2, 9.0], 0.08),
        (SpeculationParams(on_miss="plain"), [0.02], 0.01),
        (SpeculationParams(on_miss="wait"), [], 1.0),
        (SpeculationParams(on_miss="wait"), [0.1], 0.2),
        (SpeculationParams(on_miss="wait", draft_timeout_ms=30.0), [0.1], 0.03),
        (SpeculationParams(lockstep=2), [0.1], 30.0),
    ],
)
def test_block_timeout(scratch: Path, params: SpeculationParams, verify: list[float], seconds: float) -> None:
    with DraftClient(["sleep"], params, VOCAB) as client:
        for value in verify:
            client.observe_verify(value)
        assert client.block_timeout() == pytest.approx(seconds)


@pytest.mark.parametrize("policy", [FREE, LOCKSTEP], ids=["free", "lockstep"])
def test_a_killed_server_is_replaced(connect: Callable[..., DraftClient], policy: SpeculationParams) -> None:
    client = connect(params=policy)
    decode = Decode(client, policy)
    wait_until(lambda: decode.step(0.002) or decode.is_guessing)
    first_pid = client.server_pid
    os.kill(first_pid, signal.SIGKILL)
    wait_until(lambda: decode.step(0.002) or not client.is_up)
    assert not decode.is_guessing
    wait_until(lambda: decode.step(0.002) or decode.is_guessing)
    assert client.server_pid != first_pid
    assert client.num_restarts == 1
    assert decode.longest_round < 0.4  # and not the 0.5 s after which silence is noticed


def test_a_stopped_server_is_replaced(connect: Callable[..., DraftClient]) -> None:
    client = connect()
    decode = Decode(client)
    wait_until(lambda: decode.step(0.002) or decode.is_guessing)
    first_pid = client.server_pid
    waited = client.seconds_waiting
    os.kill(first_pid, signal.SIGSTOP)
    wait_until(lambda: decode.step(0.002) or not client.is_up)
    # one time-out of 10 ms; once suspected, the server is not waited for again during the 0.5 s of silence
    assert client.seconds_waiting - waited < 0.3
    wait_until(lambda: decode.step(0.002) or decode.is_guessing)
    assert not is_running(first_pid)
    assert decode.longest_round < 0.4  # and not the 0.5 s after which silence is noticed


def test_a_server_that_was_stopped_for_a_moment_goes_on(connect: Callable[..., DraftClient]) -> None:
    client = connect(limits=ClientLimits())
    decode = Decode(client)
    wait_until(lambda: decode.step(0.002) or decode.is_guessing)
    os.kill(client.server_pid, signal.SIGSTOP)
    for _ in range(20):
        decode.step(0.002)
    assert not decode.is_guessing
    os.kill(client.server_pid, signal.SIGCONT)
    wait_until(lambda: decode.step(0.002) or decode.is_guessing)
    assert client.num_restarts == 0


def test_sending_never_blocks(connect: Callable[..., DraftClient]) -> None:
    client = connect(limits=ClientLimits())
    client.open(opening([1], 0))
    os.kill(client.server_pid, signal.SIGSTOP)
    start = time.monotonic()
    sent = [client.outcome("0", 1, 1, [5] * 1000) for _ in range(3000)]
    assert time.monotonic() - start < 10.0
    assert not all(sent)


@pytest.fixture
def rogue(tmp_path: Path) -> list[str]:
    """Command of the server that lacks its last argument."""
    (tmp_path / "rogue.py").write_text(ROGUE_SERVER)
    return [sys.executable, str(tmp_path / "rogue.py")]


def test_rubbish_gets_a_server_replaced_and_then_given_up(
    connect: Callable[..., DraftClient], rogue: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    client = connect("rubbish", command=rogue, limits=ClientLimits(max_restarts=1))
    decode = Decode(client)
    wait_until(lambda: decode.step(0.002) or client.has_given_up)
    assert client.num_restarts == 1
    assert decode.blocks and not any(decode.blocks)
    assert "malformed" in caplog.text and "going on without it" in caplog.text
    decode.step()
    assert client.stats() == {}


def test_only_the_right_block_is_taken(connect: Callable[..., DraftClient], rogue: list[str]) -> None:
    client = connect("wrong blocks", command=rogue)
    client.open(opening([1], 0))
    client.outcome("0", 1, 1, [5])
    assert client.receive_block("0", 1, timeout=5.0).ids == [7, 8]


def test_a_silent_answer_is_a_bounded_wait(connect: Callable[..., DraftClient], rogue: list[str]) -> None:
    client = connect("silence", command=rogue)
    client.open(opening([1], 0))
    client.outcome("0", 1, 1, [5])
    assert client.receive_block("0", 1) is None
    assert 0.009 <= client.seconds_waiting < 0.3
    assert client.num_timeouts == 1


def test_an_unknown_request_is_opened_again(connect: Callable[..., DraftClient]) -> None:
    client = connect("--lease-seconds", "0.1")
    assert client.needs_open("0")
    client.open(opening([1], 0))
    assert not client.needs_open("0")
    time.sleep(0.8)
    client.outcome("0", 1, 1, [5])
    assert client.receive_block("0", 1, timeout=5.0) is None
    assert client.needs_open("0")
    client.open(opening([1, 5], 2))
    assert client.receive_block("0", 2, timeout=5.0).kind == "open"


def test_a_refused_request_is_not_opened_again(connect: Callable[..., DraftClient]) -> None:
    client = connect()
    client.open(opening([1] * 5000, 0))
    assert client.receive_block("0", 0, timeout=5.0) is None
    assert "2000 positions" in client.refusals["0"]
    assert not client.needs_open("0")
    client.close("0")
    assert client.needs_open("0")


def test_a_drafter_that_has_gone_is_not_restarted_for_ever(
    connect: Callable[..., DraftClient], tmp_path: Path
) -> None:
    argv = "[sys.executable, *sys.argv[1:]]"
    once = f"import os, sys; os.mkdir({str(tmp_path / 'x')!r}); os.execv(sys.executable, {argv})"
    client = connect(command=[sys.executable, "-c", once, str(TABLE_SERVER)])
    os.kill(client.server_pid, signal.SIGKILL)
    wait_until(lambda: not client.needs_open("0") and client.has_given_up)
    assert client.num_restarts == IMPATIENT.max_restarts


def test_trace_holds_all_servers(connect: Callable[..., DraftClient], tmp_path: Path) -> None:
    trace = Trace("engine", is_on=True)
    client = connect("--drafter", "0.002", trace=trace)
    decode = Decode(client)
    for _ in range(10):
        decode.step(seconds_verify=0.005)
    client.close("0")
    wait_until(lambda: client.stats().get("num_open") == 0)
    os.kill(client.server_pid, signal.SIGKILL)
    wait_until(lambda: client.needs_open("0") and client.num_restarts == 1)
    decode.step()
    client.shutdown()
    trace.write(tmp_path / "trace.json")
    summary = summarise(tmp_path / "trace.json")
    assert summary.num_hits >= 4
    assert summary.seconds_expand > 0
