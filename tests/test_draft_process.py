"""Starting and ending the draft server: explained failures, nothing left behind, the real drafter."""

import os
import runpy
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from foredraft.infer import messages
from foredraft.infer.draft_client import ClientLimits, DraftClient
from foredraft.infer.draft_link import LinkLimits
from foredraft.infer.draft_process import DraftServerError, server_command
from foredraft.infer.drafter_card import DrafterCard, write_drafter_card
from foredraft.infer.drafters import load_drafter
from foredraft.infer.identity import TargetIdentity
from foredraft.infer.params import EngineConfig, SamplingParams, SpeculationParams
from foredraft.infer.speculator import Speculator

TABLE_SERVER = Path(__file__).with_name("table_server.py")
TABLE_COMMAND = [sys.executable, str(TABLE_SERVER)]
is_running = runpy.run_path(str(TABLE_SERVER))["is_running"]
FREE = SpeculationParams()
LOCKSTEP = SpeculationParams(block="chain", block_nodes=4, lockstep=2)
VOCAB = 259


@pytest.mark.parametrize(
    ("drafter", "error", "text"),
    [("missing", ValueError, "^no drafter at nowhere$"), ("crash", DraftServerError, "internal trouble")],
)
def test_a_failed_start_is_explained(drafter: str, error: type[Exception], text: str) -> None:
    command = [*TABLE_COMMAND, "--drafter", drafter]
    client = DraftClient(command, FREE, VOCAB)
    with pytest.raises(error, match=text):
        client.wait_ready()
    assert client.has_given_up


def test_a_start_that_takes_too_long() -> None:
    command = [sys.executable, "-c", "import time; time.sleep(60)"]
    limits = ClientLimits(link=LinkLimits(start=0.2))
    client = DraftClient(command, FREE, VOCAB, limits)
    with pytest.raises(DraftServerError, match=r"not ready after 0\.2 s"):
        client.wait_ready()
    assert not is_running(client.server_pid)


def test_long_temporary_folder_is_explained(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folder = tmp_path / ("x" * 100)
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    with pytest.raises(ValueError, match="TMPDIR"):
        DraftClient(TABLE_COMMAND, FREE, VOCAB)
    assert list(folder.iterdir()) == []


ENGINE = """
import os, signal, sys, tempfile
from foredraft.infer.draft_client import DraftClient
from foredraft.infer.drafters import load_drafter
from foredraft.infer.params import SpeculationParams
tempfile.tempdir = sys.argv[1]
client = DraftClient(sys.argv[3:], SpeculationParams(), 97)
client.wait_ready()
print(client.server_pid, flush=True)
os.kill(os.getpid(), int(sys.argv[2]))
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL], ids=["interrupted", "killed"])
def test_nothing_outlives_the_engine(number: int) -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        command = [sys.executable, "-c", ENGINE, folder, str(int(number)), *TABLE_COMMAND]
        engine = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert engine.returncode != 0
        server_pid = int(engine.stdout)
        deadline = time.monotonic() + (20.0 if number == signal.SIGKILL else 0.0)
        while is_running(server_pid) or os.listdir(folder):
            assert time.monotonic() < deadline
            time.sleep(0.02)


def test_server_command_carries_the_settings() -> None:
    config = EngineConfig(dtype="float32", draft_threads=2)
    command = server_command("folder", config, target="t", target_tokenizer_sha256="ab", slow_factor=10)
    assert command[:3] == [sys.executable, "-m", "foredraft.infer.draft_server"]
    assert command[command.index("--target-tokenizer-sha256") + 1] == "ab"
    assert '"draft_threads":2' in command[command.index("--engine-config") + 1]
    assert command[-2:] == ["--slow-factor", "10"]


def test_the_real_server_drafts_like_the_speculator(tiny_target: Path) -> None:
    config = EngineConfig(dtype="float32")
    sampling = SamplingParams(seed=1)
    opening = messages.Open(
        request="0", token_ids=[5, 6, 7], sampling=sampling, max_tokens=32, speculation=LOCKSTEP
    )
    with DraftClient(server_command(str(tiny_target), config), LOCKSTEP, VOCAB) as client:
        client.wait_ready()
        client.open(opening)
        opened = client.receive_block("0", 0)
        assert opened is not None
        client.outcome("0", 1, 3, [*opened.ids[:1], 77])
        block = client.receive_block("0", 1)
        assert block is not None
        assert client.stats("0")["draft_expansions"] == 4

    speculator = Speculator(load_drafter(str(tiny_target), config))
    speculator.open("0", [5, 6, 7], sampling, LOCKSTEP)
    speculator.expand("0", 2)
    assert speculator.block("0").tokens == opened.ids
    assert speculator.advance("0", 3, [*opened.ids[:1], 77]) == block.kind
    speculator.expand("0", 2)
    assert speculator.block("0").tokens == block.ids


def test_the_real_server_refuses_another_tokenizer(tmp_path: Path) -> None:
    target = TargetIdentity(id="big", revision=None, weights_sha256="aa" * 32)
    card = DrafterCard(family="lm", target=target, tokenizer_sha256="11" * 32, draft_vocab=None, max_depth=4)
    write_drafter_card(tmp_path, card)
    command = server_command(str(tmp_path), EngineConfig(), target="big", target_tokenizer_sha256="00" * 32)
    refused = pytest.raises(ValueError, match="another tokenizer than target big")
    with DraftClient(command, FREE, VOCAB) as client, refused:
        client.wait_ready()
