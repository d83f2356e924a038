"""What a layer is, told from its name: the only evidence a header gives between a table and a matrix."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Literal

#: Last names of modules that are looked up by row (vocabularies, positions, kinds of token). Projections have
#: names that look alike (`patch_embed`, `x_embedder`, `time_embedding`), hence a list and no pattern.
_TABLES = re.compile(
    r"embed|embeds|embed_tokens|embed_positions|embedding|embeddings|shared|wte|wpe|tok_embeddings"
    r"|(word|token|tok|position|pos|token_type|type|segment|class|cond_type|visual_token_type)_embed(ding)?s?"
    r"|relative_attention_bias"
)


def is_embedding_name(prefix: str) -> bool:
    """Whether the layer `prefix` (a tensor's name without `.weight`) is a table rather than a linear layer.

    Decided on the last part of the name alone: `text_embedding.0` and `time_embeddings.in_layer` are linear
    layers inside a module called an embedding, `embeddings.token_embedding` is a table.
    """
    return _is_table(prefix.rpartition(".")[2])


@lru_cache(4096)
def _is_table(name: str) -> bool:
    return _TABLES.fullmatch(name) is not None


#: Layers whose input a tensor-parallel model splits over its ranks (row parallel), by the end of the name.
_SPLIT_INPUT = (
    r"(^|[._])"
    r"(o_proj|down_proj|out_proj|output_proj|c_proj|dense_4h_to_h|to_out(\.0)?|to_add_out|wo|w2|fc2|linear2|layer2"
    r"|net\.2|ffn\.2|mlp\.2|attn\.proj|(self|cross)_attn\.o|attention\.out)$"
)
#: Layers whose output is split (column parallel): into heads, and into the hidden width of an MLP.
_SPLIT_OUTPUT = (
    r"(^|[._])"
    r"([qkv]_proj|qkv|qkv_proj|to_(q|k|v|qkv|kv)|gate_proj|up_proj|gate_up(_proj)?|w1|w3|wi|wi_0|wi_1|fc1|linear1"
    r"|layer1|net\.0\.proj|ffn\.0|mlp\.0|(self|cross)_attn\.[qkv]|SelfAttention\.[qkv])$"
)


def split_axis(prefix: str) -> Literal["in", "out"] | None:
    """Which axis of the weight tensor parallelism splits: K ("in"), N ("out"); None where names do not say.

    The habit of transformer code, not a promise: a model may also keep such a layer whole on every rank.
    """
    if re.search(_SPLIT_INPUT, prefix):
        return "in"
    return "out" if re.search(_SPLIT_OUTPUT, prefix) else None
