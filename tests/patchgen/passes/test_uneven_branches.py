"""Ranks agree on a branch only where a rank without such tokens computes what it did before, and waits for nobody."""

from __future__ import annotations

import pytest
from generation_cases import anatomy_of, applied, edited, load

from patchgen import pipeline, source
from patchgen.passes.stacked_experts import StackedExperts
from patchgen.passes.uneven_branches import UnevenBranches

BLOCK = """
class ExampleMoeBlock(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.text_moe = ExampleSparseMoe(config)
        self.vision_moe = ExampleSparseMoe(config)

    def forward(self, hidden_states, is_vision=None):
        if is_vision is not None and is_vision.any():
            out = torch.zeros_like(hidden_states)
            is_vision = is_vision.bool()
            columns = is_vision[..., None].expand(-1, -1, 4)
            out[columns] = self.vision_moe(hidden_states[columns])
            out[~is_vision] = self.text_moe(hidden_states[~is_vision])
        else:
            out = self.text_moe(hidden_states)
        return out
"""
LAST = "out[~is_vision] = self.text_moe(hidden_states[~is_vision])"
TEST = "if is_vision is not None and is_vision.any():"


def test_the_test_of_another_method_stays():
    other = f"    def count(self, is_vision=None):\n        {TEST}\n            return 1\n        return 0\n\n"
    outcome = applied(UnevenBranches(), BLOCK.replace("    def forward", other + "    def forward"))
    above, _, forward = outcome.module.text.partition("def forward")
    assert TEST in above and "ops.tokens_of_any_rank(is_vision, hidden_states)" in forward


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (TEST, f"if hidden_states is None:\n            return None\n        {TEST}"),
        (
            "out[columns] = self.vision_moe(hidden_states[columns])",
            "out[columns] = self.vision_moe(hidden_states).sum()",
        ),
        ("self.vision_moe(hidden_states[columns])", "self.vision_moe(hidden_states)"),
        ("self.vision_moe(hidden_states[columns])", "self.vision_moe(hidden_states[columns], scale=2)"),
        ("out[columns] =", "out ="),
        ("out[columns] =", "out[~columns] ="),
        ("is_vision.bool()", "is_vision.bool().roll(1)"),
        ("out = self.text_moe(hidden_states)", "out = self.vision_moe(hidden_states)"),
        ("out = self.text_moe(hidden_states)", "out = self.text_moe(hidden_states * 2)"),
        ("out = self.text_moe(hidden_states)", "out = hidden_states"),
        (TEST, f"states = hidden_states * 2\n        {TEST}"),
        (TEST, f"hidden_states = hidden_states * 2\n        {TEST}"),
        # what else either branch does
        (LAST, f"{LAST}\n            out = out * 2"),
        (LAST, f"{LAST}\n            out += 1"),
        (LAST, f"{LAST}\n            out.mul_(2)"),
        (LAST, f"{LAST}\n            out[~is_vision] += hidden_states.mean()"),
        (LAST, f"{LAST}\n            return out * 2"),
        (LAST, f"{LAST}\n            out = torch.zeros_like(out)"),
        ("out = torch.zeros_like(hidden_states)", "out = hidden_states"),
        ("out = torch.zeros_like(hidden_states)", "out = torch.zeros_like(hidden_states.mul_(2))"),
        (
            "out = torch.zeros_like(hidden_states)",
            "out = torch.zeros_like(hidden_states)\n            other = torch.ones_like(out)",
        ),
        ("        return out", "            out = out * 2\n        return out"),
        ("out = self.text_moe(hidden_states)", "other = self.text_moe(hidden_states)"),
        ("        return out", "        return out if columns is None else out * 2"),
    ],
)
def test_a_branch_of_another_form_is_refused_on_several_ranks(old, new):
    text = BLOCK.replace(old, new)
    if "states = hidden_states * 2" in new:
        text = text.replace("moe(hidden_states", "moe(states")
    assert text != BLOCK
    written = applied(UnevenBranches(), text).module.text
    assert "ops.refuse_uneven_ranks" in written and "tokens_of_any_rank" not in written


