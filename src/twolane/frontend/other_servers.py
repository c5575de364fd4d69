"""Options and settings of other servers, and what to use instead."""

import re
from collections.abc import Collection
from typing import Any

_ROWS = (
    ("--model --model-path --model-id", "the model is the first argument: twolane serve MODEL"),
    (
        "-i --input-file -o --output-file",
        "model and files are arguments: twolane run-batch MODEL INPUT OUTPUT",
    ),
    ("--context-length --ctx-size --max-input-length", "use --max-model-len"),
    ("--max-total-tokens", "use --max-model-len for a request, --kv-tokens for the KV pool"),
    ("--max-num-seqs --max-running-requests --parallel", "use --max-running"),
    (
        "--max-num-batched-tokens --max-batch-prefill-tokens --chunked-prefill-size "
        "--max-prefill-tokens",
        "no budget is needed: give --slo-tbt-ms, or --system chunked --option token_budget=TOKENS",
    ),
    (
        "--enable-chunked-prefill --no-enable-chunked-prefill",
        "every system divides prefill itself; --system chunked mixes chunks with decode",
    ),
    ("--scheduling-policy --schedule-policy", "use --system, or --allow-priority"),
    ("--num-scheduler-steps", "use --option look_ahead=STEPS"),
    ("--enable-prefix-caching", "use --prefix-cache, which is the default"),
    ("--no-enable-prefix-caching --disable-radix-cache", "use --no-prefix-cache"),
    ("--block-size", "use --page-size"),
    ("--mem-fraction-static", "use --gpu-memory-utilization"),
    ("--num-gpu-blocks-override --max-batch-total-tokens", "use --kv-tokens"),
    (
        "--swap-space --kv-offloading-size --enable-hierarchical-cache",
        "requests that lose their KV pages are computed again; nothing is swapped",
    ),
    (
        "--cpu-offload-gb",
        "weights and KV cache stay on the device; --gpu-memory-utilization and --kv-tokens set "
        "its share",
    ),
    (
        "--enforce-eager --disable-cuda-graph --cuda-graph-sizes --cuda-graph-max-bs "
        "--compilation-config --enable-torch-compile",
        "CUDA graphs are always used on a GPU",
    ),
    ("--attention-backend", "the fastest that is installed is used"),
    ("-t", "write --tp for vLLM's -tp"),
    ("--tp-size --num-shard", "use --tensor-parallel-size"),
    ("--pipeline-parallel-size", "use --tensor-parallel-size: ranks share every layer"),
    ("--data-parallel-size --dp-size --dp", "use twolane fleet MODEL --replicas SERVERS"),
    (
        "--enable-expert-parallel --ep-size",
        "use --tensor-parallel-size: each rank has a part of every expert",
    ),
    (
        "--distributed-executor-backend --nnodes --dist-init-addr",
        "all ranks are processes of one host",
    ),
    ("--disable-custom-all-reduce", "use --all-reduce nccl"),
    ("--kv-transfer-config --disaggregation-mode", "use --disaggregated"),
    ("--threads", "use --cores"),
    ("--n-gpu-layers", "all layers run on one device: see --device"),
    (
        "--tokenizer --tokenizer-path --tokenizer-mode",
        "the tokenizer is the one beside the weights",
    ),
    ("--chat-template", "the template is the one beside the weights"),
    (
        "--trust-remote-code",
        "code of a checkpoint never runs; families that are built in do not need it",
    ),
    (
        "--hf-overrides --json-model-override-args",
        "edit config.json; --max-positions replaces its positions",
    ),
    ("--task --runner --is-embedding", "a checkpoint that is made for embeddings serves them"),
    ("--limit-mm-per-prompt", "prompts are text"),
    ("--revision", "pull the revision with Hugging Face's tools and serve its folder"),
    ("--download-dir", "set HF_HOME for Hugging Face's cache and TWOLANE_CACHE for aliases"),
    ("--hf-token", "set HF_TOKEN"),
    ("--random-seed", "use --seed"),
    ("--generation-config", "use --sampling-defaults"),
    (
        "--override-generation-config --preferred-sampling-params",
        "edit generation_config.json, or use --sampling-defaults",
    ),
    ("--enable-auto-tool-choice", "tools are served without it"),
    (
        "--guided-decoding-backend --structured-outputs-config --grammar-backend",
        "llguidance is the only one",
    ),
    ("--speculative-config --speculative-algorithm", "every token is computed by the model itself"),
    ("--max-logprobs", "requests may ask for 20"),
    ("--return-tokens-as-token-ids", "requests may ask for it by a field of this name"),
    ("--enable-prompt-tokens-details", "answers always have them"),
    ("--stream-interval", "a stream has an event whenever the engine delivers tokens"),
    ("--enable-lora", "use --lora NAME=PATH, and --lora-endpoints to load others while serving"),
    ("--lora-modules --lora-paths", "use --lora NAME=PATH"),
    ("--max-loras-per-batch --max-cpu-loras", "use --max-loras"),
    ("--alias", "use --served-model-name"),
    ("--api-server-count", "one API process serves an engine: see twolane fleet"),
    ("--max-concurrent-requests", "use --max-queue"),
    ("--allowed-origins", "use --cors-origins"),
    ("--root-path", "put a proxy that rewrites the path in front of the server"),
    (
        "--ssl-keyfile --ssl-certfile --ssl-ca-certs",
        "put a proxy that ends TLS in front of the server",
    ),
    ("--uds", "the server listens on TCP: see --host and --port"),
    ("--watchdog-timeout", "use --watchdog and --hang-seconds"),
    ("--uvicorn-log-level", "use --log-level"),
    (
        "--disable-log-requests --enable-log-requests --log-requests",
        "requests are logged only with --log-level debug",
    ),
    ("--disable-log-stats", "figures are at /metrics, not in the log"),
    ("--enable-metrics", "metrics are always at /metrics"),
    ("--enable-server-load-tracking", "GET /load always answers"),
    ("--otlp-traces-endpoint", "use --otlp-endpoint"),
    (
        "--kv-events-config",
        "use --kv-events-endpoint, --kv-events-replay-endpoint and --kv-events-topic",
    ),
)

