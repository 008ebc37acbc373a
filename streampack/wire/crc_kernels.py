"""CRC32C by the processor's instructions, compiled by numba for ``sample_checksums.compiled``. Only for x86-64.

The crc32 instruction takes eight bytes and three cycles, and a processor begins one in each cycle. So three samples are
processed side by side, each from a different third of the bytes.

The checksum of two parts is an exclusive-or. One operand is the checksum of the first part, followed by a zero for
each byte of the second. The other is the checksum of the second part. Zeros multiply a checksum by a power of x. For up
to 64 KiB of zeros, two carry-less multiplications do this. See Gopal et al., "Fast CRC Computation for iSCSI Polynomial
Using CRC32 Instruction", Intel 2011. Their product has 63 bits. The crc32 instruction reduces it, and thereby
multiplies by x^33; the table of powers is divided by x^33 to make up for it.

Tests compare with ``sample_checksums.plain``; these functions do not run without numba.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numba
import numpy as np
from llvmlite import binding, ir
from numba import types
from numba.core import config
from numba.extending import intrinsic
from numpy.typing import NDArray

from streampack.core.jit import compiled
from streampack.core.model.samples import I64
from streampack.wire.checksums import Column, Crcs, crc32c

POLYNOMIAL = 0x82F63B78
"""Castagnoli's polynomial, bits reversed: bit 31 of a checksum is the coefficient of x^0."""
_ONE = 1 << 31
_START = np.uint64(0xFFFFFFFF)
_I64, _I32, _I8 = ir.IntType(64), ir.IntType(32), ir.IntType(8)
_PAIR = ir.VectorType(_I64, 2)


def runs_here() -> bool:
    """Return True if this processor has the instructions, numba may use them, and the result of a test is right.

    Call it before anything is compiled: LLVM ends the process at an instruction that its target lacks.
    """
    other_target = any(getattr(config, name, None) for name in ("CPU_NAME", "CPU_FEATURES", "DISABLE_JIT"))
    if other_target or binding.get_process_triple().split("-")[0] != "x86_64":
        return False
    features = binding.get_host_cpu_features()
    if not (features.get("sse4.2") and features.get("pclmul")):
        return False
    sample = np.arange(100, dtype=np.uint8)
    crcs, whole = crcs_of([(sample, np.array([0, 7, 7, 60, 100]))])
    return (whole, int(crcs[2])) == (crc32c(sample.data), crc32c(sample[7:60].data))


def crcs_of(columns: Sequence[Column]) -> Crcs:
    """Return the checksum of each sample, as ``sample_checksums.plain`` does, and the checksum of all columns.

    Raises:
        ValueError: The bounds are not those of a column.
    """
    crcs = np.zeros(len(columns[0][1]) - 1, np.uint32)
    own, whole = np.empty_like(crcs), 0
    for data, bounds in columns:
        if len(bounds) != len(crcs) + 1 or bounds[0] != 0 or bounds[-1] != len(data) or (np.diff(bounds) < 0).any():
            raise ValueError(
                f"got bounds of {len(bounds) - 1} samples from byte {bounds[0]} to byte {bounds[-1]}, expected "
                f"{len(crcs)} samples in {len(data)} bytes, with ascending bounds"
            )
        view = data.view()
        view.flags.writeable = False  # always read-only, so that one signature is compiled
        _pieces(view, bounds, own)
        whole = _join_all(own, bounds, crcs, whole, _POWERS)
    return crcs, int(whole)


def joined(crc: int, following: int, num_bytes: int) -> int:
    """Return the checksum of two parts; ``crc`` belongs to the first part, ``following`` to the second part.

    ``num_bytes`` are the bytes of the second part.
    """
    return int(_shifted(np.uint64(crc), num_bytes, _POWERS)) ^ following


def _code_of_crc_word(_: Any, crc: Any, word: Any) -> Any:
    """Return the type and the code of a function that adds eight bytes to a checksum."""

    def generate_code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        """Emit the LLVM instructions of the function, and return its value."""
        kind = ir.FunctionType(_I64, [_I64, _I64])
        return builder.call(builder.module.declare_intrinsic("llvm.x86.sse42.crc32.64.64", fnty=kind), args)

    return types.uint64(types.uint64, types.uint64), generate_code


def _code_of_crc_byte(_: Any, crc: Any, byte: Any) -> Any:
    """Return the type and the code of a function that adds one byte to a checksum."""

    def generate_code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        """Emit the LLVM instructions of the function, and return its value."""
        kind = ir.FunctionType(_I32, [_I32, _I8])
        step = builder.module.declare_intrinsic("llvm.x86.sse42.crc32.32.8", fnty=kind)
        return builder.zext(builder.call(step, [builder.trunc(args[0], _I32), args[1]]), _I64)

    return types.uint64(types.uint64, types.uint8), generate_code


def _code_of_multiply(_: Any, left: Any, right: Any) -> Any:
    """Return the type and the code of a function that gives the low 64 bits of a carry-less product."""

    def generate_code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        """Emit the LLVM instructions of the function, and return its value."""
        kind, first = ir.FunctionType(_PAIR, [_PAIR, _PAIR, _I8]), ir.Constant(_I32, 0)
        pairs = [builder.insert_element(ir.Constant(_PAIR, [0, 0]), arg, first) for arg in args]
        product = builder.module.declare_intrinsic("llvm.x86.pclmulqdq", fnty=kind)
        return builder.extract_element(builder.call(product, [*pairs, ir.Constant(_I8, 0)]), first)

    return types.uint64(types.uint64, types.uint64), generate_code


