"""Programs that misbehave, in a sandbox: those of this file, and chat templates."""

import itertools
import os
import signal
import time

import msgspec

from twolane.frontend import sandboxed
from twolane.frontend.text.codec import TextCodec
from twolane.frontend.text.jobs import Chat, Encoded, packed, read_job
from twolane.frontend.text.tokenizer import ModelTokenizer, load_tokenizer
from twolane.frontend.text.worker import answer
from twolane.model.load.hub import DEFAULT_MODEL, resolve


def hurry():
    """Let no more than a moment pass until the sandbox breaks the job off, if it ever does."""
    if signal.getitimer(signal.ITIMER_REAL)[0]:
        signal.setitimer(signal.ITIMER_REAL, 0.5)


def loop():
    hurry()
    while True:
        pass


def stay():
    signal.pause()


def take_memory():
    taken = []
    while True:
        taken.append(b"x" * (1 << 24))


def exit_at_once():
    os._exit(3)


def nest():
    return nest()


def panic():
    raise BaseException("as a native library does")


BAD = {work.__name__: work for work in (loop, stay, take_memory, exit_at_once, nest, panic)}


def handle(job: bytes) -> bytes:
    if job.decode() in BAD:
        BAD[job.decode()]()
    return str(os.getpid()).encode() if job == b"pid" else job


counted = itertools.count(1)


def count_slowly(job: bytes) -> bytes:
    """Half a second later, answer with one token: how many jobs this worker has had.

    Texts with "held" in them take longer than any test.
    """
    time.sleep(600.0 if b"held" in job else 0.5)
    return msgspec.msgpack.encode(Encoded(packed([next(counted)])))


def set_up(given: bytes) -> tuple[bytes, sandboxed.Handler]:
    """Serve the jobs of this file or, if one is given, conversations with a chat template, which
    get a moment each."""
    if not given:
        return b"", handle
    if given.decode() in BAD:
        BAD[given.decode()]()
    if given == b"slow":
        return b"", count_slowly
    backend = load_tokenizer(resolve(DEFAULT_MODEL)).backend
    codec = TextCodec(ModelTokenizer(backend, given.decode(), {}))

    def work(job: bytes) -> bytes:
        if isinstance(read_job(job), Chat):
            hurry()
        return msgspec.msgpack.encode(answer(codec, job))

    return b"", work


if __name__ == "__main__":
    sandboxed.run(set_up)
