"""Folders of sockets: those of the dead go, those of the living stay."""

import subprocess
import sys
from pathlib import Path

from twolane.frontend.socket_folders import PREFIX, SocketFolder, remove_dead_folders

CODE = """
import os
from twolane.frontend.socket_folders import SocketFolder
folder = SocketFolder()
(folder.path / "in").touch()
print(folder.path, flush=True)
os.kill(os.getpid(), 9)
"""


def test_the_folder_of_a_killed_server_goes_and_that_of_a_living_one_stays(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    dead = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True).stdout
    mine = SocketFolder()
    half_made = tmp_path / f"{PREFIX}just-made"
    half_made.mkdir()
    assert Path(dead.strip()).is_dir()
    remove_dead_folders()
    assert not Path(dead.strip()).exists()
    assert mine.path.is_dir() and half_made.is_dir()
    mine.remove()
    assert not mine.path.exists()
