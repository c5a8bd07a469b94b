"""Heads without output embeddings set `tie_word_embeddings` of their config to False."""

from __future__ import annotations

import ast
from collections.abc import Sequence

from patchgen.anatomy import Anatomy, Role
from patchgen.anatomy.classes import calls
from patchgen.anatomy.vocabulary import is_projection
from patchgen.passes.base import AlreadyDone, Example, Missed, Rewritten, Site, SitePass
from patchgen.rewrite import Editor
from patchgen.source import Block, Module, bound_names


class TiedEmbeddings(SitePass):
    """`tie_word_embeddings` defaults to true, also for a class that has no output projection to tie."""

    name = "tied_embeddings"
    purpose = "A head without output embeddings does not claim tied ones."
    expects = "one hit per head without an output projection; heads that have one are upstream's"
    role = Role.HEAD
    EXAMPLES = (
        Example("""a head that delegates to a model with a head of its own
        class ExampleForConditionalGeneration(ExamplePreTrainedModel, GenerationMixin):
            def __init__(self, config):
                super().__init__(config)
      +         # patchgen: tied_embeddings
      +         self.config.tie_word_embeddings = False
                self.language_model = ExampleForCausalLM(config.text_config)

            def forward(self, input_ids, labels=None):
                return self.language_model(input_ids, labels=labels)
        """),
    )

    def sites(self, module: Module, anatomy: Anatomy) -> Sequence[Site]:
        heads = anatomy.with_role(Role.HEAD, module)
        return [Site(f"{i.name}.__init__", i.name, i.node.lineno, self.why(i, anatomy)) for i in heads]

    def rewrite(self, block: Block, site: Site, anatomy: Anatomy) -> Rewritten | AlreadyDone:
        projection = _output_projection(anatomy, site.block)
        if projection is not None:
            return AlreadyDone(projection)
        if "__init__" not in anatomy.classes[site.block].methods:
            raise Missed("an __init__ to correct the config in", "")

        editor = Editor(block, self.mark)
        init = editor.function("__init__")
        supers = (node for node in init.body if any(ast.unparse(c.func) == "super().__init__" for c in calls(node)))
        after = next(supers, None)
        if after is None:
            raise Missed("super().__init__(config)", init)
        editor.below(after, "self.config.tie_word_embeddings = False")
        return Rewritten(editor.result, "no output embeddings to tie")


def _output_projection(anatomy: Anatomy, name: str) -> str | None:
    """Why the class has output embeddings; None if it has none."""
    for info in anatomy.lineage(name):
        for method in ("get_output_embeddings", "set_output_embeddings"):
            if method in info.methods:
                return f"defines {method}"
        if "_tied_weights_keys" in {name for statement in info.node.body for name in bound_names(statement)}:
            return "lists _tied_weights_keys"
        for attribute in info.attributes:
            if is_projection(anatomy, name, attribute):
                return f"projects with self.{attribute}"
    return None