def test_a_branch_within_another_is_refused_on_several_ranks():
    head, body = BLOCK.split(TEST)
    inside, end = body.split("        return out")
    nested = f"if hidden_states.shape[0] > 1:\n            {TEST}" + inside.replace("\n    ", "\n        ")
    written = applied(UnevenBranches(), f"{head}{nested.rstrip()}\n        return out{end}").module.text
    assert "ops.refuse_uneven_ranks" in written and "tokens_of_any_rank" not in written


EXPERTS = """
class ExampleExperts(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.empty(config.num_experts, 2 * config.size, config.hidden))
        self.down_proj = nn.Parameter(torch.empty(config.num_experts, config.hidden, config.size))

    def forward(self, rows, index, weights):
        for expert in index.unique():
            if (index == expert).any():
                rows = rows @ self.gate_up_proj[expert] @ self.down_proj[expert]
        return rows


class ExampleMoeBlock(nn.Module):
    def __init__(self, config, layer_idx: int = 0):
        super().__init__()
        self.config = config
        self.num_experts = config.num_experts
        self.has_experts = getattr(config, "num_experts", 0) > 0
        self.is_sparse = config.layer_types[layer_idx] in ("moe", "sparse")
        self.is_listed = bool(layer_idx in getattr(config, "moe_layers", []))
        self.text_config = config.text_config
        self.norm = nn.LayerNorm(config.hidden)
        self.experts = ExampleExperts(config)
        self.more = nn.ModuleList([ExampleExperts(config) for _ in range(2)])

    def asked(self, x, index, weights, **kwargs):
        return self.experts(x, index, weights) if kwargs.get("wanted", False) else x

    def star(self, rows, x, index, weights):
        return self.experts(x, index, weights) if rows is not None else x

    def pick(self, rows):
        return None if rows.sum() == 0 else rows

    def wants(self, rows):
        return (rows[:, 0] > 0).any()

    def run(self, module, rows, index, weights, is_wanted=True):
        if is_wanted:
            return module(rows, index, weights)
        return rows

    def forward(self, x, index, weights, use_all: bool = True, mask=None):
        out, keep = torch.zeros_like(x), x[:, 0] > 0
{body}
        return out
"""
RUN = "self.experts(x, index, weights)"


def with_experts(body: str) -> str:
    """What the pass writes for a block whose forward has this body."""
    text = EXPERTS.replace("{body}", "\n".join(f"        {line}" for line in body.split("\n")))
    return applied(UnevenBranches(), text).module.text


