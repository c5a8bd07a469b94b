"""Head and loss become one `ops.causal_lm_loss(...)` seam: no full logits when training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import libcst as cst
import libcst.matchers as m

from patchgen.anatomy import Anatomy, Role
from patchgen.anatomy.roles import unread_heads
from patchgen.passes.base import Example, Missed, Rewritten, Site, SitePass, method_site
from patchgen.rewrite import (
    code_of,
    edit_function,
    function_body,
    replace_statement,
    statements,
    uses_name,
    with_body,
)
from patchgen.source import Block, Module

LOSS_CALL = m.Call(func=m.Attribute(value=m.Name("self"), attr=m.Name("loss_function")))
LOSS_ASSIGNMENT = m.SimpleStatementLine(body=[m.Assign(targets=[m.AssignTarget(m.Name())], value=LOSS_CALL)])
HEAD = "head"


class FusedLoss(SitePass):
    """Whatever the model does to its logits goes along in a closure, so no table of softcaps and scales is needed."""

    name = "fused_loss"
    purpose = "Head and loss become one ops.causal_lm_loss seam, so that training need not materialise the logits."
    expects = "one hit per causal head"
    EXAMPLES = (
        Example(
            "a plain head",
            before=(
                "class ExampleForCausalLM(ExamplePreTrainedModel, GenerationMixin):\n"
                "    def forward(self, input_ids, labels=None, **kwargs):\n"
                "        hidden_states = self.model(input_ids)\n"
                "        logits = self.lm_head(hidden_states)\n"
                "\n"
                "        loss = None\n"
                "        if labels is not None:\n"
                "            loss = self.loss_function(logits, labels, self.vocab_size, **kwargs)\n"
                "\n"
                "        return CausalLMOutputWithPast(loss=loss, logits=logits)\n"
            ),
            after=(
                "class ExampleForCausalLM(ExamplePreTrainedModel, GenerationMixin):\n"
                "    def forward(self, input_ids, labels=None, **kwargs):\n"
                "        hidden_states = self.model(input_ids)\n"
                "        # patchgen: fused_loss\n"
                "        logits, loss = ops.causal_lm_loss(\n"
                "            self.lm_head, hidden_states, labels, loss_function=self.loss_function, "
                "vocab_size=self.vocab_size, **kwargs\n"
                "        )\n"
                "\n"
                "        return CausalLMOutputWithPast(loss=loss, logits=logits)\n"
            ),
        ),
        Example(
            "logits that are capped",
            before=(
                "class ExampleForCausalLM(ExamplePreTrainedModel, GenerationMixin):\n"
                "    def forward(self, input_ids, labels=None, **kwargs):\n"
                "        outputs = self.model(input_ids)\n"
                "        logits = self.lm_head(outputs[0]).float()\n"
                "        if self.config.softcap is not None:\n"
                "            logits = torch.tanh(logits / self.config.softcap) * self.config.softcap\n"
                "        loss = None\n"
                "        if labels is not None:\n"
                "            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.vocab_size)\n"
                "        return CausalLMOutputWithPast(loss=loss, logits=logits)\n"
            ),
            after=(
                "class ExampleForCausalLM(ExamplePreTrainedModel, GenerationMixin):\n"
                "    def forward(self, input_ids, labels=None, **kwargs):\n"
                "        outputs = self.model(input_ids)\n"
                "        # patchgen: fused_loss\n"
                "        def head(hidden_states):\n"
                "            logits = self.lm_head(hidden_states).float()\n"
                "            if self.config.softcap is not None:\n"
                "                logits = torch.tanh(logits / self.config.softcap) * self.config.softcap\n"
                "            return logits\n"
                "\n"
                "        logits, loss = ops.causal_lm_loss(\n"
                "            head, outputs[0], labels, loss_function=self.loss_function, vocab_size=self.vocab_size\n"
                "        )\n"
                "        return CausalLMOutputWithPast(loss=loss, logits=logits)\n"
            ),
        ),
    )

    def sites(self, module: Module, anatomy: Anatomy) -> Sequence[Site]:
        return [
            method_site(anatomy, info.name, "forward", f"causal head: {info.roles[Role.HEAD]}")
            for info in anatomy.with_role(Role.HEAD, module)
        ]

    def evidence(self, module: Module, anatomy: Anatomy) -> Sequence[str]:
        """The heads that upstream's auto maps name, where nothing shows that they compute a loss."""
        return unread_heads(module, anatomy)

    def rewrite(self, block: Block, site: Site, anatomy: Anatomy) -> Rewritten | Missed:
        del site, anatomy
        miss: list[Missed] = []

        def fuse(forward: cst.FunctionDef) -> cst.FunctionDef:
            body = function_body(forward)
            region = _find_region(body)
            if isinstance(region, Missed):
                miss.append(region)
                return forward
            fused = self._fused(body, region)
            second = next((node for node in fused if m.findall(node, LOSS_CALL)), None)
            if second is not None:
                miss.append(Missed("one call of self.loss_function", code_of(second)))
                return forward
            return with_body(forward, fused)

        block = edit_function(block, "forward", fuse)
        return miss[0] if miss else Rewritten(block, "causal_lm_loss seam")

    def _fused(self, body: Sequence[cst.BaseStatement], region: _Region) -> list[cst.BaseStatement]:
        outside = [node for node in region.between if not region.belongs_to_head(node)]
        inside = [node for node in region.between if region.belongs_to_head(node)]
        source = code_of(region.hidden_states)
        plain = not inside and code_of(region.projected) == f"{code_of(region.module)}({source})"
        definition: list[cst.BaseStatement] = []
        if plain:
            function = code_of(region.module)
        else:
            function = HEAD
            definition = [_head_function(region, inside, self.mark)]
        arguments = [function, source, region.labels, "loss_function=self.loss_function", *region.loss_arguments]
        call = f"{region.logits}, {region.loss} = ops.causal_lm_loss({', '.join(arguments)})"
        seam = list(statements(call, depth=2, comment=None if definition else self.mark))
        if definition:
            seam[0] = seam[0].with_changes(leading_lines=[cst.EmptyLine(indent=False)])
        replaced = replace_statement(region.first, [*definition, *seam])
        return [*body[: region.start], *outside, *replaced, *body[region.end + 1 :]]


