"""`--config`, through the parser of the real command."""

import os

import pytest
import typer

from twolane.cli.bench.main import BenchCommands
from twolane.cli.main import Commands

SERVE = Commands.load("serve")
BENCH = BenchCommands.load("serve")


@pytest.fixture(autouse=True)
def bare_environment(monkeypatch):
    for name in [name for name in os.environ if name.startswith("TWOLANE_")]:
        monkeypatch.delenv(name)


@pytest.fixture
def parse(tmp_path):
    """Parse a command line with a file of this text."""

    def run(text, *args, command=SERVE):
        path = tmp_path / "settings.yaml"
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return command.make_context("serve", ["--config", str(path), *args]).params

    return run


def test_flag_before_environment_before_file_before_default(parse, monkeypatch):
    text = "model: m\nport: 1\nmax-queue: 2\nmax-running: 3"
    monkeypatch.setenv("TWOLANE_PORT", "11")
    monkeypatch.setenv("TWOLANE_MAX_QUEUE", "12")
    got = parse(text, "--port", "21")
    names = ("port", "max_queue", "max_running", "drain_seconds")
    assert [got[name] for name in names] == [21, 12, 3, 10.0]


def test_a_command_lines_model_comes_before_the_files(parse, monkeypatch):
    assert parse("model: m")["model"] == "m"
    assert parse("model: m", "n")["model"] == "n"
    monkeypatch.setenv("TWOLANE_MODEL", "e")
    assert parse("model: m")["model"] == "e"


def test_values_are_read_as_those_of_flags_are(parse):
    got = parse(
        """
        model: no           # not a boolean
        served_model_name: 1e3
        port: 080
        drain-seconds: 2
        prefix-cache: false
        trace: ~            # the default
        option: {token_budget: 512, x: "y z"}
        host: "::1"
        """.replace("\n        ", "\n")
    )
    assert (got["model"], got["served_model_name"], got["port"]) == ("no", ["1e3"], 80)
    assert (got["drain_seconds"], got["prefix_cache"], got["trace"]) == (2.0, False, None)
    assert (got["option"], got["host"]) == (["token_budget=512", "x=y z"], "::1")


@pytest.mark.parametrize(
    "text", ["option: a=1", "option: [a=1]", "option:\n- a=1", "option: {a: 1}"]
)
def test_what_may_repeat_takes_every_form(parse, text):
    assert parse(f"model: m\n{text}")["option"] == ["a=1"]


@pytest.mark.parametrize("text", ["", "# nothing", "---", "{}"])
def test_an_empty_file_says_nothing(parse, text):
    assert parse(text, "m")["port"] == 8000


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a: 1\nprot: 2", ("line 1", "'a'")),
        ("\nprot: 2", ("line 2", "'prot'", "did you mean 'port'")),
        ("no-prefix-cache: true", ("did you mean 'prefix-cache'",)),
        ("max_qeue: 3", ("did you mean 'max-queue'",)),
        ("config: other.yaml", ("unknown key 'config'",)),
        ("help: true", ("unknown key 'help'",)),
        ("1: 2", ("unknown key '1'",)),
        ("[a]: 2", ("line 1: a list or a mapping is an unknown key",)),
        ("port: 1\nport: 2", ("line 2", "port is given twice")),
        ("kv-tokens: 1\nkv_tokens: 2", ("line 2", "kv_tokens is given twice")),
        ("port: [1, 2]", ("port takes one value",)),
        ("api-key:", ("api-key is empty",)),
        ("port: {a: 1}", ("port takes one value",)),
        ("option: [[1]]", ("option is nested too deeply",)),
        ("option: {a: [1]}", ("option is nested too deeply",)),
        ("port", ("key: value",)),
        ("- port: 1", ("key: value",)),
        ("port: 1\n  host: x", ("line 2", "mapping values")),
        ("port: 'x", ("line 1", "end of stream")),
        ("a: 1\n---\nb: 2", ("line 2", "document")),
        ("\tport: 1", ("line 1",)),
        ("port: *nowhere", ("undefined alias",)),
        (b"\xff\xfe\x00", ("settings.yaml",)),
        (b"port: \xff", ("UTF-8",)),
        (b"port: \x00", ("YAML",)),
        ("[" * 3000, ("YAML",)),
        ("port: x", ("--port", "integer")),
        ("port: 99999", ("--port", "65535")),
        ("port: 1.5", ("--port", "integer")),
        ("port: true", ("--port", "integer")),
        ("seed: 1e3", ("--seed", "integer")),
        ("dtype: int4", ("--dtype", "bfloat16")),
        ("prefix-cache: maybe", ("--prefix-cache",)),
    ],
)
def test_what_cannot_be_is_refused_by_name(parse, text, words):
    with pytest.raises(typer.BadParameter) as caught:
        parse(text, "m")
    for word in words:
        assert word in caught.value.format_message()


@pytest.mark.parametrize("path", ["/nowhere.yaml", "/"])
def test_a_file_that_cannot_be_read_is_named(path):
    with pytest.raises(typer.BadParameter, match=path):
        SERVE.make_context("serve", ["--config", path, "m"])


def test_bench_takes_a_file_too(parse):
    text = "dataset: azure-conv\ngoodput: {ttft: 500, tbt: 50}\nheader: [a=b]\npercentiles: 50,99"
    got = parse(text, "--dataset", "sharegpt", command=BENCH)
    assert (got["dataset"], got["goodput"]) == ("sharegpt", ["ttft:500", "tbt:50"])
    assert (got["header"], got["metric_percentiles"]) == (["a=b"], "50,99")
    with pytest.raises(typer.BadParameter, match="unknown key 'more_slos'"):
        parse("more_slos: x", command=BENCH)


def test_keys_that_are_none_are_refused_wherever_they_come_from(parse, monkeypatch):
    """A server that was to have a key must not be open to everybody; unset or default is no key."""
    for value in (" ", "\t\n"):
        monkeypatch.setenv("TWOLANE_API_KEY", value)
        with pytest.raises(typer.BadParameter, match="must not be empty"):
            parse("model: m")
    monkeypatch.setenv("TWOLANE_API_KEY", "")
    assert not parse("model: m")["api_key"]
    assert not parse("model: m\napi-key: ~")["api_key"]
    for text in ("api-key: []", "api-key: ['']", "api-key: ' '"):
        with pytest.raises(typer.BadParameter, match="must not be empty"):
            parse(f"model: m\n{text}")
    with pytest.raises(typer.BadParameter, match="must not be empty"):
        parse("model: m", "--api-key", "")
    assert parse("model: m\napi-key: [a, b]")["api_key"] == ["a", "b"]
