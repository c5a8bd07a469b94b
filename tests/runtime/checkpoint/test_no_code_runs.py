"""Nothing that is read from a run or a downloaded folder runs code: a prepared file for every reader."""

from __future__ import annotations

import ast
import io
import json
import pickle
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import small_models
import torch
from test_train_state import make

from patchgen.runtime.checkpoint import (
    Checkpointer,
    CheckpointError,
    convert,
    export_run,
    fingerprint,
    tensor_index,
)
from patchgen.runtime.data import cache

ROOT = Path(__file__).parents[3]


class Prepared:
    """Creates a file when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self):
        return Path.touch, (self.mark,)


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    """A run with one checkpoint."""
    place = tmp_path_factory.mktemp("run")
    model, optimizer, _ = make()
    Checkpointer(place).save(1, model=model, optimizer=optimizer, asynchronous=False)
    return place


def replace_file(run: Path, name: str, data: bytes) -> None:
    """Puts other bytes into a checkpoint, whose manifest then agrees with them."""
    folder = run / "step-00000001"
    (folder / name).write_bytes(data)
    manifest = json.loads((folder / "checkpoint.json").read_text())
    manifest["files"][name], manifest["checksums"][name] = len(data), zlib.crc32(data)
    (folder / "checkpoint.json").write_text(json.dumps(manifest))


def torch_file(value: object) -> bytes:
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


def test_a_transformed_file_is_reported_as_such(saved, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(saved, run)
    index = tensor_index.read_index(run / "step-00000001")
    for info in index.storage_data.values():
        info.transform_descriptors = ["zstd"]
    index.storage_meta = None
    replace_file(run, ".metadata", pickle.dumps(index))
    with pytest.raises(CheckpointError, match=r"'__0_0.distcp' is stored transformed \(zstd\).* To fix: ") as caught:
        Checkpointer(run).load(model=make()[0])
    assert "outside" not in str(caught.value)


READERS: dict[str, Callable[[Path, Path], object]] = {
    "resume": lambda run, out: Checkpointer(run).load(model=(parts := make())[0], optimizer=parts[1]),
    "export": lambda run, out: export_run(run, out),
    "fingerprint": lambda run, out: fingerprint(run),
}


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("name", [".metadata", "shared.pt", "rank-00000.pt", "__0_0.distcp"])
def test_a_prepared_file_of_a_checkpoint_runs_nothing(name, reader, saved, tmp_path):
    run, mark = tmp_path / "run", tmp_path / "ran"
    shutil.copytree(saved, run)
    replace_file(run, name, (pickle.dumps if name == ".metadata" else torch_file)(Prepared(mark)))
    if name in ("shared.pt", "rank-00000.pt") and reader != "resume":
        READERS[reader](run, tmp_path / "out")  # of no use to it
    else:
        with pytest.raises(CheckpointError, match=r"metadata cannot be read: it names pathlib|cannot be"):
            READERS[reader](run, tmp_path / "out")
    assert not mark.exists()


@pytest.mark.parametrize("reader", READERS)
def test_an_index_points_to_tensors_of_its_folder_only(reader, saved, tmp_path):
    """Values that are not tensors are read by torch with a pickle of their own; a path may lead anywhere."""
    from torch.distributed.checkpoint.metadata import BytesStorageMetadata

    for number, (change, told) in enumerate(
        (
            (
                lambda index: index.state_dict_metadata.update({"model/lm_head.weight": BytesStorageMetadata()}),
                "names",
            ),
            (
                lambda index: index.state_dict_metadata.update({"model/lm_head.weight": None}),
                "lm_head.weight is not a tensor",
            ),
            (lambda index: _move(index, "../../other.distcp"), r"'../../other.distcp' is outside"),
        )
    ):
        run = tmp_path / str(number)
        shutil.copytree(saved, run)
        index = pickle.loads((run / "step-00000001" / ".metadata").read_bytes())
        change(index)
        replace_file(run, ".metadata", pickle.dumps(index))
        with pytest.raises(CheckpointError, match=told):
            READERS[reader](run, tmp_path / "out")


def _move(index, path: str) -> None:
    from dataclasses import replace

    key, place = next(iter(index.storage_data.items()))
    index.storage_data[key] = replace(place, relative_path=path)


def test_prepared_arrays_of_a_token_cache_run_nothing(tmp_path, monkeypatch):
    mark, folder = tmp_path / "ran", tmp_path / "key"
    folder.mkdir()
    for name in ("tokens.npy", "targets.npy", "bounds.npy"):
        np.save(folder / name, np.array([Prepared(mark)], dtype=object), allow_pickle=True)
    (folder / "contents.txt").write_text("x")
    monkeypatch.setattr(cache, "digest", lambda meaning: "key")
    source = type("Source", (), {"fingerprint": lambda self: ""})()
    with pytest.raises(ValueError, match=r"[Pp]ython objects|allow_pickle"):
        cache.open_cache(tmp_path, source, source, skip_bad=False)
    assert not mark.exists()


@pytest.fixture
def asking_folder(tmp_path, monkeypatch) -> tuple[Path, Path]:
    """A model's folder that brings code, a user who says yes to everything, and the file that the code makes."""
    folder, mark = tmp_path / "downloaded", tmp_path / "ran"
    config = small_models.moe_config()
    small_models.build(small_models.generated_class(), config).save_pretrained(folder)
    (folder / "own.py").write_text(f"from pathlib import Path\nPath({str(mark)!r}).touch()\nclass Own: pass\n")
    names = ("AutoConfig", "AutoModel", "AutoModelForCausalLM", "AutoProcessor")
    auto = dict.fromkeys(names, "own.Own") | {"AutoTokenizer": ["own.Own", "own.Own"]}
    small_models.change_config(folder, model_type="unheard_of", auto_map=auto)
    for name in ("tokenizer_config.json", "processor_config.json"):
        (folder / name).write_text(json.dumps({"auto_map": auto, "tokenizer_class": "Own", "processor_class": "Own"}))
    monkeypatch.setattr("builtins.input", lambda *text: "y")
    return folder, mark


