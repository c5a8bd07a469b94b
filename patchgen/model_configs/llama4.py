"""llama4: the language model of llama4_text, with images."""

from patchgen.model_configs import ModelConfig
from patchgen.model_configs.llama4_text import EDITS
from patchgen.passes.hand_edits import MendUpstream

RESULT = """
return Llama4CausalLMOutputWithPast(
    loss=loss,
    logits=logits,
    cache=outputs.cache,
    hidden_states=outputs.hidden_states,
    attentions=outputs.attentions,
    image_outputs={images},
    router_logits=outputs.router_logits,
)
""".strip()

IMAGES = MendUpstream(
    "Llama4ForConditionalGeneration.forward",
    match=RESULT.format(images="outputs.image_outputs"),
    code=RESULT.format(images='mm_encoder_outputs.get("image")'),
    reason="5.24.0 reads the images' outputs from the language model's result, which has none, and fails: they are those of the "
    "vision model, as in the base models of other files",
)

CONFIG = ModelConfig(
    model="llama4",
    roots=("Llama4ForConditionalGeneration", "Llama4ForCausalLM"),
    edits=(*EDITS, IMAGES),
)
