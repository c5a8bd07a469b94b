"""Head and loss become one `ops.causal_lm_loss(...)` seam: no full logits when training."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import libcst as cst
import libcst.matchers as m

from patchgen.anatomy import Anatomy, Role
from patchgen.anatomy.classes import (
    FunctionNode,
    arguments,
    calls,
    dotted,
    loaded,
    own_attribute,
    parameter_names,
    stored,
)
from patchgen.anatomy.loss_terms import LossTerms, unseen_terms
from patchgen.anatomy.tokenwise import loaded_names, mixing, stored_names
from patchgen.passes.base import Example, Missed, Rewritten, Site, SitePass
from patchgen.rewrite import (
    append_method,
    code_of,
    edit_function,
    function_body,
    parameters,
    replace_statement,
    statements,
    uses_name,
    with_body,
)
from patchgen.source import Block, Module

LOSS_PARAMETERS = ("logits", "labels", "vocab_size", "num_items_in_batch", "ignore_index", "shift_labels")
"""Of transformers' losses of language models, in their order; further ones have a keyword."""
SEAM_PARAMETERS = {"head", "hidden_states", "loss_function", "training", "local_terms"}
OWN_LOSSES = {"loss_function", "_loss_function", "__call__"}  # `loss_type` names a library's
HOOKS = ("register_forward_hook", "register_forward_pre_hook", "register_module_forward_hook")
LOCAL_TERMS = "local_loss_terms"
LOSS_CALL = m.Call(func=m.Attribute(value=m.Name("self"), attr=m.Name("loss_function")))
LOSS_ASSIGNMENT = m.SimpleStatementLine(body=[m.Assign(targets=[m.AssignTarget(m.Name())], value=LOSS_CALL)])
HEAD = "head"
LIBRARIES, OTHERS = ("transformers.", "torch.", "typing.", "functools."), "transformers.models."


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
    )

    def notes(self, module: Module, anatomy: Anatomy) -> Sequence[str]:
        """What heads add to the loss that is a number of one rank."""
        return [
            f"{info.name}: {', '.join(ast.literal_eval(node.value))} is added to the loss and is a number of one rank's "
            "tokens: not trained on several ranks, nor over several micro-batches"
            for info in anatomy.with_role(Role.HEAD, module)
            for node in module.block(info.name).node.body
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == LOCAL_TERMS
        ]

    def rewrite(self, block: Block, site: Site, anatomy: Anatomy) -> Rewritten:
        _check_own_losses(site.block, anatomy)
        terms = list(unseen_terms(anatomy, site.block))

        def fuse(forward: cst.FunctionDef) -> cst.FunctionDef:
            region = _find_region(forward, site.block, anatomy)
            _check_own_readers(_as_ast(forward).body[0], {region.labels, _kwargs_of(forward)}, site.block, anatomy)
            _check_moves(forward, region, site.block, anatomy)
            terms.extend(region.local_terms)
            fused = self._fused(function_body(forward), replace(region, local_terms=tuple(terms)))
            second = next((node for node in fused if m.findall(node, LOSS_CALL)), None)
            if second is not None:
                raise Missed("one call of self.loss_function", code_of(second))
            return with_body(forward, fused)

        block = edit_function(block, "forward", fuse)
        if terms:
            block = append_method(block, f"{LOCAL_TERMS} = {tuple(terms)!r}", self.mark)
        return Rewritten(block, "causal_lm_loss seam")

    def _fused(self, body: Sequence[cst.BaseStatement], region: _Region) -> list[cst.BaseStatement]:
        source = code_of(region.hidden_states)
        function, definition = HEAD, [_head_function(region, self.mark)]
        if not region.inside and code_of(region.projected) == f"{code_of(region.module)}({source})":
            function, definition = code_of(region.module), []
        named = ["loss_function=self.loss_function", "training=self.training"]
        named += [f"local_terms=self.{LOCAL_TERMS}"] if region.local_terms else []
        arguments = [function, source, region.labels, *named, *region.loss_arguments]
        call = f"{region.logits}, {region.loss} = ops.causal_lm_loss({', '.join(arguments)})"
        seam = list(statements(call, depth=2, comment=None if definition else self.mark))
        if definition:
            seam[0] = seam[0].with_changes(leading_lines=[cst.EmptyLine(indent=False)])
        replaced = replace_statement(region.first, [*definition, *seam])
        return [*body[: region.start], *region.outside, *replaced, *body[region.end + 1 :]]


