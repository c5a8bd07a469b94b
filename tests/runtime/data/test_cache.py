"""The token cache: made once, by whichever process comes first, again when anything that matters changes."""

from __future__ import annotations

import json
import multiprocessing
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from corpora import make_corpus, make_loaders

from patchgen.runtime.data import DataConfig, DataError, SourceConfig, build_loader, train_tokenizer
from patchgen.runtime.data.build import make_encoder
from patchgen.runtime.data.cache import cache_lock, open_cache
from patchgen.runtime.data.sources import open_source
from patchgen.runtime.data.transform import mappers_of


def keys(folder: Path) -> set[str]:
    return {path.parent.name for path in (folder / "cache").glob("*/bounds.npy")}


def test_a_cache_that_does_not_fit_names_the_folder(tmp_path):
    """A limit on the size of files, where no disk can be full on demand; nothing unfinished stays behind."""
    make_corpus(tmp_path)
    (tmp_path / "short.jsonl").write_text('{"text": "a"}\n' * 600)
    script = (
        "import resource, signal, sys\n"
        "from corpora import DataConfig, SourceConfig, train_tokenizer\n"
        "from patchgen.runtime.data import DataError, build_loader\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "_, most = resource.getrlimit(resource.RLIMIT_FSIZE)\n"
        "for limit, name in ((16, 'a'), (2000, 'a'), (4096, 'short')):  # of the last, the bounds do not fit\n"
        "    source = SourceConfig(f'{sys.argv[1]}/{name}.jsonl')\n"
        "    config = DataConfig(sources=(source,), cache_dir=sys.argv[1] + '/small', on_long='split')\n"
        "    tokenizer = train_tokenizer(config, vocab_size=300)\n"
        "    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, most))\n"
        "    try:\n        build_loader(config, tokenizer=tokenizer, batch_index=0, num_batches=1)\n"
        "    except DataError as error:\n        print(error)\n"
        "    resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))\n"
    )
    command = [sys.executable, "-c", script, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=Path(__file__).parent)
    lines = done.stdout.splitlines()
    assert len(lines) == 3, done.stdout + done.stderr
    told = re.compile(
        "do not fit into the cache folder .*: File too large. To fix: raise the limit .*ulimit -f.*cache_dir"
    )
    assert all(told.search(line) for line in lines), lines
    assert not list((tmp_path / "small").glob("*.tmp"))


def test_processes_that_start_together_end_with_the_same_tokens(tmp_path):
    corpus = make_corpus(tmp_path)
    context = multiprocessing.get_context("fork")
    sums = context.Queue()

    def build() -> None:
        sums.put(sum(batch["input_ids"].sum().item() for batch in make_loaders(corpus, 1)[0]))

    processes = [context.Process(target=build) for _ in range(4)]
    for process in processes:
        process.start()
    assert len({sums.get(timeout=60) for _ in processes}) == 1
    for process in processes:
        process.join()
    assert len(keys(tmp_path)) == 2  # one for each source
    assert not list((tmp_path / "cache").glob("*.tmp"))


def test_cached_tokens_and_places(tmp_path):
    config, tokenizer = make_corpus(tmp_path)
    source = config.sources[0]
    cache = open_cache(
        tmp_path, open_source(source), make_encoder(config, mappers_of(config)[0], tokenizer), skip_bad=False
    )
    lines = Path(source.path).read_text().splitlines()
    assert len(cache.bounds) == len(lines) + 1
    assert cache.tokens.dtype == np.uint16
    assert isinstance(cache.tokens, np.memmap)
    for number, line in enumerate(lines):
        expected = [*tokenizer(json.loads(line)["text"])["input_ids"], tokenizer.eos_token_id]
        assert cache.tokens[cache.bounds[number] : cache.bounds[number + 1]].tolist() == expected
    assert cache.places([0, 3, 10]) == [f"{source.path}:{line}" for line in (1, 4, 11)]


