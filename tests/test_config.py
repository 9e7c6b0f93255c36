"""Recipes: what is read, what is refused and how the refusal reads; the exit codes of the error boundary."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import pytest
import yaml

from foredraft.infer.atomic import write_text_atomic
from foredraft.infer.config import UserError, read_config, run_command, save_resolved
from foredraft.infer.params import EngineConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class DataSection:
    """Where the data is."""

    path: str
    num_rows: int = 3
    temperatures: tuple[float, ...] = (0.0, 1.0)

    def __post_init__(self) -> None:
        if self.num_rows < 1:
            raise ValueError(f"num_rows must be positive, got {self.num_rows}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """A recipe with sections."""

    data: DataSection
    heldout: DataSection | None = None
    learning_rate: float = 1e-3
    schedule: Literal["cosine", "constant"] = "cosine"
    limit: int | None = None
    extra: tuple[DataSection, ...] = ()
    engine: EngineConfig = field(default_factory=EngineConfig)


def write(tmp_path: Path, text: str, name: str = "r.yaml") -> str:
    (tmp_path / name).write_text(text)
    return str(tmp_path / name)


def read(*argv: str) -> Recipe:
    return read_config(Recipe, argv, "log")[0]


def test_file_and_flags(tmp_path: Path) -> None:
    file = write(
        tmp_path, "data: {path: a, num_rows: 7}\nlearning_rate: 1e-4\nengine: {speculation: {k: 9}}\n"
    )
    recipe = read(
        "--config", file, "--data.num_rows=8", "--data.temperatures", "[0.5]", "--engine.dtype", "float32"
    )
    assert recipe.data == DataSection(path="a", num_rows=8, temperatures=(0.5,))
    assert recipe.learning_rate == 1e-4
    assert recipe.engine.speculation.k == 9
    assert recipe.engine.dtype == "float32"


def test_flags_win_wherever_they_stand(tmp_path: Path) -> None:
    file = write(tmp_path, "data: {path: a}\nlearning_rate: 2\n")
    assert read("--learning_rate", "3", f"--config={file}").learning_rate == 3


def test_optional_section(tmp_path: Path) -> None:
    assert read("--data.path", "a").heldout is None
    assert read("--data.path", "a", "--heldout.path", "b").heldout == DataSection(path="b")
    file = write(tmp_path, "data: {path: a}\nheldout: {path: c, num_rows: 1}\n")
    assert read("--config", file).heldout == DataSection(path="c", num_rows=1)


def test_list_of_sections(tmp_path: Path) -> None:
    file = write(tmp_path, "data: {path: a}\nextra:\n- path: b\n- {path: c, num_rows: 2}\n")
    recipe, resolved = read_config(Recipe, ["--config", file], "log")
    assert recipe.extra == (DataSection(path="b"), DataSection(path="c", num_rows=2))
    assert read("--config", write(tmp_path, resolved)) == recipe
    assert read("--data.path", "a", "--extra", '[{"path": "d"}]').extra == (DataSection(path="d"),)


def test_resolved_recipe_gives_the_same_run_and_names_origins(tmp_path: Path) -> None:
    file = write(tmp_path, "data: {path: a, num_rows: 7}\n")
    recipe, resolved = read_config(Recipe, ["--config", file, "--learning_rate", "0.5"], "log")
    saved = save_resolved(tmp_path / "out", resolved)
    assert read("--config", str(saved)) == recipe
    assert "# from the recipe: data.num_rows, data.path" in resolved
    assert "# from the command line: learning_rate" in resolved
    assert yaml.safe_load(resolved)["engine"]["page_size"] == EngineConfig().page_size


@pytest.mark.parametrize(
    ("text", "flags", "expected"),
    [
        ("data:\n  path: a\n  num_row: 4", [], "3: unknown key 'data.num_row'; did you mean data.num_rows"),
        ("data: {path: a}\nengine: {speculation: {fanout: 3}}\n", [], "you mean engine.speculation.fan_out?"),
        ("data: {path: a}\nheldout: {pth: b}\n", [], "unknown key 'heldout.pth'; did you mean heldout.path?"),
        ("data: {path: a}\nzzzz: 1\n", [], "unknown key 'zzzz'; valid keys: data, heldout, learn"),
        ("data: {path: a}\n", ["--data.num_row=4"], "option --data.num_row; did you mean --data.num_rows?"),
        ("data: {path: a}\n", ["--lerning_rate", "4"], "did you mean --learning_rate?"),
        ("data: {path: a, path: b}\n", [], "key 'data.path' is given twice"),
        ("data: 5\n", [], "line 1: section 'data' must hold keys of path, num_rows, temperatures"),
        ("learning_rate: 1\n", [], "r.yaml: missing keys: data.path"),
        ("data: {path: a, num_rows: x}\n", [], "r.yaml: data.num_rows: expected int, got x"),
        ("data: {path: a, num_rows: 2.5}\n", [], "data.num_rows: expected int, got 2.5"),
        ("data: {path: a, temperatures: [a]}\n", [], "data.temperatures: expected tuple[float, ...], got"),
        ("data: {path: a}\nheldout: {num_rows: 2}\n", [], "r.yaml: heldout"),
        ("data: {path: a}\nextra:\n- path: b\n- pth: c\n", [], "key 'extra.pth'; did you mean extra.path?"),
        ("data: {path: a}\nextra: [{path: b, num_rows: x}]\n", [], "extra.num_rows: expected int, got x"),
        ("data: {path: a}\nextra: [{path: b, num_rows: 0}]\n", [], "extra[0]: num_rows must be positive"),
        ("data: {path: a}\nextra: [{num_rows: 1}]\n", [], "extra"),
        ("data: {path: a}\nextra: [b]\n", [], "extra: expected a list of sections"),
        ("data: {path: a}\n", ["--learning_rate=x"], "--learning_rate: expected float, got x"),
        ("data: {path: a}\n", ["--learning_rate"], "--learning_rate: expected one argument"),
        ("data: {path: a}\nschedule: step\n", [], "schedule: expected one of cosine, constant"),
        ("data: {path: a}\nlimit: x\n", [], "limit: expected int or null, got x"),
        ("data: {path: a}\nheldout: {path: b, num_rows: x}\n", [], "heldout.num_rows: expected int, got x"),
        ("data: {path: a, num_rows: 0}\n", [], "in section data: num_rows must be positive, got 0"),
        ("data: {path: a}\n", ["--engine.speculation.k=0"], "engine.speculation: k must be in 1..64, got 0"),
        ("data: {path: [a\n", [], "r.yaml: not valid YAML"),
        ("- a\n- b\n", [], "expected `key: value` lines"),
        ("data: {path: a}\n", ["stray"], "nrecognized arguments: stray"),
    ],
)  # fmt: skip
def test_refusals(tmp_path: Path, text: str, flags: list[str], expected: str) -> None:
    with pytest.raises(UserError) as error:
        read("--config", write(tmp_path, text), *flags)
    assert expected in str(error.value)
    assert "\n" not in str(error.value)


def test_missing_recipe_file(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"nowhere\.yaml: no such file"):
        read("--config", str(tmp_path / "nowhere.yaml"))
    with pytest.raises(UserError, match="--config needs the path"):
        read("--config")


def test_print_config_is_a_recipe(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(lambda: read("--data.path", "a", "--print_config") and 0) == 0
    printed = write(tmp_path, capsys.readouterr().out, "printed.yaml")
    assert read("--config", printed) == read("--data.path", "a")


def test_help_names_keys_and_sections(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(lambda: read("--help") and 0) == 0
    text = capsys.readouterr().out
    assert "usage: foredraft log" in text
    assert "--engine.speculation.fan_out" in text
    assert "data: Where the data is." in text


def test_an_interrupted_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = write_text_atomic(tmp_path / "new" / "r.yaml", "old")

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "replace", interrupt)
    with pytest.raises(KeyboardInterrupt):
        write_text_atomic(target, "new")
    assert [path.read_text() for path in target.parent.iterdir()] == ["old"]


def raising(error: BaseException) -> Callable[[], int]:
    def command() -> int:
        raise error

    return command


@pytest.mark.parametrize(
    ("command", "code", "message"),
    [
        (lambda: 0, 0, ""),
        (lambda: None, 0, ""),
        (lambda: 3, 3, ""),
        (raising(UserError("no such key")), 2, "foredraft: error: no such key"),
        (raising(FileNotFoundError(2, "No such file or directory", "x.jsonl")), 2, "x.jsonl: No such file"),
        (raising(OSError(28, "No space left", "out/x")), 2, "out/x: No space left; make room there and"),
        (lambda: int("x"), 2, "foredraft: error: invalid literal"),
        (lambda: importlib.import_module("json").loads("{"), 2, "(JSONDecodeError from json"),
        (raising(ModuleNotFoundError("x", name="pyarrow.parquet")), 2, "pip install 'foredraft[train]'"),
        (raising(ModuleNotFoundError("x", name="no_such")), 1, "Traceback"),
        (raising(RuntimeError("bug")), 1, "Traceback"),
        (raising(KeyboardInterrupt()), 130, "interrupted"),
        (raising(SystemExit(0)), 0, ""),
        (raising(SystemExit(2)), 2, ""),
        (raising(SystemExit("text")), 1, ""),
    ],
)  # fmt: skip
def test_exit_codes(
    command: Callable[[], int | None], code: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(command) == code
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.out == ""
    assert ("Traceback" in captured.err) == (code == 1 and message == "Traceback")
