"""Models of the Hugging Face hub, by the hub's own library from a server that speaks its API."""

import json
import os
import subprocess
import sys
import threading
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

import pytest

COMMIT = "0" * 40
LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
REPOSITORIES = {
    "some/llama": {"config.json": json.dumps(LLAMA), "tokenizer.json": "{}", "a.bin": "no"},
    "some/gguf": {
        "README.md": "",
        "mmproj-F16.gguf": "no",
        "m-Q4_K_M.gguf": "GGUF four",
        "m-Q8_0-00001-of-00002.gguf": "GGUF eight",
        "m-Q8_0-00002-of-00002.gguf": "and more",
        "other-Q8_0.gguf": "no",
    },
    "some/empty": {"README.md": ""},
    "some/phi": {"config.json": '{"architectures": ["PhiForCausalLM"]}'},
}
GATED = "meta/llama"


class Hub(BaseHTTPRequestHandler):
    """Answers as huggingface.co does, with the headers that its library reads."""

    protocol_version = "HTTP/1.1"

    def answer(self, status, data=b"", **headers):
        self.send_response(status)
        for name, value in {"Content-Length": str(len(data)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def do_GET(self):
        words = urlsplit(self.path).path.strip("/").split("/")
        api = words[:2] == ["api", "models"]
        words = words[2:] if api else words
        repo, rest = "/".join(words[:2]), words[2:]
        if self.headers.get("Authorization") == "Bearer wrong":
            said = "Invalid credentials in Authorization header"
            return self.answer(401, X_Error_Message=said)
        if repo == GATED:
            said = f"Access to model {GATED} is restricted. Ask for access."
            return self.answer(403, X_Error_Code="GatedRepo", X_Error_Message=said)
        if repo not in REPOSITORIES:
            return self.answer(401, X_Error_Code="RepoNotFound")
        files = REPOSITORIES[repo]
        if not api:
            name = "/".join(rest[2:])
            if name not in files:
                return self.answer(404, X_Error_Code="EntryNotFound", X_Repo_Commit=COMMIT)
            etag = f'"{abs(hash((repo, name))):040x}"'
            return self.answer(200, files[name].encode(), ETag=etag, X_Repo_Commit=COMMIT)
        if rest[:1] == ["tree"]:
            entries = [
                {"type": "file", "path": name, "size": len(text), "oid": f"{i:040x}"}
                for i, (name, text) in enumerate(files.items())
            ]
            return self.answer(200, json.dumps(entries).encode(), Content_Type="application/json")
        siblings = [{"rfilename": name} for name in files]
        said = {"id": repo, "sha": COMMIT, "siblings": siblings, "private": False}
        return self.answer(200, json.dumps(said).encode(), Content_Type="application/json")

    do_HEAD = do_GET

    def log_message(self, *_):
        """Say nothing."""


@pytest.fixture(scope="module")
def endpoint():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


ASK = """import json, sys
from twolane.model.load.hub import resolve
for name in sys.argv[1:]:
    try:
        source = resolve(name)
        said = [source.kind, sorted(f.name for f in source.path.parent.iterdir()), source.path.name]
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
    print(json.dumps(said))
"""


def ask(folder, endpoint, *names, **more):
    """Return what becomes of each name, in a process of its own: the library reads its variables
    when it is imported."""
    variables = {
        "PYTHONPATH": os.pathsep.join(sys.path),
        "HOME": str(folder),
        "HF_HOME": str(folder),
        "HF_ENDPOINT": endpoint,
        **more,
    }
    command = [sys.executable, "-c", ASK, *names]
    run = subprocess.run(command, env=variables, capture_output=True, text=True, check=True)
    return [json.loads(line) for line in run.stdout.splitlines()]


def failed(name, reason):
    return (
        f"PullError: cannot fetch {name} from the Hugging Face hub: {reason} "
        "(and there is no such directory here)"
    )


def test_models_of_the_hub_and_why_others_are_none(endpoint, tmp_path):
    reasons = {
        GATED: f"access is restricted: ask for it at {endpoint}/{GATED}, and set HF_TOKEN to your "
        "token",
        "no/such": "there is no such repository, or it is private: for that, set HF_TOKEN to your "
        "token",
        "some/gguf": "it has GGUF files alone: name one, as some/gguf:Q4_K_M or :Q8_0",
        "some/empty": "it has no config.json, so it is no model of transformers",
    }
    names = ("some/llama", "some/gguf:q4_k_m", "some/gguf:Q8_0")
    others = ("some/gguf:Q5_0", "some/phi", "some/empty:Q4_0")
    whole, four, eight, other, phi, wrong, *said = ask(
        tmp_path, endpoint, *names, *others, *reasons
    )
    assert said == [failed(name, reason) for name, reason in reasons.items()]
    assert (whole[0], whole[2]) == ("dir", COMMIT)
    assert four[::2] == ["gguf", "m-Q4_K_M.gguf"]
    assert eight[::2] == ["gguf", "m-Q8_0-00001-of-00002.gguf"]
    assert eight[1] == ["m-Q4_K_M.gguf", "m-Q8_0-00001-of-00002.gguf", "m-Q8_0-00002-of-00002.gguf"]
    assert other.endswith("no GGUF file of the quantisation Q5_0: there are Q4_K_M, Q8_0")
    assert phi.startswith("UnsupportedModel: unsupported architecture 'PhiForCausalLM': Layer")
    assert wrong.endswith("there are none")


@pytest.mark.full
def test_a_hub_that_cannot_be_reached_or_does_not_accept_a_token(endpoint, tmp_path):
    closed = "http://127.0.0.1:9"
    said = partial(failed, "a/b")
    assert ask(tmp_path, closed, "a/b") == [said(f"{closed} cannot be reached")]
    offline = said("HF_HUB_OFFLINE is set, and the model is not in the cache")
    assert ask(tmp_path, closed, "a/b", HF_HUB_OFFLINE="1") == [offline]
    [said] = ask(tmp_path, endpoint, "some/llama", HF_TOKEN="wrong")
    assert said == failed(
        "some/llama", "the hub does not accept the token of HF_TOKEN or `hf auth login`"
    )
