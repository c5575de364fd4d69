import contextlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from .scripted import DONE, text, usage


class Thirdparty(BaseHTTPRequestHandler):
    """Another stack: the standard library's server, answering at once."""

    protocol_version = "HTTP/1.1"

    def do_GET(self):
        self._send("application/json", b'{"data": [{"id": "org/tiny"}]}')

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        pieces = [text("x")] * (body["max_tokens"] - 1) + [text("x", "length")]
        counts = usage(len(body["prompt"]), body["max_tokens"])
        if body["max_tokens"] == 999:
            self.server.stalled.set()
            self.server.release.wait(300)
        self._send("text/event-stream", b"".join(pieces) + counts + DONE)

    def _send(self, kind, payload):
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(payload)))
        self.end_headers()
        with contextlib.suppress(OSError):
            self.wfile.write(payload)

    def log_message(self, *args):
        pass


@pytest.fixture
def thirdparty():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Thirdparty)
    server.stalled, server.release = threading.Event(), threading.Event()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    server.url = f"http://127.0.0.1:{server.server_port}"
    yield server
    server.release.set()
    server.shutdown()
    server.server_close()