@dataclass(frozen=True)
class _Region:
    """The statements from the first assignment of the logits to the one that computes the loss."""

    start: int
    end: int
    first: cst.BaseStatement  # `logits = self.lm_head(hidden_states)`
    between: list[cst.BaseStatement]  # what follows, `loss = None` left out
    logits: str
    loss: str
    labels: str
    projected: cst.BaseExpression  # the right-hand side of `first`
    module: cst.BaseExpression  # `self.lm_head`
    hidden_states: cst.BaseExpression  # its argument
    loss_arguments: list[str]

    def belongs_to_head(self, node: cst.BaseStatement) -> bool:
        """Whether a statement computes the logits: it reads or writes them, or something that only such ones read."""
        if uses_name(node, self.logits):
            return True
        targets = [t.target.value for t in m.findall(node, m.AssignTarget(target=m.Name()))]
        later = self.between[self.between.index(node) + 1 :]
        return any(uses_name(other, name) and uses_name(other, self.logits) for other in later for name in targets)


def _find_region(body: Sequence[cst.BaseStatement]) -> _Region | Missed:
    end, loss_line = next(
        ((i, inner) for i, node in enumerate(body) for inner in _loss_statements(node)), (None, None)
    )
    if end is None:
        closest = next((code_of(node) for node in body if "loss" in code_of(node)), "")
        return Missed("`loss = self.loss_function(...)` under `if labels is not None:`", closest)
    condition = body[end]
    call = loss_line.body[0].value
    arguments = _loss_arguments(call)
    if isinstance(arguments, Missed):
        return arguments
    logits, labels, rest = arguments
    alone = len(condition.body.body) == 1 and condition.orelse is None
    if not m.matches(condition.test, _is_not_none(labels)) or not alone:
        return Missed(f"`if {labels} is not None:` with the loss alone in it", code_of(condition))
    start = next((i for i, node in enumerate(body[:end]) if _assigned_value(node, logits) is not None), None)
    if start is None:
        return Missed(f"an assignment of `{logits}` above the loss", code_of(condition))
    projected = _assigned_value(body[start], logits)
    found = _projection(projected)
    if found is None:
        return Missed(f"`{logits} = self.<projection>(hidden states)`", code_of(body[start]))
    loss = loss_line.body[0].targets[0].target.value
    between = [node for node in body[start + 1 : end] if code_of(node) != f"{loss} = None"]
    later_use = next((node for node in body[end + 1 :] if _needs_logits(node, logits)), None)
    if later_use is not None:
        return Missed(f"no use of `{logits}` below the loss but in the result", code_of(later_use))
    return _Region(start, end, body[start], between, logits, loss, labels, projected, *found, rest)


