"""`twolane profile` on CPU lanes and a tiny model: real times, resumed where it was cut off."""

from pathlib import Path

import pytest

from tests.model.checkpoints import make_checkpoint
from twolane.common.errors import FieldError
from twolane.engine.build import build
from twolane.engine.config import EngineConfig
from twolane.estimate.calibrated.estimator import Calibrated
from twolane.estimate.online import OnlineEstimator
from twolane.estimate.profile import Profile, ProfileError
from twolane.estimate.query import Load, decode_step
from twolane.profile import measure
from twolane.profile.run import Outcome, take_profile


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> EngineConfig:
    model = make_checkpoint("qwen2", tmp_path_factory.mktemp("profile") / "model")
    return EngineConfig(model=str(model), kv_tokens=2048, max_running=16, device="cpu")


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Points of milliseconds: what is tested does not need steady clocks."""
    for name in ("WARM_SECONDS", "ALONE_SECONDS", "BOTH_SECONDS"):
        monkeypatch.setattr(measure, name, 0.002)


def taken(config: EngineConfig, path: Path | None, seconds: float = 3600.0, **more) -> Outcome:
    more.setdefault("progress", lambda stage, fraction: None)
    return take_profile(config, out=path, seconds=seconds, rounds=1, **more)


def test_a_profile_is_resumed_and_served_with(config: EngineConfig, tmp_path: Path):
    path = tmp_path / "profile.json"
    calls = 0

    def cut(stage: str, fraction: float) -> None:
        nonlocal calls
        calls += stage == "measure"
        if calls > 20:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        taken(config, path, progress=cut)
    first = Profile.read(path)
    assert len(first.done()) == 20
    nothing = taken(config, path, seconds=0.0)
    assert nothing.measured == 0
    assert nothing.left > 0
    outcome = taken(config, path)
    assert outcome.left == 0
    whole = Profile.read(path)
    assert whole.samples[: len(first.samples)] == first.samples
    assert len(whole.done()) == 20 + outcome.measured
    assert whole.seconds > first.seconds
    assert len({(s.point, s.kind, s.layers, s.finishes) for s in whole.samples}) == len(
        whole.samples
    )
    check_samples(whole)
    check_served(config, path)


def check_samples(profile: Profile) -> None:
    kinds = {(sample.kind, sample.beside is not None) for sample in profile.samples}
    both = ("prefill", True) in kinds
    assert kinds >= {("prefill", False), ("decode", False), ("hybrid", False)}
    assert both == any(all(level) for level in profile.levels)
    assert all(second > 0 for sample in profile.samples for second in sample.seconds)
    assert profile.probes == []  # they are of a GPU's SMs
    slices = profile.of("prefill", beside=False)
    new = [sample.load.new for sample in slices]
    assert max(new) > 20 * min(new)


def check_served(config: EngineConfig, path: Path) -> None:
    import msgspec

    built = build(msgspec.structs.replace(config, profile=str(path)), lambda: None, nothing_said)
    try:
        estimator = built.engine.state.estimator
        assert isinstance(estimator, Calibrated)
        step = estimator.predict(decode_step(Load.decode([100] * 4)), 1)
        assert step is not None
        assert 1e-5 < step < 1.0
    finally:
        built.close()


def nothing_said(stage: str, fraction: float) -> None:
    """No progress is shown."""


def test_a_profile_of_something_else_is_refused(
    config: EngineConfig, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
):
    import msgspec

    path = tmp_path / "profile.json"
    taken(config, path, seconds=0.2)
    other = str(make_checkpoint("mistral", tmp_path / "model"))
    another = msgspec.structs.replace(config, model=other)
    with pytest.raises(ProfileError, match="is of model"):
        taken(another, path)
    with pytest.raises(FieldError, match=r"profile .* is of model"):
        build(msgspec.structs.replace(another, profile=str(path)), lambda: None, nothing_said)


def test_the_cache_is_looked_into(
    config: EngineConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("TWOLANE_CACHE", str(tmp_path))
    built = build(config, lambda: None, nothing_said)
    assert isinstance(built.engine.state.estimator, OnlineEstimator)
    built.close()
    outcome = taken(config, None)
    assert outcome.path.parent == tmp_path / "profiles"
    built = build(config, lambda: None, nothing_said)
    assert isinstance(built.engine.state.estimator, Calibrated)
    built.close()
