"""Names that users of other engines pass in Python: honoured, or refused with what to use here."""

import re

import pytest

from twolane import LLM, SamplingParams
from twolane.engine.config import EngineConfig
from twolane.frontend.other_servers import UNSERVED

HONOURED = {
    **{"temperature": 0.5, "top_p": 0.5, "top_k": 5, "min_p": 0.1, "seed": 1, "max_tokens": 5},
    **{"min_tokens": 1, "stop_token_ids": (1,), "ignore_eos": True, "repetition_penalty": 1.1},
    **{"presence_penalty": 0.1, "frequency_penalty": 0.1, "logit_bias": {1: 1.0}},
    **{"logprobs": 1, "prompt_logprobs": 1, "allowed_token_ids": (1, 2), "bad_words": ("x",)},
}


def test_sampling_parameters_of_vllm_are_honoured_by_their_names():
    params = SamplingParams(**HONOURED)
    assert {name: getattr(params, name) for name in HONOURED} == HONOURED


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        *((name, "LLM.generate") for name in ("stop", "n", "include_stop_str_in_output")),
        *((name, "LLM.generate") for name in ("skip_special_tokens", "truncate_prompt_tokens")),
        *((name, "use grammar") for name in ("structured_outputs", "guided_decoding", "regex")),
        ("logits_processors", "use logit_bias"),
        ("best_of", "generate for n answers"),
        ("detokenize", "text and its token_ids"),
        ("max_new_tokens", "use max_tokens"),
        ("use_beam_search", "no beam search"),
        ("output_kind", "stream"),
        ("no_such_name", "is none of temperature, "),
    ],
)
def test_other_sampling_parameters_are_refused_with_what_to_use(name, hint):
    with pytest.raises(TypeError, match=f"SamplingParams: {name} .*{re.escape(hint)}"):
        SamplingParams(**{name: None})


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("enforce_eager", "CUDA graphs are always used"),
        ("trust_remote_code", "code of a checkpoint never runs"),
        ("max_num_seqs", "use max_running"),
        ("max_num_batched_tokens", "slo=Slo(tbt=SECONDS)"),
        ("enable_prefix_caching", "use prefix_cache, "),
        ("block_size", "use page_size"),
        ("num_gpu_blocks_override", "use kv_tokens"),
        ("pipeline_parallel_size", "use tensor_parallel_size"),
        ("swap_space", "nothing is swapped"),
        ("tokenizer", "the tokenizer is the one beside the weights"),
        ("model_path", "LLM(MODEL)"),
        ("disable_radix_cache", "use prefix_cache=False"),
        ("no_such_name", "there are all_reduce, "),
    ],
)
def test_settings_of_other_engines_are_refused_with_what_to_use(name, hint):
    """Before anything is started."""
    with pytest.raises(TypeError, match=f"LLM: {name} is not a setting.*{re.escape(hint)}"):
        LLM("no-such-model", **{name: None})


def test_settings_with_vllms_name_are_settings():
    named = ("tensor_parallel_size", "gpu_memory_utilization", "max_model_len", "dtype", "seed")
    named += ("quantization", "load_format", "kv_cache_dtype", "max_loras", "max_lora_rank")
    assert set(named) <= set(EngineConfig.__struct_fields__)
    assert not {"--" + name.replace("_", "-") for name in named} & UNSERVED.keys()
