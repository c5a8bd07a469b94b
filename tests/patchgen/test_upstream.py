"""Where sources come from: the installed release, a wheel in the cache, a file or folder on disk; and what is hashed."""

from __future__ import annotations

import ast
import zipfile
from pathlib import Path

import pytest

from patchgen import pipeline, provenance, upstream
from patchgen.errors import PassMismatch, SourceSyntaxError, UpstreamNotFound

MODELING = """# Copyright 2026.
from torch import nn

from ...modeling_utils import PreTrainedModel
from ...generation import GenerationMixin
from .configuration_tiny import TinyConfig


class TinyForCausalLM(PreTrainedModel, GenerationMixin):
    config: TinyConfig
    _tied_weights_keys = {"lm_head.weight": "embed.weight"}

    def __init__(self, config: TinyConfig):
        super().__init__(config)
        self.embed = nn.Embedding(config.vocab_size, config.hidden_size)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size)

    def forward(self, input_ids, labels=None):
        hidden_states = self.embed(input_ids)
        logits = self.lm_head(hidden_states)
        loss = None
        if labels is not None:
            loss = self.loss_function(logits, labels, self.config.vocab_size)
        return loss, logits
"""
CONFIGURATION = """
from ...configuration_utils import PreTrainedConfig


class TinyTextConfig(PreTrainedConfig):
    model_type = "tiny_text"


class TinyConfig(PreTrainedConfig):
    model_type: str = "tiny"
    sub_configs = {"text_config": TinyTextConfig}
    sub_configs_defaults = {"vision_config": SubConfigSpec(config_class=AutoConfig, model_type="siglip")}


class TinyChildConfig(TinyConfig):
    pass
"""
LOSSES = """
LOSS_MAPPING = {"ForCausalLM": ForCausalLMLoss, "ForQuestionAnswering": ForQuestionAnsweringLoss}
"""
AUTO = """
MODEL_FOR_CAUSAL_LM_MAPPING_NAMES = OrderedDict([("tiny", "TinyForCausalLM"), ("tiny_other", "TinyForCausalLM")])
SPECIAL_MODEL_TYPE_TO_MODULE_NAME = OrderedDict([("tiny-special", "tiny")])
"""


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A wheel of a release that no index has, in the cache."""
    monkeypatch.setenv("PATCHGEN_CACHE", str(tmp_path))
    upstream.open_release.cache_clear()
    path = tmp_path / "transformers-9.9.9-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("transformers/__init__.py", "")
        archive.writestr("transformers/models/tiny/modeling_tiny.py", MODELING)
        archive.writestr("transformers/models/tiny/configuration_tiny.py", CONFIGURATION)
        archive.writestr("transformers/models/auto/modeling_auto.py", AUTO)
        archive.writestr("transformers/loss/loss_utils.py", LOSSES)
        archive.writestr("transformers/models/broken/modeling_broken.py", "def f(:\n")
    yield path
    upstream.open_release.cache_clear()


def test_a_release_is_read_from_its_wheel(wheel: Path):
    origin = upstream.load("tiny", "9.9.9")
    assert (origin.text, origin.version, origin.origin) == (MODELING, "9.9.9", "transformers 9.9.9")
    assert origin.module == "transformers.models.tiny.modeling_tiny"
    assert origin.heads == ("TinyForCausalLM",)
    generated = pipeline.generate(origin)
    assert 'made_from="9.9.9"' in generated.text
    assert "from transformers.models.tiny.configuration_tiny import TinyConfig" in generated.text
    assert "TRANSFORMERS=9.9.9" in generated.text


@pytest.mark.parametrize("model", ["tiny_other", "tiny-special"])
def test_a_model_type_may_live_in_another_folder(wheel: Path, model: str):
    assert upstream.load(model, "9.9.9").path == "transformers/models/tiny/modeling_tiny.py"


def test_configurations_are_read_with_their_sub_configs_and_bases(wheel: Path):
    configs = upstream.load("tiny", "9.9.9").configs
    assert configs["TinyConfig"].model_type == "tiny"
    assert configs["TinyConfig"].sub_configs["text_config"].config_class == "TinyTextConfig"
    vision = configs["TinyConfig"].sub_configs["vision_config"]
    assert (vision.config_class, vision.model_type) == ("AutoConfig", "siglip")
    assert configs["TinyChildConfig"].sub_configs == configs["TinyConfig"].sub_configs


def test_an_unknown_model_names_the_nearest(wheel: Path):
    with pytest.raises(UpstreamNotFound, match=r"transformers 9\.9\.9 has no model 'tinny'\. Nearest: tiny"):
        upstream.load("tinny", "9.9.9")
    with pytest.raises(UpstreamNotFound) as error:
        upstream.load("qwen3_mo")
    assert "qwen3_moe" in str(error.value) and str(error.value).count(",") == 2


def test_a_file_of_a_release_that_does_not_parse_is_named(wheel: Path):
    with pytest.raises(SourceSyntaxError, match=r"models/broken/modeling_broken\.py:1:\d+"):
        pipeline.generate(upstream.load("broken", "9.9.9"))


@pytest.mark.parametrize("version", ["latest", "5.23.0; rm", "../5.17.0", ""])
def test_what_is_no_version_is_refused(version: str):
    with pytest.raises(UpstreamNotFound, match="is not a version of transformers"):
        upstream.load("llama", version)


def test_a_wheel_out_of_reach_says_where_it_looked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PATCHGEN_CACHE", str(tmp_path))
    monkeypatch.setenv("PIP_INDEX_URL", (tmp_path / "no_index").as_uri())
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(UpstreamNotFound) as error:
        upstream.load("llama", "5.9.99")
    for part in ("transformers 5.9.99", str(tmp_path), "pip download", "installed package"):
        assert part in str(error.value)
    assert list(tmp_path.iterdir()) == []


def test_a_wheel_in_the_cache_that_is_none_is_named(wheel: Path):
    wheel.write_text("<html>not found</html>")
    with pytest.raises(UpstreamNotFound, match=r"transformers-9\.9\.9-py3-none-any\.whl .* is not a zip file"):
        upstream.load("tiny", "9.9.9")


def test_every_model_that_is_named_as_near_has_a_file():
    release = upstream.open_release()
    assert [name for name in release.known_models() if release.file_of(name) is None] == []
    assert upstream.load("data2vec-text").path == "transformers/models/data2vec/modeling_data2vec_text.py"


def test_a_file_on_disk_brings_its_configuration_and_the_modules_beside_it(tmp_path: Path):
    (tmp_path / "modeling_tiny.py").write_text(MODELING + "\n\nfrom .extra import helper\n\nhelper()\n")
    (tmp_path / "configuration_tiny.py").write_text(CONFIGURATION)
    (tmp_path / "extra.py").write_text("from .more import x as helper\nfrom . import whole, absent\n")
    (tmp_path / "more.py").write_text("def x(:\n")  # of no syntax: the others are still found
    (tmp_path / "whole.py").write_text("def y(): ...\n")
    for source in (tmp_path, tmp_path / "modeling_tiny.py"):
        origin = upstream.load("tiny", source=source)
        assert origin.version is None
        assert set(origin.siblings) == {"configuration_tiny.py", "extra.py", "more.py", "whole.py"}
        assert origin.configs["TinyConfig"].model_type == "tiny"


BESIDE = """\
\"\"\"An umlaut, ü, what ends no line for Python, \x1c \x85 \u2028 \x0b, and
from ...what_is_no_import import it
\"\"\"
\x0c
\x0cfrom ... import initialization as init
from ..auto import (  # wrapped
    AutoModel,
)
from .. import auto
from . import more
def late(): x = "ü"; from . \\
  .. utils import logging; return logging
