"""Measurements on GPUs that do nothing else: `python benchmarks/gpu CASE [--help]`.

Models have dummy weights (random, never zeros) in their true shapes, and KV pools of random
numbers. Values are medians; every ratio is of two things measured in one run.
"""

import sys
from importlib import import_module

import harness

CASES = {
    "lanes": "lanes of a dense model reach the device's speed, alone and side by side",
    "adapters": "what LoRA adapters cost",
    "step": "steps and prompts of a model beside the bytes and FLOPs that they need; kernels",
    "ranks": "one model on several GPUs",
    "all-reduce": "sums over ranks, with and without the norm that follows",
    "transfer": "pages written into another GPU's KV pool",
    "products": "a layer's products by each way that there is",
    "fused": "the fused operations and the sampler",
    "decode-attention": "decode attention on shares of the SMs",
    "prefill-attention": "prefill attention on shares of the SMs",
}


def main() -> int:
    """Run the case that is named; return the exit code."""
    name = sys.argv[1] if len(sys.argv) > 1 else "--help"
    if name not in CASES:
        print(f"usage: python benchmarks/gpu CASE [options]\n\n{__doc__}\nCases:")
        for case, about in CASES.items():
            print(f"  {case:18} {about}")
        return 0 if name == "--help" else 2
    return harness.run(import_module(name.replace("-", "_")), name, sys.argv[2:])


if __name__ == "__main__":
    sys.exit(main())
