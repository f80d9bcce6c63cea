"""A memory checker for interpreted Triton kernels: every address of every load, store and atomic is looked at.

    with guard() as watch:
        watch.poison(k_cache, unused)     # elements that nobody may read before they are stored
        wrapper(...)
    assert not watch.findings

Found are: accesses out of the bounds of the tensor that the pointer came from, misaligned addresses, reads of poisoned
elements, two programs storing different values to one element, a program reading what another stored (or storing what
another read) in the same launch, and lanes of one store that disagree. A GPU would give no answer or a random one.
"""

from __future__ import annotations

import contextlib
import ctypes
import inspect
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter as triton_interpreter

from octavo.kernels.interpreter import to_float32

_Builder = triton_interpreter.InterpreterBuilder
_Handle = triton_interpreter.TensorHandle
_NOBODY = 0
_MOST_FINDINGS = 50


@dataclass(frozen=True)
class Finding:
    """One fault: what, in which kernel and program, at which tensor argument."""

    kind: str
    kernel: str
    program: tuple[int, ...]
    tensor: str
    detail: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.kernel} program {self.program}: {self.tensor}: {self.detail}"


class _Region:
    """The extent of a tensor argument in memory, with a shadow cell per element."""

    def __init__(self, name: str, tensor: torch.Tensor):
        steps = zip(tensor.shape, tensor.stride(), strict=True)
        self.name, self.element_size = name, tensor.element_size()
        self.shape = tuple(tensor.shape)
        self.num_elements = 1 + sum((size - 1) * stride for size, stride in steps)
        self.low = tensor.data_ptr()
        self.high = self.low + self.num_elements * self.element_size
        # zeros take no memory until they are touched, so that even a huge tensor can be watched
        self.writer = np.zeros(self.num_elements, np.int32)  # last program to store
        self.reader = np.zeros(self.num_elements, np.int32)  # last program to load
        self.poisoned = np.zeros(self.num_elements, np.bool_)

    def memory(self) -> np.ndarray:
        """The elements as unsigned integers; the launch keeps the tensor alive."""
        extent = (ctypes.c_char * (self.num_elements * self.element_size)).from_address(self.low)
        return np.frombuffer(extent, dtype=f"u{self.element_size}")


def _equal_up_to_rounding(a: np.ndarray, b: np.ndarray, dtype: tl.dtype) -> bool:
    """Whether raw bits are equal, or differ by no more than two orders of the same sum can."""
    if not dtype.is_floating():
        return bool((a == b).all())
    if dtype.primitive_bitwidth < 32 and dtype != tl.float16:
        a, b = to_float32(a, dtype), to_float32(b, dtype)
    else:
        a, b = (bits.view(triton_interpreter._get_np_dtype(dtype)) for bits in (a, b))
    tolerance = 2.0**-7 if dtype.primitive_bitwidth < 32 else 1e-4
    return np.allclose(
        a.astype(np.float64), b.astype(np.float64), rtol=tolerance, atol=1e-6, equal_nan=True
    )


