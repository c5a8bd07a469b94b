"""What a head returns early, does to its labels or hangs on its projection is told by the proof, or runs as upstream's does."""

from __future__ import annotations

import pytest
from changed_losses import HEAD_CLASS, HELD, MASKED, OUTPUT, below, beside, case
from changed_sources import PROJECTED, SourceChange
from judged import EQUAL, TOLD, judged

from patchgen.runtime.verify.ranks import RankPool

ROUTED = "                outputs.router_logits,\n                self.num"
LOSS_ALONE = "return MoeCausalLMOutputWithPast(loss=hidden_states.pow(2).mean())"
TWICE = "lambda module, given, made: made * 2"
TWICE_FORWARD = "lambda x: nn.functional.linear(x * 2, {}.weight)"
SQUARE = """def square(function):
    def run(*args, **kwargs):
        result = function(*args, **kwargs)
        result.loss = result.loss and result.loss**2
        return result

    return run


"""


def above(title: str, code: str) -> SourceChange:
    """Code above the projection."""
    return case(title, (PROJECTED, f"{code}\n        {PROJECTED}"))


def under(title: str, code: str) -> SourceChange:
    """Code below the projection."""
    return case(title, (PROJECTED, f"{PROJECTED}\n        {code}"))


def at_top(title: str, run: str, top: str) -> SourceChange:
    """Code in `__init__`, and what it calls."""
    return case(title, (HELD, f"{HELD}        {run}\n"), (HEAD_CLASS, f"{top}\n\n\n{HEAD_CLASS}"))


QUICK = (
    above("an early return for long rows", f"if hidden_states.shape[1] > 1000:\n            {LOSS_ALONE}"),
    above("labels changed in place", "labels.clamp_(min=3) if labels is not None else None"),
)
LATER = (
    above("an early return for some values", f"if hidden_states.abs().max() > 1e4:\n            {LOSS_ALONE}"),
    above("an early return with another loss", f"if self.training:\n            {LOSS_ALONE}"),
    above("an early return without labels", "if labels is None:\n            return outputs"),
    under("an early return below the projection", "if self.training:\n            return MoeCausalLMOutputWithPast(loss=self.loss_function(logits, labels, self.vocab_size), logits=logits)"),
    under("labels masked in place below the projection", "labels.masked_fill_(labels < 50, -100) if labels is not None else None"),
    case("another operand of the same name", (PROJECTED, "logits = self.lm_head(hidden_states.flip(1)) + self.lm_head(hidden_states)")),
    below("logits in a tuple that is computed with", "pair = (logits, labels)\n        loss = loss + pair[0].std() if loss is not None else None"),
    beside("a loss function of the head's own", "self.loss_function = lambda logits, labels, vocab_size, **kwargs: logits.float().pow(2).mean()"),
    beside("a hook on the head's result", "self.register_forward_hook(lambda module, given, made: setattr(made, 'loss', made.loss and made.loss**2))"),
    at_top("a forward of the head's own", "self.forward = square(self.forward)", SQUARE.rstrip()),
    beside("a hook on the projection's weight", "self.lm_head.weight.register_hook(lambda g: g * 2)"),
    beside("a projection whose weight each step changes", "nn.utils.parametrizations.spectral_norm(self.lm_head)"),
    beside("a learned coefficient of the router loss", "del self.router_aux_loss_coef\n        self.router_aux_loss_coef = nn.Parameter(torch.tensor(0.1))"),
    case("a result that a function makes", (OUTPUT, "return MadeOutput("), (HEAD_CLASS, f"def MadeOutput(loss, **kwargs):\n    return MoeCausalLMOutputWithPast(loss=loss and loss**2, **kwargs)\n\n\n{HEAD_CLASS}")),
    case("a router loss of other tokens", (ROUTED, ROUTED.replace("outputs.router_logits", "tuple(x.roll(1, 0) for x in outputs.router_logits)"))),
    case("a router loss with a mask of the labels", (MASKED, MASKED.replace("attention_mask", "labels.ne(-100) if labels is not None else None"))),
)  # fmt: skip


@pytest.mark.parametrize("change", QUICK, ids=lambda change: change.title)
def test_what_one_process_shows_of_a_head_is_told(change: SourceChange):
    found = judged(change)
    assert found.kind == TOLD, found


@pytest.mark.slow  # two ranks
@pytest.mark.parametrize("change", LATER, ids=lambda change: change.title)
def test_what_a_head_does_beside_its_loss_is_told(change: SourceChange, two_ranks: RankPool):
    found = judged(change, pool=two_ranks)
    assert found.kind == TOLD, found


# On CPU, and with any kernel that does not read the weight itself, the projection runs as a module. One that does refuses it:
# tests/kernels/test_bypassed_modules.py.
SAME = (
    beside("a hook", f"self.lm_head.register_forward_hook({TWICE})"),
    beside("a hook before", "self.lm_head.register_forward_pre_hook(lambda module, given: (given[0] * 2,))"),
    beside("a hook on gradients", "self.lm_head.register_full_backward_pre_hook(lambda module, made: (made[0] * 2,))"),
    beside("a hook by its name", f"getattr(self.lm_head, 'register_forward_hook')({TWICE})"),
    beside("a hook where modules keep them", f"self.lm_head._forward_hooks[0] = {TWICE}"),
    at_top("a hook that a function adds", "held(self.lm_head)", f"def held(module):\n    module.register_forward_hook({TWICE})"),
    beside("another forward", f"self.lm_head.forward = {TWICE_FORWARD.format('self.lm_head')}"),
    at_top("another forward that a function sets", "held(self.lm_head)", f"def held(module):\n    module.__dict__['forward'] = {TWICE_FORWARD.format('module')}"),
    at_top("another class", "self.lm_head.__class__ = Twice", "class Twice(nn.Linear):\n    def forward(self, x):\n        return super().forward(x) * 2"),
    at_top("another weight", "nn.utils.parametrize.register_parametrization(self.lm_head, 'weight', Twice())", "class Twice(nn.Module):\n    def forward(self, weight):\n        return weight * 2"),
    beside("a weight normed before each call", "nn.utils.weight_norm(self.lm_head)"),
    beside("a coefficient in a buffer", 'del self.router_aux_loss_coef\n        self.register_buffer("router_aux_loss_coef", torch.tensor(0.1))'),
    beside("one of two losses, by the config", 'self.loss_type = "ForMaskedLM" if config.attention_bias else "ForCausalLM"'),
    under("logits handed to a function for nothing", "entropy = torch.logsumexp(input=logits, dim=-1)"),
)  # fmt: skip


@pytest.mark.slow  # two ranks
@pytest.mark.parametrize("change", SAME, ids=lambda change: change.title)
def test_what_is_added_to_the_projection_runs_as_upstream_runs_it(change: SourceChange, two_ranks: RankPool):
    found = judged(change, pool=two_ranks)
    assert found.kind == EQUAL, found
