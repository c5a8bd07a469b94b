"""Checkpoints on real ranks: in from upstream's own files, out to plain transformers, resumed on other layouts."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import cases_checkpoints as cases
import cases_models
import omni_models
import pytest
import torch
from rounding import require_equal_up_to_rounding
from safetensors.torch import load_file

from patchgen.runtime import registry
from patchgen.runtime.checkpoint import export_run, fingerprint
from patchgen.runtime.verify.model_pair import perturb
from patchgen.runtime.verify.small_config import small_config

FEW = ("qwen3_moe", "gpt_oss", "mixtral", "qwen3_omni_moe")
MODELS = tuple(model.name for model in registry.generated_models())


def upstream_checkpoint(name: str, folder: Path) -> tuple[str, str]:
    """Made-up weights, saved by upstream's own class in several files; the class's name and the generated file."""
    model = registry.find_model(name)
    head = model.heads[0]
    upstream = getattr(model.upstream(), head)
    config = small_config(upstream.config_class).config
    torch.manual_seed(0)
    original = upstream._from_config(config, dtype=torch.float32)
    perturb(original)
    original.save_pretrained(folder, max_shard_size="100KB")
    return head, str(model.file)


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    found = {}
    for file in folder.glob("*.safetensors"):
        found |= load_file(file)
    return found


@pytest.fixture(scope="module")
def plain_transformers():
    """Compares in a process without patchgen, one for all: nearly all of its time is its start."""
    script = Path(__file__).with_name("plain_transformers.py")
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}

    with subprocess.Popen([sys.executable, "-P", str(script)], env=environment, **pipes) as process:

        def compare(head: str, original: Path, *exports: Path) -> None:
            process.stdin.write(json.dumps([head, str(original), *map(str, exports)]) + "\n")
            process.stdin.flush()
            told = []
            while not told or told[-1] not in ("same\n", ""):
                told.append(process.stdout.readline())
            assert told[-1] == "same\n", "".join(told)

        yield compare
        process.stdin.close()


@pytest.mark.parametrize(
    "name", [name if name in FEW else pytest.param(name, marks=pytest.mark.slow) for name in MODELS]
)
def test_from_upstream_over_ranks_to_plain_transformers(
    name, tmp_path, one_rank, two_ranks, four_ranks, plain_transformers
):
    """1, 2 and 4 ranks (EP 2, FSDP2): the export is upstream's checkpoint, key by key and bit by bit."""
    head, file = upstream_checkpoint(name, tmp_path / "original")
    expected = tensors(tmp_path / "original")
    exports = []
    for pool, ep in ((one_rank, 1), (two_ranks, 1), (two_ranks, 2), (four_ranks, 2)):
        exports.append(tmp_path / f"export-{pool.world}-{ep}")
        for read, own in pool.run(cases.round_trip, head, file, str(tmp_path / "original"), str(exports[-1]), ep):
            assert read <= 1.05 * own, f"a rank that holds {own} bytes read {read}"
        got = tensors(exports[-1])
        assert got.keys() == expected.keys()
        assert all(torch.equal(got[key], expected[key]) for key in expected)
    assert len(list(exports[-1].glob("*.safetensors"))) > 1
    plain_transformers(head, tmp_path / "original", *exports[-1:] if name in FEW else exports)


def test_a_part_is_where_expert_parallelism_and_then_fsdp_cut(four_ranks):
    """Read and written at another place, a checkpoint would come back as it was, and experts compute for one another."""
    assert four_ranks.run(cases.misplaced_parts, "qwen3_moe", ep=2) == [[]] * 4


def test_the_rest_of_a_whole_is_copied_by_the_ranks_that_write_its_files(tmp_path, two_ranks):
    """The thinker trains on EP 2; talker and wave decoder are in the export, and no rank has loaded them."""
    omni_models.save_whole(omni_models.qwen3_omni(), tmp_path / "source")
    two_ranks.run(cases.part_of_a_whole, str(tmp_path / "source"), str(tmp_path / "out"), 2)
    source, got = tensors(tmp_path / "source"), tensors(tmp_path / "out")
    assert got.keys() == source.keys() and len(list((tmp_path / "out").glob("*.safetensors"))) > 2
    for name, tensor in source.items():
        assert torch.equal(got[name], tensor + 1 if name.startswith("thinker.") else tensor), name
    config = [(tmp_path / place / "config.json").read_text() for place in ("source", "out")]
    assert json.loads(config[0]) == json.loads(config[1])


