"""An engine that stands still, and a lane whose work never ends."""

import os
import signal
import time

import pytest

from .conftest import TINY
from .serving import PATIENCE, alive, children, serving, stopped, wait_for, write_tiny_model
from .test_killing import Client
from .test_lifecycle import LONG

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


BOUNDS = """
import sys
if sys.orig_argv[1:4] == ["-m", "twolane", "serve"]:
    import time
    from pathlib import Path
    from twolane.frontend import engine_client, liveness

    def said(what):
        file = Path({folder!r}) / what
        return float(file.read_text()) if file.exists() else None

    class Liveness(liveness.Liveness):
        def __init__(self, bound):
            super().__init__(bound, lambda: time.monotonic() + (said("jump") or 0.0))

        @property
        def _bound(self):
            return self.given if said("loop") is None else said("loop")

        @_bound.setter
        def _bound(self, given):
            self.given = given

        def _longest(self, wait):
            return super()._longest(wait) if said("lane") is None else said("lane")

    liveness.Liveness = engine_client.Liveness = Liveness
    engine_client.PING_SECONDS = 0.2
"""
"""Has the API process wait for the engine's loop or its lanes as long as a file by that name says,
and its clock jump: no starved engine may seem to be hung before the test has made it so. It asks
more often than it does by itself."""
LENIENT = ("--hang-seconds", "3600")


SILENT = 0.4
"""Seconds without a sign after which a test goes on: what shall be silent surely is."""


def health(served):
    status, _, body = served.request("/health")
    return status, body.get("error", {}).get("message", "")


@pytest.fixture
def folder(tmp_path):
    """Where files say how patient the API process is (`BOUNDS`)."""
    (path := tmp_path / "bounds").mkdir()
    return path


def started(folder, model, *args, log=None):
    """A server whose decode lane hangs while there is a file "hang" in the folder."""
    code = BOUNDS.format(folder=str(folder)) + HANG.format(flag=str(folder / "hang"))
    (folder / "sitecustomize.py").write_text(code)
    before = ("env", f"PYTHONPATH={folder}:{os.environ.get('PYTHONPATH', '')}")
    return serving(str(model), *TINY, *LENIENT, *args, stderr=log, before=before)


@pytest.fixture
def start(folder, tiny_model):
    """Starts such a server."""

    def start(*args, model=tiny_model, log=None):
        return started(folder, model, *args, log=log)

    return start


@pytest.fixture(scope="module")
def watched(tmp_path_factory, tiny_model):
    """One without a watchdog, and its folder; tests remove what they have put there."""
    folder = tmp_path_factory.mktemp("watched")
    with started(folder, tiny_model) as served:
        yield served, folder


def say(folder, what, seconds):
    """Have the API process know something (`BOUNDS`), at once and as a whole."""
    (folder / "new").write_text(str(seconds))
    (folder / "new").replace(folder / what)


def streaming(served):
    """A client whose stream has begun."""
    client = Client(served, LONG)
    assert client.first.wait(PATIENCE)
    return client


def test_health_tells_that_an_engine_stands_still_and_that_it_goes_on(watched):
    served, folder = watched
    assert health(served) == (200, "")
    with stopped(served.engine_pid):
        wait_for(lambda: served.metrics()["engine_silence_seconds"] > SILENT)
        say(folder, "loop", 0.0)
        assert health(served)[0] == 503
        assert "the engine has made no turn for" in health(served)[1]
        assert served.request("/livez")[0] == 200
        assert served.request("/v1/completions", {"prompt": [5]})[0] == 503
        assert served.metrics()["engine_hung"] == 1
    wait_for(lambda: health(served)[0] == 200)
    wait_for(lambda: served.metrics()["engine_hung"] == 0)
    asked = {"prompt": [5], "max_tokens": 2}
    wait_for(lambda: served.request("/v1/completions", asked)[0] == 200)
    (folder / "loop").unlink()


def test_health_tells_of_a_lane_that_finishes_nothing(watched):
    served, folder = watched
    client = streaming(served)
    (folder / "hang").touch()
    wait_for(lambda: served.metrics()["launch_wait_seconds"] > SILENT)
    say(folder, "lane", SILENT)
    assert "the decode lane has finished nothing for" in health(served)[1]
    wait_for(lambda: served.metrics()["engine_silence_seconds"] < SILENT)  # the loop makes turns
    (folder / "hang").unlink()
    wait_for(lambda: health(served)[0] == 200)
    (folder / "lane").unlink()
    assert "error" not in client.last
    client.leave()


@pytest.mark.parametrize("how", ["loop", pytest.param("lane", marks=pytest.mark.full)])
def test_the_watchdog_ends_a_hung_engine_with_a_reason(start, folder, tmp_path, how):
    """And none because the server stood still itself."""
    log = tmp_path / "log"
    with start("--watchdog", log=log) as served:
        engine = served.engine_pid
        stand_still(served, folder)
        assert alive(engine)
        client = streaming(served)
        if how == "loop":
            os.kill(engine, signal.SIGSTOP)
        else:
            (folder / "hang").touch()
            wait_for(lambda: served.metrics()["launch_wait_seconds"] > SILENT)
        say(folder, how, SILENT)
        assert client.ended.wait(PATIENCE)
        assert "the watchdog has killed the engine" in client.last["error"]["message"]
        assert served.process.wait(PATIENCE) == 1
        assert not alive(engine)
    reason = {"loop": "has made no turn", "lane": "decode lane has finished nothing"}[how]
    assert f"{reason} for" in log.read_text(), log.read_text()
    assert "the watchdog has killed the engine" in log.read_text()


def stand_still(served, folder):
    """Have a server stand still for as long as its engine has a question to answer."""
    with stopped(served.engine_pid):
        wait_for(lambda: served.metrics()["engine_silence_seconds"] > SILENT)
        say(folder, "jump", 1e6)
        wait_for(lambda: SILENT < served.metrics()["engine_silence_seconds"] < 1e5)
    wait_for(lambda: health(served) == (200, ""))


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
            assert served.process.wait(PATIENCE) == 1
            print(f"ended after {time.monotonic() - began:.1f} s")
        wait_for(lambda: not alive(engine) and not alive(follower))
    assert "rank 1 of 2 has been stopped for" in log.read_text(), log.read_text()


@pytest.mark.full
@pytest.mark.parametrize(
    "how",
    [("--tensor-parallel-size", "2"), pytest.param(("--disaggregated",), marks=pytest.mark.full)],
)
def test_the_watchdog_is_on_with_several_ranks(start, folder, how, tmp_path):
    model = write_tiny_model(tmp_path / "ranks", num_key_value_heads=2)
    log = tmp_path / "log"
    with start(*how, model=model, log=log) as served:
        ranks = wait_for(lambda: served.request("/health")[2].get("ranks"))
        assert ranks.keys() == {"1"}
        assert "rank_silence_seconds" in served.metrics()
        engine = served.engine_pid
        (follower,) = children(engine)
        with stopped(engine):
            say(folder, "loop", SILENT)
            assert served.process.wait(PATIENCE) == 1
            assert not alive(engine)
        wait_for(lambda: not alive(follower))
    assert "the watchdog has killed the engine" in log.read_text()
