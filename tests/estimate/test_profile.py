"""The profile's file: what is written is read, and nothing else."""

from pathlib import Path

import pytest
from msgspec import structs

from twolane.estimate.profile import (
    SHIPPED,
    Key,
    Neighbour,
    Profile,
    ProfileError,
    Sample,
    cached_profile,
    load_of,
    model_digest,
    runs_of,
    shipped_profile,
)
from twolane.model.shapes import SHAPES

SHAPE = SHAPES["qwen3-8b"]
CARDS = {"h100": "H100 80GB HBM3", "h200": "H200"}
"""Names of the cards in file names, as the driver has them."""
KEY = Key("NVIDIA H200", "580.1", "0.1.0", model_digest(SHAPE), 2, 132)


def profile() -> Profile:
    runs = runs_of([(1, 640), (1, 640), (1, 70)])
    alone = Sample("a", "decode", runs, 48, 36, True, [0.02, 0.021, 0.03], sm_hz=1.5e9)
    beside = Sample(
        "b", "decode", runs, 48, 36, True, [0.03], Neighbour([(512, 0, 1)], 84), held_out=True
    )
    return Profile(KEY, SHAPE, [(84, 48), (132, 0), (0, 132)], 32, 7, [alone, beside])


def test_what_is_saved_is_read(tmp_path: Path):
    path = tmp_path / "deep" / "profile.json"
    profile().save(path)
    again = Profile.read(path)
    assert again == profile()
    assert [p.name for p in path.parent.iterdir()] == ["profile.json"]
    assert again.done() == {"a", "b"}
    assert again.training("decode", beside=True) == []
    assert again.samples[0].median == 0.021
    assert again.samples[1].beside is not None
    assert again.samples[1].corunner.load.new == 512


def test_runs_stand_for_every_request():
    pairs = [(1, 5), (1, 5), (7, 0), (1, 5)]
    assert runs_of(pairs) == [(1, 5, 2), (7, 0, 1), (1, 5, 1)]
    load = load_of(runs_of(pairs))
    assert list(zip(load.n, load.r, strict=True)) == pairs


def test_keys_have_files_of_their_own(tmp_path: Path):
    other = Key("NVIDIA H200", "590.1", "0.1.0", model_digest(SHAPE), 2, 132)
    assert cached_profile(tmp_path, KEY) != cached_profile(tmp_path, other)
    assert model_digest(SHAPE) != model_digest(SHAPES["llama-3.1-8b"])


def test_a_profile_of_another_format_says_what_to_do(tmp_path: Path):
    path = tmp_path / "p.json"
    path.write_text('{"format": 1, "shape": {"qk_norm": true}}')
    problem = r"p\.json has format 1; this version reads 2: measure again with `twolane profile`"
    with pytest.raises(ProfileError, match=problem):
        Profile.read(path)


@pytest.mark.parametrize("text", ["", "{}", '{"format": 3}', "[1]"])
def test_what_is_no_profile_is_refused_by_name(tmp_path: Path, text: str):
    path = tmp_path / "p.json"
    path.write_text(text)
    with pytest.raises(ProfileError, match=r"p\.json"):
        Profile.read(path)
    with pytest.raises(ProfileError, match=r"absent\.json: No such file"):
        Profile.read(tmp_path / "absent.json")


@pytest.mark.parametrize("path", sorted(SHIPPED.glob("*.json")), ids=lambda path: path.stem)
def test_a_profile_that_ships_is_found_for_its_card_and_built_in_shape(path: Path):
    model, _, card = path.stem.rpartition("-")
    key = Profile.read(path).key
    assert key.device == f"cuda (NVIDIA {CARDS[card]})"
    assert key.model == model_digest(SHAPES[model.removesuffix("-fp8")])
    assert shipped_profile(structs.replace(key, driver="999", version="9.9")) == path
    assert shipped_profile(structs.replace(key, kv_itemsize=4.0)) is None
    assert shipped_profile(structs.replace(key, tensor_parallel=2)) is None
