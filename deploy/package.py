"""Checks what would be published: `make package` builds it into dist/ and runs this.

The wheel and the source archive hold what they should, and their licences. The wheel is installed
in an empty environment, away from the checkout, where the README's first command has to answer and
the examples have to run. A bill of materials of that environment (CycloneDX) is left in dist/.
"""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tarfile
import tempfile
import time
import urllib.request
import zipfile
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[1]
DIST = ROOT / "dist"
MAX_WHEEL_BYTES = 2_500_000
START_SECONDS = 300
MODEL = "smollm2-135m-instruct"
EXAMPLES = {
    "offline_batch.py": (),
    "compare_systems.py": ("chunked", "auto", "earliest_deadline.EarliestDeadline"),
    "paper_figure.py": (),
}
"""Arguments of the examples that need no server; `agent.py` asks the README's. The second runs the
system of `earliest_deadline.py`, too, which is no part of the package."""
LICENCES = ("licenses/LICENSE", "twolane/server/ops/dashboard/static/uPlot.LICENSE")
"""Files of the wheel: the project's licence, and that of the chart library in the dashboard."""


def main() -> int:
    """Check dist/; print what it holds."""
    [wheel], [archive] = DIST.glob("*.whl"), DIST.glob("*.tar.gz")
    check_wheel(wheel)
    check_archive(archive)
    with tempfile.TemporaryDirectory() as folder:
        python = install(wheel, Path(folder))
        write_bill(python, DIST / f"{wheel.name.split('-py3')[0]}.cdx.json")
        shutil.copytree(ROOT / "examples", Path(folder) / "examples")
        answer_once(python, Path(folder))
        for name, arguments in EXAMPLES.items():
            run_example(python, Path(folder), name, *arguments)
    return 0


def check_wheel(wheel: Path) -> None:
    """Fail if the wheel is too large, lacks a licence, or has anything beside the package."""
    with zipfile.ZipFile(wheel) as opened:
        sizes = {one.filename: one.compress_size for one in opened.infolist()}
    for licence in LICENCES:
        assert any(name.endswith(licence) for name in sizes), f"{wheel.name} lacks {licence}"
    strange = [name for name in sizes if not name.startswith(("twolane/", "twolane-"))]
    assert not strange, f"{wheel.name} also has {strange}"
    size = wheel.stat().st_size
    assert size <= MAX_WHEEL_BYTES, f"{wheel.name} has {size:,} bytes of {MAX_WHEEL_BYTES:,}"
    packages = Counter[str]()
    for name, compressed in sizes.items():
        packages["/".join(name.split("/")[:2]) if "/" in name else name] += compressed
    print(f"{wheel.name}: {size:,} bytes in {len(sizes)} files")
    for name, compressed in packages.most_common(8):
        print(f"  {compressed:>9,}  {name}")


def check_archive(archive: Path) -> None:
    """Fail if the source archive lacks what README names, or has what git ignores."""
    with tarfile.open(archive) as opened:
        names = {name.partition("/")[2] for name in opened.getnames()}
    for wanted in ("README.md", "LICENSE", "Makefile", "constraints.txt", "docs/quickstart.md"):
        assert wanted in names, f"{archive.name} lacks {wanted}"
    strange = [name for name in names if "__pycache__" in name or name.startswith(".venv")]
    assert not strange, f"{archive.name} also has {strange[:3]}"
    print(f"{archive.name}: {archive.stat().st_size:,} bytes in {len(names)} files")


def install(wheel: Path, folder: Path) -> Path:
    """Install the wheel in a new environment in `folder`; return its Python."""
    started = time.monotonic()
    run(sys.executable, "-m", "venv", str(folder / "env"))
    python = folder / "env/bin/python"
    pip = (str(python), "-m", "pip", "install", "--quiet", "-c", str(ROOT / "constraints.txt"))
    run(*pip, str(wheel), cwd=folder)
    bytes_there = sum(one.stat().st_size for one in (folder / "env").rglob("*") if one.is_file())
    seconds = time.monotonic() - started
    print(f"installed in {seconds:.0f} s: {bytes_there / 1e9:.1f} GB")
    return python


def write_bill(python: Path, target: Path) -> None:
    """Write the bill of materials of an environment to `target`."""
    command = ("cyclonedx-py", "environment", "--output-reproducible", "-o", str(target))
    run(str(Path(sys.executable).with_name(command[0])), *command[1:], str(python))
    components = json.loads(target.read_text())["components"]
    print(f"{target.name}: {len(components)} packages")


def answer_once(python: Path, folder: Path) -> None:
    """Start the README's server from the environment, ask it a question, and stop it.

    The agent of the examples asks it, too.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = (str(python.with_name("twolane")), "serve", MODEL, "--port", str(port))
    started = time.monotonic()
    with subprocess.Popen(command, cwd=folder) as server:
        try:
            answer = ask(f"http://127.0.0.1:{port}", started + START_SECONDS, server)
            seconds = time.monotonic() - started
            os.environ["OPENAI_BASE_URL"] = f"http://127.0.0.1:{port}/v1"
            run_example(python, folder, "agent.py")
        finally:
            server.send_signal(signal.SIGTERM)
    assert "Paris" in answer, f"asked for the capital of France: {answer!r}"
    assert server.returncode == 0, f"the server ended with {server.returncode}"
    print(f"`twolane serve {MODEL}` answered after {seconds:.0f} s: {answer}")


def run_example(python: Path, folder: Path, name: str, *arguments: str) -> None:
    """Run an example in the environment; fail if it does."""
    started = time.monotonic()
    ended = subprocess.run(
        (str(python), name, *arguments),
        cwd=folder / "examples",
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, f"{name}: {ended.stdout}{ended.stderr}"
    print(f"examples/{name} ran in {time.monotonic() - started:.0f} s:\n{ended.stdout}", end="")


def ask(address: str, deadline: float, server: subprocess.Popen[bytes]) -> str:
    """Return a chat answer as soon as the server is healthy."""
    while time.monotonic() < deadline and server.poll() is None:
        try:
            with urllib.request.urlopen(f"{address}/health", timeout=5):
                break
        except OSError:
            time.sleep(0.5)
    question = {"role": "user", "content": "What is the capital of France?"}
    body = json.dumps({"messages": [question], "temperature": 0, "max_tokens": 64}).encode()
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{address}/v1/chat/completions", body, headers)
    with urllib.request.urlopen(request, timeout=120) as answer:
        return str(json.load(answer)["choices"][0]["message"]["content"])


def run(*command: str, cwd: Path | None = None) -> None:
    """Run a command; fail if it does."""
    subprocess.run(command, cwd=cwd, check=True)


if __name__ == "__main__":
    sys.exit(main())
