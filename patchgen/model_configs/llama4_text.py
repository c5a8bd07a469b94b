"""llama4_text: the layers without rotary embedding scale queries by where a token stands in the tensor."""

from patchgen.model_configs import ModelConfig
from patchgen.passes.hand_edits import EditMethod

REASON = "queries are scaled by the position in the document: a packed row, or a rank's slice of it, begins elsewhere"

EDITS = (
    EditMethod(
        "Llama4TextDecoderLayer.forward",
        match="hidden_states = self.input_layernorm(hidden_states)",
        code='kwargs["position_ids"] = position_ids',
        where="before",
        reason=REASON,
    ),
    EditMethod(
        "Llama4TextAttention.forward",
        match="positions = torch.arange(hidden_states.shape[1], device=hidden_states.device) + past_seen_tokens",
        code='if "cu_seq_lens_q" in kwargs or ops.is_sliced():\n    positions = kwargs["position_ids"]',
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
