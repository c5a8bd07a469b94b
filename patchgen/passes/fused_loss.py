"""Head and loss become one `ops.causal_lm_loss(...)` seam: no full logits when training."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from dataclasses import replace

import libcst as cst
import libcst.matchers as m

from patchgen.anatomy import Anatomy, Role
from patchgen.anatomy.classes import own_attribute
from patchgen.anatomy.loss_region import (
    LOSS_CALL,
    LossRegion,
    as_ast,
    check_moves,
    check_own_losses,
    check_own_readers,
    find_region,
    kwargs_of,
)
from patchgen.anatomy.loss_terms import unseen_terms
from patchgen.anatomy.own_losses import handed_on, unserved_loss
from patchgen.passes.base import Example, Missed, Rewritten, Site, SitePass, Upstream
from patchgen.rewrite import (
    append_method,
    code_of,
    edit_function,
    function_body,
    insert_first,
    replace_statement,
    statements,
    with_body,
)
from patchgen.source import Block, Module

LOCAL_TERMS, LOSS_FORM, OWN_LOSS = "local_loss_terms", "loss_form", "own_loss"
HEAD, BOUNDS = "head", "cu_seq_lens_q"
UNTOLD = (
    "takes no further arguments, so nothing tells it where packed documents end: a run computes each in a row of its own, "
    "not sequence-parallel"
)


class FusedLoss(SitePass):
    """Whatever the model does to its logits goes along in a closure, so no table of softcaps and scales is needed."""

    name = "fused_loss"
    purpose = "Head and loss become one ops.causal_lm_loss seam, so that training need not materialise the logits."
    expects = "one hit per causal head"
    role = Role.HEAD
    EXAMPLES = (
        Example("""a plain head, and one whose logits are capped
        import torch
        from torch import nn
        from transformers.modeling_outputs import CausalLMOutputWithPast


        class ExampleForCausalLM(ExamplePreTrainedModel, GenerationMixin):
            def __init__(self, config):
                super().__init__(config)
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


        class ExampleCappedForCausalLM(ExamplePreTrainedModel, GenerationMixin):
            def __init__(self, config):
                super().__init__(config)
                self.lm_head = nn.Linear(config.hidden_size, config.vocab_size)

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
      +             labels,
      +             loss_function=self.loss_function,
      +             training=self.training,
      +             vocab_size=self.vocab_size,
      +             **ops.step_labels(kwargs),
      +         )
                return CausalLMOutputWithPast(loss=loss, logits=logits)
        """),
        Example("""a cross entropy that the head writes out
        import torch
        from torch import nn
        from transformers.modeling_outputs import CausalLMOutputWithPast


        class ExampleForCausalLM(ExamplePreTrainedModel, GenerationMixin):
            def __init__(self, config):
                super().__init__(config)
                self.lm_head = nn.Linear(config.hidden_size, config.vocab_size)

            def forward(self, input_ids, labels=None, **kwargs):
                hidden_states = self.model(input_ids)
      -         logits = self.lm_head(hidden_states)
      -
      -         loss = None
      -         if labels is not None:
      -             loss_fct = nn.CrossEntropyLoss()
      -             loss = loss_fct(logits.view(-1, self.config.vocab_size), labels.view(-1))
      +         # patchgen: fused_loss
      +         logits, loss = ops.causal_lm_loss(
      +             self.lm_head,
      +             hidden_states,
      +             labels,
      +             loss_function=ops.aligned_cross_entropy,
      +             training=self.training,
      +             vocab_size=self.config.vocab_size,
      +             **ops.step_labels(kwargs),
      +         )

                return CausalLMOutputWithPast(loss=loss, logits=logits)
      +
      +     # patchgen: fused_loss
      +     loss_form = "aligned"
        """),
    )

    def notes(self, module: Module, anatomy: Anatomy) -> Sequence[str]:
        """The losses of heads, and what heads add to theirs, that are numbers of one rank; heads that nothing tells of a step."""
        told = {
            LOCAL_TERMS: "is added to the loss and is a number of one rank's tokens: not trained on several ranks, nor over "
            "several micro-batches",
            OWN_LOSS: "is the loss, upstream's own mean over a call: not trained in steps of several ranks or micro-batches",
        }
        heads = anatomy.with_role(Role.HEAD, module)
        local = [
            f"{info.name}: {', '.join(ast.literal_eval(node.value))} {told[name]}"
            for info in heads
            for node in module.block(info.name).node.body
            if isinstance(node, ast.Assign) and (name := ast.unparse(node.targets[0])) in told
        ]
        forwards = {info.name: info.methods["forward"].args for info in heads if "forward" in info.methods}
        untold = [name for name, args in forwards.items() if args.kwarg is None and BOUNDS not in ast.unparse(args)]
        return [*local, *(f"{name}.forward {UNTOLD}" for name in untold)]

    def rewrite(self, block: Block, site: Site, anatomy: Anatomy) -> Rewritten | Upstream:
        method = anatomy.classes[site.block].methods["forward"]
        call = handed_on(method)
        attribute = own_attribute(call.func) if call else None
        inner = {build.target for build in anatomy.builds(site.block) if attribute and build.attribute == attribute}
        if inner and inner <= {info.name for info in anatomy.with_role(Role.HEAD)}:
            return Upstream(f"the loss of {', '.join(inner)}")
        try:
            return self._seam(block, site, anatomy)
        except Missed:
            if (own := unserved_loss(method, site.block, anatomy)) is None:
                raise
        source = ast.unparse(own)
        code = f"ops.require_no_step(labels, {source!r})"
        block = insert_first(block, "forward", code, self.mark)
        return Rewritten(append_method(block, f"{OWN_LOSS} = {(source,)!r}", self.mark), "upstream's own loss")

    def _seam(self, block: Block, site: Site, anatomy: Anatomy) -> Rewritten:
        check_own_losses(site.block, anatomy)
        terms, forms = list(unseen_terms(anatomy, site.block)), []

        def fuse(forward: cst.FunctionDef) -> cst.FunctionDef:
            region = find_region(forward, site.block, anatomy)
            check_own_readers(as_ast(forward).body[0], {region.labels, kwargs_of(forward)}, site.block, anatomy)
            check_moves(forward, region, site.block, anatomy)
            terms.extend(region.local_terms)
            forms.append(region.form)
            fused = self._fused(function_body(forward), replace(region, local_terms=tuple(terms)))
            second = next((node for node in fused if m.findall(node, LOSS_CALL)), None)
            if second is not None:
                raise Missed("one call of self.loss_function", code_of(second))
            return with_body(forward, fused)

        block = edit_function(block, "forward", fuse)
        if terms:
            block = append_method(block, f"{LOCAL_TERMS} = {tuple(terms)!r}", self.mark)
        if any(forms):
            block = append_method(block, f"{LOSS_FORM} = {forms[0]!r}", self.mark)
        return Rewritten(block, "causal_lm_loss seam")

    def _fused(self, body: Sequence[cst.BaseStatement], region: LossRegion) -> list[cst.BaseStatement]:
        source = code_of(region.hidden_states)
        function, definition = HEAD, [_head_function(region, self.mark)]
        plain = (f"{code_of(region.module)}({source})", source)
        if (
            not region.inside
            and isinstance(region.first, cst.SimpleStatementLine)
            and code_of(region.projected) in plain
        ):
            function, definition = code_of(region.module), []
        training = f"self.training and not ({region.switches})" if region.further else "self.training"
        named = [f"loss_function={region.loss_function}", f"training={training}"]
        named += [f"local_terms=self.{LOCAL_TERMS}"] if region.local_terms else []
        arguments = [function, source, region.labels, *named, *region.loss_arguments]
        call = f"{region.logits}, {region.loss} = ops.causal_lm_loss({', '.join(arguments)})"
        seam = list(statements(call, depth=2, comment=None if definition else self.mark))
        if definition:
            seam[0] = seam[0].with_changes(leading_lines=[cst.EmptyLine(indent=False)])
        replaced = replace_statement(region.first, [*definition, *seam])
        below = body[region.end + 1 :]
        if region.further:  # upstream's, and of logits that a step does not have
            what = f"one with a term where {region.switches}"
            code = f"if {region.switches}:\n    ops.require_no_step({region.labels}, {what!r})"
            replaced = [*statements(code, depth=2, comment=self.mark), *replaced]
            block = body[region.end]
            below = [block.with_changes(body=block.body.with_changes(body=region.further)), *below]
        return [*body[: region.start], *region.outside, *replaced, *below]


def _head_function(region: LossRegion, mark: str) -> cst.FunctionDef:
    """`def head(hidden_states)` with everything that upstream does from hidden states to logits."""
    template = statements(f"def {HEAD}({region.parameter}):\n    return {region.logits}\n", depth=2, comment=mark)[0]
    body = [region.from_parameter(), *region.inside, *template.body.body]
    return template.with_changes(body=template.body.with_changes(body=body))
