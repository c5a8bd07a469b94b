"""What a step keeps of its data for the next one is told by the values that it changes, wherever it keeps them."""

from __future__ import annotations

import pytest
from changed_losses import HELD
from changed_sources import PROJECTED, SourceChange, changed
from judged import EQUAL, TOLD, judged

INIT = "        self.post_attention_layernorm = Qwen3MoeRMSNorm(config.hidden_size, eps=config.rms_norm_eps)\n"
BEGIN = "        hidden_states = self.input_layernorm(hidden_states)\n"
CLASS = "class Qwen3MoeDecoderLayer("
KEPT = """        self.register_buffer("load", torch.zeros(2))
        self.seen, self.other, self.table = None, None, {}
"""
ABOVE = """HISTORY = []


def counted(load, x):
    load.add_(x)


"""


def in_layer(code: str) -> SourceChange:
    """The change of a layer that runs code on its normed input `x`, a mean of this step's data as `m`."""
    lines = "".join(f"        {line}\n" for line in code.split("\n"))
    named = (
        f"{BEGIN}        x, m = hidden_states, hidden_states.detach().abs().mean()\n{lines}        hidden_states = x\n"
    )
    return changed("", "qwen3_moe", code, (BEGIN, named), (INIT, INIT + KEPT), (CLASS, ABOVE + CLASS))


READ = "x = x * (1 + self.load.sum())"
QUICK = (f"self.load += m\n{READ}",)
LATER = (
    f"self.load = self.load + m\n{READ}",
    f"self.load.detach().add_(m)\n{READ}",
    f"load = self.load\nload += m\n{READ}",
    f"self.load[0] += m\n{READ}",
    f"self.load.data = self.load + m\n{READ}",
    f"torch.add(self.load, m, out=self.load)\n{READ}",
    f"counted(self.load, m)\n{READ}",
    f"setattr(self, 'load', self.load + m)\n{READ}",
    f"with torch.no_grad():\n    self.load.lerp_(m.expand(2), 0.1)\n{READ}",
    "if self.seen is None: self.seen = m\nx = x * (1 + self.seen)",
    "if not hasattr(self, 'first'): self.first = m\nx = x * (1 + self.first)",
    "self.seen = m if self.seen is None else self.seen\nx = x * (1 + self.seen)",
    "self.other, self.seen = self.seen, m\nx = x if self.other is None else x * (1 + self.other)",
    "x = x * (1 + self.table.setdefault('first', m))",
    "self.table['sum'] = self.table.get('sum', 0) + m\nx = x * (1 + self.table['sum'])",
    "HISTORY.append(m)\nx = x * (1 + sum(HISTORY))",
    "type(self).total = getattr(type(self), 'total', 0) + m\nx = x * (1 + type(self).total)",
    "self.self_attn.config.seen = getattr(self.self_attn.config, 'seen', 0) + m\nx = x * (1 + self.self_attn.config.seen)",
    "self.calls = getattr(self, 'calls', 0) + 1\nx = x * (1 + 0.1 * self.calls)",
    "self.input_layernorm.weight.data.mul_(1 + m)",
    f"self.load[0] = m\n{READ}",
    f"self.load = (0.9 * self.load + 0.1 * m).to(self.load.dtype)\n{READ}",
    f"self.load.mul_(0.9).add_(m)\n{READ}",
    f"self.load.copy_(m.expand(2))\n{READ}",
    "seen = self.other\nself.other = m if seen is None else 0.9 * seen + 0.1 * m\nx = x * (1 + self.other)",
)


@pytest.mark.parametrize("code", [*QUICK, *(pytest.param(code, marks=pytest.mark.slow) for code in LATER)])
def test_what_the_next_step_reads_is_told(code: str):
    found = judged(in_layer(code))
    assert found.kind == TOLD, found


@pytest.mark.parametrize(
    ("made", "code"),
    [
        (
            "self.seen = nn.Buffer(torch.zeros(()))",
            "self.seen = 0.9 * self.seen + 0.1 * hidden_states.detach().mean()",
        ),
        ('self.register_buffer("seen", torch.zeros(config.vocab_size))', "self.seen[input_ids] += 1"),
    ],
    ids=["a running mean", "counts of tokens"],
)
@pytest.mark.slow
def test_what_a_head_keeps_is_told(made: str, code: str):
    read = "hidden_states = hidden_states * (1 + self.seen.mean())"
    edits = ((HELD, f"{HELD}        {made}\n"), (PROJECTED, f"{code}\n        {read}\n        {PROJECTED}"))
    found = judged(changed("", "qwen3_moe", code, *edits))
    assert found.kind == TOLD, found


@pytest.mark.parametrize(
    "code",
    [
        "self.seen = m",
        "self.load += m",  # verify.json has the line, without a layout that it rules out
        "self.seen = None\nif self.seen is None: self.seen = x.detach()\nx = x + self.seen",
        "load = self.load.cumsum(0).add_(m)",
        "if self.seen is None: self.seen = x.shape[-1]\nx = x * self.seen",
    ],
)
@pytest.mark.slow
def test_what_no_later_step_reads_is_not(code: str):
    found = judged(in_layer(code))
    assert found.kind == EQUAL, found
