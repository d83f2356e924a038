"""Layers sorted into a handful of classes, for tables that people read."""

from __future__ import annotations

import re

_ATTENTION = re.compile(
    r"attn|attention|qkv|[._](q|k|v|o)(_proj)?$|to_(q|k|v|out)|SelfAttention|EncDecAttention", re.IGNORECASE
)
_MLP = re.compile(
    r"mlp|ffn|feed_forward|DenseReluDense|intermediate|[._](w1|w2|w3|fc1|fc2|wi|wo)([._]|$)|net\.\d", re.I
)


def layer_class(prefix: str, role: str) -> str:
    """embedding, attention, mlp, or other."""
    if role == "embedding":
        return "embedding"
    if _MLP.search(prefix) and not re.search(r"attn|attention\.(self|q|k|v)", prefix, re.I):
        return "mlp"
    if re.search(r"attention\.output|attn", prefix, re.I) or _ATTENTION.search(prefix):
        return "attention"
    return "mlp" if re.search(r"output\.dense$", prefix) else "other"
