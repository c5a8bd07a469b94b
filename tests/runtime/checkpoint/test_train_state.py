"""Saving and resuming in one process: what comes back, what is kept, and what a crash or a full disk leaves."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
import threading
import warnings

import numpy as np
import pytest
import small_models
import torch
from torch.distributed.checkpoint import FileSystemReader

from patchgen.runtime.checkpoint import Checkpointer, CheckpointError, export_run, train_state


def make(seed: int = 0, **options):
    model = small_models.build(small_models.generated_class(), small_models.moe_config(), seed=seed).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, **options)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    return model, optimizer, scheduler


def step(model, optimizer, scheduler) -> float:
    ids = torch.randint(0, 31, (2, 8))
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()
    return float(loss.detach())


def everything(model, optimizer) -> dict[str, torch.Tensor]:
    found = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for name, parameter in model.named_parameters():
        for field, value in optimizer.state.get(parameter, {}).items():
            found[f"{name}/{field}"] = torch.as_tensor(value).clone()
    return found


def require_equal(got: dict, expected: dict) -> None:
    assert got.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(got[name], tensor) and got[name].dtype == tensor.dtype, name


@pytest.mark.parametrize("asynchronous", [True, False])
def test_everything_comes_back(asynchronous, tmp_path):
    """Model, optimizer, rate, generators, and what the trainer gave; training goes on during the save."""
    torch.manual_seed(3)
    random.seed(3)
    np.random.seed(3)
    parts = make()
    step(*parts)
    checkpointer = Checkpointer(tmp_path)
    extra = {"shared": {"row": 7, "names": ["a"]}, "rank": {"noise": torch.ones(2)}}
    model, optimizer, scheduler = parts
    saved = everything(model, optimizer)
    checkpointer.save(
        1, model=model, optimizer=optimizer, scheduler=scheduler, extra_state=extra, asynchronous=asynchronous
    )
    numbers = random.random(), np.random.rand(), float(torch.rand(()))
    torch.manual_seed(9)
    after = [step(*parts) for _ in range(2)]
    checkpointer.wait()

    model, optimizer, scheduler = make(seed=4)
    step(model, optimizer, scheduler)
    state = checkpointer.load(model=model, optimizer=optimizer, scheduler=scheduler)
    assert (random.random(), np.random.rand(), float(torch.rand(()))) == numbers
    assert state["step"] == 1 and state["shared"] == {"row": 7, "names": ["a"]} and state["world"] == 1
    assert torch.equal(state["rank"]["noise"], torch.ones(2))
    require_equal(everything(model, optimizer), saved)
    assert optimizer.param_groups[0]["lr"] == 1e-2 / 2 and scheduler.last_epoch == 1
    torch.manual_seed(9)
    assert [step(model, optimizer, scheduler) for _ in range(2)] == after


def test_the_last_ones_are_kept(tmp_path):
    model, optimizer, _ = make()
    checkpointer = Checkpointer(tmp_path, keep=2)
    for number in (1, 2, 3, 4):
        checkpointer.save(number, model=model, optimizer=optimizer)
    checkpointer.wait()
    assert checkpointer.complete_steps() == [3, 4]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000003", "step-00000004"]


def test_a_better_step_is_kept_while_the_one_before_is_still_written(tmp_path, monkeypatch):
    """Its save decides what is removed, and must not forget the better one."""
    checkpointer = Checkpointer(tmp_path, keep=1)
    model, optimizer, _ = make()
    sync_folder, may_end = train_state.sync_folder, threading.Event()
    monkeypatch.setattr(train_state, "sync_folder", lambda folder: (may_end.wait(60), sync_folder(folder)))
    checkpointer.keep_besides(1)
    checkpointer.save(1, model=model, optimizer=optimizer)
    checkpointer.keep_besides(2)  # while the save of step 1 waits
    may_end.set()
    for later in (2, 3, 4):
        checkpointer.save(later, model=model, optimizer=optimizer)
    checkpointer.wait()
    assert checkpointer.complete_steps() == [2, 4]


def test_a_run_that_went_back_keeps_what_it_saves(tmp_path):
    """After a return to step 2 the newest checkpoint is the one saved last, not the one with the highest step."""
    model, optimizer, _ = make()
    checkpointer = Checkpointer(tmp_path, keep=2)
    for number in (2, 50, 3):
        checkpointer.save(number, model=model, optimizer=optimizer)
    checkpointer.wait()
    assert checkpointer.complete_steps() == [50, 3] and checkpointer.latest() == 3
    checkpointer.save(50, model=model, optimizer=optimizer, extra_state={"shared": {"again": True}})
    checkpointer.wait()
    assert checkpointer.latest() == 50
    assert checkpointer.load(model=model, optimizer=optimizer)["shared"] == {"again": True}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000003", "step-00000050"]


def saved_twice(tmp_path):
    model, optimizer, _ = make()
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(1, model=model, optimizer=optimizer)
    expected = everything(model, optimizer)
    step(model, optimizer, torch.optim.lr_scheduler.ConstantLR(optimizer))
    checkpointer.save(2, model=model, optimizer=optimizer)
    checkpointer.wait()
    return checkpointer, model, optimizer, expected


def _truncate(folder):
    file = next(folder.glob("*.distcp"))
    file.write_bytes(file.read_bytes()[:-1])
    return f"{file.name} has .* bytes instead of"


def _remove(folder):
    next(folder.glob("*.distcp")).unlink()
    return r"\.distcp is missing"


def _no_manifest(folder):
    (folder / "checkpoint.json").unlink()
    return "checkpoint.json is missing"


def _half_a_manifest(folder):
    file = folder / "checkpoint.json"
    file.write_text(file.read_text()[:50])
    return "checkpoint.json is damaged"


def _a_number(folder):
    (folder / "checkpoint.json").write_text("7")
    return "checkpoint.json is damaged: expected a JSON object, found int"


@pytest.mark.parametrize("damage", [_truncate, _remove, _no_manifest, _half_a_manifest, _a_number])
def test_a_broken_one_is_named_and_the_one_before_is_used(damage, tmp_path):
    checkpointer, model, optimizer, expected = saved_twice(tmp_path)
    reason = damage(tmp_path / "step-00000002")
    with pytest.warns(UserWarning, match=f"step-00000002: .*{reason}"):
        assert checkpointer.latest() == 1
    with pytest.raises(CheckpointError, match="step-00000002 is not a complete checkpoint.*\n.*step-00000001"):
        checkpointer.load(2, model=model, optimizer=optimizer)
    with pytest.warns(UserWarning):
        assert checkpointer.load(model=model, optimizer=optimizer)["step"] == 1
    require_equal(everything(model, optimizer), expected)


@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata", "shared.pt", "rank-00000.pt"])
def test_other_bytes_of_the_same_length_are_found(name, tmp_path):
    """Before anything is loaded or exported; what looks for the newest checkpoint reads sizes only."""
    checkpointer, model, optimizer, expected = saved_twice(tmp_path)
    flip_a_byte(tmp_path / "step-00000002" / name)
    before = everything(model, optimizer)
    assert checkpointer.latest() == 2
    with pytest.raises(CheckpointError, match=f"{name} has changed since it was saved\n.*step-00000001"):
        checkpointer.load(2, model=model, optimizer=optimizer)
    with pytest.raises(CheckpointError, match=f"{name} has changed since it was saved\n--step chooses another: 1"):
        export_run(tmp_path, tmp_path / "out")
    require_equal(everything(model, optimizer), before)
    with pytest.warns(UserWarning, match=f"step-00000001 is loaded:\n  step-00000002: {name} has changed"):
        assert checkpointer.load(model=model, optimizer=optimizer)["step"] == 1
    require_equal(everything(model, optimizer), expected)
    flip_a_byte(tmp_path / "step-00000001" / name)
    with pytest.raises(
        CheckpointError, match=f"no complete checkpoint:\n  step-00000002: {name} .*\n  step-00000001: {name}"
    ):
        checkpointer.load(model=model, optimizer=optimizer)


def flip_a_byte(file):
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def test_what_torch_cannot_read_is_an_error_of_the_checkpoint(tmp_path):
    """Without a checksum, as in what an earlier version saved."""
    checkpointer, model, optimizer, _ = saved_twice(tmp_path)
    file = tmp_path / "step-00000002" / "checkpoint.json"
    fields = json.loads(file.read_text())
    del fields["checksums"]
    file.write_text(json.dumps(fields))
    data = tmp_path / "step-00000002" / "__0_0.distcp"
    data.write_bytes(bytes(data.stat().st_size))
    with pytest.raises(CheckpointError, match="step-00000002 cannot be read; the model is not usable"):
        checkpointer.load(model=model, optimizer=optimizer)


def test_tied_tensors_are_saved_once(tmp_path):
    tied = [
        small_models.build(small_models.generated_class(), small_models.moe_config(tie_word_embeddings=True), seed=s)
        for s in (0, 1)
    ]
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(1, model=tied[0])
    checkpointer.wait()
    keys = FileSystemReader(tmp_path / "step-00000001").read_metadata().state_dict_metadata
    assert "model/model.embed_tokens.weight" in keys and "model/lm_head.weight" not in keys
    checkpointer.load(model=tied[1])
    assert torch.equal(tied[1].lm_head.weight, tied[0].lm_head.weight)
    export_run(tmp_path, tmp_path / "out")
    assert torch.equal(small_models.tensors(tmp_path / "out")["model.embed_tokens.weight"], tied[0].lm_head.weight)
    untied = small_models.build(small_models.generated_class(), small_models.moe_config())
    with pytest.raises(CheckpointError, match="missing: lm_head.weight"):
        checkpointer.load(model=untied)


def test_a_crash_between_the_last_two_renames(tmp_path):
    """A step that is saved again is set aside first: it is used until the new one has its name."""
    checkpointer, model, optimizer, _ = saved_twice(tmp_path)
    (tmp_path / "step-00000002").rename(tmp_path / ".step-00000002.replaced")
    shutil.copytree(tmp_path / "step-00000001", tmp_path / ".step-00000002.partial")
    with pytest.warns(UserWarning, match=r"\.step-00000002\.partial: the save was interrupted"):
        assert checkpointer.latest() == 2
    with pytest.warns(UserWarning):
        assert checkpointer.load(model=model, optimizer=optimizer)["step"] == 2
    checkpointer.save(3, model=model, optimizer=optimizer, asynchronous=False)
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"step-0000000{n}" for n in (1, 2, 3)]


def test_nothing_to_load(tmp_path):
    model, optimizer, _ = make()
    assert Checkpointer(tmp_path / "none").latest() is None
    with pytest.raises(CheckpointError, match="none holds no complete checkpoint"):
        Checkpointer(tmp_path / "none").load(model=model, optimizer=optimizer)


def test_another_model_is_refused_by_name(tmp_path):
    from transformers import LlamaConfig, LlamaForCausalLM

    checkpointer, *_ = saved_twice(tmp_path)
    with pytest.raises(CheckpointError, match=r"is of Qwen3MoeForCausalLM \(qwen3_moe\), not of LlamaForCausalLM"):
        checkpointer.load(model=LlamaForCausalLM(LlamaConfig(**small_models.SMALL)))
    smaller = small_models.moe_config()
    smaller.moe_intermediate_size = 8
    smaller.num_hidden_layers = 1
    with pytest.raises(CheckpointError) as caught:
        checkpointer.load(model=small_models.build(small_models.generated_class(), smaller))
    assert "experts.down_proj is [4, 16, 8] in the model, [4, 16, 12] in the checkpoint" in str(caught.value)
    assert "unexpected: model.layers.1.mlp.gate.weight [4, 16]" in str(caught.value)


def test_values_that_are_not_plain_are_refused_before_anything_is_written(tmp_path):
    model, _optimizer, _ = make()
    with pytest.raises(CheckpointError, match=r"extra_state\['rank'\] must contain only tensors and plain values"):
        Checkpointer(tmp_path).save(1, model=model, extra_state={"rank": {"object": Checkpointer}})
    assert not list(tmp_path.iterdir())


def test_a_tensor_that_the_model_does_not_have(tmp_path):
    model, _, _ = make()
    stranger = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(3))])
    with pytest.raises(CheckpointError, match=r"Group 0 of AdamW trains a tensor \[3\] that is not a parameter"):
        Checkpointer(tmp_path).save(1, model=model, optimizer=stranger)


@pytest.mark.parametrize("name", ["SGD", "Adagrad", "RMSprop", "AdamW", "Adafactor"])
def test_optimizers(name, tmp_path):
    """Any state per parameter: tensors of the parameter's shape, of other shapes, and numbers."""

    def build(seed):
        model = small_models.build(small_models.generated_class(), small_models.moe_config(), seed=seed)
        options = {"momentum": 0.9} if name in ("SGD", "RMSprop") else {}
        optimizer = getattr(torch.optim, name)(model.parameters(), lr=1e-3, **options)
        return model, optimizer, torch.optim.lr_scheduler.ConstantLR(optimizer)

    first = build(0)
    step(*first)
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(1, model=first[0], optimizer=first[1])
    expected = everything(*first[:2])
    checkpointer.wait()
    second = build(1)
    checkpointer.load(model=second[0], optimizer=second[1])
    require_equal(everything(*second[:2]), expected)


