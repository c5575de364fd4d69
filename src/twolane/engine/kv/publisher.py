"""Publishes the prefix tree's events over ZeroMQ, as vLLM does.

A message has three frames: the topic, the batch's number (8 bytes, big-endian, from 0) and the
batch. A subscriber that finds a gap in the numbers sends the first number that it lacks to the
replay address and gets the batches from there on, as (number, batch), then (-1, empty). Batches
that are no longer kept are replaced by one with the state of the tree after them.
"""

import threading
import time
from collections import deque

import msgspec
import zmq

from twolane.common.errors import FieldError
from twolane.engine.config import KVEventsConfig
from twolane.engine.kv.events import KVEventBatch, KVJournal
from twolane.engine.kv.snapshot import TreeSnapshot

BUFFER_BYTES = 64 << 20
"""Number of bytes that batches kept for replays may have together."""
PEER_BYTES = 4096
"""Number of bytes that a frame of a subscriber may have, such as the topic that it asks for; one
that sends more is disconnected. Without a bound ZeroMQ takes frames of any size into memory."""
NUMBER_BYTES = 8
"""Bytes of a message's number."""
END_OF_REPLAY = (-1).to_bytes(NUMBER_BYTES, "big", signed=True)


class ReplayBuffer:
    """The latest batches by number, within bounds on how many there are and on their bytes, and the
    tree as the earlier ones left it.

    Batches are added by the engine's thread; another one folds and reads.

    Args:
        most: number of batches.
    """

    def __init__(self, most: int) -> None:
        self._batches: deque[tuple[int, bytes]] = deque()
        self._dropped: list[bytes] = []
        """Batches that gave way and that the snapshot does not have yet, in order."""
        self._snapshot = TreeSnapshot()
        self._most = most
        self._bytes = 0
        self._lock = threading.Lock()
        self._decoder = msgspec.msgpack.Decoder(KVEventBatch)
        self._encoder = msgspec.msgpack.Encoder()

    def add(self, number: int, batch: bytes) -> None:
        """Keep a batch; the oldest ones give way."""
        with self._lock:
            self._batches.append((number, batch))
            self._bytes += len(batch)
            while len(self._batches) > self._most or self._bytes > BUFFER_BYTES:
                _, dropped = self._batches.popleft()
                self._bytes -= len(dropped)
                self._dropped.append(dropped)

    def fold(self) -> list[tuple[int, bytes]]:
        """Take the batches that gave way into the snapshot; return those that are kept."""
        with self._lock:
            dropped, self._dropped = self._dropped, []
            kept = list(self._batches)
        for batch in dropped:
            self._snapshot.apply(self._decoder.decode(batch))
        return kept

    def since(self, number: int) -> list[tuple[int, bytes]]:
        """Return the batches from this number on. If some of them gave way, the first is a snapshot
        with the number of the last of these."""
        kept = self.fold()
        oldest = kept[0][0] if kept else 0
        if number >= oldest:
            return [each for each in kept if each[0] >= number]
        return [(oldest - 1, self._encoder.encode(self._snapshot.batch())), *kept]


class KVEventPublisher:
    """Sends what a journal has collected. It never waits for a subscriber.

    Args:
        config: addresses, with an endpoint.
        journal: The journal of the prefix tree.

    Raises:
        FieldError: an address cannot be used.
    """

    def __init__(self, config: KVEventsConfig, journal: KVJournal) -> None:
        assert config.endpoint is not None
        self.published = 0
        """Number of batches so far."""
        self.journal = journal
        self._topic = config.topic.encode()
        self._encoder = msgspec.msgpack.Encoder()
        self._buffer = ReplayBuffer(config.buffer_steps) if config.replay_endpoint else None
        # Its own: the engine's context ends only when all of its sockets are closed.
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.PUB)
        # Number of batches that wait for a subscriber that reads too slowly; it misses later ones,
        # and can have them replayed.
        self._socket.set_hwm(1000)
        self._thread: threading.Thread | None = None
        try:
            _open(self._socket, config.endpoint, "kv_events_endpoint")
            if config.replay_endpoint is not None and self._buffer is not None:
                self._start_replays(self._buffer, config.replay_endpoint, config.buffer_steps)
        except FieldError:
            self.close()
            raise
        journal.forgotten()  # a subscriber may know what an engine before this one had
        self.publish()

    def publish(self) -> None:
        """Send what the journal has, as one batch; nothing is sent if it has nothing."""
        events = self.journal.take()
        if not events:
            return
        batch = self._encoder.encode(KVEventBatch(time.time(), events))
        number = self.published.to_bytes(NUMBER_BYTES, "big")
        if self._buffer is not None:
            self._buffer.add(self.published, batch)
        self.published += 1
        self._socket.send_multipart((self._topic, number, batch))  # never blocks: it is a PUB

    def close(self) -> None:
        """Send out what can be sent at once, and end the replays."""
        self._socket.close(linger=200)
        self._context.term()  # ends the wait of the thread, which closes its socket
        if self._thread is not None:
            self._thread.join()

    def _start_replays(self, buffer: ReplayBuffer, endpoint: str, most: int) -> None:
        socket = self._context.socket(zmq.ROUTER)
        socket.set_hwm(most + 2)  # a whole replay: a ROUTER drops what is beyond
        try:
            _open(socket, endpoint, "kv_events_replay_endpoint", bind=True)
        except FieldError:
            socket.close(linger=0)
            raise
        self._thread = threading.Thread(
            target=_replay, args=(socket, buffer), name="kv-events-replay", daemon=True
        )
        self._thread.start()


def _replay(socket: "zmq.Socket[bytes]", buffer: ReplayBuffer) -> None:
    """Answer requests for batches until the socket's context ends."""
    try:
        while True:
            # Batches that gave way are taken into the snapshot after a second at most.
            if not socket.poll(1000):
                buffer.fold()
                continue
            frames = socket.recv_multipart()
            if len(frames) != 3 or len(frames[2]) != NUMBER_BYTES:
                continue  # not a request: it gets no answer
            client, delimiter, wanted = frames
            for number, batch in buffer.since(int.from_bytes(wanted, "big")):
                numbered = number.to_bytes(NUMBER_BYTES, "big")
                socket.send_multipart((client, delimiter, numbered, batch))
            socket.send_multipart((client, delimiter, END_OF_REPLAY, b""))
    except zmq.ContextTerminated:
        socket.close(linger=0)


def _open(socket: "zmq.Socket[bytes]", endpoint: str, field: str, *, bind: bool = False) -> None:
    """Bind an address with a wildcard or a path, as vLLM does, and connect to any other; bound
    what peers may send.

    Raises:
        FieldError: naming the field.
    """
    socket.setsockopt(zmq.MAXMSGSIZE, PEER_BYTES)
    bind = bind or "*" in endpoint or "::" in endpoint or endpoint.startswith(("ipc:", "inproc:"))
    try:
        if "[" in endpoint:
            socket.setsockopt(zmq.IPV6, 1)
        (socket.bind if bind else socket.connect)(endpoint)
    except zmq.ZMQError as error:
        raise FieldError(field, f"{endpoint!r} cannot be used: {error.strerror}") from error
