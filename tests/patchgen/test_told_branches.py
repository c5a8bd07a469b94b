"""What a rank's own tokens decide about experts is told by values that Python reads, also of branches that no small row takes."""

from __future__ import annotations

import pytest
from changed_sources import SourceChange, changed
from judged import EQUAL, TOLD, judged

from patchgen.runtime.verify import told

CALL = "        final_hidden_states = self.experts(hidden_states_reshaped, selected_experts, routing_weights)\n"
NAMES = """        x, index, weights = hidden_states_reshaped, selected_experts, routing_weights
        out, keep, mask = torch.zeros_like(x), x[:, 0] > 0, None
"""
FORWARD = "    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:\n        batch_size"
METHODS = """    def asked(self, x, index, weights, **kwargs):
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

    def count(self, stats, rows):
        if rows.any():
            stats["n"] = 1

"""
RUN = "self.experts(x, index, weights)"
RETURN = "return x.reshape(batch_size, sequence_length, hidden_dim)"


def in_block(body: str) -> SourceChange:
    """The change of a block whose experts run by this body."""
    lines = "".join(f"        {line}\n" for line in body.split("\n"))
    moved = f"{NAMES}{lines}        final_hidden_states = out\n"
    return changed("", "qwen3_moe", body, (CALL, moved), (FORWARD, f"{METHODS}{FORWARD}"))


QUICK = (
    f"if keep.any():\n    out = {RUN}",
    f"for _ in range(int(keep.sum() > 10_000)):\n    out = {RUN}\nout = {RUN}",
)
LATER = (
    *(
        f"found = {found}\nif found is not None:\n    out = {RUN}"
        for found in (
            "self.pick(keep)",
            "next((row for row in x if row.any()), None)",
            "(lambda rows: rows if rows.any() else None)(keep)",
            "[x if keep.any() else None][0]",
        )
    ),
    *(
        f"rows = []\n{change}\nif rows:\n    out = {RUN}"
        for change in (
            "keep.any() and rows.append(1)",
            "[rows.append(1) for _ in keep.nonzero()]",
            "if keep.any():\n    rows.append(1)",
        )
    ),
    f"n = 0\nmatch 1:\n    case _ if not keep.any():\n        pass\n    case _:\n        n = 1\nif n:\n    out = {RUN}",
    f"y = x\nif keep.any():\n    y = x[None]\nif y.dim() == 3:\n    out = {RUN}",
    f"stats = {{}}\nself.count(stats, keep)\nif stats:\n    out = {RUN}",
    "name = 'experts'\nif keep.any():\n    out = getattr(self, name)(x, index, weights)",
    "if keep.any():\n    out = list(map(self.experts, [x], [index], [weights]))[0]",
    f"has = True\ntry:\n    has = bool((x < 1e4).all())\nexcept RuntimeError:\n    pass\nif has:\n    out = {RUN}",
    f"n = 0\nfor _ in range(2):\n    if (x > 1e4).any():\n        break\n    n += 1\nif n > 1:\n    out = {RUN}",
    "rows = x if keep.any() else None\nout = self.star(rows, x, index, weights)",
    "out = self.asked(x, index, weights, wanted=bool(keep.any()))",
    "out = self.run(self.experts, x, index, weights, is_wanted=bool(keep.any()))",
    f"self.has = bool(keep.any())\nif self.has:\n    out = {RUN}",
    f"def inner(rows):\n    return {RUN} if rows.sum() != 0 else rows\nout = inner(x)",
    *(
        f"if {test}:\n    out = {RUN}"
        for test in (
            "torch.any(keep)",
            "keep.sum() > 0",
            "torch.count_nonzero(keep)",
            "x.abs().mean() > 0",
            "weights.max() > 0.01",
            "self.wants(x)",
            "True in keep",
            "not torch.equal(keep, torch.zeros_like(keep))",
            "self.training and keep.sum().item()",
            "(count := keep.sum()) > 0",
            "len(keep.tolist()) > 1 and any(keep.tolist())",
            "weights.max() < 1e4",
        )
    ),
    f"chosen = keep.nonzero()[:, 0]\nif len(chosen):\n    out = {RUN}",
    "rows = x[keep]\nif rows.numel():\n    out[keep] = self.experts(rows, index[keep], weights[keep])",
    f"out = {RUN} if keep.any() else x",
    f"if keep.any():\n    out = {RUN}\nif not keep.any():\n    out = x\nout = out + {RUN}",
    f"while (x < -1e4).any():\n    x = {RUN}\nout = {RUN}",
    f"while True:\n    out = {RUN}\n    if (out < 1e4).all():\n        break",
    f"out = {RUN}\nfor _ in range(int((x > 1e4).sum())):\n    out = {RUN}",
    f"match int((x > 1e4).sum()):\n    case 0:\n        out = {RUN}\n    case _:\n        out = x",
    "if keep.any():\n    out = torch.utils.checkpoint.checkpoint(self.experts, x, index, weights, use_reentrant=False)",
    f"if (x > 1e4).any():\n    out = {RUN}\nelse:\n    out = {RUN} + {RUN}",
    f"if (x > 1e4).any():\n    {RETURN}\nout = {RUN}",
    f"for _ in range(2):\n    if (x > 1e4).any():\n        continue\n    out = {RUN}",
    f"out = x if (x > 1e4).any() or {RUN} is None else {RUN}",
    f"if torch.rand(()) < 2:\n    out = {RUN}",
    f"def run():\n    return {RUN}\nif not (x > 1e4).any():\n    out = run()",
    f"run = lambda: {RUN}\nif keep.any():\n    out = run()",
    f"pair = (x if keep.any() else None, x)\nif pair[0] is not None:\n    out = {RUN}",
    "for module in filter(None, [self.experts]):\n    if keep.any():\n        out = module(x, index, weights)",
)


