"""Compile, for sm_90, what launches would run there; no GPU is needed.

    python tests/kernels/compiling.py [--full]

prints one line of JSON a kernel: name, seconds to compile, registers, instructions that spill them,
bytes of shared memory, and the bytes of the widest global load and store. The interpreter that the
other tests use sees no error of the compiler.
"""

import inspect
import json
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

TYPES = {
    torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.float16: "*fp16",
    torch.float8_e4m3fn: "*fp8e4nv", torch.float64: "*fp64",
    torch.int8: "*i8", torch.int32: "*i32", torch.int64: "*i64",
}  # fmt: skip


def source(kernel: Any, values: dict[str, Any]) -> ASTSource:
    """What Triton would compile for these arguments."""
    signature, constants, attributes = {}, {}, {}
    for place, parameter in enumerate(kernel.params):
        value = values[parameter.name]
        signature[parameter.name] = "i32" if isinstance(value, int) else "fp32"
        if parameter.is_constexpr or (isinstance(value, int) and value == 1):
            signature[parameter.name] = "constexpr"
            constants[(place,)] = value
        elif isinstance(value, torch.Tensor):
            signature[parameter.name] = TYPES[value.dtype]
            value = value.data_ptr()
        if isinstance(value, int) and value % 16 == 0 and (place,) not in constants:
            attributes[(place,)] = [["tt.divisibility", 16]]
    return ASTSource(kernel, signature, constants, attributes)


