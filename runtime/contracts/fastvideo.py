"""fastvideo 0.2.1's text encoders (CONTRACTS_OTHER section 4; read). Its DiTs take no quantised file at all."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from qconvert.formats.quant_config import CONFIG_KEY, QuantConfig, header_config
from qconvert.formats.tensors import HeaderView
from qconvert.runtime.contracts.base import Kind, LayerVerdict, Verdict, Violation
from qconvert.runtime.contracts.common import HEADER_KEY, suffixes, tensors_by_layer
from qconvert.runtime.contracts.others import (
    OtherContract,
    Specs,
    kind_of,
    missing,
    scaled_layers,
    wants,
)

_BLOCK, _LEGACY = "fastvideo_fp8", "fastvideo_absmax_fp8"
_TILE = 128


class FastVideo(OtherContract):
    """Block fp8 of MiniMax-H3's encoder, and legacy scaled_fp8 with its override options."""

    name = "fastvideo-0.2"
    configs: Mapping[str, str] = {_BLOCK: "MiniMaxH3CheckpointFP8", _LEGACY: "AbsMaxFP8Config"}

    def judge(self, view: HeaderView) -> Verdict:
        if "scaled_fp8" in suffixes(view):
            return self._legacy(view)
        said = self.config(view)
        if not said.method:
            said = header_config(view.metadata)
        if not said.method and (HEADER_KEY in view.metadata or CONFIG_KEY in view.metadata):
            message = "Quantized text-encoder checkpoint does not declare quant_method"
            return self.verdict(None, (), [Violation("refuse", "no-quant-method", message)])
        if not said.method:
            return self.plain(view, "neither config.json nor the header names a quant_method")
        if said.method != "fp8":
            message = f"does not support serialized {said.method!r} checkpoints (supported: fp8)"
            expected = "fp8; MiniMax-H3's nvfp4 encoders need a version after 0.2.1"
            return self.verdict(
                None, (), [Violation("refuse", "method", message, None, said.method, expected)]
            )
        return self._block(view, said)

    def planned(self, config: str, kind: Kind, n: int, k: int) -> Iterator[Violation]:
        if config == _BLOCK and (n % _TILE or k % _TILE):
            message = "blocks of 128 x 128 must fill the weight"
            yield Violation("refuse", "shape-multiple", message, None, f"[{n}, {k}]", "multiples of 128")

    def _block(self, view: HeaderView, said: QuantConfig) -> Verdict:
        document = said.document
        violations = []
        if document.get("activation_scheme", "dynamic") != "dynamic":
            message = "only dynamic activations"
            violations.append(
                Violation(
                    "refuse", "activation-scheme", message, None, str(document.get("activation_scheme"))
                )
            )
        if (document.get("weight_block_size") or [_TILE, _TILE]) != [_TILE, _TILE]:
            message = "weight_block_size must be [128, 128]"
            violations.append(
                Violation("refuse", "block-size", message, None, str(document["weight_block_size"]))
            )
        if not document.get("modules_to_not_convert"):
            message = "modules_to_not_convert must list the vision stack and no language layer"
            violations.append(Violation("refuse", "modules-to-not-convert", message))
        message = "MiniMax-H3's Qwen3-VL encoder only, compute capability 10.x or 12.x"
        violations.append(Violation("environment", "model-and-device", message))
        layers = []
        for prefix, specs in scaled_layers(view, "weight_scale_inv").items():
            found = list(_tile(prefix, specs))
            layers.append(LayerVerdict(prefix, kind_of(prefix), "fp8", "block fp8", tuple(found)))
        return self.verdict(_BLOCK, layers, violations)

    def _legacy(self, view: HeaderView) -> Verdict:
        message = "only with --override-text-encoder-safetensors and --override-text-encoder-quant AbsMaxFP8"
        violations = [Violation("environment", "override", message)]
        layers = []
        for prefix, specs in sorted(tensors_by_layer(view).items()):
            weight = specs.get("weight")
            if weight is None or len(weight.shape) != 2:
                continue
            if weight.dtype != "F8_E4M3":
                if kind_of(prefix) == "linear":
                    message = "every linear layer must be quantised; whether this is one the model knows"
                    violations.append(Violation("note", "unquantised-layer", message, prefix, weight.dtype))
                continue
            found = list(wants(specs, "scale_weight", ["F32"], [], prefix))
            for suffix in ("scale_weight", "scale_input"):
                if suffix not in specs:
                    found.append(missing("refuse", suffix, f"{suffix} is required", prefix))
            layers.append(LayerVerdict(prefix, kind_of(prefix), "fp8", "AbsMaxFP8", tuple(found)))
        return self.verdict(_LEGACY, layers, violations)


def _tile(prefix: str, specs: Specs) -> Iterator[Violation]:
    weight = specs.get("weight")
    if weight is None or weight.dtype != "F8_E4M3" or len(weight.shape) != 2:
        found = str(weight) if weight else "none"
        yield Violation("refuse", "weight-dtype", "weight must be e4m3 [N,K]", prefix, found, "F8_E4M3")
        return
    n, k = weight.shape
    if n % _TILE or k % _TILE:
        message = "blocks of 128 x 128 must fill the weight"
        yield Violation("refuse", "shape-multiple", message, prefix, str([n, k]), "multiples of 128")
    if "weight_scale_inv" not in specs:
        yield missing("refuse", "weight_scale_inv", "weight_scale_inv is required", prefix)
    yield from wants(specs, "weight_scale_inv", ["F32"], [(n // _TILE, k // _TILE)], prefix)


FASTVIDEO = FastVideo()