UNSERVED = {option: hint for options, hint in _ROWS for option in options.split()}
"""Replacements of the options of vLLM, SGLang, TGI and llama.cpp that have another name or no
counterpart here."""


def unserved(error: Any) -> str | None:
    """Return what to use instead of an option unknown to the parser; None: it is not listed."""
    option = str(getattr(error, "option_name", "")).replace("_", "-")
    hint = UNSERVED.get(option)
    return None if hint is None else f"{option} is not an option here: {hint}"


_SETTINGS = {
    "model_path": "the model is the first argument: LLM(MODEL)",
    "data_parallel_size": "one LLM is one engine: see twolane fleet",
    "dp_size": "one LLM is one engine: see twolane fleet",
    "enable_lora": "use lora={NAME: PATH}",
    "generation_config": "the model's own is used where no SamplingParams are given",
    "override_generation_config": "give SamplingParams",
    "disable_radix_cache": "use prefix_cache=False",
    "disable_log_stats": "an LLM logs no figures",
    "scheduling_policy": "use system",
    "max_num_batched_tokens": "no budget is needed: give slo=Slo(tbt=SECONDS), or system='chunked' "
    "and options={'token_budget': TOKENS}",
    "max_logprobs": "SamplingParams may ask for 20",
    "skip_tokenizer_init": "prompts may be token ids without it",
}
"""Replacements of settings for which the option's hint would not help."""


def check_settings(names: Collection[str], known: Collection[str]) -> None:
    """Refuse settings that `LLM` does not have.

    Args:
        names: their names.
        known: the names that there are.

    Raises:
        TypeError: one is not known; the message says what to use instead, where that is listed.
    """
    for name in names:
        if name not in known:
            raise TypeError(f"LLM: {name} is not a setting here: {_setting_hint(name, known)}")


def _setting_hint(name: str, known: Collection[str]) -> str:
    hint = _SETTINGS.get(name) or UNSERVED.get("--" + name.replace("_", "-"))
    if hint is None:
        return f"there are {', '.join(sorted(known))}"

    def as_setting(option: re.Match[str]) -> str:
        setting = option[1].replace("-", "_")
        return setting if setting in known else option[0]

    return re.sub(r"--([a-z-]+)", as_setting, hint)
