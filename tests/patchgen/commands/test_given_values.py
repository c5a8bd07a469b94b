"""`verify --set` and `--config`: values for the small config of a model whose class refuses the derived ones."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from invoked import invoke

from patchgen.errors import ConfigError
from patchgen.runtime.verify import given_config

SOURCE = Path(__file__).parents[1] / "data" / "list_moe"
REFUSES_OTHERS = """
    def __post_init__(self, **kwargs):
        super().__post_init__(**kwargs)
        if self.hidden_size % 48:
            raise ValueError("hidden_size is no multiple of 48")
"""


def test_values_for_several_models_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="2 are proven"):
        invoke("verify", "qwen3", "qwen3_moe", "--set", "hidden_size=96", "--generated", str(tmp_path))


def test_a_refused_value_is_not_kept(tmp_path):
    """Neither a field that the class does not have nor a name that is none; what an earlier call gave stays."""
    code, output = str(SOURCE), tmp_path / "generated"
    invoke("generate", "list_moe", "--source", code, "--output", str(output))
    kept = output / "list_moe" / given_config.FILE_NAME
    arguments = ("verify", "--code", code, "--generated", str(output), "--set")
    with pytest.raises(ConfigError, match="no field hiden_size; near it: hidden_size") as refused:
        invoke(*arguments, "hiden_size=96")
    assert "fault of patchgen" not in str(refused.value) and not kept.exists()
    given_config.write(kept.parent, None, ["hidden_size=96"])
    before = kept.read_text()
    for setting in ("hid(=3", "a..b=3", "hidden_size.x=3"):
        with pytest.raises(ConfigError, match="--set"):
            invoke(*arguments, setting)
        assert kept.read_text() == before


@pytest.mark.slow  # a whole proof, on two ranks as well
def test_a_config_class_that_refuses_the_derived_sizes(tmp_path):
    """Its error says what to set; the proof with it is recorded, and is of this file of values alone."""
    code = Path(shutil.copytree(SOURCE, tmp_path / "list_moe", ignore=shutil.ignore_patterns("__pycache__")))
    configuration = code / "configuration_list_moe.py"
    configuration.write_text(
        configuration.read_text().replace("hidden_size: int = 32", "hidden_size: int = 192") + REFUSES_OTHERS
    )
    output = tmp_path / "generated"
    invoke("generate", "list_moe", "--source", str(code), "--output", str(output))
    arguments = ("verify", "--code", str(code), "--generated", str(output))
    with pytest.raises(ConfigError, match="no multiple of 48(.|\n)*--set field=value"):
        invoke(*arguments)
    assert invoke(*arguments, "--set", "hidden_size=96").exit_code == 0
    record = json.loads((output / "list_moe" / "verify.json").read_text())
    assert record["config"]["hidden_size"] == 96 and given_config.FILE_NAME in record["copies"]
