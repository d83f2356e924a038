"""What a layer is, told from its name: the only evidence a header gives between a table and a matrix."""

from __future__ import annotations

import re

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
    return _TABLES.fullmatch(prefix.rpartition(".")[2]) is not None
