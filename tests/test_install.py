"""What `make` installs with is told what pip looks at."""

import pytest

from tools import install


def test_settings_of_pip_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_FIND_LINKS", "/a /b")
    monkeypatch.setenv("PIP_EXTRA_INDEX_URL", "https://one.example/simple\nfile:///two")
    found = install.configured()
    assert found["find-links"] == ["/a", "/b"]
    assert found["extra-index-url"] == ["https://one.example/simple", "file:///two"]
    assert {"find-links", "extra-index-url"} <= {*install.OPTIONS}