@pytest.mark.parametrize(
    "body",
    [
        *(
            f"found = {found}\nif found is not None:\n    out = {RUN}"
            for found in (
                "self.norm.pick(keep)",
                "super().pick(keep)",
                "next((row for row in x if row.any()), None)",
                "max([row for row in x if row.any()], default=None, key=len)",
                "(lambda rows: None if rows.any() else rows)(keep)",
                "{}.setdefault('a', x if keep.any() else None)",
                "[x if keep.any() else None][0]",
            )
        ),
        *(
            f"rows = [1]\n{change}\nif rows:\n    out = {RUN}"
            for change in (
                "keep.any() and rows.append(1)",
                "rows.append(1) if keep.any() else None",
                "[rows.append(1) for _ in keep.nonzero()]",
                "if keep.any():\n    del rows[0]",
                "if keep.any():\n    _ = rows.pop()",
            )
        ),
        f"pick = lambda rows: None if rows.any() else rows\nfound = pick(keep)\nif found is not None:\n    out = {RUN}",
        f"def inner():\n    return None if keep.any() else x\nfound = inner()\nif found is not None:\n    out = {RUN}",
        f"args = (x if keep.any() else None, x)\nrows, y = args\nif rows is not None:\n    out = {RUN}",
        f"for rows in (x if keep.any() else None, x):\n    if rows is not None:\n        out = {RUN}",
        f"rows = x if keep.any() else None\nif isinstance(rows, torch.Tensor):\n    out = {RUN}",
        f"n = 0\n[(n := 1) for _ in keep.nonzero()]\nif n:\n    out = {RUN}",
        f"n = 0\nmatch 1:\n    case _ if keep.any():\n        pass\n    case _:\n        n = 1\nif n:\n    out = {RUN}",
        f"y = x\nif keep.any():\n    y = x[None]\nif y.dim() == 3:\n    out = {RUN}",
        f"stats = {{}}\nself.count(stats, keep)\nif stats:\n    out = {RUN}",
        "name = 'experts'\nif keep.any():\n    out = getattr(self, name)(x, index, weights)",
        "table = dict(a=self.experts)\nif keep.any():\n    out = table['a'](x, index, weights)",
        "if keep.any():\n    out = list(map(self.experts, [x], [index], [weights]))[0]",
        f"has = False\ntry:\n    int(keep)\nexcept RuntimeError:\n    has = True\nif has:\n    out = {RUN}",
        f"n = 0\nfor _ in range(2):\n    if keep.any():\n        break\n    n += 1\nif n > 1:\n    out = {RUN}",
        f"self.norm(x)\nif self.experts.has_rows():\n    out = {RUN}",
        f"self.has = keep.any()\nif getattr(self, 'has', False):\n    out = {RUN}",
        f"self.rows = x if keep.any() else None\nif getattr(self, 'rows', None) is not None:\n    out = {RUN}",
        "rows = x if keep.any() else None\nargs = (rows, x)\nout = self.star(*args, index, weights)",
        "rows = x if keep.any() else None\nout = self.star(x=x, index=index, weights=weights, **dict(rows=rows))",
        "for module in filter(None, self.more):\n    if keep.any():\n        out = module(x, index, weights)",
        "if keep.any():\n    out = getattr(self.more, '0')(x, index, weights)",
        f"self.has = keep.any()\nif self.has:\n    out = {RUN}",
        f"self.has = False\nif keep.any():\n    self.has = True\nif self.has:\n    out = {RUN}",
        f"pair = (x if keep.any() else None, x)\nif pair[0] is not None:\n    out = {RUN}",
        f"found = self.pick(keep)\nif found.rows is not None:\n    out = {RUN}",
        f"self.rows = x if keep.any() else None\nif self.rows is not None:\n    out = {RUN}",
        f"stats = {{}}\nif keep.any():\n    stats['rows'] = x\nif stats.get('rows') is not None:\n    out = {RUN}",
        f"rows = []\n[rows.append(r) for r in x[keep]]\nif rows:\n    out = {RUN}",
        f"n = 0\n_ = (n := 1) if keep.any() else 0\nif n:\n    out = {RUN}",
        f"has = False\nmatch 1:\n    case _ if keep.any():\n        has = True\nif has:\n    out = {RUN}",
        f"def inner(rows):\n    return {RUN} if rows.sum() > 0 else rows\nout = inner(x)",
        "out = self.asked(x, index, weights, wanted=keep.any())",
        f"chosen = self.pick(keep)\nif chosen is not None:\n    out = {RUN}",
        f"stats = {{}}\nstats.update(n=keep.sum())\nif stats['n'] > 0:\n    out = {RUN}",
        "if keep.sum() > 0:\n    for module in (self.experts,):\n        out = module(x, index, weights)",
        "for module in [*self.more, self.experts]:\n    if keep.sum() > 0:\n        out = module(x, index, weights)",
        *(
            f"if {test}:\n    out = {RUN}"
            for test in (
                "keep.any()",
                "torch.any(keep)",
                "keep.sum() > 0",
                "torch.count_nonzero(keep)",
                "x.mean() > 0",
                "weights.max() > 0.4",
                "self.wants(x)",
                "True in keep",
                "not torch.equal(keep, torch.zeros_like(keep))",
                "use_all and keep.sum().item()",
                "x.shape[1] > 1",
                "mask is not None and mask[0] > 0",
                "(count := keep.sum()) > 0",
                "torch.rand(()) < 0.5",
                "self.num_experts > 2 and len(keep.tolist()) > 1",
            )
        ),
        "rows = x[keep]\nif rows.numel():\n    out[keep] = self.experts(rows, index, weights)",
        "rows = x[keep]\nif rows.shape[0] > 0:\n    out[keep] = self.experts(rows, index, weights)",
        f"chosen = keep.nonzero()[:, 0]\nif len(chosen):\n    out = {RUN}",
        f"has = keep.any()\nif has:\n    out = {RUN}",
        f"has = False\nif keep.any():\n    has = True\nif has:\n    out = {RUN}",
        f"rows = None\nif keep.any():\n    rows = x\nif rows is not None:\n    out = {RUN}",
        f"rows = x if keep.any() else None\nif rows is not None:\n    out = {RUN}",
        f"rows = []\nfor row in x[keep]:\n    rows.append(row)\nif rows:\n    out = {RUN}",
        f"out = {RUN} if keep.any() else x",
        f"out = keep.any() and {RUN}",
        f"out = [{RUN} for _ in keep.nonzero()]",
        f"if not keep.any():\n    return x\nout = {RUN}",
        f"if use_all:\n    if not keep.any():\n        return x\nout = {RUN}",
        f"while keep.any():\n    out = {RUN}\n    keep = keep & False",
        f"while True:\n    out = {RUN}\n    if (out > 0).all():\n        break",
        f"for _ in keep.nonzero()[:1, 0]:\n    out = {RUN}",
        f"for _ in range(2):\n    if keep.any():\n        continue\n    out = {RUN}",
        f"for _ in range(int(keep.sum())):\n    out = {RUN}",
        f"match int(keep.sum()):\n    case 0:\n        out = x\n    case _:\n        out = {RUN}",
        "experts = self.experts\nif keep.any():\n    out = experts(x, index, weights)",
        "for experts in self.more:\n    if keep.any():\n        out = experts(x, index, weights)",
        "if keep.any():\n    out = self.more[0](x, index, weights)",
        "if keep.any():\n    out = self.run(self.experts, x, index, weights)",
        "out = self.run(self.experts, x, index, weights, is_wanted=bool(keep.any()))",
        "if keep.any():\n    out = torch.utils.checkpoint.checkpoint(self.experts, x, index, weights)",
        f"def run(x):\n    return {RUN}\nif keep.any():\n    out = run(x)",
        f"run = lambda: {RUN}\nif keep.any():\n    out = run()",
        f"if keep.any():\n    out = {RUN}\nelse:\n    out = {RUN} + {RUN}",
    ],
)
def test_a_condition_that_may_leave_out_experts_on_some_ranks_is_refused_on_several(body):
    assert "ops.refuse_uneven_ranks" in with_experts(body)


