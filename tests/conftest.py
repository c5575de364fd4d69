"""What all tests share."""

import signal

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.internal.conjecture import providers

from tests.kernels import interpreter

interpreter.define()

# A suite that was started in the background inherits an ignored SIGINT, and hands it on to the
# programs that tests interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)

# The same examples in every run: a test that fails now and then tells nobody anything. Hypothesis
# also tries constants of whatever local modules are loaded by then, which varies with the order of
# the files; none of them.
providers._get_local_constants = lambda: providers._local_constants
slow = HealthCheck.too_slow  # a busy machine is no fault of what is tested
settings.register_profile("same", derandomize=True, deadline=None, suppress_health_check=[slow])
settings.load_profile("same")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="run the long form of every matrix")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--full"):
        return
    skip = pytest.mark.skip(reason="long form: make test-all")
    for item in items:
        if "full" in item.keywords:
            item.add_marker(skip)
