"""Head and loss become one `ops.causal_lm_loss(...)` seam: no full logits when training."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from dataclasses import replace

from patchgen.anatomy import Anatomy, Role
from patchgen.anatomy.classes import FunctionNode, own_attribute
from patchgen.anatomy.loss_region import LossRegion, find_region
from patchgen.anatomy.own_losses import handed_on, unserved_loss
from patchgen.passes.base import AlreadyDone, Example, Missed, Outcome, Rewritten, Site, SitePass
from patchgen.rewrite import Editor, append_method, format_code, indented, insert_first
from patchgen.source import Block, Module

LOSS_FORM, OWN_LOSS = "loss_form", "own_loss"
OWN = "upstream's own loss"
HEAD, BOUNDS = "head", "cu_seq_lens_q"
UNTOLD = (
    "takes no further arguments, so nothing tells it where packed documents end: a run computes each in a row of its own, "
    "not sequence-parallel"
)


class FusedLoss(SitePass):
    """What the model does to its logits (softcaps, scales, ...) is passed to the seam in a closure, in any form."""

    name = "fused_loss"
    purpose = "Head and loss become one ops.causal_lm_loss seam, so that training need not materialise the logits."
    expects = "one hit per causal head"
    role = Role.HEAD
    EXAMPLES = (
        Example("""a plain head, one whose logits are capped, and one that writes its cross entropy out
        class ExampleForCausalLM(ExamplePreTrainedModel, GenerationMixin):
            def __init__(self, config):
                self.lm_head = nn.Linear(config.hidden_size, config.vocab_size)

            def forward(self, input_ids, labels=None, **kwargs):
                hidden_states = self.model(input_ids)
      -         logits = self.lm_head(hidden_states)
      -
      -         loss = None
      -         if labels is not None:
      -             loss = self.loss_function(logits, labels, self.vocab_size, **kwargs)
      +         # patchgen: fused_loss
      +         logits, loss = ops.causal_lm_loss(
      +             self.lm_head,
      +             hidden_states,
      +             labels,
      +             loss_function=self.loss_function,
      +             training=self.training,
      +             vocab_size=self.vocab_size,
      +             **kwargs,
      +         )
                return CausalLMOutputWithPast(loss=loss, logits=logits)


        class ExampleCappedForCausalLM(ExampleForCausalLM):
            def forward(self, input_ids, labels=None, **kwargs):
                outputs = self.model(input_ids)
      -         logits = self.lm_head(outputs[0]).float()
      -         if self.config.softcap is not None:
      -             logits = torch.tanh(logits / self.config.softcap) * self.config.softcap
      -         loss = None
      -         if labels is not None:
      -             loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.vocab_size)
      +         # patchgen: fused_loss
      +         def head(hidden_states):
      +             logits = self.lm_head(hidden_states).float()
      +             if self.config.softcap is not None:
      +                 logits = torch.tanh(logits / self.config.softcap) * self.config.softcap
      +             return logits
      +
      +         logits, loss = ops.causal_lm_loss(
      +             head,
      +             outputs[0],
      +             ...
      +             **ops.step_labels(kwargs),
      +         )
                return CausalLMOutputWithPast(loss=loss, logits=logits)


        class ExampleOwnForCausalLM(ExampleForCausalLM):
            def forward(self, input_ids, labels=None, **kwargs):
                hidden_states = self.model(input_ids)
      -         logits = self.lm_head(hidden_states)
      -         loss = None
      -         if labels is not None:
      -             loss_fct = nn.CrossEntropyLoss()
      -             loss = loss_fct(logits.view(-1, self.config.vocab_size), labels.view(-1))
      +         # patchgen: fused_loss
      +         logits, loss = ops.causal_lm_loss(
      +             ...
      +             loss_function=ops.aligned_cross_entropy,
      +             ...
      +         )
                return CausalLMOutputWithPast(loss=loss, logits=logits)
      +
      +     # patchgen: fused_loss
      +     loss_form = "aligned"
        """),
    )

    def apply(self, module: Module, anatomy: Anatomy) -> Outcome:
        """Adds to the note on a loss of upstream's own why it has no seam: the code of the head that no form fits."""
        outcome = super().apply(module, anatomy)
        why = {
            f"{hit.site.partition('.')[0]}: ": hit.what.removeprefix(OWN) for hit in outcome.hits if OWN in hit.what
        }
        notes = (note + "".join(why[k] for k in why if note.startswith(k)) for note in outcome.notes)
        return replace(outcome, notes=tuple(notes))

    def notes(self, module: Module, anatomy: Anatomy) -> Sequence[str]:
        """Losses of one call's tokens; heads that take no document boundaries."""
        heads = anatomy.with_role(Role.HEAD, module)
        own = [
            f"{info.name}: {', '.join(ast.literal_eval(node.value))} is the loss, upstream's own mean over a call: not trained "
            "in steps of several ranks or micro-batches"
            for info in heads
            for node in module.block(info.name).members
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == OWN_LOSS
        ]
        forwards = {info.name: info.methods["forward"].args for info in heads if "forward" in info.methods}
        untold = [name for name, args in forwards.items() if args.kwarg is None and BOUNDS not in ast.unparse(args)]
        return [*own, *(f"{name}.forward {UNTOLD}" for name in untold)]

    def rewrite(self, block: Block, site: Site, anatomy: Anatomy) -> Rewritten | AlreadyDone:
        method = anatomy.classes[site.block].methods["forward"]
        call = handed_on(method)
        attribute = own_attribute(call.func) if call else None
        inner = {b.target or "" for b in anatomy.builds(site.block) if attribute and b.attribute == attribute}
        if inner and inner <= {info.name for info in anatomy.with_role(Role.HEAD)}:
            return AlreadyDone(f"the loss of {', '.join(inner)}")
        try:
            return self._seam(block, site, anatomy)
        except Missed as miss:
            if (own := unserved_loss(method, site.block, anatomy)) is None:
                raise
            why = f"{OWN}: {miss}"
        source = ast.unparse(own)
        code = f"ops.require_no_step(labels, {source!r})"
        block = insert_first(block, "forward", code, self.mark)
        return Rewritten(append_method(block, f"{OWN_LOSS} = {(source,)!r}", self.mark), why)

    def _seam(self, block: Block, site: Site, anatomy: Anatomy) -> Rewritten:
        editor = Editor(block, self.mark)
        forward = editor.function("forward")
        region = find_region(editor, forward, site.block, anatomy)
        self._fuse(editor, forward, region)
        block = editor.result
        if region.call.form:
            block = append_method(block, f"{LOSS_FORM} = {region.call.form!r}", self.mark)
        return Rewritten(block, "causal_lm_loss seam")

    def _fuse(self, editor: Editor, forward: FunctionNode, region: LossRegion) -> None:
        call, function, definition = region.call, HEAD, self._head_function(editor, region)
        plain = (f"{region.module}({region.hidden_states})", region.hidden_states)
        if not region.inside and not isinstance(region.first, ast.If) and region.projected in plain:
            function, definition = region.module, ""
        training = f"self.training and not ({call.switches})" if call.further else "self.training"
        named = [f"loss_function={call.function}", f"training={training}"]
        arguments = ", ".join([function, region.hidden_states, call.labels, *named, *call.arguments])
        seam = format_code(f"{call.logits}, {call.loss} = ops.causal_lm_loss({arguments})", 2)
        above = editor.code(region.first, whole=True).removesuffix(editor.code(region.first))
        seam = above + (definition or f"# {self.mark}\n") + seam
        last = region.end
        kept = forward.body[region.end]
        if call.further and isinstance(kept, ast.If):  # these terms need logits, which a training step lacks
            what = f"one with a term where {call.switches}"
            guard = f"if {call.switches}:\n    ops.require_no_step({call.labels}, {what!r})"
            seam, last = format_code(f"# {self.mark}\n{guard}", 2) + seam, region.end - 1
            editor.drop(kept.body[0])
        lines = [*(editor.code(node, whole=True) for node in region.outside), seam]
        editor.put(region.first, "\n".join(lines), forward.body[last])

    def _head_function(self, editor: Editor, region: LossRegion) -> str:
        """The source of `def head(hidden_states)`: everything that upstream does from hidden states to logits."""
        body = [region.from_parameter, *(editor.code(node, whole=True) for node in region.inside)]
        code = indented("\n".join([*body, f"return {region.call.logits}"]))
        return f"# {self.mark}\ndef {HEAD}({region.parameter}):\n{code}\n\n"
