"""`make test-clients`: real clients against a server whose model knows their answers by heart.

    python -m tests.clients.run FOLDER

FOLDER has a virtual environment for each file of `requirements/`, by its name, and what npm has
installed.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from twolane.frontend.text.tokenizer import load_tokenizer
from twolane.model.load.hub import resolve

from ..server.parrot import Learnt, write_parrot
from ..server.serving import serving

OWN_MODEL = "smollm2-135m-instruct"
CAT = '{"name": "Tom", "age": 3}'
PACKAGES = {
    "common": (
        "openai",
        "anthropic",
        "langchain-openai",
        "pydantic-ai-slim",
        "openai-agents",
        "smolagents",
        "llm",
        "huggingface_hub",
        "outlines",
        "guidance",
        "haystack-ai",
        "langgraph",
        "agno",
        "inspect-ai",
        "mem0ai",
    ),
    "autogen": ("autogen-agentchat", "semantic-kernel"),
    "crewai": ("crewai",),
    "instructor": ("instructor",),
    "litellm": ("litellm", "dspy"),
    "llama-index": ("llama-index-llms-openai-like",),
    "strands": ("strands-agents",),
}
"""The Python clients by environment: their versions of `openai` exclude each other."""
COMMAND = '{"cmd": "echo now 2`echo 1` degrees"}'
"""What the command prints stands nowhere in the call: only who has run it knows."""


def call(name: str, arguments: str) -> tuple[str, str]:
    """Return the tokens of a call: a grammar leaves no choice up to the arguments."""
    head = f'<tool_call>\n{{"name": "{name}", "arguments": '
    return head, arguments + "}\n</tool_call>"


LEARNT = [
    Learnt("21 degrees", "It is 21 degrees in Rome."),
    Learnt("weather in Rome", call("weather", '{"city": "Rome"}')),
    Learnt("Make a cat", CAT),
    Learnt("Call a cat", call("Cat", CAT)),
    Learnt("Ask the plugin", call("Plugin-weather", '{"city":"Rome"}')),
    Learnt("Finish a cat", call("final_result", CAT.replace(" ", ""))),
    Learnt("Say it", call("final_answer", '{"answer": "It is said."}')),
    Learnt("Look it up", call("exec_command", COMMAND)),
    Learnt("Find it out", call("Bash", COMMAND.replace("cmd", "command"))),
]
TEXT_TURN = "21 degrees"
"""What programs are asked that show a text turn: they are run with tools that they declare."""
PI = {"api": "openai-completions", "apiKey": "none", "models": [{"id": "parrot"}]}
OPENCODE = {
    "npm": "@ai-sdk/openai-compatible",
    "name": "twolane",
    "models": {"parrot": {"name": "parrot", "limit": {"context": 65536, "output": 1024}}},
}
CONTINUE = """name: twolane
version: 1.0.0
schema: v1
models:
  - name: parrot
    provider: openai
    model: parrot
    apiBase: {base}/v1
    apiKey: none
    roles: [chat]
