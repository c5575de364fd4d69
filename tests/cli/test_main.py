import asyncio
import io
import json
import logging
import os
import re
import resource
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import AsyncMock

import pytest
from msgspec.structs import fields
from typer.testing import CliRunner

from twolane.cli import doctor
from twolane.cli.bench.common import slos
from twolane.cli.bench.main import BenchCommands
from twolane.cli.errors import fail
from twolane.cli.generate import answer
from twolane.cli.main import OTHERS, Commands, app, main
from twolane.cli.serve import NO_OPTIONS
from twolane.common.log_lines import LineHandler
from twolane.common.options import settings_of
from twolane.engine.config import EngineConfig
from twolane.sampling import SamplingParams
from twolane.server.options import ServerOptions

from ..server.serving import PATIENCE, write_tiny_model

MODEL = "smollm2-135m-instruct"


def run(*args, variables=None, **more):
    command = [sys.executable, "-m", "twolane", *args]
    env = {**os.environ, "COLUMNS": "200", "NO_COLOR": "1", **(variables or {})}
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=env, **more)


def imported(*args):
    """Return the modules that a Python command imports."""
    command = [sys.executable, "-X", "importtime", *args]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stderr.splitlines()
    return {line.rsplit("|", 1)[1].strip() for line in lines if line.startswith("import time:")}


@pytest.mark.executed
def test_help_takes_little_more_than_the_library_that_prints_it():
    def seconds(*command):
        """Processor time: what a busy machine takes beside it says nothing."""
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, *command], capture_output=True, check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    library = "import typer.main, typer.rich_utils, pydantic, rich.markdown"
    pairs = [(seconds("-m", "twolane", "--help"), seconds("-c", library)) for _ in range(3)]
    assert min(help / bare for help, bare in pairs) < 2


@pytest.mark.parametrize("args", [("-m", "twolane", "--help"), ("-c", "import twolane")])
def test_nothing_heavy_is_imported_for_help(args):
    heavy = {"torch", "transformers", "fastapi", "zmq", "numpy", "httptools", "uvicorn"}
    assert not imported(*args) & heavy


def test_every_engine_setting_has_an_option():
    settings = {field.name for field in fields(EngineConfig)}
    assert {one.path[0] for one in settings_of(EngineConfig)} == settings - {"model", "transport"}
    text = run("serve", "--help").stdout
    for setting in (*settings_of(EngineConfig), *settings_of(ServerOptions)):
        assert setting.flag in text


@pytest.mark.parametrize("group", [Commands, BenchCommands])
def test_help_shows_every_name_whole_on_a_narrow_terminal(group):
    prefix = ("bench",) if group is BenchCommands else ()
    for name in set(group.lines) - {"bench"}:
        lines = run(*prefix, name, "--help", variables={"COLUMNS": "60"}).stdout.splitlines()
        shown = " ".join(lines)
        for param in group.load(name).params:
            for flag in (*param.opts, *param.secondary_opts):
                assert not flag.startswith("-") or flag in shown
            assert (param.envvar or "") in shown


def test_the_help_of_serve_comes_in_groups_that_fit_a_screen():
    grouped = Counter(param.rich_help_panel for param in Commands.load("serve").params[1:])
    assert grouped.pop(None) == 1, "only --config has no group"
    assert len(grouped) > 7
    assert max(grouped.values()) <= 12


def test_help_names_arguments_as_the_pages_do_and_keeps_marks():
    def shown(*command):
        return " ".join(run(*command, "--help").stdout.split())

    assert shown("serve").startswith("Usage: twolane serve [OPTIONS] MODEL Serve")
    assert "marks for it, such as <think> or [THINK]" in shown("serve")
    assert "[OPTIONS] MODEL Serve a workload" in shown("simulate"), "the hidden NAME:MS is shown"
    assert "[OPTIONS] [RUN]... Draw" in shown("bench", "report")
    assert "[OPTIONS] PROFILE... Print" in shown("bench", "estimators")


