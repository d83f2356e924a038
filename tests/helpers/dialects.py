"""Layers as other writers store them, and what they stand for: independent definitions, numpy float64 only.

Everything here is written from the description of the formats, with no
help from the package under test. A value is computed in float64 and rounded to float32 where the format's definition
rounds; products of two short significands are exact in float64, so this gives the float32 result bit for bit.
"""

from __future__ import annotations

import numpy as np
from dialect_decoders import Tensors as Tensors
from dialect_decoders import decode_awq as decode_awq
from dialect_decoders import decode_block_fp8 as decode_block_fp8
from dialect_decoders import decode_mxfp8 as decode_mxfp8
from dialect_decoders import decode_nvfp4 as decode_nvfp4
from dialect_decoders import decode_scaled as decode_scaled
from dialect_decoders import decode_svdquant as decode_svdquant
from dialect_decoders import decode_w4a4 as decode_w4a4
from dialect_decoders import decode_w4a8 as decode_w4a8
from dialect_files import BITS as BITS
from dialect_files import F64 as F64
from dialect_files import NAMES as NAMES
from dialect_files import TORCH as TORCH
from dialect_files import Array as Array
from dialect_files import Rng as Rng
from dialect_files import T as T
from dialect_files import from_torch as from_torch
from dialect_files import marker_tensor as marker_tensor
from dialect_files import read as read
from dialect_files import read_metadata as read_metadata
from dialect_files import to_torch as to_torch
from dialect_files import write as write
from dialect_integers import CODEBOOK as CODEBOOK
from dialect_integers import awq as awq
from dialect_integers import bank as bank
from dialect_integers import int8 as int8
from dialect_integers import svdquant as svdquant
from dialect_integers import sym_w4a8 as sym_w4a8
from dialect_integers import w4a4 as w4a4
from dialect_integers import w4a8 as w4a8
from dialect_numbers import E2M1 as E2M1
from dialect_numbers import E4M3 as E4M3
from dialect_numbers import E5M2 as E5M2
from dialect_numbers import FINITE as FINITE
from dialect_numbers import f32 as f32
from dialect_numbers import f32_tensor as f32_tensor
from dialect_numbers import hadamard as hadamard
from dialect_numbers import narrow as narrow
from dialect_numbers import pack4 as pack4
from dialect_numbers import pack6 as pack6
from dialect_numbers import rotate as rotate
from dialect_numbers import signed as signed
from dialect_numbers import sqnr as sqnr
from dialect_numbers import swizzle as swizzle
from dialect_numbers import unpack4 as unpack4
from dialect_numbers import unpack6 as unpack6
from dialect_numbers import unswizzle as unswizzle
from dialect_numbers import up as up
from dialect_numbers import widen as widen
from dialect_writers import Sample as Sample
from dialect_writers import Writer as Writer
from dialect_writers import fp8 as fp8
from dialect_writers import mxfp8 as mxfp8
from dialect_writers import nvfp4 as nvfp4
from dialect_writers import plain as plain
from dialect_writers import weights as weights

_PRE = {"pre_quant_scale": narrow(np.linspace(0.5, 1.5, 256), "BF16")}
_INPUT = {"input_scale": f32_tensor(0.004)}