@dataclass(frozen=True)
class _Region:
    """The statements from the first assignment of the logits to the one that computes the loss."""

    start: int
    end: int
    first: cst.BaseStatement  # `logits = self.lm_head(hidden_states)`
    inside: list[cst.BaseStatement]  # what follows and goes into the head's function
    outside: list[cst.BaseStatement]  # what follows and goes above the seam, `loss = None` left out
    logits: str
    loss: str
    labels: str
    projected: cst.BaseExpression  # the right-hand side of `first`
    module: cst.BaseExpression  # `self.lm_head`
    hidden_states: cst.BaseExpression  # its argument
    loss_arguments: list[str]
    local_terms: tuple[str, ...]  # what is added to the loss below and is a number of one rank

    @property
    def parameter(self) -> str:
        """Of the head's function."""
        return self.hidden_states.value if isinstance(self.hidden_states, cst.Name) else "hidden_states"


def _makes(node: cst.BaseStatement, logits: str, later: Sequence[cst.BaseStatement]) -> bool:
    """Whether a statement computes the logits: it reads or writes them, or something that only such ones read."""
    if uses_name(node, logits):
        return True
    targets = [t.target.value for t in m.findall(node, m.AssignTarget(target=m.Name()))]
    return any(uses_name(other, name) and uses_name(other, logits) for other in later for name in targets)


def _find_region(forward: cst.FunctionDef, owner: str, anatomy: Anatomy) -> _Region:
    body = function_body(forward)
    blocks = [(i, node.body.body) for i, node in enumerate(body) if m.matches(node, m.If(body=m.IndentedBlock()))]
    found = ((i, line) for i, block in blocks for line in block if m.matches(line, LOSS_ASSIGNMENT))
    end, loss_line = next(found, (None, None))
    if end is None:
        assignment = m.SimpleStatementLine(body=[m.Assign(value=~m.Name("None"))])
        lines = [code_of(line) for line in m.findall(forward, assignment)]
        closest = next(
            (line for line in reversed(lines) if re.match(r"\w*loss\b.*=", line.strip())), code_of(body[-1])
        )
        raise Missed("`loss = self.loss_function(...)` under `if labels is not None:`", closest)
    condition = body[end]
    logits, labels, rest = _loss_arguments(loss_line.body[0].value, forward)
    alone = len(condition.body.body) == 1 and condition.orelse is None
    has_labels = m.Comparison(m.Name(labels), [m.ComparisonTarget(m.IsNot(), m.Name("None"))])
    if not m.matches(condition.test, has_labels) or not alone:
        raise Missed(f"`if {labels} is not None:` with the loss alone in it", code_of(condition))
    start = next((i for i, node in enumerate(body[:end]) if _assigned_value(node, logits) is not None), None)
    if start is None:
        raise Missed(f"an assignment of `{logits}` above the loss", code_of(condition))
    projected = _assigned_value(body[start], logits)
    found = _projection(projected)
    if found is None:
        raise Missed(f"`{logits} = self.<projection>(hidden states)`", code_of(body[start]))
    loss = loss_line.body[0].targets[0].target.value
    between = [node for node in body[start + 1 : end] if not _is_unset(node, loss)]
    inside = [node for i, node in enumerate(between) if _makes(node, logits, between[i + 1 :])]
    outside = [node for node in between if node not in inside]
    for node in body[:start]:
        if loss in stored_names(_as_ast(node)) and not _is_unset(node, loss):
            raise Missed(f"`{loss} = None` as the only value of {loss} without labels", code_of(node))
        if (early := next(_returns_in_training(_as_ast(node).body, labels), None)) is not None:
            raise Missed("no return in training above the loss", early)
    below, (whole,) = _as_ast(*body[end + 1 :]), _as_ast(forward).body
    terms = LossTerms(whole, below.body, loss, labels, owner, anatomy)
    for node in body[end + 1 :]:
        if not _hands_on(_as_ast(node), logits, below, terms.is_result):
            raise Missed(f"no use of `{logits}` below the loss but in the result", code_of(node))
    if terms.lost is not None:
        raise Missed(f"`{loss}` in the result, as what was computed and what is added", terms.lost)
    made = (body[start], inside, outside, logits, loss, labels, projected)
    return _Region(start, end, *made, *found, rest, terms.local)


