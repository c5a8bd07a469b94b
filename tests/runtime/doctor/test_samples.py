"""The doctor's samples say what is truncated: by the doctor itself, and in the run."""

from __future__ import annotations

import json

from small_processors import byte_tokenizer, template

from patchgen.runtime.data import DataConfig, SourceConfig
from patchgen.runtime.doctor.samples import first_samples
from patchgen.runtime.train.setup import DataParts


def test_only_the_half_that_a_run_truncates_counts_as_cut_in_it(tmp_path):
    """The doctor cuts both halves, to 512 tokens; the run cuts the longer one, to 1,024."""
    asked = {"role": "user", "content": "The Elbe?"}
    halves = {"chosen": "yes " * 200, "rejected": "no " * 600}
    row = {name: [asked, {"role": "assistant", "content": answer}] for name, answer in halves.items()}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    config = DataConfig(
        (SourceConfig(str(tmp_path / "rows.jsonl")),),
        kind="preference", tokens_per_batch=2048, max_length=1024, on_long="truncate",
    )  # fmt: skip
    samples = first_samples(config, DataParts(byte_tokenizer(template(marked=False), {})))
    assert [(sample.half, sample.is_cut, sample.is_cut_in_run) for sample in samples] == [
        ("chosen", True, False),
        ("rejected", True, True),
    ]


def test_a_sample_that_is_examined_as_the_run_truncates_it_counts_as_cut(tmp_path):
    """Its only answer begins after the doctor's 512 tokens and ends after the run's 1,024."""
    messages = [{"role": "user", "content": "why? " * 140}, {"role": "assistant", "content": "so " * 200}]
    (tmp_path / "rows.jsonl").write_text(json.dumps({"messages": messages}) + "\n")
    source = SourceConfig(str(tmp_path / "rows.jsonl"))
    config = DataConfig((source,), kind="chat", tokens_per_batch=2048, max_length=1024, on_long="truncate")
    (sample,) = first_samples(config, DataParts(byte_tokenizer(template(marked=False), {})))
    assert len(sample.ids) == 1024 and sample.is_cut and sample.is_cut_in_run