@pytest.mark.parametrize("group", [Commands, BenchCommands])
def test_a_group_says_of_a_command_what_the_command_says_of_itself(group):
    for name, line in group.lines.items():
        assert " ".join(group.load(name).help.split()).startswith(line)


@pytest.mark.parametrize(
    "variable, args, said",
    [
        ("", ("--port", "99999"), "--port must be at most 65535"),
        ("", ("--port", "x"), "--port must be an integer"),
        ("x", (), "TWOLANE_PORT must be an integer"),
        ("", ("--dtype", "half"), "--dtype 'half' is not one of 'auto', 'float32', "),
        ("", ("--lora", "a"), "--lora a: write NAME=PATH"),
        ("", ("--option", "a=1"), "--option 'a' is a setting of a system: give --system too"),
    ],
)
def test_a_wrong_value_is_told_in_plain_words(variable, args, said, capsys, monkeypatch):
    monkeypatch.setenv("TWOLANE_PORT", variable)
    monkeypatch.setattr(sys, "argv", ["twolane", "serve", MODEL, *args])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert capsys.readouterr().err.startswith(f"twolane: {said}")


def test_a_terminal_obeys_no_error(capsys):
    """A file's name or a tensor's may come from a checkpoint."""
    assert fail("there is no \x1b[2Jx").exit_code == 1
    assert capsys.readouterr().err == "twolane: there is no \\x1b[2Jx\n"


class Answered:
    """A generation of one text, some of which a terminal would obey."""

    def __init__(self, *request):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *error):
        pass

    async def __aiter__(self):
        for text in ("\x1b]0;", "x\x07\r\tü\n", "\x9b2J\u202eb"):
            yield SimpleNamespace(text=text)


@pytest.mark.parametrize(
    ("terminal", "shown"),
    [
        (True, "\\x1b]0;x\\x07\\x0d\tü\n\\x9b2J\\u202eb\n"),
        (False, "\x1b]0;x\x07\r\tü\n\x9b2J\u202eb\n"),
    ],
)
def test_a_terminal_obeys_no_answer(terminal, shown, monkeypatch):
    out = io.StringIO(newline="")
    monkeypatch.setattr(out, "isatty", lambda: terminal)
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr("twolane.frontend.generation.Generation", Answered)
    preparer = SimpleNamespace(prepare=AsyncMock())
    monkeypatch.setattr("twolane.frontend.prepare.Preparer", lambda *_: preparer)
    texts = SimpleNamespace(codec=None, template_source=None, shows_tools=False)
    asyncio.run(answer(None, texts, "x", SamplingParams(), chat=False))
    assert out.getvalue() == shown


def test_a_terminal_obeys_no_line_of_a_log_that_no_command_has_set_up(monkeypatch):
    """Libraries warn of what a checkpoint has."""
    monkeypatch.setattr(logging, "lastResort", None)
    monkeypatch.setattr(sys, "argv", ["twolane", "--version"])
    with pytest.raises(SystemExit):
        main()
    assert isinstance(logging.lastResort, LineHandler)
    assert logging.lastResort.level == logging.WARNING


