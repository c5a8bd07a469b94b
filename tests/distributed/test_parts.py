"""A head around a language model of another file: expert and sequence parallelism go through the generated part."""

from __future__ import annotations

import cases_parts
import pytest

from patchgen import pipeline, provenance, upstream

BAR = 1e-5


@pytest.fixture(scope="session")
def llava(tmp_path_factory):
    folder = tmp_path_factory.mktemp("parts") / "llava"
    provenance.write(pipeline.generate(upstream.load("llava")), folder)
    return str(folder)


@pytest.mark.parametrize(
    ("text_type", "layout"), [("qwen3_moe", {"ep": 2, "sp": 1, "fsdp": True}), ("mixtral", {"sp": 2, "fsdp": False})]
)
def test_two_ranks_agree_with_upstream_on_one(text_type, layout, llava, two_ranks):
    found = two_ranks.run(cases_parts.compare, llava, text_type, ["images", "packed"], **layout)[0]
    for row in found:
        assert not row.get("reason")
        assert row["experts"] > 0
        assert max(row["loss"], row["gradient"]) < BAR, row
