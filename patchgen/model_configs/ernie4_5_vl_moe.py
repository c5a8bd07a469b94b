"""ernie4_5_vl_moe: the experts of images run on the ranks that have images alone, unless all ranks agree on it."""

from patchgen.model_configs import ModelConfig
from patchgen.passes.hand_edits import EditMethod

BRANCH = """
if {test}:
    final_hidden_states = torch.zeros_like(hidden_states)
    router_logits = torch.zeros(
        size=(batch_size * sequence_length, self.num_experts),
        device=final_hidden_states.device,
        dtype=torch.float,
    )

    # True (1 or 2) == vision, False (0) == text tokens
    moe_mm_token_type_ids = moe_mm_token_type_ids.bool()
    token_type_ids_router = moe_mm_token_type_ids.reshape(-1)[:, None].expand(-1, self.num_experts)
    token_type_ids_states = moe_mm_token_type_ids[..., None].expand(-1, -1, hidden_dim)

    # Run moe on each modality and assign their results to the original token positions
    final_hidden_states[~token_type_ids_states], router_logits[~token_type_ids_router] = self.text_moe(
        hidden_states[~token_type_ids_states]
    )
    final_hidden_states[token_type_ids_states], router_logits[token_type_ids_router] = self.vision_moe(
        hidden_states[token_type_ids_states]
    )
else:
    final_hidden_states, router_logits = self.text_moe(hidden_states)
    final_hidden_states = final_hidden_states.reshape(batch_size, sequence_length, hidden_dim)
    router_logits = router_logits.reshape(-1, self.num_experts)
""".strip()

EDITS = (
    EditMethod(
        "Ernie4_5_VLMoeMoeBlock.forward",
        match=BRANCH.format(test="moe_mm_token_type_ids is not None and moe_mm_token_type_ids.any()"),
        code=BRANCH.format(
            test="(moe_mm_token_type_ids := ops.tokens_of_any_rank(moe_mm_token_type_ids, hidden_states)) is not None"
        ),
        where="instead",
        reason="a rank without images would not join the other ranks' exchange of tokens: the branch is taken where any rank has "
        "some, by ranks without some for no tokens",
    ),
)

CONFIG = ModelConfig(model="ernie4_5_vl_moe", edits=EDITS)
