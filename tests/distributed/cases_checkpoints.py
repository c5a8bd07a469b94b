"""What each rank does in the tests of checkpoints; see test_checkpoints.py."""

from __future__ import annotations

import copy
import itertools
import pathlib
import resource
import time

import cases_models
import cases_sequence
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from transformers import AutoConfig

from patchgen.runtime import attention, parallel, registry
from patchgen.runtime.checkpoint import (
    Checkpointer,
    CheckpointError,
    export_pretrained,
    load_pretrained,
    stream_weights,
)
from patchgen.runtime.checkpoint.placement import local_tensor, shard_like
from patchgen.runtime.parallel import loss, sharding, tables
from patchgen.runtime.train.model import find_head_and_config
from patchgen.runtime.verify.small_config import small_config


def generated_class(head: str, file: str):
    """The head of a generated modeling file."""
    return getattr(registry.import_file(pathlib.Path(file)), head)


def meta_model(head: str, file: str):
    """A generated class of a small config, on the meta device."""
    cls = generated_class(head, file)
    config = copy.deepcopy(small_config(cls.config_class).config)
    with torch.device("meta"):
        return cls._from_config(config, attn_implementation="eager", dtype=torch.float32)


def round_trip(head: str, file: str, source: str, target: str, ep: int) -> tuple[int, int]:
    """Loads a checkpoint into a sharded model and exports it; returns the bytes read and those of this rank's parts."""
    model = meta_model(head, file)
    plan = sharding.expert_paths(model)
    counts = {model.get_parameter(path).shape[0] for path in plan}
    fits = plan and all(count % ep == 0 for count in counts)
    state = cases_sequence.state_of(ep=ep if fits else 1)
    sharding.shard_model(model, state)
    report = load_pretrained(model, source)
    parts = {
        tensor.data_ptr(): tensor.numel() * tensor.element_size()
        for tensor in (t.to_local() if hasattr(t, "to_local") else t for t in model.state_dict().values())
    }
    export_pretrained(model, target, source=source, max_file=100_000)
    return report.num_bytes, sum(parts.values())


def grown_export(source: str, target: str, vocab_size: int, new_rows: str, layout: dict) -> tuple[int, int]:
    """Loads a checkpoint into a sharded model with a larger vocabulary, and exports it; returns the bytes read and those of this
    rank's parts."""
    config = AutoConfig.from_pretrained(source)
    config.vocab_size = vocab_size
    head, config = find_head_and_config(config)
    with torch.device("meta"):
        model = head._from_config(config, attn_implementation="eager", dtype=torch.float32)
    sharding.shard_model(model, cases_sequence.state_of(**layout))
    report = load_pretrained(model, source, new_rows=new_rows, seed=5)
    parts = {local.data_ptr(): local.nbytes for local in map(local_tensor, model.state_dict().values())}
    export_pretrained(model, target, source=source)
    return report.num_bytes, sum(parts.values())


def misplaced_parts(name: str, **layout: int) -> list[str]:
    """The parameters of which this rank holds another part than `shard_like` cuts out of the full tensor."""
    model = cases_models.build(name, generated=True, attention_name="eager")
    full = {path: parameter.detach().clone() for path, parameter in model.named_parameters()}
    sharding.shard_model(model, cases_sequence.state_of(**layout))
    return [
        path
        for path, parameter in model.named_parameters()
        if isinstance(parameter, DTensor) and not torch.equal(shard_like(full[path], parameter), parameter.to_local())
    ]


def part_of_a_whole(source: str, target: str, ep: int) -> None:
    """Loads the part of a checkpoint that trains into a sharded model, adds one to every parameter, and exports the whole."""
    head, config = find_head_and_config(AutoConfig.from_pretrained(source))
    with torch.device("meta"):
        model = head._from_config(config, attn_implementation="eager", dtype=torch.float32)
    sharding.shard_model(model, cases_sequence.state_of(ep=ep))
    load_pretrained(model, source)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)
    export_pretrained(model, target, max_file=300_000)


def load_fails(head: str, file: str, source: str) -> str:
    """The error of this rank where a checkpoint cannot be loaded; `{rank}` in `source` becomes its number."""
    model = meta_model(head, file)
    sharding.shard_model(model, cases_sequence.state_of())
    try:
        load_pretrained(model, source.format(rank=torch.distributed.get_rank()))
    except CheckpointError as error:
        return str(error)
    return ""


def export_fails(head: str, file: str, source: str, target: str) -> str:
    """The error of this rank where no file can be written."""
    model = meta_model(head, file)
    sharding.shard_model(model, cases_sequence.state_of())
    load_pretrained(model, source)
    try:
        export_pretrained(model, target)
    except CheckpointError as error:
        return str(error)
    return ""


def too_large_for_float16(head: str, file: str, source: str, target: str) -> list[str]:
    """The errors of this rank from an export and a stream, where the last rank has a value that fp16 cannot represent."""
    model = meta_model(head, file)
    sharding.shard_model(model, cases_sequence.state_of())
    load_pretrained(model, source)
    if dist.get_rank() == dist.get_world_size() - 1:
        with torch.no_grad():
            local_tensor(model.get_input_embeddings().weight)[-1, 0] = -1e6
    texts = []
    for write in (
        lambda: export_pretrained(model, target, dtype=torch.float16),
        lambda: dict(stream_weights(model, dtype=torch.float16)),
    ):
        try:
            write()
        except CheckpointError as error:
            texts.append(str(error))
    return texts