@pytest.mark.parametrize(
    "body",
    [
        *(
            f"if {test}:\n    out = {RUN}"
            for test in (
                "self.training",
                "use_all and not self.training",
                "self.num_experts > 1",
                "self.has_experts",
                "self.is_sparse",
                "self.is_listed",
                "self.text_config.num_layers > 2",
                "self.config.num_experts % 2 == 0",
                "getattr(self.config, 'routed', True)",
                "mask is not None",
                "isinstance(self.experts, ExampleExperts)",
                "len(self.more) > 1",
                "x.dim() == 2 and x.dtype == torch.float32",
                "torch.is_grad_enabled()",
            )
        ),
        "if keep.any():\n    out = torch.zeros(len(self.more))",
        f"if self.experts is not None and self.config.layers is not None:\n    out = {RUN}",
        f"mask = mask.to(x.device) if mask is not None else None\nif mask is not None:\n    out = {RUN}",
        f"num_runs = self.num_experts // 2\nfor _ in range(num_runs):\n    out = {RUN}",
        "for place, experts in enumerate(self.more):\n    if place > 0:\n        out = experts(x, index, weights)",
        "out = self.run(self.experts, x, index, weights, is_wanted=self.training)",
        f"if keep.sum() > 0:\n    out = self.norm(x)\nout = {RUN}",
        f"if keep.sum() > 0:\n    out = {RUN}\nelse:\n    out = self.experts(x * 2, index, weights)",
        f"if keep.sum() > 0:\n    return {RUN}\nout = {RUN} * 2",
        f"if x.shape[-1] != 4:\n    raise ValueError(x)\nout = {RUN}",
        f"match int(keep.sum()):\n    case 0:\n        out = {RUN}\n    case _:\n        out = {RUN} * 2",
        f"out = {RUN}\nif keep.sum() > 0:\n    out = out * 2",
        f"out = {RUN}\nif not keep.any():\n    return x",
        f"out = {RUN}\nfor row in keep.nonzero():\n    out = out + row",
        "rows = None if use_all else x\nif rows is not None:\n    out = self.experts(rows, index, weights)",
    ],
)
def test_a_condition_that_is_the_same_on_all_ranks_decides_on_experts(body):
    assert "refuse_uneven_ranks" not in with_experts(body)


