"""Options of other servers that users try here, and what to use instead."""

from typing import Any

UNSERVED = {
    "--pipeline-parallel-size": "the model runs on one GPU; larger ones need a larger GPU",
    "--data-parallel-size": "run a server for each GPU, behind a load balancer",
    "--enable-auto-tool-choice": "tools are served without it",
    "--guided-decoding-backend": "llguidance is the only one",
    "--enable-chunked-prefill": "every system divides prefill itself; --system chunked mixes "
    "chunks with decode",
    "--max-num-batched-tokens": "use --system chunked --option token_budget=TOKENS",
    "--max-num-seqs": "use --max-running",
    "--scheduling-policy": "use --system; requests may carry a `priority`",
    "--num-scheduler-steps": "use --option look_ahead=STEPS",
    "--enable-prefix-caching": "use --prefix-cache, which is the default",
    "--no-enable-prefix-caching": "use --no-prefix-cache",
    "--block-size": "use --page-size",
    "--swap-space": "requests that lose their KV pages are computed again; nothing is swapped",
    "--cpu-offload-gb": "weights and KV cache stay on the device; --gpu-memory-utilization and "
    "--kv-tokens set its share",
    "--enforce-eager": "CUDA graphs are always used on a GPU",
    "--trust-remote-code": "code of a checkpoint never runs; families that are built in do not "
    "need it",
    "--tokenizer": "the tokenizer is the one beside the weights",
    "--tokenizer-mode": "the tokenizer is the one beside the weights",
    "--chat-template": "the template is the one beside the weights",
    "--model": "the model is the first argument: twolane serve MODEL",
    "--download-dir": "set HF_HOME for Hugging Face's cache and TWOLANE_CACHE for aliases",
    "--revision": "pull the revision with Hugging Face's tools and serve its folder",
    "--kv-events-config": "use --kv-events-endpoint, --kv-events-replay-endpoint and "
    "--kv-events-topic",
    "--speculative-config": "every token is computed by the model itself",
    "--enable-lora": "use --lora NAME=PATH, and --lora-endpoints to load others while serving",
    "--lora-modules": "use --lora NAME=PATH",
    "--disable-log-requests": "requests are logged only with --log-level debug",
    "--uvicorn-log-level": "use --log-level",
    **dict.fromkeys(
        ("--ssl-keyfile", "--ssl-certfile"), "put a proxy that ends TLS in front of the server"
    ),
    "--uds": "the server listens on TCP: see --host and --port",
    "--allowed-origins": "use --cors-origins",
    "--generation-config": "use --sampling-defaults",
    "--override-generation-config": "edit generation_config.json, or use --sampling-defaults",
    "--max-logprobs": "requests may ask for 20",
    "--hf-token": "set HF_TOKEN",
    "--attention-backend": "the fastest that is installed is used",
    "--disable-log-stats": "figures are at /metrics, not in the log",
    "--root-path": "put a proxy that rewrites the path in front of the server",
    "--context-length": "use --max-model-len",
    "--mem-fraction-static": "use --gpu-memory-utilization",
    **dict.fromkeys(("--tp", "--tp-size", "--num-shard"), "use --tensor-parallel-size"),
    **dict.fromkeys(
        ("--model-path", "--model-id"), "the model is the first argument: twolane serve MODEL"
    ),
    "--disable-radix-cache": "use --no-prefix-cache",
    "--schedule-policy": "use --system",
    "--max-total-tokens": "use --max-model-len",
    "--max-input-length": "use --max-model-len",
    "--max-batch-prefill-tokens": "use --system chunked --option token_budget=TOKENS",
    "--chunked-prefill-size": "use --system chunked --option token_budget=TOKENS",
    "--ctx-size": "use --max-model-len",
    "--threads": "use --cores",
    "--parallel": "use --max-running",
    "--alias": "use --served-model-name",
    "--n-gpu-layers": "all layers run on one device: see --device",
}
"""Options of vLLM, SGLang, TGI and llama.cpp that have another name or no counterpart here."""


def unserved(error: Any) -> str | None:
    """Return what to use instead of the option that the parser does not know, if it is listed."""
    option = str(getattr(error, "option_name", "")).replace("_", "-")
    hint = UNSERVED.get(option)
    return None if hint is None else f"{option} is not an option here: {hint}"
