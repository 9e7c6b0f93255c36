"""Prompt files and their encoding: JSONL in, chat template applied, one seed a line.

A line is an object with `messages` (OpenAI chat form, several turns) or `prompt` (one user turn). `id`
defaults to the line number, counted from 1; other keys are left alone.
"""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

NUM_SEEDS = 2**64

Message = Mapping[str, Any]  # role, content and whatever else a chat template reads


class ChatTokenizer(Protocol):
    """What is used of a transformers tokenizer."""

    chat_template: Any
    bos_token_id: int | None

    def __call__(self, text: str, *, add_special_tokens: bool) -> Mapping[str, list[int]]:
        """`input_ids` of a text."""
        ...

    def apply_chat_template(
        self, conversation: list[dict[str, Any]], *, add_generation_prompt: bool, tokenize: bool
    ) -> str:
        """The rendered conversation."""
        ...


@dataclass(frozen=True, slots=True)
class Prompt:
    """One line of a prompt file: a conversation, and the index that its seed is derived from.

    text is the bare text of a line with `prompt`, which `--raw` needs; None for `messages`.
    """

    id: str | int
    messages: tuple[Message, ...]
    text: str | None = None
    index: int = 0  # line number - 1

    @classmethod
    def from_text(cls, text: str) -> Prompt:
        """A prompt of one user turn that stands alone, as line 1 of a file would."""
        return cls(id=1, messages=({"role": "user", "content": text},), text=text)


def read_prompts(path: str | Path) -> list[Prompt]:
    """Read a JSONL prompt file in order; blank lines are skipped but counted.

    Raises:
        ValueError: no such file, no prompt in it, or a line that is not a prompt (named by file and number).
    """
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"prompt file {path}: no such file")
    lines = path.read_bytes().removeprefix(b"\xef\xbb\xbf").splitlines()
    prompts = [_parse(line, f"{path}, line {i + 1}", i) for i, line in enumerate(lines) if line.strip()]
    if not prompts:
        raise ValueError(f"prompt file {path}: no prompts in it, expected one JSON object a line")
    return prompts


def encode(prompt: Prompt, tokenizer: ChatTokenizer, *, raw: bool = False) -> list[int]:
    """Token ids of a prompt: its chat template with the assistant's turn opened, or its bare text if `raw`.

    A tokenizer that adds BOS to a text that starts with one does not get two.

    Raises:
        ValueError: no chat template, `messages` with `raw`, a template that refuses them, or no tokens.
    """
    if raw and prompt.text is None:
        raise ValueError(f"prompt {prompt.id}: --raw takes `prompt` lines, `messages` need the chat template")
    if raw:
        assert prompt.text is not None, "checked above"
        token_ids = list(tokenizer(prompt.text, add_special_tokens=True)["input_ids"])
    else:
        rendered = _render(prompt, tokenizer)
        token_ids = list(tokenizer(rendered, add_special_tokens=False)["input_ids"])
    bos = tokenizer.bos_token_id
    if bos is not None and token_ids[:2] == [bos, bos]:
        del token_ids[0]
    if not token_ids:
        raise ValueError(f"prompt {prompt.id}: no tokens in it")
    return token_ids


def encode_all(
    prompts: Sequence[Prompt], tokenizer: ChatTokenizer, *, raw: bool = False, max_tokens: int
) -> list[list[int]]:
    """`encode` of every prompt, so that one that cannot be decoded is found before the first one is.

    Raises:
        ValueError: as `encode`; a prompt of more than `max_tokens` tokens.
    """
    encoded = [encode(prompt, tokenizer, raw=raw) for prompt in prompts]
    for prompt, token_ids in zip(prompts, encoded, strict=True):
        if len(token_ids) > max_tokens:
            raise ValueError(
                f"prompt {prompt.id} has {len(token_ids)} tokens, expected at most {max_tokens}: the context"
                " must also hold an answer; shorten it or use another target"
            )
    return encoded


def draw_seed() -> int:
    """A random seed in [0, 2^64)."""
    return secrets.randbits(64)


def line_seed(base: int, prompt: Prompt) -> int:
    """The seed of a prompt: base + index modulo 2^64, so that it can be repeated alone."""
    return (base + prompt.index) % NUM_SEEDS


def _render(prompt: Prompt, tokenizer: ChatTokenizer) -> str:
    if not tokenizer.chat_template:
        raise ValueError("this tokenizer has no chat template: use --raw with `prompt` lines")
    try:
        return tokenizer.apply_chat_template(
            [dict(message) for message in prompt.messages], add_generation_prompt=True, tokenize=False
        )
    except Exception as error:  # templates raise what they like: jinja2 errors, TypeError, KeyError
        raise ValueError(f"prompt {prompt.id}: the chat template refuses its messages: {error}") from error


def _parse(line: bytes, where: str, index: int) -> Prompt:
    try:
        record = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise ValueError(f"{where}: not UTF-8 (byte {error.start + 1})") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"{where}: not valid JSON: {error.msg} at column {error.colno}") from None
    if not isinstance(record, dict):
        raise ValueError(f"{where}: expected an object with `messages` or `prompt`, found {_kind(record)}")
    prompt_id = record.get("id", index + 1)
    if not isinstance(prompt_id, str | int) or isinstance(prompt_id, bool):
        raise ValueError(f"{where}: `id` must be a string or an integer, found {_kind(prompt_id)}")
    if ("prompt" in record) == ("messages" in record):
        found = "both" if "prompt" in record else f"only {', '.join(map(repr, record)) or 'nothing'}"
        raise ValueError(f"{where}: expected either `messages` or `prompt`, found {found}")
    if "messages" in record:
        return Prompt(prompt_id, _parse_messages(record["messages"], where), None, index)
    text = record["prompt"]
    if not isinstance(text, str) or not text:
        raise ValueError(f"{where}: `prompt` must be a non-empty string, found {_kind(text)}")
    return Prompt(prompt_id, ({"role": "user", "content": text},), text, index)


def _parse_messages(messages: Any, where: str) -> tuple[Message, ...]:
    if not isinstance(messages, list) or not messages:
        raise ValueError(f"{where}: `messages` must be a non-empty list, found {_kind(messages)}")
    return tuple(_parse_message(message, f"{where}, message {i + 1}") for i, message in enumerate(messages))


def _parse_message(message: Any, where: str) -> Message:
    if not isinstance(message, dict):
        raise ValueError(f"{where}: expected an object with `role` and `content`, found {_kind(message)}")
    role, content = message.get("role"), message.get("content")
    if isinstance(content, list):
        content = _join_parts(content, where)
    for name, value in (("role", role), ("content", content)):
        if not isinstance(value, str):
            raise ValueError(f"{where}: `{name}` must be a string, found {_kind(value)}")
    return {**message, "content": content}


def _join_parts(parts: list[Any], where: str) -> str:
    """The text of OpenAI's list form of `content`."""
    for part in parts:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise ValueError(f"{where}: only text parts can be used, found {json.dumps(part)[:80]}")
    return "".join(part["text"] for part in parts)


def _kind(value: Any) -> str:
    """How a JSON value is called in messages."""
    if value is None:
        return "nothing"
    kinds = {bool: "a boolean", int: "a number", float: "a number", str: "a string", list: "a list"}
    is_empty = isinstance(value, str | list | dict) and not value
    return kinds.get(type(value), "an object") + (" that is empty" if is_empty else "")


def hash_prompt(token_ids: Sequence[int]) -> str:
    """Name of a prompt: 32 hex digits of the SHA-256 of its tokens."""
    return hashlib.sha256(np.asarray(token_ids, "<i4").tobytes()).hexdigest()[:32]
