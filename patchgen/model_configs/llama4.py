"""llama4: the language model of llama4_text, with images."""

from patchgen.model_configs import ModelConfig
from patchgen.model_configs.llama4_text import EDITS

CONFIG = ModelConfig(
    model="llama4",
    roots=("Llama4ForConditionalGeneration", "Llama4ForCausalLM"),
    edits=EDITS,
)
