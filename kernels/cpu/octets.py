"""Eight floats in one vector register, at places that are known only at run time: what LLVM's loops do not vectorise.

numba leaves LLVM's vectoriser of straight-line code switched off, and a loop over eight numbers costs more in
overlap checks than in arithmetic. Each function here is one load, one operation and one store of eight lanes; on
machines with narrower registers LLVM splits them. Nothing is contracted: bits are those of scalar code.

Indices are uint64 and are not checked.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba.extending
from llvmlite import ir
from numba import types
from numba.core import cgutils

#: Lanes of an octet.
OCTET = 8

_I1, _I8, _I32, _I64, _FLOAT = ir.IntType(1), ir.IntType(8), ir.IntType(32), ir.IntType(64), ir.FloatType()
_FLOATS, _INTS = ir.VectorType(_FLOAT, OCTET), ir.VectorType(_I32, OCTET)

intrinsic: Callable[..., Any] = numba.extending.intrinsic


def _at(context: Any, builder: Any, kind: Any, array: Any, index: Any, vector: Any = _FLOATS) -> Any:
    """Pointer to the octet that begins at array[index]."""
    data = context.make_array(kind)(context, builder, array).data
    return builder.bitcast(builder.gep(data, [index]), vector.as_pointer())


def _spread(builder: Any, value: Any, vector: Any) -> Any:
    """All lanes equal to `value`."""
    undefined = ir.Constant(vector, ir.Undefined)
    one = builder.insert_element(undefined, value, ir.Constant(_I32, 0))
    return builder.shuffle_vector(one, undefined, ir.Constant(_INTS, [0] * OCTET))


def _llvm(builder: Any, name: str, result: Any, *arguments: Any) -> Any:
    """One of LLVM's own functions."""
    declare: Callable[..., Any] = cgutils.get_or_insert_function
    return declare(builder.module, ir.FunctionType(result, arguments), name)


@intrinsic
def squares(typing: Any, values: Any, at: Any, y: Any, out: Any, to: Any) -> Any:
    """out[to : to + 8] = (y - values[at : at + 8])^2."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kinds = signature.args
        loaded = builder.load(_at(context, builder, kinds[0], args[0], args[1]), align=4)
        d = builder.fsub(_spread(builder, args[2], _FLOATS), loaded)
        builder.store(builder.fmul(d, d), _at(context, builder, kinds[3], args[3], args[4]), align=4)
        return context.get_dummy_value()

    return types.void(values, types.uint64, types.float32, out, types.uint64), generate


@intrinsic
def add(typing: Any, a: Any, to: Any, at: Any) -> Any:
    """a[to : to + 8] += a[at : at + 8]."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        target = _at(context, builder, signature.args[0], args[0], args[1])
        source = _at(context, builder, signature.args[0], args[0], args[2])
        total = builder.fadd(builder.load(target, align=4), builder.load(source, align=4))
        builder.store(total, target, align=4)
        return context.get_dummy_value()

    return types.void(a, types.uint64, types.uint64), generate


@intrinsic
def tree(typing: Any, a: Any, to: Any) -> Any:
    """a[to : to + 8] = the sum of the sixteen octets a[0 : 128], halves added to halves."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        def octet(index: Any) -> Any:
            return _at(context, builder, signature.args[0], args[0], index)

        parts = [builder.load(octet(ir.Constant(_I64, OCTET * i)), align=4) for i in range(16)]
        while len(parts) > 1:
            half = len(parts) // 2
            parts = [builder.fadd(a, b) for a, b in zip(parts[:half], parts[half:], strict=True)]
        builder.store(parts[0], octet(args[1]), align=4)
        return context.get_dummy_value()

    return types.void(a, types.uint64), generate


@intrinsic
def first_least(typing: Any, a: Any, at: Any) -> Any:
    """Index 0..7 (int32) of the first of the least of a[at : at + 8], which are not negative and not NaN."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        # Floats without a sign are in the order of their bits.
        octet = builder.load(_at(context, builder, signature.args[0], args[0], args[1], _INTS), align=4)
        smallest = _llvm(builder, "llvm.vector.reduce.smin.v8i32", _I32, _INTS)
        least = _spread(builder, builder.call(smallest, [octet]), _INTS)
        mask = builder.bitcast(builder.icmp_signed("==", octet, least), _I8)
        zeros = _llvm(builder, "llvm.cttz.i8", _I8, _I8, _I1)
        return builder.zext(builder.call(zeros, [mask, ir.Constant(_I1, 1)]), _I32)

    return types.int32(a, types.uint64), generate
