"""The CUDA C++ of decode attention, its instructions acted out on the CPU.

See decode_attention_host.cc. benchmarks/gpu/decode_attention.py checks the same on a GPU.
"""

import ctypes
import functools
from dataclasses import replace

import pytest
import torch

from tests.kernels import on_host
from tests.kernels.test_decode_attention import TOLERANCE, Case
from twolane.kernels.decode_attention import cuda_kernels as hopper
from twolane.kernels.decode_attention.dispatch import decode_scratch
from twolane.kernels.pool import RoundedPool, exponents_of, values_of

pytestmark = on_host.needs_compiler


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory):
    folder = tmp_path_factory.mktemp("host")

    @functools.cache
    def build(options: tuple[str, ...], source: str = hopper.source()) -> ctypes.CDLL:
        return on_host.build("decode_attention_host.cc", source, options, folder)

    return build


def run(build, case: Case, units: int, tuned: hopper.Tuning, window: int | None, seed: int):
    """What the kernel writes, and its bank conflicts."""
    out, scratch = torch.full_like(case.q, 7.0), decode_scratch(*case.q.shape, units, "cpu")
    scratch.partial.fill_(torch.nan)
    values, rounded = values_of(case.pool), isinstance(case.pool, RoundedPool)
    group = case.q.shape[1] // values.shape[1]
    shape = case.q.shape[2], values.shape[3], group
    options = hopper.options(case.q.dtype, *shape, tuned, rounded, case.sinks is not None)
    arguments = hopper.arguments(
        *(case.q, values.shape[1], case.tables, case.slots, case.lengths, out),
        *(scratch.partial, scratch.cuts),
        window=window or 1 << 30,
        scale=case.q.shape[2] ** -0.5,
        exponents=exponents_of(case.pool),
        sinks=case.sinks,
    )
    pool = ctypes.c_void_p(values.data_ptr())
    rows = ctypes.c_ulonglong(values.numel() // case.q.shape[2])
    conflicts = ctypes.c_ulonglong()
    fault = build(options).run(
        pool, rows, ctypes.byref(arguments), units, seed, ctypes.byref(conflicts)
    )
    assert fault is None, fault
    return out, conflicts.value


RAGGED = [5, 1, 160, 0, 31, 32, 70]


@pytest.mark.parametrize(
    ("dim", "page", "group", "tuned"),
    [
        (128, 32, 4, hopper.Tuning(2, 3)),
        pytest.param(128, 16, 5, hopper.Tuning(2, 2), marks=pytest.mark.full),
        pytest.param(128, 64, 3, hopper.Tuning(3, 3), marks=pytest.mark.full),
        (128, 32, 16, hopper.Tuning(1, 4)),
        pytest.param(64, 32, 7, hopper.Tuning(2, 3), marks=pytest.mark.full),
        pytest.param(64, 16, 1, hopper.Tuning(2, 4), marks=pytest.mark.full),
        pytest.param(64, 64, 8, hopper.Tuning(3, 2), marks=pytest.mark.full),
        pytest.param(64, 16, 9, hopper.Tuning(1, 3), marks=pytest.mark.full),
    ],
)
@pytest.mark.parametrize(
    ("lengths", "units", "window"),
    [(RAGGED, 1, None), ([300, 0, 33], 3, None), ([200, 5], 2, 70), ([0, 0], 1, None)],
)
def test_against_a_reference(build, dim, page, group, tuned, lengths, units, window) -> None:
    dtype = torch.bfloat16 if group % 2 else torch.float16
    case = Case.make(lengths, group=group, dim=dim, page=page, dtype=dtype)
    out, conflicts = run(build, case, units, tuned, window, seed=1)
    expected = case.reference(window)
    error = (out.float() - expected).norm(dim=-1) / expected.norm(dim=-1)
    assert error.max() < TOLERANCE[dtype], error.max(dim=1)
    assert (out[case.lengths == 0] == 7).all()
    assert conflicts == 0


@pytest.mark.parametrize(
    ("page", "group", "tuned"),
    [
        (32, 4, hopper.Tuning(2, 3)),
        pytest.param(16, 5, hopper.Tuning(2, 2), marks=pytest.mark.full),
        pytest.param(64, 9, hopper.Tuning(3, 2), marks=pytest.mark.full),
    ],
)
@pytest.mark.parametrize(
    ("lengths", "units", "window"),
    [(RAGGED, 1, None), ([300, 0, 33], 3, None), ([200, 5], 2, 70), ([0, 0], 1, None)],
)
def test_rounded_pools(build, page, group, tuned, lengths, units, window) -> None:
    """Keys and values of very different size, beside what was never written."""
    dtype = torch.bfloat16 if group % 2 else torch.float16
    case = Case.make(lengths, group=group, dim=128, page=page, dtype=dtype)
    sizes = torch.tensor([1.0, 0.02, 3.0, 1e-4])[torch.arange(page) % 4]
    case = replace(case, pool=case.pool * sizes[:, None].to(dtype)).rounded()
    out, conflicts = run(build, case, units, tuned, window, seed=1)
    expected = case.reference(window)
    error = (out.float() - expected).norm(dim=-1) / expected.norm(dim=-1)
    assert error.max() < TOLERANCE[dtype], error.max(dim=1)
    assert (out[case.lengths == 0] == 7).all()
    assert conflicts == 0


@pytest.mark.parametrize(
    ("dim", "group", "rounded"),
    [(64, 8, False), pytest.param(128, 9, False, marks=pytest.mark.full), (128, 5, True)],
)
def test_sinks(build, dim, group, rounded) -> None:
    """Of whole runs and of runs that several workers share."""
    case = Case.make([300, 0, 33], group=group, dim=dim, page=32, dtype=torch.bfloat16)
    case = (case.rounded() if rounded else case).with_sinks()
    out, _ = run(build, case, 3, hopper.Tuning(2, 3), None, seed=1)
    expected = case.reference()
    error = (out.float() - expected).norm(dim=-1) / expected.norm(dim=-1)
    assert error.max() < TOLERANCE[torch.bfloat16], error.max(dim=1)


@pytest.mark.parametrize("rounded", [False, pytest.param(True, marks=pytest.mark.full)])
def test_order_of_arrival_does_not_matter(build, rounded: bool) -> None:
    case = Case.make([400, 90], dim=128, page=32, dtype=torch.bfloat16)
    case = case.rounded() if rounded else case
    outs = [run(build, case, 4, hopper.Tuning(2, 3), None, seed)[0] for seed in range(3)]
    assert torch.equal(outs[0], outs[1]) and torch.equal(outs[0], outs[2])


def test_the_workers_of_one_run_are_combined(build) -> None:
    """A single short row over many more workers than it has tiles."""
    case = Case.make([70], dim=128, page=32, dtype=torch.bfloat16)
    out, _ = run(build, case, 5, hopper.Tuning(8, 3), None, seed=0)
    expected = case.reference()
    assert ((out.float() - expected).norm() / expected.norm()) < TOLERANCE[torch.bfloat16]


IDLE = "        wait_for_previous();\n        if (lane == 0)"  # of workers without work
WAITS = (
    IDLE,
    "if (at.end - at.tile <= (STAGES + 1) / 2) wait_for_previous();",
    "    wait_for_previous();\n    if (lane == 0)",
    "    let_next_start();\n    wait_for_previous();",
)


@pytest.mark.parametrize(
    "wait", [*WAITS[:1], *(pytest.param(wait, marks=pytest.mark.full) for wait in WAITS[1:])]
)
def test_a_missing_wait_for_the_kernel_in_front_is_seen(build, wait: str) -> None:
    source = hopper.source()
    assert source.count(wait) == 1
    broken = source.replace(wait, wait.replace("wait_for_previous();", ";"))
    lengths, units = ([300, 64, 0, 40], 3) if wait != IDLE else ([1], 20)
    case = Case.make(lengths, dim=128, page=32, dtype=torch.bfloat16)
    with pytest.raises(AssertionError, match=r"front|pass it"):
        run(lambda options: build(options, broken), case, units, hopper.Tuning(2, 2), None, seed=0)
