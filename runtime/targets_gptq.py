"""GPTQ folders as sglang's diffusion runtime loads AutoRound's "auto_gptq" files.

CONTRACTS and FORMATS_OTHER section 1: quantization_config in config.json; symmetric, 4 or 8 bit, groups of -1, 32, 64
or 128; `g_idx` present; every linear layer that is not quantised listed in `extra_config` with bits 16, because
`block_name_to_quantize` is not read; projections fused at load with equal bits and groups.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

from qconvert.formats.layers import Layer
from qconvert.runtime.sidecars import LayerForm, OutputForm, with_quantization
from qconvert.runtime.target import OptionMaker, Options, Target, Wishes

GROUPS = (128, 64, 32)
#: Scales are stored in half precision; sglang casts them to the type it runs in.
SCALES = ("F16", "BF16")


def _gptq(bits: int) -> OptionMaker:
    def make(layer: Layer, wishes: Wishes) -> Iterator[Options]:
        base: Options = {"zeros": "v1", "symmetric": True, "order": "natural", "marlin": True}
        own = layer.options
        if layer.codec.family == "affine" and own["dtype"] in SCALES and own["group"] in (*GROUPS, layer.k):
            # Kept as it is, in 8 bits where 4 have no room for zero points of its own: nothing is requantised.
            for width in (4, 8):
                if _fits(own, width):
                    yield base | {"bits": width, "group": own["group"], "dtype": own["dtype"]}
        for group in GROUPS:
            if layer.k % group == 0:
                yield base | {"bits": bits, "group": group, "dtype": "F16"}
                return
        yield base | {"bits": bits, "group": GROUPS[0], "dtype": "F16"}

    return make


def _fits(own: Options, width: int) -> bool:
    """Whether the source's codes, taken about one zero point, fit into `width` bits (as Gptq.carries says)."""
    natural = own.get("order", "natural") == "natural"
    return natural and int(own["bits"]) + (0 if own["symmetric"] else 1) <= width


def gptq_config(form: OutputForm) -> dict[str, Any]:
    """quantization_config: the commonest bits and group, and in extra_config each linear layer that differs."""
    kinds = Counter(_kind(layer) for layer in form.layers if layer.codec == "gptq")
    bits, group = kinds.most_common(1)[0][0] if kinds else (4, 128)
    extra: dict[str, dict[str, Any]] = {}
    for layer in form.layers:
        if layer.codec == "gptq" and _kind(layer) != (bits, group):
            own_bits, own_group = _kind(layer)
            extra[layer.prefix] = {"bits": own_bits, "group_size": own_group, "sym": True}
        elif layer.codec == "plain" and layer.role != "embedding" and _matrix(layer):
            # Whatever the model makes of it: a linear layer that is not listed is built quantised.
            extra[layer.prefix] = {"bits": 16}
    return {
        "quant_method": "auto-round",
        "packing_format": "auto_round:auto_gptq",
        "bits": bits,
        "group_size": group,
        "sym": True,
        "data_type": "int",
        "desc_act": False,
        "extra_config": extra,
    }


def _matrix(layer: LayerForm) -> bool:
    return "weight" in layer.tensors and len(layer.tensors["weight"].shape) == 2


def _kind(layer: LayerForm) -> tuple[int, int]:
    group = int(layer.options["group"])
    return int(layer.options["bits"]), -1 if group == layer.k and group not in GROUPS else group


def _sidecars(form: OutputForm) -> dict[str, bytes]:
    return {"config.json": with_quantization(form.config, gptq_config(form))}


def _target(name: str, bits: int) -> Target:
    return Target(
        name,
        "sglang",
        "auto_gptq",
        f"a folder in AutoRound's GPTQ packing, {bits} bit symmetric, groups of 128",
        "gptq",
        _gptq(bits),
        sidecars=_sidecars,
        family_runtime="sglang-0.5.23",
    )


GPTQ_TARGETS: tuple[Target, ...] = (_target("auto_gptq", 4), _target("auto_gptq:int8", 8))
