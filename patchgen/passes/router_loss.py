"""The router's auxiliary loss is computed over the global batch."""

from __future__ import annotations

import ast
from collections.abc import Sequence

import libcst as cst
import libcst.matchers as m

from patchgen.anatomy import Anatomy
from patchgen.anatomy.classes import called_names, parameter_names
from patchgen.passes.base import Example, Missed, Rewritten, Site, SitePass
from patchgen.rewrite import edit_function, function_body, has_docstring, insert_before, statements, with_body
from patchgen.source import Block, Module

MASK = "attention_mask"
LOGITS = "gate_logits"
COUNTS = {"one_hot", "histc", "bincount", "scatter_add_"}  # how upstream has counted tokens per expert


class RouterLoss(SitePass):
    """The loss is a product of two means over tokens: a mean of local products is another number than the global one."""

    name = "router_loss"
    purpose = "The load-balancing loss multiplies means over the global batch, under SP and EP too."
    expects = "one hit per load-balancing loss function"
    EXAMPLES = (
        Example(
            "global means above the product, the mask sliced like the rows",
            before=(
                "def load_balancing_loss_func(gate_logits, num_experts, top_k=2, attention_mask=None):\n"
                "    tokens_per_expert, router_prob_per_expert = count(gate_logits, attention_mask)\n"
                "    overall_loss = torch.sum(tokens_per_expert * router_prob_per_expert.unsqueeze(0))\n"
                "    return overall_loss * num_experts\n"
            ),
            after=(
                "def load_balancing_loss_func(gate_logits, num_experts, top_k=2, attention_mask=None):\n"
                "    # patchgen: router_loss\n"
                "    attention_mask = ops.router_mask(attention_mask, gate_logits)\n"
                "    tokens_per_expert, router_prob_per_expert = count(gate_logits, attention_mask)\n"
                "    # patchgen: router_loss\n"
                "    tokens_per_expert, router_prob_per_expert = ops.router_means(\n"
                "        tokens_per_expert, router_prob_per_expert, gate_logits, attention_mask\n"
                "    )\n"
                "    overall_loss = torch.sum(tokens_per_expert * router_prob_per_expert.unsqueeze(0))\n"
                "    return overall_loss * num_experts\n"
            ),
        ),
    )

    def sites(self, module: Module, anatomy: Anatomy) -> Sequence[Site]:
        return [
            Site(
                name,
                name,
                node.lineno,
                "a function of router logits and an attention mask that the heads add to the loss",
            )
            for name, node in anatomy.functions.items()
            if module.has(name) and {LOGITS, MASK} <= set(parameter_names(node))
        ]

    def evidence(self, module: Module, anatomy: Anatomy) -> Sequence[str]:
        """Classes that weigh an auxiliary loss, and functions that look like one, where no loss function was found.

        The name of the coefficient is one sign; a function that counts the choices of a softmax of router logits is
        another, whatever it and its parameters are called.
        """
        functions = {site.name for site in self.sites(module, anatomy)}
        signs = []
        for info in anatomy.classes.values():
            forward = info.methods.get("forward")
            if forward is None or not module.has(info.name) or called_names(info.node) & functions:
                continue
            for node in ast.walk(forward):
                if isinstance(node, ast.Attribute) and node.attr == "router_aux_loss_coef":
                    signs.append(f"{info.name} reads router_aux_loss_coef (line {node.lineno})")
        for name, function in anatomy.functions.items():
            called = called_names(function)
            balances = {"softmax", "topk"} <= called and called & COUNTS and called & {"sum", "mean"}
            if balances and module.has(name) and name not in functions:
                signs.append(f"{name} counts the choices of a softmax (line {function.lineno})")
        return signs

    def rewrite(self, block: Block, site: Site, anatomy: Anatomy) -> Rewritten | Missed:
        del anatomy
        miss: list[Missed] = []

        def globalise(function: cst.FunctionDef) -> cst.FunctionDef:
            body = function_body(function)
            position, factors = next(
                ((i, f) for i, node in enumerate(body) if (f := _factors(node)) is not None), (None, None)
            )
            if factors is None:
                last = cst.Module(body=body[-2:]).code if body else ""
                miss.append(Missed("torch.sum(<tokens per expert> * <router probability per expert>)", last))
                return function
            left, right = factors
            means = f"{left}, {right} = ops.router_means({left}, {right}, {LOGITS}, {MASK})"
            body = insert_before(body, position, statements(means, depth=1, comment=self.mark))
            mask = statements(f"{MASK} = ops.router_mask({MASK}, {LOGITS})", depth=1, comment=self.mark)
            start = next((i + 1 for i, node in enumerate(body) if _returns_early(node)), int(has_docstring(function)))
            return with_body(function, insert_before(body, start, mask))

        block = edit_function(block, site.name, globalise)
        if miss:
            return miss[0]
        return Rewritten(block, "means over the global batch")


def _factors(node: cst.BaseStatement) -> tuple[str, str] | None:
    """The names a and b of `loss = torch.sum(a * b)` or `torch.sum(a * b.unsqueeze(0))`."""
    unsqueezed = m.Call(func=m.Attribute(value=m.SaveMatchedNode(m.Name(), "right"), attr=m.Name("unsqueeze")))
    product = m.BinaryOperation(
        left=m.SaveMatchedNode(m.Name(), "left"),
        operator=m.Multiply(),
        right=m.SaveMatchedNode(m.Name(), "right") | unsqueezed,
    )
    pattern = m.SimpleStatementLine(
        body=[m.Assign(value=m.Call(func=m.Attribute(attr=m.Name("sum")), args=[m.Arg(value=product)]))]
    )
    found = m.extract(node, pattern)
    return (found["left"].value, found["right"].value) if found else None


def _returns_early(node: cst.BaseStatement) -> bool:
    return isinstance(node, cst.If) and bool(m.findall(node.body, m.Return()))
