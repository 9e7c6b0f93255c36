"""Where prompts come from: JSONL files, folders of request/response logs, datasets of the Hub.

All give the same: a conversation up to the user's turn, and the response to it where the data holds one.
"""

from __future__ import annotations

import gzip
import itertools
import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from foredraft.infer.prompts import Prompt, read_prompts
from foredraft.train.log_recipe import PromptSource

ROLES = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system"}


@dataclass(frozen=True, slots=True)
class Sample:
    """A prompt with what the data says of it."""

    prompt: Prompt
    response: str | None = None
    is_ended: bool = True  # the response ended by itself, not at a limit
    split: str | None = None  # train | heldout, where the data says so
    where: str = ""  # for messages


def read_samples(source: PromptSource) -> Iterator[Sample]:
    """Samples of a source in its order, at most its limit.

    Raises:
        ValueError: nothing there, or nothing in it that can be used.
    """
    read = {"jsonl": _read_jsonl, "requests": _read_requests, "hub": _read_hub}[source.kind]
    return itertools.islice(read(source), source.limit or None)


def parted(prompt: Prompt) -> tuple[Prompt, str | None]:
    """A conversation without the assistant's last turn, and that turn."""
    *before, last = prompt.messages
    if last["role"] != "assistant" or not before:
        return prompt, None
    return replace(prompt, messages=tuple(before)), str(last["content"])


def _read_jsonl(source: PromptSource) -> Iterator[Sample]:
    lines = (
        Path(source.path).read_text(encoding="utf-8-sig").splitlines() if Path(source.path).is_file() else []
    )
    for prompt in read_prompts(source.path):
        record, where = json.loads(lines[prompt.index]), f"{source.path}, line {prompt.index + 1}"
        asked, response = parted(prompt)
        given = record.get("response", response)
        if given is not None and not isinstance(given, str):
            raise ValueError(f"{where}: `response` must be a string, found {type(given).__name__}")
        yield Sample(asked, given, split=record.get("split"), where=where)


def _read_requests(source: PromptSource) -> Iterator[Sample]:
    """OpenAI-style logs: objects with request and response, in .json and .jsonl files, also gzipped."""
    folder = Path(source.path)
    if not folder.is_dir():
        raise ValueError(f"folder of request logs {folder}: no such folder")
    files = sorted(
        path for path in folder.rglob("*") if ".json" in path.suffixes or ".jsonl" in path.suffixes
    )
    num_found = num_left = 0
    for path in files:
        for number, record in _records(path):
            sample = _sample_of(record, f"{path}, record {number}") if isinstance(record, Mapping) else None
            num_found, num_left = num_found + (sample is not None), num_left + (sample is None)
            if sample is not None:
                yield sample
    if not num_found:
        raise ValueError(
            f"folder of request logs {folder}: none of {num_left} records in {len(files)} .json(l) files is "
            "a chat completion (`messages`) or a completion (`prompt`) with or without its response"
        )
    if num_left:
        print(
            f"{folder}: {num_left} of {num_left + num_found} records left out, not requests", file=sys.stderr
        )


def _records(path: Path) -> Iterator[tuple[int, Any]]:
    """Records of a file with their numbers; None for what is not JSON."""
    content = path.read_bytes()
    text = (gzip.decompress(content) if path.suffix == ".gz" else content).decode("utf-8", "replace")
    if ".jsonl" not in path.suffixes:
        parts = _parsed(text)
        yield from enumerate(parts if isinstance(parts, list) else [parts], 1)
        return
    yield from ((n, _parsed(line)) for n, line in enumerate(text.splitlines(), 1) if line.strip())


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return None


def _sample_of(record: Mapping[str, Any], where: str) -> Sample | None:
    """A request with its response; None for what is none. Batch output keeps the body one level down."""
    request = _body(record.get("request", record))
    response = _body(record.get("response") or {})
    choices = response.get("choices") or [{}]
    choice = choices[0] if isinstance(choices, list) and isinstance(choices[0], Mapping) else {}
    is_ended = choice.get("finish_reason") in (None, "stop")
    if isinstance(request.get("messages"), list) and request["messages"]:
        messages = [message for message in map(_message, request["messages"]) if message is not None]
        if len(messages) != len(request["messages"]):
            return None
        asked, own = parted(Prompt(where, tuple(messages)))
        said = (choice.get("message") or {}).get("content", own)
    elif isinstance(request.get("prompt"), str) and request["prompt"]:
        asked, said = Prompt.from_text(request["prompt"]), choice.get("text")
    else:
        return None
    return Sample(asked, said if isinstance(said, str) else None, is_ended, where=where)


def _body(value: Any) -> Mapping[str, Any]:
    body = value.get("body", value) if isinstance(value, Mapping) else {}
    return body if isinstance(body, Mapping) else {}


def _message(message: Any) -> dict[str, str] | None:
    """A turn in OpenAI's or ShareGPT's form as role and text; None for other content."""
    if not isinstance(message, Mapping):
        return None
    role = ROLES.get(str(message.get("role", message.get("from"))))
    content = message.get("content", message.get("value"))
    if isinstance(content, list):
        texts = [
            part["text"]
            for part in content
            if isinstance(part, Mapping) and isinstance(part.get("text"), str)
        ]
        content = "".join(texts) if len(texts) == len(content) > 0 else None
    return {"role": role, "content": content} if role and isinstance(content, str) else None


def _read_hub(source: PromptSource) -> Iterator[Sample]:
    """Rows of a dataset, streamed: only what is taken is downloaded."""
    from datasets import load_dataset

    rows = load_dataset(source.path, source.subset, split=source.split, streaming=True)
    num_left = num_found = 0
    for number, row in enumerate(rows, 1):
        if source.column not in row:
            raise ValueError(
                f"dataset {source.path} has no column {source.column!r}, found {', '.join(row)}; set `column`"
            )
        value, where = row[source.column], f"{source.path}, row {number}"
        turns = [{"role": "user", "content": value}] if isinstance(value, str) else list(value or ())
        sample = _sample_of({"messages": turns}, where)
        num_found, num_left = num_found + (sample is not None), num_left + (sample is None)
        if sample is not None:
            yield sample
    if not num_found:
        raise ValueError(
            f"dataset {source.path}: no conversation in column {source.column!r} of {num_left} rows"
        )
