"""Work for a lane, as data: what the engine makes of a plan's launch.

Everything here can be encoded (`encode`), decoded and carried out by another process with the
same result. Nothing is a live object and nothing is compared by identity: batches go by id, a
request's place on the device by *slot*, and pages and sampling are told once, when they change.

A slot keeps the last token that was sampled there, so that a decode step can be queued before the
token is known to the CPU. Hidden states between two slices of a batch stay in the lanes, by the
batch's id.
"""

from array import array
from collections.abc import Sequence

import msgspec

from twolane.common.vocabulary import LANES, LaneName
from twolane.sampling import SamplingParams

Tokens = bytes
"""Token ids, each an int64 in the machine's byte order."""


def pack(tokens: Sequence[int]) -> Tokens:
    """Token ids as bytes."""
    return (tokens if isinstance(tokens, array) else array("q", tokens)).tobytes()


def unpack(tokens: Tokens) -> memoryview:
    """The token ids again: a sequence of ints that shares the memory."""
    return memoryview(tokens).cast("q")


class Sampling(msgspec.Struct, frozen=True, array_like=True):
    """How the tokens of one request are chosen."""

    params: SamplingParams
    seed: int
    prompt_tokens: int
    """Tokens of the prompt as it was sent, from which `min_tokens` counts."""
    eos_token_ids: tuple[int, ...]
    known: Tokens = b""
    """The prompt and the output delivered so far, if penalties need them. What a lane samples from
    then on it must remember itself: steps are launched before their tokens are delivered."""

    def banned(self, position: int) -> Sequence[int]:
        """Tokens that may not be chosen at this index of the sequence."""
        if position - self.prompt_tokens >= self.params.min_tokens:
            return ()
        eos = () if self.params.ignore_eos else self.eos_token_ids
        return (*eos, *self.params.stop_token_ids)


class SlotUpdate(msgspec.Struct, frozen=True, array_like=True):
    """What a launch tells the lanes of a slot, before its work begins."""

    slot: int
    first: int
    """Index, in the slot's list of pages, of the first page below; 0 begins a new list."""
    pages: tuple[int, ...]
    """Physical pages that the slot's sequence has from now on, in order."""
    sampling: Sampling | None = None
    """How the slot's tokens are chosen from now on, if that changes."""
    adapter: int = -1
    """The adapter of the slot's request, if a new list begins, by its own slot; -1: none."""


class Scoring(msgspec.Struct, frozen=True, array_like=True):
    """Tokens of a prompt whose log-probabilities are asked for."""

    targets: Tokens
    """The tokens that follow the first ones of the chunk, one each."""
    top: int
    """Number of alternatives that are reported for each target."""


class PromptChunk(msgspec.Struct, frozen=True, array_like=True):
    """The tokens that a prompt row computes."""

    tokens: Tokens
    scoring: Scoring | None = None
    """Given if log-probabilities of the prompt are asked for."""


class PromptRow(msgspec.Struct, frozen=True, array_like=True):
    """A chunk's place in its sequence: the positions from `start` on."""

    slot: int
    start: int
    count: int
    """Tokens of the chunk."""
    samples: bool = False
    """Whether the prompt ends here, so that its first token is sampled."""


class DecodeRow(msgspec.Struct, frozen=True, array_like=True):
    """A decoding request: the token in its slot goes to `position`, the next one is sampled."""

    slot: int
    position: int
    steps: int
    """How many of the launch's steps it takes part in."""


class TokenMask(msgspec.Struct, frozen=True, array_like=True):
    """The tokens that a slot may choose from in this launch."""

    slot: int
    allowed: bytes
    """A bit for each token of the vocabulary, the lowest first: whether it may be chosen."""


