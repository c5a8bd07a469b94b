"""Linear attention and short convolutions exchange heads or channels around their sequence operation."""

from __future__ import annotations

import ast
from collections.abc import Sequence

import libcst as cst
import libcst.matchers as m

from patchgen.anatomy import Anatomy, Role
from patchgen.anatomy.classes import FunctionNode, called_names, dotted, parameter_names
from patchgen.anatomy.roles import depthwise_convolutions
from patchgen.passes.base import Example, LeftAlone, Missed, Rewritten, Site, SitePass
from patchgen.rewrite import code_of, statements, transform
from patchgen.source import Block, Module

CONVOLUTION, DELTA_RULE, SCAN = "causal_conv1d", "delta_rule", "scan"


class MixerSP(SitePass):
    """These layers see the whole sequence of some heads or channels, where their rank holds a slice of all of them."""

    name = "mixer_sp"
    purpose = "Causal convolutions and delta rules run over the whole sequence, each rank with some channels or heads."
    expects = (
        "one hit per sequence mixer (a convolution, a delta rule, or both); state-space scans are listed as notes"
    )
    EXAMPLES = (
        Example(
            "a short convolution",
            before=(
                "def causal_conv1d_fn(x, weight, bias=None, activation=None):\n"
                "    return F.conv1d(x, weight.unsqueeze(1), bias, padding=weight.shape[1] - 1, groups=x.shape[1])\n"
                "\n\n"
                "class ExampleShortConv(nn.Module):\n"
                "    def __init__(self, config):\n"
                "        super().__init__()\n"
                "        self.conv = nn.Conv1d(config.size, config.size, config.width, groups=config.size)\n"
                "\n"
                "    def forward(self, hidden_states):\n"
                "        hidden_states = causal_conv1d_fn(hidden_states, self.conv.weight.squeeze(1), self.conv.bias)\n"
                "        return hidden_states\n"
            ),
            after=(
                "def causal_conv1d_fn(x, weight, bias=None, activation=None):\n"
                "    return F.conv1d(x, weight.unsqueeze(1), bias, padding=weight.shape[1] - 1, groups=x.shape[1])\n"
                "\n\n"
                "class ExampleShortConv(nn.Module):\n"
                "    def __init__(self, config):\n"
                "        super().__init__()\n"
                "        self.conv = nn.Conv1d(config.size, config.size, config.width, groups=config.size)\n"
                "\n"
                "    def forward(self, hidden_states):\n"
                "        # patchgen: mixer_sp\n"
                "        hidden_states = ops.causal_conv1d("
                "causal_conv1d_fn, hidden_states, self.conv.weight.squeeze(1), self.conv.bias)\n"
                "        return hidden_states\n"
            ),
        ),
    )

    def sites(self, module: Module, anatomy: Anatomy) -> Sequence[Site]:
        operations = set(sequence_operations(anatomy))
        language = _of_the_language_model(anatomy)
        return [
            Site(
                info.name,
                info.name,
                info.node.lineno,
                f"sequence mixer: {info.roles.get(Role.MIXER, 'a sequence operation')}",
            )
            for info in anatomy.classes.values()
            if module.has(info.name)
            and info.name in language
            and "forward" in info.methods
            and (Role.MIXER in info.roles or called_names(info.node) & operations)
        ]

    def rewrite(self, block: Block, site: Site, anatomy: Anatomy) -> Rewritten | Missed | LeftAlone:
        operations = sequence_operations(anatomy)
        called = called_names(block.node)
        scans = [name for name, kind in operations.items() if kind == SCAN and name in called]
        if scans:
            return LeftAlone(f"{site.name}: the state-space scan {scans[0]} has no sequence-parallel form")
        info = anatomy.classes[site.block]
        needed = [CONVOLUTION] if depthwise_convolutions(info) else []
        needed += [DELTA_RULE] if _recurrences(anatomy, called) else []
        rewriter = _WrapCalls({name: kind for name, kind in operations.items() if name in called}, self.mark)
        rewritten = transform(block, rewriter)
        missing = [kind for kind in needed if kind not in rewriter.kinds]
        if missing or not rewriter.kinds:
            wanted = " and ".join(_SIGNATURES[kind] for kind in missing or [CONVOLUTION])
            return Missed(f"a call of {wanted}", ast.unparse(info.methods["forward"]))
        return Rewritten(rewritten, " and ".join(dict.fromkeys(rewriter.kinds)))


