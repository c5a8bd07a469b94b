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


@pytest.fixture(scope="module")
def two_ranks():
    pool = RankPool(2)
    yield pool
    pool.close()


@pytest.mark.parametrize("plant", PLANTS, ids=[one.title for one in PLANTS])
@pytest.mark.sampled(len(PLANTS))
def test_what_mixes_tokens_is_told_however_it_is_reached(plant: SourceChange, two_ranks: RankPool):
    found = judged(plant, pool=two_ranks)
    assert found.kind == TOLD and found.by in (told.PROOF, told.FACT, told.TWO_RANKS), found
