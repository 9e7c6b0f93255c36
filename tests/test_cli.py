"""The entry point: the table of commands, exit codes as a shell sees them, lazy imports."""

from __future__ import annotations

import importlib.util
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest

from foredraft.infer import cli


def run(*argv: str) -> subprocess.CompletedProcess[str]:
    """`foredraft ...` in a process of its own."""
    command = [sys.executable, "-m", "foredraft.infer.cli", *argv]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def fake_module(monkeypatch: pytest.MonkeyPatch, main: object) -> None:
    monkeypatch.setitem(cli.COMMANDS, "fake", ("foredraft_fake", "for this test"))
    monkeypatch.setitem(sys.modules, "foredraft_fake", SimpleNamespace(main=main))


@pytest.mark.parametrize("argv", [[], ["--help"], ["-h"], ["help"]])
def test_help_lists_the_commands(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(argv) == 0
    text = capsys.readouterr().out
    assert all(name in text and about in text for name, (_, about) in cli.COMMANDS.items())


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"foredraft {cli.version()}\n"


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("generat", "did you mean generate?"),
        ("train", "did you mean train-drafter?"),
        ("zzz", "commands: synthesise, log, "),
    ],
)
def test_unknown_command(command: str, expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([command]) == 2
    assert expected in capsys.readouterr().err


def test_every_command_names_a_module() -> None:
    for module, _ in cli.COMMANDS.values():
        assert importlib.util.find_spec(module) is not None, module


def test_the_rest_of_the_line_goes_to_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Sequence[str]] = []
    fake_module(monkeypatch, lambda argv: seen.append(argv) or 5)
    assert cli.main(["fake", "--config", "r.yaml"]) == 5
    assert seen == [["--config", "r.yaml"]]


def test_a_missing_extra_names_the_pip_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)

    def main(argv: Sequence[str]) -> int:
        import pyarrow  # noqa: F401

        return 0

    fake_module(monkeypatch, main)
    assert cli.main(["fake"]) == 2
    assert "needs the package pyarrow: run `pip install 'foredraft[train]'`" in capsys.readouterr().err


def test_exit_codes_in_a_shell(tmp_path: Path) -> None:
    prompts = tmp_path / "p.jsonl"
    prompts.write_text('{"prompt": "fine"}\n{"prompt"\n')
    result = run("generate", "--target", "nowhere", "--prompts", str(prompts))
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.startswith(f"foredraft: error: {prompts}, line 2: not valid JSON")
    assert result.stderr.count("\n") == 1


def test_mistakes_are_told_before_torch_is_imported() -> None:
    script = (
        "import sys\nfrom foredraft.infer.cli import main\n"
        "assert main(['bench', '--target', 't', '--prompts', 'no.jsonl']) == 2\n"
        "assert main(['generate', '--help']) == 0\n"
        "assert not {'torch', 'transformers', 'foredraft.train'} & set(sys.modules), 'too much imported'\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False
    )
    assert result.returncode == 0, result.stderr


def test_ctrl_c_is_130() -> None:
    script = (
        "import sys, time, types\nfrom foredraft.infer import cli\n"
        "cli.COMMANDS['slow'] = ('slow_fake', '')\n"
        "def main(argv):\n    print('on', flush=True)\n    time.sleep(30)\n"
        "sys.modules['slow_fake'] = types.SimpleNamespace(main=main)\n"
        "sys.exit(cli.main(['slow']))\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "on\n"
    time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=20)
    assert process.returncode == 130
    assert errors == "foredraft: interrupted\n"


def test_a_closed_pipe_is_quiet() -> None:
    script = (
        "import sys, types\nfrom foredraft.infer import cli\ncli.COMMANDS['much'] = ('much_fake', '')\n"
        "sys.modules['much_fake'] = types.SimpleNamespace(main=lambda argv: print('x\\n' * 1000000))\n"
        "sys.exit(cli.main(['much']))\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and process.stderr is not None
    process.stdout.readline()
    process.stdout.close()
    assert process.stderr.read() == ""
    assert process.wait(timeout=20) == 1
    process.stderr.close()