def _returns_in_training(body: Sequence[ast.stmt], labels: str) -> Iterator[ast.Return]:
    """The returns of these statements that a training step with labels may reach."""
    for node in body:
        if isinstance(node, ast.Return):
            yield node
        if isinstance(node, ast.If) and ast.unparse(node.test) in ("not self.training", f"{labels} is None"):
            yield from _returns_in_training(node.orelse, labels)
        elif not isinstance(node, FunctionNode | ast.ClassDef):
            for name in ("body", "orelse", "finalbody", "handlers"):
                yield from _returns_in_training(getattr(node, name, []), labels)


def _check_own_losses(owner: str, anatomy: Anatomy) -> None:
    """Raises Missed where a class or one of its ancestors gives it a loss of its own, or something is put around its forward."""
    for info in anatomy.lineage(owner):
        members = [ast.Attribute(ast.Name(info.name), member) for member in ("forward", *OWN_LOSSES)]
        around = [*info.node.decorator_list, *getattr(info.methods.get("forward"), "decorator_list", ())]
        for node in (*members, *around):
            meaning = anatomy.names.resolve(node.func if isinstance(node, ast.Call) else node) or ""
            is_library = meaning.startswith(LIBRARIES) and not meaning.startswith(OTHERS)
            if not (meaning if node in members else is_library):
                raise Missed("a forward that nothing is put around but what transformers has for that", node)
        for node in ast.walk(info.node):
            name = getattr(node, "name", None) or own_attribute(node) or getattr(node, "id", "")
            is_hook = isinstance(node, ast.Attribute) and node.attr in HOOKS
            if is_hook or (name in OWN_LOSSES and not isinstance(getattr(node, "ctx", None), ast.Load)):
                closest = f"{info.name}, line {node.lineno}: {ast.unparse(node)}"
                raise Missed("the loss that transformers has for the class", closest)


def _check_own_readers(forward: ast.stmt, given: set[str], owner: str, anatomy: Anatomy) -> None:
    """Raises Missed where a function or method of the file changes in place what the caller gave for the loss."""
    for call in calls(forward):
        method = anatomy.method(owner, own_attribute(call.func) or "")
        own = (anatomy.names.resolve(call.func) or "").removeprefix(".")
        function = method[1] if method is not None else anatomy.functions.get(own)
        if function is not None:
            changed = stored_names(ast.Module(function.body, []))
            handed = arguments(call, parameter_names(function)).items()
            if any(isinstance(arg, ast.Name) and arg.id in given and name in changed for name, arg in handed):
                raise Missed(f"{', '.join(sorted(given))} as the caller handed them in", call)


def _loss_arguments(call: cst.Call, forward: cst.FunctionDef) -> tuple[str, str, list[str]]:
    """The logits, the labels, and the remaining arguments as source, each under the name of its parameter."""
    named: dict[str, str] = {}
    rest, kwargs = [], _kwargs_of(forward)
    for position, arg in enumerate(call.args):
        if arg.star == "**" and code_of(arg.value) == kwargs:
            rest.append(f"**{code_of(arg.value)}")
        elif arg.star or (arg.keyword is None and position >= len(LOSS_PARAMETERS)):
            raise Missed(f"self.loss_function({', '.join(LOSS_PARAMETERS)}, **kwargs)", code_of(call))
        else:
            named[arg.keyword.value if arg.keyword else LOSS_PARAMETERS[position]] = code_of(arg.value)
    if not named.get("logits", "-").isidentifier() or not named.get("labels", "-").isidentifier():
        raise Missed("self.loss_function(logits, labels, ...) with plain names", code_of(call))
    logits, labels = named.pop("logits"), named.pop("labels")
    if named.get("vocab_size") in (f"{logits}.shape[-1]", f"{logits}.size(-1)"):
        named["vocab_size"] = "None"
    if named.get("ignore_index", "-100") != "-100":
        raise Missed("the ignore_index -100, which labels are padded with and counted by", code_of(call))
    bound = _bound(forward)
    if labels in bound or labels not in parameters(forward):
        raise Missed(f"`{labels}` as the caller handed them in, who shifts and counts them", code_of(call))
    for name, source in named.items():
        read = loaded_names(ast.parse(source)) & {logits, labels, *bound} if source != labels else set()
        handed_in = rf'None|{name}|{kwargs}\.(get|pop)\("{name}"(, None)?\)'
        is_own = name in SEAM_PARAMETERS or (name == "num_items_in_batch" and not re.fullmatch(handed_in, source))
        if is_own or read & ({logits, labels} if name == "vocab_size" else read):
            raise Missed(f"an argument {name} that is known without labels, and above the logits", code_of(call))
    if kwargs and not rest and not named.keys() & {"num_items_in_batch", "shift_labels"}:
        rest = [f"**ops.step_labels({kwargs})"]  # upstream's own loss hears nothing of a step: packed rows would leak
    return logits, labels, [*(f"{name}={source}" for name, source in named.items()), *rest]


