"""sglang 0.5.23's diffusion runtime on ModelOpt folders and row-wise fp8 files.

Read in its source and compared with its own classes (tests): quantization_utils.py, modelopt_quant.py, rowwise_fp8.py,
fsdp_load.py. ComfyUI files go another way there, judged by the contract sglang-0.5.23.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from qconvert.formats.patterns import wildcard
from qconvert.formats.quant_config import QuantConfig
from qconvert.formats.tensors import HeaderView, Spec
from qconvert.runtime.contracts.base import Kind, LayerVerdict, Verdict, Violation
from qconvert.runtime.contracts.common import HEADER_KEY, dtypes, tensors_by_layer
from qconvert.runtime.contracts.others import (
    OtherContract,
    Specs,
    kind_of,
    missing,
    scaled_layers,
    wants,
)

ROWWISE = "rowwise-float8_e4m3fn"
#: build_nvfp4_config_from_safetensors_list takes such names for Black Forest Labs' own files.
_PACKED_QKV = r"(double_blocks\.\d+\.(img|txt)_attn\.qkv|single_blocks\.\d+\.linear1)\."
_FP4, _FP8, _ROWS = "modelopt_nvfp4", "modelopt_fp8", "rowwise_fp8"
_METHODS = {_FP4: "ModelOptFp4LinearMethod", _FP8: "ModelOptFp8LinearMethod", _ROWS: "Fp8LinearMethod"}
#: What a layer of each config may hold beside its weight.
_PARTS = {
    _FP4: {"weight", "weight_scale", "weight_scale_2", "input_scale", "bias"},
    _FP8: {"weight", "weight_scale", "input_scale", "bias"},
    _ROWS: {"weight", "weight_scale", "input_scale", "bias"},
}


class SglangModelOpt(OtherContract):
    """quantization_config with quant_method "modelopt" in config.json or the header, NVFP4 or FP8; without any,
    nvfp4 is inferred from the tensors; header version 1.1 means row-wise fp8.
    """

    name = "sglang-modelopt-0.5.23"
    configs: Mapping[str, str] = {
        _FP4: "ModelOptFp4Config",
        _FP8: "ModelOptFp8Config",
        _ROWS: "RowwiseFp8Config",
    }
    targets: Mapping[str, str] = {_FP4: _FP4, _FP8: _FP8, _ROWS: _ROWS}

    def judge(self, view: HeaderView) -> Verdict:
        if view.markers:
            message = "ComfyUI markers: such files are judged by the contract sglang-0.5.23"
            return self.verdict(None, (), [Violation("refuse", "comfy-markers", message)])
        listed = _header_list(view)
        if listed is not None:
            return self._rowwise(view, listed)
        said = self.config(view)
        if said.method != "modelopt":
            if "U8" in dtypes(view) and any(map(_is_nvfp4, tensors_by_layer(view).values())):
                note = "no quantization_config: nvfp4 is inferred from the tensors"
                return self._layers(
                    view, _FP4, said, [Violation("note", "inferred", note), *_reading(view, said)]
                )
            if said.method:
                message = f"quant_method {said.method!r} is not judged here"
                return self.verdict(None, (), [Violation("refuse", "other-method", message)])
            return self.plain(view, "no quantization_config")
        problem = _algorithm(said)
        if problem is not None:
            return self.verdict(None, (), [problem])
        if said.algo != "NVFP4":
            return self._layers(view, _FP8, said, [])
        return self._layers(view, _FP4, said, [*_settings(said), *_reading(view, said)])

    def planned(self, config: str, kind: Kind, n: int, k: int) -> Iterator[Violation]:
        if kind == "embedding":
            message = "only linear layers are built quantised"
            yield Violation("refuse", "embedding-format", message)
        elif config == _FP4 and k % 16:
            message = f"Unsupported model when input features size is {k}, not multiple of 16, for NVFP4 quantization."
            yield Violation("refuse", "shape-multiple", message, None, str(k), "a multiple of 16")

    # ---- ModelOpt

    def _layers(
        self, view: HeaderView, config: str, said: QuantConfig, violations: list[Violation]
    ) -> Verdict:
        listed = _flat(said).get("ignore")
        ignore = [str(pattern) for pattern in listed] if isinstance(listed, list) else []
        layers = []
        for prefix, specs in scaled_layers(view, "weight_scale", "weight_scale_2").items():
            rules = _nvfp4 if config == _FP4 else _fp8
            found = [*self.planned_of(config, prefix, specs), *rules(prefix, specs)]
            found += list(_extra(prefix, specs, _PARTS[config]))
            if config == _FP8 and any(wildcard(pattern, prefix) for pattern in ignore):
                message = "listed in ignore: built unquantised, fp8 codes are used as weights"
                found.append(Violation("trap", "ignored-quantised", message, prefix))
            layers.append(
                LayerVerdict(prefix, kind_of(prefix), _format(specs), _METHODS[config], tuple(found))
            )
        if config == _FP4 and layers:
            message = "nvfp4 checkpoints need compute capability 10.0 or newer (Blackwell)"
            violations.append(Violation("environment", "compute-capability", message))
        if config == _FP8:
            violations += _not_ignored(view, ignore)
        return self.verdict(config, layers, violations)

    def planned_of(self, config: str, prefix: str, specs: Specs) -> Iterator[Violation]:
        weight = specs.get("weight")
        if weight is not None and len(weight.shape) == 2:
            columns = weight.shape[1] * (2 if weight.dtype == "U8" else 1)
            for violation in self.planned(config, kind_of(prefix), weight.shape[0], columns):
                yield Violation(
                    violation.severity,
                    violation.rule,
                    violation.message,
                    prefix,
                    violation.found,
                    violation.expected,
                )

    # ---- row-wise fp8

    def _rowwise(self, view: HeaderView, document: Mapping[str, Any]) -> Verdict:
        entries = document.get("layers")
        listed = entries if isinstance(entries, dict) else {}
        names = {
            prefix: entry.get("format") if isinstance(entry, dict) else entry
            for prefix, entry in listed.items()
        }
        violations = list(_recipe(document, names))
        tensors = tensors_by_layer(view)
        rows = sorted(prefix for prefix, name in names.items() if name == ROWWISE)
        layers = [
            LayerVerdict(p, kind_of(p), ROWWISE, _METHODS[_ROWS], tuple(_row_layer(p, tensors.get(p, {}))))
            for p in rows
        ]
        for prefix, specs in sorted(tensors.items()):
            for suffix in ("weight_scale", "input_scale"):
                if suffix in specs and prefix not in rows:
                    message = f"unexpected quantization tensor '{prefix}.{suffix}' for a non-FP8 layer"
                    violations.append(Violation("refuse", "unlisted-scale", message, prefix))
        return self.verdict(_ROWS, layers, violations)


def _header_list(view: HeaderView) -> Mapping[str, Any] | None:
    """The header's list of layers, where it speaks of row-wise fp8 or is of a version that only that has."""
    try:
        document = json.loads(view.metadata.get(HEADER_KEY, "null"))
    except (ValueError, RecursionError):
        return None
    if not isinstance(document, dict) or not isinstance(document.get("layers"), dict):
        return None
    entries = document["layers"].values()
    formats = [entry.get("format") if isinstance(entry, dict) else entry for entry in entries]
    configs = document.get("quant_configs")
    return document if ROWWISE in formats or (isinstance(configs, dict) and ROWWISE in configs) else None


