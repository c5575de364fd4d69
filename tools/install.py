"""Install packages into this interpreter's environment with the arguments of `pip install`.

    .venv/bin/python tools/install.py -c constraints.txt -e .[dev]

`uv` installs what the tests need in a twelfth of pip's processor time, and pip fetches it first.
It reads nothing of pip's configuration, so it is told where pip looks for packages. Where uv cannot
be had or fails, pip installs. Neither compiles modules: most are never imported.
"""

import ast
import os
import subprocess
import sys
from pathlib import Path

OPTIONS = ("index-url", "extra-index-url", "find-links", "constraint", "trusted-host")
"""Settings of pip that uv takes as options of the same name, except `trusted-host`."""
NAMES = {"trusted-host": "allow-insecure-host"}


def pip(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run pip quietly and return what it printed."""
    command = [sys.executable, "-m", "pip", *arguments]
    return subprocess.run(command, stdout=subprocess.PIPE, text=True)


def configured() -> dict[str, list[str]]:
    """Return the values of each setting of pip; its environment comes before its files."""
    found: dict[str, list[str]] = {}
    for line in pip("config", "list").stdout.splitlines():
        name, _, value = line.partition("=")
        found.setdefault(name.rpartition(".")[2], ast.literal_eval(value).split())
    return found


def with_uv(arguments: list[str]) -> bool:
    """Install with uv; return whether it could."""
    if pip("install", "--quiet", "uv").returncode:
        return False
    settings, environment = configured(), dict(os.environ)
    options = [
        part
        for name in OPTIONS
        for value in settings.get(name, ())
        for part in (f"--{NAMES.get(name, name)}", value)
    ]
    for file in settings.get("cert", ()):
        environment.setdefault("SSL_CERT_FILE", file)
    uv = Path(sys.executable).with_name("uv")
    command = [uv, "pip", "install", "--quiet", "--index-strategy", "unsafe-best-match"]
    command += ["--python", sys.executable, *options, *arguments]
    return subprocess.run(command, env=environment).returncode == 0


def main() -> int:
    """Return 0 if all is installed."""
    arguments = sys.argv[1:]
    if with_uv(arguments):
        return 0
    print("uv could not install; pip does", file=sys.stderr)
    return pip("install", "--quiet", "--no-compile", *arguments).returncode


if __name__ == "__main__":
    sys.exit(main())
