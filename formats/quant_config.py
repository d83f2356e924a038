"""What a checkpoint says of its quantisation outside of any layer: config.json, or the same object in the header.

Carriers, the nearest to the tensors first: header entry `quantization_config`; header entry `_quantization_metadata`
when it is such an object and no list of layers; `quantization_config` in config.json; hf_quant_config.json's content
(FORMATS_OTHER sections 1 to 8). Marker tensors of single layers are not looked at here and come before all of this.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any, NamedTuple

from qconvert.formats.base import Group
from qconvert.formats.header import strict_json
from qconvert.formats.marker import HEADER_KEY
from qconvert.formats.patterns import Pattern, compile_all

CONFIG_KEY = "quantization_config"


class QuantConfig(NamedTuple):
    """`method`: who made the file ("modelopt", "compressed-tensors", "fp8", ...), "" where nothing says so."""

    method: str
    document: Mapping[str, Any]
    #: Where it was found, in words.
    carrier: str

    @property
    def algo(self) -> str:
        """ModelOpt's `quant_algo`, in upper case; hf_quant_config.json keeps it one level down."""
        inner = self.document.get("quantization")
        nested = inner.get("quant_algo") if isinstance(inner, Mapping) else None
        return str(self.document.get("quant_algo") or nested or "").upper()

    def words(self) -> str:
        """For findings: what says so."""
        return f"{self.carrier}: {self.method}" + (f" {self.algo}" if self.algo else "")


NONE = QuantConfig("", {}, "")


def quant_config(group: Group) -> QuantConfig:
    """The configuration that speaks of this layer's file."""
    return checkpoint_config(group.metadata, group.config)


def header_config(metadata: Mapping[str, str]) -> QuantConfig:
    """The configuration in the header alone."""
    for key in (CONFIG_KEY, HEADER_KEY):
        document = _parsed(metadata[key]) if key in metadata else None
        if document:
            method = _method(document)
            if method:
                return QuantConfig(method, document, f"header {key}")
    return NONE


def checkpoint_config(metadata: Mapping[str, str], config: Mapping[str, Any]) -> QuantConfig:
    """The header's configuration, else that of the JSON files beside it."""
    found = header_config(metadata)
    if found.method:
        return found
    for document in _documents(config):
        method = _method(document)
        if method:
            return QuantConfig(method, document, "config.json")
    return NONE


def _documents(config: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Where a config.json may keep it: on its own, in a text model's part, or being nothing else."""
    for owner in (config, config.get("text_config"), config.get("llm_config")):
        if isinstance(owner, Mapping) and isinstance(owner.get(CONFIG_KEY), Mapping):
            yield owner[CONFIG_KEY]
    if "quant_method" in config or "quant_algo" in config:
        yield config
    if isinstance(config.get("quantization"), Mapping) and "producer" in config:
        yield config


def _method(document: Mapping[str, Any]) -> str:
    producer = document.get("producer")
    if isinstance(producer, Mapping) and producer.get("name") == "modelopt":
        return "modelopt"
    method = document.get("quant_method") or document.get("method")
    if not isinstance(method, str):
        return ""
    method = method.lower()
    return "modelopt" if method.startswith("modelopt") else method


@lru_cache(maxsize=64)
def _parsed(text: str) -> Mapping[str, Any] | None:
    try:
        document = strict_json(text)
    except ValueError:
        return None
    return document if isinstance(document, dict) else None


def scheme_weights(config: QuantConfig, prefix: str) -> Mapping[str, Any]:
    """compressed-tensors' `weights` arguments for a layer: by name, by "re:" pattern, else the file's one scheme.

    Empty where the configuration is another one or leaves several schemes open.
    """
    if config.method != "compressed-tensors":
        return {}
    groups = config.document.get("config_groups")
    schemes: list[tuple[list[str], Mapping[str, Any]]] = []
    for group in groups.values() if isinstance(groups, Mapping) else ():
        weights = group.get("weights") if isinstance(group, Mapping) else None
        if isinstance(weights, Mapping):
            targets = group.get("targets")
            words = [t for t in targets if isinstance(t, str)] if isinstance(targets, list) else []
            schemes.append((words, weights))
    if len(schemes) == 1:
        return schemes[0][1]
    for words, weights in schemes:
        if prefix in words or any(p.match(prefix) for p in _patterns(words)):
            return weights
    return {}


def _patterns(targets: list[str]) -> tuple[Pattern, ...]:
    return compile_all(tuple(t.removeprefix("re:") for t in targets if t.startswith("re:")))