def _recipe(document: Mapping[str, Any], names: Mapping[str, Any]) -> Iterator[Violation]:
    version = document.get("format_version")
    if version != "1.1":
        message = f"unsupported quantization format_version {version!r}; expected one of ['1.1']"
        yield Violation("refuse", "format-version", message, None, repr(version), "1.1")
    if not names:
        yield Violation("refuse", "no-layers", f"{HEADER_KEY} has no 'layers' map")
    for prefix, name in sorted(names.items()):
        if name not in (ROWWISE, "bf16"):
            message = f"unknown quant format {name!r} for layer {prefix!r}"
            yield Violation("refuse", "format-unknown", message, prefix, str(name), f"{ROWWISE} or bf16")
    if names and ROWWISE not in names.values():
        yield Violation("refuse", "no-layers", f"{HEADER_KEY} declares no quantized layers ({ROWWISE})")
    configs = document.get("quant_configs")
    recipe = configs.get(ROWWISE) if isinstance(configs, dict) else None
    if not isinstance(recipe, dict):
        yield Violation("refuse", "recipe", f"missing quant_configs[{ROWWISE!r}] layout descriptor")
    elif recipe.get("scale_recipe") != "rowwise":
        message = f"unsupported FP8 scale_recipe {recipe.get('scale_recipe')!r}; only 'rowwise' is supported"
        yield Violation("refuse", "recipe", message)