def test_a_changed_file_tokenizer_or_setting_is_not_served_from_the_cache(tmp_path):
    corpus = make_corpus(tmp_path)
    make_loaders(corpus, 1)
    first = keys(tmp_path)
    make_loaders(corpus, 1, tokens_per_batch=64)
    assert keys(tmp_path) == first  # how tokens are batched does not change them
    make_loaders(corpus, 1, append_eos=False)
    second = keys(tmp_path)
    assert len(second) == len(first) + 2
    make_loaders((corpus[0], train_tokenizer(corpus[0], vocab_size=320)), 1)
    assert len(keys(tmp_path)) == len(second) + 2
    path = Path(corpus[0].sources[0].path)
    path.write_text(path.read_text() + '{"text": "one more"}\n')
    make_loaders(corpus, 1)
    assert len(keys(tmp_path)) == len(second) + 3


def test_what_an_interrupted_process_left_is_not_taken_for_tokens(tmp_path):
    corpus = make_corpus(tmp_path)

    class Interrupted(Exception):
        pass

    class Source:
        def read(self, position=None):
            source = open_source(corpus[0].sources[0])
            for number, item in enumerate(source.read()):
                if number == 300 or (number == 5 and not self.complete):
                    raise Interrupted
                yield item

        def fingerprint(self):
            return "interrupted"

        complete = False

    source = Source()
    encoder = make_encoder(corpus[0], mappers_of(corpus[0])[0], corpus[1])
    with pytest.raises(Interrupted):
        open_cache(tmp_path / "cache", source, encoder, skip_bad=False)
    assert not list((tmp_path / "cache").glob("*.tmp"))
    source.complete = True
    assert len(open_cache(tmp_path / "cache", source, encoder, skip_bad=False).bounds) == 12


LINES = ['{"text": "good one"}', '{"text": ', '{"other": 1}', "", '{"text": 7}', '{"text": "good two"}']
LINES += ['{"text": "\\ud83d"}', '{"text": ""}']


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("ranks", [1, 3])
def test_bad_lines_are_counted_or_refused_with_file_and_line(tmp_path, streaming, ranks):
    config, tokenizer = make_corpus(tmp_path)
    path = tmp_path / "broken.jsonl"
    path.write_text("\n".join(LINES) + "\n")
    changes = {"sources": (SourceConfig(str(path)),), "tokens_per_batch": 64, "streaming": streaming}
    loaders = make_loaders((config, tokenizer), ranks, on_bad="skip", **changes)
    documents = [int((batch["labels"] != -100).any()) for loader in loaders for batch in loader]
    assert sum(documents) >= 1
    places = {where: reason for loader in loaders for _, where, reason in loader.counters.places}
    assert set(places) == {f"{path}:{line}" for line in (2, 3, 5, 7, 8)}
    assert "not readable" in places[f"{path}:2"]
    assert places[f"{path}:3"].startswith("the columns other (int) match no row format that data.kind = text reads")
    assert places[f"{path}:5"] == "column 'text' holds int, expected text (row format text)"
    assert "not a valid character" in places[f"{path}:7"]
    assert places[f"{path}:8"] == "no tokens in the text"
    with pytest.raises(DataError, match=r"broken.jsonl:\d: .*on_bad"):
        for loader in make_loaders((config, tokenizer), ranks, on_bad="error", **changes):
            list(loader)


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize(
    ("content", "on_bad", "message"),
    [
        ("", "error", "No (usable )?sample"),
        ('{"text": ""}\n', "skip", "No usable sample|fewer"),
        ("nothing\n", "skip", "usable"),
    ],
)
def test_data_without_a_usable_sample_is_an_error(tmp_path, streaming, content, on_bad, message):
    config, tokenizer = make_corpus(tmp_path)
    path = tmp_path / "empty.jsonl"
    path.write_text(content)
    changes = {"sources": (SourceConfig(str(path)),), "on_bad": on_bad, "append_eos": False, "epochs": None}
    with pytest.raises(DataError, match=message):
        for loader in make_loaders((config, tokenizer), 1, streaming=streaming, **changes):
            next(loader)


