"""Model cards: the templates of model_cards/ filled from the JSON files that hold the measured figures.

    {drafter.training.tokens:,}       a figure by its dotted path, with Python's format of a number
    {bench.drafter?}                  may be null, which prints as a dash; a key that is absent is an error
    {drafter.measured.heldout.*.k}    the line is repeated for every member; {*} is the member's name
    <!-- if bench -->, <!-- end -->   lines that are left out where there is no such thing; `if not` turns it

A figure that a card needs and nobody has measured stops the filling: a card never has gaps or guesses.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

# a namespace package has no `importlib.resources` when it is installed editable
TEMPLATES = Path(__file__).parent.parent / "model_cards"
PLACEHOLDER = re.compile(r"\{(?P<path>\*+|[a-z]\w*(?:\.[\w*-]+)+)(?P<null>\?)?(?::(?P<format>[^{}]*))?\}")
IF, END = re.compile(r"<!-- if (?P<negation>not )?(?P<path>[\w.]+) -->"), "<!-- end -->"


@dataclass(frozen=True, slots=True)
class Origin:
    """Where the figures under one name come from."""

    file: str
    command: str  # that measures them


def fill_cards(
    names: Sequence[str], document: Mapping[str, Any], origins: Mapping[str, Origin]
) -> dict[str, str]:
    """Fill the templates `<name>.md`.

    Args:
        names: of the templates.
        document: all figures; the first part of a path is a key of it.
        origins: of these keys, for messages.

    Raises:
        ValueError: naming every figure that is missing or no finite number, where it was expected, and the
            command that measures it.
    """
    cards: dict[str, str] = {}
    complaints: dict[str, None] = {}
    for name in names:
        filling = _Filling(document)
        template = (TEMPLATES / f"{name}.md").read_text(encoding="utf-8")
        cards[name] = "\n".join(filling.lines(template)) + "\n"
        for path, found in filling.missing.items():
            root, _, rest = path.partition(".")
            origin = origins[root]
            complaint = f"{rest}: expected in {origin.file}, found {found}; `{origin.command}` makes it"
            complaints.setdefault(complaint)
    if complaints:
        raise ValueError("figures are missing, so no model card is written:\n  " + "\n  ".join(complaints))
    return cards


class _Missing(Exception):
    """A path that leads nowhere; the arguments are the path up to there and what was found."""


@dataclass
class _Filling:
    """One template being filled."""

    document: Mapping[str, Any]
    missing: dict[str, str] = field(default_factory=dict)  # path: what was found

    def lines(self, template: str) -> Iterator[str]:
        """The lines of the card."""
        conditions: list[bool] = []
        for line in template.splitlines():
            if match := IF.fullmatch(line.strip()):
                conditions.append(self.has(match["path"]) != bool(match["negation"]))
            elif line.strip() == END:
                conditions.pop()
            elif all(conditions):
                yield from self.expand(line, [])
        assert not conditions, "a condition of the template has no end"

    def has(self, path: str) -> bool:
        """Whether there is anything under a path."""
        try:
            return bool(self.walk(path.split("."), []))
        except _Missing:
            return False

    def expand(self, line: str, keys: list[str | int]) -> Iterator[str]:
        """A line with its figures, once for every member of what its next `*` runs over."""
        paths = [match["path"].split(".") for match in PLACEHOLDER.finditer(line)]
        repeated = next((path for path in paths if len(path) > 1 and path.count("*") > len(keys)), None)
        try:
            if repeated is None:
                yield PLACEHOLDER.sub(lambda match: self.figure(match, keys), line)
                return
            stars = [index for index, part in enumerate(repeated) if part == "*"]
            members = self.walk(repeated[: stars[len(keys)]], keys)
            names = list(members) if isinstance(members, Mapping) else list(range(len(members or ())))
            if not names:
                raise _Missing(_join(repeated[: stars[len(keys)]], keys), "no members")
        except _Missing as error:
            self.missing[error.args[0]] = error.args[1]
            return
        for name in names:
            yield from self.expand(line, [*keys, name])

    def figure(self, match: re.Match[str], keys: Sequence[str | int]) -> str:
        """What a placeholder stands for."""
        if set(match["path"]) == {"*"}:
            return str(keys[len(match["path"]) - 1])
        path = match["path"].split(".")
        try:
            value = self.walk(path, keys, ends_at_null=match["null"] is not None)
            return "-" if value is None else _formatted(value, match["format"] or "")
        except _Missing as error:
            self.missing[error.args[0]] = error.args[1]
        except ValueError as error:
            self.missing[_join(path, keys)] = str(error)
        return ""

    def walk(self, path: Sequence[str], keys: Sequence[str | int], ends_at_null: bool = False) -> Any:
        """The value at a path, each `*` replaced by its key; None only where it may end at a null."""
        value: Any = self.document
        for key in _replaced(path, keys):
            if value is None and ends_at_null:
                return None
            try:
                value = value[int(key) if isinstance(value, Sequence) else key]
            except (KeyError, IndexError, TypeError, ValueError):
                raise _Missing(_join(path, keys), "nothing") from None
        if value is None and not ends_at_null:
            raise _Missing(_join(path, keys), "null")
        return value


def _replaced(path: Sequence[str], keys: Sequence[str | int]) -> Iterator[str | int]:
    rest = iter(keys)
    return (next(rest) if part == "*" else part for part in path)


def _join(path: Sequence[str], keys: Sequence[str | int]) -> str:
    return ".".join(str(key) for key in _replaced(path, keys))


def _formatted(value: Any, spec: str) -> str:
    """A figure as text. Raises ValueError saying what was found instead of a figure."""
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(str(value))
    if isinstance(value, list | tuple):
        return ", ".join(_formatted(member, spec) for member in value)
    if isinstance(value, Mapping) or (isinstance(value, bool) and spec):
        raise ValueError(repr(value))
    try:
        return format(value, spec)
    except (ValueError, TypeError):
        raise ValueError(repr(value)) from None
