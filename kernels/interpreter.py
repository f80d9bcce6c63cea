"""Repairs of Triton's CPU interpreter: right bf16 and fp8 arithmetic, and several times the speed.

The interpreter (TRITON_INTERPRET=1) runs a kernel with NumPy, one program at a time. As shipped it keeps bf16 and fp8 as
raw bits and computes on the bits: `tl.dot` of bf16 is off by orders of magnitude, casts truncate instead of rounding to
nearest even, an fp8 cast loses carries, and `tl.device_assert` never fires. Half its time goes into patching
`triton.language` anew for every nested call. `install()` mends all of this, for Triton 3.6 and later. Triton reads
TRITON_INTERPRET when a kernel is decorated: set it before the first kernel file is imported.
"""

from __future__ import annotations

import dataclasses
import inspect

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter as _interpreter

_Builder = _interpreter.InterpreterBuilder
_Handle = _interpreter.TensorHandle
_installed = False


def install() -> None:
    """Patch the interpreter of this process; calling it again does nothing."""
    global _installed
    if not _installed:
        _installed = True
        fast()
        exact()


# ---------------------------------------------------------------- speed


class _NothingToRestore:
    def restore(self) -> None:
        pass


class _LaunchPatches:
    """Patches `triton.language` once per launch, where Triton does it once per call of a nested @jit function."""

    def __init__(self, patch_lang, call_grid):
        self.patch_lang, self.call_grid = patch_lang, call_grid
        self.depth = 0  # launches under way; a kernel may not launch another, but a wrapper may be re-entered
        self.scopes = []  # what to undo when the outermost launch ends
        self.patched = set()
        self.languages = {}  # function -> the Triton modules its globals name

    def patch(self, fn):
        languages = self.languages.get(fn)
        if languages is None:
            values = fn.__globals__.values()
            languages = {id(v) for v in values if inspect.ismodule(v) and v in (tl, tl.core)}
            self.languages[fn] = languages
        if self.depth and languages <= self.patched:
            return _NothingToRestore()
        scope = self.patch_lang(fn)
        if not self.depth:
            return scope
        self.patched |= languages
        self.scopes.append(scope)
        return _NothingToRestore()

    def call(self, executor, *args, **kwargs):
        self.depth += 1
        try:
            return self.call_grid(executor, *args, **kwargs)
        finally:
            self.depth -= 1
            if not self.depth:
                while self.scopes:
                    self.scopes.pop().restore()
                self.patched.clear()


def fast() -> None:
    """Remove repeated work: the patching per nested call and the dtype table rebuilt per operation."""
    patches = _LaunchPatches(_interpreter._patch_lang, _interpreter.GridExecutor.__call__)
    _interpreter._patch_lang = patches.patch
    _interpreter.GridExecutor.__call__ = lambda self, *args, **kwargs: patches.call(
        self, *args, **kwargs
    )

    numpy_dtype, known = _interpreter._get_np_dtype, {}

    def cached_numpy_dtype(dtype):
        if isinstance(dtype, tl.pointer_type | tl.block_type):
            return numpy_dtype(dtype)
        if dtype not in known:
            known[dtype] = numpy_dtype(dtype)
        return known[dtype]

    _interpreter._get_np_dtype = cached_numpy_dtype

    patch_tensor = _interpreter._patch_lang_tensor

    def patch_tensor_index(tensor, scope):
        # Triton 3.6 converts one-element arrays with int(), which NumPy 2.4 accepts for 0-d arrays only
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.squeeze()))

    _interpreter._patch_lang_tensor = patch_tensor_index


# ---------------------------------------------------------------- arithmetic

# the formats that the interpreter keeps as raw bits
_TORCH_DTYPE = {
    tl.bfloat16: torch.bfloat16,
    tl.float8e4nv: torch.float8_e4m3fn,
    tl.float8e5: torch.float8_e5m2,
    tl.float8e4b8: torch.float8_e4m3fnuz,
    tl.float8e5b16: torch.float8_e5m2fnuz,
}


def to_float32(bits: np.ndarray, dtype: tl.dtype) -> np.ndarray:
    """Raw bits of a small format as float32."""
    signed = np.ascontiguousarray(bits.view(np.int16 if bits.itemsize == 2 else np.uint8))
    return torch.from_numpy(signed).view(_TORCH_DTYPE[dtype]).float().numpy().reshape(bits.shape)


