"""Work for a lane as pure data, which the engine makes from a plan's launch.

Another process can decode what `encode` returns and carry it out with the same result. Nothing here
is a live object or compared by identity: a batch has an id, and a request has a *slot* on the
device. Pages and sampling are sent once, when they change.

A slot keeps the last token that was sampled there, so that a decode step can be queued before the
token is known to the CPU. Hidden states between two slices of a batch stay in the lanes, by the
batch's id.
"""

from array import array
from collections.abc import Sequence

import msgspec

from twolane.devices import LANES, LaneName
from twolane.kernels.delta_rule.rule import StatePart
from twolane.sampling import MAX_STOP_TOKEN_IDS, SamplingParams

MAX_ENDS = 2 * MAX_STOP_TOKEN_IDS
"""Most tokens that end a request, the model's own and those of the request together."""
Tokens = bytes
"""Token ids, each an int64 in the machine's byte order."""


def pack(tokens: Sequence[int]) -> Tokens:
    """Return token ids as bytes."""
    return (tokens if isinstance(tokens, array) else array("q", tokens)).tobytes()


def unpack(tokens: Tokens) -> memoryview:
    """Return packed token ids as a sequence of ints that shares their memory."""
    return memoryview(tokens).cast("q")


class Sampling(msgspec.Struct, frozen=True, array_like=True):
    """The sampling parameters of one request, with what they refer to."""

    params: SamplingParams
    seed: int
    prompt_tokens: int
    """Number of tokens of the prompt as it was sent; `min_tokens` counts from there."""
    eos_token_ids: tuple[int, ...]
    known: Tokens = b""
    """The prompt and the output delivered so far, if penalties need them. A lane adds the tokens
    that it samples later by itself, because steps are launched before their tokens are
    delivered."""

    def banned(self, position: int) -> Sequence[int]:
        """Return the tokens that may not be chosen at this index of the sequence."""
        if position - self.prompt_tokens >= self.params.min_tokens:
            return ()
        eos = () if self.params.ignore_eos else self.eos_token_ids
        return (*eos, *self.params.stop_token_ids)


class SlotUpdate(msgspec.Struct, frozen=True, array_like=True):
    """Changes of a slot that take effect before the launch that has them."""

    slot: int
    first: int
    """Index of the first of these pages in the slot's list of pages; 0 begins a new list."""
    pages: tuple[int, ...]
    """Physical pages to add to the slot's sequence, in order."""
    sampling: Sampling | None = None
    """Sampling of the slot from now on; None if it does not change."""
    adapter: int = -1
    """Adapter slot of the request, if a new list begins; -1 if the base model answers."""
    windows: tuple[tuple[int, ...], ...] = ()
    """For each further table (`model/page_layout.py`) as many pages as `pages`; empty: there are no
    further tables."""


class Scoring(msgspec.Struct, frozen=True, array_like=True):
    """Tokens of a prompt whose log-probabilities the request asks for."""

    targets: Tokens
    """The tokens that follow the first tokens of the chunk, one for each."""
    top: int
    """Number of alternatives to report for each target."""


class PromptChunk(msgspec.Struct, frozen=True, array_like=True):
    """The tokens that a prompt row computes."""

    tokens: Tokens
    scoring: Scoring | None = None
    """The targets of this chunk; None if the request asks for no log-probabilities of its
    prompt."""


class PromptRow(msgspec.Struct, frozen=True, array_like=True):
    """A prompt row: the positions of a chunk in its sequence, from `start` on."""

    slot: int
    start: int
    count: int
    """Number of tokens of the chunk."""
    samples: bool = False
    """Whether the prompt ends with this chunk, so that the first token is sampled."""
    source: int = -1
    """Snapshot of the states that the chunk begins with; -1: those of its slot, or zeros at
    position 0."""
    saves: tuple[tuple[int, int], ...] = ()
    """Numbers of tokens of the chunk after which its states are saved, ascending, and the
    snapshots."""

    def parts(self) -> list[StatePart]:
        """Return the chunk cut where its states are saved."""
        parts, done, source = [], 0, self.source if self.source >= 0 else self.slot
        for end, save in (*self.saves, (self.count, -1)):
            if end > done:
                fresh = self.start + done == 0
                parts.append(StatePart(done, end - done, self.slot, fresh, source, save))
            done, source = end, self.slot
        return parts


class DecodeRow(msgspec.Struct, frozen=True, array_like=True):
    """A decode row: it computes the slot's last token at `position` and samples the next one."""

    slot: int
    position: int
    steps: int
    """Number of the launch's steps that have this row."""


