"""What a class of stacked experts needs around it: a name, initialisation, imports."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Mapping

from patchgen.anatomy import Anatomy, ClassInfo, Role
from patchgen.anatomy.initialisation import METHOD, LinearInit
from patchgen.rewrite import append_method, edit_function, insert_at_start, statements
from patchgen.source import Block, Module

WEIGHTS = ("gate_up_proj", "down_proj")
BIASES = ("gate_up_proj_bias", "down_proj_bias")
BLOCK_ENDING = re.compile(r"(SparseMo[eE]Block|Mo[eE](Block|Layer)?|MOE)$")


def stacked_name(anatomy: Anatomy, block: str) -> str:
    """The name of the class of stacks: that of the MoE block with another ending, and no other class's."""
    lists = [info.name for info in anatomy.with_role(Role.EXPERT_LIST)]
    short = [f"{BLOCK_ENDING.sub('', name)}StackedExperts" for name in lists]
    wanted = short[lists.index(block)]
    if wanted in anatomy.classes or short.count(wanted) > 1:
        wanted = f"{block}StackedExperts"
    while wanted in anatomy.classes or wanted in anatomy.functions:
        wanted += "_"
    return wanted


def initialised(block: Block, info: ClassInfo, rule: LinearInit, has_bias: Mapping[str, bool], mark: str) -> Block:
    """The model class with an `_init_weights` that gives stacks what it gives to linear layers.

    Args:
        block, info: the model class.
        rule: what it gives to linear layers.
        has_bias: class of stacks -> whether it has biases.
        mark: the comment at the place.
    """
    method = info.methods.get(METHOD)
    argument = method.args.args[1].arg if method is not None else "module"
    code = ""
    for with_bias in sorted(set(has_bias.values())):
        names = [name for name, known in has_bias.items() if known is with_bias]
        code += f"if isinstance({argument}, {names[0] if len(names) == 1 else '(' + ', '.join(names) + ')'}):\n"
        code += "".join(f"    nn.init.{rule.writer}({argument}.{weight}, {rule.arguments})\n" for weight in WEIGHTS)
        code += "".join(f"    nn.init.zeros_({argument}.{bias})\n" for bias in BIASES if with_bias)
    if method is not None:
        return edit_function(block, METHOD, lambda node: insert_at_start(node, statements(code, 2, mark)))
    inherited = f"def {METHOD}(self, module):\n    super().{METHOD}(module)\n"
    return append_method(block, inherited + textwrap.indent(code, "    "), mark)


def with_torch(module: Module) -> Module:
    """The module with `torch` and `nn` among its imports."""
    bound = {name for block in module for name in block.binds}
    wanted = {"torch": "import torch\n", "nn": "from torch import nn\n"}
    missing = [Block(text=line) for name, line in wanted.items() if name not in bound]
    blocks = list(module.blocks)
    first = next((i for i, block in enumerate(blocks) if block.is_import and "annotations" not in block.binds), 0)
    return module.with_blocks([*blocks[:first], *missing, *blocks[first:]])
