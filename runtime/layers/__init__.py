"""Layers that load a checkpoint's stored tensors and compute as the serving runtime would. Needs torch."""

from __future__ import annotations

from qconvert.runtime.layers.method import Method, linear_method
from qconvert.runtime.layers.modules import QuantEmbedding, QuantLinear

__all__ = ["Method", "QuantEmbedding", "QuantLinear", "linear_method"]