@pytest.mark.parametrize("server", ["vllm", "sglang", "llama-cpp"])
def test_an_option_of_another_server_is_refused_with_what_to_use_here(capsys, monkeypatch, server):
    """A row of a page whose option is served by now must go: the parser takes it."""
    page = (Path(__file__).parents[2] / f"docs/guides/from-{server}.md").read_text()
    _, same, table = re.split(r"^## Options .*$", page, flags=re.MULTILINE)
    table = table.partition("\n## ")[0]
    rows = re.findall(r"^\| (`-.+?) \| (.+) \|$", table, re.MULTILINE)
    others = [option for options, _ in rows for option in re.findall(r"`(.+?)`", options)]
    assert len(others) > 60
    for option in others:
        monkeypatch.setattr(sys, "argv", ["twolane", "serve", MODEL, option, "1"])
        with pytest.raises(SystemExit) as ended:
            main()
        assert ended.value.code == 2
        told = capsys.readouterr().err
        assert told.startswith(f"twolane: No such option: {option}; "), told
        assert told.endswith(" (see twolane serve --help)\n")
        assert "docs/guides/from-" not in told, told
    monkeypatch.setattr(sys, "argv", ["twolane", "serve", MODEL, "--max-num-sequences", "1"])
    with pytest.raises(SystemExit):
        main()
    assert f"; {OTHERS} (" in capsys.readouterr().err
    params = [*Commands.load("serve").params, *Commands.load("fleet").params]
    served = {one for param in params for one in (*param.opts, *param.secondary_opts)}
    assert served >= set(re.findall(r"`(--[\w-]+)", same))
    assert served >= {one for _, here in rows for one in re.findall(r"`?(--[a-z][\w-]+)", here)}


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        ("srve", "No such command 'srve'; did you mean 'serve'? (see twolane --help)"),
        ("serve m --sytem auto", "--sytem; did you mean '--system'? (see twolane serve --help)"),
        ("serve m --no-prefix-cach", "'--no-prefix-cache'? (see twolane serve --help)"),
        ("fleet m --replcas 2", "did you mean '--replicas'? (see twolane fleet --help)"),
        ("fleet m --max-qeue 2", "did you mean '--max-queue'? (see twolane fleet --help)"),
        ("simulate m --gpus h200", "did you mean '--gpu'? (see twolane simulate --help)"),
    ],
)
def test_a_mistyped_word_is_answered_with_the_nearest_one(capsys, monkeypatch, words, meant):
    monkeypatch.setattr(sys, "argv", ["twolane", *words.split()])
    with pytest.raises(SystemExit):
        main()
    told = capsys.readouterr().err
    assert told.startswith("twolane: No such ")
    assert told.endswith(f"{meant}\n")


def test_every_serve_option_has_a_variable_and_a_line_in_the_docs():
    page = (Path(__file__).parents[2] / "docs" / "guides" / "cli.md").read_text()
    rows = dict(re.findall(r"^\| `(TWOLANE_\w+)` \| `(.+?)` \|", page, re.MULTILINE))
    expected = {"TWOLANE_MODEL": "MODEL"}
    for param in Commands.load("serve").params:
        if param.name not in ("help", "model"):
            flag = param.opts[0]
            expected["TWOLANE_" + flag[2:].replace("-", "_").upper()] = flag
            assert param.envvar == "TWOLANE_" + flag[2:].replace("-", "_").upper()
    assert rows == expected


def test_what_is_wrong_in_a_file_or_a_variable_is_one_line(tmp_path):
    file = tmp_path / "serve.yaml"
    for text, words in (
        ("model: x\nprot: 3", (str(file), "line 2", "did you mean 'port'?")),
        ("model: x\nport: -1", (f"{file}: --port must be at least 0",)),
        ("model: x\npage-size: 0", ("--page-size", "at least 1")),
    ):
        file.write_text(text)
        result = run("serve", "--config", str(file))
        assert result.returncode == 2
        assert len(result.stderr.splitlines()) == 1
        for word in words:
            assert word in result.stderr
    result = run("serve", MODEL, variables={"TWOLANE_PORT": "tcp://10.0.0.1:8000"})
    assert result.returncode == 2
    assert "TWOLANE_PORT must be an integer, and Kubernetes sets it" in result.stderr
    assert "enableServiceLinks: false" in result.stderr
    assert len(result.stderr.splitlines()) == 1


@pytest.mark.parametrize("command", ["serve", "fleet"])
def test_a_key_that_a_template_did_not_fill_in_opens_no_server(command):
    result = run(command, "nope", variables={"TWOLANE_API_KEY": ""})
    assert (result.returncode, result.stderr.count("\n")) == (2, 1)
    assert "TWOLANE_API_KEY is empty" in result.stderr