def test_code_that_a_downloaded_folder_brings_is_not_run(asking_folder, tmp_path):
    from patchgen.runtime.train import setup
    from patchgen.runtime.train.model import read_config
    from patchgen.runtime.train.recipe import RecipeError, from_dict

    folder, mark = asking_folder
    with pytest.raises(RecipeError, match="needs custom code .auto_map., which only runs if"):
        read_config(from_dict({"model": {"source": str(folder)}, "data": {}}).model)
    with pytest.raises(CheckpointError, match="custom code"):
        convert(folder, tmp_path / "out")
    small_models.change_config(folder, model_type="qwen3_moe")  # a model that is known, a tokenizer that is not
    with pytest.raises(RecipeError, match="has no tokenizer"):
        setup.data_parts(from_dict({"model": {"source": str(folder)}, "data": {"kind": "multimodal"}}))
    assert not mark.exists()


def test_kernels_that_a_downloaded_folder_names_are_not_fetched(tmp_path):
    """An attention of the Hub is code; to rewrite weights needs none."""
    folder = tmp_path / "downloaded"
    small_models.build(small_models.generated_class(), small_models.moe_config()).save_pretrained(folder)
    small_models.change_config(folder, attn_implementation="somebody/attention")
    convert(folder, tmp_path / "out")


CALLS = {
    "torch.load": ("weights_only", True),
    "np.load": ("allow_pickle", False),
    "AutoConfig.from_pretrained": ("trust_remote_code", False),
    "AutoTokenizer.from_pretrained": ("trust_remote_code", False),
    "AutoProcessor.from_pretrained": ("trust_remote_code", False),
    "AutoModel.from_config": ("trust_remote_code", False),
    "AutoModelForCausalLM.from_pretrained": ("trust_remote_code", False),
}
FORBIDDEN = ("pickle.load", "pickle.loads", "pickle.Unpickler", "FileSystemReader", "torch.package", "marshal.loads")


def test_no_other_reader_could_run_code():
    """Every call that may unpickle or import what a file names says that it does not."""
    found = []
    for path in (path for part in ("runtime", "patchgen", "kernels") for path in (ROOT / part).rglob("*.py")):
        for node in (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)):
            name, options = ast.unparse(node.func), {one.arg: ast.unparse(one.value) for one in node.keywords}
            option, wanted = CALLS.get(name, ("", ""))
            if name in FORBIDDEN or (option and options.get(option) != str(wanted)):
                found.append(f"{path.relative_to(ROOT)}:{node.lineno}: {name}")
    assert found == []
