"""Hostile inputs: the seeds of fuzz_seeds, each spoiled in a few places, and the command that is given them.

Every choice is drawn from one `random.Random`, so a case is its seed number; a fuzzer may draw from its own bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from fuzz_case import Case
from fuzz_configs import config, index, model
from fuzz_containers import gguf, torch_file
from fuzz_headers import header, header_bytes, tensors
from fuzz_markers import marker, metadata
from fuzz_remote import remote
from fuzz_requests import calibration, jobs, options, plan, recipe, verify
from fuzz_seeds import Seeds

#: Kind of case -> its share.
KINDS: dict[Callable[[Random, Seeds], Case], int] = {
    header: 20, header_bytes: 12, tensors: 14, marker: 12, metadata: 10, config: 12, index: 6, gguf: 7, torch_file: 4,
    plan: 4, jobs: 4, calibration: 3, options: 4, model: 4, verify: 6, recipe: 4, remote: 4,
}  # fmt: skip


def make_case(
    r: Random, seeds: Seeds, kinds: dict[Callable[[Random, Seeds], Case], int] | None = None
) -> Case:
    """One hostile input, its kind drawn by share."""
    kinds = KINDS if kinds is None else kinds
    return r.choices(list(kinds), list(kinds.values()))[0](r, seeds)
