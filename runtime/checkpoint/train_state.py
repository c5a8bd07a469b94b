"""The state of a training run on disk: saved in the background, atomically, and resumed on any number of ranks.

    checkpointer = Checkpointer("runs/one/checkpoints", keep=3)
    checkpointer.save(step, model=model, optimizer=optimizer, scheduler=scheduler, extra_state={"shared": {"row": 640}})
    ...
    state = checkpointer.load(model=model, optimizer=optimizer, scheduler=scheduler)    # the newest complete one

On disk, below the directory:

    .step-00000200.partial/     being written, or left by a crash: never loaded, removed by the next save
    .step-00000100.replaced/    an earlier save of the same step: loaded only if a crash left no step-00000100/
    step-00000100/              complete: renamed after all bytes were on disk
        checkpoint.json         step, ranks, model, origin of its weights; size and checksum of every other file
        config.json             the model, for `patchgen export`
        shared.pt               scheduler, optimizer options, `extra_state["shared"]`
        rank-00000.pt           random generators and `extra_state["rank"]` of a rank
        .metadata, *.distcp     tensors of model and optimizer, by torch's distributed checkpoint
"""

from __future__ import annotations

import datetime
import functools
import json
import shutil
import threading
import warnings
import zlib
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from patchgen.runtime import random_state
from patchgen.runtime.checkpoint import optimizer_state
from patchgen.runtime.checkpoint.errors import CheckpointError
from patchgen.runtime.checkpoint.layout import Origin, class_name
from patchgen.runtime.checkpoint.load import distinct_state
from patchgen.runtime.checkpoint.manifest import (
    FORMAT,
    MANIFEST,
    Manifest,
    check_folder,
    checksum,
    read_manifest,
    require_checksums,
)
from patchgen.runtime.checkpoint.model_files import config_files
from patchgen.runtime.checkpoint.placement import FAILURES, cause_of, rank_and_world_size, run_on_all_ranks
from patchgen.runtime.checkpoint.saved_steps import SavedSteps, folder_name, step_name
from patchgen.runtime.checkpoint.small_files import RankStates, free_space, rank_file, serialise, write_file
from patchgen.runtime.checkpoint.staging import Staged, Staging
from patchgen.runtime.checkpoint.tensor_index import IndexReader, read_index
from patchgen.runtime.checkpoint.writing import sync_folder
from patchgen.runtime.parallel.collectives import broadcast_object, gather_objects

if TYPE_CHECKING:
    from torch.optim import Optimizer
    from torch.optim.lr_scheduler import LRScheduler
    from transformers import PreTrainedModel

SHARED = "shared.pt"
MODEL, OPTIMIZER = "model/", "optimizer/"
warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable")  # expected with one process

TIMEOUT = datetime.timedelta(hours=2)
"""How long ranks wait for the slowest disk."""


