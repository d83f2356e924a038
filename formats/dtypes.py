"""Element types: bits of safetensors' ones, blocks of GGUF's, and the numpy type that holds those bits."""

from __future__ import annotations

from math import prod
from typing import Any

from qconvert.kernels.arrays import np

#: Bits of one element, for every type the safetensors format knows (0.8).
BITS: dict[str, int] = {
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    "BOOL": 8,
    "U8": 8,
    "I8": 8,
    "F8_E5M2": 8,
    "F8_E4M3": 8,
    "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8,
    "F8_E5M2FNUZ": 8,
    "I16": 16,
    "U16": 16,
    "F16": 16,
    "BF16": 16,
    "I32": 32,
    "U32": 32,
    "F32": 32,
    "C64": 64,
    "F64": 64,
    "I64": 64,
    "U64": 64,
}

#: GGUF's block types: elements and bytes of a block. Tensors of these types are read as their bytes.
BLOCKS: dict[str, tuple[int, int]] = {
    "Q4_0": (32, 18), "Q4_1": (32, 20), "Q5_0": (32, 22), "Q5_1": (32, 24), "Q8_0": (32, 34), "Q8_1": (32, 40),
    "Q2_K": (256, 84), "Q3_K": (256, 110), "Q4_K": (256, 144), "Q5_K": (256, 176), "Q6_K": (256, 210),
    "Q8_K": (256, 292), "IQ2_XXS": (256, 66), "IQ2_XS": (256, 74), "IQ3_XXS": (256, 98), "IQ1_S": (256, 50),
    "IQ4_NL": (32, 18), "IQ3_S": (256, 110), "IQ2_S": (256, 82), "IQ4_XS": (256, 136), "IQ1_M": (256, 56),
    "TQ1_0": (256, 54), "TQ2_0": (256, 66), "MXFP4": (32, 17), "NVFP4": (64, 36),
}  # fmt: skip

#: numpy's names of them; of every other type the bytes are held.
_NUMPY = {
    "BOOL": "bool",
    "I8": "int8",
    "I16": "int16",
    "U16": "uint16",
    "F16": "float16",
    "BF16": "uint16",
    "I32": "int32",
    "U32": "uint32",
    "F32": "float32",
    "C64": "complex64",
    "F64": "float64",
    "I64": "int64",
    "U64": "uint64",
}

FP8 = frozenset({"F8_E4M3", "F8_E5M2"})
#: Several elements share a byte: such tensors are read as their bytes.
SUB_BYTE = frozenset(name for name, bits in BITS.items() if bits < 8) | frozenset(BLOCKS)
#: Types a plain weight may have.
FLOATS = frozenset({"F64", "F32", "F16", "BF16"})


def numpy_dtype(dtype: str) -> np.dtype[Any]:
    """The numpy type holding one element's bits (bf16 as uint16; 8-bit floats and sub-byte types as uint8)."""
    held: np.dtype[Any] = np.dtype(_NUMPY.get(dtype, "uint8"))
    return held


def nbytes(dtype: str, shape: tuple[int, ...]) -> int | None:
    """Bytes of a tensor, None when its elements do not fill whole bytes or blocks. KeyError: no such type."""
    if dtype in BLOCKS:
        elements, size = BLOCKS[dtype]
        blocks, over = divmod(prod(shape), elements)
        return None if over else blocks * size
    bits = BITS[dtype] * prod(shape)
    return bits // 8 if bits % 8 == 0 else None