def test_resume_on_fewer_ranks(tmp_path, one_rank, two_ranks, four_ranks):
    """EP 2 x FSDP 2 -> FSDP 2 -> one rank -> SP 2 x EP 2: the loss curve of the run that was left alone."""
    expected, _ = four_ranks.run(cases.train, "qwen3_moe", str(tmp_path), steps=6, save_at=3, ep=2)[0]
    bitwise, first = four_ranks.run(cases.train, "qwen3_moe", str(tmp_path), steps=6, resume=True, ep=2)[0]
    assert first == 3 and bitwise == expected[3:]
    for pool, layout in (
        (two_ranks, {}), (one_rank, {}), (two_ranks, {"ep": 2, "sp": 2}), (four_ranks, {"dp_replicate": 2, "ep": 2}),
    ):  # fmt: skip
        got, _ = pool.run(cases.train, "qwen3_moe", str(tmp_path), steps=6, resume=True, **layout)[0]
        require_equal_up_to_rounding(got, expected[3:], what=f"{pool.world} ranks, {layout}")


def test_resume_on_more_ranks(tmp_path, one_rank, four_ranks):
    """Tied embeddings; one rank -> four, ranks 1 to 3 with generators of their own."""
    expected, _ = one_rank.run(cases.train, "llama", str(tmp_path), steps=5, save_at=2)[0]
    got, _ = four_ranks.run(cases.train, "llama", str(tmp_path), steps=5, resume=True)[0]
    require_equal_up_to_rounding(got, expected[2:])


