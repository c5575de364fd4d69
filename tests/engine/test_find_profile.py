"""Which profile an engine predicts with: the one named, the machine's own, or the package's."""

import hashlib
import re
from pathlib import Path

import pytest
from msgspec import json, structs

import twolane
from twolane.engine.build import assemble
from twolane.engine.config import EngineConfig
from twolane.engine.predict import find_profile, machine_key, make_estimator
from twolane.estimate.profile import LAUNCHES_SINCE, SHIPPED, Profile, cached_profile
from twolane.model.shapes import SHAPES
from twolane.sim.config import Unevenness
from twolane.sim.emulated import EmulatedMachine
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


def test_a_profile_that_an_earlier_version_measured_stays_in_use(own: Path, caplog):
    """It has another digest of the same shape, in its name, too, and another name of a field."""
    shipped = Profile.read(SHIPPED / "qwen3-8b-h200.json")
    samples = [structs.replace(shipped.samples[0], experts_read=3.5), *shipped.samples[1:]]
    earlier = structs.replace(shipped.key, model="0790ce0d0c")
    structs.replace(shipped, key=earlier, samples=samples).save(own)
    new = hashlib.sha256(json.encode(samples)).hexdigest().encode()
    old = json.encode(samples).replace(b'"experts_read"', b'"woken"')
    text = own.read_bytes().replace(b'"experts_read"', b'"woken"')
    old_name = cached_profile(own.parents[1], earlier)
    old_name.write_bytes(text.replace(new, hashlib.sha256(old).hexdigest().encode()))
    own.unlink()
    for config in (CONFIG, structs.replace(CONFIG, profile=str(old_name))):
        assert find_profile(config, shipped.key) == old_name
        make_estimator(old_name, "guard", shipped.key)
    assert Profile.read(old_name).samples == samples
    old_name.write_bytes(re.sub(rb',\s*"digest": *"\w+"', b"", text))  # those of the first day
    assert b"digest" not in old_name.read_bytes()
    assert Profile.read(old_name).samples == samples
    for part in ("driver", "device"):
        assert find_profile(CONFIG, structs.replace(shipped.key, **{part: "another"})) != old_name
    assert cached_profile(own.parents[1], shipped.key) == old_name  # to be continued
    old_name.rename(simulated := old_name.with_suffix(".7-0790ce0d0c.json"))
    assert cached_profile(own.parents[1], shipped.key) == own, f"not a cache such as {simulated}"
    shipped.save(own)
    assert find_profile(CONFIG, shipped.key) == own


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


def test_a_profile_without_the_smallest_lanes_says_so(caplog):
    path = SHIPPED / "qwen3-30b-a3b-h200.json"
    shipped = Profile.read(path)
    make_estimator(path, "guard", shipped.key, [(92, 40), *shipped.levels])
    assert "lanes" not in caplog.text
    make_estimator(path, "guard", shipped.key, [(116, 16), *shipped.levels])
    assert "no lanes of fewer than 24 units for decode, so" in caplog.text


@pytest.mark.parametrize("system", ["auto", "chunked", "prefill-first", "temporal", "two-stream"])
def test_a_system_that_never_splits_the_device_has_no_such_warning(system: str, caplog):
    path = SHIPPED / "qwen3-30b-a3b-h200.json"
    config = EngineConfig(model="qwen3-30b-a3b", system=system, profile=str(path))
    machine = EmulatedMachine(GPUS["h200"], SHAPES[config.model], config, Unevenness())
    assemble(config, machine, lambda: None, lambda stage, fraction: None).close()
    named = "lanes of fewer than 84 units for prefill and 24 units for decode"
    assert (named in caplog.text) == ("lanes" in caplog.text) == (system == "auto")


def test_a_profile_that_was_simulated_has_no_such_warning(tmp_path: Path, caplog):
    shipped = Profile.read(SHIPPED / "qwen3-30b-a3b-h200.json")
    structs.replace(shipped, machine="simulated").save(path := tmp_path / "profile.json")
    make_estimator(path, "guard", shipped.key, [(124, 8)])
    assert "lanes" not in caplog.text
