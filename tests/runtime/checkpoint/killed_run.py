"""A small run that trains a generated model, saves as it goes, and may be killed at any moment.

The run is started in fresh processes that have torch loaded already; `losses.jsonl` gets a line per step and rank 0.
Nothing in it is made to fit the checkpoint: the data position and the generators are part of what must come back.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import tempfile
import time
from pathlib import Path

SAVE_EVERY, STEPS, ROWS, LENGTH, VOCABULARY = 2, 12, 4, 16, 64
PRELOADED = [
    "torch.distributed.fsdp",
    "patchgen.runtime.checkpoint",
    "patchgen.generated_models.qwen3_moe.modeling_qwen3_moe",
]
CONFIG = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64,
    "use_cache": False, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
}  # fmt: skip


class Rows:
    """Rows in an order of their own; the position is their only state."""

    def __init__(self) -> None:
        self.position = 0

    def next(self):
        import torch

        generator = torch.Generator().manual_seed(1000 + self.position)
        self.position += 1
        return torch.randint(0, VOCABULARY, (ROWS, LENGTH), generator=generator)


def train(rank: int, world: int, store: str, directory: str) -> None:
    """Trains to the last step from wherever the directory's newest checkpoint is."""
    import torch
    import torch.distributed as dist
    from transformers import Qwen3MoeConfig

    from patchgen.runtime import attention, parallel, registry
    from patchgen.runtime.checkpoint import Checkpointer
    from patchgen.runtime.parallel import ParallelConfig, batch, gloo_groups, loss, sharding
    from patchgen.runtime.parallel.state import ParallelState

    torch.set_num_threads(1)
    attention.register()
    gloo_groups.use_one_worker()
    dist.init_process_group("gloo", store=dist.FileStore(store, world), rank=rank, world_size=world)
    state = ParallelState.create(ParallelConfig.for_world(world, ep=world), "cpu")
    torch.manual_seed(0)
    model = (
        registry.find_model("qwen3_moe")
        .load()
        .Qwen3MoeForCausalLM._from_config(Qwen3MoeConfig(**CONFIG), attn_implementation="patchgen_eager")
    )
    sharding.shard_model(model.train(), state)
    optimizer = torch.optim.AdamW(sharding.optimizer_groups(model), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    rows = Rows()
    torch.manual_seed(100 + rank)
    checkpointer = Checkpointer(Path(directory) / "checkpoints", keep=2)
    first = 0
    if dist_latest(checkpointer, rank) is not None:
        saved = checkpointer.load(model=model, optimizer=optimizer, scheduler=scheduler)
        first, rows.position = saved["step"], saved["shared"]["rows"]["position"]
        assert saved["rank"] == {"own": rank}
    for step in range(first + 1, STEPS + 1):
        ids = rows.next().chunk(world)[rank]
        ids = ids.masked_fill(torch.rand(ids.shape) < 0.1, 0)  # noise from the rank's generator
        inputs = batch.slice_batch({"input_ids": ids, "labels": ids.clone()}, sp=1, sp_rank=0)
        items = loss.count_items([inputs], "cpu")
        with parallel.using(state), loss.step(items):
            share = model(**inputs, num_items_in_batch=items).loss
            share.backward()
        total = share.detach().clone()
        dist.all_reduce(total)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        if rank == 0:
            with (Path(directory) / "losses.jsonl").open("a") as log:
                log.write(json.dumps({"step": step, "loss": float(total)}) + "\n")
        if step % SAVE_EVERY == 0:
            extra = {"shared": {"rows": {"position": rows.position}}, "rank": {"own": rank}}
            checkpointer.save(step, model=model, optimizer=optimizer, scheduler=scheduler, extra_state=extra)
    checkpointer.wait()
    os._exit(0)  # without the wait for threads that a library may have left


def dist_latest(checkpointer, rank: int):
    """What rank 0 finds."""
    import torch.distributed as dist

    found = [checkpointer.latest() if rank == 0 else None]
    dist.broadcast_object_list(found, src=0)
    return found[0]


class Run:
    """One attempt: the processes of all ranks."""

    def __init__(self, directory: Path, world: int) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        self.directory = directory
        directory.mkdir(parents=True, exist_ok=True)
        store = Path(tempfile.mkdtemp(prefix="patchgen-killed-")) / "store"
        self.processes = [
            context.Process(target=train, args=(rank, world, str(store), str(directory)), daemon=True)
            for rank in range(world)
        ]
        for process in self.processes:
            process.start()

    def is_running(self) -> bool:
        return any(process.exitcode is None for process in self.processes)

    def is_saving(self) -> bool:
        return any((self.directory / "checkpoints").glob(".step-*.partial"))

    def kill(self) -> bool:
        """Kills all ranks; whether any still ran."""
        running = self.is_running()
        for process in self.processes:
            if process.exitcode is None:
                os.kill(process.pid, signal.SIGKILL)
        for process in self.processes:
            process.join()
        return running

    def finish(self, timeout: float = 180.0) -> None:
        """Waits for the end; raises if a rank failed."""
        deadline = time.monotonic() + timeout
        for process in self.processes:
            process.join(max(0.1, deadline - time.monotonic()))
        codes = [process.exitcode for process in self.processes]
        if codes != [0] * len(codes):
            self.kill()
            raise AssertionError(f"the run ended with {codes}")


def losses(directory: Path) -> dict[int, set[float]]:
    """Every loss that was ever logged for a step, by any attempt."""
    found: dict[int, set[float]] = {}
    for line in (directory / "losses.jsonl").read_text().splitlines():
        entry = json.loads(line)
        found.setdefault(entry["step"], set()).add(entry["loss"])
    return found
