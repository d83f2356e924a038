"""asym_w4a8_int8 (4 and 6 bit) and its symmetric relatives: codes on an int8 grid per group, rotated.

Layout and arithmetic: FORMATS "asym_w4a8_int8": i8 = clamp(round(v * s_rel), +-127), w = rotate(i8 * s_channel
[+ correction]). Symmetric files store signed nibbles instead of offset ones: xor 8 turns one into the other. Those
with group scales alone have no int8 grid (w = q * scale); their codes are kept apart (`grid` false).
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

from qconvert.formats.base import Codec, Codes, Group, Options, Part, Recognition, Statistic, Stored
from qconvert.formats.dtypes import FLOATS
from qconvert.formats.finding import Finding
from qconvert.formats.rotation import DEFAULT_GROUP, marker_rotation
from qconvert.formats.tensors import Spec
from qconvert.kernels.api import Backend, Quality
from qconvert.kernels.arrays import F32, Array, np

DEFAULT_G = 16
#: Names seen in files for the symmetric form; none of them has a loader in any runtime.
#: Types of group scales.
_RELATIVE = FLOATS | {"F8_E4M3", "U8"}
SYMMETRIC = ("sym_w4a8_int8", "sym_w4a8", "w4a8_int8_sym")


def group_fits(group: int) -> bool:
    """G >= 4, and G divides 16 or is a multiple of 16."""
    return group >= 4 and (16 % group == 0 or group % 16 == 0)


class W4A8(Codec):
    """options: group, rotation, bits (4 | 6), codebook, correction, signed, grid (has s_channel), srel_dtype.

    shared: suffixes that a bank of experts stores once.
    """

    name = "w4a8"
    marker_formats = ("asym_w4a8_int8", *SYMMETRIC)
    family = "w4a8"

    def recognise(self, group: Group, marker: Mapping[str, Any] | None) -> Recognition | str:
        weight, rel = group.tensors.get("weight"), group.tensors.get("weight_s_rel")
        channel = group.tensors.get("weight_s_channel")
        signed = marker is not None and marker["format"] in SYMMETRIC
        source = "weight_s_rel"
        if rel is None and signed:
            source = next((s for s in ("weight_scale", "weight_group_scale") if s in group.tensors), source)
            rel = group.tensors.get(source)
        if weight is None or weight.dtype not in ("I8", "U8") or len(weight.shape) not in (2, 3):
            return "weight is not packed 4-bit"
        if rel is None or len(rel.shape) != len(weight.shape) or rel.dtype not in _RELATIVE:
            return f"no group scales ({source})"
        if channel is None and not signed:
            return "no channel scale (weight_s_channel)"
        if channel is not None and channel.dtype not in FLOATS:
            return f"weight_s_channel {channel} is not floating"
        experts = weight.shape[0] if len(weight.shape) == 3 else 0
        n, width = weight.shape[-2:]
        groups = rel.shape[-1]
        stated = marker.get("group_size") if marker else None
        fitting = self._shapes(width, groups, stated)
        found = fitting[0] if fitting else None
        if found is None or rel.shape[:-1] != weight.shape[:-1]:
            return f"{source} {rel} does not fit a packed weight {weight} with group_size {stated}"
        k, g, bits = found
        if channel is not None and prod(channel.shape) != n * max(experts, 1):
            return f"weight_s_channel {channel} is not one value a row of [{n}, {k}]"
        findings: list[Finding] = []
        owned = {"weight", source} | ({"weight_s_channel"} if channel is not None else set())
        for suffix, shape in (("weight_codebook", (16,)), ("weight_correction", (groups, n))):
            extra = group.tensors.get(suffix)
            if extra is None or signed:
                continue
            allowed = (shape, (experts, *shape)) if experts else (shape,)
            if extra.dtype not in FLOATS or extra.shape not in allowed:
                return f"{suffix} {extra} is not floating {list(shape)}"
            owned.add(suffix)
        if stated not in (None, g):
            findings.append(
                Finding(
                    "guess", f"group_size {stated} does not fit the tensors; {g} does", group.prefix, f"{rel}"
                )
            )
        if marker is not None and g != stated and len(fitting) > 1:
            other = fitting[1]
            findings.append(
                Finding(
                    "guess",
                    f"the marker does not tell {bits} bit in groups of {g} from {other[2]} bit in groups of "
                    f"{other[1]}; taken as {bits} bit",
                    group.prefix,
                    f"weight {weight}, {source} {rel}; --assume 'REGEX=asym_w4a8_int8,group_size={other[1]}' "
                    "says the other",
                )
            )
        if rel.dtype == "U8":
            findings.append(
                Finding("repair", "group scales are tagged U8; they are e4m3 bytes", group.prefix)
            )
        if signed:
            findings.append(
                Finding(
                    "guess",
                    "no runtime defines this symmetric name; taken as signed nibbles, even column low",
                    group.prefix,
                    f"weight {weight}, {source} {rel}",
                )
            )
        rotation = marker_rotation(marker, default=0 if signed else DEFAULT_GROUP)
        if marker is not None and not signed and marker.get("convrot") is not True:
            findings.append(
                Finding(
                    "repair",
                    "marker lacks `convrot: true`; this format is always rotated",
                    group.prefix,
                    "the format's definition",
                )
            )
            rotation = marker_rotation({**marker, "convrot": True}, default=DEFAULT_GROUP)
        if rotation and k % rotation:
            return f"ConvRot group {rotation} does not divide K = {k}"
        if marker is None:
            findings.append(
                Finding(
                    "guess",
                    f"no marker; taken as asym_w4a8_int8 with group {g}, ConvRot {rotation}",
                    group.prefix,
                    f"weight {weight}, weight_s_rel {rel}, weight_s_channel {channel}",
                )
            )
        options = {
            "group": g,
            "rotation": rotation,
            "bits": bits,
            "codebook": "weight_codebook" in owned,
            "correction": "weight_correction" in owned,
            "signed": signed,
            "grid": channel is not None,
            "source": source,
            "srel_dtype": "F8_E4M3" if rel.dtype == "U8" else rel.dtype,
        }
        if experts and "weight_codebook" in owned and len(group.tensors["weight_codebook"].shape) == 1:
            # One table for all experts, also where their number happens to be the table's length.
            options["shared"] = ("weight_codebook",)
        return Recognition(self.name, n, k, options, frozenset(owned), tuple(findings), experts)

    @staticmethod
    def _shapes(width: int, groups: int, stated: Any) -> list[tuple[int, int, int]]:
        """(K, G, bits) that fit a packed row width and the number of groups; first the one of the stated group."""
        candidates = []
        for bits in (4, 6):
            k = width * 8 // bits
            if (
                k * bits == width * 8
                and groups
                and k % groups == 0
                and k % 16 == 0
                and group_fits(k // groups)
            ):
                candidates.append((k, k // groups, bits))
        return sorted(candidates, key=lambda candidate: candidate[1] != (stated or DEFAULT_G))

    def refusal(self, n: int, k: int, options: Options) -> str | None:
        g, rotation = options["group"], self.rotation(options)
        if not group_fits(g) or k % g or k % 16 or (rotation and k % rotation):
            return f"w4a8 needs K to be a multiple of 16, of the group {g} and of the ConvRot group {rotation}, K = {k}"
        if options["bits"] == 6 and (k % 32 or g % 16):
            return f"6-bit w4a8 needs K to be a multiple of 32 and groups of a multiple of 16, K = {k}, group {g}"
        return None

    def parts(self, n: int, k: int, options: Options) -> tuple[Part, ...]:
        g, width = options["group"], k * options["bits"] // 8
        parts = [
            Part("weight", Spec("I8", (n, width))),
            Part("weight_s_rel", Spec(options.get("srel_dtype", "F8_E4M3"), (n, k // g))),
            Part("weight_s_channel", Spec("F32", (n,))),
        ]
        if options["codebook"]:
            parts.append(Part("weight_codebook", Spec("F32", (16,)), "whole"))
        if options["correction"]:
            parts.append(Part("weight_correction", Spec("F32", (k // g, n)), "columns"))
        return tuple(parts)

    def marker(self, options: Options) -> dict[str, Any]:
        return {
            "format": "asym_w4a8_int8",
            "group_size": options["group"],
            "convrot": True,
            "convrot_groupsize": self.rotation(options),
        }

    def statistic(self, options: Options) -> Statistic:
        return "sample" if options["codebook"] else "none"

    def layout(self, options: Options) -> tuple[Any, ...]:
        return (options["signed"], options["bits"])

    def load(self, stored: Stored, a: int, b: int, backend: Backend) -> Codes:
        options = stored.options
        q = stored.rows("weight", a, b).view(np.uint8)
        rel = stored.rows(options["source"], a, b)
        codes: Codes = {"q": q ^ np.uint8(0x88) if options["signed"] else q}
        if options["srel_dtype"] == "F8_E4M3":
            codes["s_rel_bits"] = np.ascontiguousarray(rel.view(np.uint8))
            codes["s_rel"] = backend.to_f32(codes["s_rel_bits"], "F8_E4M3")
        else:
            codes["s_rel"] = backend.to_f32(rel, options["srel_dtype"])
        if options["grid"]:
            channel = backend.to_f32(stored.whole("weight_s_channel"), stored.dtype("weight_s_channel"))
            codes["s_channel"] = np.ascontiguousarray(channel.reshape(-1)[a:b])
        if options["codebook"]:
            table = backend.to_f32(stored.whole("weight_codebook"), stored.dtype("weight_codebook"))
            codes["codebook"] = table.reshape(-1)
        if options["correction"]:
            raw = stored.columns("weight_correction", a, b)
            codes["correction"] = np.ascontiguousarray(
                backend.to_f32(raw, stored.dtype("weight_correction")).T
            )
        return codes

    def decode(self, codes: Codes, options: Options, backend: Backend) -> F32:
        if not options["grid"]:
            g = options["group"]
            q = np.empty((codes["q"].shape[0], codes["q"].shape[1] * 2), np.float32)
            q[:, 0::2] = (codes["q"] & 15).astype(np.float32) - 8
            q[:, 1::2] = (codes["q"] >> 4).astype(np.float32) - 8
            values: F32 = q * np.repeat(codes["s_rel"], g, axis=1)
            return values
        return backend.w4a8_decode(
            codes["q"],
            codes["s_rel"],
            codes["s_channel"],
            codes.get("codebook"),
            options["group"],
            options["bits"],
            codes.get("correction"),
        )

    def prepare(self, statistic: Any, options: Options, backend: Backend, quality: Quality) -> Codes:
        if not options["codebook"]:
            return {}
        return {"codebook": backend.w4a8_codebook(statistic, options["group"], quality)}

    def encode(self, x: F32, common: Codes, options: Options, backend: Backend, quality: Quality) -> Codes:
        if options["bits"] == 6:
            q, rel, channel = backend.w6a8_encode(x, options["group"], quality)
        else:
            q, rel, channel = backend.w4a8_encode(x, options["group"], common.get("codebook"), quality)
        codes: Codes = {
            "q": q,
            "s_rel_bits": rel,
            "s_rel": backend.to_f32(rel, "F8_E4M3"),
            "s_channel": channel,
        }
        return codes | common

    def store(self, codes: Codes, options: Options, k: int) -> dict[str, Array]:
        exact = options.get("srel_dtype", "F8_E4M3") == "F8_E4M3"
        out = {
            "weight": codes["q"],
            "weight_s_rel": codes["s_rel_bits"] if exact else codes["s_rel"],
            "weight_s_channel": codes["s_channel"],
        }
        if options["codebook"]:
            out["weight_codebook"] = codes["codebook"]
        if options["correction"]:
            out["weight_correction"] = np.ascontiguousarray(codes["correction"].T)
        return out

    def carries(self, source: Options, target: Options) -> bool:
        """Sym and asym share codes; so do tables, except that a target without one reads codes as c - 8."""
        same = all(source[key] == target[key] for key in ("group", "bits", "grid", "correction", "codebook"))
        srel = source["srel_dtype"] == target.get("srel_dtype", "F8_E4M3")
        return same and srel and self.rotation(source) == self.rotation(target)
