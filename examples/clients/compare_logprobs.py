"""Compare the log-probabilities that lm-eval got from the server with those of `transformers`.

python examples/clients/compare_logprobs.py results/*/samples_capitals_*.jsonl
"""

import json
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from twolane.model.load.hub import resolve

MAX_DIFFERENCE = 1e-3
"""Natural logarithms, summed over an answer; both sides compute in float32."""

source = resolve("smollm2-135m-instruct")
assert source.path is not None
place = {"pretrained_model_name_or_path": source.path.parent, "gguf_file": source.path.name}
model = AutoModelForCausalLM.from_pretrained(**place, dtype=torch.float32).eval()
tokenizer = AutoTokenizer.from_pretrained(**place)


@torch.inference_mode()
def loglikelihood(context: str, answer: str) -> tuple[float, bool]:
    """Return the log-probability of `answer` after `context`, and whether it is the likeliest."""
    tokens = tokenizer(context + answer, return_tensors="pt").input_ids
    begin = len(tokenizer(context).input_ids)
    logprobs = model(tokens).logits[0, begin - 1 : -1].log_softmax(-1)
    chosen = tokens[0, begin:]
    likeliest = bool((logprobs.argmax(-1) == chosen).all())
    return logprobs.gather(1, chosen[:, None]).sum().item(), likeliest


differences = []
for path in map(Path, sys.argv[1:]):
    for line in path.read_text().splitlines():
        sample = json.loads(line)
        for arguments, ((served, likeliest),) in zip(
            sample["arguments"].values(), sample["resps"], strict=True
        ):
            wanted, wanted_likeliest = loglikelihood(arguments["arg_0"], arguments["arg_1"])
            differences.append(abs(float(served) - wanted))
            assert (str(likeliest) == "True") == wanted_likeliest, arguments
print(f"{len(differences)} answers, largest difference {max(differences):.2e}")
sys.exit(max(differences) > MAX_DIFFERENCE)
