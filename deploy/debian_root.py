"""Installs the wheel in a bare Debian and asks the README's server there: `make check-root`.

As near to the CPU image as a machine without a container runtime comes: debootstrap makes a root of
Debian with Python alone, the wheel of dist/ goes into /opt/twolane with the versions of
constraints.txt, and a user without rights serves from it, with /cache and /tmp to write to. It
needs root, debootstrap and util-linux. pip finds packages as it is configured here: its settings
come along, and so do the folders that they name.

    python deploy/debian_root.py [FOLDER]        # by default .root/, kept for the next run
"""

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from package import DIST, MODEL, ROOT, START_SECONDS, ask, run

SUITE = "bookworm"
PACKAGES = "python3,python3-venv,ca-certificates"
PIP_SETTINGS = ("/etc/pip.conf", "/etc/xdg/pip", "/root/.config/pip")
USER = "10001"
"""The image's user, who owns nothing but /cache."""
INSIDE = "DEBIAN_ROOT_INSIDE"
"""Variable that is set where the mounts of this program are its own."""


def main(folder: str = str(ROOT / ".root")) -> int:
    """Make the root if there is none, install, serve, ask; return the exit code."""
    if INSIDE not in os.environ:  # mounts end with this process
        command = ("unshare", "--mount", "--pid", "--fork", sys.executable, *sys.argv)
        return subprocess.run(command, env={**os.environ, INSIDE: "1"}, check=False).returncode
    root = Path(folder).resolve()
    if not (root / "usr/bin/python3").exists():
        make_root(root)
    mount_into(root)
    install(root)
    serve_once(root)
    return 0


def make_root(root: Path) -> None:
    """Have debootstrap make a Debian with Python in a folder."""
    started = time.monotonic()
    command = ("debootstrap", "--variant=minbase", f"--include={PACKAGES}", SUITE, str(root))
    run(*command)
    print(f"debootstrap made {SUITE} in {time.monotonic() - started:.0f} s")


def mount_into(root: Path) -> None:
    """Give the root processes, devices, names of hosts, and what pip is configured with."""
    run("mount", "--make-rprivate", "/")
    run("mount", "-t", "proc", "proc", str(root / "proc"))
    run("mount", "--rbind", "/dev", str(root / "dev"))
    run("mount", "-t", "tmpfs", "tmpfs", str(root / "tmp"))
    for file in ("/etc/resolv.conf", "/etc/hosts", *PIP_SETTINGS):
        there, here = Path(file), root / file.removeprefix("/")
        if there.is_dir():
            shutil.copytree(there, here, dirs_exist_ok=True)
        elif there.exists():
            here.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(there, here)
    text = subprocess.run(
        (sys.executable, "-m", "pip", "config", "list"), capture_output=True, text=True, check=True
    ).stdout
    named = (Path(one) for one in re.findall(r"(?<![\w:/])(?:file://)?(/[\w./-]+)", text))
    for path in sorted({outer(one) for one in named if one.exists()}):
        target = root / str(path).removeprefix("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.mkdir(exist_ok=True) if path.is_dir() else target.touch()
        run("mount", "--bind", str(path), str(target))


def outer(path: Path) -> Path:
    """Return what is mounted for a path: an index on disk refers to files beside it."""
    return path.parent if path.name == "simple" else path


def install(root: Path) -> None:
    """Install the wheel as the container file does: an environment of its own, and the user."""
    started = time.monotonic()
    [wheel] = DIST.glob("*.whl")
    shutil.rmtree(root / "opt/twolane", ignore_errors=True)
    (root / "source").mkdir(exist_ok=True)
    for file in (wheel, ROOT / "constraints.txt"):
        shutil.copy(file, root / "source" / file.name)
    inside(root, "0", "python3", "-m", "venv", "/opt/twolane")
    pip = ("/opt/twolane/bin/python", "-m", "pip", "install", "--quiet", "--no-cache-dir")
    inside(root, "0", *pip, "-c", "/source/constraints.txt", f"/source/{wheel.name}")
    inside(root, "0", "install", "--directory", f"--owner={USER}", "/cache")
    files = (one for one in (root / "opt/twolane").rglob("*") if one.is_file())
    size, seconds = sum(one.stat().st_size for one in files), time.monotonic() - started
    print(f"{wheel.name} installed in {seconds:.0f} s: {size / 1e9:.1f} GB")


def inside(root: Path, user: str, *command: str) -> None:
    """Run a command in the root; fail if it does."""
    run(*chrooted(root, user, *command))


def chrooted(root: Path, user: str, *command: str) -> tuple[str, ...]:
    """Return a command that runs in the root as a user, with pip's variables and no others."""
    variables = [f"{name}={value}" for name, value in os.environ.items() if name.startswith("PIP_")]
    home = "/root" if user == "0" else "/cache"
    variables += [f"HOME={home}", "PATH=/opt/twolane/bin:/usr/bin:/bin:/usr/sbin:/sbin"]
    return ("chroot", f"--userspec={user}:{user}", str(root), "env", "-i", *variables, *command)


def serve_once(root: Path) -> None:
    """Start the README's server as a user without rights, ask it a question, and stop it."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    started = time.monotonic()
    command = chrooted(root, USER, "twolane", "serve", MODEL, "--port", str(port))
    with subprocess.Popen(command) as server:
        try:
            answer = ask(f"http://127.0.0.1:{port}", started + START_SECONDS, server)
            seconds = time.monotonic() - started
        finally:
            server.send_signal(signal.SIGTERM)
    assert "Paris" in answer, f"asked for the capital of France: {answer!r}"
    assert server.returncode == 0, f"the server ended with {server.returncode}"
    print(f"`twolane serve {MODEL}` of user {USER} answered after {seconds:.0f} s: {answer}")


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
