"""Code that mixes tokens, reached in ways that no reader follows: slices of a sequence tell it, for they run it."""

from __future__ import annotations

import pytest
from changed_sources import SourceChange, changed
from judged import TOLD, judged

from patchgen.runtime.verify import told
from patchgen.runtime.verify.ranks import RankPool

HEAD = "@auto_docstring\nclass Qwen3MoeForCausalLM"
MADE = "        self.norm = Qwen3MoeRMSNorm(config.hidden_size, eps=config.rms_norm_eps)\n"
NORMED = "        hidden_states = self.norm(hidden_states)\n"
SOFTEN = "def soften(x):\n    return x + x.flip(1)\n\n\n"
MIXING = "class Mixing(nn.Module):\n    def forward(self, x):\n        return soften(x)\n\n\n"
DECORATOR = "def softened(function):\n    return lambda *args: soften(function(*args))\n\n\n"
TABLE = "TABLE = {}\nTABLE.update(a=soften)\n\n\n"


def planted(title: str, run: str, made: str = "", top: str = "") -> SourceChange:
    """Code at the top of the file, in an `__init__`, and in a forward that has `hidden_states`."""
    edits = [(HEAD, SOFTEN + top + HEAD), (NORMED, f"{NORMED}        hidden_states = {run}\n")]
    return changed("", "qwen3_moe", title, *edits, *([(MADE, f"{MADE}        {made}\n")] if made else []))


PLANTS = (
    planted("a table that is filled later", 'TABLE["a"](hidden_states)', top=TABLE),
    planted("checkpointed", "torch.utils.checkpoint.checkpoint(soften, hidden_states, use_reentrant=False)"),
    planted("by a computed name", 'getattr(self, "mixing" + "_x")(hidden_states)', "self.mixing_x = Mixing()", MIXING),
    planted("by its source", 'eval("soften")(hidden_states)'),
    planted("under a decorator", "softened(torch.clone)(hidden_states)", top=DECORATOR),
    planted("a forward hook", "hidden_states", "self.norm.register_forward_hook(lambda module, given, made: soften(made))"),
    planted("an operator", "self.mixing @ hidden_states", "self.mixing = Mixing()", MIXING + "Mixing.__matmul__ = Mixing.forward\n\n\n"),
)  # fmt: skip

