"""Which system serves if none is named."""

import pytest

from tests.server.serving import write_tiny_model
from twolane.common.errors import FieldError
from twolane.engine.build import build
from twolane.engine.config import EngineConfig
from twolane.engine.settings import check_settings
from twolane.systems.registry import default_system


def test_auto_is_the_default_but_on_a_cpu():
    assert {kind: default_system(kind) for kind in ("cuda", "simulated", "cpu")} == {
        "cuda": "auto",
        "simulated": "auto",
        "cpu": "static-split",
    }


@pytest.mark.parametrize("named", [None, "auto"])
def test_an_engine_says_which_system_it_took(tmp_path, named):
    model = str(write_tiny_model(tmp_path))
    config = EngineConfig(
        model=model, load_format="dummy", kv_tokens=1000, device="cpu", system=named
    )
    built = build(config, lambda: None, lambda stage, fraction: None)
    try:
        assert built.ready.system == (named or default_system("cpu"))
    finally:
        built.lanes.close()


def test_a_setting_of_an_unnamed_system_is_refused_by_name():
    with pytest.raises(FieldError, match="options 'look_ahead' is a setting of a system"):
        check_settings(EngineConfig(model="smollm2-135m-instruct", options={"look_ahead": "2"}))