def _row_layer(prefix: str, specs: Specs) -> Iterator[Violation]:
    weight = specs.get("weight")
    if weight is None:
        yield missing("refuse", "weight", f"FP8 layer {prefix!r} missing weight tensor", prefix)
        return
    if "weight_scale" not in specs:
        yield missing("refuse", "weight_scale", f"FP8 layer {prefix!r} missing weight_scale tensor", prefix)
    yield from wants(specs, "weight", ["F8_E4M3"], [], prefix)
    if len(weight.shape) != 2:
        message = f"{prefix}.weight: expected 2-D weight"
        yield Violation("refuse", "weight-shape", message, prefix, str(list(weight.shape)))
        return
    yield from wants(specs, "weight_scale", ["F32"], [(weight.shape[0],)], prefix)
    yield from wants(specs, "input_scale", ["F32"], [(1,)], prefix)


def _algorithm(said: QuantConfig) -> Violation | None:
    """Why a ModelOpt algorithm is not taken."""
    algo = said.algo
    if algo in ("FP8", "NVFP4"):
        return None
    if algo == "MIXED_PRECISION":
        message = "ModelOpt mixed precision is not supported by the current SGLang diffusion runtime."
    else:
        message = f"Unsupported ModelOpt quant_algo for diffusion: {algo}"
    return Violation("refuse", "quant-algo", message, None, algo or "none", "FP8 or NVFP4")


def _flat(said: QuantConfig) -> Mapping[str, Any]:
    """The configuration with what hf_quant_config.json nests at the top."""
    inner = said.document.get("quantization")
    if not isinstance(inner, Mapping):
        return said.document
    return {**said.document, **inner, "ignore": inner.get("exclude_modules", [])}


def _settings(said: QuantConfig) -> Iterator[Violation]:
    document = _flat(said)
    groups = document.get("config_groups")
    first: Any = next(iter(groups.values()), {}) if isinstance(groups, Mapping) else {}
    weights = first.get("weights") if isinstance(first, Mapping) else None
    size = document.get("group_size") or (weights.get("group_size") if isinstance(weights, Mapping) else None)
    if size is None or document.get("ignore", []) is None:
        message = "NVFP4 quantization requires group_size and exclude_modules in the quantization config"
        yield Violation(
            "refuse", "group-size", message, None, f"group_size {size}", "group_size 16 and ignore"
        )
    elif size != 16:
        yield Violation("note", "group-size", "group_size of the tensors is preferred", None, str(size), "16")


def _reading(view: HeaderView, said: QuantConfig) -> Iterator[Violation]:
    """How bits will be read: names of a packed qkv override what the configuration says."""
    document = said.document
    high = bool(document.get("swap_weight_nibbles", document.get("checkpoint_uses_packed_qkv", False)))
    layout = str(document.get("checkpoint_weight_scale_layout", "linear"))
    stated = f"{'high' if high else 'low'} nibble first, block scales {layout}"
    packed = next((name for name in sorted(view.tensors) if re.match(_PACKED_QKV, name)), None)
    if packed is None or (high and layout == "swizzled"):
        yield Violation("note", "reading", f"read with the {stated}")
    else:
        message = (
            f"names of a packed qkv ({packed}): read with the high nibble first and block scales swizzled"
        )
        yield Violation(
            "trap", "packed-qkv", message, None, stated, "high nibble first, block scales swizzled"
        )