def test_a_fleet_writes_no_trace():
    result = run("fleet", "nope", "--trace", "trace.json")
    assert result.returncode == 2
    assert "--trace is for one server" in result.stderr


def test_mistyped_variables_are_named():
    result = run("serve", "nope", variables={"TWOLANE_PROT": "1"})
    assert "TWOLANE_PROT is not one of mine; did you mean 'TWOLANE_PORT'?" in result.stderr


def test_variables_that_are_read_without_an_option_are_known():
    root, named = Path(__file__).parents[2], set()
    for folder, some in (("src", ""), ("benchmarks", ""), ("tests", "TEST_")):
        for file in root.glob(f"{folder}/**/*.py"):
            named |= set(re.findall(rf'"(TWOLANE_{some}[A-Z_]+)"', file.read_text()))
    assert named - {param.envvar for param in Commands.load("serve").params} == NO_OPTIONS


def test_completion_knows_commands_options_and_models():
    def complete(*words):
        words = ("twolane", *words)
        asked = {"COMP_WORDS": " ".join(words), "COMP_CWORD": str(len(words) - 1)}
        return run(variables={**asked, "_TWOLANE_COMPLETE": "complete_bash"}).stdout.split()

    assert complete("ser") == ["serve"]
    assert "--slo-tbt-ms" in complete("serve", "--slo")
    assert complete("serve", "--system", "chu") == ["chunked"]
    assert complete("serve", "smol") == [MODEL]
    assert complete("bench", "serve", "--dataset", "azure-") == ["azure-code", "azure-conv"]
    assert {"--replica-gpus", "--slo-tbt-ms"} < set(complete("fleet", "--"))


def test_a_shell_completes_once_completion_is_installed(tmp_path):
    """As a user installs it, in a bash of its own."""
    program = tmp_path / "bin/twolane"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m twolane "$@"\n')
    program.chmod(0o755)
    env = {**os.environ, "HOME": str(tmp_path), "PATH": f"{program.parent}:{os.environ['PATH']}"}

    def bash(script):
        command = ("bash", "-c", script)
        return subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)

    installed = bash("twolane --install-completion; exit $?")
    assert installed.returncode == 0, installed.stderr
    asked = "COMP_WORDS=(twolane serve --system chu); COMP_CWORD=3; _twolane_completion twolane"
    shown = bash(f'source ~/.bashrc; {asked}; echo "${{COMPREPLY[@]}}"')
    assert shown.stdout.split() == ["chunked"], shown.stderr


def test_version():
    assert run("--version").stdout.startswith("twolane 0.")


