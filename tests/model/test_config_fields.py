"""Each field of a config changes what it changes in `transformers`, or is refused."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel

from twolane.model.load.checkpoint import WeightsError
from twolane.model.load.hub import resolve

from .checkpoints import FAMILIES, config_of, load_decoder, random_model
from .passes import expected, in_chunks, prompt

NOT_COMPUTED = {
    *PreTrainedConfig().to_dict(),
    *("vocab_size", "use_cache", "initializer_range", "router_aux_loss_coef", "text_config"),
    *("output_router_logits", "hidden_size", "num_hidden_layers", "vision_config"),
    *("audio_config", "bos_token_id", "eos_token_id", "pad_token_id"),
} - {"tie_word_embeddings"}
"""Fields that change no logits, and sizes that all families share."""
VALUES: dict[str, list[Any]] = {
    "num_key_value_heads": [1, 4],
    "head_dim": [8, 16, 64],
    "hidden_act": ["silu", "gelu", "gelu_pytorch_tanh"],
    "hidden_activation": ["silu", "gelu", "gelu_pytorch_tanh"],
}
UNSAID = {"sliding_window": [5], "head_dim": [8, 32]}
"""Values of fields that are null."""
OURS = {("ministral3", "rope_parameters"), ("ministral3-published", "rope_parameters")}
"""Fields without which `transformers` has another model's values, and ours are Mistral's."""
OURS |= {("ministral3-published", "rms_norm_eps")}
QUICK = ("hunyuan", "qwen3-next")


def edits(config: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield fields with another value; None: the config does not have them."""
    for name, value in config.items():
        if name in NOT_COMPUTED or "dropout" in name:
            continue
        yield name, None
        if value is None:
            yield from ((name, other) for other in UNSAID.get(name, [True, 0.5]))
        elif isinstance(value, bool):
            yield name, not value
        elif isinstance(value, int | str):
            doubled = [max(1, value // 2), value * 2] if isinstance(value, int) else []
            yield from ((name, each) for each in VALUES.get(name, doubled) if each != value)
        elif isinstance(value, float):
            yield name, value * 1.5


def theirs(path: Path, content: dict[str, Any]) -> PreTrainedModel | None:
    """Write a random checkpoint of a config and return its model; None: `transformers` has none."""
    path.mkdir()
    (path / "config.json").write_text(json.dumps(content))
    try:
        model = random_model(AutoConfig.from_pretrained(path)).eval()
        model.set_attn_implementation("eager")
        expected(model, prompt(8))
    except Exception:  # whatever such a config breaks
        return None
    model.save_pretrained(path)
    (path / "config.json").write_text(json.dumps(content))
    return model


@pytest.mark.parametrize(
    "family",
    [pytest.param(f, marks=() if f in QUICK else pytest.mark.full) for f in FAMILIES],
)
def test_no_field_is_dropped_in_silence(family, tmp_path):
    config = config_of(family)
    config.architectures = [type(random_model(config)).__name__]
    config.save_pretrained(tmp_path / "base")
    base = json.loads((tmp_path / "base" / "config.json").read_text())
    tokens, wrong, served = prompt(40), [], 0
    for number, (name, value) in enumerate(edits(base.get("text_config", base))):
        content = json.loads(json.dumps(base))
        part = content.get("text_config", content)
        part.pop(name)
        part |= {} if value is None else {name: value}
        if (model := theirs(path := tmp_path / str(number), content)) is None:
            continue
        try:
            ours = in_chunks(load_decoder(resolve(str(path))), tokens, [30, *[1] * 10])
        except (ValueError, WeightsError):
            continue
        served += 1
        want = expected(model, tokens)
        close = torch.allclose(ours, want, rtol=0.0, atol=1e-4 * float(want.abs().max()))
        if not close and (family, name) not in OURS:
            wrong.append((name, value))
    assert not wrong
    assert served > 10
