import pytest

from ..server.serving import serving
from .checkpoint import write_text_model
from .target import ARGUMENTS, Target


@pytest.fixture(scope="session")
def text_model(tmp_path_factory):
    return write_text_model(tmp_path_factory.mktemp("model") / "text")


@pytest.fixture(scope="module")
def target(text_model, tmp_path_factory):
    """A server to be abused; what it logs must name no defect at the end."""
    log = tmp_path_factory.mktemp("log") / "stderr"
    with serving(str(text_model), *ARGUMENTS, stderr=log) as served:
        yield Target(served)
    written = log.read_text()
    assert "Traceback" not in written and " ERROR " not in written, written[-5000:]