WRONG = [
    (("--kv-tokens", "4"), ("--kv-tokens 4",)),
    (("--kv-tokens", "100", "--max-model-len", "200"), ("--kv-tokens 100", "200")),
    (
        ("--max-positions", "100", "--max-model-len", "200"),
        ("--max-model-len 200", "--max-positions 100"),
    ),
    (("--page-size", "0"), ("--page-size", "at least 1")),
    (("--max-model-len", "1"), ("--max-model-len", "at least 2")),
    (("--cores", "0"), ("--cores", "between 1 and")),
    (("--system", "nope"), ("--system 'nope'", "static-split", "chunked")),
    (("--system", "static-split", "--option", "nope=1"), ("--option 'nope'", "decode_units")),
    (("--option", "nope"), ("--option nope", "KEY=VALUE")),
    (
        ("--option", "look-ahead=1", "--option", "look_ahead=2"),
        ("--option look_ahead", "twice"),
    ),
    (("--otlp-endpoint", "foo"), ("--otlp-endpoint", "'foo'")),
    (("--otlp-endpoint", "http://a b"), ("--otlp-endpoint", "'http://a b'")),
    (("--served-model-name", "a\nb"), ("--served-model-name", "one line", r"'a\nb'")),
    (("--host", ""), ("--host must not be empty",)),
    (("--option", "decode_units=1"), ("--option 'decode_units'", "give --system")),
    (("--system", "static-split", "--option", "decode_units=x"), ("--option", "decode_units")),
    (("--trace", "/nowhere/t.json"), ("--trace", "/nowhere/t.json")),
    (("--trace", "/"), ("--trace / cannot be written",)),
    (("--profile", "/"), ("--profile / cannot be read",)),
    (("--trace", "x" * 300), ("--trace x", "cannot be written")),
    (("--lora", "a=" + "x" * 300), ("--lora a=x", "no such directory")),
    (("--slo-tbt-ms", "-1"), ("--slo-tbt-ms", "at least 0")),
    (("--slo-ttft-ms", "nan"), ("--slo-ttft-ms", "at least 0")),
    (("--slo-ttft-per-1k-ms", "9"), ("--slo-ttft-per-1k-ms", "needs --slo-ttft-ms")),
    (
        ("--slo-ttft-ms", "9", "--slo-ttft-per-1k-ms", "-1"),
        ("--slo-ttft-per-1k-ms", "at least 0"),
    ),
    (("--dtype", "int4"), ("--dtype", "bfloat16")),
    (("--port", "99999"), ("--port", "65535")),
    (("--max-queue", "0"), ("--max-queue",)),
    (("--kv-tokens", "9" * 23), ("--kv-tokens", "must be at most")),
    (("--max-running", "100000000"), ("--max-running", "65536")),
    (("--nope",), ("--nope",)),
]
"""Options of `serve`, and what is said of them."""
EACH = """
import json, os, sys
import twolane.server.run
from twolane.cli.main import main

for args in json.load(sys.stdin):
    read, write = os.pipe()
    if not (child := os.fork()):
        os.dup2(write, 2)
        sys.argv = ["twolane", *args]
        try:
            main()
        except SystemExit as ended:  # what the interpreter has to clear away takes far longer
            sys.stderr.flush()
            os._exit(ended.code)
    os.close(write)
    with open(read) as said:
        told = said.read()
    print(json.dumps([os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), told]), flush=True)
"""
"""Runs the command line in a process for each of the arguments that it reads, with the same
imports."""


@pytest.fixture(scope="module")
def refusals():
    """Exit code and standard error of `serve` with each of the wrong options."""
    asked = json.dumps([["serve", MODEL, *args] for args, _ in WRONG])
    env = {**os.environ, "COLUMNS": "200", "NO_COLOR": "1"}
    command = [sys.executable, "-c", EACH]
    done = subprocess.run(command, input=asked, capture_output=True, text=True, env=env, check=True)
    ended = map(json.loads, done.stdout.splitlines())
    return {args: each for (args, _), each in zip(WRONG, ended, strict=True)}


@pytest.mark.parametrize(("args", "words"), WRONG)
def test_wrong_options_are_refused_by_name(refusals, args, words):
    code, said = refusals[args]
    assert code == 2
    for word in words:
        assert word in said
    assert "Traceback" not in said


ASKED = {
    "serve": [MODEL],
    "fleet": [MODEL, "--hosts", "local"],
    "generate": [MODEL, "x"],
    "run-batch": [MODEL, "asked.jsonl", "answers.jsonl"],
    "profile": [MODEL],
    "simulate": ["llama-3.1-8b"],
    "bench serve": ["--base-url", "http://127.0.0.1:1"],
    "bench goodput": [
        "--simulate",
        "h200",
        "--model",
        "llama-3.1-8b",
        "--goodput",
        "ttft:1",
        "--out",
        "x",
    ],
    "bench report": ["nowhere"],
}
"""What each command that takes fractions needs beside them."""


def fractions():
    """Return every command with each of its options that take fractions."""
    commands = [(name, Commands.load(name)) for name in Commands.lines if name != "bench"]
    commands += [(f"bench {name}", BenchCommands.load(name)) for name in BenchCommands.lines]
    return [
        (name, param.opts[0])
        for name, command in commands
        for param in command.params
        if "float" in str(param.type_descriptor.annotation)
    ]


