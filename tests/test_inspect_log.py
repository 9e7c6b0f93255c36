"""`foredraft inspect-log` shows what is trained, and counts what is there."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from transformers import AutoTokenizer

from foredraft.infer.cli import main as foredraft
from foredraft.train.inspect_log import marked, probabilities
from foredraft.train.target_log import TargetLog


@pytest.fixture(scope="module")
def log(make_log: Callable[..., TargetLog]) -> TargetLog:
    return make_log([f"word {n}" for n in range(8)], lambda n: n < 2)


def test_statistics_are_counts_of_the_rows(log: TargetLog, capsys: pytest.CaptureFixture[str]) -> None:
    assert foredraft(["inspect-log", "--log", str(log.folder), "--as_json", "true"]) == 0
    found = json.loads(capsys.readouterr().out)
    rows = list(log.rows())
    assert (found["rows"], found["prompts"]) == (len(rows), 8)
    assert found["response_tokens"] == log.num_tokens == sum(group["tokens"] for group in found["groups"])
    for group in found["groups"]:
        own = [r for r in rows if (r.split, r.temperature) == (group["split"], group["temperature"])]
        assert group["rows"] == len(own)
        if group["temperature"] == 0.0:
            assert group["most_probable"] == 1.0
        assert 0.0 < group["tail_mass"] < 1.0
    ids = np.concatenate([row.response_ids for row in rows])
    assert found["distinct_tokens"] == len(np.unique(ids))
    largest = np.sort(np.bincount(ids))[::-1]
    assert largest[: found["draft_vocabulary"]["0.9"]].sum() >= 0.9 * len(ids)
    assert largest[: found["draft_vocabulary"]["0.9"] - 1].sum() < 0.9 * len(ids)


def test_the_trained_tokens_are_marked(
    log: TargetLog, tiny_target: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_target)
    row = next(iter(log.rows()))
    assert foredraft(["inspect-log", "--log", str(log.folder), "--sample", "1"]) == 0
    out = capsys.readouterr().out
    assert "[[" in out
    assert f"seed {row.seed}" in out
    prompt, said = tokenizer.decode(row.prompt_ids), tokenizer.decode(row.response_ids)
    assert marked(row, tokenizer, is_plain=True).plain == f"{prompt}[[{said}]]"
    text = marked(row, tokenizer, is_plain=False)
    assert text.plain == tokenizer.decode([*row.prompt_ids, *row.response_ids])
    coloured = "".join(
        text.plain[span.start : span.end] for span in text.spans if "not dim" in str(span.style)
    )
    assert coloured == text.plain[len(prompt) :]
    probs_T = probabilities(row)
    if row.temperature == 0.0:
        np.testing.assert_allclose(probs_T, np.exp(row.topk_logprobs[:, 0].astype(np.float64)))


def test_what_is_no_log_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert foredraft(["inspect-log", "--log", str(tmp_path)]) == 2
    assert "is not a target log: no manifest.json. Make it with `foredraft log`" in capsys.readouterr().err
