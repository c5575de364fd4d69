"""Untrusted programs are bounded in time and memory, and their workers are replaced."""

import asyncio
import itertools
import os
import resource
import signal
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from twolane.common.resources import without_secrets
from twolane.frontend import sandbox as sandboxes
from twolane.frontend.sandbox import (
    FairLock,
    Limits,
    QueueFull,
    Sandbox,
    SandboxError,
    WorkerLost,
)
from twolane.frontend.sandboxed import TookTooLong, within
from twolane.frontend.text.codec import TextCodec, TextError
from twolane.frontend.text.jobs import Chat, Encode, Loaded
from twolane.frontend.text.texts import UNENCODABLE, Texts, unencodable

from ..server.serving import PATIENCE, alive, wait_for

HELLO = [{"role": "user", "content": "Hello"}]
LIMITS = Limits(seconds=600.0, memory=256 << 20)
"""No job that ends by itself is broken off, however busy the machine is; one that does not end lets
its time pass at once (`sandboxed_programs.hurry`)."""


@asynccontextmanager
async def sandboxed(setup="", limits=LIMITS):
    sandbox = Sandbox("tests.frontend.sandboxed_programs", setup.encode(), limits)
    try:
        await sandbox.start()
        yield sandbox
    finally:
        await sandbox.close()


def run(work):
    return asyncio.run(asyncio.wait_for(work, PATIENCE))


def loop_for_ever():
    while True:
        pass


def test_what_does_not_end_is_broken_off():
    with pytest.raises(TookTooLong):
        within(0.1, loop_for_ever)


@pytest.mark.parametrize(
    ("job", "why"),
    [
        ("loop", "did not end within 600 s"),
        ("take_memory", "took too much memory"),
        ("exit_at_once", "crashed"),
        ("nest", "RecursionError"),
        ("panic", "as a native library does"),
    ],
)
def test_a_job_that_fails_says_why_and_the_next_one_is_done(job, why, monkeypatch):
    if job == "loop":
        clock = itertools.count(0.0, LIMITS.seconds)
        monkeypatch.setattr(sandboxes, "time", SimpleNamespace(monotonic=lambda: next(clock)))

    async def work():
        async with sandboxed() as sandbox:
            queue = sandbox.queue()
            with pytest.raises(SandboxError, match=why):
                await queue.run([job.encode()])
            assert await queue.run([b"next"]) == b"next"

    run(work())


def test_a_job_whose_client_leaves_is_broken_off():
    async def work():
        async with sandboxed() as sandbox:
            queue = sandbox.queue()
            pid = int(await queue.run([b"pid"]))
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(queue.run([b"stay"]), 0.2)
            assert await queue.run([b"next"]) == b"next"
            assert int(await queue.run([b"pid"])) != pid
            await asyncio.to_thread(wait_for, lambda: not alive(pid))

    run(work())


def test_a_killed_zygote_and_a_killed_worker_are_replaced():
    async def work():
        async with sandboxed() as sandbox:
            queue = sandbox.queue()
            for killed in ("zygote", "worker"):
                worker = int(await queue.run([b"pid"]))
                os.kill(sandbox._zygote.pid if killed == "zygote" else worker, 9)
                await asyncio.to_thread(wait_for, lambda pid=worker: not alive(pid))
                while not queue._worker.ended:
                    await asyncio.sleep(0)
                assert await queue.run([b"next"]) == b"next"
            queue.close()
            assert await queue.run([b"next"]) == b"next"

    run(work())


def test_a_stopped_or_killed_worker_is_replaced_and_its_job_may_be_sent_again(monkeypatch):
    """A stopped one's own alarm waits until it runs again. The kernel kills where memory runs out;
    no limit of a job does. None of them has a secret."""
    monkeypatch.setattr(sandboxes, "STILL_SECONDS", 0.1)
    for name in ("TWOLANE_API_KEY", "HF_TOKEN", "DATABASE_URL", "ANYTHING"):
        monkeypatch.setenv(name, "secret")

    async def work():
        async with sandboxed(limits=Limits(seconds=1.0)) as sandbox:
            queue = sandbox.queue()
            worker = int(await queue.run([b"pid"]))
            for pid in (worker, sandbox._zygote.pid):
                assert b"secret" not in Path(f"/proc/{pid}/environ").read_bytes()
            os.kill(worker, signal.SIGSTOP)
            asked = asyncio.create_task(queue.run([b"pid"]))
            while sandbox.problem is None:
                await asyncio.sleep(0.02)
            assert not asked.done()
            with pytest.raises(WorkerLost, match="did not run"):
                await asked
            assert sandbox.problem is None
            second = int(await queue.run([b"pid"]))
            asked = asyncio.create_task(queue.run([b"stay"]))
            await asyncio.sleep(0.1)
            os.kill(second, signal.SIGKILL)
            with pytest.raises(WorkerLost, match="killed"):
                await asked
            assert len({worker, second, int(await queue.run([b"pid"]))}) == 3

    run(work())


