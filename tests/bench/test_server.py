"""Servers of other kinds, started by a command: a little one with what is asked of them."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from twolane.bench import server

PROGRAM = """
import http.server, json, sys

told = json.loads(sys.argv[1]) | {"/v1/models": "{}"}

class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        body = told.get(self.path, "").encode()
        self.send_response(200 if body else 404)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

http.server.HTTPServer(("127.0.0.1", int(sys.argv[3])), Handler).serve_forever()
"""


VLLM, SGLANG = {"version": "0.25.1"}, {"version": "0.5.17", "tp_size": 1}


@pytest.mark.parametrize(
    ("told", "version"),
    [
        ({"/version": json.dumps(VLLM)}, " 0.25.1"),
        ({"/server_info": json.dumps(SGLANG)}, " 0.5.17"),
        ({"/version": "not JSON", "/server_info": json.dumps(SGLANG)}, " 0.5.17"),
        ({}, ""),
    ],
    ids=["version", "server_info", "unreadable", "none"],
)
def test_the_version_is_asked_where_servers_tell_it(tmp_path, told, version):
    command = [sys.executable, "-c", PROGRAM, json.dumps(told)]
    with server.serving_by(command, tmp_path / "log") as started:
        about, url, words = started.announcement.split(" | ", 2)
    assert about == f"{Path(sys.executable).name}{version}"
    assert url.startswith("http://127.0.0.1:")
    assert words.startswith(sys.executable)


def test_a_server_captures_all_graphs_first_unless_told(tmp_path, monkeypatch):
    says = tmp_path / "says-its-words"
    says.write_text('#!/bin/sh\necho "$*"\nexec sleep 60\n')
    says.chmod(0o755)
    mine = SimpleNamespace(executable=str(says), platform=sys.platform)
    monkeypatch.setattr(server, "sys", mine)
    with server.serving(["model", "--capture-when-idle"], tmp_path / "log") as started:
        words = started.announcement.split()
    assert words[2:5] == ["serve", "--no-capture-when-idle", "model"]
    assert words[5] == "--capture-when-idle"  # the last one wins
