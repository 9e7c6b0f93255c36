"""The messages between engine and draft server: typed, versioned, small; never logits.

Token ids suffice, but for drafters that feed on states of the target: these get them in chunks.

A frame is the msgpack array [version, message]; a message is a map with its `type`. Every message carries
the request it is about (empty: the server itself) and a round. Each open and outcome of a request has a
higher round than the one before and is answered by at most one block, unknown or error of the same round: the
answer to a round that another one has overtaken is not sent. A lost or late message can only cost speed.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from foredraft.infer.params import SamplingParams, SpeculationParams

PROTOCOL_VERSION = 2
MAX_FRAME_BYTES = 16 << 20
MAX_STATE_BYTES = 1 << 20  # of one message: a long prompt must not keep an outcome waiting
SUM_TOLERANCE = 1e-4  # of float32 probabilities

TokenId = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]
Count = Annotated[int, msgspec.Meta(ge=0)]
OutcomeKind = Literal["open", "hit", "leaf", "miss"]  # open: an open is answered, there was no outcome
BlockSource = Literal["draft", "ngram"]
ErrorCode = Literal["refused", "failed"]  # refused: the drafter cannot hold the request; failed: it raised


class MessageError(ValueError):
    """A frame that is not a message of this protocol version: says what was expected and what was found."""


class _Message(msgspec.Struct, frozen=True, kw_only=True, tag_field="type"):
    """What every message carries. request: unique among the open requests of one engine; round: from 0."""

    request: str = ""
    round: Count = 0


class Open(_Message, tag="open", frozen=True, kw_only=True):
    """Engine to server: serve this request from now on. Opening an open request again replaces it.

    sampling carries the seed, resolved also where the user gave none, and the choice.
    """

    token_ids: Annotated[list[TokenId], msgspec.Meta(min_length=1)]  # prompt and all that is settled
    num_prompt: Count | None = None  # of them are the prompt; None: all
    sampling: SamplingParams
    eos_ids: list[TokenId] = []
    max_tokens: Count  # that may still follow token_ids
    speculation: SpeculationParams

    def __post_init__(self) -> None:
        if self.sampling.seed is None:
            raise ValueError("sampling must have a seed by now: engine and drafter draw the same noise")


class Outcome(_Message, tag="outcome", frozen=True, kw_only=True):
    """Engine to server: a verification ended. settled [n >= 1]: accepted guesses, then the target's token."""

    base_position: Count  # absolute position of settled[0]
    settled: Annotated[list[TokenId], msgspec.Meta(min_length=1)]


class States(_Message, tag="states", frozen=True, kw_only=True):
    """Engine to server, before the outcome that they belong to: the target's states of settled tokens.

    Rows of bfloat16 bits in the machine's order, layers side by side as the drafter's card names them. They
    follow those of the last message; for drafters that want the last row only, any may be left out.
    """

    base_position: Count  # absolute position of the first row
    num_rows: Annotated[int, msgspec.Meta(ge=1)]
    bits: bytes

    def __post_init__(self) -> None:
        if not self.bits or len(self.bits) % (2 * self.num_rows):
            raise ValueError(f"{len(self.bits)} bytes are not {self.num_rows} rows of 16-bit numbers")


def _is_law(law: tuple[list[TokenId], list[float]]) -> bool:
    """Whether a guess may have been drawn from it."""
    ids, probs = law
    # not a number is not positive either
    return len(set(ids)) == len(probs) == len(ids) > 0 < min(probs) and abs(sum(probs) - 1.0) < SUM_TOLERANCE


class Block(_Message, tag="block", frozen=True, kw_only=True):
    """Server to engine: the guesses that are ready, in topological order; none is a legal answer.

    ids, parents, path_probs have one entry a guess; parents[i] < i is the index of its parent, -1 the last
    settled token. kind is decided when the outcome is read, before any further expansion.
    """

    kind: OutcomeKind
    ids: list[TokenId] = []
    parents: list[int] = []
    path_probs: list[float] = []
    laws: list[tuple[list[TokenId], list[float]]] = []  # rejection: what each guess was drawn from
    source: BlockSource = "draft"

    def __post_init__(self) -> None:
        if not len(self.ids) == len(self.parents) == len(self.path_probs):
            lengths = (len(self.ids), len(self.parents), len(self.path_probs))
            raise ValueError(f"ids, parents and path_probs must have one length, got {lengths}")
        if self.laws and len(self.laws) != len(self.ids):
            raise ValueError(f"laws must be none or one a guess, got {len(self.laws)} for {len(self.ids)}")
        if not all(map(_is_law, self.laws)):
            raise ValueError("a law must have tokens that differ, and positive probabilities of sum 1")
        if any(not -1 <= parent < row for row, parent in enumerate(self.parents)):
            raise ValueError(f"parents must come before their children, got {self.parents}")
        if len(set(zip(self.parents, self.ids, strict=True))) != len(self.ids):
            raise ValueError("children of one parent must differ")

    @property
    def is_ready(self) -> bool:
        """There is at least one guess to verify."""
        return bool(self.ids)


class Unknown(_Message, tag="unknown", frozen=True, kw_only=True):
    """Server to engine: not open here, or the outcome does not follow the last one: open it again."""


class Close(_Message, tag="close", frozen=True, kw_only=True):
    """Engine to server: the request has ended."""


class Ping(_Message, tag="ping", frozen=True, kw_only=True):
    """Engine to server: answer with a pong of the same request and round."""


class Pong(_Message, tag="pong", frozen=True, kw_only=True):
    """Server to engine: the answer to a ping."""


class Stats(_Message, tag="stats", frozen=True, kw_only=True):
    """Engine to server, without values: a question. Server to engine: counters of server and request."""

    values: dict[str, float] = {}


class Ready(_Message, tag="ready", frozen=True, kw_only=True):
    """Server to engine, before the first answer: the drafter is loaded; what it is and can hold."""

    family: str
    max_depth: int
    max_positions: int  # tokens of context; 0: no limit known
    tokenizer_sha256: str = ""
    seconds_loading: float = 0.0


class Error(_Message, tag="error", frozen=True, kw_only=True):
    """Server to engine: the request is closed and should not be opened again; text says why."""

    code: ErrorCode
    text: str


Message = Open | Outcome | States | Block | Unknown | Close | Ping | Pong | Stats | Ready | Error


class _Envelope(msgspec.Struct, array_like=True):
    """The version is read before the body, whose fields may have changed."""

    version: int
    body: msgspec.Raw


_encoder = msgspec.msgpack.Encoder()
_envelope_decoder = msgspec.msgpack.Decoder(_Envelope)
_message_decoder = msgspec.msgpack.Decoder(Message)


def encode(message: Message) -> bytes:
    """One frame for the wire."""
    return _encoder.encode((PROTOCOL_VERSION, message))


def decode(frame: bytes) -> Message:
    """The message in a frame. MessageError for anything else, whatever the bytes."""
    try:
        envelope = _envelope_decoder.decode(frame)
        if envelope.version != PROTOCOL_VERSION:
            raise MessageError(f"expected protocol version {PROTOCOL_VERSION}, got {envelope.version}")
        return _message_decoder.decode(envelope.body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, OverflowError) as error:
        raise MessageError(f"not a message ({len(frame)} bytes): {error}") from error
