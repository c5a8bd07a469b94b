"""Registers upstream's checkpoint conversion for the generated classes."""

from __future__ import annotations

from patchgen.anatomy import Anatomy
from patchgen.passes.base import Example, Hit, Outcome, Pass
from patchgen.rewrite import at_end
from patchgen.source import Module


class CheckpointMapping(Pass):
    """transformers takes a class outside `transformers.*` for custom code. It skips the checkpoint conversion, so the experts
    of a generated model would stay randomly initialised. And it does not call `_init_weights` for modules without
    parameters of their own, for which some classes, of towers too, initialise the children."""

    name = "checkpoint_mapping"
    purpose = "Upstream's checkpoint conversions and initialisation apply to the generated classes too."
    expects = "one hit per file with model classes"
    EXAMPLES = (
        Example("""one call for the classes of the file, which are all below one base
        class ExamplePreTrainedModel(PreTrainedModel):
            pass


        class ExampleForCausalLM(ExamplePreTrainedModel):
            pass


      + # patchgen: checkpoint_mapping
      + ops.register_checkpoint_mapping(ExamplePreTrainedModel)
      +
      +
        __all__ = ["ExampleForCausalLM"]
        """),
    )

    def apply(self, module: Module, anatomy: Anatomy) -> Outcome:
        if f"# {self.mark}" in module.text:
            return Outcome(module, upstream=(Hit("module", 0, "registered before"),))
        if "ops.register_stacked_experts(" in module.text:
            what = "the names in the file are those on disk, but for the stacks, which stacked_experts registers"
            return Outcome(module, upstream=(Hit("module", 0, what),))
        models = anatomy.models_in(module)
        if not models:
            return Outcome(module)
        bases = ", ".join(name for name in models if not set(anatomy.classes[name].bases) & set(models))
        code = f"# {self.mark}\nops.register_checkpoint_mapping({bases})\n"
        if anatomy.upstream.version is not None:  # another file's _init_weights may rely on being skipped
            code += f"ops.initialize_as_upstream({bases})\n"
        return Outcome(at_end(module, code), (Hit("module", 0, f"{len(models)} model classes"),))
