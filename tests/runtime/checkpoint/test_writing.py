"""Exports that are interrupted, fail or find earlier files: full disks, killed processes, damaged sources."""

from __future__ import annotations

import copy
import functools
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import small_models
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from patchgen.runtime.checkpoint import (
    Checkpointer,
    CheckpointError,
    convert,
    export,
    export_pretrained,
    fingerprint,
    stream_weights,
    writing,
)
from patchgen.runtime.checkpoint.safetensor_files import INCOMPLETE


def test_an_earlier_export_is_replaced_completely(original, tmp_path):
    export_pretrained(original, tmp_path, max_file=10_000)
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    export_pretrained(original, tmp_path)
    assert [path.name for path in tmp_path.glob("*safetensors*")] == ["model.safetensors"]
    small_models.require_loads(original, tmp_path)


def test_an_export_refuses_a_value_that_its_dtype_cannot_represent(original, tmp_path):
    """As `convert` does: a cast would write infinity, which loading refuses. One that is infinite already stays so."""
    model = copy.deepcopy(original)
    with torch.no_grad():
        model.model.layers[0].mlp.experts.down_proj[1, 0, 0] = 1e6
        model.lm_head.weight[0, 0] = float("inf")
    refused = r"layers.0.mlp.experts.down_proj holds 1e\+06, which torch.float16 cannot represent"
    with pytest.raises(CheckpointError, match=refused) as caught:
        export_pretrained(model, tmp_path / "out", dtype=torch.float16)
    assert len(caught.value.problems) == 1 and not (tmp_path / "out").exists()
    with pytest.raises(CheckpointError, match=refused):
        next(stream_weights(model, dtype=torch.float16))
    export_pretrained(model, tmp_path / "wide")
    export_pretrained(model, tmp_path / "out", dtype=torch.bfloat16)
    got, wide = small_models.tensors(tmp_path / "out"), small_models.tensors(tmp_path / "wide")
    assert got.keys() == wide.keys() and wide["lm_head.weight"].isinf().sum() == 1
    for name, tensor in wide.items():
        assert got[name].dtype == torch.bfloat16 and torch.equal(
            got[name].view(torch.int16), tensor.bfloat16().view(torch.int16)
        )


class Reads(TorchDispatchMode):
    """Counts the values that the host reads, for which it waits on a GPU."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        has_mask = func is torch.ops.aten.index.Tensor and any(
            one.dtype == torch.bool for one in args[1] if one is not None
        )
        self.count += has_mask or func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


def test_weights_that_fit_into_their_dtype_are_not_read_one_by_one(original, monkeypatch):
    """Each was read twice, by a stream for every update of an engine's weights."""
    lists, real = [], torch.Tensor.tolist
    tensors = export.saved_tensors(original)
    monkeypatch.setattr(torch.Tensor, "tolist", lambda self: (lists.append(self), real(self))[1])
    with Reads() as reads:
        assert export.plan_outputs(original, tensors, None, torch.float16)
    assert reads.count == 0 and len(lists) == 1 and len(tensors) > 10


class Killed(BaseException):
    """Stands for SIGKILL: nothing cleans up after it."""


@pytest.mark.parametrize("first, second", [(10_000, 10_000), (10**9, 10_000), (10_000, 10**9)])
def test_an_export_killed_while_it_replaces_files_is_refused_or_complete(
    first, second, original, tmp_path, monkeypatch
):
    """Killed at every single change of a name in turn: what is there is the one or the other, whole, or refused."""
    from transformers import Qwen3MoeForCausalLM

    other = small_models.build(Qwen3MoeForCausalLM, small_models.moe_config(), seed=3)
    export_pretrained(original, tmp_path / "original")
    export_pretrained(other, tmp_path / "other")
    wholes = [fingerprint(tmp_path / "original"), fingerprint(tmp_path / "other")]
    path_calls = {name: getattr(Path, name) for name in ("replace", "unlink")}
    seen = set()
    for moment in range(40):
        folder = tmp_path / f"at{moment}"
        export_pretrained(original, folder, max_file=first)
        left = [moment]

        def call(self, *arguments, name, left=left, **options):
            left[0] -= 1
            if left[0] < 0:
                raise Killed
            return path_calls[name](self, *arguments, **options)

        with monkeypatch.context() as patched:
            for name in path_calls:
                patched.setattr(Path, name, functools.partialmethod(call, name=name))
            try:
                export_pretrained(other, folder, max_file=second)
                finished = True
            except Killed:
                finished = False
        try:
            found = fingerprint(folder)
            assert found in wholes, moment
            small_models.require_loads(original if found == wholes[0] else other, folder)
            seen.add("whole")
        except CheckpointError as error:
            assert "writing it was interrupted" in str(error)
            names = {path.name for path in folder.iterdir()}
            if "config.json" in names and names & {"model.safetensors", "model.safetensors.index.json"}:
                # Before the first replacement or after the last: for plain transformers too, one of the two.
                weights = type(original).from_pretrained(folder).state_dict()
                assert any(
                    all(torch.equal(weights[n], t) for n, t in m.state_dict().items()) for m in (original, other)
                )
            seen.add("refused")
        if finished:
            assert found == wholes[1]
            break
        export_pretrained(other, folder, max_file=second)
        assert fingerprint(folder) == wholes[1]
        shutil.rmtree(folder)
    assert finished and seen == {"whole", "refused"}


def test_an_error_while_files_are_renamed_marks_the_folder(original, tmp_path, monkeypatch):
    export_pretrained(original, tmp_path, max_file=10_000)

    def fail(self):
        raise OSError("Input/output error")

    monkeypatch.setattr(writing.FileWriter, "rename", fail)
    with pytest.raises(CheckpointError, match="no longer holds a complete checkpoint") as caught:
        export_pretrained(original, tmp_path, max_file=10_000)
    assert "is unchanged" not in str(caught.value)
    with pytest.raises(CheckpointError, match="writing it was interrupted"):
        fingerprint(tmp_path)