class Checkpointer(SavedSteps):
    """Saves and loads the state of a run. Its construction, `save`, `wait` and `load` are collective.

    Attributes:
        directory: of the checkpoints, on storage that all ranks share.
        keep: how many complete checkpoints are kept: the newest.
        kept: steps that are kept besides, in the order of `keep_besides`, each until one that was named after it is saved.
    """

    def __init__(self, directory: str | Path, *, keep: int = 3) -> None:
        if keep < 1:
            raise ValueError(f"Checkpointer.keep must be at least 1, not {keep}.")
        super().__init__(directory)
        self.keep = keep
        self.kept: tuple[int, ...] = ()
        self._keeping = threading.Lock()  # around what saves in the background read and change of `kept`
        self._rank, self._world = rank_and_world_size()
        # Writing happens in a thread, so its collectives need a separate group, on the host.
        group = dist.new_group(backend="gloo", timeout=TIMEOUT) if dist.is_initialized() else None
        assert not isinstance(group, int), "a group of all ranks"
        self._group = group
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._staging = Staging()
        self._staged: Staged | None = None
        self._pending: Future | None = None
        self._hooked_optimizers: set[int] = set()

    def keep_besides(self, step: int) -> None:
        """Keeps the checkpoint of a step, saved or not yet, besides the newest ones; those kept before until it is there."""
        with self._keeping:
            is_saved = step in self.complete_steps()
            self.kept = (step,) if is_saved else (*(other for other in self.kept if other != step), step)

    # ------------------------------------------------------------------------------------------- save

    def save(
        self,
        step: int,
        *,
        model: nn.Module,
        optimizer: Optimizer | None = None,
        scheduler: LRScheduler | None = None,
        extra_state: dict | None = None,
        files: Mapping[str, str] | None = None,
        asynchronous: bool = True,
    ) -> None:
        """Saves the state after optimizer step `step`. Waits for an earlier save first.

        Args:
            model: sharded or not; its parameters and persistent buffers are saved.
            extra_state: `{"shared": {...}, "rank": {...}}` of plain values and tensors: what all ranks share (rank 0's is
                saved), and what belongs to this rank.
            files: further text files, by name, such as the recipe of the run; rank 0's are saved.
            asynchronous: return once the copy of the state has started, and write in the background. The next optimizer
                step waits for the copy on the device; nothing else may change parameters until then.

        Raises:
            CheckpointError: on every rank, if this save, or an asynchronous one before it, failed.
        """
        self.wait()

        def prepare() -> tuple[dict[str, Tensor], dict[str, bytes], Manifest]:
            tensors = {f"{MODEL}{name}": tensor for name, tensor in distinct_state(model).items()}
            shared: dict = {"step": step, "extra": (extra_state or {}).get("shared", {})}
            if optimizer is not None:
                state, others = optimizer_state.state_tensors(model, optimizer)
                tensors |= {f"{OPTIMIZER}{key}": tensor for key, tensor in state.items()}
                shared |= {"optimizer": others, "groups": optimizer_state.group_options(model, optimizer)}
            if scheduler is not None:
                shared["scheduler"] = scheduler.state_dict()
            rank_state = {"random": random_state.capture(), "extra": (extra_state or {}).get("rank", {})}
            small_files = {rank_file(self._rank): serialise(rank_state, "extra_state['rank']")}
            if self._rank == 0:
                small_files[SHARED] = serialise(
                    shared, "extra_state['shared'], the scheduler or the optimizer's options"
                )
                small_files |= _model_files(model) | {name: text.encode() for name, text in (files or {}).items()}
            if asynchronous:
                self._staged = self._staging.copy(tensors)
            manifest = Manifest(step, 0, self._world, class_name(model), *_model_type_and_origin(model), {})
            return tensors, small_files, manifest

        what_failed = f"Step {step} could not be saved in {self.directory}; earlier checkpoints are unchanged:"
        tensors, small_files, manifest = run_on_all_ranks(prepare, what_failed, self._group)
        if not asynchronous:
            self._write(tensors, small_files, manifest)
            return
        if optimizer is not None and id(optimizer) not in self._hooked_optimizers:
            optimizer.register_step_pre_hook(lambda *_: self._before_step())
            self._hooked_optimizers.add(id(optimizer))
        assert self._staged is not None, "`prepare` has started the copy"
        self._pending = self._executor.submit(self._write_staged, self._staged, small_files, manifest)

    def wait(self) -> None:
        """Waits until nothing is being written; raises the error of an asynchronous save."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def failure(self, seconds: float) -> BaseException | None:
        """The error of the save in the background, if it fails within `seconds`, for a run that is ending."""
        pending, self._pending = self._pending, None
        try:
            return pending.exception(seconds) if pending is not None else None
        except TimeoutError:
            return None

    @property
    def is_saving(self) -> bool:
        """Whether an asynchronous save is still being written."""
        return self._pending is not None and not self._pending.done()

    def _before_step(self) -> None:
        staged, self._staged = self._staged, None
        if staged is not None:
            staged.make_stream_wait()

    def _write_staged(self, staged: Staged, small_files: Mapping[str, bytes], manifest: Manifest) -> None:
        staged.wait()
        self._write(staged.tensors, small_files, manifest)

    def _write(self, tensors: Mapping[str, Tensor], small_files: Mapping[str, bytes], manifest: Manifest) -> None:
        """Writes everything to a temporary folder, then renames it; all ranks fail or none."""
        partial = self.directory / f".{folder_name(manifest.step)}.partial"
        self._run(lambda: self._make_partial_folder(partial) if self._rank == 0 else None, manifest.step)

        def write_small_files() -> None:
            for name, data in small_files.items():
                write_file(partial / name, data)

        self._run(write_small_files, manifest.step)

        def write_tensors() -> None:
            # With more threads, DCP loses the errors of all but one.
            writer = FileSystemWriter(partial, sync_files=True, thread_count=1)
            save(dict(tensors), storage_writer=writer, process_group=self._group, no_dist=self._group is None)

        self._run(write_tensors, manifest.step)
        own_checksums: dict[str, int] = {}

        def read_back() -> None:
            for file in partial.glob(f"__{self._rank}_*.distcp"):
                own_checksums[file.name] = checksum(file)

        self._run(read_back, manifest.step)
        own_checksums |= {name: zlib.crc32(data) for name, data in small_files.items()}
        checksums = {
            name: value for of_rank in gather_objects(own_checksums, self._group) for name, value in of_rank.items()
        }
        manifest = replace(manifest, checksums=checksums)
        self._run(lambda: self._commit(partial, manifest) if self._rank == 0 else None, manifest.step)

    def _make_partial_folder(self, partial: Path) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        for replaced in self.directory.glob(".step-*.replaced"):
            if not (final := self.directory / step_name(replaced)).exists():
                replaced.rename(final)  # a crash came between the two renames of `_commit`
        for leftover in self.directory.glob(".step-*"):
            shutil.rmtree(leftover)
        partial.mkdir()

    def _commit(self, partial: Path, manifest: Manifest) -> None:
        files = {path.name: path.stat().st_size for path in sorted(partial.iterdir())}
        checksums = {
            name: manifest.checksums[name] if name in manifest.checksums else checksum(partial / name)
            for name in files
        }
        serial = 1 + max(
            (other.serial for _, other, problem in self.checkpoints() if other and not problem), default=0
        )
        fields = {**vars(manifest), "serial": serial, "files": files, "checksums": checksums, "format": FORMAT}
        write_file(partial / MANIFEST, json.dumps(fields, indent=1).encode())
        sync_folder(partial)
        final = self.directory / folder_name(manifest.step)
        if final.exists():  # a run that was resumed before this step saves it again
            final.rename(self.directory / f".{final.name}.replaced")
        with self._keeping:
            partial.rename(final)
            if manifest.step in self.kept:
                self.kept = self.kept[self.kept.index(manifest.step) :]  # one named meanwhile is better
            kept = self.kept
        sync_folder(self.directory)
        for old in (step for step in self.complete_steps()[: -self.keep] if step not in kept):
            # Renamed first, so that it does not look like a damaged checkpoint while it is deleted.
            doomed = self.directory / f".{folder_name(old)}.old"
            (self.directory / folder_name(old)).rename(doomed)
            shutil.rmtree(doomed)
        for leftover in self.directory.glob(".step-*.replaced"):
            shutil.rmtree(leftover)

    def _run(self, work: Callable[[], None], step: int) -> None:
        """Runs `work` on every rank; if it fails on any, all raise an error with the space that is then free."""
        try:
            run_on_all_ranks(work, "", self._group)
        except CheckpointError as error:
            raise CheckpointError(
                f"Step {step} could not be saved in {self.directory} ({free_space(self.directory)}); earlier checkpoints "
                "are unchanged:",
                error.problems or [str(error)],
            ) from error

    # ------------------------------------------------------------------------------------------- load

    def load(
        self,
        step: int | None = None,
        *,
        model: nn.Module,
        optimizer: Optimizer | None = None,
        scheduler: LRScheduler | None = None,
    ) -> dict:
        """Loads a saved state into model, optimizer, scheduler and the random generators, on any number of ranks.

        Args:
            step: which one; None: the newest complete one, skipping with a warning those whose content has changed since
                they were saved.
            model: sharded or not.

        Returns:
            step: the step that was saved.
            shared: `extra_state["shared"]`.
            rank: `extra_state["rank"]` of this rank; None if the run had another number of ranks.
            ranks: `extra_state["rank"]` of every rank of the saved run, each read on access.
            world: the number of ranks that saved.

        Raises:
            CheckpointError: there is none, or it is incomplete, damaged or of another model.
        """
        self.wait()
        verify, step = step is not None, self._newest_undamaged() if step is None else step
        folder = self.folder_of(step)
        what_failed = f"{folder} cannot be loaded; nothing was changed in the model:"
        prepare = functools.partial(self._prepare, step, model, optimizer, scheduler, verify=verify)
        manifest, shared, tensors, state = run_on_all_ranks(prepare, what_failed, self._group)
        with torch.no_grad():
            try:
                reader = IndexReader(folder)
                load(tensors, storage_reader=reader, process_group=self._group, no_dist=self._group is None)
            except FAILURES as error:
                raise CheckpointError(
                    f"{folder} cannot be read; the model is not usable: {cause_of(error)}",
                    advice=self.advice_on_others(step),
                ) from error
        ranks = RankStates(folder, manifest.world)

        def restore() -> tuple[dict | None, list[str]]:
            untrained = []
            if optimizer is not None:
                untrained = optimizer_state.restore(model, optimizer, state, shared["optimizer"], shared["groups"])
            if scheduler is not None:
                scheduler.load_state_dict(optimizer_state.scheduler_state(shared["scheduler"], scheduler.optimizer))
            if self._rank < manifest.world:
                random_state.restore(ranks.state_of(self._rank)["random"])
            else:
                random_state.derive(ranks.state_of(0)["random"], self._rank)
            return ranks[self._rank] if manifest.world == self._world else None, untrained

        what = f"{folder} cannot be loaded; the model is not usable:"
        rank_state, untrained = run_on_all_ranks(restore, what, self._group)
        self._warn_of_untrained(untrained, folder)
        if manifest.origin is not None:
            model.checkpoint_origin = Origin.from_json(manifest.origin)  # pyright: ignore[reportArgumentType]
        return {"step": step, "shared": shared["extra"], "rank": rank_state, "ranks": ranks, "world": manifest.world}

    def _warn_of_untrained(self, parameters: list[str], folder: Path) -> None:
        """Warns the caller of `load` about parameters that the saved run did not train."""
        if parameters and self._rank == 0:
            warnings.warn(
                f"The run of {folder} did not train {len(parameters)} parameters that are trained now: "
                f"{', '.join(parameters[:3])}{', ...' if parameters[3:] else ''}. Their optimizer state starts empty.",
                stacklevel=3,
            )

    def _prepare(
        self,
        step: int,
        model: nn.Module,
        optimizer: Optimizer | None,
        scheduler: LRScheduler | None,
        *,
        verify: bool,
    ) -> tuple[Manifest, dict, dict[str, Tensor], dict[str, Tensor]]:
        """The manifest, the shared state, the tensors to load, and those of them that belong to the optimizer.

        Raises:
            CheckpointError: the checkpoint is incomplete, or does not match.
        """
        folder = self.folder_of(step)
        manifest, problem = check_folder(folder)
        if manifest is None or problem:
            raise CheckpointError(
                f"{folder} is not a complete checkpoint: {problem}.", advice=self.advice_on_others(step)
            )
        if manifest.model_class != class_name(model):
            raise CheckpointError(
                f"{folder} is of {manifest.model_class} ({manifest.model_type}), not of {class_name(model)}."
            )
        if verify:
            self._require_undamaged(step)
        shared = torch.load(folder / SHARED, weights_only=True, map_location="cpu")
        saved = read_index(folder).state_dict_metadata
        tensors = distinct_state(model)
        _require_same_tensors(folder, tensors, saved)
        targets = {f"{MODEL}{name}": tensor for name, tensor in tensors.items()}
        state = {}
        if optimizer is not None:
            if "groups" not in shared:
                raise CheckpointError(f"{folder} was saved without an optimizer.")
            of_optimizer = {k.removeprefix(OPTIMIZER): v for k, v in saved.items() if k.startswith(OPTIMIZER)}
            stored = {
                k: v for k, v in of_optimizer.items() if isinstance(v, TensorStorageMetadata)
            }  # as `read_index` ensures
            state = optimizer_state.empty_state(model, optimizer, stored, shared["optimizer"])
            targets |= {f"{OPTIMIZER}{key}": tensor for key, tensor in state.items()}
        if scheduler is not None and "scheduler" not in shared:
            raise CheckpointError(f"{folder} was saved without a scheduler.")
        return manifest, shared, targets, state

    def _newest_undamaged(self) -> int:
        """The newest complete checkpoint whose content is unchanged; warns about newer ones that are damaged.

        Rank 0 lists the folder for all, in case ranks see it differently.
        """
        what = f"{self.directory} cannot be searched for checkpoints:"
        steps = broadcast_object(
            run_on_all_ranks(self.newest_first if self._rank == 0 else list, what, self._group), 0, self._group
        )
        damaged: list[str] = []
        for step in steps:
            try:
                run_on_all_ranks(
                    lambda step=step: self._require_undamaged(step), f"step {step} is damaged:", self._group
                )
            except CheckpointError as error:
                damaged += [f"{folder_name(step)}: {problem}" for problem in error.problems]
                continue
            if damaged and self._rank == 0:
                listed = "\n".join(f"  {problem}" for problem in damaged)
                warnings.warn(
                    f"{self.directory} holds damaged checkpoints; {folder_name(step)} is loaded:\n{listed}",
                    stacklevel=3,
                )
            return step
        raise CheckpointError(f"{self.directory} holds no complete checkpoint{':' if damaged else '.'}", damaged)

    def _require_undamaged(self, step: int) -> None:
        """Compares this rank's share of a checkpoint's files with their checksums; each file is read by one rank."""
        folder = self.folder_of(step)
        manifest = read_manifest(folder)
        own_files = sorted(manifest.checksums)[self._rank :: self._world]
        require_checksums(folder, manifest, own_files, self.advice_on_others(step))


def _require_same_tensors(folder: Path, tensors: Mapping[str, Tensor], saved: Mapping) -> None:
    stored = {key.removeprefix(MODEL): value for key, value in saved.items() if key.startswith(MODEL)}
    problems = [f"missing: {name} {list(tensors[name].shape)}" for name in tensors if name not in stored]
    problems += [f"unexpected: {name} {list(stored[name].size)}" for name in stored if name not in tensors]
    problems += [
        f"{name} is {list(tensor.shape)} in the model, {list(stored[name].size)} in the checkpoint"
        for name, tensor in tensors.items()
        if name in stored and tensor.shape != stored[name].size
    ]
    if problems:
        raise CheckpointError(f"{folder} does not fit the model:", problems)


def _model_type_and_origin(model: nn.Module) -> tuple[str, dict | None]:
    config = getattr(model, "config", None)
    origin = getattr(model, "checkpoint_origin", None)
    return getattr(config, "model_type", ""), origin.to_json() if origin is not None else None


def _model_files(model: nn.Module) -> dict[str, bytes]:
    """The config files, which an export needs."""
    if not hasattr(model, "config"):
        return {}
    pretrained = cast("PreTrainedModel", model)  # a model with a config is one
    return {name: text.encode() for name, text in config_files(pretrained).items()}