def test_options_follow_the_parameter_not_the_group(tmp_path):
    """Decay for some: saved in two groups, loaded into three."""

    def groups(model, cuts):
        names = [name for name, _ in model.named_parameters()]
        norms = [name for name in names if "norm" in name]
        others = [name for name in names if "norm" not in name]
        divided = [norms, others] if cuts == 2 else [norms, others[:3], others[3:]]
        return [{"params": [model.get_parameter(n) for n in one]} for one in divided]

    model, _, _ = make()
    optimizer = torch.optim.AdamW(groups(model, 2), lr=1e-3)
    optimizer.param_groups[0]["weight_decay"] = 0.0
    optimizer.param_groups[1]["lr"] = 5e-4
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    step(model, optimizer, scheduler)
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(1, model=model, optimizer=optimizer, scheduler=scheduler, asynchronous=False)

    other, _, _ = make(seed=2)
    optimizer = torch.optim.AdamW(groups(other, 3), lr=1.0, weight_decay=0.5)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    checkpointer.load(model=other, optimizer=optimizer, scheduler=scheduler)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.0, 0.01, 0.01]
    assert scheduler.base_lrs == [1e-3, 5e-4, 5e-4] and scheduler.get_last_lr() == [5e-4, 2.5e-4, 2.5e-4]
    one_group = torch.optim.AdamW(other.parameters())
    with pytest.raises(
        CheckpointError, match="group 0 holds parameters that were saved with different .*weight_decay"
    ):
        checkpointer.load(model=other, optimizer=one_group)


