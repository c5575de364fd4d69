"""The bytes that a decode step must read, against a count by the model's shape."""

from types import SimpleNamespace

import pytest

from tests.benchmarks.test_scripts import SCRIPTS
from tests.model.checkpoints import make_checkpoint
from twolane.model.gpu_decoder import GpuDecoder
from twolane.model.load.hub import resolve
from twolane.model.load.weights import load_weights

ROWS, CONTEXT = 3, 90


@pytest.fixture
def rig(monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.syspath_prepend(str(SCRIPTS))
    monkeypatch.syspath_prepend(str(SCRIPTS / "gpu"))
    import rig

    return rig


@pytest.mark.parametrize("name", ["gemma3", "gpt-oss", "qwen3.5-moe"])
def test_a_step_reads_the_weights_and_what_windows_and_states_hold(rig, name, tmp_path):
    """Keys and values beyond a window are not read, nor experts that no row wakes; states are read
    and written."""
    spec, weights = load_weights(resolve(str(make_checkpoint(name, tmp_path / name))))
    state = spec.state_bytes(4)
    machine = SimpleNamespace(decoder=GpuDecoder(spec, weights), state_bytes=state, kv_itemsize=4)
    moved = rig.step_bytes(SimpleNamespace(machine=machine), ROWS, CONTEXT)
    vocabulary = 4 * spec.vocab_size * spec.hidden_size
    expected = 4 * spec.parameters - vocabulary * (0 if spec.tie_embeddings else 1)
    if (moe := spec.moe) is not None:
        each = 4 * 3 * spec.hidden_size * moe.intermediate_size
        expected -= spec.expert_layers * (moe.rule.stored - moe.active(ROWS)) * each
    for layer in spec.kv_layers:
        seen = min(CONTEXT, spec.window(layer) or CONTEXT)
        expected += ROWS * seen * 2 * 4 * spec.each[layer].kv_size
    expected += 2 * ROWS * state
    assert moved == pytest.approx(expected, rel=0.02)  # norms, biases and convolutions are small
