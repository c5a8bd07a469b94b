"""llama4_text: the layers without rotary embedding scale queries by where a token stands in the tensor."""

from patchgen.model_configs import ModelConfig
from patchgen.passes.hand_edits import EditMethod

REASON = "queries are scaled by the position in the document: a packed row, or a rank's slice of it, begins elsewhere"

EDITS = (
    EditMethod(
        "Llama4TextDecoderLayer.forward",
        match="attention_states, _ = self.self_attn(hidden_states=hidden_states, position_embeddings=position_embeddings, "
        "attention_mask=attention_mask, past_key_values=past_key_values, use_cache=use_cache, **kwargs)",
        code="""
attention_states, _ = self.self_attn(
    hidden_states=hidden_states,
    position_embeddings=position_embeddings,
    attention_mask=attention_mask,
    past_key_values=past_key_values,
    use_cache=use_cache,
    position_ids=position_ids,
    **kwargs,
)
""",
        where="instead",
        reason=REASON,
    ),
    EditMethod(
        "Llama4TextAttention.forward",
        match="positions = torch.arange(hidden_states.shape[1], device=hidden_states.device) + past_seen_tokens",
        code="""
if "cu_seq_lens_q" in kwargs or ops.is_sliced():
    positions = kwargs["position_ids"]
""",
        where="after",
        reason=REASON,
    ),
    EditMethod(
        "Llama4TextAttention.forward",
        match="attn_scales = attn_scales.view((1, input_shape[-1], 1, 1)).expand((*input_shape, 1, 1))",
        code="attn_scales = attn_scales.view((-1, input_shape[-1], 1, 1)).expand((*input_shape, 1, 1))",
        where="instead",
        reason=REASON,
    ),
)

CONFIG = ModelConfig(model="llama4_text", edits=EDITS)