RUNS = "class Runs(nn.Module):\n    def __init__(self, run):\n        super().__init__()\n        self.run = run\n\n    def forward(self, x):\n        return self.run(x)\n\n\n"
BLEND = MIXING.rstrip() + "\n\n    def blend(self, x):\n        return soften(x)\n\n\n"
IN_CHAIN = "class Chain(nn.Sequential):\n    def __init__(self):\n        super().__init__(Mixing())\n\n\n"
IN_LIST = "class Chain(nn.ModuleList):\n    def forward(self, x):\n        for one in self:\n            x = one(x)\n        return x\n\n\n"
AUTOGRAD = "class Soften(torch.autograd.Function):\n    @staticmethod\n    def forward(ctx, x):\n        return soften(x)\n\n    @staticmethod\n    def backward(ctx, g):\n        return soften(g)\n\n\n"
MORE = (
    planted("a function of autograd", "Soften.apply(hidden_states)", top=AUTOGRAD),
    planted("a partial", "functools.partial(soften)(hidden_states)", top="import functools\n\n\n"),
    planted("map", "torch.stack(list(map(lambda x: soften(x[None])[0], hidden_states)))"),
    planted("a function in an attribute", "self.callback(hidden_states)", "self.callback = soften"),
    planted("a table in an attribute", 'self.table["a"](hidden_states)', 'self.table = {"a": soften}'),
    planted("a table that a decorator fills", 'KNOWN["a"](hidden_states)', top='KNOWN = {}\n\n\ndef register(function):\n    KNOWN["a"] = function\n    return function\n\n\n@register\ndef other(x):\n    return soften(x)\n\n\n'),
    planted("a class under a decorator", "self.mixing(hidden_states)", "self.mixing = Mixing()", "def softened(kind):\n    kind.forward = lambda self, x: soften(x)\n    return kind\n\n\n@softened\nclass Mixing(nn.Module):\n    pass\n\n\n"),
    planted("an object that is called", "self.calls(hidden_states)", "self.calls = Calls()", "class Calls:\n    def __call__(self, x):\n        return soften(x)\n\n\n"),
    planted("a property", "hidden_states + self.mixing.scaled", "self.mixing = Mixing()\n        self.mixing.given = None\n        self.norm.register_forward_hook(lambda module, given, made: setattr(self.mixing, 'given', made))", MIXING.rstrip() + "\n\n    @property\n    def scaled(self):\n        return soften(self.given)\n\n\n"),
    planted("a subclass of Sequential", "self.chain(hidden_states)", "self.chain = Chain()", MIXING + IN_CHAIN),
    planted("a subclass of ModuleList", "self.chain(hidden_states)", "self.chain = Chain([Mixing()])", MIXING + IN_LIST),
    planted("add_module", "self.mixing(hidden_states)", 'self.add_module("mixing", Mixing())', MIXING),
    planted("setattr", "self.mixing(hidden_states)", 'setattr(self, "mixing", Mixing())', MIXING),
    planted("super", "self.sub(hidden_states)", "self.sub = Sub()", MIXING + "class Sub(Mixing):\n    def forward(self, x):\n        return super().forward(x)\n\n\n"),
    planted("a method of a part", "self.mixing.blend(hidden_states)", "self.mixing = Mixing()", BLEND),
    planted("a forward by assignment", "self.mixing(hidden_states)", "self.mixing = Mixing()", "class Mixing(nn.Module):\n    pass\n\n\nMixing.forward = lambda self, x: soften(x)\n\n\n"),
    planted("below a condition", "other(hidden_states)", top="if torch.cuda.is_available():\n    other = soften\nelse:\n\n    def other(x):\n        return soften(x)\n\n\n"),
    planted("handed to a class", "self.runs(hidden_states)", "self.runs = Runs(soften)", RUNS),
    planted("among the modules", 'self._modules["mixing"](hidden_states)', "self.mixing = Mixing()", MIXING),
    planted("a global that a function sets", "RUN(hidden_states)", "choose()", "RUN = None\n\n\ndef choose():\n    global RUN\n    RUN = soften\n\n\n"),
    planted("another class of a part", "self.mixing(hidden_states)", "self.mixing = nn.Identity()\n        self.mixing.__class__ = Mixing", MIXING),
    planted("an attribute of a function", "runs(hidden_states)", top="def runs(x):\n    return runs.inner(x)\n\n\nruns.inner = soften\n\n\n"),
    planted("a context manager", "Within().__enter__()(hidden_states)", top="class Within:\n    def __enter__(self):\n        return soften\n\n    def __exit__(self, *error):\n        pass\n\n\n"),
    planted("a descriptor", "self.mixing(hidden_states)", "self.mixing = Mixing()", "class Held:\n    def __get__(self, one, owner):\n        return soften\n\n\nclass Mixing(nn.Module):\n    run = Held()\n\n    def forward(self, x):\n        return self.run(x)\n\n\n"),
    planted("a class defined twice", "self.mixing(hidden_states)", "self.mixing = Mixing()", MIXING + "class Mixing(Mixing):\n    pass\n\n\n"),
    planted("a method by its name", 'operator.methodcaller("blend", hidden_states)(self.mixing)', "self.mixing = Mixing()", "import operator\n\n\n" + BLEND),
    planted("a helper that is given the module", "helps(self, hidden_states)", "self.mixing = Mixing()", MIXING + "def helps(module, x):\n    return module.mixing(x)\n\n\n"),
)  # fmt: skip


@pytest.mark.parametrize("plant", (*PLANTS, *MORE), ids=[one.title for one in (*PLANTS, *MORE)])
@pytest.mark.sampled(len(PLANTS) + len(MORE))
def test_what_mixes_tokens_is_told_however_it_is_reached(plant: SourceChange, two_ranks: RankPool):
    found = judged(plant, pool=two_ranks)
    assert found.kind == TOLD and found.by in (told.PROOF, told.FACT, told.TWO_RANKS), found