"""
CONFIG = """model = "parrot"
model_provider = "twolane"
[model_providers.twolane]
name = "twolane"
base_url = "{base}/v1"
wire_api = "responses"
env_key = "TWOLANE_KEY"
"""


def turn(program: str, arguments: Sequence[str], **environment: str) -> bool:
    """Whether an agent shows its final answer, after the command that the model calls for if it
    is asked to."""
    own = {k: v for k, v in os.environ.items() if not k.startswith(("ANTHROPIC", "CLAUDE"))}
    run = subprocess.run(
        [program, *arguments],
        capture_output=True,
        text=True,
        env={**own, **environment},
        cwd=environment.get("HOME"),
        timeout=240,
        stdin=subprocess.DEVNULL,
        check=False,
    )
    works = "It is 21 degrees in Rome." in run.stdout
    if not works:
        print(run.stdout[-3000:], run.stderr[-3000:], sep="\n")
    version = subprocess.run([program, "--version"], capture_output=True, text=True, check=False)
    name, shown = Path(program).name, (version.stdout or version.stderr).strip()
    print(f"{name} (npm) {shown} | turn | {'works' if works else 'FAILS'}", flush=True)
    return works


def codex_turn(codex: str, base: str, folder: Path) -> bool:
    """Codex through `/v1/responses`."""
    (folder / "config.toml").write_text(CONFIG.format(base=base))
    options = ("exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox")
    arguments = (*options, "-C", str(folder), "Look it up")
    return turn(codex, arguments, CODEX_HOME=str(folder), TWOLANE_KEY="none")


def claude_turn(claude: str, base: str, folder: Path) -> bool:
    """Claude Code through `/v1/messages`."""
    return turn(
        claude,
        ("-p", "Find it out", "--model", "parrot", "--allowedTools", "Bash"),
        HOME=str(folder),
        ANTHROPIC_BASE_URL=base,
        ANTHROPIC_AUTH_TOKEN="none",
        CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC="1",
    )


def qwen_turn(qwen: str, base: str, folder: Path) -> bool:
    """Qwen Code."""
    own = {"OPENAI_API_KEY": "none", "OPENAI_BASE_URL": f"{base}/v1", "OPENAI_MODEL": "parrot"}
    return turn(qwen, ("--auth-type", "openai", "-p", TEXT_TURN), HOME=str(folder), **own)


def opencode_turn(opencode: str, base: str, folder: Path) -> bool:
    """opencode, which reads its configuration from the environment."""
    config = {**OPENCODE, "options": {"baseURL": f"{base}/v1", "apiKey": "none"}}
    own = {"OPENCODE_CONFIG_CONTENT": json.dumps({"provider": {"twolane": config}})}
    return turn(opencode, ("run", "-m", "twolane/parrot", TEXT_TURN), HOME=str(folder), **own)


def pi_turn(pi: str, base: str, folder: Path) -> bool:
    """pi."""
    written = {"providers": {"twolane": {**PI, "baseUrl": f"{base}/v1"}}}
    (folder / ".pi/agent").mkdir(parents=True)
    (folder / ".pi/agent/models.json").write_text(json.dumps(written))
    arguments = ("-p", TEXT_TURN, "--provider", "twolane", "--model", "parrot")
    return turn(pi, arguments, HOME=str(folder))


def cn_turn(cn: str, base: str, folder: Path) -> bool:
    """Continue."""
    config = folder / "config.yaml"
    config.write_text(CONTINUE.format(base=base))
    return turn(cn, ("-p", TEXT_TURN, "--config", str(config)), HOME=str(folder))


TURNS = {
    "codex": codex_turn,
    "claude": claude_turn,
    "qwen": qwen_turn,
    "opencode": opencode_turn,
    "pi": pi_turn,
    "cn": cn_turn,
}
"""Agents of npm by the names of their programs."""


def main() -> int:
    clients = Path(sys.argv[1]).absolute()
    with tempfile.TemporaryDirectory() as folder:
        words = load_tokenizer(resolve(OWN_MODEL)).backend
        model = str(write_parrot(Path(folder) / "model", LEARNT, words=words))
        arguments = ("--served-model-name", "parrot", "--kv-tokens", "65536")
        with serving(model, *arguments) as server:
            cases = str(Path(__file__).with_name("cases.py"))
            failed = 0
            for name, packages in PACKAGES.items():
                program = [str(clients / name / "bin/python"), cases, server.base, *packages]
                failed += subprocess.run(program, check=False).returncode
            # Node looks for packages beside the program.
            shutil.copy(Path(__file__).with_name("cases.mjs"), clients)
            program = ["node", "cases.mjs", server.base]
            failed += subprocess.run(program, cwd=clients, check=False).returncode
            for name, run in TURNS.items():
                home = Path(folder) / name
                home.mkdir()
                failed += not run(str(clients / "node_modules/.bin" / name), server.base, home)
    with serving(OWN_MODEL, "--kv-tokens", "20000") as server:
        agents = str(Path(__file__).with_name("own_model.py"))
        program = [str(clients / "common/bin/python"), agents, server.base]
        failed += subprocess.run(program, check=False).returncode
    return failed


if __name__ == "__main__":
    sys.exit(main())
