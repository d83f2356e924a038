"""LightX2V (git f8aee98b; CONTRACTS_OTHER section 5; read): the scheme is named by its JSON, never detected."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from qconvert.formats.tensors import HeaderView
from qconvert.runtime.contracts.base import Kind, LayerVerdict, Verdict, Violation
from qconvert.runtime.contracts.others import OtherContract, Specs, kind_of, missing, scaled_layers, wants

_INT8, _FP8, _NVFP4 = "lightx2v_int8", "lightx2v_fp8", "lightx2v_nvfp4"
#: Scheme -> what the JSON's dit_quant_scheme may say.
_SCHEMES = {
    "int8": "int8-vllm, int8-sgl, int8-q8f, int8-torchao or int8-triton",
    "fp8": "fp8-vllm, fp8-sgl, fp8-q8f, fp8-torchao or fp8-triton",
    "fp8-pertensor": "fp8-pertensor",
    "fp8-b128-deepgemm": "fp8-b128-deepgemm",
    "nvfp4": "nvfp4",
    "mx": "mxfp4, mxfp6-mxfp8 or mxfp8",
}
_CONFIGS = {"int8": _INT8, "fp8": _FP8, "fp8-pertensor": _FP8, "fp8-b128-deepgemm": _FP8, "nvfp4": _NVFP4}


class LightX2V(OtherContract):
    """Each layer's tensors must be those of the one scheme that the JSON names for the file."""

    name = "lightx2v"
    configs: Mapping[str, str] = {_INT8: "int8", _FP8: "fp8", _NVFP4: "nvfp4"}
    targets: Mapping[str, str] = {_INT8: _INT8, _FP8: _FP8, _NVFP4: _NVFP4}

    def judge(self, view: HeaderView) -> Verdict:
        scaled = scaled_layers(view, "weight_scale")
        if not scaled:
            return self.plain(view, "no packed weights")
        schemes = {prefix: _scheme(specs) for prefix, specs in scaled.items()}
        kinds = list(dict.fromkeys(schemes.values()))
        violations = []
        if len(kinds) > 1:
            message = "one scheme is named for all quantised layers of a model"
            violations.append(Violation("refuse", "scheme-mixture", message, None, ", ".join(sorted(kinds))))
        else:
            message = f'nothing is detected: the JSON must say "dit_quant_scheme": {_SCHEMES[kinds[0]]}'
            violations.append(Violation("environment", "scheme-named", message))
        layers = []
        for prefix, specs in scaled.items():
            found = list(_RULES[schemes[prefix]](prefix, specs))
            if b"convrot" in view.markers.get(prefix, b""):
                message = "markers are ignored: a ConvRot rotation is not undone"
                found.append(Violation("trap", "marker-convrot", message, prefix))
            if kind_of(prefix) == "embedding":
                found += self.planned(_INT8, "embedding", 0, 0)
            layers.append(
                LayerVerdict(prefix, kind_of(prefix), schemes[prefix], schemes[prefix], tuple(found))
            )
        return self.verdict(_CONFIGS.get(kinds[0]), layers, violations)

    def planned(self, config: str, kind: Kind, n: int, k: int) -> Iterator[Violation]:
        if kind == "embedding":
            message = "embeddings are read as plain tensors"
            yield Violation("refuse", "embedding-format", message)
        elif config == _NVFP4 and k % 16:
            message = "nvfp4 has one scale for 16 columns"
            yield Violation("refuse", "shape-multiple", message, None, str(k), "K a multiple of 16")


def _scheme(specs: Specs) -> str:
    weight, scale = specs.get("weight"), specs.get("weight_scale")
    if weight is not None and weight.dtype == "I8":
        return "int8"
    if weight is not None and weight.dtype == "U8":
        return "mx" if scale is not None and scale.dtype == "F8_E8M0" else "nvfp4"
    if scale is not None and len(scale.shape) == 2 and weight is not None and scale.shape[1] > 1:
        return "fp8-b128-deepgemm"
    return "fp8-pertensor" if scale is not None and all(size == 1 for size in scale.shape) else "fp8"


def _rows(prefix: str, specs: Specs) -> Iterator[Violation]:
    weight = specs.get("weight")
    if weight is None or len(weight.shape) != 2:
        yield missing("refuse", "weight", f"KeyError: '{prefix}.weight'", prefix)
        return
    yield from wants(specs, "weight", ["I8", "F8_E4M3"], [], prefix)
    if "weight_scale" not in specs:
        yield missing("refuse", "weight_scale", f"KeyError: '{prefix}.weight_scale'", prefix)
    yield from wants(specs, "weight_scale", ["F32", "BF16", "F16"], [(weight.shape[0], 1)], prefix)


def _one(prefix: str, specs: Specs) -> Iterator[Violation]:
    if "input_scale" not in specs:
        yield missing("refuse", "input_scale", "fp8-pertensor has static activations: input_scale", prefix)


def _blocks(prefix: str, specs: Specs) -> Iterator[Violation]:
    weight = specs["weight"]
    if len(weight.shape) == 2:
        n, k = weight.shape
        yield from wants(specs, "weight_scale", ["F32"], [(-(-n // 128), -(-k // 128))], prefix)


def _nvfp4(prefix: str, specs: Specs) -> Iterator[Violation]:
    weight = specs["weight"]
    if "weight_scale" not in specs:
        yield missing("refuse", "weight_scale", f"KeyError: '{prefix}.weight_scale'", prefix)
    if len(weight.shape) == 2:
        n, blocks = weight.shape[0], weight.shape[1] // 8
        padded = (-(-n // 128) * 128, -(-blocks // 4) * 4)
        yield from wants(specs, "weight_scale", ["F8_E4M3", "U8"], [padded], prefix)
    if {"alpha", "input_global_scale"} <= set(specs) or {"weight_global_scale", "input_absmax"} <= set(specs):
        return
    if "weight_global_scale" in specs:
        message = "no input_absmax: a calib.pt with the layer's absmax must lie beside the file"
        yield Violation("environment", "calibration", message, prefix)
        return
    message = f"KeyError: '{prefix}.input_global_scale'"
    expected = "alpha and input_global_scale, or weight_global_scale"
    found = "weight_scale_2" if "weight_scale_2" in specs else "none of them"
    yield Violation("refuse", "global-scale", message, prefix, found, expected)


def _mx(prefix: str, specs: Specs) -> Iterator[Violation]:
    scale = specs.get("weight_scale")
    if scale is None or len(scale.shape) != 2 or scale.shape[0] % 128 or scale.shape[1] % 4:
        message = "block scales must be swizzled and padded to tiles of 128 x 4"
        yield Violation("refuse", "weight_scale-shape", message, prefix, str(scale) if scale else "none")


_RULES = {
    "int8": _rows,
    "fp8": _rows,
    "fp8-pertensor": _one,
    "fp8-b128-deepgemm": _blocks,
    "nvfp4": _nvfp4,
    "mx": _mx,
}

LIGHTX2V = LightX2V()
