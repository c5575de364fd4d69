"""What would be published: a wheel that serves without the repository, and a source archive."""

import os
import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from tests.server.serving import serving, write_tiny_model
from twolane.cli.other_servers import SERVERS

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src/twolane"
PROGRAM = ROOT / "deploy/package.py"
"""What `make package` checks with."""


def command(*words, cwd=ROOT, **environment):
    env = {**os.environ, **environment}
    ended = subprocess.run(words, cwd=cwd, env=env, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


@pytest.fixture(scope="module")
def dist(tmp_path_factory):
    """A folder with the wheel and the source archive, built without a network."""
    pytest.importorskip("hatchling", reason="the build backend comes with the extra dev")
    folder = tmp_path_factory.mktemp("dist")
    build = ("-m", "hatchling", "build", "--directory", str(folder))
    command(sys.executable, *build, PYTHONPATH="")
    return folder


@pytest.fixture(scope="module")
def wheel(dist):
    [path] = dist.glob("*.whl")
    return path


def test_the_wheel_has_every_file_of_the_package_and_nothing_else(wheel):
    files = [path for path in PACKAGE.rglob("*") if path.is_file() and path.suffix != ".pyc"]
    wanted = {str(path.relative_to(PACKAGE.parent)) for path in files}
    wanted |= {f"twolane/cli/guides/from-{server}.md" for server in SERVERS}
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert names == wanted
    assert "twolane/server/ops/dashboard/static/dashboard.html" in names
    bound = re.search(r"^MAX_WHEEL_BYTES = (\S+)$", PROGRAM.read_text(), re.MULTILINE)
    assert wheel.stat().st_size < int(bound[1])


def test_the_source_archive_has_what_readme_and_tests_name(dist):
    [path] = dist.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"README.md", "LICENSE", "Makefile", "constraints.txt", "examples/demo.py"} <= names
    assert {"docs/quickstart.md", "tests/conftest.py", "src/twolane/__init__.py"} <= names
    assert not [name for name in names if "__pycache__" in name or name.startswith(".venv")]


def test_the_metadata_passes_the_index_s_checks(dist):
    pytest.importorskip("twine", reason="comes with the extra dev")
    said = command(sys.executable, "-m", "twine", "check", "--strict", *map(str, dist.iterdir()))
    assert said.count("PASSED") == 2


@pytest.mark.full
def test_the_installed_wheel_serves_away_from_the_repository(wheel, tmp_path, monkeypatch):
    pip = ("-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--no-compile")
    site = tmp_path / "site"
    command(sys.executable, *pip, "--target", str(site), str(wheel), PYTHONPATH="")
    monkeypatch.setenv("PYTHONPATH", str(site))
    monkeypatch.chdir(tmp_path)
    found = command(sys.executable, "-c", "import twolane; print(twolane.__file__)", cwd=tmp_path)
    assert found.startswith(str(site))
    model = write_tiny_model(tmp_path / "tiny")
    with serving(str(model), "--load-format", "dummy", "--kv-tokens", "2000") as server:
        assert server.request("/dashboard")[0] == 200
        body = {"prompt": [5, 6, 7], "max_tokens": 3, "ignore_eos": True}
        status, _, answer = server.request("/v1/completions", body)
    assert (status, answer["usage"]["completion_tokens"]) == (200, 3)
