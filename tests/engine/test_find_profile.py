"""Which profile an engine predicts with: the one named, the machine's own, or the package's."""

from pathlib import Path

import pytest
from msgspec import structs

import twolane
from twolane.engine.config import EngineConfig
from twolane.engine.predict import find_profile, machine_key, make_estimator
from twolane.estimate.profile import LAUNCHES_SINCE, SHIPPED, Profile, cached_profile
from twolane.model.shapes import SHAPES
from twolane.sim.gpus import GPUS
from twolane.sim.machine import SimulatedMachine

CONFIG = EngineConfig(model="qwen3-8b")


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where this machine's own profile would lie."""
    monkeypatch.setenv("TWOLANE_CACHE", str(tmp_path))
    return cached_profile(tmp_path, Profile.read(SHIPPED / "qwen3-8b-h200.json").key)


def test_the_package_s_profile_serves_until_the_machine_has_its_own(own: Path, caplog):
    shipped = Profile.read(SHIPPED / "qwen3-8b-h200.json")
    assert find_profile(CONFIG, shipped.key) == SHIPPED / "qwen3-8b-h200.json"
    shipped.save(own)
    assert find_profile(CONFIG, shipped.key) == own
    assert not [each for each in caplog.records if each.name.startswith("twolane.")]


def test_weights_and_cache_of_eight_bits_have_a_profile_of_their_own(own: Path):
    wide = Profile.read(SHIPPED / "qwen3-8b-h200.json").key
    narrow = Profile.read(SHIPPED / "qwen3-8b-fp8-h200.json").key
    assert find_profile(CONFIG, narrow) == SHIPPED / "qwen3-8b-fp8-h200.json"
    mixed = structs.replace(narrow, kv_itemsize=wide.kv_itemsize)
    assert find_profile(CONFIG, mixed) is None


def test_a_release_that_changes_no_launch_keeps_profiles(monkeypatch, caplog):
    for path in SHIPPED.glob("*.json"):
        assert Profile.read(path).key.version == LAUNCHES_SINCE, f"{path.name} is of older kernels"
    machine = SimulatedMachine(GPUS["h200"], SHAPES["qwen3-8b"], CONFIG)
    before = machine_key(machine, 132)
    monkeypatch.setattr(twolane, "__version__", "99.0.0")
    assert machine_key(machine, 132) == before
    monkeypatch.setattr("twolane.engine.predict.LAUNCHES_SINCE", "99.0.0")
    assert machine_key(machine, 132).file_name != before.file_name
    shipped = Profile.read(SHIPPED / "qwen3-8b-h200.json").key
    newer = structs.replace(shipped, version="99.0.0")
    make_estimator(find_profile(CONFIG, newer), "guard", newer)
    assert "measured with launches as of version 0.1.0; this is 99.0.0" in caplog.text


def test_a_broken_profile_of_the_machine_is_passed_over(own: Path, caplog):
    key = Profile.read(SHIPPED / "qwen3-8b-h200.json").key
    own.parent.mkdir(parents=True)
    own.write_text("{")
    assert find_profile(CONFIG, key) == SHIPPED / "qwen3-8b-h200.json"
    assert "is not a profile" in caplog.text
    Profile.read(SHIPPED / "qwen3-8b-h200.json").save(own)
    for part in ("model", "driver", "units"):
        other = structs.replace(key, **{part: 7 if part == "units" else "another"})
        own.rename(own := cached_profile(own.parents[1], other))
        assert find_profile(CONFIG, other) != own
        assert f"was measured with another {part}" in caplog.text


def test_a_profile_whose_samples_were_changed_is_passed_over(own: Path, caplog):
    shipped = Profile.read(SHIPPED / "qwen3-8b-h200.json")
    shipped.save(own)
    assert Profile.read(own).samples == shipped.samples
    text = own.read_text()
    seconds = str(shipped.samples[5].seconds[0])
    assert seconds in text
    own.write_text(text.replace(seconds, "0.5"))
    assert find_profile(CONFIG, shipped.key) == SHIPPED / "qwen3-8b-h200.json"
    assert "its samples have another digest" in caplog.text


def test_a_profile_that_is_named_comes_first(own: Path):
    key = Profile.read(SHIPPED / "qwen3-8b-h200.json").key
    named = EngineConfig(model="qwen3-8b", profile="other.json")
    assert find_profile(named, key) == Path("other.json")


def test_a_profile_of_the_first_points_alone_is_called_rough(tmp_path: Path, caplog):
    shipped = Profile.read(SHIPPED / "qwen3-8b-h200.json")
    make_estimator(SHIPPED / "qwen3-8b-h200.json", "guard", shipped.key)
    assert "rough" not in caplog.text
    first = [structs.replace(sample, held_out=False) for sample in shipped.samples]
    short = tmp_path / "short.json"
    structs.replace(shipped, samples=first).save(short)
    make_estimator(short, "guard", shipped.key)
    assert "predictions are rough" in caplog.text


def test_lanes_that_the_profile_does_not_have_are_named(caplog):
    path = SHIPPED / "qwen3-8b-h200.json"
    shipped = Profile.read(path)
    make_estimator(path, "guard", shipped.key, shipped.levels)
    assert "lanes" not in caplog.text
    make_estimator(path, "guard", shipped.key, [(126, 6), *shipped.levels])
    assert "no lanes of 126 and 6 units" in caplog.text