@pytest.mark.parametrize("streaming", [False, True])
def test_long_documents_are_skipped_truncated_split_or_refused(tmp_path, streaming):
    corpus = make_corpus(tmp_path)
    config, tokenizer = corpus
    lengths = [
        len(tokenizer(json.loads(line)["text"])["input_ids"]) + 1
        for source in config.sources
        for line in Path(source.path).read_text().splitlines()
    ]
    long = [length for length in lengths if length > 50]

    def tokens(on_long):
        (loader,) = make_loaders(corpus, 1, tokens_per_batch=50, on_long=on_long, streaming=streaming)
        return sum(batch["input_ids"].shape[1] for batch in loader), loader.counters

    assert tokens("split") == (sum(lengths), tokens("split")[1])
    assert not tokens("split")[1].counts
    total, counters = tokens("truncate")
    assert total == sum(min(length, 50) for length in lengths)
    assert counters.counts == {"truncated": len(long)}
    total, counters = tokens("skip")
    assert total == sum(lengths) - sum(long)
    assert counters.counts == {"skipped": len(long)}
    assert counters.places[0][1].startswith(str(tmp_path))
    with pytest.raises(DataError, match=r"a.jsonl:\d+: \d+ tokens, more than the limit of 50 .*on_long"):
        tokens("error")


def test_missing_data_is_an_error_with_the_path(tmp_path):
    tokenizer = make_corpus(tmp_path)[1]

    def build(path, **more):
        build_loader(
            DataConfig(sources=(SourceConfig(str(path), **more),), cache_dir=str(tmp_path / "cache")),
            tokenizer=tokenizer,
            batch_index=0,
            num_batches=1,
        )

    with pytest.raises(DataError, match="No data at .*gone.jsonl"):
        build(tmp_path / "gone.jsonl")
    with pytest.raises(DataError, match="not a local file or folder, and could not be loaded from the hub"):
        build(tmp_path / "gone")
    with pytest.raises(DataError, match="no built-in data set 'nothing'; there are stdlib"):
        build("builtin:nothing")
    (tmp_path / "mixed").mkdir()
    (tmp_path / "mixed" / "a.txt").write_text("a")
    (tmp_path / "mixed" / "b.jsonl").write_text('{"text": "a"}')
    with pytest.raises(DataError, match="jsonl and text files. To fix: set the source's format"):
        build(tmp_path / "mixed")
    build(tmp_path / "mixed", format="text")
    (tmp_path / "packed.csv.gz").write_bytes(b"")
    with pytest.raises(DataError, match="no known suffix .* decompress or convert"):
        build(tmp_path / "packed.csv.gz")
    (tmp_path / "bare").mkdir()
    with pytest.raises(DataError, match="bare has no data files"):
        build(tmp_path / "bare")


def test_a_cache_folder_that_cannot_be_written_is_named(tmp_path):
    config, tokenizer = make_corpus(tmp_path)
    (tmp_path / "file").touch()
    config = replace(config, cache_dir=str(tmp_path / "file" / "cache"))
    with pytest.raises(DataError, match="cache folder .*file/cache cannot be written.* data.cache_dir"):
        build_loader(config, tokenizer=tokenizer, batch_index=0, num_batches=1)
    with pytest.raises(DataError, match="cache folder .*file/cache cannot be written.* data.cache_dir"):
        train_tokenizer(config, vocab_size=300)
    with cache_lock(tmp_path / "lock") as lock:
        assert lock.is_locked
    assert not lock.is_locked


def test_a_loader_needs_a_tokenizer_and_its_place_among_the_ranks(tmp_path):
    tokenizer = make_corpus(tmp_path)[1]
    with pytest.raises(DataError, match="needs a tokenizer"):
        build_loader(DataConfig(), batch_index=0, num_batches=1)
    with pytest.raises(ValueError, match="batch_index must be from 0 to 1, not 2"):
        build_loader(DataConfig(), tokenizer=tokenizer, batch_index=2, num_batches=2)
