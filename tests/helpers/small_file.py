"""A file that is quickly converted."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np

Rng = np.random.Generator


def small(rng: Rng, d: ModuleType) -> dict[str, Any]:
    """A file that is quickly converted: two bf16 linears, a norm, a table."""
    return {
        "blocks.0.a.weight": d.narrow(d.weights(rng, 128, 64), "BF16"),
        "blocks.0.b.weight": d.narrow(d.weights(rng, 256, 64), "BF16"),
        "blocks.0.b.bias": d.f32_tensor(np.arange(256)),
        "blocks.0.norm.weight": d.f32_tensor(np.ones(64)),
        "embed_tokens.weight": d.narrow(d.weights(rng, 40, 64), "BF16"),
    }
