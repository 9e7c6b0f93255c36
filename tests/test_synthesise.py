"""Prompts drawn from the target: the same in one run and in several, each an opened turn, or a message."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from foredraft.infer.prompts import read_prompts
from foredraft.train import synthesise as module
from foredraft.train.log_recipe import SynthesisRecipe
from foredraft.train.synthesise import open_turn, read_openings, synthesise

OPENINGS = [
    {"category": "question", "text": "How"},
    {"category": "free", "text": "", "share": 2.0},
    {"text": "Write", "system": "You are brief."},
]


@pytest.fixture
def recipe(tiny_target: Path, tmp_path: Path) -> SynthesisRecipe:
    """Six hundred short turns in six parts; a random model ends few of them."""
    path = tmp_path / "openings.jsonl"
    path.write_text("".join(json.dumps(opening) + "\n" for opening in OPENINGS))
    return SynthesisRecipe(
        target=str(tiny_target),
        openings=str(path),
        out=str(tmp_path / "prompts.jsonl"),
        count=600,
        temperature=1.5,
        top_p=1.0,
        max_new_tokens=8,
        min_new_tokens=1,
        seed=0,
        prompts_per_part=100,
        dtype="float32",
        rows=64,
        threads=1,
    )


def test_prompts_are_whole_turns_that_begin_as_they_were_opened(recipe: SynthesisRecipe) -> None:
    synthesise(recipe)
    lines = [json.loads(line) for line in Path(recipe.out).read_text().splitlines()]
    assert 3 <= len(lines) < 600
    assert len({line["id"] for line in lines}) == len(lines)
    texts = [line["messages"][0]["content"] for line in lines]
    assert len(set(texts)) == len(texts)
    first_words = {"question": "How", "free": "", "other": "Write"}
    for line, text in zip(lines, texts, strict=True):
        assert text.startswith(first_words[line["category"]])
    assert len(read_prompts(recipe.out)) == len(lines)
    assert not Path(f"{recipe.out}.parts").exists()


def test_an_interrupted_run_keeps_its_parts_and_ends_the_same(
    recipe: SynthesisRecipe, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    synthesise(recipe)
    again = replace(recipe, out=str(tmp_path / "again.jsonl"), rows=32)
    write, written = module.write_text_atomic, []

    def interrupted(path: Path, text: str) -> None:
        if len(written) == 3:
            raise KeyboardInterrupt
        write(path, text)
        if path.name.startswith("part-"):
            written.append(path.name)

    with monkeypatch.context() as patched:
        patched.setattr(module, "write_text_atomic", interrupted)
        with pytest.raises(KeyboardInterrupt):
            synthesise(again)
    assert not Path(again.out).exists()
    made: list[str] = []
    monkeypatch.setattr(
        module, "write_text_atomic", lambda path, text: (made.append(path.name), write(path, text))
    )
    synthesise(again)
    assert not set(made) & set(written)
    assert Path(again.out).read_text() == Path(recipe.out).read_text()


def test_a_finished_file_is_kept_and_another_recipes_is_not_touched(
    recipe: SynthesisRecipe, capsys: pytest.CaptureFixture[str]
) -> None:
    synthesise(recipe)
    before = Path(recipe.out).read_text()
    synthesise(replace(recipe, rows=16))
    assert "complete already" in capsys.readouterr().err
    with pytest.raises(ValueError, match="holds prompts of another recipe; delete it or choose another"):
        synthesise(replace(recipe, seed=1))
    assert Path(recipe.out).read_text() == before


def test_turns_without_an_end_are_an_error_that_says_so(recipe: SynthesisRecipe) -> None:
    with pytest.raises(ValueError, match="none of 4 turns ended within max_new_tokens 1"):
        synthesise(replace(recipe, count=4, max_new_tokens=1, min_new_tokens=1))
    assert not Path(recipe.out).exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "none in it, expected one JSON object a line"),
        ("How\n", r"line 1: expected an object with `text`"),
        ('{"category": "x"}\n', r"line 1: expected an object with `text`"),
        ('{"text": "How", "weight": 2}\n', r"line 1: expected an object with `text`"),
        ('{"text": "a"}\n{"text": "How", "share": 0}\n', "line 2: expected a `text` and a positive `share`"),
        ('{"text": 3}\n', "line 1: expected a `text`"),
    ],
    ids=["empty", "no-json", "no-text", "unknown-key", "no-share", "number"],
)
def test_bad_openings_are_refused(recipe: SynthesisRecipe, content: str, message: str) -> None:
    Path(recipe.openings).write_text(content)
    with pytest.raises(ValueError, match=message):
        synthesise(recipe)
    assert not Path(recipe.out).exists()


def test_no_openings_and_no_chat_template_are_refused(recipe: SynthesisRecipe) -> None:
    with pytest.raises(ValueError, match="nowhere: no such file"):
        read_openings("nowhere")
    tokenizer = AutoTokenizer.from_pretrained(recipe.target)
    [opening] = read_openings(recipe.openings)[:1]
    tokenizer.chat_template = None
    with pytest.raises(ValueError, match="has no chat template: its model has seen no user turns"):
        open_turn(tokenizer, opening)
    tokenizer.chat_template = "{{ messages[-1]['content'] }}"
    with pytest.raises(ValueError, match="does not end a user turn by a token of its own"):
        open_turn(tokenizer, opening)
