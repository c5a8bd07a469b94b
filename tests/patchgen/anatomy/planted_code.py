"""Code that stands on the way to the loss, as a line here and a line there of upstream's file, and what the census must name.

A plant is code at the top of the file, code in an `__init__`, code in a forward that has `hidden_states`, and names: "*x" is
any name that ends so.
"""

from __future__ import annotations

import re

# model -> the line of a forward and the line of its class's `__init__` behind which code is planted
PLACES = {
    "llama": (
        "        hidden_states = self.norm(hidden_states)\n",
        "        self.norm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)\n",
    ),
    "qwen3_moe": (
        "        hidden_states = self.norm(hidden_states)\n",
        "        self.norm = Qwen3MoeRMSNorm(config.hidden_size, eps=config.rms_norm_eps)\n",
    ),
    "qwen3_next": (
        "        hidden_states = self.norm(hidden_states)\n",
        "        self.norm = Qwen3NextRMSNorm(config.hidden_size, eps=config.rms_norm_eps)\n",
    ),
    "mamba2": (
        "        hidden_states = self.norm_f(hidden_states)\n",
        "        self.norm_f = Mamba2RMSNorm(config.hidden_size, eps=config.layer_norm_epsilon)\n",
    ),
    "qwen3_vl_moe": (
        "        hidden_states = self.patch_embed(hidden_states)\n",
        "        self.rotary_pos_emb = Qwen3VLMoeVisionRotaryEmbedding(config)\n",
    ),
    "qwen3_asr": (
        "        hidden_states = self.ln_post(hidden_states)\n",
        "        self.ln_post = nn.LayerNorm(config.d_model)\n",
    ),
    "qwen2_5_omni": (
        "        hidden_states = self.proj(self.ln_post(hidden_states))\n",
        "        self.ln_post = nn.LayerNorm(config.d_model)\n",
    ),
}

SOFTEN = """\
def soften(x):
    return x.cumsum(1)
"""
MIXING = """\
class Mixing(nn.Module):
    def forward(self, x):
        return x.cumsum(1)
"""
AUTOGRAD = """\
class Soften(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.cumsum(1)

    @staticmethod
    def backward(ctx, g):
        return shrink(g)


def shrink(g):
    return g
"""