class PrefillWork(msgspec.Struct, frozen=True, array_like=True, tag="prefill"):
    """Layers `first:last` of a prefill batch.

    The launch of layer 0 opens the batch. Step tokens name places in `rows`.
    """

    batch: int
    """Names the batch's hidden states from one slice to the next."""
    rows: tuple[PromptRow, ...]
    """The rows still alive: a subset of the last slice's, in its order."""
    first: int
    last: int
    finishes: bool
    """Whether `last` is the model's last layer, after which it samples."""
    chunks: tuple[PromptChunk, ...] = ()
    """The rows' tokens, one chunk each, if this launch opens the batch."""
    slots: tuple[SlotUpdate, ...] = ()
    masks: tuple[TokenMask, ...] = ()
    """Those of slots that may not choose every token, if the launch samples."""
    late: tuple[int, ...] = ()
    """Slots whose masks follow (`Lanes.set_masks`), before which nothing is sampled."""


class DecodeWork(msgspec.Struct, frozen=True, array_like=True, tag="decode"):
    """`k` decode steps."""

    rows: tuple[DecodeRow, ...]
    k: int
    slots: tuple[SlotUpdate, ...] = ()
    masks: tuple[TokenMask, ...] = ()
    """Those of slots that may not choose every token; `k` is 1 if there are any."""
    late: tuple[int, ...] = ()
    """Slots whose masks follow (`Lanes.set_masks`), before which nothing is sampled; `k` is 1 if
    there are any."""


class HybridWork(msgspec.Struct, frozen=True, array_like=True, tag="hybrid"):
    """One forward pass; step tokens number the decode rows first, then the prompt rows."""

    decode: tuple[DecodeRow, ...]
    prompts: tuple[PromptRow, ...]
    chunks: tuple[PromptChunk, ...] = ()
    """The prompt rows' tokens, one chunk each."""
    slots: tuple[SlotUpdate, ...] = ()
    masks: tuple[TokenMask, ...] = ()
    """Those of slots that may not choose every token."""
    late: tuple[int, ...] = ()
    """Slots whose masks follow (`Lanes.set_masks`), before which nothing is sampled."""


Work = PrefillWork | DecodeWork | HybridWork


class LaunchRecord(msgspec.Struct, frozen=True, array_like=True, tag="launch"):
    """The arguments of `Lanes.launch`; the lanes count their launches, from 0."""

    lane: LaneName
    units: int
    work: Work
    after: tuple[int, ...] = ()
    """Numbers of the launches that it waits for."""
    number: int = 0
    """Its own number: a lane may be launched in before another that was asked for earlier."""


class DropRecord(msgspec.Struct, frozen=True, array_like=True, tag="drop"):
    """The argument of `Lanes.drop`."""

    batch: int


class AdapterRecord(msgspec.Struct, frozen=True, array_like=True, tag="adapter"):
    """The arguments of `Lanes.load_adapter`."""

    slot: int
    path: str
    digest: bytes | None = None
    number: int = 0
    """Its own, under which every rank tells rank 0 what came of it."""


class PieceRecord(msgspec.Struct, frozen=True, array_like=True, tag="piece"):
    """Layers of the slice that is being launched, which go behind what was logged before."""

    layers: int


class FillRecord(msgspec.Struct, frozen=True, array_like=True, tag="fill"):
    """`MachineLanes.fill_kv`."""


Record = LaunchRecord | DropRecord | AdapterRecord | PieceRecord | FillRecord
"""What lanes are told, in the order in which they are told it."""

encode = msgspec.msgpack.Encoder().encode
_decoder: msgspec.msgpack.Decoder[Record] = msgspec.msgpack.Decoder(Record)


def decode(encoded: bytes) -> Record:
    """What was encoded.

    Raises:
        msgspec.DecodeError: the bytes are no record.
    """
    return _decoder.decode(encoded)


def used_by(lane: LaneName, work: Work) -> Sequence[str]:
    """What no two launches may use at a time: a lane's memory and channel, and the decode steps'
    buffers.

    The whole device excludes everything, which lets it use the prefill lane's memory. Decode steps
    are graphs that sum over the decode lane's channel, whatever lane they run in.
    """
    if lane == "device":
        return (*LANES, "steps")
    if isinstance(work, PrefillWork):
        return (lane,)
    if isinstance(work, DecodeWork) and lane != "decode":
        return (lane, "decode", "steps")
    return (lane, "steps")
