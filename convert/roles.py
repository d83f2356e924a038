"""What each layer is in its model: from the family where it is known, else from its name and shape."""

from __future__ import annotations

from qconvert.formats.layers import Inventory, Layer
from qconvert.runtime.roles import is_embedding_name
from qconvert.runtime.targets import Target


class RoleBook:
    """Answers for one checkpoint and one target."""

    def __init__(self, inventory: Inventory, target: Target) -> None:
        self.notes: list[str] = []
        self.family_ids: tuple[str, ...] = ()

    def role(self, layer: Layer) -> str:
        """linear, embedding, or other (norms, convolutions)."""
        if layer.ndim == 2 or layer.experts:
            return "embedding" if is_embedding_name(layer.prefix) and not layer.experts else "linear"
        return "other"

    def protected(self, layer: Layer) -> str | None:
        """Why a fresh quantisation should leave this layer alone."""
        return None

    def runtime_keeps(self, layer: Layer) -> str | None:
        """Why the runtime's loader for this model cannot take this layer quantised."""
        return None
