"""Each operator changes a source into another that parses; those that keep the meaning keep the value."""

from __future__ import annotations

import ast
import sys
import types

import pytest
import torch

from patchgen import upstream
from patchgen.mutation.configuration import NAME, Configuration
from patchgen.mutation.draw import OPERATORS, draw
from patchgen.mutation.edits import Source
from patchgen.mutation.hidden_values import HIDDEN_VALUE_OPERATORS, hidden_names
from patchgen.mutation.losses import LOSS_OPERATORS
from patchgen.mutation.whole_file import OTHER_MODULE

SOURCE = """
import torch
from torch import nn


def scaled(x, factor=2.0):
    return x * factor


class Part(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.proj = nn.Linear(size, size)

    def forward(self, x):
        gate = torch.sigmoid(self.proj(x))
        value = gate * x
        if value.shape[0] > 1:
            value = scaled(value, factor=3.0) + gate
        out = nn.functional.linear(value, self.proj.weight)
        return out


class Whole(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.part = Part(size)
        self.scale = 1.5

    def forward(self, x):
        return self.part(x) * self.scale


def scale_of(whole):
    return whole.scale
"""


def value_of(text: str, modules: dict[str, str]) -> torch.Tensor:
    package = types.ModuleType("changed_package")
    package.__path__ = []
    sys.modules["changed_package"] = package
    for name, code in {**modules, "whole": text}.items():
        module = types.ModuleType(f"changed_package.{name}")
        module.__package__ = "changed_package"
        sys.modules[module.__name__] = module
        exec(compile(code, name, "exec"), vars(module))
    torch.manual_seed(0)
    return module.Whole(4)(torch.arange(8.0).view(2, 4))


def test_what_keeps_the_meaning_keeps_the_value():
    expected = value_of(SOURCE, {})
    ran = set()
    for _, mutant in zip(range(200), draw(SOURCE, seed=0), strict=False):
        if not mutant.keeps_meaning:
            continue
        try:
            found = value_of(mutant.text, mutant.modules)
        except (AttributeError, TypeError):
            continue  # a module has no view: who runs mutants leaves such out
        assert torch.equal(found, expected), (mutant.operator, mutant.change)
        ran.add(mutant.operator)
    assert ran == {operator.name for operator in OPERATORS if operator.keeps_meaning}


def test_what_changes_the_meaning_mostly_changes_the_value():
    """Some change nothing here (a constant that no branch reads); a table of operators that change nothing tests nothing."""
    expected = value_of(SOURCE, {})
    changed = unlike = 0
    for _, mutant in zip(range(150), draw(SOURCE, seed=1), strict=False):
        if mutant.keeps_meaning:
            continue
        changed += 1
        try:
            unlike += not torch.equal(value_of(mutant.text, mutant.modules), expected)
        except Exception:
            unlike += 1  # it does not run, which nobody takes for the same
    assert unlike > 0.7 * changed


@pytest.mark.parametrize("model", ["qwen3_moe", "gemma3"])
def test_every_mutant_of_a_model_parses_and_differs(model: str):
    text = upstream.load(model).text
    drawn = [mutant for _, mutant in zip(range(80), draw(text, seed=2), strict=False)]
    assert len({mutant.text for mutant in drawn}) == len(drawn) == 80
    for mutant in drawn:
        ast.parse(mutant.text)
        for code in mutant.modules.values():
            ast.parse(code)
    assert [m.text for _, m in zip(range(5), draw(text, seed=2), strict=False)] == [m.text for m in drawn[:5]]


def test_moved_code_brings_what_it_needs():
    moved = next(m for m in draw(SOURCE, seed=0) if m.operator == "class in another module")
    assert f"from .{OTHER_MODULE} import" in moved.text and "def scaled" in moved.modules[OTHER_MODULE]


