"""ConvRot keys of a marker, and the groups that exist."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

#: comfy-kitchen's default when `convrot_groupsize` is missing.
DEFAULT_GROUP = 256
#: What quantisers rotate by, and what runtimes serve: the largest that divides K.
USUAL_GROUPS = (256, 64, 16)


def is_group(group: Any) -> bool:
    """Powers of 4 from 4 up: the sizes a regular Hadamard matrix of this construction has."""
    if not isinstance(group, int) or isinstance(group, bool) or group < 4:
        return False
    rest = int(group)
    while rest % 4 == 0:
        rest //= 4
    return rest == 1


def means_true(text: str) -> bool:
    """What the writer of a string meant where a JSON true or false belongs."""
    return text.strip().lower() not in ("", "false", "0", "no")


def marker_rotation(marker: Mapping[str, Any] | None, default: int) -> int:
    """The ConvRot group that a marker states: 0 for none. `default`: what a marker without `convrot` means.

    ComfyUI takes any non-empty string as true; "false" is read here as what its writer meant.
    """
    if marker is None:
        return default
    flag = marker.get("convrot")
    if isinstance(flag, str):
        flag = means_true(flag)
    if flag is None:
        if default == 0:
            return 0
    elif not flag:
        return 0
    group = marker.get("convrot_groupsize", DEFAULT_GROUP)
    return group if is_group(group) else DEFAULT_GROUP


def choose_group(k: int, served: Sequence[int]) -> int:
    """The largest served group that divides K, 0 when none does."""
    return max((group for group in served if k % group == 0), default=0)
