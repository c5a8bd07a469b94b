"""Linear attention, scans and short convolutions exchange sequence slices for heads or channels around their operation."""

from __future__ import annotations

import ast
from collections.abc import Sequence

from patchgen.anatomy import Anatomy, Role
from patchgen.anatomy.classes import ClassInfo, called_names, loaded
from patchgen.anatomy.convolutions import built_convolutions, convolutions
from patchgen.anatomy.names import local_names
from patchgen.anatomy.roles import HAND_WRITTEN, attention_of_torch
from patchgen.anatomy.sequence_operations import (
    CONVOLUTION,
    DELTA_RULE,
    UNKNOWN,
    functions_below,
    language_model_classes,
    sequence_operations,
    stepping_loops,
)
from patchgen.passes.base import Example, Rewritten, Site, SitePass, site_of
from patchgen.rewrite import Editor, insert_first, wrap_calls
from patchgen.source import Block, Module

BYPASSES_INTERFACE = (
    "it gets neither document bounds (cu_seq_lens) nor the other ranks' tokens; verify the model before training it on "
    "packed or sequence-parallel rows"
)


class MixerSP(SitePass):
    """An all-to-all before the operation gives each rank the whole sequence of some heads or channels; one after it reverts
    that."""

    name = "mixer_sp"
    purpose = "Convolutions, delta rules and scans run over the whole sequence, each rank with some channels or heads."
    expects = "one hit per sequence mixer (a convolution, a delta rule, a state-space scan); other forms refuse slices"
    EXAMPLES = (
        Example("""a short convolution
        def causal_conv1d_fn(x, weight, bias=None, activation=None):
            return F.conv1d(x, weight.unsqueeze(1), bias, padding=weight.shape[1] - 1, groups=x.shape[1])


        class ExampleShortConv(nn.Module):
            def __init__(self, config):
                self.conv = nn.Conv1d(config.size, config.size, config.width, groups=config.size)

            def forward(self, hidden_states):
      -         hidden_states = causal_conv1d_fn(hidden_states, self.conv.weight.squeeze(1), self.conv.bias)
      +         # patchgen: mixer_sp
      +         hidden_states = ops.causal_conv1d(causal_conv1d_fn, hidden_states, self.conv.weight.squeeze(1), self.conv.bias)
                return hidden_states
        """),
    )

    def sites(self, module: Module, anatomy: Anatomy) -> Sequence[Site]:
        operations = set(sequence_operations(anatomy))
        language = language_model_classes(anatomy)
        return [
            site_of(info, f"sequence mixer: {info.roles.get(Role.MIXER, 'a sequence operation')}")
            for info in anatomy.still_in(module)
            if info.name in language and "forward" in info.methods
            if Role.MIXER in info.roles or called_names(info.node) & operations
        ]

    def notes(self, module: Module, anatomy: Anatomy) -> Sequence[str]:
        """What this pass does not serve: direct calls of torch's attention, hand-written attention."""
        known = {site.block for site in self.sites(module, anatomy)}
        language = language_model_classes(anatomy)
        remarks: list[str] = []
        for info in anatomy.still_in(module):
            if info.name not in language or info.name in known:
                continue
            attention_remark = _own_attention(info, anatomy)
            if attention_remark:
                remarks.append(f"{info.name}: {attention_remark}")
        return list(dict.fromkeys(remarks))

    def rewrite(self, block: Block, site: Site, anatomy: Anatomy) -> Rewritten:
        info, operations, called = anatomy.classes[site.block], sequence_operations(anatomy), called_names(block.node)
        editor = Editor(block, self.mark)
        kinds = wrap_calls(editor, block.node, operations)
        built = set(built_convolutions(anatomy, info).values())
        methods = info.methods.values()
        functions = [f for name, f in anatomy.functions.items() if name in called and name not in operations]
        steps = any(stepping_loops(anatomy, function) for function in functions)
        needed = {kind for kind, is_needed in ((CONVOLUTION, built), (DELTA_RULE, steps)) if is_needed}
        besides = [n for method in methods for n in convolutions(anatomy, method, built)]
        bodies = [node for method in methods for statement in method.body for node in ast.walk(statement)]
        named = [node for node in bodies if isinstance(node, ast.Name) and node.id in operations]
        local = {name for method in methods for name in local_names(method)}
        # An operation that would see only the slice, or a name that may mean another function.
        is_whole = len(named) == len(kinds) and not besides and not called & operations.keys() & local
        if not kinds or UNKNOWN in kinds or "" in built or not needed <= {*kinds} or not is_whole:
            refusing = insert_first(block, "forward", f'ops.refuse_slices("{info.name}")', self.mark)
            return Rewritten(refusing, "cannot be divided by heads or channels: refuses sequence slices")
        return Rewritten(editor.result, " and ".join(dict.fromkeys(kinds)))


def _own_attention(info: ClassInfo, anatomy: Anatomy) -> str:
    """A note on attention in a class that bypasses transformers' attention interface; empty if there is none."""
    for method in info.methods.values():
        tables = [anatomy.tables[name] for name in loaded(method) if name in anatomy.tables]
        for code in (method, *(anatomy.functions[name] for name in functions_below(anatomy, method)), *tables):
            for node in attention_of_torch(anatomy, code):
                return f"line {node.lineno} calls {ast.unparse(node)} itself: {BYPASSES_INTERFACE}"
    forward = anatomy.method(info.name, "forward")
    is_written = forward is not None and forward[0].roles.get(Role.ATTENTION) == HAND_WRITTEN
    return f"{HAND_WRITTEN}, which sees this rank's tokens only: not sequence-parallel" if is_written else ""