def export_fails_midway(head: str, file: str, source: str, target: str, rank: int, what: str) -> tuple[str, float]:
    """The error of this rank and the seconds until it came, where one rank fails in the middle of an export.

    Args:
        what: "disk": the rank's files reach a size limit of the system; "tensor": it fails to provide its part of a tensor.
    """
    from patchgen.runtime.checkpoint import export

    model = meta_model(head, file)
    sharding.shard_model(model, cases_sequence.state_of())
    load_pretrained(model, source)
    fails = rank == dist.get_rank()
    limits, real = resource.getrlimit(resource.RLIMIT_FSIZE), export.narrow_to
    calls = itertools.count()

    def broken(*args):
        if next(calls) == 20:
            raise MemoryError("no memory for a part")
        return real(*args)

    if fails and what == "disk":
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
    elif fails:
        export.narrow_to = broken
    text, started = "", time.monotonic()
    try:
        export_pretrained(model, target, max_file=40_000)
    except CheckpointError as error:
        text = str(error)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        export.narrow_to = real
    return text, time.monotonic() - started


def export_peak(head: str, file: str, target: str) -> tuple[int, int]:
    """The most bytes that an export adds to this rank's memory, and those of the largest tensor, the embeddings."""
    cls = generated_class(head, file)
    config = cls.config_class(
        vocab_size=65536, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=64, num_experts=64, num_experts_per_tok=2, moe_intermediate_size=64,
    )  # fmt: skip
    with torch.device("meta"):
        model = cls._from_config(config, attn_implementation="eager", dtype=torch.float32)
    sharding.shard_model(model, cases_sequence.state_of(ep=2))
    sharding.materialise(model, "cpu")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(dist.get_rank())
    export_pretrained(model, target, max_file=40_000_000)  # a first call also allocates what stays

    def kilobytes(name: str) -> int:
        line = next(
            line for line in pathlib.Path("/proc/self/status").read_text().splitlines() if line.startswith(name)
        )
        return int(line.split()[1])

    pathlib.Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before = kilobytes("VmRSS")
    export_pretrained(model, target, max_file=40_000_000)
    return (kilobytes("VmHWM") - before) * 1024, config.vocab_size * config.hidden_size * 4


def initialised_parts(head: str, file: str, source: str) -> torch.Tensor:
    """The weight of a head that the checkpoint lacks, as initialised, gathered."""
    model = meta_model(head, file)
    sharding.shard_model(model, cases_sequence.state_of())
    load_pretrained(model, source, allow_missing=["lm_head.*"])
    return model.lm_head.weight.detach().full_tensor()


def train(
    name: str,
    directory: str,
    *,
    steps: int,
    save_at: int = 0,
    resume: bool = False,
    shard_tables_above: int | None = None,
    **layout,
) -> tuple[list[float], int]:
    """Losses of a run, and its first step; with `resume` from the newest checkpoint, built on the meta device as users do."""
    attention.register()
    state = cases_sequence.state_of(**layout)
    model = cases_models.build(name, generated=True, attention_name="patchgen_eager")
    if resume:
        model = cases_models.on_meta(model)
    sharding.shard_model(model, state, options=sharding.ShardingOptions(shard_tables_above=shard_tables_above))
    assert bool(tables.of_model(model)) == (shard_tables_above is not None and dist.get_world_size() > 1)
    if resume:
        sharding.materialise(model, "cpu")
    optimizer = torch.optim.AdamW(sharding.optimizer_groups(model), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    checkpointer = Checkpointer(directory)
    first = 0
    if resume:
        saved = checkpointer.load(model=model, optimizer=optimizer, scheduler=scheduler)
        first = saved["shared"]["next"]
        assert (saved["rank"] is None) == (saved["world"] != dist.get_world_size())
        assert [one["rank"] for one in saved["ranks"]] == list(range(saved["world"]))
    losses = []
    for step in range(first, steps):
        inputs = cases_models.slice_of_step(step, False, state, 0, 1)
        items = loss.count_items([inputs], "cpu")
        with parallel.using(state), loss.step(items):
            share = model(**inputs, num_items_in_batch=items, use_cache=False).loss
            share.backward()
        total = share.detach().clone()
        dist.all_reduce(total)
        losses.append(float(total))
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        if step + 1 == save_at:
            extra = {"shared": {"next": step + 1}, "rank": {"rank": dist.get_rank()}}
            checkpointer.save(step + 1, model=model, optimizer=optimizer, scheduler=scheduler, extra_state=extra)
    checkpointer.wait()
    return losses, first


def one_rank_cannot_write(name: str, directory: str, rank_that_fails: int) -> str:
    """A save in which one rank's file cannot be written: every rank gets the error, and the next save works."""
    from patchgen.runtime.checkpoint import train_state

    attention.register()
    model = cases_models.build(name, generated=True, attention_name="patchgen_eager")
    sharding.shard_model(model, cases_sequence.state_of())
    checkpointer = Checkpointer(directory)
    checkpointer.save(1, model=model)
    checkpointer.wait()
    write, rank = train_state.write_file, dist.get_rank()

    def full(file: pathlib.Path, data: bytes) -> None:
        if rank == rank_that_fails and file.name.startswith("rank-"):
            raise OSError(28, "No space left on device", str(file))
        write(file, data)

    train_state.write_file = full
    try:
        checkpointer.save(2, model=model)
        checkpointer.wait()
    except CheckpointError as error:
        text = str(error)
    else:
        text = ""
    finally:
        train_state.write_file = write
    assert checkpointer.complete_steps() == [1]
    checkpointer.save(3, model=model)
    checkpointer.wait()
    assert checkpointer.complete_steps() == [1, 3]
    return text