@pytest.mark.parametrize(("command", "option"), fractions())
def test_what_is_no_number_is_refused_by_name(command, option, tmp_path, monkeypatch):
    """As is what is infinite, but where that has a meaning: for arrivals."""
    monkeypatch.chdir(tmp_path)
    infinite = () if option in ("--request-rate", "--burstiness") else ("inf", "1e400")
    for value in ("nan", *infinite):
        done = CliRunner().invoke(app, [*command.split(), *ASKED[command], f"{option}={value}"])
        assert done.exit_code == 2
        assert option in done.output


@pytest.mark.parametrize(
    ("args", "word"),
    [
        (("serve", "nope", "--port", "0"), "no model 'nope'"),
        (("serve", "qwen3-8b", "--port", "0"), "--load-format dummy"),
        (("pull", "nope"), "no model 'nope' to pull"),
        (("generate", "nope", "Hi"), "no model 'nope'"),
    ],
)
def test_what_cannot_be_had_is_one_line(args, word):
    result = run(*args)
    assert result.returncode == 1
    assert word in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_an_unsupported_architecture_is_one_line_that_lists_those_that_work(tmp_path):
    model = write_tiny_model(tmp_path)
    config = (model / "config.json").read_text().replace("LlamaFor", "GPT9For")
    (model / "config.json").write_text(config)
    result = run("serve", str(model), "--load-format", "dummy", "--port", "0")
    assert result.returncode == 1
    assert "GPT9ForCausalLM" in result.stderr
    assert "LlamaForCausalLM" in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_settings_that_the_model_cannot_keep_are_one_line(tmp_path):
    model = str(write_tiny_model(tmp_path))
    result = run(
        "serve", model, "--load-format", "dummy", "--max-model-len", "100000", "--port", "0"
    )
    assert result.returncode == 2
    [line] = result.stderr.splitlines()  # no weight was read
    assert "--max-model-len 100000 exceeds the model's 65536 positions; --max-positions" in line


def test_an_address_in_use_is_one_line():
    import socket

    with socket.create_server(("127.0.0.1", 0)) as taken:
        result = run("serve", MODEL, "--port", str(taken.getsockname()[1]))
    assert result.returncode == 1
    assert "cannot listen on 127.0.0.1" in result.stderr


@pytest.mark.parametrize("host", ["nope.invalid", "a..b"])
def test_an_address_that_is_none_is_one_line_that_names_it(host):
    result = run("serve", MODEL, "--host", host)
    assert result.returncode == 1
    [line] = result.stderr.splitlines()
    assert "cannot listen on --host" in line
    assert host in line


def test_a_profile_that_is_not_there_is_named_once():
    result = run("bench", "estimators", "nowhere.json")
    assert result.returncode == 1
    assert result.stderr == "twolane: nowhere.json: No such file or directory\n"


def test_generate_answers():
    result = run("generate", MODEL, "What is the capital of France?", "--kv-tokens", "4000")
    assert result.returncode == 0
    assert "Paris" in result.stdout


@pytest.mark.full
def test_generate_continues_text_from_standard_input():
    args = ("generate", MODEL, "-", "--raw", "--max-tokens", "3", "--kv-tokens", "4000")
    result = run(*args, input="The capital of France is")
    assert "Paris" in result.stdout