class Guard:
    """Watches the launches made while it is in force; `findings` stays empty when all is well."""

    def __init__(self) -> None:
        self.findings: list[Finding] = []
        self.launches = 0
        self._poison: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._regions: list[_Region] = []
        self._kernel = ""

    def poison(self, tensor: torch.Tensor, where: torch.Tensor) -> None:
        """Forbid reading the elements of `tensor` where the boolean `where`, of its shape, is True."""
        self._poison.append((tensor, where))

    def begin(self, kernel: str, arguments: dict[str, object]) -> None:
        """Start a launch with these arguments."""
        self.launches += 1
        self._kernel = kernel
        tensors = {n: t for n, t in arguments.items() if isinstance(t, torch.Tensor) and t.numel()}
        self._regions = [_Region(name, tensor) for name, tensor in tensors.items()]
        for tensor, where in self._poison:
            offset = torch.zeros((), dtype=torch.int64)
            for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
                offset = offset.unsqueeze(-1) + torch.arange(size) * stride
            addresses = tensor.data_ptr() + offset[where].numpy() * tensor.element_size()
            for region in self._regions:
                inside = addresses[(addresses >= region.low) & (addresses < region.high)]
                region.poisoned[(inside - region.low) // region.element_size] = True

    def region_of(self, tensor: torch.Tensor) -> _Region | None:
        """The region of a tensor argument of this launch."""
        for region in self._regions:
            if region.low == tensor.data_ptr() and region.shape == tuple(tensor.shape):
                return region
        return None

    def check(self, pointers, mask: np.ndarray, access: str, value=None) -> np.ndarray:
        """Look at one access, [lanes]; returns the mask of lanes that may touch memory."""
        region = pointers.attr.get("region")
        lanes = np.broadcast_to(mask, pointers.data.shape)
        if region is None or not lanes.any():
            return mask
        addresses = np.ascontiguousarray(pointers.data).astype(np.int64)
        width = max(1, pointers.get_element_ty().primitive_bitwidth // 8)
        inside = lanes & (addresses >= region.low) & (addresses + width <= region.high)
        outside = lanes & ~inside
        if outside.any():
            element = (int(addresses[outside][0]) - region.low) // region.element_size
            self._report(
                f"{access} out of bounds",
                region,
                f"{outside.sum()} lanes, the first at element {element} of {region.num_elements}",
            )
        offsets = addresses[inside] - region.low
        if width != region.element_size or not len(offsets):
            return inside
        if (offsets % width).any():
            self._report(f"misaligned {access}", region, f"byte {offsets[offsets % width != 0][0]}")
        elif access == "load":
            self._loaded(region, offsets // width)
        elif access == "store":
            stored = np.broadcast_to(value.data, inside.shape)[inside]
            bits = np.ascontiguousarray(stored).view(f"u{stored.dtype.itemsize}")
            self._stored(region, offsets // width, bits, value.dtype.scalar)
        return inside

    def _loaded(self, region: _Region, elements: np.ndarray) -> None:
        program = self._program()
        self._report_first(
            "read of a poisoned element", region, elements, region.poisoned[elements]
        )
        writer = region.writer[elements]
        foreign = (writer != _NOBODY) & (writer != program)
        self._report_first("read of another program's store", region, elements, foreign)
        region.reader[elements] = program

    def _stored(self, region, elements: np.ndarray, bits: np.ndarray, dtype: tl.dtype) -> None:
        program = self._program()
        writer, reader = region.writer[elements], region.reader[elements]
        foreign = (writer != _NOBODY) & (writer != program)
        if foreign.any():
            there = region.memory()[elements[foreign]]
            if not _equal_up_to_rounding(there, bits[foreign], dtype):
                self._report_first("two programs store one element", region, elements, foreign)
        foreign = (reader != _NOBODY) & (reader != program)
        self._report_first("store to what another program read", region, elements, foreign)
        unique, first, inverse = np.unique(elements, return_index=True, return_inverse=True)
        if len(unique) < len(elements):
            self._report_first(
                "lanes of one store disagree", region, elements, bits != bits[first][inverse]
            )
        region.writer[elements] = program
        region.poisoned[elements] = False

    def _report_first(self, kind, region, elements: np.ndarray, faulty: np.ndarray) -> None:
        if faulty.any():
            self._report(kind, region, f"element {elements[faulty][0]}")

    def _report(self, kind: str, region: _Region, detail: str) -> None:
        if len(self.findings) < _MOST_FINDINGS:
            program = tuple(triton_interpreter.interpreter_builder.grid_idx)
            self.findings.append(Finding(kind, self._kernel, program, region.name, detail))

    def _program(self) -> int:
        """The running program's number, from 1."""
        x, y, z = triton_interpreter.interpreter_builder.grid_idx
        _, size_y, size_z = triton_interpreter.interpreter_builder.grid_dim
        return 1 + (x * size_y + y) * size_z + z


_in_force: list[Guard] = []
_hooked = False


@contextlib.contextmanager
def guard() -> Iterator[Guard]:
    """Watch the interpreted launches of the block."""
    _hook()
    watch = Guard()
    _in_force.append(watch)
    try:
        yield watch
    finally:
        _in_force.pop()


def _hook() -> None:
    """Put the guard's eyes into the interpreter, once per process."""
    global _hooked
    if _hooked:
        return
    _hooked = True
    _hook_launches()
    _hook_accesses()
    # what is made from a pointer keeps the region the pointer came from
    for name, argument in (
        ("create_addptr", 0),
        ("create_splat", 1),
        ("create_broadcast", 0),
        ("create_expand_dims", 0),
        ("create_reshape", 0),
        ("create_trans", 0),
        ("create_bitcast", 0),
        ("create_unsplat", 0),
    ):
        if hasattr(_Builder, name):
            _hook_derivation(name, argument)


def _hook_launches() -> None:
    call, convert = triton_interpreter.GridExecutor.__call__, triton_interpreter._implicit_cvt

    def watched_call(self, *args, **kwargs):
        if _in_force:
            names = inspect.signature(self.fn).parameters
            _in_force[-1].begin(
                self.fn.__name__, {**dict(zip(names, args, strict=False)), **kwargs}
            )
        return call(self, *args, **kwargs)

    def watched_convert(argument):
        result = convert(argument)
        if _in_force and isinstance(argument, torch.Tensor):
            region = _in_force[-1].region_of(argument)
            if region is not None:
                result.handle.attr["region"] = region
        return result

    triton_interpreter.GridExecutor.__call__ = watched_call
    triton_interpreter._implicit_cvt = watched_convert


def _hook_accesses() -> None:
    load, store = _Builder.create_masked_load, _Builder.create_masked_store
    atomic = _Builder.create_atomic_rmw

    def allowed(pointers, mask, access, value=None):
        lanes = _in_force[-1].check(pointers, mask.data, access, value)
        return _Handle(np.ascontiguousarray(lanes), tl.int1)

    def watched_load(self, pointers, mask, *rest, **keywords):
        if _in_force:
            mask = allowed(pointers, mask, "load")
        return load(self, pointers, mask, *rest, **keywords)

    def watched_store(self, pointers, value, mask, *rest, **keywords):
        if _in_force:
            mask = allowed(pointers, mask, "store", value)
        return store(self, pointers, value, mask, *rest, **keywords)

    def watched_atomic(self, operation, pointers, value, mask, *rest, **keywords):
        if _in_force:
            mask = allowed(pointers, mask, "atomic")
        return atomic(self, operation, pointers, value, mask, *rest, **keywords)

    _Builder.create_masked_load, _Builder.create_masked_store = watched_load, watched_store
    _Builder.create_atomic_rmw = watched_atomic


def _hook_derivation(name: str, argument: int) -> None:
    create = getattr(_Builder, name)

    def derive(self, *args, **kwargs):
        result = create(self, *args, **kwargs)
        source = args[argument]
        if isinstance(source, _Handle) and isinstance(result, _Handle) and "region" in source.attr:
            result.attr["region"] = source.attr["region"]
        return result

    setattr(_Builder, name, derive)
