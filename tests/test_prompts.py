"""Prompt files: what is read, what is refused and how; encoding with and without the template."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
from tokenizers import processors
from transformers import PreTrainedTokenizerFast

from foredraft.infer.prompts import Prompt, draw_seed, encode, line_seed, read_prompts


def write(tmp_path: Path, text: str | bytes) -> Path:
    path = tmp_path / "p.jsonl"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


@pytest.fixture
def tokenizer(tiny_tokenizer: PreTrainedTokenizerFast) -> PreTrainedTokenizerFast:
    """A copy that a test may change."""
    return copy.deepcopy(tiny_tokenizer)


def test_both_forms_in_order(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        '\ufeff{"prompt": "hi\u2028there", "category": "x"}\n\n'
        '{"id": "b", "messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"},'
        ' {"role": "user", "content": [{"type": "text", "text": "r"}, {"type": "text", "text": "s"}]}]}\r\n'
        '{"id": 7, "prompt": "last"}',
    )
    first, second, third = read_prompts(path)
    assert first == Prompt(1, ({"role": "user", "content": "hi\u2028there"},), "hi\u2028there", 0)
    assert [message["content"] for message in second.messages] == ["q", "a", "rs"]
    assert (second.id, second.text, second.index) == ("b", None, 2)
    assert (third.id, third.index) == (7, 3)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ('{"prompt": "a"', "line 2: not valid JSON: Expecting ',' delimiter at column 15"),
        ('["a"]', "line 2: expected an object with `messages` or `prompt`, found a list"),
        ('{"text": "a"}', "line 2: expected either `messages` or `prompt`, found only 'text'"),
        ("{}", "found only nothing"),
        ('{"prompt": "a", "messages": []}', "found both"),
        ('{"prompt": 3}', "`prompt` must be a non-empty string, found a number"),
        ('{"prompt": ""}', "found a string that is empty"),
        ('{"id": 1.5, "prompt": "a"}', "`id` must be a string or an integer, found a number"),
        ('{"id": true, "prompt": "a"}', "found a boolean"),
        ('{"messages": []}', "`messages` must be a non-empty list, found a list that is empty"),
        ('{"messages": "a"}', "must be a non-empty list, found a string"),
        ('{"messages": ["a"]}', "line 2, message 1: expected an object with `role` and `content`"),
        ('{"messages": [{"role": "user"}]}', "message 1: `content` must be a string, found nothing"),
        ('{"messages": [{"content": "a"}]}', "message 1: `role` must be a string, found nothing"),
        ('{"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}', "only text parts"),
    ],
)  # fmt: skip
def test_refusals(tmp_path: Path, line: str, expected: str) -> None:
    path = write(tmp_path, '{"prompt": "fine"}\n' + line + "\n")
    with pytest.raises(ValueError) as error:
        read_prompts(path)
    assert str(error.value).startswith(f"{path}, line 2")
    assert expected in str(error.value)


def test_bad_bytes_missing_and_empty_files(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="line 1: not UTF-8"):
        read_prompts(write(tmp_path, b'{"prompt": "\xff"}'))
    with pytest.raises(ValueError, match=r"nowhere\.jsonl: no such file"):
        read_prompts(tmp_path / "nowhere.jsonl")
    with pytest.raises(ValueError, match="no prompts in it"):
        read_prompts(write(tmp_path, "\n \n"))


def test_template_opens_the_assistants_turn(tokenizer: PreTrainedTokenizerFast) -> None:
    token_ids = encode(Prompt.from_text("hi"), tokenizer)
    assert tokenizer.decode(token_ids) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


def test_raw_is_the_bare_text(tokenizer: PreTrainedTokenizerFast) -> None:
    assert tokenizer.decode(encode(Prompt.from_text("hi"), tokenizer, raw=True)) == "hi"
    with pytest.raises(ValueError, match="prompt x: --raw takes `prompt` lines"):
        encode(Prompt("x", ({"role": "user", "content": "hi"},)), tokenizer, raw=True)


def test_never_two_bos(tokenizer: PreTrainedTokenizerFast) -> None:
    bos = tokenizer.bos_token_id
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{tokenizer.bos_token} $A", special_tokens=[(tokenizer.bos_token, bos)]
    )
    assert tokenizer("hi")["input_ids"][0] == bos
    for prompt, raw in (("hi", False), ("hi", True), (f"{tokenizer.bos_token}hi", True)):
        token_ids = encode(Prompt.from_text(prompt), tokenizer, raw=raw)
        assert token_ids[0] == bos
        assert token_ids[1] != bos


def test_no_chat_template(tokenizer: PreTrainedTokenizerFast) -> None:
    tokenizer.chat_template = None
    with pytest.raises(ValueError, match="no chat template: use --raw"):
        encode(Prompt.from_text("hi"), tokenizer)


def test_a_template_that_refuses(tokenizer: PreTrainedTokenizerFast) -> None:
    tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(
        ValueError, match="prompt 1: the chat template refuses its messages: roles must alternate"
    ):
        encode(Prompt.from_text("hi"), tokenizer)


def test_seeds() -> None:
    prompts = [Prompt(i + 1, (), index=i) for i in range(3)]
    assert [line_seed(2**64 - 1, prompt) for prompt in prompts] == [2**64 - 1, 0, 1]
    assert line_seed(5, Prompt.from_text("alone")) == 5
    assert 0 <= draw_seed() < 2**64
    assert draw_seed() != draw_seed()