def test_a_folder_that_cannot_be_marked_is_unchanged(original, tmp_path, monkeypatch):
    """A disk that becomes full just before: the marker exists, empty, when its text fails."""
    export_pretrained(original, tmp_path, max_file=10_000)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    write_text = Path.write_text

    def fail(self, text, *args, **options):
        if self.name != INCOMPLETE:
            return write_text(self, text, *args, **options)
        self.touch()
        raise OSError("No space left on device")

    monkeypatch.setattr(Path, "write_text", fail)
    with pytest.raises(CheckpointError, match="its earlier content is unchanged"):
        export_pretrained(original, tmp_path, layout="stacked")
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


@pytest.mark.parametrize("method", ["_invalidate", "_complete"])
def test_a_write_that_fails_while_files_are_replaced_leaves_no_temporary_files(
    method, original, tmp_path, monkeypatch
):
    export_pretrained(original, tmp_path)

    def fail(self, prepared):
        raise OSError("Input/output error")

    monkeypatch.setattr(writing.FolderWriter, method, fail)
    with pytest.raises(CheckpointError, match="no longer holds a complete checkpoint"):
        export_pretrained(original, tmp_path)
    assert [path.name for path in tmp_path.glob(".*")] == [INCOMPLETE]


def test_files_of_other_names_stay(original, tmp_path):
    (tmp_path / "model_ema.safetensors").write_bytes(b"mine")
    export_pretrained(original, tmp_path, max_file=10_000)
    export_pretrained(original, tmp_path)
    assert sorted(path.name for path in tmp_path.glob("*.safetensors")) == [
        "model.safetensors",
        "model_ema.safetensors",
    ]


def test_one_tensor_is_in_memory_at_a_time(original, tmp_path, monkeypatch, request):
    """What exists beside the model while a folder is written is less than twice its largest tensor."""
    largest = max(parameter.numel() * 4 for parameter in original.parameters())
    held, most = small_models.new_bytes(request), []
    write = writing.FolderWriter.write

    def measured(self, output, tensor):
        if output.num_bytes * 2 > largest:
            most.append(held())
        write(self, output, tensor)

    monkeypatch.setattr(writing.FolderWriter, "write", measured)
    export_pretrained(original, tmp_path, layout="stacked")
    assert len(most) >= 2 and 0 < max(most) < 2 * largest


def test_damage_is_found_before_anything_is_written(checkpoint, tmp_path):
    folder = small_models.rewrite(checkpoint, tmp_path / "in", lambda found: found)
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=r"in model.safetensors ends at byte"):
        convert(folder, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    nan = small_models.rewrite(
        checkpoint, tmp_path / "nan", lambda f: f | {"lm_head.weight": f["lm_head.weight"] * float("nan")}
    )
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "model.safetensors").write_bytes(b"an earlier one")
    with pytest.raises(CheckpointError, match="lm_head.weight in .*model.safetensors holds NaN"):
        convert(nan, tmp_path / "kept")
    assert [p.name for p in (tmp_path / "kept").iterdir()] == ["model.safetensors"]
    assert (tmp_path / "kept" / "model.safetensors").read_bytes() == b"an earlier one"


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 256 KiB, and a way to leave so many bytes of it free; skipped where none can be mounted."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if os.geteuid() != 0 or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", folder]).returncode:
        pytest.skip("a small tmpfs cannot be mounted here")

    def leave(free: int) -> None:
        (folder / "ballast").unlink(missing_ok=True)
        (folder / "ballast").write_bytes(bytes(shutil.disk_usage(folder).free - free))

    yield folder, leave
    subprocess.run(["umount", folder], check=True)


def test_a_full_disk(small_disk, original, checkpoint):
    disk, leave = small_disk
    leave(24 << 10)
    for write in (lambda: convert(checkpoint, disk), lambda: export_pretrained(original, disk, max_file=10_000)):
        with pytest.raises(CheckpointError) as caught:
            write()
        assert "No space left on device" in str(caught.value)
        assert f"{disk}/model" in str(caught.value)
        assert [path.name for path in disk.iterdir()] == ["ballast"]
    leave(100 << 10)
    checkpointer = Checkpointer(disk)
    checkpointer.save(1, model=torch.nn.Linear(3, 3), asynchronous=False)
    leave(36 << 10)
    with pytest.raises(CheckpointError, match="Step 2 could not be saved .* GB free there"):
        checkpointer.save(2, model=original, asynchronous=False)
    assert checkpointer.complete_steps() == [1]


def test_an_export_stops_at_a_limit_too(checkpoint, tmp_path):
    """A limit on the size of files, where no disk can be mounted: the earlier export stays."""
    script = (
        "import resource, signal, sys\n"
        "from patchgen.runtime.checkpoint import CheckpointError, convert\n"
        "convert(sys.argv[1], sys.argv[2])\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))\n"
        "try:\n    convert(sys.argv[1], sys.argv[2], layout='stacked')\n"
        "except CheckpointError as error:\n    print(error)\n"
    )
    command = [sys.executable, "-c", script, str(checkpoint), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert "cannot be written to" in done.stdout and "too large" in done.stdout, done.stdout + done.stderr
    assert fingerprint(tmp_path) == fingerprint(checkpoint)
    assert "model.layers.0.mlp.experts.0.gate_proj.weight" in small_models.tensors(tmp_path)
    assert not list(tmp_path.glob(".*"))