def _kwargs_of(forward: cst.FunctionDef) -> str:
    """The name of a forward's further arguments, which go on to the loss.

    Raises:
        Missed: what the loss reads of them is changed.
    """
    kwargs = forward.params.star_kwarg.name.value if forward.params.star_kwarg else ""
    for node in ast.walk(_as_ast(*function_body(forward))):
        is_changed = isinstance(node, ast.stmt) and not hasattr(node, "body") and kwargs in stored_names(node)
        if is_changed or (isinstance(node, ast.Call) and dotted(node.func) == f"{kwargs}.pop"):
            words = [getattr(part, name, None) for part in ast.walk(node) for name in ("value", "arg")]
            keys = {word for word in words if isinstance(word, str)}
            if not keys or keys & set(LOSS_PARAMETERS) or kwargs in stored(node):
                raise Missed(f"{kwargs} handed on to the loss as the caller gave them", node)
    return kwargs


def _bound(forward: cst.FunctionDef) -> set[str]:
    """The names to which a forward gives new values; `x = x.to(...)` gives none."""
    bound: set[str] = set()
    for node in ast.walk(_as_ast(*function_body(forward))):
        value = getattr(node, "value", None) if isinstance(node, ast.Assign) else None
        is_moved = isinstance(value, ast.Call) and dotted(value.func) == f"{ast.unparse(node.targets[0])}.to"
        if is_moved or not isinstance(node, ast.stmt):
            continue
        inside = [child for child in ast.iter_child_nodes(node) if not isinstance(child, ast.stmt)]
        bound |= set().union(*map(stored_names, inside if hasattr(node, "body") else [node]))
    return bound


def _assigned_value(node: cst.BaseStatement, name: str) -> cst.BaseExpression | None:
    """The right-hand side if the statement is a plain assignment to `name`."""
    plain = m.Assign(targets=[m.AssignTarget(m.Name(name))]) | m.AnnAssign(target=m.Name(name))
    return node.body[0].value if m.matches(node, m.SimpleStatementLine(body=[plain])) else None


def _is_unset(node: cst.BaseStatement, loss: str) -> bool:
    """`loss = None`, annotated or not."""
    value = _assigned_value(node, loss)
    return value is not None and m.matches(value, m.Name("None"))


def _projection(value: cst.BaseExpression) -> tuple[cst.BaseExpression, cst.BaseExpression] | None:
    """The innermost `self.<module>(x)` and its x: everything around it belongs to the head."""
    pattern = m.Call(func=m.Attribute(value=m.Name("self")), args=[m.Arg(keyword=None, star="")])
    found = m.findall(value, pattern)
    return (found[-1].func, found[-1].args[0].value) if found else None


def _hands_on(node: ast.AST, logits: str, below: ast.Module, is_result: Callable[[ast.AST], bool]) -> bool:
    """Whether all that a statement below the loss does with the logits is to hand them on in the result.

    That is an argument of the output class, or an element of a tuple, which is returned: at once, or by a name that
    only return statements read.
    """
    returned = (n for n in ast.walk(below) if isinstance(n, ast.Return))
    read_else = Counter(loaded(below)) - Counter(name for statement in returned for name in loaded(statement))
    parts: list[ast.expr] = []
    for statement in ast.walk(node):
        match statement:
            case ast.Return(value):
                parts += _parts(value, is_result)
            case ast.Assign([ast.Name(name)], value) if name not in read_else:
                parts += _parts(value, is_result)
    handed = [part for part in parts if isinstance(part, ast.Name) and part.id == logits]
    return len(handed) == sum(isinstance(n, ast.Name) and n.id == logits for n in ast.walk(node))


