"""`make test-clients`: real clients against a server whose model knows their answers by heart.

    python -m tests.clients.run FOLDER

FOLDER has a virtual environment for each file of `requirements/`, by its name, and what npm has
installed.
"""

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
    ),
    "instructor": ("instructor",),
    "litellm": ("litellm",),
    "llama-index": ("llama-index-llms-openai-like",),
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
    Learnt("Finish a cat", call("final_result", CAT.replace(" ", ""))),
    Learnt("Say it", call("final_answer", '{"answer": "It is said."}')),
    Learnt("Look it up", call("exec_command", COMMAND)),
    Learnt("Find it out", call("Bash", COMMAND.replace("cmd", "command"))),
]
CONFIG = """model = "parrot"
model_provider = "twolane"
[model_providers.twolane]
name = "twolane"
base_url = "{base}/v1"
wire_api = "responses"
env_key = "TWOLANE_KEY"
"""


def whole_turn(program: str, arguments: Sequence[str], **environment: str) -> bool:
    """Whether an agent runs the command that the model calls for and shows its final answer."""
    own = {k: v for k, v in os.environ.items() if not k.startswith(("ANTHROPIC", "CLAUDE"))}
    run = subprocess.run(
        [program, *arguments],
        capture_output=True,
        text=True,
        env={**own, **environment},
        timeout=240,
        stdin=subprocess.DEVNULL,
        check=False,
    )
    works = "It is 21 degrees in Rome." in run.stdout
    if not works:
        print(run.stdout[-3000:], run.stderr[-3000:], sep="\n")
    version = subprocess.run([program, "--version"], capture_output=True, text=True, check=False)
    print(f"{version.stdout.strip()} | whole turn | {'works' if works else 'FAILS'}", flush=True)
    return works


def codex_turn(codex: str, base: str, folder: Path) -> bool:
    """Codex through `/v1/responses`."""
    (folder / "config.toml").write_text(CONFIG.format(base=base))
    options = ("exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox")
    arguments = (*options, "-C", str(folder), "Look it up")
    return whole_turn(codex, arguments, CODEX_HOME=str(folder), TWOLANE_KEY="none")


def claude_turn(claude: str, base: str, folder: Path) -> bool:
    """Claude Code through `/v1/messages`."""
    return whole_turn(
        claude,
        ("-p", "Find it out", "--model", "parrot", "--allowedTools", "Bash"),
        HOME=str(folder),
        ANTHROPIC_BASE_URL=base,
        ANTHROPIC_AUTH_TOKEN="none",
        CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC="1",
    )


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
            for name, turn in (("codex", codex_turn), ("claude", claude_turn)):
                home = Path(folder) / name
                home.mkdir()
                failed += not turn(str(clients / "node_modules/.bin" / name), server.base, home)
    with serving(OWN_MODEL, "--kv-tokens", "20000") as server:
        agents = str(Path(__file__).with_name("own_model.py"))
        program = [str(clients / "common/bin/python"), agents, server.base]
        failed += subprocess.run(program, check=False).returncode
    return failed


if __name__ == "__main__":
    sys.exit(main())
