"""The router's auxiliary loss has the same value in every layout of ranks and for every padding."""

from __future__ import annotations

import ast
from collections.abc import Collection, Sequence

from patchgen.anatomy import Anatomy
from patchgen.anatomy.classes import FunctionNode, calls, parameter_names
from patchgen.anatomy.router_losses import called_losses, known_forms, require_known, router_losses
from patchgen.errors import LeftAlone
from patchgen.passes.base import Example, Missed, Rewritten, Site, SitePass, site_of
from patchgen.rewrite import Editor, wrap_calls
from patchgen.source import Block, Module

TOKENS = ("input_ids", "inputs_embeds")  # parameters of a head: the one that is given has the shape of the batch
LEFT = "a loss of no known form, left as it is: of one call's tokens, and so another number on several ranks"
COUNTS = {"one_hot", "histc", "bincount", "scatter_add_"}  # operations by which upstream counts tokens per expert


def _example() -> Example:
    """An example of the first known form of the loss, and of a head that calls it."""
    margin, known = " " * 8, next(iter(known_forms().values())).splitlines()
    name = known[0].removeprefix("def ").partition("(")[0]
    means = "tokens_per_expert, router_prob_per_expert"
    known[-2:-2] = ["+     # patchgen: router_loss", f"+     {means} = ops.router_means({means})"]
    lines = [f"{margin[2:]}{line}" if line.startswith("+") else f"{margin}{line}".rstrip() for line in known]
    head = """

        class ExampleForCausalLM(nn.Module):
            def forward(self, input_ids=None, attention_mask=None, inputs_embeds=None, **kwargs):
                outputs = self.model(input_ids, attention_mask, inputs_embeds, **kwargs)
      -         return NAME(outputs.router_logits, self.config.num_experts, 2, attention_mask)
      +         # patchgen: router_loss
      +         return ops.router_loss(
      +             NAME,
      +             outputs.router_logits,
      +             self.config.num_experts,
      +             2,
      +             attention_mask,
      +             tokens=input_ids if input_ids is not None else inputs_embeds,
      +             real_tokens=kwargs.get("real_tokens"),
      +         )
        """
    return Example("\n".join(["a loss over what counts, called group by group", *lines, head.replace("NAME", name)]))


class RouterLoss(SitePass):
    """The loss is a product of two means over tokens. The mean of the ranks' products is not the product of the global means,
    and both means include padding. So the calls in heads also pass the tokens, and the two means go through the runtime."""

    name = "router_loss"
    purpose = "The load-balancing loss is the same number in every layout (SP and EP too) and for every padding."
    expects = "one hit per load-balancing loss function, and one per method that calls it"
    EXAMPLES = (_example(),)

    def sites(self, module: Module, anatomy: Anatomy) -> Sequence[Site]:
        losses = {name: node for name, node in router_losses(anatomy).items() if module.has(name)}
        why = "a function of router logits and an attention mask that the heads add to the loss"
        callers = [
            site_of(info, "it calls a load-balancing loss", method)
            for info in anatomy.still_in(module)
            for method, node in info.methods.items()
            if called_losses(node, anatomy) & set(losses)
        ]
        return [*(Site(name, name, node.lineno, why) for name, node in losses.items()), *callers]

    def evidence(self, module: Module, anatomy: Anatomy) -> Sequence[str]:
        """`_signs` in a file of a release, whose losses have known forms; in a file on disk they are notes."""
        return self._signs(module, anatomy) if anatomy.upstream.version is not None else ()

    def notes(self, module: Module, anatomy: Anatomy) -> Sequence[str]:
        return [f"{sign}: {LEFT}" for sign in self._signs(module, anatomy) if anatomy.upstream.version is None]

    def _signs(self, module: Module, anatomy: Anatomy) -> Sequence[str]:
        """Classes that read the coefficient of an auxiliary loss and call none that was found; functions that look like one
        (they count the choices of a softmax), whatever they and their parameters are called."""
        functions = {name for name in router_losses(anatomy) if module.has(name)}
        signs: list[str] = []
        for info in anatomy.still_in(module):
            if "forward" in info.methods and not called_losses(info.node, anatomy) & functions:
                nodes = (node for node in ast.walk(info.methods["forward"]) if isinstance(node, ast.Attribute))
                lines = [node.lineno for node in nodes if node.attr == "router_aux_loss_coef"]
                signs += [f"{info.name} reads router_aux_loss_coef (line {line})" for line in lines]
        for name, function in anatomy.functions.items():
            called = anatomy.names.operations(function)
            balances = {"softmax", "topk"} <= called and called & COUNTS and called & {"sum", "mean"}
            if balances and module.has(name) and name not in functions:
                signs.append(f"{name} counts the choices of a softmax (line {function.lineno})")
        return signs

    def rewrite(self, block: Block, site: Site, anatomy: Anatomy) -> Rewritten:
        losses, of_release = router_losses(anatomy), anatomy.upstream.version is not None
        try:
            for name in losses.keys() if not of_release else losses.keys() & {site.block}:
                require_known(losses[name])
            if site.block in losses:
                return self._take_means(block, losses[site.block])
            return self._pass_tokens(block, anatomy.classes[site.block].methods[site.name.rpartition(".")[2]], losses)
        except Missed as miss:
            if of_release:
                raise
            raise LeftAlone(f"{site.name} (line {site.line}): {LEFT}; {miss}") from miss

    def _take_means(self, block: Block, known: FunctionNode) -> Rewritten:
        factors = [node.id for node in ast.walk(next(calls(known.body[-2])).args[0]) if isinstance(node, ast.Name)]
        editor, means = Editor(block, self.mark), ", ".join(factors)
        editor.above(editor.function(known.name).body[-2], f"{means} = ops.router_means({means})")
        return Rewritten(editor.result, "means over what counts")

    def _pass_tokens(self, block: Block, method: FunctionNode, losses: Collection[str]) -> Rewritten:
        if not set(TOKENS) <= set(parameter_names(method)):
            raise Missed(f"a method that takes {' and '.join(TOKENS)}", method.args)
        given = {"tokens": f"{TOKENS[0]} if {TOKENS[0]} is not None else {TOKENS[1]}"}
        if method.args.kwarg is not None:
            given["real_tokens"] = f'{method.args.kwarg.arg}.get("real_tokens")'
        more = ", ".join(f"{name}={value}" for name, value in given.items())
        editor = Editor(block, self.mark)
        wrap_calls(editor, editor.function(method.name), dict.fromkeys(losses, "router_loss"), more)
        return Rewritten(editor.result, "called for what counts")
