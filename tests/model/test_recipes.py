"""The text recipes of vLLM's cookbook (2026) that fit one H200: served, or refused by name."""

import json
import re
from pathlib import Path

import pytest
from transformers import AutoConfig

from twolane.model.families.refused import reason
from twolane.model.families.registry import ARCHITECTURES, VISION
from twolane.model.load.configs import facts_from_directory
from twolane.model.spec import UnsupportedModel

RECIPES = {
    "SeedOssForCausalLM": "Seed-OSS-36B-Instruct",
    "DiffusionGemmaForBlockDiffusion": "diffusiongemma-26B-A4B-it",
    "Gemma4ForConditionalGeneration": (
        "gemma-4-26B-A4B-it gemma-4-31B-it gemma-4-E2B-it gemma-4-E4B-it"
    ),
    "Gemma4UnifiedForConditionalGeneration": "gemma-4-12B-it",
    "Gemma3ForConditionalGeneration": "translategemma-27b-it",
    "MellumForCausalLM": "Mellum2-12B-A2.5B-Instruct Mellum2-12B-A2.5B-Thinking",
    "Lfm2ForCausalLM": (
        "LFM2.5-1.2B-Base LFM2.5-1.2B-Instruct LFM2.5-1.2B-JP LFM2.5-1.2B-JP-202606 "
        "LFM2.5-1.2B-Thinking LFM2.5-230M LFM2.5-350M"
    ),
    "Lfm2MoeForCausalLM": "LFM2.5-8B-A1B",
    "MiniMaxM2ForCausalLM": "MiniMax-M2 MiniMax-M2.5 MiniMax-M2.7",
    "Qwen2ForCausalLM": "Qwen2.5-32B",
    "Qwen2_5_VLForConditionalGeneration": "Qwen2.5-VL-72B-Instruct Qwen2.5-VL-7B-Instruct",
    "Qwen3ForCausalLM": "Qwen3-1.7B Qwen3-32B Qwen3-4B Qwen3-8B Qwen3Guard-Gen-8B",
    "Qwen3MoeForCausalLM": "Qwen3-235B-A22B-Instruct-2507 Qwen3-30B-A3B",
    "Qwen3NextForCausalLM": "Qwen3-Next-80B-A3B-Instruct",
    "Qwen3VLMoeForConditionalGeneration": "Qwen3-VL-235B-A22B-Instruct",
    "Qwen3_5ForConditionalGeneration": (
        "Qwen3.5-0.8B Qwen3.5-2B Qwen3.5-4B Qwen3.5-9B Qwen3.5-27B Qwen3.6-27B"
    ),
    "Qwen3_5MoeForConditionalGeneration": "Qwen3.5-35B-A3B Qwen3.5-122B-A10B Qwen3.6-35B-A3B",
    "Qwen3_8ForConditionalGeneration": "Qwen3.8-27B",
    "Ernie4_5_MoeForCausalLM": "ERNIE-4.5-21B-A3B-PT",
    "GraniteForCausalLM": "granite-3.2-2b-instruct",
    "InternS2ForConditionalGeneration": "Intern-S2-Preview",
    "LlamaForCausalLM": (
        "Llama-3.1-8B Llama-3.1-8B-Instruct Llama-3.2-1B Llama-3.2-1B-Instruct "
        "Llama-3.2-3B-Instruct Llama-3.3-70B-Instruct MiniCPM5-1B"
    ),
    "Llama4ForConditionalGeneration": "Llama-4-Scout-17B-16E-Instruct",
    "MuseGlimmerForConditionalGeneration": "Muse-Glimmer-30B",
    "Phi3ForCausalLM": "Phi-4-mini-instruct Phi-4-reasoning",
    "KimiLinearForCausalLM": "Kimi-Linear-48B-A3B-Instruct",
    "NemotronHForCausalLM": (
        "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16 NVIDIA-Nemotron-3-Nano-4B-BF16 "
        "NVIDIA-Nemotron-3-Super-120B-A12B-BF16 NVIDIA-Nemotron-3.5-Lightning-30B-A3B-BF16 "
        "NVIDIA-Nemotron-Nano-9B-v2"
    ),
    "NemotronHOmniForConditionalGeneration": "Nemotron-3-Nano-Omni-30B-A3B-Reasoning-BF16",
    "GptOssForCausalLM": "gpt-oss-120b gpt-oss-20b",
    "Plamo2ForCausalLM": "plamo-2-translate",
    "Plamo3ForCausalLM": "plamo-3-nict-31b-base",
    "LagunaForCausalLM": "Laguna-M.1 Laguna-S-2.1 Laguna-XS-2.1 Laguna-XS.2",
    "Step3p5ForCausalLM": "Step-3.5-Flash",
    "HunYuanMoEV1ForCausalLM": "Hunyuan-A13B-Instruct",
    "GlmForCausalLM": "glm-4-9b-hf",
}
"""The recipes by the architecture that their config names."""
LEAST = 61
"""Recipes that are served."""


KNOWN = {**ARCHITECTURES, **VISION}
GUIDE = Path(__file__).parents[2] / "docs/guides/models.md"


def test_each_recipe_is_served_or_refused_with_a_reason() -> None:
    recipes = [name for names in RECIPES.values() for name in names.split()]
    assert len(recipes) == len(set(recipes)) == 75
    others = [name for name in RECIPES if name not in KNOWN]
    assert [name for name in others if reason(name) is None] == []
    served = [name for arch in RECIPES if arch in KNOWN for name in RECIPES[arch].split()]
    assert len(served) == LEAST


@pytest.mark.parametrize("architecture", RECIPES)
def test_a_config_as_it_is_published_is_read_or_refused(architecture: str, tmp_path: Path) -> None:
    """With all fields of the class in `transformers`, of models that have one, as it writes them;
    those of vision models have the fields of the text below `text_config`."""
    if architecture not in KNOWN:
        raw = {"architectures": [architecture], "model_type": "other"}
        (tmp_path / "config.json").write_text(json.dumps(raw))
        with pytest.raises(UnsupportedModel, match=re.escape(str(reason(architecture)))):
            facts_from_directory(tmp_path)
        return
    family = KNOWN[architecture]
    config = AutoConfig.for_model(family.vision.get(architecture, family.name))
    config.architectures = [architecture]
    config.save_pretrained(tmp_path)
    facts = facts_from_directory(tmp_path)
    assert facts.family is family
    assert facts.vision == (architecture in VISION)
    assert facts.spec.layers == config.get_text_config().num_hidden_layers


def test_the_guide_has_all_of_them() -> None:
    rows = [
        f"| {names.replace(' ', ', ')} | `{architecture}` | "
        f"{'served' if architecture in KNOWN else reason(architecture)} |"
        for architecture, names in RECIPES.items()
    ]
    text = GUIDE.read_text()
    assert [row for row in rows if row not in text] == []