def usage(cubin: bytes) -> dict[str, int]:
    """Registers of a kernel, its spills, and its widest global accesses in bytes."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run(
            [tool, "-res-usage", "-sass", file.name], capture_output=True, text=True, check=True
        ).stdout
    found = re.search(r"REG:(\d+)", text)
    assert found, text[:500]
    widths = {}
    for name, what in (("LDG", "load"), ("STG", "store")):
        kinds = re.findall(rf"\b{name}\.E(?:\.\w+)*", text)
        bits = [int(m[1]) if (m := re.search(r"\.(64|128)\b", kind)) else 32 for kind in kinds]
        widths[what] = max(bits, default=0) // 8
    spills = len(re.findall(r"\b(?:STL|LDL)\b", text))
    return {"registers": int(found[1]), "spills": spills, **widths}


def doubtful(text: str) -> int:
    """Reductions and scans whose lanes hold copies in between, which Triton 3.6 gets wrong: those
    of what was reshaped from a tensor with fewer elements than threads."""
    copies = {name for name, lanes in re.findall(r"(#linear\d*) = .*?lane = (\[.*?\]), warp", text)
              if re.search(r"\[0(?:, 0)*\]", lanes)}  # fmt: skip
    inputs = re.findall(r"\}\) : \(([^)]*)\) ->", text)
    return sum(any(f"{name}>" in given for name in copies) for given in inputs)


def compile_instead(
    kernel: Any, *args: Any, grid: Any, num_warps: int = 4, num_stages: int = 3, **kwargs: Any
) -> None:
    """In place of `JITFunction.run`."""
    kwargs.pop("warmup")
    kwargs.pop("launch_pdl", None)  # of launches
    values = inspect.signature(kernel.fn).bind(*args, **kwargs).arguments
    start = time.perf_counter()
    options = {"num_warps": num_warps, "num_stages": num_stages}
    built = triton.compile(source(kernel, values), GPUTarget("cuda", 90, 32), options)
    name = kernel.fn.__name__ + (" to e4m3" if values.get("QUANTISED") else "")
    row = {"kernel": name, "seconds": round(time.perf_counter() - start, 2)}
    row |= {**usage(built.asm["cubin"]), "shared": built.metadata.shared}
    row["doubtful"] = doubtful(built.asm["ttgir"])
    print(json.dumps(row), flush=True)


def launch_fused(dtype: torch.dtype) -> None:
    from twolane.kernels import fused
    from twolane.kernels.activations import Quantised
    from twolane.kernels.pool import MirroredPool

    fused._early = lambda device: True  # as on Hopper

    def empty(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype)

    x, weight = empty(2, 2560), empty(2560)
    fused.rms_norm(x, weight, 1e-6, x)
    fused.add_rms_norm(x, x, weight, 1e-6, x)
    pool, qkv, q = empty(4, 8, 2, 32, 128), empty(2, 48 * 128), empty(2, 32, 128)
    table, ints = empty(64, 64, 2, dtype=torch.float32), empty(2, dtype=torch.int32)
    places, pages = empty(2, dtype=torch.int64), empty(2, 16, dtype=torch.int32)
    fused.qkv_rope_write(qkv, ints, empty(40, 128), 1e-6, table, q, pool, places)
    fused.qkv_rope_write(qkv, ints, None, 1e-6, table, q, pool, pages, ints, ints)
    both = MirroredPool(pool, torch.empty_like(pool))
    fused.qkv_rope_write(qkv, ints, None, 1e-6, table, q, both, pages, ints, ints)
    fused.act_mul(empty(2, 24_576), empty(2, 12_288))
    wide = torch.float32
    fused.side_by_side(empty(2, 2, 75_968, dtype=wide), empty(2, 151_936, dtype=wide))
    for width, make in ((2560, fused.quantise), (12_288, fused.act_mul)):
        values = empty(2, width, dtype=torch.float8_e4m3fn)
        made_of = empty(2, width if make is fused.quantise else 2 * width)
        make(made_of, Quantised(values, empty(2, 1, dtype=torch.float32)))
    values = empty(2, 2560, dtype=torch.float8_e4m3fn)
    fused.rms_norm(x, weight, 1e-6, Quantised(values, empty(2, 1, dtype=torch.float32)))
    fused.embed(places, ints, ints, empty(99, 2560), x)
    made = {"residual": x, "positions": ints, "write_slots": ints}
    given = {"page_size": 32, "embedding": empty(99, 2560)}
    fused.lay_out(ints, ints, ints, ints, pages, ints, ints, ints, **given, **made)
    fused.advance(places, ints, ints, ints[:1], ints, ints, places, places)


def launch_rounded(dtype: torch.dtype) -> None:
    """Keys and values of Qwen3-8B in e4m3, on one GPU and on two that share the pages."""
    from twolane.kernels import fused
    from twolane.kernels.pool import E4M3, MirroredPool, RoundedPool

    shape, ints = (4, 8, 2, 32, 128), torch.empty(2, dtype=torch.int32)
    own, copy = (
        RoundedPool(torch.empty(shape).to(E4M3), torch.empty(shape[:-1], dtype=torch.int8))
        for _ in range(2)
    )
    qkv, q = torch.empty(2, 48 * 128, dtype=dtype), torch.empty(2, 32, 128, dtype=dtype)
    norms, table = torch.empty(40, 128, dtype=dtype), torch.empty(64, 64, 2)
    fused.qkv_rope_write(qkv, ints, norms, 1e-6, table, q, MirroredPool(own, copy), ints)
    pages = torch.empty(2, 16, dtype=torch.int32)
    fused.qkv_rope_write(qkv, ints, norms, 1e-6, table, q, own, pages, ints, ints)


def launch_routing(dtype: torch.dtype) -> None:
    from twolane.kernels.experts.routing import (
        ActiveRows,
        Combination,
        Routing,
        gather,
        route,
    )
    from twolane.kernels.experts.rule import RoutingRule
    from twolane.kernels.products.dispatch import input_of

    weight, rows = torch.empty(2048, dtype=dtype), 16
    routing = Routing.of(128, 8, rows, torch.device("cpu"))
    x, logits = torch.empty(rows, 2048, dtype=dtype), torch.empty(rows, 128, dtype=dtype)
    out, marks = torch.empty(rows * 8, 2048, dtype=dtype), torch.empty(rows, dtype=torch.int32)
    route(logits, ActiveRows(marks, 0), routing, 16, RoutingRule(128, 8))
    for scheme in ("bf16", "fp8_channel"):
        gather(x, routing, input_of(out, torch.empty(len(out), 1), scheme))
    left = Combination(out, routing)
    left.add_into(x)
    left.write_into(x)
    left.add_and_norm(x, weight, 1e-6, x)


def launch_grouped(dtype: torch.dtype) -> None:
    """Products of rows sorted by expert, of Qwen3-30B-A3B."""
    from twolane.kernels.experts.grouped_gemm import FOUR_BIT_ROWS, ROWS, grouped_gemm
    from twolane.kernels.experts.routing import Routing
    from twolane.kernels.products.dispatch import input_of
    from twolane.model.matrix import Matrix

    routing = Routing.of(128, 8, 64, torch.device("cpu"))
    x, out = (
        torch.empty(512, 2048, dtype=torch.bfloat16),
        torch.empty(512, 1536, dtype=torch.bfloat16),
    )
    weight = Matrix.plain(torch.empty(128 * 1536, 2048, dtype=torch.bfloat16))
    if dtype == torch.float8_e4m3fn:
        weight = Matrix(weight.values.to(dtype), "fp8_channel", torch.empty(128 * 1536))
    if dtype == torch.uint8:
        values = torch.empty(128 * 1536, 1024, dtype=dtype)
        scales = torch.empty(16, 128 * 1536, dtype=torch.int32)
        weight = Matrix(values, "int4_gpu128", scales)
    for rows in FOUR_BIT_ROWS if dtype == torch.uint8 else ROWS:
        grouped_gemm(
            input_of(x, torch.empty(512, 1), weight.scheme), weight, routing, out, rows, 132
        )


def launch_sampler(dtype: torch.dtype, vocab: int, chunk: int) -> None:
    from twolane.kernels import sampling

    ints = torch.empty(2, dtype=torch.int32)
    sampler = sampling.Sampler(2, vocab, "cpu", chunk=chunk)
    logits, params = torch.empty(2, vocab, dtype=dtype), sampling.new_params(2, "cpu")
    sampler.sample(logits, ints, ints, ints, params, torch.empty(2, dtype=torch.int64))


def launch_prefill(dtype: torch.dtype, dim: int, window: int | None = None) -> None:
    from twolane.kernels.prefill_attention.dispatch import (
        PrefillPlan,
        PrefillWorkspace,
        prefill_attention,
    )

    shape = {"page_size": 32, "heads": 8, "kv_heads": 2, "dim": dim, "dtype": dtype}
    lane = {"units": 5, "workspace": PrefillWorkspace("cpu"), "window": window}
    plan = PrefillPlan.build([(16_384, 70)], [range(515)], **shape, **lane, backend="triton")
    q = torch.empty(70, 8, dim, dtype=dtype)
    prefill_attention(plan, q, torch.empty(515, 2, 2, 32, dim, dtype=dtype), q)


def launch_gather(dtype: torch.dtype) -> None:
    """What FlashInfer's split tiles need beside the merge."""
    from twolane.kernels.prefill_attention.triton_kernels import gather_kernel

    q, pieces = torch.empty(70, 8, 128, dtype=dtype), torch.empty(8, dtype=torch.int32)
    sizes = {"DIM": 128, "ROWS": 128, "FIRST_PLACE": 7, "PART": 32}
    gather_kernel[(1, 4)](q, q.stride(0), q, pieces, **sizes)


