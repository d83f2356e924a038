"""fp8 weights, e4m3fn and e5m2: one scale, a scale a row, a scale a block of rows and columns, or none (a plain cast).

Layout and arithmetic: FORMATS "fp8": w = float32(q) * scale. Legacy ComfyUI files call the scale `scale_weight`,
block fp8 (DeepSeek, transformers) `weight_scale_inv`, which multiplies too. The same numbers under other tools'
configurations: FORMATS_OTHER sections 3, 4, 5, 8 (compressed-tensors, ModelOpt, LightX2V, row-wise fp8).
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

from qconvert.formats.base import (
    Codec,
    Codes,
    Group,
    Options,
    Part,
    Recognition,
    Statistic,
    Stored,
    is_row,
    is_scalar,
)
from qconvert.formats.cells import code_errors
from qconvert.formats.dtypes import FLOATS, FP8
from qconvert.formats.finding import Finding
from qconvert.formats.quant_config import QuantConfig, quant_config, scheme_weights
from qconvert.formats.tensors import Spec
from qconvert.kernels.api import Backend, Quality
from qconvert.kernels.arrays import F32, Array, np

#: "rowwise-..." stands in header lists of format_version 1.1: weight_scale F32 [N].
ROWWISE = "rowwise-float8_e4m3fn"
_MARKERS = {"float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2", ROWWISE: "F8_E4M3"}
#: Configurations under which fp8 weights carry their scales as recognised here.
_WRITERS = frozenset({"compressed-tensors", "modelopt", "fp8", "bfl"})
_BLOCK = 128
#: DeepSeek's newer blocks have scales that are powers of two.
SCALE_DTYPES = FLOATS | {"F8_E8M0"}
_SCALES = ("weight_scale", "scale_weight", "weight_scale_inv")
#: What stands beside packed weights: bytes there are no fp8 codes, whatever a marker says.
_FOREIGN = ("weight_scale_2", "weight_s_rel", "weight_s_channel", "weight_zeros", "weight_proj_down")


class Float8(Codec):
    """options: kind (F8_E4M3 | F8_E5M2), scale (scalar | row | block | none), block (rows, columns), source,
    full_precision. For writing also: flat (row scales are [N], not [N,1]), input (an input_scale is among the codes
    and written as F32 of shape `one`), unmarked (the target has no markers).
    """

    name = "float8"
    marker_formats: tuple[str, ...] = ("float8_e4m3fn", "float8_e5m2", ROWWISE)
    family = "float8"

    def recognise(self, group: Group, marker: Mapping[str, Any] | None) -> Recognition | str:
        weight = group.tensors.get("weight")
        if weight is None or weight.dtype not in (FP8 | ({"U8", "I8"} if marker else set())):
            return "weight is not fp8"
        foreign = [suffix for suffix in _FOREIGN if suffix in group.tensors]
        if weight.dtype not in FP8 and foreign:
            return f"a {weight.dtype} weight beside {foreign[0]} is not fp8"
        findings: list[Finding] = []
        kind = weight.dtype
        if marker is not None:
            kind = _MARKERS[marker["format"]]
            if weight.dtype in FP8 and weight.dtype != kind:
                # The bits carry their own type; a marker that says otherwise would only cast the values.
                findings.append(
                    Finding(
                        "guess",
                        f"marker says {marker['format']} but the weight is {weight.dtype}; its own type is believed",
                        group.prefix,
                        "dtype tag of the weight",
                    )
                )
                kind = weight.dtype
            elif weight.dtype not in FP8:
                findings.append(
                    Finding(
                        "repair", f"fp8 weight is tagged {weight.dtype}", group.prefix, "marker and scale"
                    )
                )
        experts = weight.shape[0] if len(weight.shape) == 3 else 0
        shape = weight.shape[1:] if experts else weight.shape
        n = shape[0] if shape else 1
        k = prod(shape[1:]) if len(shape) > 1 else 1
        said = quant_config(group)
        options: dict[str, Any] = {"kind": kind, "shape": weight.shape, "scale": "none"}
        owned = {"weight"}
        source = next((name for name in _SCALES if name in group.tensors), None)
        if source is not None:
            stated = _stated_block(said, group.prefix)
            got = self._scale(group.tensors[source], n, k, experts, stated)
            if group.tensors[source].dtype not in SCALE_DTYPES:
                return f"{source} {group.tensors[source]} holds no scales"
            if got is None:
                return f"{source} {group.tensors[source]} is not one value, one a row or one a block of [{n}, {k}]"
            options.update(scale=got[0], source=source)
            if got[0] == "block":
                options["block"] = got[1:]
            owned.add(source)
            if group.tensors[source].dtype != "F32":
                findings.append(
                    Finding("repair", f"{source} is {group.tensors[source].dtype}, not F32", group.prefix)
                )
        if marker is None and not (group.legacy_fp8 and source):
            what = f"a scale of kind {options['scale']}" if source else "no scale: a plain cast, scale 1"
            evidence = f"dtype {weight.dtype}"
            evidence += f", {source} {group.tensors[source]}" if source else ", no scale tensor"
            if source is not None and said.method in _WRITERS:
                options["stated"] = said.method
                findings.append(Finding("note", f"{kind} with {what}", group.prefix, said.words()))
            else:
                findings.append(
                    Finding("guess", f"no marker; taken as {kind} with {what}", group.prefix, evidence)
                )
        elif source is None:
            findings.append(
                Finding("guess", "marked fp8 without a scale; taken as a plain cast, scale 1", group.prefix)
            )
        full = bool(marker and marker.get("full_precision_matrix_mult")) or (
            marker is None and group.legacy_full_precision
        )
        options["full_precision"] = full
        return Recognition(self.name, n, k, options, frozenset(owned), tuple(findings), experts)

    @staticmethod
    def _scale(
        spec: Spec, n: int, k: int, experts: int, stated: tuple[int, int] | None
    ) -> tuple[str, int, int] | None:
        """(kind, rows, columns that share a scale), None when the shape says nothing sensible."""
        shape = spec.shape
        if experts:
            if not shape or shape[0] != experts:
                return ("scalar", n, k) if is_scalar(shape) and experts == 1 else None
            shape = shape[1:]
        if is_scalar(shape):
            return "scalar", n, k
        if is_row(shape, n):
            return "row", 1, k
        if len(shape) == 4 and shape[1] == shape[3] == 1:
            # ModelOpt keeps the axes it reduced over.
            shape = (shape[0], shape[2])
        if len(shape) != 2 or not all(shape):
            return None
        for rows, columns in (stated or (_BLOCK, _BLOCK), (_BLOCK, _BLOCK)):
            if shape == (-(-n // rows), -(-k // columns)):
                # A stated block may be larger than the weight, by any number.
                return "block", min(rows, n), min(columns, k)
        # As transformers does it: where the grid divides the weight, its share is the block.
        if n % shape[0] == 0 and k % shape[1] == 0:
            return "block", n // shape[0], k // shape[1]
        return None

    def parts(self, n: int, k: int, options: Options) -> tuple[Part, ...]:
        weight = Part("weight", Spec(options["kind"], tuple(options.get("shape", (n, k)))))
        if options["scale"] == "none":
            return (weight,)
        if options["scale"] == "row":
            scale = Part("weight_scale", Spec("F32", (n,) if options.get("flat") else (n, 1)))
        else:
            scale = Part("weight_scale", Spec("F32", ()), "whole")
        if options.get("input"):
            return weight, scale, Part("input_scale", Spec("F32", options.get("one", ())), "whole")
        return weight, scale

    def marker(self, options: Options) -> dict[str, Any] | None:
        if options.get("unmarked"):
            return None
        marker: dict[str, Any] = {
            "format": "float8_e4m3fn" if options["kind"] == "F8_E4M3" else "float8_e5m2"
        }
        if options.get("full_precision"):
            marker["full_precision_matrix_mult"] = True
        return marker

    def statistic(self, options: Options) -> Statistic:
        return "amax" if options["scale"] == "scalar" else "none"

    def row_step(self, options: Options) -> int:
        return int(options["block"][0]) if options["scale"] == "block" else 1

    def layout(self, options: Options) -> tuple[Any, ...]:
        return (options["scale"], options.get("block"))

    def load(self, stored: Stored, a: int, b: int, backend: Backend) -> Codes:
        codes: Codes = {"q": stored.rows("weight", a, b).reshape(b - a, stored.k).view(np.uint8)}
        kind = stored.options["scale"]
        if stored.has("input_scale") and is_scalar(stored.shape("input_scale")):
            raw = stored.whole("input_scale")
            codes["input_scale"] = backend.to_f32(raw, stored.dtype("input_scale")).reshape(())
        if kind == "none":
            codes["scale"] = np.ones((), np.float32)
            return codes
        source = stored.options["source"]
        scale = backend.to_f32(stored.whole(source), stored.dtype(source))
        if kind == "scalar":
            codes["scale"] = scale.reshape(())
        elif kind == "row":
            codes["scale"] = np.ascontiguousarray(scale.reshape(-1)[a:b])
        else:
            rows = stored.options["block"][0]
            codes["block_scale"] = np.ascontiguousarray(
                scale.reshape(scale.shape[0], -1)[a // rows : -(-b // rows)]
            )
        return codes

    def decode(self, codes: Codes, options: Options, backend: Backend) -> F32:
        kind = options["kind"]
        if "block_scale" in codes:
            rows, k = codes["q"].shape
            down, across = options["block"]
            spread = np.repeat(np.repeat(codes["block_scale"], down, 0)[:rows], across, 1)[:, :k]
            return np.asarray(backend.to_f32(codes["q"], kind) * spread, np.float32)
        if options["scale"] == "none":
            return backend.to_f32(codes["q"], kind)
        return backend.fp8_decode(codes["q"], codes["scale"], kind)

    def rounding(self, codes: Codes, options: Options, backend: Backend) -> F32:
        one = np.uint8(0x38 if options["kind"] == "F8_E4M3" else 0x3C)
        scale = self.decode({**codes, "q": np.full_like(codes["q"], one)}, options, backend)
        return np.asarray(code_errors(options["kind"])[codes["q"]] * scale * scale, np.float32)

    def prepare(self, statistic: Any, options: Options, backend: Backend, quality: Quality) -> Codes:
        if options["scale"] == "scalar":
            return {"scale": np.asarray(backend.fp8_scale(statistic, options["kind"]), np.float32)}
        return {}

    def fits(self, options: Options) -> bool:
        return bool(options["scale"] == "scalar")

    def fit(self, common: Codes, sample: F32, options: Options, backend: Backend) -> Codes:
        scale = backend.fp8_fitted_scale(sample.reshape(1, -1), common["scale"].reshape(1), options["kind"])
        return common | {"scale": scale.reshape(())}

    def encode(self, x: F32, common: Codes, options: Options, backend: Backend, quality: Quality) -> Codes:
        if options["scale"] == "scalar":
            scale = common["scale"]
        elif options["scale"] == "row":
            peaks = np.abs(x).max(axis=1, initial=0.0)
            scale = np.array([backend.fp8_scale(float(peak), options["kind"]) for peak in peaks], np.float32)
            if quality == "best":
                scale = backend.fp8_fitted_scale(x, scale, options["kind"])
        else:
            scale = np.ones((), np.float32)
        return {"q": backend.fp8_encode(x, scale, options["kind"]), "scale": scale}

    def store(self, codes: Codes, options: Options, k: int) -> dict[str, Array]:
        out = {"weight": codes["q"]}
        if options["scale"] == "row":
            scale = np.broadcast_to(codes["scale"].reshape(-1, 1), (codes["q"].shape[0], 1))
            out["weight_scale"] = np.ascontiguousarray(scale.reshape(-1) if options.get("flat") else scale)
        elif options["scale"] == "scalar":
            out["weight_scale"] = codes["scale"]
        if options.get("input"):
            out["input_scale"] = codes["input_scale"].reshape(options.get("one", ()))
        return out

    def carries(self, source: Options, target: Options) -> bool:
        if source["kind"] != target["kind"]:
            return False
        # A plain cast has scale 1; a single scale can be repeated in every row, not the other way round.
        if source["scale"] == "block" or target["scale"] == "block":
            return False
        return target["scale"] == source["scale"] or (
            source["scale"] in ("scalar", "none") and target["scale"] in ("scalar", "row")
        )


def _stated_block(said: QuantConfig, prefix: str) -> tuple[int, int] | None:
    """The block that a configuration states: weight_block_size, or compressed-tensors' block_structure."""
    block = said.document.get("weight_block_size") or scheme_weights(said, prefix).get("block_structure")
    if (
        isinstance(block, list | tuple)
        and len(block) == 2
        and all(isinstance(x, int) and x > 0 for x in block)
    ):
        return int(block[0]), int(block[1])
    return None