def stop_training(parameter, optimizer) -> None:
    group = optimizer.param_groups[0]
    group["params"] = [other for other in group["params"] if other is not parameter]


def test_parameters_that_were_not_trained_before_are_told(tmp_path):
    model, optimizer, scheduler = make()
    stop_training(model.lm_head.weight, optimizer)
    step(model, optimizer, scheduler)
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(1, model=model, optimizer=optimizer, asynchronous=False)
    all_of_it = make()
    with pytest.warns(
        UserWarning, match=r"did not train 1 parameters that are trained now: lm_head.weight\. Their"
    ) as told:
        checkpointer.load(model=all_of_it[0], optimizer=all_of_it[1])
    assert [warning.filename for warning in told if "did not train" in str(warning.message)] == [__file__]
    assert not all_of_it[1].state[all_of_it[0].lm_head.weight]
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "The run of")
        checkpointer.load(model=model, optimizer=optimizer)


def test_saved_numbers_of_a_parameter_that_is_not_trained_are_refused_as_tensors_are(tmp_path):
    model, optimizer, _ = make()
    optimizer.state[model.lm_head.weight]["updates"] = 3
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(1, model=model, optimizer=optimizer, asynchronous=False)
    checkpointer.load(model=model, optimizer=optimizer)
    assert optimizer.state[model.lm_head.weight] == {"updates": 3}
    stop_training(model.lm_head.weight, optimizer)
    with pytest.raises(
        CheckpointError,
        match=r"lm_head.weight has a saved updates, but this optimizer does not train it\.\nTo fix: train",
    ):
        checkpointer.load(model=model, optimizer=optimizer)


