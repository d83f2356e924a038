"""Small right headers of every config of sglang, and the ways to spoil one thing in them at a time."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

from qconvert.formats.dtypes import BITS
from qconvert.formats.tensors import HeaderView, Spec

HEADER = "_quantization_metadata"
#: Rows of the vocabulary are deliberately no multiple of 64.
H, F, V = 256, 512, 200
LAYERS = {
    "model.layers.0.self_attn.q_proj": (H, H),
    "model.layers.0.mlp.gate_proj": (F, H),
    "model.layers.0.mlp.down_proj": (H, F),
}
TABLE = "model.embed_tokens"
PLAIN = "model.layers.0.self_attn.o_proj"
FIRST = next(iter(LAYERS))
#: Types that the mutations turn tensors into: all that safetensors' torch reader knows and sglang meets.
DTYPES = ("F32", "F16", "BF16", "F8_E4M3", "F8_E5M2", "U8", "I8", "I32", "F64")
Marker = dict[str, Any]


@dataclass
class File:
    """A checkpoint without values: only markers have a payload, everything else is zeros."""

    tensors: dict[str, Spec] = field(default_factory=dict)
    payloads: dict[str, bytes] = field(default_factory=dict)
    metadata: dict[str, str] = field(default_factory=dict)

    def copy(self) -> File:
        return File(dict(self.tensors), dict(self.payloads), dict(self.metadata))

    def add(self, name: str, dtype: str, *shape: int) -> None:
        self.tensors[name] = Spec(dtype, shape)

    def mark(self, layer: str, marker: Marker | bytes, dtype: str = "U8") -> None:
        payload = marker if isinstance(marker, bytes) else json.dumps(marker).encode()
        name = f"{layer}.comfy_quant"
        width = BITS[dtype] // 8
        payload += b" " * (-len(payload) % width)
        self.tensors[name] = Spec(dtype, (len(payload) // width,))
        self.payloads[name] = payload

    def marker(self, layer: str) -> Marker | None:
        payload = self.payloads.get(f"{layer}.comfy_quant")
        return json.loads(payload) if payload is not None else None

    def drop(self, name: str) -> None:
        self.tensors.pop(name, None)
        self.payloads.pop(name, None)

    def rename(self, old: str, new: str) -> None:
        self.tensors[new] = self.tensors.pop(old)
        if old in self.payloads:
            self.payloads[new] = self.payloads.pop(old)

    def view(self, name: str = "file.safetensors") -> HeaderView:
        markers = {key.removesuffix(".comfy_quant"): data for key, data in self.payloads.items()}
        return HeaderView(self.tensors, self.metadata, markers, (name,))

    def write(self, path: Path) -> None:
        header: dict[str, Any] = {"__metadata__": self.metadata} if self.metadata else {}
        offset, body = 0, []
        for name, spec in sorted(self.tensors.items()):
            data = self.payloads.get(name) or bytes(prod(spec.shape) * BITS[spec.dtype] // 8)
            header[name] = {
                "dtype": spec.dtype,
                "shape": list(spec.shape),
                "data_offsets": [offset, offset + len(data)],
            }
            offset += len(data)
            body.append(data)
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        path.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(body))


def _nvfp4(file: File, layer: str, n: int, k: int, **keys: Any) -> None:
    file.add(f"{layer}.weight", "U8", n, k // 2)
    file.add(f"{layer}.weight_scale", "F8_E4M3", n, k // 16)
    file.add(f"{layer}.weight_scale_2", "F32")
    file.mark(layer, {"format": "nvfp4", **keys})


def _w4a8(file: File, layer: str, n: int, k: int, **keys: Any) -> None:
    file.add(f"{layer}.weight", "I8", n, k // 2)
    file.add(f"{layer}.weight_s_rel", "F8_E4M3", n, k // 16)
    file.add(f"{layer}.weight_s_channel", "F32", n)
    marker = {"format": "asym_w4a8_int8", "group_size": 16, "convrot": True, "convrot_groupsize": 256}
    file.mark(layer, marker | keys)


def _w4a4(file: File, layer: str, n: int, k: int, **keys: Any) -> None:
    file.add(f"{layer}.weight", "I8", n, k // 2)
    file.add(f"{layer}.weight_scale", "F32", n)
    file.mark(layer, {"format": "convrot_w4a4", "convrot_groupsize": 256, "linear_dtype": "int4"} | keys)


def _int8(file: File, layer: str, n: int, k: int, **keys: Any) -> None:
    file.add(f"{layer}.weight", "I8", n, k)
    file.add(f"{layer}.weight_scale", "F32", n, 1)
    file.mark(layer, {"format": "int8_tensorwise", "convrot": True, "convrot_groupsize": 256} | keys)


def _fp8(file: File, layer: str, n: int, k: int, **keys: Any) -> None:
    file.add(f"{layer}.weight", "F8_E4M3", n, k)
    file.add(f"{layer}.weight_scale", "F32")
    file.mark(layer, {"format": "float8_e4m3fn", **keys})


def _mxfp8(file: File, layer: str, n: int, k: int, **keys: Any) -> None:
    file.add(f"{layer}.weight", "F8_E4M3", n, k)
    file.add(f"{layer}.weight_scale", "U8", n, k // 32)
    file.mark(layer, {"format": "mxfp8", **keys})


MAKERS = {"nvfp4": _nvfp4, "w4a8": _w4a8, "w4a4": _w4a4, "int8": _int8, "fp8": _fp8, "mxfp8": _mxfp8}


def _base(kind: str, table: str | None = None, **keys: Any) -> File:
    file = File()
    for layer, (n, k) in LAYERS.items():
        MAKERS[kind](file, layer, n, k, **keys)
    file.add(f"{PLAIN}.weight", "BF16", H, H)
    file.add("model.norm.weight", "BF16", H)
    if table == "plain":
        file.add(f"{TABLE}.weight", "BF16", V, H)
    elif table:
        file.add(f"{TABLE}.weight", "I8", V, H)
        file.add(f"{TABLE}.weight_scale", "F32", *((V, 1) if table == "row" else ()))
        file.mark(TABLE, {"format": "int8_tensorwise"})
    return file


def bases() -> dict[str, File]:
    """Right files, by name."""
    found = {
        "nvfp4": _base("nvfp4", "row", full_precision_matrix_mult=True),
        "nvfp4 native": _base("nvfp4", "scalar"),
        "w4a8": _base("w4a8", "scalar"),
        "w4a8 codebook": _base("w4a8", "plain"),
        "w4a4": _base("w4a4", "plain"),
        "w4a4 + int8": _base("w4a4"),
        "int8": _base("int8", "row"),
        "int8 g64": _base("int8", "plain", convrot_groupsize=64),
        "fp8 full": _base("fp8", "plain", full_precision_matrix_mult=True),
        "fp8 dynamic": _base("fp8"),
        "fp8 static": _base("fp8", "plain"),
        "mxfp8": _base("mxfp8", "plain"),
        "mxfp8 header": _base("mxfp8"),
        "w4a8 header": _base("w4a8", "row"),
    }
    found["nvfp4 native"].add(f"{FIRST}.pre_quant_scale", "BF16", H)
    for layer, (n, k) in LAYERS.items():
        found["w4a8 codebook"].add(f"{layer}.weight_codebook", "F32", 16)
        found["w4a8 codebook"].add(f"{layer}.weight_correction", "F32", k // 16, n)
        found["fp8 static"].add(f"{layer}.input_scale", "F32")
        found["mxfp8 header"].drop(f"{layer}.comfy_quant")
    found["w4a8 codebook"].add(f"{FIRST}.bias", "BF16", H)
    found["mxfp8 header"].metadata["quant_format"] = "mxfp8"
    _int8(found["w4a4 + int8"], FIRST, H, H)
    into_header(found["w4a8 header"])
    return found


def into_header(file: File, keep: bool = False, **extra: Any) -> None:
    """Moves (or copies) every marker into the header."""
    layers = {}
    for name in [name for name in file.payloads if name.endswith(".comfy_quant")]:
        layer = name.removesuffix(".comfy_quant")
        layers[layer] = (file.marker(layer) or {}) | extra
        if not keep:
            file.drop(name)
    file.metadata[HEADER] = json.dumps({"format_version": "1.0", "layers": layers})


def mutations(base: File) -> Iterator[tuple[str, File]]:
    """Every way known here to spoil one thing of a right file."""
    for name, spec in base.tensors.items():
        yield from _tensor_mutations(base, name, spec)
    for layer in (*LAYERS, TABLE, PLAIN):
        yield from _marker_mutations(base, layer)
    yield from _header_mutations(base)
    yield from _layer_mutations(base)


def _spoiled(base: File, what: str, change: Any) -> tuple[str, File]:
    file = base.copy()
    change(file)
    return what, file


def _tensor_mutations(base: File, name: str, spec: Spec) -> Iterator[tuple[str, File]]:
    layer, _, suffix = name.rpartition(".")
    yield _spoiled(base, f"drop {name}", lambda f: f.drop(name))
    others = {
        "scale",
        "weight_scale",
        "weight_scale_2",
        "weight_scale_inv",
        "weight_scales",
        "scale_weight",
        "bias",
    }
    for other in sorted({*others, "weight", "weight_s_rel", "weights", "comfy_quant_", "qweight"} - {suffix}):
        if f"{layer}.{other}" not in base.tensors:
            yield _spoiled(
                base, f"rename {name} to .{other}", lambda f, o=other: f.rename(name, f"{layer}.{o}")
            )
    for prefix in ("model.diffusion_model.", "x."):
        yield _spoiled(base, f"rename {name} to {prefix}...", lambda f, p=prefix: f.rename(name, p + name))
    if name in base.payloads:
        return
    for dtype in DTYPES:
        if dtype != spec.dtype:
            change = {name: Spec(dtype, spec.shape)}
            yield _spoiled(base, f"retype {name} as {dtype}", lambda f, c=change: f.tensors.update(c))
    for shape in _shapes(spec.shape):
        change = {name: Spec(spec.dtype, shape)}
        yield _spoiled(base, f"reshape {name} to {list(shape)}", lambda f, c=change: f.tensors.update(c))


def _shapes(shape: tuple[int, ...]) -> list[tuple[int, ...]]:
    found: set[tuple[int, ...]] = {(), (1,), (1, 1), (prod(shape),), (*shape, 1), (1, *shape), shape[::-1]}
    for axis, length in enumerate(shape):
        for other in (1, length // 2, length * 2, length + 1, length + 16, length * 3 // 2, 128, 192):
            found.add((*shape[:axis], max(other, 1), *shape[axis + 1 :]))
    if len(shape) == 2:
        found |= {(shape[0],), (shape[1],), (shape[0], 1), (shape[0], 2, max(shape[1] // 2, 1))}
    return sorted(found - {shape}, key=lambda s: (len(s), s))


def _marker_mutations(base: File, layer: str) -> Iterator[tuple[str, File]]:
    marker = base.marker(layer)
    formats = [
        *("nvfp4", "asym_w4a8_int8", "convrot_w4a4", "int8_tensorwise", "float8_e4m3fn", "mxfp8"),
        *("float8_e5m2", "awq_w4a16", "svdquant_w4a4", "sym_w4a8_int8", "NVFP4", "", None, 8, ["nvfp4"]),
    ]
    for other in formats:
        keys = {**(marker or {}), "format": other}
        yield _spoiled(base, f"re-mark {layer} as {other!r}", lambda f, k=keys: f.mark(layer, k))
    payloads = {
        "NUL": bytes(29),
        "not JSON": b"{format: nvfp4}",
        "a list": b'["nvfp4"]',
        "a string": b'"nvfp4"',
        "null": b"null",
        "empty object": b"{}",
        "NUL padded": json.dumps(marker or {"format": "nvfp4"}).encode() + bytes(8),
        "space padded": json.dumps(marker or {"format": "nvfp4"}).encode() + b"  \n",
        "UTF-16": json.dumps(marker or {"format": "nvfp4"}).encode("utf-16-le"),
        "not UTF-8": b"\xff\xfe\xfd",
    }
    for what, payload in payloads.items():
        yield _spoiled(base, f"marker of {layer}: {what}", lambda f, p=payload: f.mark(layer, p))
    if marker is None:
        return
    for dtype in ("I8", "BF16", "F8_E4M3", "I32"):
        yield _spoiled(
            base, f"marker of {layer} stored as {dtype}", lambda f, d=dtype: f.mark(layer, marker, d)
        )
    for key in marker:
        less = {k: v for k, v in marker.items() if k != key}
        yield _spoiled(base, f"marker of {layer} without {key}", lambda f, m=less: f.mark(layer, m))
        nested = {**less, "params": {key: marker[key]}}
        yield _spoiled(base, f"marker of {layer}: {key} nested", lambda f, m=nested: f.mark(layer, m))
    values: dict[str, list[Any]] = {
        "convrot": [True, False, "true", "false", 1, None],
        "convrot_groupsize": [4, 16, 32, 64, 128, 256, 256.0, 512, 1024, 0, -16, "256", "64", None, True, []],
        "group_size": [0, 2, 4, 8, 12, 16, 16.0, "16", 24, 32, 64, 128, -16, None, "x"],
        "full_precision_matrix_mult": [True, False, "false", 0, None],
        "linear_dtype": ["int4", "int8", "fp8", None, 4],
        "quant_group_size": [64, 32],
        "_is_rowwise": [True],
        "params": [{"convrot_groupsize": 64}, {"convrot": True}, {"convrot": False}, {"group_size": 32}, 5],
    }
    for key, options in values.items():
        for value in options:
            if key in marker and marker[key] == value and type(marker[key]) is type(value):
                continue
            changed = {**marker, key: value}
            yield _spoiled(base, f"marker of {layer}: {key}={value!r}", lambda f, m=changed: f.mark(layer, m))


def _header_mutations(base: File) -> Iterator[tuple[str, File]]:
    yield _spoiled(base, "markers moved to the header", lambda f: into_header(f))
    yield _spoiled(base, "markers copied to the header", lambda f: into_header(f, keep=True))
    extra = {"full_precision_matrix_mult": True}
    yield _spoiled(base, "header adds full precision", lambda f: into_header(f, keep=True, **extra))
    yield _spoiled(base, "header says another format", lambda f: into_header(f, keep=True, format="nvfp4"))
    yield _spoiled(
        base, "header says another group", lambda f: into_header(f, keep=True, convrot_groupsize=16)
    )
    texts = {
        "not JSON": "{layers}",
        "a list": "[]",
        "no layers": '{"format_version": "1.0"}',
        "layers a list": '{"layers": []}',
        "layers empty": '{"layers": {}}',
        "layer a string": json.dumps({"layers": {FIRST: "nvfp4"}}),
        "layer not there": json.dumps({"layers": {"nowhere": {"format": "nvfp4"}}}),
        "layer empty": json.dumps({"layers": {FIRST: {}}}),
        "unquantised layer": json.dumps({"layers": {PLAIN: {"format": "float8_e4m3fn"}}}),
        "rowwise fp8": json.dumps(
            {"format_version": "1.1", "layers": {FIRST: {"format": "rowwise-float8_e4m3fn"}}}
        ),
    }
    for what, text in texts.items():
        yield _spoiled(base, f"header: {what}", lambda f, t=text: f.metadata.update({HEADER: t}))
    for value in ("mxfp8", "MXFP8", "nvfp4", ""):
        change = {"quant_format": value}
        yield _spoiled(base, f"header: quant_format {value!r}", lambda f, c=change: f.metadata.update(c))
    for key in list(base.metadata):
        yield _spoiled(base, f"header without {key}", lambda f, k=key: f.metadata.pop(k))


def _layer_mutations(base: File) -> Iterator[tuple[str, File]]:
    extras = {
        "input_scale": ("F32",),
        "pre_quant_scale": ("BF16", H),
        "weight_scale_2": ("F32",),
        "weight_scale_inv": ("U8", H, H // 32),
        "weight_codebook": ("F32", 16),
        "weight_correction": ("BF16", H // 16, H),
        "weight_zero_point": ("I8", H),
        "bias": ("BF16", H),
        "scale_input": ("F32",),
    }
    for suffix, (dtype, *shape) in extras.items():
        for layer in (FIRST, TABLE, PLAIN):
            name = f"{layer}.{suffix}"
            if name not in base.tensors:
                added = (name, dtype, *shape)
                yield _spoiled(base, f"add {name} {dtype}{shape}", lambda f, a=added: f.add(*a))
    yield _spoiled(base, "add scaled_fp8", lambda f: f.add("scaled_fp8", "F8_E4M3", 2))
    yield _spoiled(base, "add an F8_E5M2 weight", lambda f: f.add("model.x.weight", "F8_E5M2", H, H))
    yield _spoiled(base, "add a U8 weight", lambda f: f.add("model.x.weight", "U8", H, H))
    yield _spoiled(base, "mark nothing", lambda f: f.mark("model.nowhere", {"format": "nvfp4"}))
    sizes = [(H, H), (192, H), (H, 320), (H, 80), (H, 96), (H, 48), (130, H), (H, 264), (8, 8), (H, 3200)]
    for kind, maker in MAKERS.items():
        for n, k in sizes:
            what = f"add a {kind} layer [{n},{k}]"
            yield _spoiled(base, what, lambda f, m=maker, n=n, k=k: m(f, "model.layers.1.mlp.up_proj", n, k))
        yield _spoiled(base, f"the table as {kind}", lambda f, m=maker: _replace(f, TABLE, m, V, H))
        yield _spoiled(base, f"the first layer as {kind}", lambda f, m=maker: _replace(f, FIRST, m, H, H))


def _replace(file: File, layer: str, maker: Any, n: int, k: int) -> None:
    for name in [name for name in file.tensors if name.startswith(f"{layer}.")]:
        file.drop(name)
    maker(file, layer, n, k)
