"""sglang 0.5.23's diffusion runtime on AutoRound's auto_gptq folders.

Read in its source (multimodal_gen and srt, layers/quantization/auto_round.py, gptq/schemes) and compared with its own
config class (tests). The configuration in config.json decides for every linear layer of the model; whether one is
quantised is never looked up in the tensors, so a layer that the configuration does not exempt must be packed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from qconvert.formats.errors import QConvertError
from qconvert.formats.patterns import compile_all, is_broken
from qconvert.formats.quant_config import QuantConfig
from qconvert.formats.tensors import HeaderView, Spec
from qconvert.runtime.contracts.base import Kind, LayerVerdict, Verdict, Violation
from qconvert.runtime.contracts.common import tensors_by_layer
from qconvert.runtime.contracts.others import OtherContract, Specs, kind_of, missing, wants

CONFIG = "auto_gptq"
METHOD = "auto-round"
FORMATS = ("auto_round:auto_gptq", "auto_round:auto_awq")
BACKENDS = ("auto", "gptq", "gptq:marlin", "awq", "awq:marlin", "marlin")
GROUPS = (-1, 32, 64, 128)
#: Tiles of the Marlin kernel.
MIN_N, MIN_K = 64, 128
_SETTINGS = ("bits", "group_size", "sym")
_PARTS = ("qweight", "qzeros", "scales", "g_idx")
#: Characters that make a key of extra_config a pattern.
_SPECIAL = frozenset(r"*+?^$()[]{}|\\")


class SglangAutoRound(OtherContract):
    """quantization_config with quant_method "auto-round" in config.json."""

    name = "sglang-autoround-0.5.23"
    configs: Mapping[str, str] = {CONFIG: "AutoRoundConfig"}
    targets: Mapping[str, str] = {CONFIG: CONFIG}

    def judge(self, view: HeaderView) -> Verdict:
        said = self.config(view)
        if said.method != METHOD:
            if not said.method:
                return self.plain(view, "no quantization_config")
            message = f"quant_method {said.method!r} is not judged here"
            return self.verdict(None, (), [Violation("refuse", "other-method", message)])
        problems = list(_settings(said))
        if problems:
            return self.verdict(None, (), problems)
        layers = []
        try:
            configs = LayerConfigs(said.document)
            for prefix, specs in sorted(tensors_by_layer(view).items()):
                verdict = self._layer(prefix, specs, configs)
                if verdict is not None:
                    layers.append(verdict)
        except QConvertError as error:
            return self.verdict(
                None, (), [Violation("refuse", "extra-config", f"extra_config: {error.line()}")]
            )
        needs = Violation("environment", "compute-capability", "Marlin needs compute capability 8.0 or newer")
        fsdp = Violation("note", "fsdp", "AutoRound checkpoints do not support diffusion FSDP inference")
        return self.verdict(CONFIG, layers, [needs, fsdp])

    def planned(self, config: str, kind: Kind, n: int, k: int) -> Iterator[Violation]:
        if kind == "embedding":
            yield Violation("refuse", "embedding-format", "only linear layers are built quantised")
            return
        if n % MIN_N:
            message = f"Weight output_size_per_partition = {n} is not divisible by  min_thread_n = {MIN_N}"
            yield Violation("refuse", "marlin-n", message, None, str(n), f"a multiple of {MIN_N}")
        if k % MIN_K:
            message = f"Weight input_size_per_partition = {k} is not divisible by min_thread_k = {MIN_K}"
            yield Violation("refuse", "marlin-k", message, None, str(k), f"a multiple of {MIN_K}")

    def _layer(self, prefix: str, specs: Specs, configs: LayerConfigs) -> LayerVerdict | None:
        """The verdict on one layer; None for what is no linear layer."""
        packed, weight = specs.get("qweight"), specs.get("weight")
        kind = kind_of(prefix)
        if packed is None and (weight is None or len(weight.shape) != 2 or kind == "embedding"):
            return None
        bits, group, symmetric = configs.of(prefix)
        if bits >= 16:
            if packed is None:
                return LayerVerdict(prefix, kind, None, "UnquantizedLinearMethod")
            message = "extra_config says 16 bits: built unquantised, the packed weight has no parameter"
            found = [Violation("refuse", "exempt-packed", message, prefix)]
            return LayerVerdict(prefix, kind, "gptq", "UnquantizedLinearMethod", tuple(found))
        if packed is None:
            message = f"the configuration makes it {bits} bit, and the file has it unquantised"
            expected = f'extra_config["{prefix}"] with bits 16'
            found = [Violation("refuse", "not-exempt", message, prefix, str(weight), expected)]
            return LayerVerdict(prefix, kind, None, "GPTQMarlinLinearMethod", tuple(found))
        found = list(_form(prefix, bits, group, symmetric))
        found += list(_tensors(prefix, specs, packed, bits, group))
        flat = len(packed.shape) != 2 or not bits
        n, k = (0, 0) if flat else (packed.shape[1], packed.shape[0] * 32 // bits)
        for violation in self.planned(CONFIG, kind, n, k):
            found.append(
                Violation(
                    violation.severity,
                    violation.rule,
                    violation.message,
                    prefix,
                    violation.found,
                    violation.expected,
                )
            )
        return LayerVerdict(prefix, kind, "gptq", "GPTQMarlinLinearMethod", tuple(found))


class LayerConfigs:
    """What a configuration says of each layer: extra_config by name, by pattern, else the file's own.

    `block_name_to_quantize` is dropped by the diffusion runtime, so it exempts nothing. Raises PatternError for
    patterns that cannot be judged.
    """

    def __init__(self, document: Mapping[str, Any]) -> None:
        self._own = tuple(document.get(key) for key in _SETTINGS)
        extra = document.get("extra_config")
        self._entries: Mapping[str, Any] = extra if isinstance(extra, Mapping) else {}
        # sglang passes over what is no pattern.
        keys = (key for key in self._entries if _SPECIAL & set(key) and not is_broken(key))
        self._patterns = compile_all(tuple(keys))

    def of(self, name: str) -> tuple[int, int, bool]:
        """(bits, group size, symmetric) of a layer. Raises QConvertError for what is no number."""
        entry = self._entries.get(name)
        if entry is None:
            fitting = (pattern for pattern in self._patterns if pattern.fullmatch(name))
            entry = next((self._entries[pattern.text] for pattern in fitting), None)
        bits, group, symmetric = self._own
        if isinstance(entry, Mapping):
            bits, group, symmetric = map(entry.get, _SETTINGS, self._own)
        for key, value in zip(_SETTINGS, (bits, group), strict=False):
            if value is not None and not isinstance(value, int):
                raise QConvertError(f"{key} of {name} is not a whole number", found=repr(value)[:40])
        return int(bits or 0), int(group or 0), bool(symmetric)


def _settings(said: QuantConfig) -> Iterator[Violation]:
    """What the config classes refuse, in their words."""
    document = said.document
    for key in _SETTINGS:
        if key not in document:
            message = f"Cannot find any of {[key]} in the model's quantization config."
            yield Violation("refuse", f"{key}-missing", message)
    if document.get("bits", 4) not in (2, 3, 4, 8):
        message = f"Unsupported weight_bits: {document['bits']}, currently only support  {{8, 2, 3, 4}}"
        yield Violation("refuse", "bits", message)
    if document.get("data_type", "int") != "int":
        message = f"Unsupported data_type: {document['data_type']}, currently only support  {{'int'}}"
        yield Violation("refuse", "data-type", message)
    packing = document.get("packing_format", FORMATS[0])
    if packing not in FORMATS:
        message = f"Unsupported packing_format: {packing}"
        yield Violation("refuse", "packing-format", message, None, str(packing), FORMATS[0])
    elif "gptq" not in str(packing):
        message = "SGLang diffusion currently supports AutoRound auto_gptq checkpoints"
        yield Violation("refuse", "packing-format", message, None, str(packing), FORMATS[0])
    if document.get("backend", "auto") not in BACKENDS:
        yield Violation("refuse", "backend", f"Unsupported backend: {document['backend']}")
    if document.get("desc_act"):
        message = "SGLang's AutoRound GPTQ loader supports desc_act=False only."
        yield Violation("refuse", "desc-act", message)


def _form(prefix: str, bits: int, group: int, symmetric: bool) -> Iterator[Violation]:
    if bits not in (4, 8) or not symmetric:
        message = "The non-Marlin GPTQ CUDA kernel has been removed"
        found = f"{bits} bit, {'symmetric' if symmetric else 'asymmetric'}"
        yield Violation("refuse", "no-kernel", message, prefix, found, "4 or 8 bit, symmetric")
    if group not in GROUPS:
        message = f"Marlin does not support group_size = {group}"
        yield Violation("refuse", "group-size", message, prefix, str(group), f"one of {list(GROUPS)}")


def _tensors(prefix: str, specs: Specs, packed: Spec, bits: int, group: int) -> Iterator[Violation]:
    """Parameters that the layer registers: all of them must be in the file, in these shapes."""
    for suffix in _PARTS:
        if suffix not in specs:
            yield missing(
                "refuse", suffix, f"parameter {prefix}.{suffix} is missing from the checkpoint", prefix
            )
    if packed.dtype != "I32" or len(packed.shape) != 2 or not bits:
        yield Violation("refuse", "qweight-shape", "qweight is not packed int32", prefix, str(packed))
        return
    n, k = packed.shape[1], packed.shape[0] * 32 // bits
    groups = k // (k if group == -1 or not group else group)
    yield from wants(specs, "scales", ("F16", "BF16", "F32"), [(groups, n)], prefix)
    yield from wants(specs, "qzeros", ("I32",), [(groups, n * bits // 32)], prefix)
    yield from wants(specs, "g_idx", ("I32",), [(k,)], prefix)
    for suffix in specs:
        if suffix not in (*_PARTS, "bias"):
            yield Violation("refuse", "unknown-tensor", "no parameter of that name", prefix, suffix)


SGLANG_AUTOROUND = SglangAutoRound()