@contextmanager
def no_more_files():
    """Let this process open no further file."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    first_free = os.dup(0)
    os.close(first_free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (first_free, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_where_no_file_is_left_for_a_worker_its_job_may_be_sent_again():
    """The workers of other queues go on."""

    async def work():
        async with sandboxed() as sandbox:
            queue, other = sandbox.queue(), sandbox.queue()
            there = await other.run([b"pid"])
            with no_more_files():
                with pytest.raises(WorkerLost, match="could be started: Too many open files"):
                    await queue.run([b"pid"])
                assert await other.run([b"pid"]) == there
            assert await queue.run([b"next"]) == b"next"
            assert await other.run([b"pid"]) == there
            os.kill(sandbox._zygote.pid, signal.SIGKILL)
            await sandbox._zygote.wait()
            queue.close()
            with no_more_files(), pytest.raises(WorkerLost, match="Too many open files"):
                await queue.run([b"pid"])
            assert await queue.run([b"next"]) == b"next"

    run(work())


@pytest.mark.full
def test_a_stopped_or_killed_zygote_is_replaced():
    async def work():
        async with sandboxed(limits=Limits(seconds=1.0)) as sandbox:
            queue = sandbox.queue()
            worker = int(await queue.run([b"pid"]))
            queue.close()
            os.kill(sandbox._zygote.pid, signal.SIGSTOP)
            assert int(await queue.run([b"pid"])) != worker
            asked = asyncio.create_task(queue.run([b"stay"]))
            await asyncio.sleep(0.1)
            os.kill(sandbox._zygote.pid, signal.SIGKILL)
            with pytest.raises(WorkerLost, match="parent"):
                await asked
            assert await queue.run([b"next"]) == b"next"

    run(work())


def test_names_of_secrets_are_known(monkeypatch):
    secrets = {"HF_TOKEN", "TWOLANE_API_KEY", "OTEL_EXPORTER_OTLP_HEADERS", "AWS_SECRET_ACCESS_KEY"}
    others = {"NCCL_DEBUG": "", "OMP_NUM_THREADS": "", "TOKENIZERS_PARALLELISM": ""}
    monkeypatch.setattr(os, "environ", dict.fromkeys(secrets, "") | others)
    assert without_secrets() == others


def test_workers_yield_to_other_processes_and_get_no_signal_of_the_terminal():
    """Niceness may count for nothing between sessions; see autogroup in sched(7)."""

    async def work():
        async with sandboxed() as sandbox:
            pid, nice = [int(await sandbox.queue(n).run([b"pid"])) for n in (0, 10)]
            own, group = os.getpriority(os.PRIO_PROCESS, 0), sandbox._zygote.pid
            assert os.getpriority(os.PRIO_PROCESS, nice) == min(own + 10, 19)
            assert os.getpriority(os.PRIO_PROCESS, pid) == own
            assert os.getsid(pid) == os.getsid(nice) == os.getsid(0)
            assert os.getpgid(pid) == os.getpgid(nice) == group != os.getpgid(0)

    run(work())


def test_nothing_is_left_of_a_closed_sandbox():
    async def work():
        async with sandboxed() as sandbox:
            queue, other = sandbox.queue(), sandbox.queue()
            pids = [
                sandbox._zygote.pid,
                int(await queue.run([b"pid"])),
                int(await other.run([b"pid"])),
            ]
            stuck = asyncio.create_task(other.run([b"stay"]))
            await asyncio.sleep(0.2)
        with pytest.raises(SandboxError):
            await stuck
        return pids

    for pid in run(work()):
        wait_for(lambda pid=pid: not alive(pid))


def test_a_program_that_cannot_be_set_up_says_why():
    async def work(setup):
        async with sandboxed(setup):
            pass

    with pytest.raises(SandboxError, match="RecursionError"):
        run(work("nest"))
    with pytest.raises(SandboxError, match="ended while it was set up"):
        run(work("exit_at_once"))


def test_setting_up_has_an_end(monkeypatch):
    monkeypatch.setattr(sandboxes, "SETUP_SECONDS", 2.0)

    async def work():
        async with sandboxed("loop"):
            pass

    with pytest.raises(SandboxError, match="not set up within 2 s"):
        run(work())


def test_clients_have_their_lock_however_many_jobs_one_has():
    async def work():
        lock, served = FairLock(), []

        async def job(client):
            async with lock.held_by(client):
                served.append(client)
                await asyncio.sleep(0)

        given_up = asyncio.create_task(job("flood"))
        tasks = [asyncio.create_task(job("flood")) for _ in range(50)]
        tasks += [asyncio.create_task(job("other")), asyncio.create_task(job("third"))]
        await asyncio.sleep(0)
        tasks[3].cancel()
        await asyncio.gather(given_up, *tasks, return_exceptions=True)
        return served

    served = run(work())
    assert {"other", "third"} <= set(served[:6])
    assert served.count("flood") == 50


def test_what_waits_is_bounded():
    async def work():
        async with sandboxed(limits=Limits(LIMITS.seconds, waiting=1000)) as sandbox:
            queue = sandbox.queue()
            busy = asyncio.create_task(queue.run([b"stay"]))
            await asyncio.sleep(0)
            waiting = asyncio.create_task(queue.run([b"x" * 900]))
            await asyncio.sleep(0)
            with pytest.raises(QueueFull):
                await queue.run([b"y" * 200])
            busy.cancel()
            assert await waiting == b"x" * 900
            assert await queue.run([b"z" * 2000]) == b"z" * 2000

    run(work())


def test_large_jobs_and_results_arrive_whole():
    async def work():
        async with sandboxed() as sandbox:
            job = os.urandom(1 << 23).hex().encode()
            assert await sandbox.queue().run([job]) == job

    run(work())


BOMBS = {
    "loops": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "text": "{{ 'a' * 10**10 }}",
    "text, the other way round": "{{ 10**10 * 'a' }}",
    "list": "{{ [0] * 10**10 }}",
    "power": "{{ 9**(9**9) }}",
    "padding": "{{ '%9999999999d' % 1 }}",
    "centre": "{{ 'a' | center(9999999999) }}",
    "doubling": "{% set ns = namespace(a='aaaaaaaa') %}{% for i in range(60) %}"
    "{% set ns.a = ns.a ~ ns.a %}{% endfor %}",
    "lists in lists": "{% set ns = namespace(a=[1]) %}{% for i in range(60) %}"
    "{% set ns.a = ns.a + ns.a %}{% endfor %}",
    "one call that holds the lock": "{{ range(99999999) | sum }}" * 9,
    "brackets": "{{ " + "(" * 20_000 + "1" + ")" * 20_000 + " }}",
}


def test_what_cannot_be_sent_to_a_sandbox_is_named():
    large, half = {"a": [2**70]}, "\udcff"
    messages = [{"role": "user", "content": "x"}]
    for job, param, problem in (
        (Chat(messages, {"tools": [large]}), "tools", "a number is beyond 64 bits"),
        (Chat(messages, {"variables": large}), "chat_template_kwargs", "beyond 64 bits"),
        (Chat([{"role": "user", **large}], {}), None, "beyond 64 bits"),
        (Encode(half, add_special_tokens=True), None, "not Unicode"),
    ):
        with pytest.raises(UNENCODABLE) as refused:
            msgspec.msgpack.encode(job)
        error = unencodable(job, refused.value)
        assert error.param == param
        assert problem in str(error)


@pytest.mark.parametrize("bomb", BOMBS)
def test_a_template_that_takes_too_much_is_refused(bomb):
    async def work():
        async with sandboxed(BOMBS[bomb] + "{{ messages[0].content }}") as sandbox:
            texts = Texts(
                TextCodec(None), sandbox, Loaded(b"", "", False, True, frozenset(), frozenset())
            )
            with pytest.raises(TextError):
                await texts.tokens(Chat(HELLO, {}))
            assert await texts.tokens(Encode("Hello", True))

    run(work())
