"""Classes that an Auto class builds out of the file's sight: generation is refused with the place, not left to the proof."""

from __future__ import annotations

import dataclasses

import pytest
from generation_cases import load

from patchgen import pipeline
from patchgen.errors import PassMismatch

MODEL = "qwen3_asr"
TOWER = "self.audio_tower = AutoModel.from_config(config.audio_config)"
IMPORT = "from ..auto import AutoModel\n"
BUILD = "from transformers import AutoModel\n\n\ndef build(config):\n    return AutoModel.from_config(config)\n"
USES = "uses build of transformers.models.qwen3_asr.parts, which uses AutoModel"
UNKNOWN = "Tower.from_config"


@pytest.mark.parametrize(
    ("imports", "tower", "siblings", "reason"),
    [
        ("from .parts import build\n", "build(config.audio_config)", {"parts.py": BUILD}, USES),
        ("from . import parts\n", "parts.build(config.audio_config)", {"parts.py": BUILD}, USES),
        ("from .on import build\n", "build(config.audio_config)", {"on.py": "from .parts import build\n", "parts.py": BUILD}, USES),
        ("from .parts import Tower\n", "Tower.from_config(config.audio_config)", {"parts.py": "from transformers import AutoModel\n\nTower = AutoModel\n"}, UNKNOWN),
        ("from .parts import Tower\n", "Tower.from_config(config.audio_config)", {"parts.py": "from transformers import AutoModel as Tower\n"}, UNKNOWN),
        ("from .parts import Tower\n", "Tower.from_config(config.audio_config)", {}, UNKNOWN),
    ],
    ids=["a function", "a function of a module", "a function that is passed on", "another name there", "an alias there", "no source"],
)  # fmt: skip
def test_a_tower_built_in_another_file_is_refused(imports: str, tower: str, siblings: dict[str, str], reason: str):
    origin = load(MODEL)
    assert origin.text.count(TOWER) == 1 and origin.text.count(IMPORT) == 1
    text = origin.text.replace(TOWER, f"self.audio_tower = {tower}").replace(IMPORT, IMPORT + imports)
    with pytest.raises(PassMismatch, match="local_classes") as refusal:
        pipeline.generate(dataclasses.replace(origin, text=text, siblings=siblings))
    assert reason in str(refusal.value)


def test_a_class_that_another_file_defines_may_be_built():
    origin = load(MODEL)
    tower = "type(self.parent)._from_config(config.audio_config)"
    text = origin.text.replace(TOWER, f"self.audio_tower = {tower}")
    with pytest.raises(PassMismatch, match="local_classes"):
        pipeline.generate(dataclasses.replace(origin, text=text))
    text = origin.text.replace(TOWER, "self.audio_tower = Tower._from_config(config.audio_config)")
    text = text.replace(IMPORT, IMPORT + "from ..whisper.modeling_whisper import WhisperEncoder as Tower\n")
    generated = pipeline.generate(dataclasses.replace(origin, text=text))
    assert "Tower._from_config(config.audio_config)" in generated.text
