"""Messages survive the wire unchanged; anything else is one clear error, never another exception."""

import contextlib
import random

import msgspec
import pytest

from foredraft.infer import messages
from foredraft.infer.params import SamplingParams, SpeculationParams

OPEN = messages.Open(
    request="7",
    round=3,
    token_ids=[1, 2, 49151],
    sampling=SamplingParams(
        seed=2**64 - 1,
        choice=1,
        temperature=0.7,
        top_k=40,
        top_p=0.95,
        min_p=0.05,
        repetition_penalty=1.1,
        stop=("\n",),
    ),
    eos_ids=[0, 2],
    max_tokens=100,
    speculation=SpeculationParams(block="chain", budget=16, on_miss="wait", lockstep=4),
)
BLOCK = messages.Block(
    request="7", round=4, kind="hit", ids=[5, 6, 5], parents=[-1, -1, 1], path_probs=[0.5, 0.25, 0.125]
)
EVERY = [
    OPEN,
    messages.Outcome(request="7", round=4, base_position=3, settled=[5, 9]),
    BLOCK,
    messages.Block(request="7", round=4, kind="miss"),
    messages.Unknown(request="7", round=4),
    messages.Close(request="7", round=9),
    messages.Ping(round=1),
    messages.Pong(round=1),
    messages.Stats(request="7", values={"expansions": 12.0}),
    messages.Ready(family="lm", max_depth=64, max_positions=2048, tokenizer_sha256="ab", seconds_loading=1.5),
    messages.Error(request="7", round=4, code="refused", text="the drafter holds 2048 positions"),
]


@pytest.mark.parametrize("message", EVERY, ids=lambda message: type(message).__name__)
def test_round_trip(message: messages.Message) -> None:
    decoded = messages.decode(messages.encode(message))
    assert decoded == message
    assert type(decoded) is type(message)


def test_every_message_names_request_and_round() -> None:
    for message in EVERY:
        fields = msgspec.msgpack.decode(messages.encode(message))
        assert fields[0] == messages.PROTOCOL_VERSION
        assert {"type", "request", "round"} <= fields[1].keys()


def test_other_version_is_named() -> None:
    frame = msgspec.msgpack.encode((99, {"type": "ping", "new_field": 1}))
    with pytest.raises(messages.MessageError, match="version 2, got 99"):
        messages.decode(frame)


BAD_BODIES = {
    "no type": {"request": "7"},
    "unknown type": {"type": "exec", "request": "7"},
    "negative token": {"type": "outcome", "base_position": 0, "settled": [-1]},
    "huge token": {"type": "outcome", "base_position": 0, "settled": [2**31]},
    "nothing settled": {"type": "outcome", "base_position": 0, "settled": []},
    "negative round": {"type": "ping", "round": -1},
    "string token": {"type": "outcome", "base_position": 0, "settled": ["a"]},
    "lengths differ": {"type": "block", "kind": "hit", "ids": [1], "parents": [], "path_probs": []},
    "parent after child": {"type": "block", "kind": "hit", "ids": [1], "parents": [0], "path_probs": [1.0]},
    "parent below root": {"type": "block", "kind": "hit", "ids": [1], "parents": [-2], "path_probs": [1.0]},
    "twins": {"type": "block", "kind": "hit", "ids": [1, 1], "parents": [-1, -1], "path_probs": [0.5, 0.5]},
    "sampling out of range": {
        "type": "open",
        "token_ids": [1],
        "max_tokens": 1,
        "sampling": {"top_p": 7.0, "seed": 1},
        "speculation": {},
    },
    "no seed": {"type": "open", "token_ids": [1], "max_tokens": 1, "sampling": {}, "speculation": {}},
}


@pytest.mark.parametrize("body", BAD_BODIES.values(), ids=BAD_BODIES.keys())
def test_bad_body_is_refused(body: dict[str, object]) -> None:
    with pytest.raises(messages.MessageError, match="not a message"):
        messages.decode(msgspec.msgpack.encode((messages.PROTOCOL_VERSION, body)))


def test_rubbish_never_raises_anything_else() -> None:
    rng = random.Random(0)
    frames = [messages.encode(message) for message in EVERY]
    frames += [b"", b"\x92", b"\x92\x01", b"\x92\x01" + b"\x91" * 5000, b"\xc1" * 10, b"GET / HTTP/1.1\r\n"]
    for _ in range(5000):
        frame = bytearray(rng.choice(frames))
        for _ in range(rng.randint(0, 4)):
            start, end = (rng.randrange(len(frame) + 1) for _ in range(2))
            frame[start:end] = rng.randbytes(rng.randint(0, 3))
        with contextlib.suppress(messages.MessageError):
            messages.decode(bytes(frame))


def test_readiness_is_having_a_guess() -> None:
    assert BLOCK.is_ready
    assert not messages.Block(kind="miss").is_ready
