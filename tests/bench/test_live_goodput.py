"""The search for goodput over real servers: started for it, or running already."""

import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import twolane
from tests.server.serving import PATIENCE, alive, children, wait_for, write_tiny_model
from twolane.bench import serve, server
from twolane.common.resources import usable_cores

BOTH = ["chunked:token_budget=256", "static-split"]
# Bounds that hold however slow the machine is: both rates that are tried do.
LOOSE = ["--goodput", "ttft:60000", "tbt:60000", "--start-rate", "50000"]
SMALL = ["--random-input-len", "40", "--random-output-len", "6", "--vocab-range", "3:128"]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = write_tiny_model(tmp_path_factory.mktemp("tiny"))
    return f"{path} --load-format dummy --device cpu --kv-tokens 20000"


def command(out, *words, systems=()):
    named = [word for system in systems for word in ("--system", system)]
    line = [sys.executable, "-m", "twolane", "bench", "goodput", "--out", str(out)]
    return [*line, *SMALL, "--num-prompts", "8", "--brief", *words, *named]


def run(*arguments, **more):
    return subprocess.run(command(*arguments, **more), capture_output=True, text=True, timeout=200)


def runs(out):
    return [json.loads(file.read_text()) for file in sorted(out.glob("*-rate*.json"))]


def status(pid):
    """State and pending signals of a process, among others."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


def has_pending(pid, signum):
    return int(status(pid)["ShdPnd"], 16) >> (signum - 1) & 1


def test_two_systems_on_servers_of_its_own(model, tmp_path):
    """Stopped by Ctrl-C, it stops its server; the same command goes on with what is missing.

    Each system is started with its settings, asked the same, and traced.
    """
    out = tmp_path / "found"
    words = [out, "--serve", model, "--trace", *LOOSE]
    with subprocess.Popen(command(*words, systems=BOTH), stderr=subprocess.PIPE, text=True) as p:
        first = wait_for(lambda: children(p.pid), 200)
        wait_for(lambda: list(out.glob("*-rate100000*.json")), 200)
        servers = children(p.pid)
        p.send_signal(signal.SIGTERM)
        assert p.wait(PATIENCE) == 130
        assert "the same command continues" in p.stderr.read()
    assert not any(map(alive, first))
    wait_for(lambda: not any(map(alive, servers)))  # one that it was just starting is told
    kept = {file: file.stat().st_mtime_ns for file in out.glob("*-rate*.json")}
    done = run(*words, systems=BOTH)
    assert done.returncode == 0, done.stderr
    assert all(file.stat().st_mtime_ns == at for file, at in kept.items())
    found = json.loads((out / "summary.json").read_text())["goodput"]
    assert {name: one["median"] for name, one in found.items()} == dict.fromkeys(BOTH, 100000)
    check_runs(runs(out))
    check_traces([json.loads(file.read_text()) for file in sorted(out.glob("*.trace.json"))])


@pytest.mark.skipif(sys.platform != "linux", reason="looks at pending signals in /proc")
def test_ctrl_c_while_it_stops_its_server_leaves_none_behind(model, tmp_path):
    """Told to end, a server that does not is killed by the next Ctrl-C."""
    slow = ["--start-rate", "0.1"]  # it is still sending when it is interrupted
    words = [tmp_path, "--serve", model, *LOOSE, *slow]
    with subprocess.Popen(command(*words), stdout=subprocess.PIPE, text=True) as p:
        starting, announced = p.stdout.readline(), p.stdout.readline()
        assert "starting a server" in starting and " | http://" in announced
        [server_pid] = children(p.pid)
        os.kill(server_pid, signal.SIGSTOP)
        try:
            wait_for(lambda: status(server_pid)["State"].startswith("T"))
            p.send_signal(signal.SIGINT)
            wait_for(lambda: has_pending(server_pid, signal.SIGTERM))
            p.send_signal(signal.SIGINT)
            assert p.wait(PATIENCE) == 130
            assert not alive(server_pid)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(server_pid, signal.SIGKILL)


@pytest.mark.full
@pytest.mark.skipif(len(usable_cores()) < 2, reason="one core cannot be divided")
def test_client_and_server_have_cpus_of_their_own(model, tmp_path, monkeypatch):
    """The client keeps the last ones, and gives them back with the server."""
    *served, kept = usable_cores()
    monkeypatch.setattr(server, "CLIENT_CPUS", 1)
    monkeypatch.setattr(server, "ENOUGH_CPUS", 2)
    with server.serving(shlex.split(model), tmp_path / "log") as running:
        assert usable_cores() == [kept]
        assert os.sched_getaffinity(running.process.pid) == set(served)
    assert usable_cores() == [*served, kept]


@pytest.mark.skipif(len(usable_cores()) < 2, reason="one core cannot be divided")
def test_servers_that_start_at_once_share_their_cpus(tmp_path, monkeypatch):
    """One that does not start leaves the others be; all are stopped in the end."""
    *served, kept = usable_cores()
    monkeypatch.setattr(server, "CLIENT_CPUS", 1)
    monkeypatch.setattr(server, "ENOUGH_CPUS", 2)
    answers = [sys.executable, "-m", "http.server", "--bind", "127.0.0.1", "{port}"]
    asked = [(answers, tmp_path / "1"), (["false"], tmp_path / "2"), (answers, tmp_path / "3")]
    with server.starting(asked) as [first, ends, last]:
        running = [first(), last()]
        with pytest.raises(serve.BenchError, match="ended with 1"):
            ends()
        assert len({one.url for one in running}) == 2
        assert all(os.sched_getaffinity(one.process.pid) == set(served) for one in running)
        assert usable_cores() == [kept]
    assert not any(alive(one.process.pid) for one in running)


def check_runs(saved):
    assert len(saved) == 4
    assert all(one["sent"] == one["completed"] == len(one["itls"]) == 8 for one in saved)
    systems = [one["server"].split(" | ")[3].split(" on ")[0] for one in saved]
    assert systems == ["chunked"] * 2 + ["static-split"] * 2
    seeds = {(one["trial"]["rate"], one["arguments"]["prompt_seed"]) for one in saved}
    assert len(seeds) == len({seed for _, seed in seeds}) == 2


def check_traces(traces):
    about = [one["args"] for trace in traces for one in trace if one["name"] == "twolane"]
    assert [one["options"] for one in about] == [{"token_budget": "256"}, {}]
    for trace in traces:
        admitted = [one["args"] for one in trace if one["name"] == "admitted"]
        assert len(admitted) == 4 + 2 * 8  # warmed up once
        assert not any(one["reused"] for one in admitted)  # each rate has prompts of its own


@pytest.mark.full
def test_without_a_system_it_searches_the_one_that_a_server_takes_by_itself(model, tmp_path):
    out = tmp_path / "found"
    done = run(out, "--serve", model, *LOOSE)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("starting a server") == 1
    assert list(json.loads((out / "summary.json").read_text())["goodput"]) == ["static-split"]


@pytest.mark.full
def test_any_server_is_started_by_a_command_and_tuned(model, tmp_path):
    """One server for each value serves all bounds; what ran is kept, and nothing is left behind."""
    serve = f"{sys.executable} -m twolane serve {model} --port {{port}}"
    out, bounds = tmp_path / "found", ["--goodput", "ttft:60000", "tbt:50000/60000"]
    words = ["--serve-command", serve, "--sweep", "max-queue=64,128", "--start-rate", "50000"]
    done = run(out, *words, *bounds)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("starting a server") == 2
    for folder in (out / "tbt50000ms", out / "tbt60000ms"):
        found = json.loads((folder / "summary.json").read_text())
        names = ["server:max-queue=64", "server:max-queue=128"]
        assert list(found["goodput"]) == names
        assert found["tuned"] == {"server:max-queue=64/128": names[0]}
        for saved in runs(folder):
            name, _, command = saved["server"].split(" | ")
            assert name == f"{Path(sys.executable).name} {twolane.__version__}"
            value = saved["trial"]["system"].rpartition("=")[2]
            assert command.endswith(f"--max-queue {value}")
            gaps = saved["engine_itl_ms"]  # the engine's, beside those that the client saw
            assert gaps["metric"] == "twolane:inter_token_latency_seconds"
            assert gaps["count"] == 8 * 5  # of each of six tokens but the first
    assert not [p for p in out.glob("*.log") if "Traceback" in p.read_text()]


def test_a_command_that_cannot_serve_is_named_with_the_end_of_its_log(tmp_path):
    program = f'{sys.executable} -c "print(12345); raise SystemExit(3)"'
    done = run(tmp_path, "--serve-command", program, *LOOSE)
    assert done.returncode == 1
    assert "ended with 3" in done.stderr and "12345" in done.stderr
    done = run(tmp_path, "--serve-command", "/no/such/program", *LOOSE)
    assert (done.returncode, "cannot run /no/such/program" in done.stderr) == (1, True)
    wrong = run(tmp_path, "--sweep", "a=1", *LOOSE)
    assert (wrong.returncode, "--sweep needs --serve-command" in wrong.stderr) == (2, True)
    wrong = run(tmp_path, "--serve-command", "x", "--sweep", "a", *LOOSE)
    assert (wrong.returncode, "FLAG=VALUE" in wrong.stderr) == (2, True)


def test_a_server_that_runs_already(thirdparty, tmp_path):
    """Any server: this one is the standard library's."""
    done = run(tmp_path / "found", "--base-url", thirdparty.url, *LOOSE)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "found" / "summary.json").read_text())["goodput"]
    assert found["server"]["seeds"] == [100000]
    assert {one["model_id"] for one in runs(tmp_path / "found")} == {"org/tiny"}


