"""An engine that stands still, and a lane whose work never ends."""

import os
import signal
import time

import pytest

from .conftest import TINY
from .serving import PATIENCE, alive, children, serving, stopped, wait_for, write_tiny_model
from .test_killing import Client
from .test_lifecycle import LONG

SECONDS = "1"
KILLED_SECONDS = "3"
"""Where an engine that is hung is killed: no starved one may seem to be."""
HANG = """
import sys
if "twolane.engine" in sys.orig_argv:
    import time
    from pathlib import Path
    from twolane.lanes.cpu import runner

    decode = runner.Runner._decode

    def hanging(self, *args):
        while Path({flag!r}).exists():
            time.sleep(0.05)
        return decode(self, *args)

    runner.Runner._decode = hanging
"""
"""Makes the decode work of an engine process last as long as a file is there."""


def health(served):
    status, _, body = served.request("/health")
    return status, body.get("error", {}).get("message", "")


@pytest.fixture
def hangable(tiny_model, tmp_path):
    """Start a server whose decode lane hangs while a file is there."""
    flag = tmp_path / "hang"
    (tmp_path / "sitecustomize.py").write_text(HANG.format(flag=str(flag)))
    path = f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"

    def start(*args, seconds=SECONDS, log=None):
        before = ("env", f"PYTHONPATH={path}")
        args = (str(tiny_model), *TINY, "--hang-seconds", seconds, *args)
        return serving(*args, stderr=log, before=before)

    return start, flag


def streaming(served):
    """A client whose stream has begun; an engine that was starved for a moment is asked again."""

    def begun():
        client = Client(served, LONG)
        wait_for(lambda: client.first.is_set() or client.ended.is_set())
        return client if client.first.is_set() else None

    return wait_for(begun)


def test_health_tells_that_an_engine_stands_still_and_that_it_goes_on(tiny_model):
    with serving(str(tiny_model), *TINY, "--hang-seconds", SECONDS) as served:
        wait_for(lambda: health(served) == (200, ""))
        with stopped(served.engine_pid):
            wait_for(lambda: health(served)[0] == 503)
            assert "the engine has made no turn for" in health(served)[1]
            assert served.request("/livez")[0] == 200
            assert served.request("/v1/completions", {"prompt": [5]})[0] == 503
            assert served.metrics()["engine_hung"] == 1
            assert served.metrics()["engine_silence_seconds"] > 1
        wait_for(lambda: health(served)[0] == 200)
        wait_for(lambda: served.metrics()["engine_hung"] == 0)
        asked = {"prompt": [5], "max_tokens": 2}
        wait_for(lambda: served.request("/v1/completions", asked)[0] == 200)


def test_health_tells_of_a_lane_that_finishes_nothing(hangable):
    start, flag = hangable
    with start() as served:
        client = streaming(served)
        flag.touch()
        wait_for(lambda: "the decode lane has finished nothing for" in health(served)[1])
        assert served.metrics()["launch_wait_seconds"] > 1
        wait_for(lambda: served.metrics()["engine_silence_seconds"] < 1)  # the loop makes turns
        flag.unlink()
        wait_for(lambda: health(served)[0] == 200)
        assert "error" not in client.last


@pytest.mark.parametrize("how", ["loop", "lane"])
def test_the_watchdog_ends_a_hung_engine_with_a_reason(hangable, tmp_path, how):
    start, flag = hangable
    log = tmp_path / "log"
    with start("--watchdog", seconds=KILLED_SECONDS, log=log) as served:
        engine = served.engine_pid
        client = streaming(served)
        if how == "loop":
            os.kill(engine, signal.SIGSTOP)
        else:
            flag.touch()
        assert client.ended.wait(PATIENCE)
        assert "the watchdog has killed the engine" in client.last["error"]["message"]
        assert served.process.wait(PATIENCE) == 1
        assert not alive(engine)
    reason = {"loop": "has made no turn", "lane": "decode lane has finished nothing"}[how]
    assert f"{reason} for" in log.read_text(), log.read_text()
    assert "the watchdog has killed the engine" in log.read_text()


def test_a_server_that_stood_still_itself_kills_no_engine(tiny_model):
    with serving(str(tiny_model), *TINY, "--hang-seconds", "3", "--watchdog") as served:
        assert health(served) == (200, "")
        engine = served.engine_pid
        with stopped(served.process.pid):
            time.sleep(4.0)
        wait_for(lambda: health(served) == (200, ""))
        assert alive(engine)


@pytest.mark.full
@pytest.mark.parametrize("how", [("--tensor-parallel-size", "2"), ("--disaggregated",)])
def test_a_rank_that_stands_still_at_rest_ends_the_server(how, tmp_path):
    model = write_tiny_model(tmp_path / "ranks", num_key_value_heads=2)
    log = tmp_path / "log"
    with serving(str(model), *TINY, *how, stderr=log) as served:
        engine = served.engine_pid
        assert served.request("/v1/completions", {"prompt": [5], "max_tokens": 2})[0] == 200
        (follower,) = children(engine)
        with stopped(follower):
            began = time.monotonic()
            assert served.process.wait(60) == 1
            print(f"ended after {time.monotonic() - began:.1f} s")
        wait_for(lambda: not alive(engine) and not alive(follower))
    assert "rank 1 of 2 has been stopped for" in log.read_text(), log.read_text()


@pytest.mark.parametrize("how", [("--tensor-parallel-size", "2"), ("--disaggregated",)])
def test_the_watchdog_is_on_with_several_ranks(how, tmp_path):
    model = write_tiny_model(tmp_path / "ranks", num_key_value_heads=2)
    log = tmp_path / "log"
    args = (*how, "--hang-seconds", KILLED_SECONDS)
    with serving(str(model), *TINY, *args, stderr=log) as served:
        wait_for(lambda: served.request("/health")[2].get("ranks"))
        assert served.request("/health")[2]["ranks"].keys() == {"1"}
        assert "rank_silence_seconds" in served.metrics()
        engine = served.engine_pid
        (follower,) = children(engine)
        with stopped(engine):
            assert served.process.wait(PATIENCE) == 1
            assert not alive(engine)
        wait_for(lambda: not alive(follower))
    assert "the watchdog has killed the engine" in log.read_text()