"""


def test_a_file_that_is_copied_along_imports_from_transformers_what_lies_beyond_its_folder(tmp_path: Path):
    (tmp_path / "modeling_tiny.py").write_text(MODELING + "\n\nfrom .extra import helper\n")
    (tmp_path / "extra.py").write_text(BESIDE)
    copied = upstream.load("tiny", source=tmp_path).siblings["extra.py"]
    assert copied == (
        BESIDE.replace("from ... import", "from transformers import")
        .replace("from ..auto", "from transformers.models.auto")
        .replace("from .. import", "from transformers.models import")
        .replace("from . \\\n  .. utils", "from transformers.utils")
    )
    (tmp_path / "extra.py").write_text("from ....beyond import it\n")
    with pytest.raises(SourceSyntaxError, match="starts beyond transformers"):
        upstream.load("tiny", source=tmp_path)


@pytest.mark.parametrize("names", [(), ("modeling_a.py", "modeling_b.py")])
def test_a_folder_without_one_modeling_file_is_refused(tmp_path: Path, names: tuple[str, ...]):
    for name in names:
        (tmp_path / name).write_text("")
    with pytest.raises(UpstreamNotFound, match=f"found: {', '.join(names) or 'none'}"):
        upstream.load("tiny", source=tmp_path)
    with pytest.raises(UpstreamNotFound, match="There is no file"):
        upstream.load("tiny", source=tmp_path / "modeling_none.py")


def test_hashes_follow_the_code_and_nothing_else():
    def of(text: str) -> str:
        return provenance.symbol_hash(ast.parse(text).body[0])

    plain = of("def f(x):\n    return x + 1\n")
    assert of("# above\n\n\ndef f( x ):  # behind\n    return (x + 1)\n") == plain
    assert of("def f(x):\n    return x + 2\n") != plain
    one, two = upstream.load("llama"), upstream.load("llama")
    assert one.sha256 == two.sha256 and one is not two


def test_the_hash_of_a_symbol_is_the_same_on_every_python():
    """The value was computed with Python 3.11, 3.12 and 3.13; another one would make every committed record stale."""
    text = '''class A(B, metaclass=C):
    """Said.

    More.
    """

    x: int = 1

    @property
    def f(self, a, /, b=2.5, *c, d=None, **e) -> "A":
        return f"{a!r:>{b}} of " "b" f"{{c}}" u"d" if (n := len(c)) else [*c, lambda: -1j, b"\\x00"]
'''
    assert provenance.symbol_hash(ast.parse(text).body[0]) == "5fee4c2d51301386"


def test_a_disk_copy_of_a_release_file_meets_the_same_passes(tmp_path: Path):
    """Without auto maps and without a release: the roles alone find head, decoder and experts."""
    origin = upstream.load("qwen3_moe")
    (tmp_path / "modeling_custom.py").write_text(origin.text)
    beside = "configuration_qwen3_moe.py"
    (tmp_path / beside).write_text(upstream.open_release().read(f"models/qwen3_moe/{beside}"))
    generated = pipeline.generate(upstream.load("custom", source=tmp_path))
    assert "ops.fused_moe(" in generated.text and "ops.require_transformers" not in generated.text
    (tmp_path / "modeling_custom.py").write_text(origin.text.replace("self.loss_function", "self.other"))
    with pytest.raises(PassMismatch):
        pipeline.generate(upstream.load("custom", source=tmp_path))
