"""vllm-omni 0.30.0: diffusers-style folders whose config.json names the method (CONTRACTS_OTHER section 2; read)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from qconvert.formats.quant_config import QuantConfig
from qconvert.formats.tensors import HeaderView
from qconvert.runtime.contracts.base import Kind, LayerVerdict, Verdict, Violation
from qconvert.runtime.contracts.others import (
    OtherContract,
    Specs,
    kind_of,
    missing,
    scaled_layers,
    wants,
)

_INT8, _MODELOPT, _SVDQUANT = "vllm_omni_int8", "vllm_omni_modelopt", "vllm_omni_svdquant"
_INT8_KEYS = {
    "quant_method",
    "method",
    "is_checkpoint_int8_serialized",
    "activation_scheme",
    "ignored_layers",
}
_ALGOS = ("FP8", "FP8_PER_CHANNEL_PER_TOKEN", "NVFP4", "MIXED_PRECISION")
_ASCEND = {"mxfp8", "mxfp4", "mxfp4_dualscale"}
_LayerRule = Callable[[str, Specs], Iterator[Violation]]


class VllmOmni(OtherContract):
    """int8 with is_checkpoint_int8_serialized, ModelOpt, SVDQuant nvfp4; the rest goes to vLLM or is refused."""

    name = "vllm-omni-0.30"
    configs: Mapping[str, str] = {
        _INT8: "DiffusionInt8Config",
        _MODELOPT: "ModelOptConfig",
        _SVDQUANT: "SVDQuantConfig",
    }
    targets: Mapping[str, str] = {_INT8: "vllm_omni_int8", _MODELOPT: "modelopt_fp8"}

    def judge(self, view: HeaderView) -> Verdict:
        said = self.config(view)
        if not view.config:
            # A single file is a model only for one pipeline, which refuses any quantisation.
            return self.plain(view, "no config.json: not a diffusers-style folder")
        if not said.method:
            return self.plain(view, "config.json names no quant_method")
        if said.method == "int8":
            return self._layers(view, _INT8, list(_int8_config(said)), _int8)
        if said.method == "modelopt":
            return self._layers(view, _MODELOPT, list(_modelopt_config(said)), _modelopt)
        if said.method == "svdquant":
            return self._layers(view, _SVDQUANT, list(_svdquant_config(said)), _svdquant)
        return self.verdict(None, (), [_other(said.method)])

    def planned(self, config: str, kind: Kind, n: int, k: int) -> Iterator[Violation]:
        if kind == "embedding":
            yield Violation("refuse", "embedding-format", "only linear layers are built quantised")
        elif config == _SVDQUANT and k % 16:
            message = "K must be a multiple of 16"
            yield Violation("refuse", "shape-multiple", message, None, str(k), "a multiple of 16")

    def _layers(
        self, view: HeaderView, config: str, violations: list[Violation], rule: _LayerRule
    ) -> Verdict:
        layers = []
        for prefix, specs in scaled_layers(view, "weight_scale", "weight_scale_2", "wscales").items():
            found = list(rule(prefix, specs))
            if kind_of(prefix) == "embedding":
                found += self.planned(config, "embedding", 0, 0)
            if prefix in view.markers:
                message = "comfy_quant is not read: a rotation it speaks of is not undone"
                found.append(Violation("trap", "marker-unread", message, prefix))
            layers.append(LayerVerdict(prefix, kind_of(prefix), _format(specs), config, tuple(found)))
        if not layers:
            message = "the configuration declares quantised layers, the file has none: left uninitialised"
            violations.append(Violation("trap", "no-layers", message))
        return self.verdict(config, layers, violations)


def _format(specs: Specs) -> str:
    weight = specs.get("weight")
    if "qweight" in specs:
        return "svdquant"
    return {"I8": "int8", "U8": "nvfp4", "F8_E4M3": "fp8"}.get(weight.dtype if weight else "", "unknown")


def _int8_config(said: QuantConfig) -> Iterator[Violation]:
    document = said.document
    if document.get("is_checkpoint_int8_serialized") is not True:
        message = (
            "without is_checkpoint_int8_serialized the weights are quantised while loading, codes included"
        )
        yield Violation("trap", "not-serialized", message, None, "absent", "true")
    for key in sorted(set(document) - _INT8_KEYS):
        message = f"TypeError: unexpected keyword argument {key!r}"
        yield Violation("refuse", "config-key", message, None, key, ", ".join(sorted(_INT8_KEYS)))
    scheme = document.get("activation_scheme", "dynamic")
    if scheme != "dynamic":
        yield Violation(
            "refuse", "activation-scheme", "only dynamic activations", None, str(scheme), "dynamic"
        )


def _int8(prefix: str, specs: Specs) -> Iterator[Violation]:
    weight = specs.get("weight")
    if weight is None or weight.dtype != "I8" or len(weight.shape) != 2:
        found = str(weight) if weight else "none"
        yield Violation("refuse", "weight-dtype", "weight must be int8 [N,K]", prefix, found, "I8 [N,K]")
        return
    if "weight_scale" not in specs:
        message = "a missing weight_scale is only warned of: the codes are used with whatever is there"
        yield missing("trap", "weight_scale", message, prefix)
    yield from wants(specs, "weight_scale", ["F32"], [(weight.shape[0], 1)], prefix)


def _modelopt_config(said: QuantConfig) -> Iterator[Violation]:
    if said.algo not in _ALGOS:
        message = f"ModelOpt quant_algo {said.algo or 'missing'} is not supported"
        yield Violation("refuse", "quant-algo", message, None, said.algo or "none", ", ".join(_ALGOS))


def _modelopt(prefix: str, specs: Specs) -> Iterator[Violation]:
    weight, scale = specs.get("weight"), specs.get("weight_scale")
    if weight is None or weight.dtype not in ("U8", "F8_E4M3") or len(weight.shape) != 2:
        found = str(weight) if weight else "none"
        yield Violation("refuse", "weight-dtype", "no ModelOpt weight", prefix, found, "F8_E4M3 or U8, 2-D")
        return
    n = weight.shape[0]
    if weight.dtype == "U8":
        if "pre_quant_scale" in specs:
            message = (
                "ModelOpt NVFP4 does not consume pre_quant_scale. Export the checkpoint with pre-quant scales "
                "folded into the weights."
            )
            yield Violation("refuse", "pre-quant-scale", message, prefix)
        yield from wants(specs, "weight_scale", ["F8_E4M3"], [(n, weight.shape[1] // 8)], prefix)
        for suffix in ("weight_scale", "weight_scale_2"):
            if suffix not in specs:
                yield missing("trap", suffix, f"a missing {suffix} is only warned of", prefix)
        return
    if scale is None:
        yield missing("refuse", "weight_scale", "Missing ModelOpt FP8 weight_scale", prefix)
        return
    k = weight.shape[1]
    one = all(size == 1 for size in scale.shape)
    blocks = len(scale.shape) == 4 and scale.shape[1] == scale.shape[3] == 1
    if not (one or scale.shape in ((n,), (n, k)) or blocks):
        message = "Unsupported ModelOpt FP8 weight_scale shape"
        yield Violation(
            "refuse",
            "weight_scale-shape",
            message,
            prefix,
            str(list(scale.shape)),
            "1 element, [N], 4-D blocks",
        )


def _svdquant_config(said: QuantConfig) -> Iterator[Violation]:
    precision = said.document.get("precision", "nvfp4")
    if precision != "nvfp4":
        yield Violation("refuse", "precision", "only nvfp4 is loaded", None, str(precision), "nvfp4")
    if said.document.get("act_unsigned"):
        yield Violation(
            "refuse", "act-unsigned", "unsigned activations are not loaded", None, "true", "false"
        )
    message = "validated on SM103 only: compute capability 10.3"
    yield Violation("environment", "compute-capability", message)


def _svdquant(prefix: str, specs: Specs) -> Iterator[Violation]:
    weight = specs.get("qweight")
    if weight is None or weight.dtype != "I8" or len(weight.shape) != 2:
        yield missing("refuse", "qweight", "qweight must be int8 [N,K/2]", prefix)
        return
    n, k = weight.shape[0], weight.shape[1] * 2
    shapes: dict[str, tuple[str, tuple[int, ...]]] = {
        "wscales": ("F8_E4M3", (k // 16, n)),
        "smooth_factor": ("BF16", (k,)),
        "wcscales": ("BF16", (n,)),
        "wtscale": ("BF16", (1,)),
    }
    for suffix, (dtype, shape) in shapes.items():
        yield from wants(specs, suffix, [dtype], [shape], prefix)
        if suffix not in specs:
            yield missing("refuse", suffix, f"{suffix} is required", prefix)
    if k % 16:
        message = "K must be a multiple of 16"
        yield Violation("refuse", "shape-multiple", message, prefix, str(k), "a multiple of 16")


def _other(method: str) -> Violation:
    if method in _ASCEND:
        message = "currently only supported on NPU (Ascend) and XPU (Intel) platforms."
        return Violation("environment", "platform", message, None, method)
    if method == "bitsandbytes":
        message = "bitsandbytes quantises while loading; pre-quantised weights have no loader"
        return Violation("refuse", "no-loader", message, None, method)
    if method == "gguf":
        return Violation("refuse", "no-loader", "gguf has no loader in this version", None, method)
    if method in ("auto-round", "inc", "torchao", "fp8", "compressed-tensors"):
        return Violation("note", "not-judged", f"quant_method {method!r} is not judged here", None, method)
    message = f"Unknown quantization method: {method}"
    return Violation("refuse", "method-unknown", message, None, method, "int8, modelopt, svdquant, ...")


VLLM_OMNI = VllmOmni()