def launch_widening() -> None:
    """Of a matrix of CodeLlama-34B."""
    from twolane.kernels.products.widening import widen

    values = torch.empty(8192, 11_008, dtype=torch.uint8)
    widen(values, torch.empty(172, 8192, dtype=torch.int32), slice(0, 1408))


def launch_lora(dtype: torch.dtype, rank: int, counts: tuple[int, ...]) -> None:
    """What adapters add to gate and up of Qwen3-8B, in steps and in larger passes."""
    from twolane.kernels import lora
    from twolane.kernels.activations import Quantised

    lora.launch_options = lambda device: {"EARLY": True, "launch_pdl": True}
    inner, hidden, slots = 12_288, 4096, 8
    a = torch.empty(slots, 2 * rank, hidden, dtype=dtype)
    b = torch.empty(slots, rank, 2 * inner, dtype=dtype)
    ints = torch.zeros(slots, dtype=torch.int32)
    matrices = lora.AdapterMatrices(a, b, ints, (inner, 2 * inner))
    for count in counts:
        tiles = lora.RowTiles.of(count, slots, 3 * rank, torch.device("cpu")).of_first(count)
        tiles.arrange(ints, ints)
        x = torch.empty(count, hidden, dtype=dtype)
        lora.shrink(x, matrices, tiles)
        if dtype == torch.bfloat16:
            scales = torch.empty(count, 1)
            lora.shrink(Quantised(x.to(torch.float8_e4m3fn), scales), matrices, tiles)
        gate_up, act = (torch.empty(count, n * inner, dtype=dtype) for n in (2, 1))
        lora.expand(matrices, tiles, gate_up)
        lora.expand_silu(matrices, tiles, gate_up, act)


