"""Names that users of other engines pass in Python: honoured, or refused by name."""

import pytest

from twolane import LLM, SamplingParams
from twolane.engine.config import EngineConfig
from twolane.llm import known_settings

HONOURED = {
    **{"temperature": 0.5, "top_p": 0.5, "top_k": 5, "min_p": 0.1, "seed": 1, "max_tokens": 5},
    **{"min_tokens": 1, "stop_token_ids": (1,), "ignore_eos": True, "repetition_penalty": 1.1},
    **{"presence_penalty": 0.1, "frequency_penalty": 0.1, "logit_bias": {1: 1.0}},
    **{"thinking_token_budget": 5, "logprobs": 1, "prompt_logprobs": 1},
    **{"allowed_token_ids": (1, 2), "bad_words": ("x",)},
}


def test_sampling_parameters_of_vllm_are_honoured_by_their_names():
    params = SamplingParams(**HONOURED)
    assert {name: getattr(params, name) for name in HONOURED} == HONOURED


@pytest.mark.parametrize("name", ["regex", "guided_decoding", "max_new_tokens", "no_such"])
def test_other_sampling_parameters_are_refused_by_name(name):
    problem = f"SamplingParams: {name} is none of temperature, .*from-vllm.md"
    with pytest.raises(TypeError, match=problem):
        SamplingParams(**{name: None})


@pytest.mark.parametrize("name", ["enforce_eager", "max_seq_len_to_capture", "no_such_name"])
def test_settings_of_other_engines_are_refused_by_name(name):
    """Before anything is started."""
    problem = f"LLM: {name} is not a setting: there are all_reduce, .*from-vllm.md"
    with pytest.raises(TypeError, match=problem):
        LLM("no-such-model", **{name: True})


def test_settings_of_vllm_with_the_same_meaning_have_both_names():
    given = {"max_num_seqs": 3, "block_size": 32, "enable_prefix_caching": False, "seed": 5}
    neutral = {"enforce_eager": False, "trust_remote_code": True}
    own = {"max_running": 3, "page_size": 32, "prefix_cache": False, "seed": 5}
    assert known_settings({**given, **neutral}) == known_settings(own) == own
    with pytest.raises(TypeError, match="max_running is given twice"):
        LLM("no-such-model", max_num_seqs=3, max_running=4)


def test_settings_with_vllms_name_are_settings():
    named = ("tensor_parallel_size", "gpu_memory_utilization", "max_model_len", "dtype", "seed")
    named += ("quantization", "load_format", "kv_cache_dtype", "max_loras", "max_lora_rank")
    assert set(named) <= set(EngineConfig.__struct_fields__)
