"""Where a stream's work really runs: the %smid of every program of a probe."""

import torch
import triton
import triton.language as tl

PROGRAMS_PER_SM = 64


@triton.jit
def _where(out: tl.tensor, spins: tl.tensor) -> None:
    """Write the SM that this program runs on, after some work, so that all SMs get a share."""
    pid = tl.program_id(0)
    sm = tl.inline_asm_elementwise(
        "mov.u32 $0, %smid;", "=r,r", [pid], dtype=tl.int32, is_pure=False, pack=1
    )
    x = pid
    for _ in range(spins):
        x = tl.inline_asm_elementwise(
            "{ .reg .b32 t; mov.u32 t, %clock; xor.b32 $0, $1, t; }",
            "=r,r",
            [x],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
    tl.store(out + pid, tl.where(x == -1, sm, sm))


def sms_of(stream: torch.cuda.Stream, units: int) -> frozenset[int]:
    """The SMs that work on this stream was seen on; blocks until it has run."""
    programs = PROGRAMS_PER_SM * units
    with torch.cuda.stream(stream):
        out = torch.full((programs,), -1, dtype=torch.int32, device="cuda")
        _where[programs,](out, 2000)
    stream.synchronize()
    return frozenset(out.tolist())
