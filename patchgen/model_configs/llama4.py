"""llama4: the language model of llama4_text, with images."""

from patchgen.model_configs import ModelConfig
from patchgen.model_configs.llama4_text import EDITS
from patchgen.passes.hand_edits import AddMethod, EditMethod

REASON = "images are projected beside the tower's method: where a rank has none, other ranks wait for the projector's gradient"

PROJECTED = (
    AddMethod(
        "Llama4ForConditionalGeneration.projected_image_features",
        code="""def projected_image_features(self, pixel_values: torch.FloatTensor) -> torch.Tensor:
    image_features = self.get_image_features(pixel_values=pixel_values, return_dict=True).last_hidden_state
    return self.multi_modal_projector(image_features.view(-1, image_features.size(-1)))""",
        reason=REASON,
    ),
    EditMethod(
        "Llama4ForConditionalGeneration.forward",
        match="mm_encoder_outputs = mm_encoder_outputs if mm_encoder_outputs is not None else {}",
        code="inputs_embeds = ops.absent_tower(inputs_embeds, pixel_values, self.projected_image_features)",
        reason=REASON,
    ),
)
CONFIG = ModelConfig(
    model="llama4",
    roots=("Llama4ForConditionalGeneration", "Llama4ForCausalLM"),
    edits=(*EDITS, *PROJECTED),
)