@pytest.mark.full
def test_a_killed_search_leaves_no_server(model, tmp_path):
    words = ["--serve", model, "--goodput", "ttft:60000", "--start-rate", "0.5"]
    with subprocess.Popen(command(tmp_path / "found", *words), stdout=subprocess.PIPE) as p:
        wait_for(lambda: b" levels " in p.stdout.readline(), 120)
        (server,) = children(p.pid)
        p.kill()
    wait_for(lambda: not alive(server))


def test_a_server_that_does_not_start_is_a_line_with_the_end_of_its_log(tmp_path):
    done = run(tmp_path / "found", "--serve", "nothing-of-that-name", *LOOSE)
    assert done.returncode == 1
    assert "the server ended with" in done.stderr
    assert "nothing-of-that-name" in done.stderr


def test_no_server_is_no_goodput_of_zero(tmp_path):
    words = ["--base-url", "http://127.0.0.1:9", "--model", "named", "--num-warmups", "0"]
    done = run(tmp_path / "found", *words, *LOOSE)
    assert done.returncode == 1
    assert "http://127.0.0.1:9/v1/models does not answer" in done.stderr
    assert not runs(tmp_path / "found")


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--serve", "m --port 1"], "may not have --port, which the search sets"),
        (["--serve", "m --slo-ttft-per-1k-ms=5"], "may not have --slo-ttft-per-1k-ms, which"),
        (["--serve", "m", "--simulate", "h200"], "exclude"),
        (["--serve", "m", "--model", "m"], "--model"),
        (["--trace"], "--trace needs --serve"),
        (["--tp", "2"], "--tensor-parallel-size"),
    ],
)
def test_contradictions_are_refused(words, complaint, tmp_path):
    from typer.testing import CliRunner

    from twolane.cli.bench.main import app

    done = CliRunner().invoke(app, ["goodput", "--out", str(tmp_path), *LOOSE[:3], *words])
    assert done.exit_code == 2
    assert complaint in done.output + done.stderr