# name of the plant -> top of the file, __init__, forward, what must be named
PLANTS = {
    "apply": (AUTOGRAD, "", "x = Soften.apply(x)", ("Soften", "shrink")),
    "apply by a name": (AUTOGRAD, "", "run = Soften.apply\nx = run(x)", ("Soften", "shrink")),
    "checkpoint": (SOFTEN, "", "x = torch.utils.checkpoint.checkpoint(soften, x)", ("soften",)),
    "partial": ("import functools\n\n\n" + SOFTEN, "", "x = functools.partial(soften)(x)", ("soften",)),
    "map": (SOFTEN, "", "x = torch.stack(list(map(soften, x)))", ("soften",)),
    "callback": (SOFTEN, "self.callback = soften", "x = self.callback(x)", ("soften",)),
    "dict of functions": (SOFTEN, 'self.table = {"a": soften}', 'x = self.table["a"](x)', ("soften",)),
    "list of functions": (SOFTEN, "self.steps = [soften]", "for step in self.steps:\n    x = step(x)", ("soften",)),
    "module table": (SOFTEN + '\n\nTABLE = {"a": soften}\n', "", 'x = TABLE["a"](x)', ("soften",)),
    "table filled later": (SOFTEN + '\n\nTABLE = {}\nTABLE["a"] = soften\n', "", 'x = TABLE["a"](x)', ("soften",)),
    "table updated": (SOFTEN + "\n\nTABLE = {}\nTABLE.update(a=soften)\n", "", 'x = TABLE["a"](x)', ("soften",)),
    "table by decorator": (
        'TABLE = {}\n\n\ndef register(function):\n    TABLE["a"] = function\n    return function\n\n\n@register\n'
        + SOFTEN,
        "",
        'x = TABLE["a"](x)',
        ("soften",),
    ),
    "getattr": (MIXING, "self.mixer_x = Mixing()", 'x = getattr(self, "mixer_x")(x)', ("Mixing",)),
    "getattr computed": (MIXING, "self.mixer_x = Mixing()", 'x = getattr(self, "mixer_" + "x")(x)', ("*.getattr",)),
    "decorator": (
        SOFTEN
        + "\n\ndef softened(function):\n    def run(self, x):\n        return soften(function(self, x))\n    return run\n\n\nclass Mixing(nn.Module):\n    @softened\n    def forward(self, x):\n        return x\n",
        "self.mixer_x = Mixing()",
        "x = self.mixer_x(x)",
        ("soften", "softened", "Mixing"),
    ),
    "class decorator": (
        SOFTEN + "\n\ndef softened(cls):\n    cls.forward = soften\n    return cls\n\n\n@softened\n" + MIXING,
        "self.mixer_x = Mixing()",
        "x = self.mixer_x(x)",
        ("soften", "softened"),
    ),
    "__call__": (
        SOFTEN + "\n\nclass Calls:\n    def __call__(self, x):\n        return soften(x)\n",
        "self.calls_x = Calls()",
        "x = self.calls_x(x)",
        ("soften", "Calls"),
    ),
    "operator": (
        SOFTEN + "\n\nclass Times:\n    def __matmul__(self, x):\n        return soften(x)\n",
        "self.times = Times()",
        "x = self.times @ x",
        ("soften", "Times"),
    ),
    "property": (
        SOFTEN + "\n\n" + MIXING + "\n    @property\n    def scale(self):\n        return soften(torch.ones(1))\n",
        "self.mixer_x = Mixing()",
        "x = x * self.mixer_x.scale",
        ("soften", "Mixing"),
    ),
    "forward hook": (SOFTEN, "self.register_forward_hook(soften)", "", ("soften",)),
    "tensor hook": (SOFTEN, "", "x.register_hook(soften)", ("soften",)),
    "Sequential subclass": (
        MIXING + "\n\nclass Chain(nn.Sequential):\n    def __init__(self):\n        super().__init__(Mixing())\n",
        "self.chain = Chain()",
        "x = self.chain(x)",
        ("Chain", "Mixing"),
    ),
    "ModuleList subclass": (
        MIXING
        + "\n\nclass Chain(nn.ModuleList):\n    def __init__(self):\n        super().__init__()\n        self.append(Mixing())\n\n    def forward(self, x):\n        for one in self:\n            x = one(x)\n        return x\n",
        "self.chain = Chain()",
        "x = self.chain(x)",
        ("Chain", "Mixing"),
    ),
    "list of a local": (
        MIXING,
        "parts = []\nparts.append(Mixing())\nself.chain = nn.ModuleList(parts)",
        "x = self.chain[0](x)",
        ("Mixing",),
    ),
    "add_module": (MIXING, 'self.add_module("mixer_x", Mixing())', "x = self.mixer_x(x)", ("Mixing",)),
    "setattr": (MIXING, 'setattr(self, "mixer_x", Mixing())', "x = self.mixer_x(x)", ("Mixing",)),
    "super().forward": (
        SOFTEN
        + "\n\nclass Mixing(nn.Module):\n    def forward(self, x):\n        return soften(x)\n\n\nclass Sub(Mixing):\n    def forward(self, x):\n        return super().forward(x)\n",
        "self.sub = Sub()",
        "x = self.sub(x)",
        ("Sub", "soften"),
    ),
    "inherited from another file": (
        "from elsewhere.parts import Base\n\n\nclass Sub(Base):\n    pass\n",
        "self.sub = Sub()",
        "x = self.sub(x)",
        ("elsewhere.parts.Base",),
    ),
    "integrations": (
        "from transformers.integrations.finegrained_fp8 import fp8_linear\n",
        "",
        "x = fp8_linear(x)",
        ("transformers.integrations.finegrained_fp8.fp8_linear",),
    ),
    "third party handed on": (
        "from einops import rearrange\n",
        "",
        'run = rearrange\nx = run(x, "b s d -> b s d")',
        ("einops.rearrange",),
    ),
    "imported in the function": ("", "", "from elsewhere import soften\nx = soften(x)", ("elsewhere.soften",)),
    "imported or None": (
        "try:\n    from elsewhere import soften_fast\nexcept ImportError:\n    soften_fast = None\n",
        "",
        "x = soften_fast(x) if soften_fast else x",
        ("elsewhere.soften_fast",),
    ),
    "star": ("from elsewhere.parts import *\n", "", "x = soften(x)", ("soften",)),
    "custom op": ("", "", "x = torch.ops.mine.soften(x)", ("torch.ops.mine.soften",)),
    "module object": (
        SOFTEN
        + "\n\nclass Softener:\n    def soften(self, x):\n        return soften(x)\n\n\nSOFTENER = Softener()\n",
        "",
        "x = SOFTENER.soften(x)",
        ("Softener", "soften"),
    ),
    "static method": (
        SOFTEN + "\n\nclass Softener:\n    @staticmethod\n    def soften(x):\n        return soften(x)\n",
        "",
        "x = Softener.soften(x)",
        ("Softener", "soften"),
    ),
    "method of a part": (
        SOFTEN + "\n\n" + MIXING + "\n    def blend(self, x):\n        return soften(x)\n",
        "self.mixer_x = Mixing()",
        "x = self.mixer_x.blend(x)",
        ("soften", "Mixing"),
    ),
    "forward by assignment": (
        SOFTEN + "\n\n" + MIXING + "\n\nMixing.forward = soften\n",
        "self.mixer_x = Mixing()",
        "x = self.mixer_x(x)",
        ("soften",),
    ),
    "forward in the body": (
        SOFTEN + "\n\nclass Mixing(nn.Module):\n    forward = soften\n",
        "self.mixer_x = Mixing()",
        "x = self.mixer_x(x)",
        ("soften", "Mixing"),
    ),
    "torch patched": (
        SOFTEN + "\n\ntorch.nn.functional.silu = soften\n",
        "",
        "x = nn.functional.silu(x)",
        ("nn.functional.silu",),
    ),
    "defined below a condition": (
        "if torch.cuda.is_available():\n    def soften(x):\n        return x.cumsum(1)\nelse:\n    def soften(x):\n        return x\n",
        "",
        "x = soften(x)",
        ("soften",),
    ),
    "class below a condition": (
        "if True:\n    class Mixing(nn.Module):\n        def forward(self, x):\n            return x.cumsum(1)\n",
        "self.mixer_x = Mixing()",
        "x = self.mixer_x(x)",
        ("Mixing",),
    ),
    "chosen below a condition": (
        SOFTEN
        + "\n\nif torch.cuda.is_available():\n    run_x = soften\nelse:\n    run_x = torch.nn.functional.silu\n",
        "",
        "x = run_x(x)",
        ("soften",),
    ),
    "handed to a class": (
        SOFTEN
        + "\n\nclass Runs(nn.Module):\n    def __init__(self, run):\n        super().__init__()\n        self.run = run\n\n    def forward(self, x):\n        return self.run(x)\n",
        "self.runs_x = Runs(soften)",
        "x = self.runs_x(x)",
        ("soften", "Runs"),
    ),
    "all parts": (MIXING, "self.mixer_x = Mixing()", "for one in self.children():\n    x = one(x)", ("Mixing",)),
    "_modules": (MIXING, "self.mixer_x = Mixing()", 'x = self._modules["mixer_x"](x)', ("Mixing",)),
    "vars": (SOFTEN, "self.run_x = soften", 'x = vars(self)["run_x"](x)', ("soften",)),
    "globals": (SOFTEN, "", 'x = globals()["soften"](x)', ("*builtins.globals",)),
    "eval": (SOFTEN, "", 'x = eval("soften")(x)', ("*builtins.eval",)),
    "from the config, Sequential": ("", "self.run_x = nn.Sequential(config.run_x)", "x = self.run_x(x)", ("*.run_x",)),
    "from the config, made": ("", "self.run_x = config.make(torch.float32)", "x = self.run_x(x)", ("*.run_x",)),
    "two values": (
        MIXING,
        "self.run_x = Mixing()\nif config.other:\n    self.run_x = config.make()",
        "x = self.run_x(x)",
        ("Mixing", "*.run_x"),
    ),
    "global": (
        "RUN = None\n\n\ndef choose():\n    global RUN\n    RUN = soften\n\n\n" + SOFTEN,
        "",
        "x = RUN(x)",
        ("soften",),
    ),
    "class of a part changed": (
        MIXING,
        "self.mixer_x = nn.Identity()\nself.mixer_x.__class__ = Mixing",
        "x = self.mixer_x(x)",
        ("Mixing",),
    ),
    "compiled": (SOFTEN, "self.run_x = torch.compile(soften)", "x = self.run_x(x)", ("soften",)),
    "attribute of a function": (
        SOFTEN + "\n\ndef runs(x):\n    return runs.inner(x)\n\n\nruns.inner = soften\n",
        "",
        "x = runs(x)",
        ("soften", "runs"),
    ),
    "metaclass": (
        SOFTEN
        + "\n\nclass Meta(type):\n    def __call__(cls, *a):\n        return soften\n\n\nclass Made(metaclass=Meta):\n    pass\n",
        "self.made = Made()",
        "x = self.made(x)",
        ("soften",),
    ),
    "context manager": (
        SOFTEN
        + "\n\nclass Within:\n    def __enter__(self):\n        return soften\n\n    def __exit__(self, *a):\n        pass\n",
        "",
        "with Within() as run:\n    x = run(x)",
        ("soften", "Within"),
    ),
    "descriptor": (
        SOFTEN
        + "\n\nclass Held:\n    def __get__(self, one, owner):\n        return soften\n\n\nclass Mixing(nn.Module):\n    run = Held()\n    def forward(self, x):\n        return self.run(x)\n",
        "self.mixer_x = Mixing()",
        "x = self.mixer_x(x)",
        ("soften", "Held", "Mixing"),
    ),
    "__getattr__": (
        SOFTEN
        + "\n\nclass Mixing(nn.Module):\n    def __getattr__(self, name):\n        return soften\n\n    def forward(self, x):\n        return self.run(x)\n",
        "self.mixer_x = Mixing()",
        "x = self.mixer_x(x)",
        ("soften", "Mixing"),
    ),
    "first of two": (
        "def soften(x):\n    return other_x(x)\n\n\nbefore = soften\n\n\ndef soften(x):\n    return before(x)\n\n\ndef other_x(x):\n    return x\n",
        "",
        "x = soften(x)",
        ("soften", "other_x"),
    ),
    "class defined twice": (
        SOFTEN
        + "\n\nclass Mixing(nn.Module):\n    def forward(self, x):\n        return soften(x)\n\n\nclass Mixing(Mixing):\n    def extra(self):\n        pass\n",
        "self.mixer_x = Mixing()",
        "x = self.mixer_x(x)",
        ("soften", "Mixing"),
    ),
    "torch module subclass": (
        "class OwnNorm(nn.LayerNorm):\n    pass\n",
        "self.own_norm = OwnNorm(8)",
        "x = self.own_norm(x)",
        ("OwnNorm",),
    ),
    "operator.methodcaller": (
        "import operator\n\n\n" + SOFTEN + "\n\n" + MIXING + "\n    def blend(self, x):\n        return soften(x)\n",
        "self.mixer_x = Mixing()",
        'x = operator.methodcaller("blend", x)(self.mixer_x)',
        ("soften",),
    ),
    "attrgetter": (
        "import operator\n\n\n" + SOFTEN,
        "self.run_x = soften",
        'x = operator.attrgetter("run_x")(self)(x)',
        ("soften",),
    ),
    "alias of self": (MIXING, "self.mixer_x = Mixing()", "me = self\nx = me.mixer_x(x)", ("Mixing",)),
    "helper given self": (
        MIXING + "\n\ndef helps(module, x):\n    return module.mixer_x(x)\n",
        "self.mixer_x = Mixing()",
        "x = helps(self, x)",
        ("Mixing", "helps"),
    ),
}


def planted(text: str, model: str, name: str) -> str:
    """Upstream's text with a plant in it."""
    forward, init = PLACES[model]
    top, made, run, _ = PLANTS[name]
    run = f"x = hidden_states\n{run}\nhidden_states = x"
    first = re.search(r"\n\n\n(@|class )", text).start() + 3
    begin = text.index(init) + len(init)
    end = text.index(forward, begin) + len(forward)
    parts = [
        text[:first],
        top,
        "\n\n",
        text[first:begin],
        _indented(made),
        text[begin:end],
        _indented(run),
        text[end:],
    ]
    return "".join(parts)


def _indented(code: str) -> str:
    return "".join(f"{' ' * 8}{line}\n" for line in code.splitlines())
