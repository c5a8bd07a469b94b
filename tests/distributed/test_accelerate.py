"""accelerate's FSDP2 over two ranks: the generated class with its fused seams, beside upstream's."""

from __future__ import annotations

import cases_accelerate as cases
from rounding import require_equal_up_to_rounding
from trainer_models import LAYERS


def test_losses_and_weights_are_those_of_upstream(two_ranks):
    expected, weights, calls = two_ranks.run(cases.train, generated=False)[0]
    assert len(set(expected)) == cases.STEPS and not calls
    found = two_ranks.run(cases.train, generated=True)
    for losses, _, calls in found:
        require_equal_up_to_rounding(losses, expected)
        assert calls == {"fused_moe": LAYERS * cases.STEPS, "causal_lm_loss": cases.STEPS}
    trained = found[0][1]
    assert trained.keys() == weights.keys()
    for name in weights:
        require_equal_up_to_rounding(
            trained[name], weights[name], units=1e3, what=name
        )  # Adam divides small gradients by themselves


def test_a_parameter_that_one_rank_leaves_out_is_summed_as_the_page_says(two_ranks):
    """docs/tasks/trl.md; without the call there the ranks sum different parameters, and gloo ends them."""
    left_out = {"leaves_out": "model.layers.0.self_attn.k_norm"}
    expected, weights, _ = two_ranks.run(cases.train, generated=False, **left_out)[0]
    losses, trained, _ = two_ranks.run(cases.train, generated=True, **left_out)[0]
    require_equal_up_to_rounding(losses, expected)
    assert len(set(losses)) == cases.STEPS
    name = f"{left_out['leaves_out']}.weight"
    require_equal_up_to_rounding(trained[name], weights[name], units=1e3, what=name)
    assert not (trained[name] == 1).any(), "rank 0 has a gradient for all of it"
