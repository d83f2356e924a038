"""Tensor parallelism: what a rank's share of a layer must still satisfy."""

from __future__ import annotations

from collections.abc import Iterator

from qconvert.runtime.contracts.base import Violation
from qconvert.runtime.contracts.common import Layer
from qconvert.runtime.contracts.sglang_rules import MXFP8, NVFP4, shape_violations
from qconvert.runtime.roles import split_axis


def tp_violations(layer: Layer, n: int, k: int, ranks: int) -> Iterator[Violation]:
    """Which multiples are lost when `ranks` ranks share the layer.

    Names tell which axis a model splits; where they do not, K is assumed, for it has the stricter rules.
    """
    if ranks == 1 or layer.kind == "embedding":
        return
    axis = split_axis(layer.prefix) or "in"
    swizzled = layer.format in (NVFP4, MXFP8)
    length, letter = (k, "K") if axis == "in" else (n, "N")
    if length % ranks:
        message = f"{letter} cannot be split over {ranks} ranks"
        yield Violation(
            "refuse", f"tp-{axis}put", message, layer.prefix, str(length), f"a multiple of {ranks}"
        )
    elif axis == "in":
        yield from shape_violations(layer.prefix, layer.kind, layer.marker, k // ranks, share=ranks)
        if swizzled:
            # The loader cuts columns out of the [N, K/block] view of swizzled bytes: not those of K's share.
            message = f"swizzled block scales are cut by columns over {ranks} ranks, which mixes them up"
            yield Violation("trap", "tp-swizzle", message, layer.prefix, layer.format, "an unsplit layer")
    elif swizzled and (n // ranks) % 128:
        message = f"swizzled block scales are cut inside a tile of 128 rows over {ranks} ranks"
        yield Violation(
            "trap", "tp-swizzle", message, layer.prefix, f"N/{ranks}={n // ranks}", "a multiple of 128"
        )