#: name -> writer of a 2-D weight. Every state in which a layer is known to be stored.
SOURCES: dict[str, Writer] = {
    "bf16": plain("BF16"),
    "fp16": plain("F16"),
    "fp32": plain("F32"),
    "fp64": plain("F64"),
    "fp8": fp8(),
    "fp8_one": fp8(shape=(1,)),
    "fp8_bf16_scale": fp8(dtype="BF16"),
    "fp8_full": fp8(full_precision_matrix_mult=True),
    "fp8_input_scale": fp8(extra=_INPUT),
    "fp8_row": fp8(scale="row"),
    "fp8_row_1d": fp8(scale="row", shape=(-1,)),
    "fp8_block": fp8(scale="block", suffix="weight_scale_inv", marked=False),
    "fp8_cast": fp8(scale="none", marked=False),
    "fp8_cast_marked": fp8(scale="none"),
    "fp8_unmarked": fp8(marked=False),
    "fp8_tagged_u8": fp8(tag="U8"),
    "fp8_legacy": fp8(marked=False, suffix="scale_weight", sentinel=1, shape=(1,)),
    "fp8_legacy_full": fp8(
        marked=False, suffix="scale_weight", sentinel=2, extra={"scale_input": f32_tensor([1.0])}
    ),
    "e5m2": fp8("F8_E5M2"),
    "e5m2_row": fp8("F8_E5M2", "row"),
    "e5m2_cast": fp8("F8_E5M2", "none", marked=False),
    "nvfp4": nvfp4(),
    "nvfp4_full": nvfp4(full_precision_matrix_mult=True),
    "nvfp4_u8_scales": nvfp4(tag="U8"),
    "nvfp4_unmarked": nvfp4(marked=False),
    "nvfp4_convrot": nvfp4(rotation=64),
    "nvfp4_pre": nvfp4(extra=_PRE, full_precision_matrix_mult=True),
    "nvfp4_input_scale": nvfp4(extra=_INPUT),
    "mxfp8": mxfp8(),
    "mxfp8_e8m0": mxfp8(dtype="F8_E8M0"),
    "mxfp8_inv": mxfp8(suffix="weight_scale_inv"),
    "mxfp8_tagged_u8": mxfp8(tag="U8"),
    "mxfp8_unmarked": mxfp8(marked=False),
    "int8_scalar": int8("scalar"),
    "int8_row": int8(),
    "int8_row_1d": int8(shape=(-1,)),
    "int8_bf16_scale": int8(dtype="BF16"),
    "int8_convrot4": int8(rotation=4),
    "int8_convrot16": int8(rotation=16),
    "int8_convrot64": int8(rotation=64),
    "int8_convrot256": int8(rotation=256),
    "int8_convrot_1d": int8(rotation=256, shape=(-1,)),
    "int8_convrot_params": int8(rotation=64, params=True),
    "int8_unmarked": int8(marked=False),
    "w4a4": w4a4(),
    "w4a4_64": w4a4(64),
    "w4a4_16": w4a4(16),
    "w4a4_4": w4a4(4),
    "w4a4_2d": w4a4(shape=(-1, 1)),
    "w4a4_bf16_scale": w4a4(dtype="BF16"),
    "w4a4_linear_int8": w4a4(linear_dtype="int8"),
    "w4a4_params": w4a4(64, params=True),
    "w4a8": w4a8(codebook=True),
    "w4a8_uniform": w4a8(),
    "w4a8_no_convrot_key": w4a8(codebook=True, convrot=False),
    "w4a8_correction": w4a8(correction="BF16"),
    "w4a8_correction_f32": w4a8(correction="F32"),
    "w4a8_6bit": w4a8(bits=6),
    "w4a8_srel_f32": w4a8(srel="F32", codebook=True),
    "w4a8_srel_u8": w4a8(srel="U8", codebook=True),
    "w4a8_g4": w4a8(4),
    "w4a8_g8": w4a8(8, codebook=True),
    "w4a8_g32": w4a8(32, codebook=True),
    "w4a8_g64": w4a8(64),
    "w4a8_rot64": w4a8(rotation=64, codebook=True),
    "w4a8_rot4": w4a8(rotation=4),
    "w4a8_params": w4a8(32, 64, params=True),
    "w4a8_unmarked": w4a8(codebook=True, marked=False),
    "sym": sym_w4a8(),
    "sym_flat": sym_w4a8(rotation=0),
    "sym_g32": sym_w4a8("sym_w4a8", 32, 64),
    "sym_group_only": sym_w4a8(channel=False, suffix="weight_scale", srel="BF16"),
    "sym_group_only_flat": sym_w4a8(
        "w4a8_int8_sym", 64, 0, channel=False, suffix="weight_group_scale", srel="F16"
    ),
    "awq": awq(),
    "awq_g32": awq(32),
    "awq_fp16": awq(dtype="F16"),
    "awq_f32": awq(128, "F32"),
    "awq_unmarked": awq(marked=False),
    "svdquant": svdquant(),
    "svdquant_tiled": svdquant(tiled=True),
}

