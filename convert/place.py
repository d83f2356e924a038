"""Where a plan's tensors lie in its file."""

from __future__ import annotations

from collections import Counter

from qconvert.convert.actions import CopyOut, Plan, out_spec, output_header
from qconvert.formats import gguf_write
from qconvert.formats.header import PAGE, Layout, layout

#: Copies of less are not worth a page more of header.
_WORTH_BYTES = 1 << 20


def lay_out(plan: Plan) -> Layout:
    """The header of the plan's one file, as its container has it."""
    tensors = output_header(plan)
    if plan.target.container == "gguf":
        return gguf_write.lay_out(tensors, plan.metadata)
    return layout(tensors, plan.metadata, page_offset(plan))


def page_offset(plan: Plan) -> int | None:
    """Where in a page the payload has to begin for most of what is copied to keep its place in its pages.

    File systems that can share pages between files (btrfs, XFS) share those. None where nothing is to be gained.
    """
    at = 0
    votes: Counter[int] = Counter()
    for out in plan.outputs():
        if isinstance(out, CopyOut):
            votes[(out.source.start - at) % PAGE] += out.source.nbytes
        at += out_spec(out).nbytes
    best, gained = votes.most_common(1)[0] if votes else (0, 0)
    # The format asks for payload at a multiple of 8.
    return best if gained >= _WORTH_BYTES and best % 8 == 0 else None
