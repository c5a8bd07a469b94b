"""Modeling files that are broken, each in its own way: `generate` and then `verify` end in one clear error, not in a traceback."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest
from invoked import invoke

from patchgen.errors import PatchgenError

SOURCE = Path(__file__).parents[1] / "data" / "list_moe"
MODELING, CONFIGURATION = "modeling_list_moe.py", "configuration_list_moe.py"
ATTENTION = "        return self.out(mixed.transpose(1, 2).flatten(2))"
FIRST_IMPORT = "import torch\n"
GENERATE, VERIFY = "generate", "verify"


@dataclass(frozen=True)
class Broken:
    """An edit of the small file (or its configuration), the command that must end in an error, and words of that error."""

    command: str
    words: str
    before: str = ""
    after: str = ""
    file: str = MODELING
    whole: bytes | None = None  # instead of an edit, the bytes of the file; b"": no file

    def write(self, root: Path) -> Path:
        code = Path(shutil.copytree(SOURCE, root / "list_moe", ignore=shutil.ignore_patterns("__pycache__")))
        path = code / self.file
        if self.whole is None:
            text = path.read_text(encoding="utf-8")
            assert text.count(self.before) == 1, self.before
            path.write_text(text.replace(self.before, self.after), encoding="utf-8")
        elif self.whole:
            path.write_bytes(self.whole)
        else:
            path.unlink()
        return code


BROKEN = {
    "no configuration": Broken(GENERATE, "configuration_list_moe.py", file=CONFIGURATION, whole=b""),
    "no modeling file": Broken(GENERATE, "modeling_", whole=b""),
    "no class in it": Broken(GENERATE, "defines no class", whole=b"import torch\n"),
    "nothing in it": Broken(GENERATE, "defines no class", whole=b"\n"),
    "no Python": Broken(GENERATE, "not valid Python", whole=b"class ListMoeModel(:\n"),
    "no text": Broken(GENERATE, MODELING, whole=b"\xff\xfe\x00\x81"),
    "a name that nothing defines": Broken(
        GENERATE, "scaled_product", ATTENTION, "        return scaled_product(mixed)"
    ),
    "an import from above the folder": Broken(
        GENERATE, "....utils", FIRST_IMPORT, f"{FIRST_IMPORT}from ....utils import logging\n\nlogging.get_logger()\n"
    ),
    "a file beside it that is missing": Broken(
        GENERATE, "parts.py", FIRST_IMPORT, f"{FIRST_IMPORT}from .parts import Part\n\nPart()\n"
    ),
    "a package that is not installed": Broken(
        VERIFY, "no_such_package", FIRST_IMPORT, f"{FIRST_IMPORT}import no_such_package\n\nno_such_package.use()\n"
    ),
    "a name that transformers 5 does not have": Broken(
        VERIFY,
        "is_torch_fx_available",
        FIRST_IMPORT,
        f"{FIRST_IMPORT}from transformers.utils import is_torch_fx_available\n\nis_torch_fx_available()\n",
    ),
    "code that fails at import": Broken(VERIFY, "division by zero", FIRST_IMPORT, f"{FIRST_IMPORT}\nSCALE = 1 / 0\n"),
    "a configuration that fails at import": Broken(
        VERIFY,
        "No module named 'no_such_package'",
        "from transformers import",
        "import no_such_package\nfrom transformers import",
        CONFIGURATION,
    ),
    "wrong shapes": Broken(
        VERIFY, "mat1 and mat2 shapes", ATTENTION, ATTENTION.replace(".flatten(2)", "[..., :-1].flatten(2)")
    ),
    "a field that the configuration lacks": Broken(
        VERIFY,
        "has no attribute 'head_size'",
        "self.num_heads = config.num_attention_heads",
        "self.num_heads = config.head_size",
    ),
    "more layers than there are": Broken(
        VERIFY,
        "out of range",
        "        return self.norm(hidden_states)",
        "        return self.norm(self.layers[99](hidden_states))",
    ),
    "tied keys as a list": Broken(
        VERIFY,
        '_tied_weights_keys = {"lm_head.weight"',
        "GenerationMixin):\n    def",
        'GenerationMixin):\n    _tied_weights_keys = ["lm_head.weight"]\n\n    def',
    ),
    "a model without a configuration": Broken(
        VERIFY, "config_class", "    config: ListMoeConfig\n", "    config = None\n"
    ),
    "a configuration without a model_type": Broken(
        VERIFY, "model_type", '    model_type = "list_moe"\n', "", CONFIGURATION
    ),
    "a configuration that refuses its defaults": Broken(
        VERIFY,
        "needs a token",
        '    model_type = "list_moe"\n',
        '    model_type = "list_moe"\n\n    def __post_init__(self, **kwargs):\n        raise ValueError("needs a token")\n\n',
        CONFIGURATION,
    ),
    "a forward without the usual inputs": Broken(
        VERIFY,
        "unexpected keyword argument 'tokens'",
        "self.model(input_ids, inputs_embeds)",
        "self.model(tokens=input_ids)",
    ),
    "a forward that calls itself": Broken(
        VERIFY,
        "recursion",
        "        hidden_states = self.model(input_ids, inputs_embeds)\n",
        "        hidden_states = self(input_ids, inputs_embeds)\n",
    ),
    "a forward that is not written": Broken(
        VERIFY, "NotImplementedError", ATTENTION, "        raise NotImplementedError"
    ),
    "a head that returns no loss": Broken(
        VERIFY,
        "nothing to differentiate",
        "CausalLMOutputWithPast(loss=loss, logits=logits)",
        "CausalLMOutputWithPast(logits=logits)",
    ),
}


def test_there_are_twenty():
    assert len(BROKEN) >= 20


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_file_ends_in_one_error(name: str, tmp_path: Path):
    """Of `generate` if its text tells, else of `verify`; a traceback would be another exception than `PatchgenError`."""
    broken, output = BROKEN[name], tmp_path / "generated"
    code = broken.write(tmp_path)
    commands = [("generate", "list_moe", "--source", str(code), "--output", str(output))]
    commands += [("verify", "--code", str(code), "--generated", str(output))] * (broken.command == VERIFY)
    *before, last = commands
    for command in before:
        assert invoke(*command).exit_code == 0
    with pytest.raises(PatchgenError) as told:
        invoke(*last)
    message = str(told.value)
    assert broken.words in message and "Traceback" not in message and len(message.splitlines()) < 12, message
