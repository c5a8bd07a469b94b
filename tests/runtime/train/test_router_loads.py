"""When the loads of experts are those of a collapsed router, what is said then, and the picture of them."""

from __future__ import annotations

import re

import pytest
from trainer_models import build
from transformers import DeepseekV3Config

from patchgen.runtime.train import model as models
from patchgen.runtime.train import plots, router_loads, selection_bias
from patchgen.runtime.train.router_loads import ExpertLoads


def loads(*layers: list[int], per_token: int = 2) -> ExpertLoads:
    return ExpertLoads({f"layers.{index}.experts": counts for index, counts in enumerate(layers)}, per_token)


@pytest.mark.parametrize(
    ("counts", "is_collapsed"),
    [
        ([100] * 8, False),
        ([500, 480, 4, 4, 4, 4, 2, 2], True),  # all tokens to two
        ([500, 100, 90, 80, 80, 60, 50, 40], True),  # every token to one, 4x its share, and another
        ([300, 250, 90, 80, 80, 60, 50, 40], False),
        ([8, 8, 0, 0, 0, 0, 0, 0], False),  # too few tokens to tell
    ],
)
def test_a_layer_has_collapsed_if_few_experts_get_nearly_all(counts, is_collapsed):
    assert bool(loads(counts).collapsed()) == is_collapsed


def test_experts_that_all_tokens_need_have_not_collapsed():
    """With two experts for each token, two of two get all, and one of four may get half of the slots."""
    assert not loads([500, 500]).collapsed()
    assert not loads([500, 200, 200, 100]).collapsed()


def test_three_readings_in_a_row_tell_and_once():
    reader = router_loads.RouterLoads(build(generated=True))
    bad, good = loads([500, 500, 0, 0]), loads([250, 250, 250, 250])
    told = [reader.warning(one) for one in (bad, bad, good, bad, bad, bad, bad)]
    assert [text is not None for text in told] == [False] * 5 + [True, False]
    assert "train with the router's loss, which is off: train.router_balance: loss; or lower optim.lr" in told[5]


def test_the_advice_is_for_what_the_config_has():
    model = build(generated=True)
    model.config.output_router_logits, model.config.router_aux_loss_coef = True, 0.001
    assert "raise the coefficient" in router_loads.remedy(model) and "(now 0.001)" in router_loads.remedy(model)
    model.config = type(model.config).__mro__[1]()
    assert "has no router loss" in router_loads.remedy(model)
    with_bias = selection_bias.small_model(*models.find_head_and_config(DeepseekV3Config()))
    assert router_loads.remedy(with_bias).startswith(
        "move the selection bias of its routers: train.router_balance: bias; or"
    )
    assert "raise train.router_bias.rate" in router_loads.remedy(with_bias, "bias")


def test_the_picture_has_a_row_for_each_layer_and_a_shade_for_each_load():
    text = plots.heat_map({"first": [0, 0, 400, 0], "last": [100, 100, 100, 100]}, "a <b>")
    shades = {int(at): path for at, path in re.findall(r'<path class="shade(\d)" d="([^"]*)"', text)}
    assert shades == {0: "M0 0H2v1H0zM3 0H4v1H3z", 6: "M2 0H3v1H2z", 4: "M0 1H4v1H0z"}, "equal neighbours are one"
    assert 'viewBox="0 0 4 2"' in text and "a &lt;b&gt;" in text and "first to last" in text
    assert len(plots.heat_map({str(layer): [*range(256)] for layer in range(61)}, "large")) < 100_000
