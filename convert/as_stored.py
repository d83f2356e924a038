"""Layers that ComfyUI reads exactly as they are stored, and that no encoder of ours would write again.

Banks of experts (3-D tensors) and weights padded to whole blocks: their bytes are copied, their marker is rendered
anew. Whether the runtime takes them is asked of its contract, with the tensors as they would be written.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from qconvert.convert.actions import CopyOut
from qconvert.formats.base import Codec
from qconvert.formats.layers import Layer
from qconvert.formats.marker import render_tensor
from qconvert.formats.tensors import HeaderView, Spec
from qconvert.runtime.contracts.base import Contract
from qconvert.runtime.targets import Options

#: Marker keys that describe the stored tensors, not the format.
_SHAPE_KEYS = ("num_experts", "orig_shape")
#: Names that other writers give to ComfyUI's weight_scale.
_SCALE_NAMES = ("scale_weight", "weight_scale_inv")


def copied(
    layer: Layer, prefix: str, codec: Codec, wanted: Options, contract: Contract
) -> tuple[list[CopyOut], dict[str, Any]] | str:
    """The layer's tensors and marker under their new names, or why they have to be decoded instead."""
    marker = codec.marker(layer.options) if layer.codec is codec else None
    target = codec.marker(wanted)
    if marker is None or target is None or marker["format"] != target["format"]:
        return "a bank of experts" if layer.experts else "padded to whole blocks"
    if codec.layout(layer.options) != codec.layout(wanted):
        return f"{marker['format']} laid out in another way than the runtime reads"
    marker |= {key: layer.marker[key] for key in _SHAPE_KEYS if layer.marker and key in layer.marker}
    outputs = []
    for suffix, tensor in layer.tensors.items():
        if suffix in layer.owned:
            name = "weight_scale" if suffix in _SCALE_NAMES else suffix
            outputs.append(CopyOut(f"{prefix}.{name}", tensor.spec, tensor))
    specs = {out.name.removeprefix(f"{prefix}."): out.spec for out in outputs}
    return refusal(contract, prefix, specs, marker) or (outputs, marker)


def refusal(
    contract: Contract, prefix: str, specs: Mapping[str, Spec], marker: Mapping[str, Any]
) -> str | None:
    """Why the runtime would not take a layer of these tensors and this marker; None when it would."""
    data = render_tensor(marker)
    tensors = {f"{prefix}.{suffix}": spec for suffix, spec in specs.items()}
    tensors[f"{prefix}.comfy_quant"] = Spec("U8", (len(data),))
    verdict = contract.check(HeaderView(tensors, {}, {prefix: data}))
    for violation in verdict.all_violations():
        if violation.layer == prefix and violation.severity in ("refuse", "trap"):
            return violation.message
    return None
