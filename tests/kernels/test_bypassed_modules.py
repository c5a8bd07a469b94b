"""What is added to a head, to experts or to their activation runs with kernels as without: a training step is the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn
from torch.nn.modules import module as of_torch
from torch.nn.utils import parametrizations, weight_norm
from transformers import Qwen3MoeForCausalLM

from patchgen.kernels.bypassed_modules import addition
from patchgen.kernels.elementwise.activations import recognise
from patchgen.kernels.loss.linear_cross_entropy import unsupported
from patchgen.runtime import registry, seams
from patchgen.runtime.parallel.watch import Watch
from patchgen.runtime.verify.comparison import compare_gradients, compare_outputs, train_step
from patchgen.runtime.verify.inputs import text_cases
from patchgen.runtime.verify.model_pair import build_model
from patchgen.runtime.verify.seam_proof import all_eager
from patchgen.runtime.verify.small_config import small_config


def with_forward(module: nn.Module) -> None:
    forward = module.forward
    module.forward = lambda *inputs, **named: forward(*inputs, **named) * 0.5


def with_class(module: nn.Module) -> None:
    kind = type(module)
    module.__class__ = type("Half", (kind,), {"forward": lambda self, *inputs: kind.forward(self, *inputs) * 0.5})


def weighted(module: nn.Module) -> None:
    weight_norm(module, "weight").weight_g.data.mul_(0.5)


def parametrised(module: nn.Module) -> None:
    parametrizations.weight_norm(module).parametrizations.weight.original0.data.mul_(0.5)


WAYS: dict[str, Callable[[nn.Module], object]] = {
    "forward hook": lambda m: m.register_forward_hook(lambda module, inputs, output: output * 0.5),
    "forward hook with keywords": lambda m: m.register_forward_hook(
        lambda module, inputs, named, output: output * 0.5, with_kwargs=True
    ),
    "forward pre-hook": lambda m: m.register_forward_pre_hook(lambda module, inputs: (inputs[0] * 0.5, *inputs[1:])),
    "backward hook": lambda m: m.register_full_backward_hook(
        lambda module, gradients, _: tuple(g if g is None or not g.is_floating_point() else g * 0.5 for g in gradients)
    ),
    "backward pre-hook": lambda m: m.register_full_backward_pre_hook(
        lambda module, gradients: tuple(g * 0.5 for g in gradients)
    ),
    "another forward": with_forward,
    "another class": with_class,
}
OF_WEIGHTS = {"weight norm": weighted, "parametrisation": parametrised}


def experts_of(model: nn.Module) -> nn.Module:
    return next(module for module in model.modules() if type(module).__name__ == "Qwen3MoeExperts")


PARTS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "head": lambda model: model.lm_head,
    "experts": experts_of,
    "activation": lambda model: experts_of(model).act_fn,
}
CHANGES = [(part, way) for part in PARTS for way in (*WAYS, *(OF_WEIGHTS if part == "head" else ()))]


@pytest.mark.parametrize(("part", "way"), CHANGES)
def test_a_step_with_kernels_is_the_eager_one(part, way):
    """The loss and every gradient; the changed model itself, eager, differs from the unchanged one."""
    config = small_config(Qwen3MoeForCausalLM.config_class).config
    model = build_model(registry.find_model("qwen3_moe").load().Qwen3MoeForCausalLM, config)
    case = text_cases(config, Qwen3MoeForCausalLM)[0]

    def eager():
        with all_eager():
            return train_step(model, case)

    unchanged = eager()
    (WAYS | OF_WEIGHTS)[way](PARTS[part](model))
    expected = eager()
    differences = compare_gradients(unchanged, expected).values()
    assert max(difference.relative for difference in differences) > 1e-3
    with all_eager(), seams.using(fused_moe="auto", causal_lm_loss="auto"):
        actual = train_step(model, case)
    assert compare_outputs(actual, expected)["loss"].relative < 1e-5
    assert max(difference.relative for difference in compare_gradients(actual, expected).values()) < 1e-4


@pytest.mark.parametrize("way", [*WAYS, *OF_WEIGHTS])
def test_a_kernel_that_reads_the_weight_refuses_a_changed_head(way):
    head, hidden = nn.Linear(4, 8, bias=False), torch.randn(1, 3, 4)
    assert unsupported(head, hidden) is None
    (WAYS | OF_WEIGHTS)[way](head)
    reason = unsupported(head, hidden)
    assert reason is not None and ("would not run" in reason or "must be a plain nn.Linear" in reason)


@pytest.mark.parametrize("way", [name for name in WAYS if name != "another class"])
def test_an_activation_with_an_addition_is_not_taken_by_its_type(way):
    activation = nn.SiLU()
    assert recognise(activation, None, True, False) is not None
    WAYS[way](activation)
    assert addition(activation) is not None
    assert recognise(activation, None, True, False) is None


@pytest.fixture
def global_hook() -> Iterator[None]:
    handle = of_torch.register_module_forward_hook(lambda module, inputs, output: None)
    yield
    handle.remove()


def test_a_hook_of_all_modules_is_named(global_hook):
    assert "a hook of all modules" in (addition(nn.Linear(2, 2)) or "")


def test_a_plain_module_costs_no_break_of_a_compiled_graph():
    head = nn.Linear(4, 4)

    def call(x: torch.Tensor) -> torch.Tensor:
        return head(x) if addition(head) is None else x

    x = torch.randn(2, 4)
    assert torch.equal(torch.compile(call, backend="eager", fullgraph=True)(x), head(x))


def test_hooks_that_only_record_are_no_addition():
    """A run watches every module: its kernels are those of a model that nobody watches."""
    model = nn.Sequential(nn.Linear(2, 2), nn.SiLU())
    head, activation = model
    with Watch(model, timeout=60.0):
        assert head._forward_pre_hooks and activation._forward_hooks
        assert addition(head) is None and addition(activation) is None
        assert recognise(activation, None, True, False) is not None
        activation.register_forward_hook(lambda *_: None)
        assert recognise(activation, None, True, False) is None