@pytest.mark.full
def test_a_terminated_generate_leaves_nothing_behind(tmp_path):
    """No folder of sockets, in the middle of an answer; and the exit code says what came."""
    args = ("generate", MODEL, "Once", "--raw", "--max-tokens", "4000", "--kv-tokens", "5000")
    process = subprocess.Popen(
        [sys.executable, "-m", "twolane", *args],
        env={**os.environ, "TMPDIR": str(tmp_path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout.read(1)
    assert list(tmp_path.glob("twolane-*"))
    process.terminate()
    _, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == 143
    assert b"Traceback" not in errors
    assert not list(tmp_path.glob("twolane-*"))


def test_generate_refuses_wrong_parameters():
    result = run("generate", MODEL, "x", "--top-p", "2")
    assert result.returncode == 2
    assert "--top-p must be" in result.stderr


def test_generate_without_a_tokenizer_says_so(tmp_path):
    model = str(write_tiny_model(tmp_path))
    result = run("generate", model, "x", "--load-format", "dummy", "--kv-tokens", "1000")
    assert result.returncode == 1
    assert "without a tokenizer" in result.stderr


def test_doctor_says_what_there_is():
    result = run("doctor")
    assert result.returncode == 0
    for word in (
        "python",
        "torch",
        "cores",
        "memory",
        "partitions",
        "fp8",
        "static-split",
        "cache",
    ):
        assert word in result.stdout


@pytest.mark.parametrize(
    ("names", "peers", "said"),
    [
        ([], True, "processes that share the cores, to try and to test"),
        (["A"], True, "one: several need as many GPUs of one host (A)"),
        (["A", "B"], True, "none of all 2 GPUs, which are not alike: A, B"),
        (["A", "A"], True, "up to 2 GPUs, which sum by NCCL 2 or two-shot, over memory that all"),
        (["A", "A"], False, "up to 2 GPUs, which sum by NCCL 2 (A)"),
    ],
)
def test_doctor_says_how_many_gpus_share_a_model(monkeypatch, names, peers, said):
    monkeypatch.setattr("torch.cuda.is_available", lambda: bool(names))
    monkeypatch.setattr("torch.cuda.device_count", lambda: len(names))
    monkeypatch.setattr("torch.cuda.get_device_name", lambda i: names[i])
    monkeypatch.setattr("torch.cuda.can_device_access_peer", lambda a, b: peers)
    monkeypatch.setattr("twolane.lanes.ranks.cuda_machine.version", lambda: "2")
    assert doctor.ranks().startswith(said)


def test_doctor_says_what_the_settings_of_a_system_mean():
    result = run("doctor", "--system", "chunked")
    assert result.returncode == 0
    assert "token_budget=256" in result.stdout
    assert "Tokens in a forward pass" in result.stdout
    wrong = run("doctor", "--system", "x")
    assert (wrong.returncode, "there are: prefill-first" in wrong.stderr) == (2, True)
    both = CliRunner().invoke(doctor.app, [MODEL, "--system", "chunked"])
    assert (both.exit_code, "--system is shown without MODEL" in both.output) == (2, True)


def test_doctor_names_a_broken_pytorch(tmp_path):
    (tmp_path / "torch.py").write_text("raise OSError('libtorch_cpu.so: no such file')")
    path = os.pathsep.join([str(tmp_path), *sys.path])
    result = run("doctor", variables={"PYTHONPATH": path})
    assert result.returncode == 1
    assert "Serving is not possible: PyTorch does not work: libtorch_cpu.so" in result.stdout
    assert not result.stderr


def test_doctor_says_what_is_read_of_a_model():
    result = run("doctor", MODEL)
    assert result.returncode == 0
    words = "49,152 tokens", "BOS", "<|im_end|>", "tokenizer.chat_template", "23,040 bytes a token"
    for word in words:
        assert word in result.stdout
    assert "--tokens needs MODEL" in run("doctor", "--tokens", "x").stderr
    assert "no model 'nope'" in run("doctor", "nope").stderr


def test_doctor_counts_the_memory_that_an_engine_finds(monkeypatch):
    """Not that which no file's cache takes: after a download there is next to none of it."""
    monkeypatch.setattr(doctor, "free_memory", lambda: 3 * 2**29)
    assert doctor.memory().endswith(" GiB, 1.5 GiB free")


def test_slos_may_stand_alone():
    assert slos(None, ["ttft:4000", "tbt:200"]) == {"ttft": 4.0, "tbt": 0.2}
    assert slos(["ttft:4000"], ["tbt:200"]) == {"ttft": 4.0, "tbt": 0.2}


def test_bench_is_mounted():
    assert "serve" in run("bench", "--help").stdout
