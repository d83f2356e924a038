"""diffusers 0.42.1 (CONTRACTS_OTHER section 3; its BFL reader and its configurations were run).

A single file is quantised only by the configuration that its caller passes; a folder by its config.json.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from qconvert.formats.quant_config import QuantConfig, header_config
from qconvert.formats.tensors import HeaderView
from qconvert.runtime.contracts.base import Kind, LayerVerdict, Verdict, Violation
from qconvert.runtime.contracts.common import tensors_by_layer
from qconvert.runtime.contracts.others import (
    OtherContract,
    Specs,
    kind_of,
    missing,
    quantised_weights,
)

_FP8, _NVFP4 = "diffusers_bfl_fp8", "diffusers_bfl_nvfp4"
_METHODS = (
    "bfl", "bitsandbytes_4bit", "bitsandbytes_8bit", "gguf", "quanto", "torchao", "modelopt", "auto-round",
    "nunchaku_lite", "sdnq",
)  # fmt: skip
_LAYERS = {"nvfp4": "BFLNVFP4Linear", "fp8r": "BFLFP8RLinear"}


class Diffusers(OtherContract):
    """Files for BFLQuantizationConfig, and what the other methods of a config.json come to."""

    name = "diffusers-0.42"
    configs: Mapping[str, str] = {_FP8: "BFLQuantizationConfig", _NVFP4: "BFLQuantizationConfig"}
    targets: Mapping[str, str] = {_FP8: _FP8, _NVFP4: _NVFP4}

    def judge(self, view: HeaderView) -> Verdict:
        said = self.config(view)
        beside = view.config.get("quantization_config") is not None
        if beside and said.method == "bfl":
            message = "TypeError: BFLQuantizationConfig.__init__() got an unexpected keyword argument 'quant_method'"
            expected = "no quantization_config; pass BFLQuantizationConfig() to from_single_file"
            return self.verdict(None, (), [Violation("refuse", "config-json", message, expected=expected)])
        if beside and said.method:
            return self.verdict(None, (), list(_method(view, said)))
        if header_config(view.metadata).method == "" and "tensor_names" in view.metadata:
            message = "torchao's own header: load it with TorchAoConfig"
            return self.verdict(None, (), [Violation("note", "torchao", message)])
        return self._single_file(view, said)

    def mending(self, verdict: Verdict) -> str | None:
        return _NVFP4 if any(layer.format == "nvfp4" for layer in verdict.layers) else _FP8

    def planned(self, config: str, kind: Kind, n: int, k: int) -> Iterator[Violation]:
        if kind == "embedding":
            message = "only nn.Linear layers are built quantised"
            yield Violation("refuse", "embedding-format", message)
        elif config == _NVFP4 and k % 16:
            message = "block scales are [N, K/16]"
            yield Violation("refuse", "shape-multiple", message, None, str(k), "K a multiple of 16")

    def _single_file(self, view: HeaderView, said: QuantConfig) -> Verdict:
        if not quantised_weights(view):
            return self.plain(view, "no packed weights")
        scaled = {p: specs for p, specs in sorted(tensors_by_layer(view).items()) if "weight_scale" in specs}
        needs = "nothing is detected in a single file: pass quantization_config=BFLQuantizationConfig()"
        violations = [Violation("environment", "config-passed", needs)]
        if not scaled:
            message = (
                "The checkpoint has no `weight_scale` tensors, so it is not an fp8r or nvfp4 checkpoint."
            )
            violations.append(Violation("refuse", "no-weight-scale", message))
        layers = []
        for prefix, specs in scaled.items():
            scheme = "nvfp4" if "weight_scale_2" in specs else "fp8r"
            rules = _nvfp4 if scheme == "nvfp4" else _fp8r
            found = list(rules(prefix, specs))
            if scheme == "nvfp4" and prefix in view.markers and said.method != "bfl":
                message = (
                    "marked as ComfyUI's nvfp4: high nibble first and swizzled, read the other way round"
                )
                found.append(Violation("trap", "nvfp4-layout", message, prefix))
            layers.append(LayerVerdict(prefix, kind_of(prefix), scheme, _LAYERS[scheme], tuple(found)))
        for prefix in quantised_weights(view):
            if prefix not in scaled and scaled:
                message = "packed without weight_scale: its codes are loaded as weights"
                violations.append(Violation("trap", "not-declared", message, prefix))
        return self.verdict(_NVFP4, layers, violations)


def _method(view: HeaderView, said: QuantConfig) -> Iterator[Violation]:
    method = said.method
    if method == "bitsandbytes":
        method = "bitsandbytes_8bit" if said.document.get("load_in_8bit") else "bitsandbytes_4bit"
    if method not in _METHODS:
        message = f"Unknown quantization type, got {said.method}"
        yield Violation("refuse", "method-unknown", message, None, said.method, ", ".join(_METHODS))
        return
    if method == "gguf":
        yield Violation("refuse", "gguf-folder", "gguf is read from .gguf files only")
        return
    if method == "modelopt" and quantised_weights(view):
        message = "a folder of ModelOpt's state is expected, not packed weights with scales beside them"
        yield Violation("refuse", "modelopt-layout", message)
        return
    yield Violation(
        "note", "not-judged", f"quant_method {said.method!r} is not judged here", None, said.method
    )


def _weight(prefix: str, specs: Specs, scheme: str, dtype: str, torch_name: str) -> Iterator[Violation]:
    weight = specs.get("weight")
    if weight is None or weight.dtype != dtype:
        message = f"{prefix}.weight is not what the {scheme} layout expects: {torch_name}"
        yield Violation("refuse", "weight-dtype", message, prefix, weight.dtype if weight else "none", dtype)


def _fp8r(prefix: str, specs: Specs) -> Iterator[Violation]:
    yield from _weight(prefix, specs, "fp8r", "F8_E4M3", "torch.float8_e4m3fn")
    weight, scale = specs.get("weight"), specs["weight_scale"]
    if weight is None or not weight.shape:
        return
    n = weight.shape[0]
    if scale.shape == (n,) and len(weight.shape) == 2:
        return
    words = "the scale buffer has another shape"
    if not scale.shape:
        words = "IndexError: too many indices for tensor of dimension 0"
    elif scale.shape == (n, 1):
        words = "scales [N,1] spread to [N,N,K]"
    yield Violation("refuse", "weight_scale-shape", words, prefix, str(list(scale.shape)), str([n]))


def _nvfp4(prefix: str, specs: Specs) -> Iterator[Violation]:
    yield from _weight(prefix, specs, "nvfp4", "U8", "torch.uint8")
    weight, scale = specs.get("weight"), specs["weight_scale"]
    if "input_scale" not in specs:
        message = f"{prefix} has `weight_scale_2` but no `input_scale`, which the nvfp4 layout requires."
        yield missing("refuse", "input_scale", message, prefix)
    if weight is None or len(weight.shape) != 2:
        return
    logical = (weight.shape[0], weight.shape[1] // 8)
    if scale.shape != logical or scale.dtype != "F8_E4M3":
        message = "RuntimeError: block scales must be e4m3 [N, K/16], neither padded nor swizzled"
        yield Violation(
            "refuse", "weight_scale-shape", message, prefix, str(scale), f"F8_E4M3{list(logical)}"
        )


DIFFUSERS = Diffusers()
