"""How upstream initialises a linear layer: the call that writes its weight, in terms of self; else it is unread."""

from __future__ import annotations

import textwrap

import pytest
from generation_cases import anatomy_of

from patchgen import source
from patchgen.anatomy.initialisation import INHERITED, LinearInit, initialising_classes, read_linear_init
from patchgen.errors import Missed

UPSTREAMS = LinearInit("normal_", INHERITED)
MODEL = """
from transformers import initialization as init

class ExamplePreTrainedModel(PreTrainedModel):
    config: ExampleConfig
    {method}

class ExampleModel(ExamplePreTrainedModel):
    pass
"""
RULES = {
    "of the config": ("nn.init.normal_(module.weight, mean=0.0, std=self.config.s)", "normal_", "mean=0.0, std=self.config.s"),
    "in place": ("module.weight.data.normal_(mean=0.0, std=self.config.s)", "normal_", "mean=0.0, std=self.config.s"),
    "without data": ("module.weight.trunc_normal_(0.0, self.config.s)", "trunc_normal_", "0.0, self.config.s"),
    "of the weight's data": ("init.trunc_normal_(module.weight.data, 0.1, a=-1)", "trunc_normal_", "0.1, a=-1"),
    "by local names": ("nn.init.normal_(module.weight, std=std)", "normal_", "std=self.config.s"),
    "behind the bias": ("nn.init.zeros_(module.bias)\n            nn.init.normal_(module.bias)\n            nn.init.normal_(module.weight, std=0.5)", "normal_", "std=0.5"),
}  # fmt: skip
UNREAD = {
    "another writer": "nn.init.uniform_(module.weight)",
    "another tensor": "nn.init.normal_(module.bias, std=0.5)",
    "a value of the module": "nn.init.normal_(module.weight, std=module.std)",
    "a name without a value": "nn.init.normal_(module.weight, std=unknown)\n            unknown = 1",
    "a writer of nothing": "normal_()",
    "the weight of a part": "nn.init.normal_(module.lora.weight, std=0.5)",
    "the weight of a part, in place": "module.lora.weight.data.normal_(std=0.5)",
    "a method of that name": "self.normal_(module.weight, std=0.5)",
}


def model(method: str = "pass"):
    text = textwrap.dedent(MODEL).format(method=textwrap.indent(textwrap.dedent(method), "    ").strip())
    module = source.parse(text, "example.py")
    return anatomy_of(text), module


def rule(branch: str, test: str = "isinstance(module, nn.Linear)", above: str = "pass"):
    anatomy, _ = model(
        f"""
        def _init_weights(self, module):
            std = self.config.s
            {above}
            if {test}:
                {branch.replace(chr(10), chr(10) + "    ")}
        """
    )
    return read_linear_init(anatomy, anatomy.classes["ExamplePreTrainedModel"])


@pytest.mark.parametrize("case", RULES)
def test_the_call_that_writes_the_weight_is_the_rule(case: str):
    branch, writer, arguments = RULES[case]
    assert rule(branch) == LinearInit(writer, arguments)


@pytest.mark.parametrize("case", UNREAD)
def test_what_is_no_such_call_is_unread(case: str):
    with pytest.raises(Missed):
        rule(UNREAD[case])


def test_a_branch_for_several_kinds_counts_and_one_for_others_does_not():
    write = "nn.init.normal_(module.weight, std=0.5)"
    assert rule(write, "isinstance(module, (nn.Linear, nn.Conv1d))") == LinearInit("normal_", "std=0.5")
    for other in (
        "isinstance(module, nn.Embedding)",
        "is_kind(module, nn.Linear)",
        "isinstance(nn.Linear, module)",
        "module.Linear",
    ):
        with pytest.raises(Missed):
            rule(write, other)
        assert rule(write, other, "super()._init_weights(module)") == UPSTREAMS


def test_without_a_method_it_is_transformers_own():
    anatomy, _ = model()
    assert read_linear_init(anatomy, anatomy.classes["ExamplePreTrainedModel"]) == UPSTREAMS


OVERRIDE = """
def _init_weights(self, module):
    {call}
"""


def test_the_root_initialises_and_an_override_that_does_not_ask_it():
    def names(call: str) -> list[str]:
        text = (
            textwrap.dedent(MODEL)
            .format(method="pass")
            .replace(
                "(ExamplePreTrainedModel):\n    pass",
                "(ExamplePreTrainedModel):\n" + textwrap.indent(OVERRIDE.format(call=call), "    "),
            )
        )
        module = source.parse(text, "example.py")
        return [info.name for info in initialising_classes(anatomy_of(text), module)]

    assert names("super()._init_weights(module)") == ["ExamplePreTrainedModel"]
    assert names("module.reset()") == ["ExamplePreTrainedModel", "ExampleModel"]
    assert names("self._init_weights(module)") == ["ExamplePreTrainedModel", "ExampleModel"]
