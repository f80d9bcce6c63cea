"""The repaired interpreter computes as a GPU does, and the memory guard sees planted faults."""

from __future__ import annotations

import pytest
import torch

if torch.cuda.is_available():
    pytest.skip("the interpreter runs where there is no GPU", allow_module_level=True)

import triton
import triton.language as tl
from triton.runtime.errors import InterpreterError

from octavo.kernels import interpreter
from octavo.tests.interpreter_guard import guard


@triton.jit
def _dot_kernel(out_ptr, a_ptr, b_ptr, SIZE: tl.constexpr):
    rows, columns = tl.arange(0, SIZE)[:, None] * SIZE, tl.arange(0, SIZE)[None, :]
    a = tl.load(a_ptr + rows + columns)
    b = tl.load(b_ptr + rows + columns)
    tl.store(out_ptr + rows + columns, tl.dot(a, b))


@triton.jit
def _arithmetic_kernel(out_ptr, a_ptr, b_ptr, SIZE: tl.constexpr):
    items = tl.arange(0, SIZE)
    a = tl.load(a_ptr + items)
    b = tl.load(b_ptr + items)
    tl.store(out_ptr + items, tl.where(a < b, a * b + a, a - b))


@triton.jit
def _cast_kernel(out_ptr, x_ptr, SIZE: tl.constexpr):
    items = tl.arange(0, SIZE)
    tl.store(out_ptr + items, tl.load(x_ptr + items).to(out_ptr.dtype.element_ty))


@triton.jit
def _assert_kernel(x_ptr):
    tl.device_assert(tl.load(x_ptr) > 0, "not positive")


@triton.jit
def _shifted_copy_kernel(out_ptr, x_ptr, shift, SIZE: tl.constexpr):
    items = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    tl.store(out_ptr + items, tl.load(x_ptr + items + shift))


@triton.jit
def _same_place_kernel(out_ptr, BY_PROGRAM: tl.constexpr):
    program = tl.program_id(0)
    tl.store(out_ptr, program if BY_PROGRAM else program * 0)


@triton.jit
def _neighbour_kernel(out_ptr):
    program = tl.program_id(0)
    tl.store(out_ptr + program, tl.load(out_ptr + program + 1))


def test_install_twice_is_install_once() -> None:
    before = interpreter._Builder.create_dot
    interpreter.install()
    assert interpreter._Builder.create_dot is before


def test_bf16_dot() -> None:
    a, b = torch.randn(16, 16).bfloat16(), torch.randn(16, 16).bfloat16()
    out = torch.empty(16, 16)
    _dot_kernel[(1,)](out, a, b, SIZE=16)
    torch.testing.assert_close(out, a.float() @ b.float())


def test_bf16_arithmetic_rounds_after_each_operation() -> None:
    a, b, out = torch.randn(64).bfloat16(), torch.randn(64).bfloat16(), torch.empty(64).bfloat16()
    _arithmetic_kernel[(1,)](out, a, b, SIZE=64)
    torch.testing.assert_close(out, torch.where(a < b, a * b + a, a - b), rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_casts_round_to_nearest_even_and_fp8_saturates(dtype) -> None:
    x = torch.cat([torch.randn(60), torch.tensor([1.97, 7.9, 500.0, -1e6])])
    out, back = torch.empty(64).to(dtype), torch.empty(64)
    _cast_kernel[(1,)](out, x, SIZE=64)
    limit = torch.finfo(dtype).max
    torch.testing.assert_close(
        out.float(), x.clamp(-limit, limit).to(dtype).float(), rtol=0, atol=0
    )
    _cast_kernel[(1,)](back, out, SIZE=64)
    torch.testing.assert_close(back, out.float(), rtol=0, atol=0)


def test_device_assert_fires() -> None:
    _assert_kernel[(1,)](torch.ones(1))
    with pytest.raises(InterpreterError, match="not positive"):
        _assert_kernel[(1,)](torch.zeros(1))


@pytest.mark.parametrize("shift", [-1, 1])
def test_guard_sees_out_of_bounds(shift) -> None:
    out, x = (
        torch.zeros(16),
        torch.arange(64.0)[16:32],
    )  # memory before and after x is there, but not x's
    with guard() as watch:
        _shifted_copy_kernel[(2,)](out, x, shift, SIZE=8)
    assert [(f.kind, f.tensor) for f in watch.findings] == [("load out of bounds", "x_ptr")]


def test_guard_sees_reads_of_poison() -> None:
    out, x = torch.zeros(16), torch.zeros(16)
    with guard() as watch:
        watch.poison(x, torch.arange(16) == 11)
        _shifted_copy_kernel[(2,)](out, x, 0, SIZE=8)
    assert [(f.kind, f.program) for f in watch.findings] == [
        ("read of a poisoned element", (1, 0, 0))
    ]


@pytest.mark.parametrize("by_program", [False, True])
def test_guard_sees_programs_that_store_different_values(by_program) -> None:
    with guard() as watch:
        _same_place_kernel[(2,)](torch.zeros(1, dtype=torch.int32), BY_PROGRAM=by_program)
    assert len(watch.findings) == int(by_program)


def test_guard_sees_races() -> None:
    with guard() as watch:
        _neighbour_kernel[(3,)](torch.zeros(4))
    assert {f.kind for f in watch.findings} == {"store to what another program read"}
    assert watch.launches == 1