def launch_linear_attention(dtype: torch.dtype) -> None:
    """Of Qwen3.5-35B-A3B."""
    from twolane.kernels import fused
    from twolane.kernels.delta_rule.convolution import PromptStates
    from twolane.kernels.delta_rule.decode import LinearLayer, decode_step
    from twolane.kernels.delta_rule.prefill import CHUNK, PromptRoom, prompt_pass
    from twolane.kernels.delta_rule.rule import DeltaRule

    fused._early = lambda device: True  # as on Hopper

    delta = DeltaRule(16, 32, 128, 128, 4)
    wide, solved = torch.empty(delta.value_heads), delta.value_heads * CHUNK
    taps, norm = torch.empty(4, delta.mixed_size, dtype=dtype).t(), torch.empty(128, dtype=dtype)
    parameters = SimpleNamespace(conv=taps, decay=wide, shift=wide, norm=norm)
    states = torch.empty(2, 3, delta.mixed_size, dtype=dtype), torch.empty(2, 32, 128, 128)
    layer = LinearLayer(parameters, delta, *states, 1e-6)
    widths = delta.projected, 64, delta.mixed_size, delta.value_size, solved, solved
    x, rates, mixed, out, *rest = (torch.empty(2, width, dtype=dtype) for width in widths)
    ints = torch.zeros(2, dtype=torch.int32)
    for units in (32, 132):
        decode_step(x, rates, layer, ints, ints, mixed, out, units)
    room = PromptRoom(mixed, *rest, torch.empty(2, 32))
    prompts = PromptStates(torch.zeros(2, 6, dtype=torch.int32), ints.view(1, 2))
    prompt_pass(x, rates, layer, [prompts], room, out)


def launch_convolution(dtype: torch.dtype) -> None:
    """Of LFM2-1.2B."""
    from twolane.kernels.delta_rule.convolution import PromptStates
    from twolane.kernels.short_convolution import convolve_prompts, convolve_step

    x, out = (torch.empty(2, n, dtype=dtype) for n in (3 * 2048, 2048))
    taps, kept = torch.empty(3, 2048, dtype=dtype).t(), torch.empty(2, 2, 2048, dtype=dtype)
    ints = torch.zeros(2, dtype=torch.int32)
    convolve_step(x, taps, kept, ints, ints, out)
    prompts = PromptStates(torch.zeros(2, 6, dtype=torch.int32), ints.view(1, 2))
    convolve_prompts(x, taps, kept, [prompts], out)


if __name__ == "__main__":
    JITFunction.run = compile_instead
    launch_prefill(torch.bfloat16, 128)
    launch_gather(torch.bfloat16)
    launch_widening()
    launch_routing(torch.bfloat16)
    if "--full" in sys.argv:
        launch_fused(torch.bfloat16)
        launch_linear_attention(torch.bfloat16)
        launch_convolution(torch.bfloat16)
        launch_lora(torch.bfloat16, 16, (64,))
        launch_sampler(torch.bfloat16, 151_936, 1024)
        launch_grouped(torch.float8_e4m3fn)
        launch_grouped(torch.uint8)
        launch_fused(torch.float32)
        launch_rounded(torch.bfloat16)
        launch_lora(torch.bfloat16, 16, (1024, 8192))
        launch_lora(torch.bfloat16, 64, (64, 8192))
        launch_lora(torch.float32, 16, (64, 1024))
        launch_prefill(torch.float32, 128)
        launch_prefill(torch.bfloat16, 64)
        launch_prefill(torch.float16, 128, window=4096)
        launch_sampler(torch.bfloat16, 1000, 1024)  # one chunk is a case of its own
        for dtype in (torch.float32, torch.bfloat16):
            launch_sampler(dtype, 151_936, 8192)
