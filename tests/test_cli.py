import os
import subprocess
import sys
import time

import pytest
from msgspec.structs import fields

from twolane.cli import ENGINE_OPTIONS
from twolane.engine.config import EngineConfig

from .api.serving import write_tiny_model

MODEL = "smollm2-135m-instruct"


def run(*args, **more):
    command = [sys.executable, "-m", "twolane", *args]
    env = {**os.environ, "COLUMNS": "200", "NO_COLOR": "1"}
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=env, **more)


def imported(*args):
    """Return the modules that a Python command imports."""
    command = [sys.executable, "-X", "importtime", *args]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stderr.splitlines()
    return {line.rsplit("|", 1)[1].strip() for line in lines if line.startswith("import time:")}


def test_help_is_there_at_once():
    seconds = []
    for _ in range(3):
        began = time.perf_counter()
        assert run("--help").returncode == 0
        seconds.append(time.perf_counter() - began)
    assert min(seconds) < 0.5


@pytest.mark.parametrize("args", [("-m", "twolane", "--help"), ("-c", "import twolane")])
def test_nothing_heavy_is_imported_for_help(args):
    heavy = {"torch", "transformers", "fastapi", "zmq", "numpy", "aiohttp", "uvicorn"}
    assert not imported(*args) & heavy


def test_every_engine_setting_has_an_option():
    bounds = {f"slo_{name}_ms" for name in ("ttft", "tbt", "tpot")}
    settings = {field.name for field in fields(EngineConfig)}
    assert set(ENGINE_OPTIONS) == settings - {"model", "slo"} | bounds
    text = run("serve", "--help").stdout
    for name in ENGINE_OPTIONS:
        flag = "--option" if name == "options" else "--" + name.replace("_", "-")
        assert flag in text


def test_version():
    assert run("--version").stdout.startswith("twolane 0.")


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("--kv-tokens", "4"), ("--kv-tokens 4",)),
        (("--kv-tokens", "100", "--max-model-len", "200"), ("--kv-tokens 100", "200")),
        (("--max-positions", "100", "--max-model-len", "200"), ("--max-model-len 200", "100")),
        (("--page-size", "0"), ("--page-size", "at least 1")),
        (("--cores", "0"), ("--cores", "between 1 and")),
        (("--system", "nope"), ("--system 'nope'", "static-split", "chunked")),
        (("--option", "nope=1"), ("--option 'nope'", "decode_units")),
        (("--option", "nope"), ("--option nope", "KEY=VALUE")),
        (("--option", "decode_units=x"), ("--option", "decode_units")),
        (("--trace", "/nowhere/t.json"), ("--trace", "/nowhere/t.json")),
        (("--slo-tbt-ms", "-1"), ("--slo-tbt-ms", "-1")),
        (("--slo-ttft-ms", "nan"), ("--slo-ttft-ms", "nan")),
        (("--dtype", "int4"), ("--dtype", "bfloat16")),
        (("--port", "99999"), ("--port", "65535")),
        (("--max-queue", "0"), ("--max-queue",)),
        (("--nope",), ("--nope",)),
    ],
)
def test_wrong_options_are_refused_by_name(args, words):
    result = run("serve", MODEL, *args)
    assert result.returncode == 2
    for word in words:
        assert word in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("args", "word"),
    [
        (("serve", "nope"), "no model 'nope'"),
        (("serve", "qwen3-8b"), "--load-format dummy"),
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
    result = run("serve", str(model), "--load-format", "dummy")
    assert result.returncode == 1
    assert "GPT9ForCausalLM" in result.stderr
    assert "LlamaForCausalLM" in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_settings_that_the_model_cannot_keep_are_one_line(tmp_path):
    model = str(write_tiny_model(tmp_path))
    result = run("serve", model, "--load-format", "dummy", "--max-model-len", "100000")
    assert result.returncode == 1
    *progress, last = result.stderr.splitlines()
    assert "100000 exceeds the model's 65536 positions" in last
    assert all(line.endswith("...") for line in progress)


def test_an_address_in_use_is_one_line():
    import socket

    with socket.create_server(("127.0.0.1", 0)) as taken:
        result = run("serve", MODEL, "--port", str(taken.getsockname()[1]))
    assert result.returncode == 1
    assert "cannot listen on 127.0.0.1" in result.stderr


def test_generate_answers():
    result = run("generate", MODEL, "What is the capital of France?", "--kv-tokens", "4000")
    assert result.returncode == 0
    assert "Paris" in result.stdout


def test_generate_continues_text_from_standard_input():
    args = ("generate", MODEL, "-", "--raw", "--max-tokens", "3", "--kv-tokens", "4000")
    result = run(*args, input="The capital of France is")
    assert "Paris" in result.stdout


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
    for word in ("python", "torch", "cores", "memory", "partitions", "static-split", "cache"):
        assert word in result.stdout


def test_bench_is_mounted():
    assert "serve" in run("bench", "--help").stdout