def _parts(value: ast.expr | None, is_result: Callable[[ast.AST], bool]) -> Sequence[ast.expr]:
    """What a result hands on: `Output(logits=logits)`, `(loss, logits) + outputs[1:]`."""
    match value:
        case ast.IfExp(_, left, right) | ast.BinOp(left, ast.Add(), right):
            return [*_parts(left, is_result), *_parts(right, is_result)]
        case ast.Tuple(parts):
            return parts
        case ast.Call(_, given, named) if is_result(value):
            return [*given, *(keyword.value for keyword in named)]
    return ()


def _has_return(node: cst.BaseStatement) -> bool:
    return any(isinstance(child, ast.Return) for child in ast.walk(_as_ast(node)))


def _as_ast(*nodes: cst.BaseStatement) -> ast.Module:
    return ast.parse(_code(nodes))


def _check_moves(forward: cst.FunctionDef, region: _Region, owner: str, anatomy: Anatomy) -> None:
    """Raises Missed where the seam would change something: statements move above the head, or into a function that
    runs per chunk."""
    closure = _as_ast(region.first, *region.inside)
    read, written = loaded_names(closure), stored_names(closure) - {region.logits}
    for node in region.outside:
        tree = _as_ast(node)
        if _has_return(node):
            raise Missed("no return between the head and the loss", code_of(node))
        changed = stored_names(tree) & (read | {region.loss})
        if changed:
            raise Missed(f"no new value of {', '.join(sorted(changed))} between the head and the loss", code_of(node))
        late = loaded_names(tree) & written
        if late:
            raise Missed(f"no use of {', '.join(sorted(late))} but to make the logits", code_of(node))
    for node in region.inside:
        if _has_return(node) or region.loss in stored_names(_as_ast(node)):
            what = "statements that make the logits, and nothing else, between the head and the loss"
            raise Missed(what, code_of(node))
    moved = {id(node) for node in (region.first, *region.inside)}
    others = _as_ast(*(node for node in function_body(forward) if id(node) not in moved))
    given = {arg.arg for arg in ast.walk(_as_ast(forward).body[0].args) if isinstance(arg, ast.arg)}
    outer = loaded_names(others) | stored_names(others) | given
    shared = written & (outer | {"self", region.parameter})
    if shared:
        raise Missed(f"logits made without a new value of {', '.join(sorted(shared))}", _code(region.inside))
    rest = _as_ast(region.first.deep_replace(region.hidden_states, cst.Name("_")), *region.inside)
    foreign = loaded_names(rest) - {region.logits, "self", "_"} - written
    is_name = isinstance(region.hidden_states, cst.Name)
    foreign &= outer - {region.parameter} if is_name else outer | {region.parameter}
    if foreign:
        what = f"logits made from {code_of(region.hidden_states)} and the module alone, not from {', '.join(sorted(foreign))}"
        raise Missed(what, _code([region.first, *region.inside]))
    body = _as_ast(_with_parameter(region), *region.inside).body
    mixed = mixing(body, {region.parameter, region.logits}, owner, anatomy)
    if mixed is not None:
        raise Missed("a head that treats every token by itself, for the loss runs over chunks of tokens", mixed)


def _code(nodes: Sequence[cst.BaseStatement]) -> str:
    return "\n".join(code_of(node) for node in nodes)


def _with_parameter(region: _Region) -> cst.BaseStatement:
    """The first statement, from the parameter of the head's function."""
    value = region.projected
    if not isinstance(region.hidden_states, cst.Name):
        value = value.deep_replace(region.hidden_states, cst.Name(region.parameter))
    return region.first.with_changes(body=[region.first.body[0].with_changes(value=value)], leading_lines=[])


def _head_function(region: _Region, mark: str) -> cst.FunctionDef:
    """`def head(hidden_states)` with everything that upstream does from hidden states to logits."""
    template = statements(f"def {HEAD}({region.parameter}):\n    return {region.logits}\n", depth=2, comment=mark)[0]
    body = [_with_parameter(region), *region.inside, *template.body.body]
    return template.with_changes(body=template.body.with_changes(body=body))
