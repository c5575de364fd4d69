"""The record at the head of every file of results."""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import msgspec
import pytest

import twolane
from twolane.results.provenance import Provenance, own_command, provenance, save, without_secrets

PACKAGE = Path(twolane.__file__).parent
ASK = "from twolane.results.provenance import commit, gpus; print(commit(), *gpus(), sep='|')"


def said(source, **environment):
    """What a process with its source in that folder says of its commit and its GPUs."""
    env = {**os.environ, "PYTHONPATH": str(source), **environment}
    command = [sys.executable, "-c", ASK]
    ended = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    return ended.stdout.strip().split("|")


@pytest.fixture
def source(tmp_path):
    """A copy of the source without git's history."""
    target = tmp_path / "src"
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(PACKAGE, target / "twolane", ignore=ignored)
    return target


def git(folder, *words):
    name = ("-c", "user.name=t", "-c", "user.email=t@t")
    subprocess.run(["git", "-C", folder, *name, *words], check=True, capture_output=True)


def test_a_file_of_results_begins_with_everything_that_its_reader_must_know(tmp_path):
    path = tmp_path / "folder" / "figures.json"
    save(path, provenance({"prompts": 3}, ["python", "a b.py"]), {"figures": [1, 2]})
    saved = msgspec.json.decode(path.read_bytes())
    about = msgspec.convert(saved["provenance"], Provenance)
    assert (saved["figures"], next(iter(saved))) == ([1, 2], "provenance")
    assert (about.command, about.workload) == ("python 'a b.py'", {"prompts": 3})
    assert about.versions["twolane"] == twolane.__version__
    assert about.cpu.endswith("cores")


def test_a_copy_without_history_says_the_commit_that_it_is_told(source):
    assert said(source, TWOLANE_COMMIT="abc")[0] == "abc"
    assert said(source)[0] == "None"


def test_a_checkout_says_its_commit_and_whether_it_was_changed(source):
    git(source, "init", "-q")
    git(source, "add", ".")
    git(source, "commit", "-q", "-m", "x")
    clean = said(source, TWOLANE_COMMIT="abc")[0]
    assert len(clean) == 40
    results = source / "benchmarks/results"
    results.mkdir(parents=True)
    (results / "new.json").write_text("{}")
    assert said(source)[0] == clean, "results do not change the source"
    with (source / "twolane/__init__.py").open("a") as file:
        file.write("\n")
    assert said(source)[0] == f"{clean}-dirty"


def test_cards_and_driver_are_those_that_the_process_may_use(source, tmp_path):
    tool = tmp_path / "bin" / "nvidia-smi"
    tool.parent.mkdir()
    row = "NVIDIA H200, 700.00 W, 1980 MHz, 580.1"
    tool.write_text(f'#!/bin/sh\necho "{row}"\ncase "$*" in *--id=*) ;; *) echo "{row}" ;; esac\n')
    tool.chmod(0o755)
    path = f"{tool.parent}:{os.environ['PATH']}"
    name = "NVIDIA H200, 700.00 W, 1980 MHz"
    assert said(source, PATH=path)[1:] == [f"2 of {name}", "580.1"]
    assert said(source, PATH=path, CUDA_VISIBLE_DEVICES="1")[1:] == [name, "580.1"]
    assert said(source, PATH=path, CUDA_VISIBLE_DEVICES="")[1:] == ["None", "None"]


def test_a_recorded_command_has_no_secrets_and_no_folders_of_its_program(monkeypatch):
    words = ["bench", "serve", "--api-key", "k1", "--header=Authorization: Bearer k2", "--seed=3"]
    monkeypatch.setattr(sys, "argv", ["/home/me/bin/twolane", *words])
    command = " ".join(own_command())
    assert "k1" not in command and "k2" not in command and "/home" not in command
    assert command.endswith("--seed=3")
    [nested] = without_secrets(["m --api-key k3 --header 'A: k4' --cores 2"])
    assert "k3" not in nested and "k4" not in nested and nested.endswith("--cores 2")


def test_a_recorded_command_has_no_folder_of_outputs_and_no_temporary_one(monkeypatch):
    words = ["--work", "/scratch/mine/runs", "--out", "/home/me/found.json", "--traces", "a/b.csv"]
    monkeypatch.setattr(sys, "argv", ["scripts/run.py", *words])
    monkeypatch.setattr(tempfile, "tempdir", "/scratch")
    assert own_command()[2:] == ["--work", "runs", "--out", "found.json", "--traces", "a/b.csv"]


def test_a_recorded_command_names_a_program_that_is_a_folder(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "argv", [str(tmp_path), "step"])
    assert own_command() == ["python", str(tmp_path), "step"]
