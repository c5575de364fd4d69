"""vLLM's server with dummy weights like ours: `python benchmarks/vllm_experts.py serve MODEL …`.

vLLM's own dummy weights give every token of a model with experts nearly the same hidden state, so
that all tokens go to the same few experts, and steps read less than they would. Here they have the
deviations of Twolane's (`twolane.model.load.weights`). The arguments are those of vLLM's command.
"""

import math
import sys

import torch
from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader

STD = 0.02


def deviation(name: str, layers: int) -> float:
    """Standard deviation of a parameter."""
    if "embed_tokens" in name:
        return 1.0
    added = name.endswith(("o_proj.weight", "down_proj.weight", "w2_weight"))
    return STD / math.sqrt(2 * layers) if added else STD


@torch.no_grad()
def load_weights(self: DummyModelLoader, model: torch.nn.Module, model_config: object) -> None:
    """In place of the loader's own."""
    layers = model_config.hf_config.num_hidden_layers
    generator = torch.Generator("cuda").manual_seed(0)
    for name, parameter in model.state_dict().items():
        if not torch.is_floating_point(parameter):
            continue
        if "norm" in name:
            parameter.fill_(1.0)
        else:
            parameter.normal_(0.0, deviation(name, layers), generator=generator)
    print("dummy weights have Twolane's deviations", flush=True)


DummyModelLoader.load_weights = load_weights

if __name__ == "__main__":
    from vllm.entrypoints.cli.main import main

    sys.exit(main())