def _is_nvfp4(specs: Mapping[str, Spec]) -> bool:
    weight, scale = specs.get("weight"), specs.get("weight_scale")
    packed = weight is not None and weight.dtype == "U8"
    return packed and scale is not None and scale.dtype == "F8_E4M3" and len(scale.shape) >= 2


def _format(specs: Specs) -> str:
    weight = specs.get("weight")
    return {"U8": "nvfp4", "F8_E4M3": "fp8", "I8": "int8"}.get(weight.dtype if weight else "", "unknown")


def _nvfp4(prefix: str, specs: Specs) -> Iterator[Violation]:
    weight = specs.get("weight")
    if weight is None or not _is_nvfp4(specs):
        message = "no U8 weight with e4m3 block scales: built unquantised, its shape does not fit"
        found = ", ".join(f"{suffix} {spec}" for suffix, spec in specs.items())
        yield Violation("refuse", "nvfp4-tensors", message, prefix, found, "weight U8, weight_scale F8_E4M3")
        return
    if len(weight.shape) == 2:
        logical = (weight.shape[0], weight.shape[1] * 2 // 16)
        yield from wants(specs, "weight_scale", [], [logical], prefix)
    yield from wants(specs, "weight_scale_2", [], [(), (1,)], prefix)
    yield from wants(specs, "input_scale", [], [(), (1,)], prefix)
    if "weight_scale_2" not in specs:
        yield missing("trap", "weight_scale_2", "a missing weight_scale_2 becomes 1.0 without a word", prefix)
    if "input_scale" not in specs:
        message = "a missing input_scale becomes 1.0: activations are quantised without calibration"
        yield missing("note", "input_scale", message, prefix)


def _fp8(prefix: str, specs: Specs) -> Iterator[Violation]:
    weight = specs.get("weight")
    if weight is None or weight.dtype != "F8_E4M3":
        message = "every linear layer that is not in ignore is built as fp8 e4m3: this one is cast without its scale"
        yield Violation(
            "trap", "weight-dtype", message, prefix, weight.dtype if weight else "none", "F8_E4M3"
        )
        return
    yield from wants(specs, "weight_scale", [], [(), (1,)], prefix)
    yield from wants(specs, "input_scale", [], [(), (1,)], prefix)
    if "weight_scale" not in specs:
        yield missing("trap", "weight_scale", "a missing weight_scale becomes 1.0 without a word", prefix)
    if "input_scale" not in specs:
        message = "a missing input_scale becomes 1.0: activations beyond 448 are clipped"
        yield missing("note", "input_scale", message, prefix)


def _extra(prefix: str, specs: Specs, known: set[str]) -> Iterator[Violation]:
    for suffix in sorted(set(specs) - known):
        message = f"Parameter {prefix}.{suffix} not found in custom model state dict."
        yield Violation("refuse", "parameter-unknown", message, prefix, suffix)


def _not_ignored(view: HeaderView, ignore: list[str]) -> Iterator[Violation]:
    """Plain 2-D weights that the configuration does not name; whether they are linear layers the model knows."""
    for prefix, specs in sorted(tensors_by_layer(view).items()):
        weight = specs.get("weight")
        plain = weight is not None and weight.dtype in ("BF16", "F16", "F32") and len(weight.shape) == 2
        if plain and kind_of(prefix) == "linear" and not any(wildcard(p, prefix) for p in ignore):
            message = (
                "unquantised and not in ignore: if the model builds it as a linear layer it is cast to fp8"
            )
            yield Violation("note", "not-ignored", message, prefix)


SGLANG_MODELOPT = SglangModelOpt()
