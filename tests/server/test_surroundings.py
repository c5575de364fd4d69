"""Two servers and one port, a standard output that takes nothing, models that are damaged."""

import subprocess
import sys
import urllib.parse
import urllib.request
from pathlib import Path

import pytest

from twolane.frontend.text.tokenizer import _file, load_tokenizer
from twolane.model.load.hub import resolve

from .conftest import TINY
from .parrot import write_parrot
from .serving import PATIENCE, write_tiny_model


def serve(*args, **more):
    command = [sys.executable, "-m", "twolane", "serve", *args, "--device", "cpu"]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True, **more)


@pytest.mark.executed
def test_the_second_server_on_a_port_ends_before_it_loads_anything(tiny):
    """Or looks for its model."""
    port = str(urllib.parse.urlsplit(tiny.base).port)
    second = serve("no-such-model-anywhere", *TINY, "--port", port, stdout=subprocess.PIPE)
    out, err = second.communicate(timeout=PATIENCE)
    assert (second.returncode, out) == (1, "")
    [line] = err.splitlines()
    assert f"cannot listen on 127.0.0.1:{port}" in line
    assert "in use" in line
    assert tiny.request("/health")[0] == 200


@pytest.mark.executed
def test_a_full_standard_output_and_a_deleted_working_folder_stop_no_server(tiny_model, tmp_path):
    folder = tmp_path / "gone"
    folder.mkdir()
    with Path("/dev/full").open("w") as full:
        server = serve(str(tiny_model), *TINY, "--port", "0", stdout=full, cwd=folder)
    folder.rmdir()
    try:
        told = next(line for line in server.stderr if " | http" in line)
        assert any("No space left" in line for line in server.stderr)
        base = next(part for part in told.split(" | ") if part.startswith("http"))
        with urllib.request.urlopen(f"{base}/health", timeout=PATIENCE) as answer:
            assert answer.status == 200
    finally:
        server.terminate()
        server.stderr.close()
        assert server.wait(PATIENCE) == 0


@pytest.mark.parametrize("damage", ["cut", "two ids swapped", "no JSON"])
def test_a_kept_tokenizer_that_is_damaged_is_made_anew(tmp_path, monkeypatch, caplog, damage):
    monkeypatch.setenv("TWOLANE_CACHE", str(tmp_path / "cache"))
    source = resolve(str(write_parrot(tmp_path / "model", [])))
    expected = load_tokenizer(source).backend.to_str()
    assert source.tokenizer is not None
    kept = _file(source)
    whole = kept.read_bytes()
    swapped = (
        whole.replace(b'\\":5,', b'\\":X,').replace(b'\\":6,', b'\\":5,').replace(b":X,", b":6,")
    )
    assert swapped != whole
    damaged = {
        "cut": whole[: len(whole) // 2],
        "two ids swapped": swapped,
        "no JSON": b"\0" * 100,
    }
    kept.write_bytes(damaged[damage])
    assert load_tokenizer(source).backend.to_str() == expected
    assert "is damaged and is made again" in caplog.text
    assert kept.read_bytes() == whole


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("[" * 200_000, "config.json"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers"),
        pytest.param({"num_attention_heads": 0}, "num_attention_heads", marks=pytest.mark.full),
    ],
    ids=["deep", "layers", "heads"],
)
def test_odd_numbers_of_a_config_are_one_line_at_once(tmp_path, config, message):
    path = write_tiny_model(tmp_path / "model", **(config if isinstance(config, dict) else {}))
    if isinstance(config, str):
        (path / "config.json").write_text(config)
    server = serve(str(path), *TINY, "--port", "0", stdout=subprocess.PIPE)
    out, err = server.communicate(timeout=PATIENCE)
    assert (server.returncode, out) == (1, "")
    last = err.splitlines()[-1]
    assert message in last
    assert "Traceback" not in err
