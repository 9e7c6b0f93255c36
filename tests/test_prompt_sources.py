"""Prompts from everywhere, responses of the data or of a server: the same log rows, or a message."""

from __future__ import annotations

import gzip
import json
import threading
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from transformers import AutoTokenizer

from foredraft.infer.prompts import Prompt, encode
from foredraft.train.collect import collect
from foredraft.train.log_recipe import LogRecipe, PromptSource, ResponseGroup, ServerRecipe
from foredraft.train.prompt_sources import read_samples

USER = {"role": "user", "content": "Explain rain."}
SAID = {"role": "assistant", "content": "Water falls."}


@pytest.fixture
def recipe(tiny_target: Path, tmp_path: Path) -> LogRecipe:
    return LogRecipe(
        target=str(tiny_target),
        prompts=str(tmp_path / "prompts.jsonl"),
        out=str(tmp_path / "log"),
        groups=(),
        max_new_tokens=40,
        top_k_logprobs=8,
        heldout_fraction=0.0,
        seed=0,
        prompts_per_shard=2,
        responses="given",
        dtype="float32",
        rows=4,
        threads=1,
    )


def write_lines(path: Path, records: list[Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def test_request_logs_of_every_form(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    answer = {"choices": [{"message": SAID, "finish_reason": "length"}]}
    write_lines(
        tmp_path / "logs" / "a.jsonl",
        [
            {"request": {"messages": [USER]}, "response": answer},
            {"messages": [USER, SAID]},
            {"request": {"body": {"messages": [USER]}}, "response": {"body": answer}},
            {"unrelated": 1},
        ],
    )
    (tmp_path / "logs" / "b").mkdir()
    (tmp_path / "logs" / "b" / "c.json").write_text(
        json.dumps([{"prompt": "2 + 2 =", "response": {"choices": [{"text": " 4"}]}}])
    )
    (tmp_path / "logs" / "d.jsonl.gz").write_bytes(
        gzip.compress(b'{"messages": [{"role": "user", "content": "Hi"}]}\nnot json\n')
    )
    samples = list(read_samples(PromptSource(kind="requests", path=str(tmp_path / "logs"))))
    found = [
        (dict(sample.prompt.messages[-1])["content"], sample.response, sample.is_ended) for sample in samples
    ]
    assert found == [
        ("Explain rain.", "Water falls.", False),
        ("Explain rain.", "Water falls.", True),
        ("Explain rain.", "Water falls.", False),
        ("2 + 2 =", " 4", True),
        ("Hi", None, True),
    ]
    assert "2 of 7 records left out" in capsys.readouterr().err
    with pytest.raises(ValueError, match="none of 1 records in 1 "):
        list(
            read_samples(
                PromptSource(kind="requests", path=str(write_lines(tmp_path / "x" / "y.jsonl", [3]).parent))
            )
        )
    with pytest.raises(ValueError, match="no such folder"):
        list(read_samples(PromptSource(kind="requests", path=str(tmp_path / "nothing"))))


def test_datasets_are_streamed(tmp_path: Path) -> None:
    turns = [{"from": "human", "value": "Count."}, {"from": "gpt", "value": "1 2 3"}]
    write_lines(
        tmp_path / "data" / "train.jsonl", [{"conversations": turns}, {"conversations": turns[:1]}] * 2
    )
    source = PromptSource(kind="hub", path=str(tmp_path / "data"), column="conversations", limit=3)
    samples = list(read_samples(source))
    assert [(sample.prompt.messages[-1]["content"], sample.response) for sample in samples] == [
        ("Count.", "1 2 3"),
        ("Count.", None),
        ("Count.", "1 2 3"),
    ]
    with pytest.raises(ValueError, match="no column 'messages', found conversations; set `column`"):
        list(read_samples(replace(source, column="messages")))


def test_given_responses_are_scored_by_the_target(recipe: LogRecipe, tiny_target: Path) -> None:
    write_lines(
        Path(str(recipe.prompts)),
        [{"messages": [USER, SAID]}, {"prompt": "Why?", "response": "Because."}, {"prompt": "No answer"}],
    )
    log = collect(recipe, "recipe")
    rows = list(log.rows())
    tokenizer = AutoTokenizer.from_pretrained(tiny_target)
    assert [tokenizer.decode(row.response_ids) for row in rows] == [
        "Water falls.<|im_end|>",
        "Because.<|im_end|>",
    ]
    assert rows[0].prompt_ids.tolist() == encode(Prompt(id=1, messages=(USER,)), tokenizer)
    assert {(row.source, row.temperature, row.finish_reason) for row in rows} == {("given", 0.0, "stop")}
    # what the target says of its own greedy response is what was logged when it said it
    decoded = replace(
        recipe,
        responses="target",
        groups=(ResponseGroup(responses=1, temperature=0.0),),
        out=recipe.out + "-own",
    )
    [own, _, _] = collect(decoded, "recipe").rows()
    text = tokenizer.decode(own.response_ids[:-1] if own.finish_reason == "stop" else own.response_ids)
    write_lines(Path(str(recipe.prompts)), [{"messages": [USER], "response": text}])
    again = next(iter(collect(replace(recipe, out=recipe.out + "-again"), "recipe").rows()))
    if again.response_ids[:-1].tolist() == own.response_ids[: len(again.response_ids) - 1].tolist():
        size = len(again.response_ids) - 1
        assert np.array_equal(again.topk_ids[:size], own.topk_ids[:size])
        np.testing.assert_allclose(again.topk_logprobs[:size], own.topk_logprobs[:size], atol=2e-2)


def test_given_responses_need_no_target_without_distributions(
    recipe: LogRecipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "foredraft.train.collect.Target.load", lambda *_: pytest.fail("the target was loaded")
    )
    write_lines(Path(str(recipe.prompts)), [{"messages": [USER, SAID]}])
    [row] = collect(replace(recipe, top_k_logprobs=0), "recipe").rows()
    assert row.topk_ids.shape == (len(row.response_ids), 0)


def test_data_without_responses_is_refused(recipe: LogRecipe) -> None:
    write_lines(Path(str(recipe.prompts)), [{"messages": [USER]}])
    with pytest.raises(ValueError, match=r"no prompt with a response in .*use `responses: target`"):
        collect(recipe, "recipe")


def test_a_prompt_of_several_sources_is_logged_once(recipe: LogRecipe, tmp_path: Path) -> None:
    one = write_lines(tmp_path / "a.jsonl", [{"messages": [USER]}, {"prompt": "Why?"}])
    two = write_lines(tmp_path / "b.jsonl", [{"prompt": "Explain rain."}, {"prompt": "How?"}])
    sources = tuple(PromptSource(kind="jsonl", path=str(path)) for path in (one, two))
    groups = (ResponseGroup(responses=1, temperature=0.0), ResponseGroup(responses=2, temperature=1.0))
    log = collect(replace(recipe, prompts=sources, responses="target", groups=groups), "recipe")
    rows = list(log.rows())
    assert len({row.request_id for row in rows}) == 3
    assert [row.temperature for row in rows] == [0.0, 1.0, 1.0] * 3


class CompletionHandler(BaseHTTPRequestHandler):
    """Answers every prompt with its last two tokens in vLLM's form; fails the first time."""

    seen: ClassVar[list[dict[str, Any]]] = []
    num_failures = 1
    names_ids = True

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        kind = type(self)
        if kind.num_failures:
            kind.num_failures -= 1
            return self.answer(503, {"error": "busy"})
        kind.seen.append({**body, "key": self.headers.get("Authorization")})
        ids = body["prompt"][-2:]
        names = [f"token_id:{i}" if kind.names_ids else "text" for i in ids]
        top = [{name: -0.5, "token_id:7": -1.5} for name in names]
        choice = {"text": "", "finish_reason": "stop", "logprobs": {"tokens": names, "top_logprobs": top}}
        return self.answer(200, {"choices": [choice]})

    def answer(self, status: int, content: dict[str, Any]) -> None:
        data = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def server() -> Iterator[str]:
    CompletionHandler.seen, CompletionHandler.num_failures, CompletionHandler.names_ids = [], 1, True
    running = ThreadingHTTPServer(("127.0.0.1", 0), CompletionHandler)
    threading.Thread(target=running.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{running.server_address[1]}/v1"
    running.shutdown()
    running.server_close()


def test_a_server_decodes_in_our_place(
    recipe: LogRecipe, server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    write_lines(Path(str(recipe.prompts)), [{"messages": [USER]}, {"prompt": "Why?"}, {"prompt": "How?"}])
    remote = replace(
        recipe,
        responses="target",
        groups=(
            ResponseGroup(responses=1, temperature=0.0),
            ResponseGroup(responses=1, temperature=1.0, top_k=5),
        ),
        server=ServerRecipe(url=server, model="tiny", concurrency=2),
        top_k_logprobs=4,
    )
    rows = list(collect(remote, "recipe").rows())
    assert [row.temperature for row in rows] == [0.0, 1.0] * 3
    for row in rows:
        assert row.response_ids.tolist() == row.prompt_ids[-2:].tolist()
        assert row.topk_ids[:, 0].tolist() == row.response_ids.tolist()
        assert all(len(set(ids)) == 4 for ids in row.topk_ids.tolist())
        np.testing.assert_allclose(row.tail_mass, 1 - np.exp(-0.5) - np.exp(-1.5), atol=1e-3)
        assert (row.source, row.is_targets) == ("server", row.temperature == 0.0)
    assert len(CompletionHandler.seen) == 6
    assert {call["key"] for call in CompletionHandler.seen} == {"Bearer secret"}
    assert {call.get("top_k") for call in CompletionHandler.seen} == {None, 5}
    CompletionHandler.names_ids = False
    with pytest.raises(
        ValueError, match=r"gives no token ids \(expected logprobs.tokens like `token_id:123`"
    ):
        collect(replace(remote, out=remote.out + "-2"), "recipe")
    nobody = replace(
        remote, out=remote.out + "-3", server=ServerRecipe(url="http://127.0.0.1:9/v1", model="x", retries=0)
    )
    with pytest.raises(ValueError, match="cannot be reached"):
        collect(nobody, "recipe")
