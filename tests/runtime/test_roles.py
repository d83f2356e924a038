"""Names of tables and of linear layers as the known model families spell them."""

from __future__ import annotations

import pytest
from qconvert.runtime.roles import is_embedding_name

TABLES = [
    "model.embed_tokens",
    "model.language_model.embed_tokens",
    "llm_adapter.embed",
    "shared",
    "encoder.embed_tokens",
    "transformer.wte",
    "transformer.wpe",
    "tok_embeddings",
    "token_embedding",
    "text_model.embeddings.token_embedding",
    "text_model.embeddings.position_embedding",
    "bert.embeddings.word_embeddings",
    "bert.embeddings.token_type_embeddings",
    "cond_type_embedding",
    "visual_token_type_embeddings",
    "visual.pos_embed",
    "encoder.block.0.layer.0.SelfAttention.relative_attention_bias",
    "embed_tokens",
]
LINEARS = [
    "model.layers.0.self_attn.q_proj",
    "lm_head",
    "text_embedding.0",
    "time_embedding.2",
    "time_embeddings.in_layer",
    "visual_embeddings.in_layer",
    "x_embedder",
    "cap_embedder.1",
    "context_embedder",
    "t_embedder.mlp.0",
    "time_text_embed.timestep_embedder.linear_1",
    "visual.patch_embed.proj",
    "patch_embed",
    "patch_embedding",
    "time_embed.0",
    "time_embedding",
    "label_emb.0.0",
    "img_emb.proj.1",
    "input_blocks.1.0.emb_layers.1",
    "guidance_embedder",
    "",
]


@pytest.mark.parametrize("prefix", TABLES)
def test_tables(prefix: str) -> None:
    assert is_embedding_name(prefix)


@pytest.mark.parametrize("prefix", LINEARS)
def test_linear_layers(prefix: str) -> None:
    assert not is_embedding_name(prefix)