#: name -> writer of a 3-D weight [E, N, K]
BANKS: dict[str, Writer] = {
    "bank_bf16": bank(plain("BF16")),
    "bank_fp8": bank(fp8()),
    "bank_fp8_111": bank(fp8(shape=(1, 1))),
    "bank_e5m2": bank(fp8("F8_E5M2")),
    "bank_nvfp4": bank(nvfp4()),
    "bank_int8": bank(int8()),
    "bank_int8_convrot": bank(int8(rotation=64)),
    "bank_w4a8": bank(w4a8()),
    "bank_w4a8_codebook": bank(w4a8(codebook=True), shared=("weight_codebook",)),
    "bank_w4a8_codebooks": bank(w4a8(codebook=True)),
    "bank_w4a4": bank(w4a4(64)),
}

#: name -> writer of a convolution's weight [N, C, kh, kw]
CONVOLUTIONS: dict[str, Writer] = {
    "conv_bf16": plain("BF16"),
    "conv_fp8": fp8(),
    "conv_fp8_cast": fp8(scale="none", marked=False),
    "conv_fp8_row": fp8(scale="row"),
    "conv_int8": int8("scalar"),
    "conv_int8_row": int8(),
    "conv_int8_row_1d": int8(shape=(-1,)),
}

#: label -> (writer, N, K): sizes at the edges of what a format allows
ODD: dict[str, tuple[Writer, int, int]] = {
    "nvfp4_96x96": (nvfp4(linear=True), 96, 96),
    "nvfp4_96x96_b": (nvfp4(linear=True, marked=False, low_first=True), 96, 96),
    "nvfp4_16x16": (nvfp4(), 16, 16),
    "nvfp4_144x48": (nvfp4(rotation=16), 144, 48),
    "nvfp4_400x32": (nvfp4(), 400, 32),
    "mxfp8_96x96": (mxfp8(linear=True), 96, 96),
    "mxfp8_32x32": (mxfp8(linear=True, marked=False), 32, 32),
    "mxfp8_32x32_b": (mxfp8(), 32, 32),
    "mxfp8_416x96": (mxfp8(), 416, 96),
    "int8_1x7": (int8("scalar"), 1, 7),
    "int8_3x1": (int8("scalar"), 3, 1),
    "fp8_1x1": (fp8(), 1, 1),
    "fp8_2x5": (fp8(scale="row"), 2, 5),
    "fp8_130x200": (fp8(scale="block", suffix="weight_scale_inv", marked=False), 130, 200),
    "w4a4_5x64": (w4a4(64), 5, 64),
    "w4a8_3x16": (w4a8(rotation=16), 3, 16),
    "w4a8_3x16_b": (w4a8(4, 4), 3, 16),
    "w4a8_3x32": (w4a8(rotation=16, bits=6), 3, 32),
    "w4a8_3x48": (w4a8(48, 16), 3, 48),
    "w4a8_4x512": (w4a8(256, 256), 4, 512),
    "w4a8_4x512_b": (w4a8(32, 16, stated=False), 4, 512),
    "sym_w4a8_4x48": (sym_w4a8(group=16, rotation=0), 4, 48),
    "awq_3x4": (awq(2), 3, 4),
    "awq_3x128": (awq(stated=False), 3, 128),
    "svdquant_3x64": (svdquant(rank=1), 3, 64),
    "svdquant_256x192": (svdquant(tiled=True, rank=16), 256, 192),
}
