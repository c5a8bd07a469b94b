"""A class of a few lines, and the roles that it has."""

from __future__ import annotations

import textwrap

from generation_cases import anatomy_of

HEADER = """
import torch
from torch import nn
from transformers import PreTrainedModel, GenerationMixin

class Gated(nn.Module):
    def __init__(self, config):
        self.gate, self.up = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        return self.down(self.act(self.gate(x)) * self.up(x))

class Stacked(nn.Module):
    def __init__(self, config):
        self.w1 = nn.Parameter(torch.empty(config.n, 8, 8))
        self.w2 = nn.Parameter(torch.empty((config.n, 8, 8)))

    def forward(self, x, index, weights):
        for e in index:
            x = x + self.w2[e] @ self.w1[e]
        return x
"""


def roles(members: str, bases: str = "nn.Module", above: str = "") -> dict[str, str]:
    body = textwrap.indent(textwrap.dedent(members).strip(), "    ")
    anatomy = anatomy_of(f"{HEADER}\n{above}\nclass Example({bases}):\n{body}\n")
    return anatomy.classes["Example"].roles


def forward(*lines: str, parameters: str = "x") -> str:
    return f"def forward(self, {parameters}):\n" + textwrap.indent("\n".join(lines), "    ")


OWN = "def {}(x, *more):\n    return x\n"
"""A function of the file with the name of one of torch's."""
MODEL = "PreTrainedModel"