FULL_DISK = """
import resource, signal, sys
sys.path.insert(0, {tests!r})
import test_train_state as tests
from patchgen.runtime.checkpoint import CheckpointError, Checkpointer
model, optimizer, scheduler = tests.make()
tests.step(model, optimizer, scheduler)
checkpointer = Checkpointer(sys.argv[1])
checkpointer.save(1, model=model, optimizer=optimizer)
checkpointer.wait()
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))
checkpointer.save(2, model=model, optimizer=optimizer)
try:
    checkpointer.wait()
except CheckpointError as error:
    print(error)
else:
    raise SystemExit("a full disk was not noticed")
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
assert checkpointer.complete_steps() == [1]
assert checkpointer.load(model=model, optimizer=optimizer)["step"] == 1
checkpointer.save(3, model=model, optimizer=optimizer, asynchronous=False)
assert checkpointer.complete_steps() == [1, 3]
"""


def test_a_disk_that_takes_no_more(tmp_path):
    """A limit on the size of files stands for the full disk; the save after it, with room again, works."""
    script = FULL_DISK.format(tests=os.path.dirname(__file__))
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script, str(tmp_path)], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert f"Step 2 could not be saved in {tmp_path}" in done.stdout
    assert "GB free there" in done.stdout and "earlier checkpoints are unchanged" in done.stdout
    assert "too large" in done.stdout


def test_the_manifest_says_what_is_there(tmp_path):
    saved_twice(tmp_path)
    fields = json.loads((tmp_path / "step-00000002" / "checkpoint.json").read_text())
    assert (fields["step"], fields["world"], fields["model_class"]) == (2, 1, "Qwen3MoeForCausalLM")
    assert {"config.json", "shared.pt", "rank-00000.pt", ".metadata"} < set(fields["files"])


def test_keep_is_checked():
    with pytest.raises(ValueError, match="keep must be at least 1, not 0"):
        Checkpointer("anywhere", keep=0)
