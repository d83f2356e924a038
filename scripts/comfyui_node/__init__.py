"""qconvert as a ComfyUI custom node: copy this folder into ComfyUI/custom_nodes, or install it by the manager."""

from __future__ import annotations

import sys

try:
    import qconvert  # noqa: F401
except ImportError:
    raise ImportError(
        f"the qconvert package is not in ComfyUI's Python; install it with: {sys.executable} -m pip install qconvert"
    ) from None

from .node import ConvertCheckpoint

NODE_CLASS_MAPPINGS = {"QConvertCheckpoint": ConvertCheckpoint}
NODE_DISPLAY_NAME_MAPPINGS = {"QConvertCheckpoint": "Convert checkpoint (qconvert)"}

__all__ = ["NODE_CLASS_MAPPINGS", "NODE_DISPLAY_NAME_MAPPINGS"]