def test_a_default_of_the_configuration_is_changed_in_a_copy_of_it():
    origin = upstream.load("llama")
    configuration = Configuration.of(origin)
    changed = [make() for make in configuration.mutants(origin.text)]
    assert {mutant.change.split(":")[0] for mutant in changed} >= {"hidden_act", "rms_norm_eps", "attention_bias"}
    assert len({mutant.digest for mutant in changed}) == len(changed)
    for mutant in changed:
        (name,) = mutant.modules
        assert f"from .{name} import LlamaConfig" in mutant.text
        assert configuration.text != mutant.modules[name]
        ast.parse(mutant.modules[name])
    assert not list(configuration.mutants(SOURCE))
    drawn = draw(origin.text, 0, configuration=configuration)
    assert any(mutant.operator == NAME for _, mutant in zip(range(60), drawn, strict=False))


def test_only_statements_that_run_are_changed():
    line = next(i for i, text in enumerate(SOURCE.splitlines(), 1) if "torch.sigmoid" in text)
    places = list(Source(SOURCE).places(lambda first, last: first <= line <= last))
    assert [place.where for place in places] == [f"Part.forward line {line}"]


def test_losses_are_changed_in_their_function_in_what_a_head_makes_of_them_and_in_the_result():
    text = upstream.load("qwen3_moe").text
    names = {operator.name for operator in LOSS_OPERATORS}
    drawn = list(draw(text, seed=0, operators=names))
    assert {mutant.operator for mutant in drawn} == names
    for mutant in drawn:
        ast.parse(mutant.text)
    assert {m.where.split(" line")[0] for m in drawn} == {"load_balancing_loss_func", "Qwen3MoeForCausalLM.forward"}


TOKENS = """
import torch
from torch import nn


class Router(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.proj = nn.Linear(size, size)

    def forward(self, hidden_states: torch.Tensor, attention_mask: torch.Tensor | None = None):
        router_logits = self.proj(hidden_states)
        num_tokens = hidden_states.shape[0]
        scores = router_logits.softmax(-1)
        return router_logits, scores


class Whole(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.router = Router(size)

    def forward(self, input_ids: torch.Tensor, embeds: torch.Tensor):
        image_mask = input_ids == 3
        hidden = embeds * 2
        logits, scores = self.router(hidden)
        return scores * 1.5
"""


def test_hidden_values_are_parameters_results_of_submodules_and_what_is_computed_from_them():
    functions = {node.name: node.body[-1] for node in ast.parse(TOKENS).body if isinstance(node, ast.ClassDef)}
    assert hidden_names(functions["Router"]) == {"hidden_states", "router_logits", "scores"}
    assert hidden_names(functions["Whole"]) == {
        "embeds",
        "hidden",
    }  # neither ids, nor a mask, nor one of several results


def test_each_operator_on_hidden_values_changes_the_result_or_its_gradient():
    names = {operator.name for operator in HIDDEN_VALUE_OPERATORS}
    drawn = list(draw(TOKENS, seed=0, operators=names))
    assert {mutant.operator for mutant in drawn} == names
    expected, expected_gradient = step_of(TOKENS)
    unlike = set()
    for mutant in drawn:
        try:
            value, gradient = step_of(mutant.text)
        except (AttributeError, IndexError, RuntimeError):
            continue  # no such dimension, or no gradient of that result
        same_value = value.shape == expected.shape and torch.allclose(value, expected)
        same_gradient = torch.allclose(gradient, expected_gradient)
        assert (same_value and same_gradient) or not mutant.keeps_meaning, mutant.change
        if mutant.operator in ("gradient alone", "hook on a gradient"):
            assert same_value, mutant.change
        unlike |= {mutant.operator} if not (same_value and same_gradient) else set()
    # Nothing here reads the recorded logits.
    assert unlike == names - {"axes moved and back", "recorded logits"}


def step_of(text: str) -> tuple[torch.Tensor, torch.Tensor]:
    """The second result of a model on 20 tokens, and the gradient of its weight."""
    module = types.ModuleType("whole")
    exec(compile(text, "whole", "exec"), vars(module))
    torch.manual_seed(0)
    model = module.Whole(4)
    ids, embeds = torch.arange(40).view(2, 20), torch.randn(2, 20, 4)
    model(ids, embeds)
    result = model(ids, embeds)
    return result.detach(), torch.autograd.grad(result.pow(2).sum(), model.router.proj.weight)[0]