def test_a_run_is_exported_as_its_original_was(tmp_path, four_ranks):
    """From the training checkpoint of four ranks, offline: the same fingerprints, and upstream loads it."""
    original = cases_models.build("mixtral", generated=False, attention_name="eager")
    four_ranks.run(cases.train, "mixtral", str(tmp_path / "run"), steps=1, save_at=1, ep=2)
    export_run(tmp_path / "run", tmp_path / "export", max_file=50_000)
    assert fingerprint(tmp_path / "export") == fingerprint(tmp_path / "run")
    loaded, info = type(original).from_pretrained(tmp_path / "export", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    trained = torch.cat([p.detach().flatten() for p in loaded.parameters()])
    before = torch.cat([p.detach().flatten() for p in original.parameters()])
    assert 0 < (trained - before).abs().max() < 2.1e-3  # one step of AdamW with a rate of 1e-3


def test_a_bad_file_is_an_error_on_every_rank(tmp_path, two_ranks):
    head, file = upstream_checkpoint("qwen3", tmp_path)
    victim = sorted(tmp_path.glob("*.safetensors"))[0]
    whole = victim.read_bytes()
    victim.write_bytes(whole[:-8])
    for text in two_ranks.run(cases.load_fails, head, file, str(tmp_path)):
        assert f"in {victim.name} ends at byte" in text
    victim.write_bytes(whole[:-4] + b"\xff\xff\xff\x7f")  # NaN, in the last element of the last tensor: of one rank
    texts = two_ranks.run(cases.load_fails, head, file, str(tmp_path))
    assert texts[0] == texts[1] and f"in {victim} holds NaN" in texts[0] and "rank " in texts[0]


def test_a_file_that_one_rank_alone_sees_damaged_is_an_error_on_every_rank(tmp_path, two_ranks):
    """Each rank with a copy on its own disk: the one with the whole copy does not wait for the other."""
    head, file = upstream_checkpoint("qwen3", tmp_path / "copy-0")
    shutil.copytree(tmp_path / "copy-0", tmp_path / "copy-1")
    victim = sorted((tmp_path / "copy-1").glob("*.safetensors"))[0]
    victim.write_bytes(victim.read_bytes()[:-8])
    for text in two_ranks.run(cases.load_fails, head, file, str(tmp_path / "copy-{rank}")):
        assert "rank 1: " in text and f"in {victim.name} ends at byte" in text and "rank 0" not in text


def test_an_export_that_cannot_be_written(tmp_path, two_ranks):
    head, file = upstream_checkpoint("qwen3", tmp_path / "original")
    (tmp_path / "target").write_text("a file where the folder should be")
    texts = two_ranks.run(cases.export_fails, head, file, str(tmp_path / "original"), str(tmp_path / "target"))
    assert all("target could not be written" in text and "File exists" in text for text in texts)


def test_a_value_that_the_dtype_cannot_represent_is_refused_on_every_rank(tmp_path, two_ranks):
    head, file = upstream_checkpoint("qwen3", tmp_path / "original")
    target = tmp_path / "target"
    for texts in two_ranks.run(cases.too_large_for_float16, head, file, str(tmp_path / "original"), str(target)):
        assert len(texts) == 2, "export and stream"
        for text in texts:
            assert "rank 1: model.embed_tokens.weight holds -1e+06, which torch.float16 cannot represent" in text
            assert "rank 0" not in text
    assert not target.exists()


@pytest.mark.parametrize(("rank", "what"), [(0, "disk"), (1, "disk"), (2, "tensor")])
def test_an_export_that_fails_midway_on_one_rank(rank, what, tmp_path, four_ranks):
    """No rank waits for the one that fails; rank, file and key are named; the earlier export is unchanged."""
    head, file = upstream_checkpoint("qwen3_moe", tmp_path / "original")
    target = shutil.copytree(tmp_path / "original", tmp_path / "target")
    before = {path.name: path.read_bytes() for path in target.iterdir()}
    told = four_ranks.run(
        cases.export_fails_midway, head, file, str(tmp_path / "original"), str(target), rank, what, timeout=60
    )
    texts = [text for text, _ in told]
    assert len(set(texts)) == 1 and max(seconds for _, seconds in told) < 20, told
    assert f"rank {rank}: " in texts[0] and not any(f"rank {other}: " in texts[0] for other in {0, 1, 2, 3} - {rank})
    reason = "File too large" if what == "disk" else "MemoryError: no memory for a part"
    assert reason in texts[0] and ".safetensors" in texts[0], texts[0]
    assert any(key in texts[0] for key in tensors(tmp_path / "original"))
    assert {path.name: path.read_bytes() for path in target.iterdir()} == before
    four_ranks.run(cases.round_trip, head, file, str(tmp_path / "original"), str(target), 1)
    assert fingerprint(target) == fingerprint(tmp_path / "original")


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the kernel keeps no peak to set back")
def test_an_export_takes_less_memory_than_two_of_its_largest_tensor(tmp_path, two_ranks):
    """Per rank, beside its part of the model: embeddings of 34 MB among 400 small tensors, EP 2 x FSDP 2."""
    model = registry.find_model("qwen3_moe")
    for peak, largest in two_ranks.run(cases.export_peak, model.heads[0], str(model.file), str(tmp_path)):
        assert 0 < peak < 2 * largest, (peak, largest)


def test_new_parts_are_the_same_on_any_number_of_ranks(tmp_path, one_rank, two_ranks):
    from safetensors.torch import save_file

    head, file = upstream_checkpoint("qwen3", tmp_path / "original")
    kept = {key: tensor for key, tensor in tensors(tmp_path / "original").items() if key != "lm_head.weight"}
    (tmp_path / "headless").mkdir()
    save_file(kept, tmp_path / "headless" / "model.safetensors")
    one = one_rank.run(cases.initialised_parts, head, file, str(tmp_path / "headless"))[0]
    two = two_ranks.run(cases.initialised_parts, head, file, str(tmp_path / "headless"))
    assert torch.equal(one, two[0]) and torch.equal(one, two[1]) and one.std() > 0


@pytest.mark.parametrize("rank", [0, 1])
def test_a_save_that_fails_on_one_rank_fails_on_all(rank, tmp_path, two_ranks):
    texts = two_ranks.run(cases.one_rank_cannot_write, "qwen3", str(tmp_path), rank)
    assert all(f"rank {rank}: OSError: [Errno 28] No space left on device" in text for text in texts)
