"""The index of what a text has said equals a look through the text."""

from __future__ import annotations

import random

import numpy as np

from foredraft.infer.echo import FOLLOWED_ONE, FOLLOWED_TWO, OCCURRED, Echo


def look_through(text: list[int], token: int) -> int:
    places = [i for i, said in enumerate(text) if said == token]
    one = any(i > 0 and text[i - 1] == text[-1] for i in places)
    two = len(text) > 1 and any(i > 1 and text[i - 2 : i] == text[-2:] for i in places)
    return OCCURRED * bool(places) | FOLLOWED_ONE * one | FOLLOWED_TWO * two


def test_every_split_into_text_and_path_says_the_same() -> None:
    rng = random.Random(0)
    ids_F = np.arange(6)
    for _ in range(200):
        text = [rng.randrange(5) for _ in range(rng.randrange(1, 14))]
        expected = [look_through(text, token) for token in ids_F.tolist()]
        for cut in range(1, len(text) + 1):
            echo = Echo(text[: cut // 2])
            echo.extend(text[cut // 2 : cut])
            assert echo.bits(text[cut:], ids_F).tolist() == expected


def test_a_path_leaves_no_trace() -> None:
    echo = Echo([1, 2])
    before = echo.bits([], np.array([3]))
    echo.bits([3, 1, 2, 3], np.array([3]))
    assert echo.bits([], np.array([3])) == before == 0
