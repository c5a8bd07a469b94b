"""Small text data whose samples can be told apart, and what a batch holds of them."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from pathlib import Path
from typing import Any

from patchgen.runtime.data import DataConfig, SourceConfig, build_loader, train_tokenizer
from patchgen.runtime.parallel.batch import IGNORED

SIZES = {"a": [3, 40, 7, 1, 22, 9, 60, 5, 5, 12, 31], "b": [8, 2, 50, 4]}
Corpus = tuple[DataConfig, Any]


def make_corpus(folder: Path) -> Corpus:
    """Two JSON-lines files of documents whose words name them, and a tokenizer of those words."""
    for name, sizes in SIZES.items():
        texts = [" ".join(f"{name}{n}w{word}" for word in range(size)) for n, size in enumerate(sizes)]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    sources = tuple(SourceConfig(str(folder / f"{name}.jsonl")) for name in SIZES)
    config = DataConfig(
        sources=sources, cache_dir=str(folder / "cache"), tokens_per_batch=128, on_long="split", epochs=1
    )
    return config, train_tokenizer(config, vocab_size=300)


def make_loaders(corpus: Corpus, num_batches: int, *, streaming: bool = False, **changes: Any) -> list[Any]:
    """The loaders of all ranks."""
    config = DataConfig(**{**vars(corpus[0]), **changes})
    if streaming:
        sources = [SourceConfig(**{**vars(source), "streaming": True}) for source in config.sources]
        config = DataConfig(**{**vars(config), "sources": tuple(sources)})
    return [
        build_loader(config, tokenizer=corpus[1], batch_index=index, num_batches=num_batches, agree=int)
        for index in range(num_batches)
    ]


def documents_of(batch: dict[str, Any]) -> list[tuple[int, ...]]:
    """The documents of a batch that have labels, each a tuple of ids; checks the batch on the way."""
    bounds = batch["cu_seq_lens_q"].tolist()
    ids, labels, positions = (batch[name][0].tolist() for name in ("input_ids", "labels", "position_ids"))
    assert bounds[-1] == len(ids) == len(labels) == len(positions)
    assert batch["max_length_q"] == max(end - start for start, end in itertools.pairwise(bounds))
    out = []
    for start, end in itertools.pairwise(bounds):
        assert positions[start:end] == list(range(end - start))
        if set(labels[start:end]) != {IGNORED}:
            assert labels[start:end] == ids[start:end]
            out.append(tuple(ids[start:end]))
    return out


def everything_in(corpus: Corpus, limit: int) -> Counter[tuple[int, ...]]:
    """What the files hold, cut into pieces of `limit` tokens: the truth, without any loader."""
    config, tokenizer = corpus
    found: Counter[tuple[int, ...]] = Counter()
    for source in config.sources:
        for line in Path(source.path).read_text().splitlines():
            ids = [*tokenizer(json.loads(line)["text"])["input_ids"], tokenizer.eos_token_id]
            found.update(tuple(ids[start : start + limit]) for start in range(0, len(ids), limit))
    return found
