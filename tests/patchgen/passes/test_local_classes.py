"""Classes that an Auto class builds out of the file's sight: generation is refused with the place, not left to the proof."""

from __future__ import annotations

import dataclasses

import pytest
from generation_cases import applied, load

from patchgen import pipeline
from patchgen.errors import PassMismatch
from patchgen.passes.local_classes import LocalClasses

MODEL = "qwen3_asr"
TOWER = "self.audio_tower = AutoModel.from_config(config.audio_config)"
IMPORT = "from ..auto import AutoModel\n"
BUILD = "from transformers import AutoModel\n\n\ndef build(config):\n    return AutoModel.from_config(config)\n"
USES = "uses build of transformers.models.qwen3_asr.parts, which uses AutoModel"
UNKNOWN = "Tower.from_config"
BUILT, BY_NAME = "build(config.audio_config)", "Tower.from_config(config.audio_config)"
PASSED_ON = {"on.py": "from .parts import build\n", "parts.py": BUILD}
RENAMED = {"parts.py": "from transformers import AutoModel\n\nTower = AutoModel\n"}
ALIAS = {"parts.py": "from transformers import AutoModel as Tower\n"}


@pytest.mark.parametrize(
    ("imports", "tower", "siblings", "reason"),
    [
        pytest.param("from .parts import build\n", BUILT, {"parts.py": BUILD}, USES, id="a function"),
        pytest.param("from . import parts\n", f"parts.{BUILT}", {"parts.py": BUILD}, USES, id="of a module"),
        pytest.param("from .on import build\n", BUILT, PASSED_ON, USES, id="a function that is passed on"),
        pytest.param("from .parts import Tower\n", BY_NAME, RENAMED, UNKNOWN, id="another name there"),
        pytest.param("from .parts import Tower\n", BY_NAME, ALIAS, UNKNOWN, id="an alias there"),
        pytest.param("from .parts import Tower\n", BY_NAME, {}, UNKNOWN, id="no source"),
    ],
)
def test_a_tower_built_in_another_file_is_refused(imports: str, tower: str, siblings: dict[str, str], reason: str):
    origin = load(MODEL)
    assert origin.text.count(TOWER) == 1 and origin.text.count(IMPORT) == 1
    text = origin.text.replace(TOWER, f"self.audio_tower = {tower}").replace(IMPORT, IMPORT + imports)
    with pytest.raises(PassMismatch, match="local_classes") as refusal:
        pipeline.generate(dataclasses.replace(origin, text=text, siblings=siblings))
    assert reason in str(refusal.value)


OWN_BUILD = "\n\nclass Tower(PreTrainedModel):\n    from_config = make\n"


@pytest.mark.parametrize(
    ("above", "tower"),
    [
        ("", "type(self.parent)"),
        ("from .parts import make" + OWN_BUILD, "Tower"),
        ("class Tower:\n    from_config = make\n", "Tower"),
        ("from .parts import Tower\n", "Tower"),
    ],
    ids=["a value", "a constructor of its own", "no model", "one of another file"],
)
def test_a_class_that_is_not_built_as_transformers_builds_models_is_refused(above: str, tower: str):
    origin, parts = (
        load(MODEL),
        {"parts.py": f"from transformers import PreTrainedModel\ndef make(config): ...\n{OWN_BUILD}"},
    )
    text = origin.text.replace(TOWER, f"self.audio_tower = {tower}.from_config(config.audio_config)")
    text = text.replace("class Qwen3ASRAudioAttention(", f"{above}\n\nclass Qwen3ASRAudioAttention(", 1)
    with pytest.raises(PassMismatch, match=r"local_classes(?s:.*)\.from_config"):
        pipeline.generate(dataclasses.replace(origin, text=text, siblings=parts))


def test_a_model_that_another_file_defines_may_be_built():
    origin = load(MODEL)
    text = origin.text.replace(TOWER, "self.audio_tower = Tower._from_config(config.audio_config)")
    text = text.replace(IMPORT, IMPORT + "from ..whisper.modeling_whisper import WhisperEncoder as Tower\n")
    generated = pipeline.generate(dataclasses.replace(origin, text=text))
    assert "Tower._from_config(config.audio_config)" in generated.text


def test_an_auto_class_that_a_function_of_the_file_builds_by_is_refused():
    with pytest.raises(PassMismatch, match="build uses AutoModel"):
        applied(LocalClasses(), BUILD)