def from_float32(values: np.ndarray, dtype: tl.dtype) -> np.ndarray:
    """float32 as raw bits, rounded to nearest even; fp8 saturates, as the GPU's conversion does."""
    tensor = torch.from_numpy(np.array(values, dtype=np.float32))
    if dtype == tl.bfloat16:
        return tensor.bfloat16().view(torch.int16).numpy().view(np.uint16)
    limit = torch.finfo(_TORCH_DTYPE[dtype]).max
    clamped = torch.where(tensor.isnan(), tensor, tensor.clamp(-limit, limit))
    return clamped.to(_TORCH_DTYPE[dtype]).view(torch.uint8).numpy()


def _widen(handle):
    dtype = handle.dtype.scalar
    return _Handle(to_float32(handle.data, dtype), tl.float32) if dtype in _TORCH_DTYPE else handle


def _narrow(handle, dtype):
    return _Handle(from_float32(handle.data, dtype), dtype)


def _in_float32(operation, num_operands: int):
    """`operation` on small formats: widen the operands, compute in float32, round the result once."""

    def wrapped(self, *args):
        operands, function = args[:num_operands], args[num_operands]
        small = [h.dtype.scalar for h in operands if h.dtype.scalar in _TORCH_DTYPE]
        if not small or function is np.where:  # a select moves bits
            return operation(self, *args)
        result = operation(self, *(_widen(h) for h in operands), function)
        if result.data.dtype == np.bool_:
            return _Handle(result.data, small[0])
        return _narrow(result, small[0])

    return wrapped


def _patch_casts() -> None:
    plain_cast, plain_fp_to_fp = _Builder.cast_impl, _Builder.create_fp_to_fp

    def cast(self, src, dst_type):
        source, target = src.dtype.scalar, dst_type.scalar
        if source == target:
            return src
        if source not in _TORCH_DTYPE and target not in _TORCH_DTYPE:
            return plain_cast(self, src, dst_type)
        src = _widen(src)
        if target in _TORCH_DTYPE:
            as_float = src if src.dtype.scalar == tl.float32 else plain_cast(self, src, tl.float32)
            return _narrow(as_float, target)
        return src if target == tl.float32 else plain_cast(self, src, dst_type)

    def fp_to_fp(self, src, dst_type, rounding_mode):
        pair = (src.dtype.scalar, dst_type.scalar)
        toward_zero = rounding_mode == _interpreter._ir.ROUNDING_MODE.RTZ
        if any(d in _TORCH_DTYPE for d in pair) and tl.float8e4b15 not in pair and not toward_zero:
            return cast(self, src, dst_type)
        return plain_fp_to_fp(self, src, dst_type, rounding_mode)

    _Builder.cast_impl, _Builder.create_fp_to_fp = cast, fp_to_fp
    for source, target in (("si", "fp"), ("ui", "fp"), ("fp", "si"), ("fp", "ui")):
        setattr(_Builder, f"create_{source}_to_{target}", cast)
    _Builder.create_fp_ext = _Builder.create_fp_trunc = cast


def exact() -> None:
    """Compute on bf16 and fp8 as a GPU does: in float32, rounded to nearest even. Let `device_assert` fire."""
    builder = _interpreter.interpreter_builder
    builder.options = dataclasses.replace(builder.options, debug=True)
    _patch_casts()
    for name, num_operands in (("unary_op", 1), ("binary_op", 2), ("ternary_op", 3)):
        setattr(_Builder, name, _in_float32(getattr(_Builder, name), num_operands))

    plain_dot, plain_sum = _Builder.create_dot, _interpreter.ReduceOps.sum

    def dot(self, a, b, d, *options, **keywords):
        return plain_dot(self, _widen(a), _widen(b), d, *options, **keywords)

    def reduce_sum(self, input):
        dtype = input.dtype.scalar
        if dtype not in _TORCH_DTYPE:
            return plain_sum(self, input)
        values = to_float32(input.handle.data, dtype)
        total = np.asarray(np.sum(values, axis=self.axis, keepdims=self.keep_dims))
        return self.to_tensor(from_float32(total, dtype), dtype)

    _Builder.create_dot, _interpreter.ReduceOps.sum = dot, reduce_sum