class TokenMask(msgspec.Struct, frozen=True, array_like=True):
    """The tokens that a slot may choose from in this launch."""

    slot: int
    allowed: bytes
    """Bit mask over the vocabulary, lowest token first; a set bit allows its token."""


class PrefillWork(msgspec.Struct, frozen=True, array_like=True, tag="prefill"):
    """Layers `first:last` of a prefill batch.

    The launch of layer 0 opens the batch. Sampled tokens name their index in `rows`.
    """

    batch: int
    """Id of the batch, which names its hidden states between two slices."""
    rows: tuple[PromptRow, ...]
    """Rows that are left of those of the slice before, in its order."""
    first: int
    last: int
    finishes: bool
    """Whether `last` is the model's last layer, after which it samples."""
    chunks: tuple[PromptChunk, ...] = ()
    """Tokens of the rows, one chunk each, if this launch opens the batch."""
    slots: tuple[SlotUpdate, ...] = ()
    masks: tuple[TokenMask, ...] = ()
    """Masks of slots that may not choose every token, if the launch samples."""
    late: tuple[int, ...] = ()
    """Slots whose masks `Lanes.set_masks` sets later; sampling waits for them."""


class DecodeWork(msgspec.Struct, frozen=True, array_like=True, tag="decode"):
    """`k` decode steps."""

    rows: tuple[DecodeRow, ...]
    k: int
    slots: tuple[SlotUpdate, ...] = ()
    masks: tuple[TokenMask, ...] = ()
    """Masks of slots that may not choose every token; `k` is 1 if there are any."""
    late: tuple[int, ...] = ()
    """Slots whose masks `Lanes.set_masks` sets later; sampling waits for them, and `k` is 1."""


class HybridWork(msgspec.Struct, frozen=True, array_like=True, tag="hybrid"):
    """One forward pass. Sampled tokens number the decode rows first, then the prompt rows."""

    decode: tuple[DecodeRow, ...]
    prompts: tuple[PromptRow, ...]
    chunks: tuple[PromptChunk, ...] = ()
    """Tokens of the prompt rows, one chunk each."""
    slots: tuple[SlotUpdate, ...] = ()
    masks: tuple[TokenMask, ...] = ()
    """Masks of slots that may not choose every token."""
    late: tuple[int, ...] = ()
    """Slots whose masks `Lanes.set_masks` sets later; sampling waits for them."""


Work = PrefillWork | DecodeWork | HybridWork


class LaunchRecord(msgspec.Struct, frozen=True, array_like=True, tag="launch"):
    """A call of `Lanes.launch` in the launch log."""

    lane: LaneName
    units: int
    work: Work
    after: tuple[int, ...] = ()
    """Numbers of the launches that it waits for."""
    number: int = 0
    """Number of the launch, counted from 0 in the order of the calls. The log has the order in
    which the host launched them."""


class DropRecord(msgspec.Struct, frozen=True, array_like=True, tag="drop"):
    """A call of `Lanes.drop` in the launch log."""

    batch: int


class AdapterRecord(msgspec.Struct, frozen=True, array_like=True, tag="adapter"):
    """A call of `Lanes.load_adapter` in the launch log."""

    slot: int
    path: str
    digest: bytes | None = None
    number: int = 0
    """Number of the call, under which every rank reports the result to rank 0."""


class PieceRecord(msgspec.Struct, frozen=True, array_like=True, tag="piece"):
    """The next layers of the slice that is being launched, in the launch log."""

    layers: int


class FillRecord(msgspec.Struct, frozen=True, array_like=True, tag="fill"):
    """A call of `MachineLanes.fill_kv` in the launch log."""


Record = LaunchRecord | DropRecord | AdapterRecord | PieceRecord | FillRecord
"""A record of the launch log."""

encode = msgspec.msgpack.Encoder().encode
_decoder: msgspec.msgpack.Decoder[Record] = msgspec.msgpack.Decoder(Record)


def decode(encoded: bytes) -> Record:
    """Decode a record of the launch log.

    Raises:
        msgspec.DecodeError: the bytes are no record.
    """
    return _decoder.decode(encoded)


def used_by(lane: LaneName, work: Work) -> Sequence[str]:
    """Return what a launch uses exclusively: lanes (their memory and channel) and the step buffers.

    A launch on the whole device excludes everything, so it can use the prefill lane's memory. The
    graphs of decode steps sum over the decode lane's channel, whatever lane they run in.
    """
    if lane == "device":
        return (*LANES, "steps")
    if isinstance(work, PrefillWork):
        return (lane,)
    if isinstance(work, DecodeWork) and lane != "decode":
        return (lane, "decode", "steps")
    return (lane, "steps")