SUBCLASS = """

class ExampleSparserBlock(ExampleMoeBlock):
    def {}:
        {}
"""


@pytest.mark.parametrize(
    ("method", "code", "owner"),
    [
        ("run(self, module, rows, *given)", "return module(rows, *given) if self.wants(rows) else rows", "MoeBlock"),
        ("forward(self, x, *given)", "return super().forward(x, *given) if self.wants(x) else x", "SparserBlock"),
    ],
    ids=["a method that the forward calls", "the forward of the class above"],
)
def test_what_a_subclass_overrides_is_read(method, code, owner):
    text = EXPERTS.replace("{body}", "        out = self.run(self.experts, x, index, weights)")
    assert "ops.refuse_uneven_ranks" not in applied(UnevenBranches(), text).module.text
    written = applied(UnevenBranches(), text + SUBCLASS.format(method, code)).module.text
    assert f'ops.refuse_uneven_ranks("Example{owner}", "self.wants(' in written


OUTER = """

class ExampleLayer(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.mlp = ExampleMoeBlock(config)

    def forward(self, x, index, weights):
        {}
"""


@pytest.mark.parametrize(
    ("code", "is_refused"),
    [
        ("return self.mlp(x, index, weights) if x.sum() > 0 else x", True),
        ("return self.mlp.experts(x, index, weights) if x.sum() > 0 else x", True),
        ("return self.mlp.run(self.mlp.experts, x, index, weights, x.sum() > 0)", True),
        ("return self.mlp.run(self.mlp.experts, x, index, weights, self.training)", False),
        ("return self.mlp(x * 2 if self.mlp.wants(x) else x, index, weights)", False),
    ],
)
def test_a_module_that_contains_experts_is_one_with_experts(code, is_refused):
    text = EXPERTS.replace("{body}", f"        out = {RUN}") + OUTER.format(code)
    written = applied(UnevenBranches(), text).module.text
    assert ('ops.refuse_uneven_ranks("ExampleLayer"' in written) == is_refused
    assert 'ops.refuse_uneven_ranks("ExampleMoeBlock"' not in written


ABOVE = "        routed = torch.zeros_like(hidden_states)\n"


@pytest.mark.parametrize(
    ("above", "is_refused"),
    [("", False), ("        if hidden_states.sum() > 0:\n            return hidden_states\n", True)],
    ids=["alone", "below a return"],
)
def test_the_loop_that_one_call_of_stacked_experts_replaces_decides_on_nothing(above, is_refused):
    text = StackedExperts.EXAMPLES[0].before.replace(ABOVE, above + ABOVE)
    assert above in text
    anatomy = anatomy_of(text)
    stacked = StackedExperts().apply(source.parse(text, "example.py"), anatomy)
    for name in stacked.added:
        anatomy.add(name, stacked.module)
    outcome = UnevenBranches().apply(stacked.module, anatomy)
    refusal = 'ops.refuse_uneven_ranks("ExampleMoE", "hidden_states.sum() > 0")'
    assert ("ops.refuse_uneven_ranks" in outcome.module.text, refusal in outcome.module.text) == (
        is_refused,
        is_refused,
    )


CALL = "        final_hidden_states = self.experts(hidden_states_reshaped, selected_experts, routing_weights)\n"


@pytest.mark.sampled(1)
def test_a_sum_that_decides_on_the_experts_of_a_model_is_refused_on_several_ranks():
    wanted = f"        final_hidden_states = hidden_states_reshaped\n        if routing_weights.sum() > 0:\n    {CALL}"
    found = pipeline.generate(edited(load("qwen3_moe"), (CALL, wanted))).text
    assert 'ops.refuse_uneven_ranks("Qwen3MoeSparseMoeBlock", "routing_weights.sum() > 0")' in found