def _loss_statements(node: cst.BaseStatement) -> list[cst.SimpleStatementLine]:
    if not isinstance(node, cst.If) or not isinstance(node.body, cst.IndentedBlock):
        return []
    return [inner for inner in node.body.body if m.matches(inner, LOSS_ASSIGNMENT)]


def _loss_arguments(call: cst.Call) -> tuple[str, str, list[str]] | Missed:
    """The logits, the labels, and the remaining arguments as source, `vocab_size` by keyword."""
    order = ["logits", "labels", "vocab_size"]
    named: dict[str, str] = {}
    rest = []
    for position, arg in enumerate(call.args):
        source = code_of(arg.value)
        if arg.star:
            rest.append(f"{arg.star}{source}")
        elif arg.keyword is not None:
            named[arg.keyword.value] = source
        elif position < len(order):
            named[order[position]] = source
    if not named.get("logits", "-").isidentifier() or not named.get("labels", "-").isidentifier():
        return Missed("self.loss_function(logits, labels, ...) with plain names", code_of(call))
    logits, labels = named.pop("logits"), named.pop("labels")
    if named.get("vocab_size") in (f"{logits}.shape[-1]", f"{logits}.size(-1)"):
        named["vocab_size"] = "None"
    return logits, labels, [*(f"{name}={source}" for name, source in named.items()), *rest]


def _is_not_none(name: str) -> m.Comparison:
    return m.Comparison(left=m.Name(name), comparisons=[m.ComparisonTarget(m.IsNot(), m.Name("None"))])


def _assigned_value(node: cst.BaseStatement, name: str) -> cst.BaseExpression | None:
    """The right-hand side if the statement is a plain assignment to `name`."""
    if not isinstance(node, cst.SimpleStatementLine) or len(node.body) != 1:
        return None
    inner = node.body[0]
    if isinstance(inner, cst.Assign) and len(inner.targets) == 1 and m.matches(inner.targets[0].target, m.Name(name)):
        return inner.value
    if isinstance(inner, cst.AnnAssign) and m.matches(inner.target, m.Name(name)):
        return inner.value
    return None


def _projection(value: cst.BaseExpression) -> tuple[cst.BaseExpression, cst.BaseExpression] | None:
    """The innermost `self.<module>(x)` and its x: everything around it belongs to the head."""
    pattern = m.Call(func=m.Attribute(value=m.Name("self")), args=[m.Arg(keyword=None, star="")])
    found = m.findall(value, pattern)
    return (found[-1].func, found[-1].args[0].value) if found else None


def _needs_logits(node: cst.BaseStatement, logits: str) -> bool:
    """Whether a statement computes with the logits; handing them on in a result does not count."""
    handed_on = len(m.findall(node, m.Arg(value=m.Name(logits)))) + len(
        m.findall(node, m.Element(value=m.Name(logits)))
    )

    class Counter(cst.CSTVisitor):
        uses = 0

        def visit_Attribute(self, attribute: cst.Attribute) -> bool:
            attribute.value.visit(self)
            return False

        def visit_Arg(self, arg: cst.Arg) -> bool:
            arg.value.visit(self)
            return False

        def visit_Name(self, name: cst.Name) -> None:
            self.uses += name.value == logits

    counter = Counter()
    node.visit(counter)
    return counter.uses > handed_on


def _head_function(region: _Region, inside: Sequence[cst.BaseStatement], mark: str) -> cst.FunctionDef:
    """`def head(hidden_states)` with everything that upstream does from hidden states to logits."""
    argument = region.hidden_states
    parameter = argument.value if isinstance(argument, cst.Name) else "hidden_states"
    value = region.projected
    if not isinstance(argument, cst.Name):
        value = value.deep_replace(argument, cst.Name(parameter))
    assignment = region.first.body[0].with_changes(value=value)
    first = region.first.with_changes(body=[assignment], leading_lines=[])
    template = statements(f"def {HEAD}({parameter}):\n    return {region.logits}\n", depth=2, comment=mark)[0]
    body = [first, *inside, *template.body.body]
    return template.with_changes(body=template.body.with_changes(body=body))
