"""Headers built in memory, one layer a call: what the contracts look at, without any file."""

from __future__ import annotations

import json
from typing import Any

import pytest
from qconvert.formats.tensors import HeaderView, Spec

QUANT_HEADER = "_quantization_metadata"


class Header:
    """A header to be. Every maker writes what the newest sglang and ComfyUI both take, if the sizes allow."""

    def __init__(self) -> None:
        self.tensors: dict[str, Spec] = {}
        self.markers: dict[str, bytes] = {}
        self.metadata: dict[str, str] = {}
        self.files: tuple[str, ...] = ("file.safetensors",)

    def put(self, name: str, dtype: str, *shape: int) -> Header:
        self.tensors[name] = Spec(dtype, shape)
        return self

    def drop(self, *names: str) -> Header:
        for name in names:
            del self.tensors[name]
        return self

    def mark(self, layer: str, marker: Any, dtype: str = "U8") -> Header:
        payload = marker if isinstance(marker, bytes) else json.dumps(marker).encode()
        self.markers[layer] = payload
        return self.put(f"{layer}.comfy_quant", dtype, len(payload))

    def unmark(self, layer: str) -> Header:
        del self.markers[layer]
        return self.drop(f"{layer}.comfy_quant")

    def remark(self, layer: str, **keys: Any) -> Header:
        """Changes keys of a marker; a value of None drops the key."""
        marker = json.loads(self.markers[layer]) | keys
        return self.mark(layer, {key: value for key, value in marker.items() if value is not None})

    def header(self, layers: Any, **keys: Any) -> Header:
        self.metadata[QUANT_HEADER] = json.dumps({"format_version": "1.0", "layers": layers} | keys)
        return self

    def nvfp4(self, layer: str, n: int = 128, k: int = 128, **keys: Any) -> Header:
        self.put(f"{layer}.weight", "U8", n, k // 2).put(f"{layer}.weight_scale", "F8_E4M3", n, k // 16)
        self.put(f"{layer}.weight_scale_2", "F32")
        return self.mark(layer, {"format": "nvfp4", "full_precision_matrix_mult": True} | keys)

    def w4a8(self, layer: str, n: int = 64, k: int = 256, group: int = 16, **keys: Any) -> Header:
        self.put(f"{layer}.weight", "I8", n, k // 2).put(f"{layer}.weight_s_rel", "F8_E4M3", n, k // group)
        self.put(f"{layer}.weight_s_channel", "F32", n)
        marker = {"format": "asym_w4a8_int8", "convrot": True, "convrot_groupsize": 256, "group_size": group}
        return self.mark(layer, marker | keys)

    def w4a4(self, layer: str, n: int = 64, k: int = 256, **keys: Any) -> Header:
        self.put(f"{layer}.weight", "I8", n, k // 2).put(f"{layer}.weight_scale", "F32", n)
        return self.mark(layer, {"format": "convrot_w4a4", "convrot_groupsize": 256} | keys)

    def int8(self, layer: str, n: int = 64, k: int = 256, **keys: Any) -> Header:
        self.put(f"{layer}.weight", "I8", n, k).put(f"{layer}.weight_scale", "F32", n, 1)
        marker = {"format": "int8_tensorwise", "convrot": True, "convrot_groupsize": 256}
        return self.mark(layer, marker | keys)

    def table(self, layer: str = "embed_tokens", n: int = 200, k: int = 64, row: bool = True) -> Header:
        self.put(f"{layer}.weight", "I8", n, k)
        self.put(f"{layer}.weight_scale", "F32", *((n, 1) if row else ()))
        return self.mark(layer, {"format": "int8_tensorwise"})

    def fp8(self, layer: str, n: int = 64, k: int = 96, **keys: Any) -> Header:
        self.put(f"{layer}.weight", "F8_E4M3", n, k).put(f"{layer}.weight_scale", "F32")
        return self.mark(layer, {"format": "float8_e4m3fn"} | keys)

    def mxfp8(self, layer: str, n: int = 128, k: int = 128, **keys: Any) -> Header:
        self.put(f"{layer}.weight", "F8_E4M3", n, k).put(f"{layer}.weight_scale", "U8", n, k // 32)
        return self.mark(layer, {"format": "mxfp8"} | keys)

    def view(self) -> HeaderView:
        return HeaderView(self.tensors, self.metadata, self.markers, self.files)


@pytest.fixture
def header() -> type[Header]:
    return Header