def _code_of_word(_: Any, address: Any) -> Any:
    """Return the type and the code of a function that reads eight bytes at any address."""

    def generate_code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        """Emit the LLVM instructions of the function, and return its value."""
        return builder.load(builder.inttoptr(args[0], _I64.as_pointer()), align=1)

    return types.uint64(types.uint64), generate_code


_crc_word: Any = intrinsic(_code_of_crc_word)
_crc_byte: Any = intrinsic(_code_of_crc_byte)
_multiply: Any = intrinsic(_code_of_multiply)
_word: Any = intrinsic(_code_of_word)


@numba.njit(inline="always")
def _rest(data: NDArray[np.uint8], begin: int, end: int, crc: Any) -> Any:
    """Return the checksum of a sample after its last bytes, fewer than eight; ``crc`` is the state before them."""
    for at in range(begin, end):
        crc = _crc_byte(crc, data[at])
    return crc ^ _START


@numba.njit(inline="always")
def _third(bounds: I64, number: int) -> int:
    """Return the first sample of the ``number``-th third of the bytes, counting from 0."""
    sample, last = 0, len(bounds) - 1
    while sample < last and bounds[sample] < bounds[last] // 3 * number:
        sample += 1
    return sample


@compiled
def _pieces(data: NDArray[np.uint8], bounds: I64, crcs: NDArray[np.uint32]) -> None:
    """Write the checksum of every piece ``bounds[i]:bounds[i + 1]`` of ``data`` to ``crcs``."""
    base = np.uint64(data.ctypes.data)
    a, b, c = 0, _third(bounds, 1), _third(bounds, 2)
    end_a, end_b, end_c = b, c, len(crcs)
    at_a, at_b, at_c = bounds[a], bounds[b], bounds[c]
    crc_a = crc_b = crc_c = _START
    while a < end_a and b < end_b and c < end_c:
        words = min(bounds[a + 1] - at_a, bounds[b + 1] - at_b, bounds[c + 1] - at_c) >> 3
        from_a, from_b, from_c = base + np.uint64(at_a), base + np.uint64(at_b), base + np.uint64(at_c)
        for k in range(words):
            step = np.uint64(8 * k)
            crc_a = _crc_word(crc_a, _word(from_a + step))
            crc_b = _crc_word(crc_b, _word(from_b + step))
            crc_c = _crc_word(crc_c, _word(from_c + step))
        at_a, at_b, at_c = at_a + 8 * words, at_b + 8 * words, at_c + 8 * words
        if bounds[a + 1] - at_a < 8:
            crcs[a] = _rest(data, at_a, bounds[a + 1], crc_a)
            a, at_a, crc_a = a + 1, bounds[a + 1], _START
        if bounds[b + 1] - at_b < 8:
            crcs[b] = _rest(data, at_b, bounds[b + 1], crc_b)
            b, at_b, crc_b = b + 1, bounds[b + 1], _START
        if bounds[c + 1] - at_c < 8:
            crcs[c] = _rest(data, at_c, bounds[c + 1], crc_c)
            c, at_c, crc_c = c + 1, bounds[c + 1], _START
    for sample, end, at, crc in ((a, end_a, at_a, crc_a), (b, end_b, at_b, crc_b), (c, end_c, at_c, crc_c)):
        for i in range(sample, end):
            begin = at if i == sample else bounds[i]
            state = crc if i == sample else _START
            words = (bounds[i + 1] - begin) >> 3
            for k in range(words):
                state = _crc_word(state, _word(base + np.uint64(begin + 8 * k)))
            crcs[i] = _rest(data, begin + 8 * words, bounds[i + 1], state)


@compiled
def _shifted(crc: Any, num_bytes: int, powers: NDArray[np.uint64]) -> Any:
    """Return ``crc`` as if ``num_bytes`` zeros (below 2**32) followed its bytes: times x^(8 * num_bytes)."""
    for level in range(4):
        digit = num_bytes >> (8 * level) & 255
        if digit:
            crc = _crc_word(np.uint64(0), _multiply(crc, powers[level, digit]))
    return crc


@compiled
def _join_all(
    own: NDArray[np.uint32], bounds: I64, crcs: NDArray[np.uint32], whole: int, powers: NDArray[np.uint64]
) -> Any:
    """Join the checksum of each sample's part in this column, ``own``, to its checksum in ``crcs``, in place.

    Returns the checksum ``whole`` of all columns so far, with this column joined to it.
    """
    joined = np.uint64(whole)
    for i in range(len(own)):
        num_bytes = bounds[i + 1] - bounds[i]
        crcs[i] = _shifted(np.uint64(crcs[i]), num_bytes, powers) ^ np.uint64(own[i])
        joined = _shifted(joined, num_bytes, powers) ^ np.uint64(own[i])
    return joined


def _times(left: int, right: int) -> int:
    """Return the product of two polynomials modulo ``POLYNOMIAL``."""
    product = 0
    for bit in range(31, -1, -1):
        product ^= right if left >> bit & 1 else 0
        right = right >> 1 ^ (POLYNOMIAL if right & 1 else 0)
    return product


def _powers() -> NDArray[np.uint64]:
    """Return a table of x^(8 * n - 33), uint64 [level, digit], for n = digit * 256 ** level bytes."""
    first = _ONE
    for _ in range(33):  # divided by x
        first = ((first ^ POLYNOMIAL) << 1 | 1) & 0xFFFFFFFF if first & _ONE else first << 1
    powers, step = np.empty((4, 256), np.uint64), _ONE >> 8
    for level in powers:
        power = first
        for digit in range(256):
            level[digit] = power
            power = _times(power, step)
        for _ in range(8):
            step = _times(step, step)
    return powers


_POWERS = _powers()