@pytest.mark.parametrize("body", [*QUICK, *(pytest.param(body, marks=pytest.mark.slow) for body in LATER)])
def test_a_value_that_may_leave_out_experts_on_some_ranks_is_told(body: str):
    found = judged(in_block(body))
    assert found.kind == TOLD, found
    # A condition that fires on small data also differs from upstream's documents one by one.
    assert found.by == told.PROOF or "ranks whose data differ wait for each other" in found.detail, found


LAYER = "        hidden_states = self.mlp(hidden_states)\n"
BLOCK = "class Qwen3MoeSparseMoeBlock(nn.Module):"
NEXT = '@use_kernel_forward_from_hub("RMSNorm")\nclass Qwen3MoeRMSNorm('
SPARSER = """class Qwen3MoeSparseMoeBlock(Qwen3MoeWholeBlock):
    def run(self, x, *given):
        return self.experts(x, *given) if x.abs().max() < 1e4 else x


"""


@pytest.mark.parametrize(
    "edits",
    [
        ((LAYER, "        if hidden_states.abs().max() < 1e4:\n            hidden_states = self.mlp(hidden_states)\n"),),
        ((BLOCK, BLOCK.replace("SparseMoe", "Whole")), (CALL, CALL.replace("experts", "run", 1)), (NEXT, SPARSER + NEXT)),
    ],
    ids=["a layer that leaves out its block", "a method that a subclass overrides"],
)  # fmt: skip
@pytest.mark.slow
def test_a_value_that_is_read_around_the_block_is_told(edits: tuple[tuple[str, str], ...]):
    found = judged(changed("", "qwen3_moe", "", *edits))
    assert (found.kind, found.by) == (TOLD, told.FACT), found


@pytest.mark.parametrize(
    "body",
    [
        f"if self.training or mask is None:\n    out = {RUN}",
        f"if x.dim() == 2 and x.dtype == torch.float32:\n    out = {RUN}",
        f"if (x > 1e4).any():\n    out = self.experts(x * 2, index, weights)\nelse:\n    out = {RUN}",
        f"out = {RUN}\nif (x > 1e4).any():\n    out = out * 2",
        f"out = {RUN}\nfor row in (x > 1e4).nonzero():\n    out = out + row.sum()",
    ],
)
@pytest.mark.slow
def test_what_is_the_same_on_all_ranks_or_runs_the_same_experts_is_not(body: str):
    found = judged(in_block(body))
    assert found.kind == EQUAL, found
