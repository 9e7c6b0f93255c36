"""Stop rules and incremental text, with a byte-level and a sentencepiece-like tokenizer."""

from __future__ import annotations

import random
import time

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from foredraft.infer.params import SamplingParams
from foredraft.infer.stopping import StopChecker, StopResult

WORDS = ["▁Hello", "▁world", "▁", "▁a", "b", "c", ".", "▁end", "ing", "ab", "▁▁", "\n", "é"]


def build_sentencepiece_like() -> PreTrainedTokenizerFast:
    """Llama 2's decoder: ▁ is a space, bytes fall back to <0xNN>, the first space of a text is dropped."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *WORDS]
    backend = Tokenizer(models.BPE({piece: i for i, piece in enumerate(pieces)}, [], byte_fallback=True))
    backend.add_special_tokens([AddedToken(piece, special=True) for piece in pieces[:3]])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )


SENTENCEPIECE = build_sentencepiece_like()
EOS = SENTENCEPIECE.convert_tokens_to_ids("</s>")


def ids(*pieces: str) -> list[int]:
    return SENTENCEPIECE.convert_tokens_to_ids(list(pieces))


def checker(
    *stop: str, limit: int = 10_000, tokenizer: object = SENTENCEPIECE, **options: bool
) -> StopChecker:
    params = SamplingParams(stop=stop, max_new_tokens=limit, **options)
    return StopChecker(tokenizer, [EOS], params)


def test_eos_ends_and_stays_out_of_the_text() -> None:
    stops = checker()
    assert stops.feed(ids("▁Hello", "▁world")) == StopResult(2, None)
    assert stops.feed([*ids("."), EOS, *ids("▁a")]) == StopResult(2, "stop")
    assert stops.token_ids == [*ids("▁Hello", "▁world", "."), EOS]
    assert stops.text == "Hello world."
    assert stops.feed(ids("▁a")) == StopResult(0, "stop")


def test_several_eos_ids_and_ignore_eos() -> None:
    stops = StopChecker(SENTENCEPIECE, [EOS, *ids("▁end")], SamplingParams())
    assert stops.feed(ids("▁a", "▁end", "b")) == StopResult(2, "stop")
    assert stops.text == "a"
    ignoring = checker(ignore_eos=True)
    assert ignoring.feed([*ids("▁a"), EOS, *ids("▁a")]) == StopResult(3, None)
    assert ignoring.text == "a a"


def test_length() -> None:
    stops = checker(limit=3)
    assert stops.feed(ids("▁a", "▁a")) == StopResult(2, None)
    assert stops.feed(ids("b", "▁a")) == StopResult(1, "length")
    assert stops.text == "a ab"
    assert checker(limit=1).feed([EOS]) == StopResult(1, "stop")


def test_stop_string_over_several_tokens_and_inside_one() -> None:
    # "b c" begins inside `ab`, and ends inside nothing: the token `c` completes it
    stops = checker("b c")
    assert stops.feed(ids("▁Hello", "▁", "ab", "▁", "c", ".", "▁a")) == StopResult(5, "stop")
    assert stops.text == "Hello a"
    # completed in the middle of a token, whose rest is cut too
    stops = checker("Hel")
    assert stops.feed(ids("▁a", "▁Hello")) == StopResult(2, "stop")
    assert stops.text == "a "
    assert stops.token_ids == ids("▁a", "▁Hello")


def test_the_stop_string_that_is_complete_first_wins() -> None:
    stops = checker("Hello world", "lo")
    stops.feed(ids("▁Hello", "▁world"))
    assert stops.text == "Hel"
    longer = checker("world", "o world")
    longer.feed(ids("▁Hello", "▁world"))
    assert longer.text == "Hell"


def test_a_stop_string_at_the_limit_is_a_stop() -> None:
    assert checker("a", limit=1).feed(ids("▁a")) == StopResult(1, "stop")


def test_a_special_token_as_stop_string() -> None:
    stops = checker("<s>")
    assert stops.feed(ids("▁a", "<s>", "▁a")) == StopResult(2, "stop")
    assert stops.text == "a"


def test_stop_string_of_several_bytes_tokens() -> None:
    stops = checker("é")
    assert stops.feed(ids("▁a", "<0xC3>", "<0xA9>", "▁a")) == StopResult(3, "stop")
    assert stops.text == "a"


def test_streaming_holds_back_stop_prefixes_and_incomplete_characters() -> None:
    stops = checker("\n\nab")
    deltas = []
    for token in ids("▁a", "\n", "\n", "▁a", "<0xC3>", "<0xA9>", "\n", "\n", "ab"):
        stops.feed([token])
        deltas.append(stops.text_delta())
    assert deltas == ["a", "", "", "\n\n a", "", "é", "", "", ""]
    assert stops.text == "a\n\n aé"


def test_what_is_held_back_comes_at_the_end() -> None:
    stops = checker("\n\nab", limit=3)
    stops.feed(ids("▁a", "\n", "<0xC3>"))
    assert stops.text_delta() == "a\n\ufffd"
    assert stops.text_delta() == ""


def test_without_a_tokenizer() -> None:
    stops = StopChecker(None, [5], SamplingParams(max_new_tokens=9))
    assert stops.feed([1, 2, 5, 7]) == StopResult(3, "stop")
    assert stops.text == stops.text_delta() == ""
    with pytest.raises(ValueError, match="need a tokenizer"):
        StopChecker(None, [5], SamplingParams(stop=("x",)))


def random_bytes_text(rng: random.Random) -> list[int]:
    return [rng.choice([*range(3, 259), *ids(*WORDS) * 8]) for _ in range(60)]


def random_text(rng: random.Random) -> str:
    return "".join(rng.choice(["a", " ", "é", "你", "🙂", "\n", ".", "xyz", "  "]) for _ in range(40))


@pytest.mark.parametrize("seed", range(20))
def test_stream_equals_decode_whatever_the_blocks(seed: int, tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    rng = random.Random(seed)
    tokens = tiny_tokenizer(random_text(rng), add_special_tokens=False)["input_ids"]
    tokens = tokens[: rng.randrange(1, len(tokens))]
    streamed, start = "", 0
    stops = StopChecker(tiny_tokenizer, [], SamplingParams(max_new_tokens=len(tokens)))
    while start < len(tokens):
        end = start + rng.randrange(1, 9)
        stops.feed(tokens[start:end])
        streamed += stops.text_delta()
        start = end
    assert streamed == stops.text == tiny_tokenizer.decode(tokens, skip_special_tokens=True)


@pytest.mark.parametrize("seed", range(20))
def test_sentencepiece_text_equals_decode(seed: int) -> None:
    rng = random.Random(seed)
    # well-formed characters as runs of byte tokens, special tokens, words, spaces
    parts = [*([word] for word in WORDS), ["<s>"], ["<0xE4>", "<0xBD>", "<0xA0>"], ["<0xC3>", "<0xA9>"]]
    tokens = [token for _ in range(40) for token in ids(*rng.choice(parts))]
    stops = checker(ignore_eos=True)
    streamed = ""
    for token in tokens:
        stops.feed([token])
        streamed += stops.text_delta()
    assert streamed == stops.text == SENTENCEPIECE.decode(tokens, skip_special_tokens=True)


@pytest.mark.parametrize("seed", range(10))
def test_rubbish_bytes_are_shown_alike_in_every_block_size(seed: int) -> None:
    tokens = random_bytes_text(random.Random(seed))
    texts = set()
    for size in (1, 3, 60):
        stops = checker("zz", limit=len(tokens))
        streamed = ""
        for start in range(0, len(tokens), size):
            stops.feed(tokens[start : start + size])
            streamed += stops.text_delta()
        assert streamed == stops.text
        texts.add(stops.text)
    assert len(texts) == 1


@pytest.mark.parametrize("seed", range(20))
def test_stop_strings_against_a_plain_search(seed: int, tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    rng = random.Random(100 + seed)
    tokens = tiny_tokenizer(random_text(rng), add_special_tokens=False)["input_ids"]
    stop = tuple(random_text(rng)[: rng.randrange(1, 4)] for _ in range(3))
    stops = StopChecker(tiny_tokenizer, [], SamplingParams(max_new_tokens=10_000, stop=stop))
    result = stops.feed(tokens)
    texts = [tiny_tokenizer.decode(tokens[:n]) for n in range(len(tokens) + 1)]
    with_stop = [n for n, text in enumerate(texts) if any(s in text for s in stop)]
    if not with_stop:
        assert result == StopResult(len(tokens), None)
        return
    assert result == StopResult(with_stop[0], "stop")
    text = texts[with_stop[0]]
    first_end, start = min((text.find(s) + len(s), text.find(s)) for s in stop if s in text)
    assert stops.text == text[:start]
    assert not any(s in text[: first_end - 1] for s in stop)


def test_cost_does_not_grow_with_the_output() -> None:
    def seconds(num_tokens: int) -> float:
        stops = checker("never there", limit=num_tokens)
        tokens = ids("▁Hello", "▁world", ".") * (num_tokens // 3)
        start = time.thread_time()
        for token in tokens:
            stops.feed([token])
            stops.text_delta()
        return time.thread_time() - start

    seconds(30)
    assert seconds(6000) / 6000 < 5 * min(seconds(300), seconds(300)) / 300
