"""Templates: figures by path, repeated lines, conditions; what is missing is named and nothing is made up."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from foredraft.train import model_card
from foredraft.train.model_card import Origin, fill_cards

DOCUMENT = {
    "drafter": {"tokens": 12345, "name": "x", "git": None, "by_T": {"0": {"top1": 0.25}, "0.7": {"top1": 1}}},
    "bench": None,
    "list": {"rows": [{"n": 1, "ratio": None}, {"n": 2, "ratio": {"mean": 2.0, "interval": [1.5, 2.5]}}]},
    "nested": {"T": {"0": {"mine": {"loss": 1.0}, "other": {"loss": 2.0}}, "1": {"mine": {"loss": 3.0}}}},
}
ORIGINS = {
    name: Origin(f"{name}.json", f"make {name}") for name in ("drafter", "bench", "list", "nested", "bad")
}


def fill(monkeypatch: pytest.MonkeyPatch, folder: Path, template: str, **changes: Any) -> str:
    (folder / "t.md").write_text(template)
    monkeypatch.setattr(model_card, "TEMPLATES", folder)
    return fill_cards(["t"], DOCUMENT | changes, ORIGINS)["t"]


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{drafter.tokens:,} of {drafter.name}", "12,345 of x"),
        ("{drafter.git?} {list.rows.0.ratio.mean?:.1f} {list.rows.1.ratio.mean?:.1f}", "- - 2.0"),
        ("| {*} | {drafter.by_T.*.top1:.2f} |", "| 0 | 0.25 |\n| 0.7 | 1.00 |"),
        ("{list.rows.*.n} {list.rows.*.ratio.interval?:.1f}", "1 -\n2 1.5, 2.5"),
        ("{*} {**} {nested.T.*.*.loss:g}", "0 mine 1\n0 other 2\n1 mine 3"),
        ("<!-- if bench -->\n{bench.x}\n<!-- end -->\na", "a"),
        ("<!-- if drafter.git -->\nb\n<!-- end -->\n<!-- if drafter.by_T -->\nc\n<!-- end -->", "c"),
        ("no {placeholder} and {'code': 1} and {}", "no {placeholder} and {'code': 1} and {}"),
    ],
    ids=["format", "null", "mapping", "list", "nested", "absent", "conditions", "braces"],
)
def test_filling(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, template: str, expected: str) -> None:
    assert fill(monkeypatch, tmp_path, template) == expected + "\n"


@pytest.mark.parametrize(
    ("template", "bad", "complaint"),
    [
        ("{bad.x.y:.2f}", {"x": {}}, "x.y: expected in bad.json, found nothing; `make bad` makes it"),
        ("{bad.x.y?:.2f}", {"x": {}}, "x.y: expected in bad.json, found nothing"),
        ("{bad.x}", {"x": None}, "x: expected in bad.json, found null"),
        ("{bad.x:.2f}", {"x": float("nan")}, "x: expected in bad.json, found nan"),
        ("{bad.x:.2f}", {"x": "about 3"}, "x: expected in bad.json, found 'about 3'"),
        ("{bad.x}", {"x": {"y": 1}}, "x: expected in bad.json, found {'y': 1}"),
        ("{bad.x.*.y}", {"x": {}}, "x: expected in bad.json, found no members"),
        ("{bad.x.*.y}", {}, "x: expected in bad.json, found nothing"),
        ("{bad.x.*.y}", {"x": [{"y": 1}, {"z": 1}]}, "x.1.y: expected in bad.json, found nothing"),
        ("{bad.x}", None, "x: expected in bad.json, found nothing"),
    ],
    ids=["absent", "may-be-null", "null", "nan", "text", "section", "empty", "no-list", "member", "root"],
)
def test_a_missing_figure_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, template: str, bad: object, complaint: str
) -> None:
    with pytest.raises(ValueError, match="figures are missing, so no model card is written") as error:
        fill(monkeypatch, tmp_path, f"{{drafter.name}}\n{template}", bad=bad)
    assert str(error.value).splitlines()[1].strip().startswith(complaint)
    assert len(str(error.value).splitlines()) == 2


def test_all_that_is_missing_in_all_cards_is_named_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "a.md").write_text("{drafter.x}\n{drafter.y.z}\n{drafter.x}")
    (tmp_path / "b.md").write_text("{drafter.x} {list.rows.*.no}")
    monkeypatch.setattr(model_card, "TEMPLATES", tmp_path)
    with pytest.raises(ValueError, match="figures are missing") as error:
        fill_cards(["a", "b"], DOCUMENT, ORIGINS)
    named = [line.strip().partition(":")[0] for line in str(error.value).splitlines()[1:]]
    assert named == ["x", "y.z", "rows.0.no", "rows.1.no"]