_SIGNATURES = {
    CONVOLUTION: "a causal convolution of this file, (x, weight, bias, ...)",
    DELTA_RULE: "a chunked delta rule of this file, (query, key, value, ..., beta, chunk_size)",
}


def _of_the_language_model(anatomy: Anatomy) -> set[str]:
    """The classes below a decoder; in a file without one, all. A tower's convolutions run along another sequence."""
    towers = [info.name for role in (Role.AUDIO, Role.VISION) for info in anatomy.with_role(role)]
    decoders = [info.name for info in anatomy.with_role(Role.DECODER)]
    return anatomy.reached_from(decoders, without=towers) if decoders else set(anatomy.classes)


def sequence_operations(anatomy: Anatomy) -> dict[str, str]:
    """The module-level functions that run along the sequence, with their kind, told by their signatures."""
    found = {}
    for name, function in anatomy.functions.items():
        parameters = parameter_names(function)
        if _is_convolution(function, parameters):
            found[name] = CONVOLUTION
        elif "beta" in parameters and "chunk_size" in parameters and len(parameters) > 4:
            found[name] = DELTA_RULE
        elif {"A", "B", "C"} <= set(parameters):
            found[name] = SCAN
    return found


def _is_convolution(function: FunctionNode, parameters: list[str]) -> bool:
    """`(x, weight, bias, ...)` over a whole sequence; the update of a single token takes a state second."""
    return parameters[1:3] == ["weight", "bias"] and "conv1d" in called_names(function)


def _recurrences(anatomy: Anatomy, called: set[str]) -> list[str]:
    """The functions of this file among `called` that step along the sequence in a loop, whatever their signature."""
    return [
        name
        for name, function in anatomy.functions.items()
        if name in called and any(_steps(node) for node in ast.walk(function))
    ]


def _steps(node: ast.AST) -> bool:
    return isinstance(node, ast.For) and dotted(node.iter) == "range"


class _WrapCalls(cst.CSTTransformer):
    """`f(x, ...)` becomes `ops.<kind>(f, x, ...)`, its statement marked."""

    def __init__(self, wanted: dict[str, str], mark: str) -> None:
        self._wanted, self._mark = wanted, mark
        self.kinds: list[str] = []
        self._changed = False
        self._depth = 0

    def leave_Call(self, original_node: cst.Call, updated_node: cst.Call) -> cst.Call:
        if not m.matches(original_node.func, m.Name()) or original_node.func.value not in self._wanted:
            return updated_node
        name = original_node.func.value
        self.kinds.append(self._wanted[name])
        self._changed = True
        first = updated_node.args[0]
        comma = (
            first.comma
            if isinstance(first.comma, cst.Comma)
            else cst.Comma(cst.SimpleWhitespace(""), cst.SimpleWhitespace(" "))
        )
        function = cst.Arg(value=cst.Name(name), comma=comma)
        return updated_node.with_changes(
            func=cst.Attribute(value=cst.Name("ops"), attr=cst.Name(self._wanted[name])),
            args=[function, *updated_node.args],
        )

    def visit_IndentedBlock(self, node: cst.IndentedBlock) -> None:
        self._depth += 1

    def leave_IndentedBlock(self, original_node: cst.IndentedBlock, updated_node: cst.IndentedBlock) -> cst.BaseSuite:
        self._depth -= 1
        return updated_node

    def visit_SimpleStatementLine(self, node: cst.SimpleStatementLine) -> None:
        self._changed = False

    def leave_SimpleStatementLine(
        self, original_node: cst.SimpleStatementLine, updated_node: cst.SimpleStatementLine
    ) -> cst.SimpleStatementLine:
        if not self._changed:
            return updated_node
        self._changed = False
        (marked,) = statements(code_of(updated_node), self._depth, comment=self._mark)
        return marked.with_changes(leading_lines=[*original_node.leading_lines, *marked.leading_lines])
