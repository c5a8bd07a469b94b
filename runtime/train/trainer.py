"""The training loop, and what happens around a step.

trainer = Trainer(recipe, device)         # on every rank, after torch.distributed is up
summary = trainer.run()

feed.py gives the micro-batches      take_step() is forward, backward, clip, update      listeners see each record
"""

from __future__ import annotations

import copy
import math
import random
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy
import torch
import torch.distributed as dist
from torch import Tensor

from patchgen.kernels import choices
from patchgen.runtime import parallel
from patchgen.runtime.data import DataConfig, DataError, Loader
from patchgen.runtime.data.agreement import counters_of_all_ranks, together
from patchgen.runtime.objectives import learning
from patchgen.runtime.objectives.batch import inputs_of
from patchgen.runtime.parallel import gradients, loss, peer_memory, report, sharding, watch
from patchgen.runtime.parallel.collectives import all_reduce, broadcast_object
from patchgen.runtime.parallel.expert_load import ExpertLoad
from patchgen.runtime.parallel.state import ParallelState
from patchgen.runtime.train import first_loss, flops, lora, objects, optimizers, run_lock, run_log, setup
from patchgen.runtime.train import model as models
from patchgen.runtime.train.captured import CapturedStep
from patchgen.runtime.train.feed import Batches, End, Feed, StepBatches, micro_batches_per_step
from patchgen.runtime.train.recipe import Recipe, to_dict
from patchgen.runtime.train.records import Evaluation, Listener, RunStart, StepRecord, Summary, TrainingStopped
from patchgen.runtime.train.run_checkpoints import RunCheckpoints
from patchgen.runtime.train.signals import StopRequest
from patchgen.runtime.train.sources import Sources


class Trainer:
    """One run on this rank. Parts are attributes: replace one before `run`.

    Attributes:
        model, optimizer, loader, state, listeners: as built from the recipe.
        step: optimizer steps taken.
        report: what runs where, as text.
    """

    def __init__(self, recipe: Recipe, device: torch.device, listeners: tuple[Listener, ...] = ()) -> None:
        self.recipe, self.device, self.listeners = recipe, device, listeners
        # First: ranks that differ in their layout would wait for groups that nobody joins.
        setup.require_same_recipe(recipe)
        layout = models.parallel_config(recipe.parallel, dist.get_world_size())
        train = recipe.train
        self.num_micro_batches = micro_batches_per_step(
            train.batches_per_step, layout.num_batches, router_loss=train.router_loss
        )
        self.state = ParallelState.create(
            layout,
            device.type,
            expert_capacity=recipe.parallel.expert_capacity,
            head_groups=recipe.parallel.head_groups,
            router_loss=train.router_loss,
            expert_exchange=recipe.parallel.expert_exchange,
        )
        seed(recipe, self.state)
        setup.require_shared(recipe.directory)
        self.parts, self.loader, self.eval_loader = together(self.open_data)
        if self.eval_loader is not None:
            self.eval_start = copy.deepcopy(self.eval_loader.state_dict())
        self.model = models.build_model(recipe, self.state, device)
        self.adapted = (
            lora.add_adapters(
                self.model,
                recipe.lora,
                self.state,
                source=recipe.model.source,
                seed=recipe.train.seed,
                options=models.sharding_options(recipe.parallel, device),
            )
            if recipe.lora is not None
            else None
        )
        self.seams = models.configure_seams(recipe, self.model)
        self.report = models.check_model(recipe, self.model, self.state, self.seams)
        models.tell_padding(self.model, self.parts.tokenizer)
        self.learning = learning.build(recipe, self.model, self.state, device, self.adapted)
        self.sources, self.eval_sources = self.sources_of(recipe.data), self.sources_of(recipe.eval_data)
        self.cost = flops.model_cost(self.model)
        self.peak_tflops = recipe.log.peak_tflops or flops.peak_tflops(device)
        self.optimizer = optimizers.build(self.model, recipe.optim)
        self.captured = CapturedStep(self.model, self.state, device, self.micro_batch) if train.cuda_graph else None
        self.load = ExpertLoad(self.model) if recipe.log.expert_load and sharding.expert_paths(self.model) else None
        self.step, self.skipped, self.evaluated_step = 0, 0, 0

    def open_data(self) -> tuple[setup.DataParts, Loader, Loader | None]:
        """Tokenizer and processor, and the loaders: both now, for what is wrong with the evaluation's would else be told
        after hours."""
        recipe, parts = self.recipe, setup.data_parts(self.recipe)
        loader = setup.open_loader(recipe.data, parts, self.state)
        return parts, loader, setup.open_loader(recipe.eval_data, parts, self.state) if recipe.eval_data else None

    # ------------------------------------------------------------------------------------------ the loop

    def run(self) -> Summary:
        """Trains until the last step, the end of the data, or a request to stop; saves; returns what came of it."""
        recipe, steps = self.recipe, self.recipe.train.steps
        self.saved = RunCheckpoints(recipe, self.model, self.optimizer, self.loader)
        with ExitStack() as whole, ExitStack() as watched:
            whole.enter_context(run_lock.held(recipe.directory))
            whole.push(self.saved.tell_failed)
            for listener in self.listeners:
                whole.callback(listener.close)
            stop = whole.enter_context(StopRequest())
            self.refer(stop.requested)
            position = self.saved.resume()
            self.first_step = self.step = self.saved.saved_step
            if self.step >= steps and dist.get_rank() == 0:
                print(
                    f"Nothing to train: {recipe.directory} has {self.step} of {steps} steps. --fresh starts anew; raise "
                    "train.steps to go on.",
                    flush=True,
                )
            self.announce()
            choices.reset()  # what a proof in this process, or the reference of an objective, has taken
            # Not in the first step: kernels are compiled there, and nothing says yet how long a silence is usual.
            stop_requested = lambda: stop.reached() and self.step > self.first_step  # noqa: E731
            watched.enter_context(
                watch.Watch(self.model, timeout=recipe.parallel.stall_timeout, stop_requested=stop_requested)
            )
            watched.enter_context(parallel.using(self.state))
            profiler = watched.enter_context(setup.profiler(recipe))
            feed = self.feed(self.loader, self.num_micro_batches, stop.requested)
            upcoming: StepBatches | End = feed.next() if self.step < steps else End("steps")
            while isinstance(upcoming, StepBatches):
                started, batches = time.perf_counter(), upcoming
                share = self.forward_backward(batches)
                if self.step == 0 and self.learning.objective.is_models_own:
                    first_loss.require_plausible(share, self.model, recipe)
                # While the device works: the next batches, and what all ranks agree on for them.
                upcoming = feed.next() if self.step + 1 < steps else End("steps")
                norm, rate = self.update()
                self.step, position = self.step + 1, batches.position
                self.record(batches, share, norm, rate, time.perf_counter() - started)
                if self.step == self.first_step + 1:
                    objects.freeze_objects()
                    self.tell_choices()
                profiler.step()
                if recipe.checkpoint.every and self.step % recipe.checkpoint.every == 0 and self.step < steps:
                    self.saved.save(self.step, position, asynchronous=recipe.checkpoint.asynchronous)
                if recipe.train.eval_every and self.step % recipe.train.eval_every == 0:
                    self.evaluate()
            if (
                self.eval_loader is not None
                and upcoming.reason != "stop"
                and self.first_step < self.step != self.evaluated_step
            ):
                self.evaluate()
            watched.close()  # what is left is writing, which takes as long as it takes
            self.saved.settle()
            if self.saved.saved_step != self.step:
                self.saved.save(self.step, position, asynchronous=False)
            return self.finish(upcoming.reason)

    def feed(self, loader: Batches, num_micro_batches: int, should_stop: Callable[[], bool] = lambda: False) -> Feed:
        """The steps of a loader."""
        figures = self.eval_sources if loader is self.eval_loader else self.sources
        options = {"objective": self.learning.objective, "num_sources": len(figures.names) if figures else 0}
        return Feed(loader, self.state, num_micro_batches, self.cost, should_stop, **options)

    def sources_of(self, data: DataConfig | None) -> Sources | None:
        """What counts the sources of data apart; None: there are not several."""
        if data is None or len(data.sources) == 1:
            return None
        # A replayed step tells its losses to nobody.
        reads = self.learning.objective.is_models_own and not self.recipe.train.cuda_graph
        return Sources(data.source_names, self.state, self.device, reads_losses=reads)

    def refer(self, should_stop: Callable[[], bool] = lambda: False) -> None:
        """Before any training: what the objective asks the model as it is now about all that the run will read. Asked to
        stop, it keeps what it has, and the loop ends before its first step."""
        if self.learning.table is None:
            return
        train, start = self.recipe.train, copy.deepcopy(self.loader.state_dict())
        feeds = [(self.feed(self.loader, self.num_micro_batches, should_stop), train.steps)]
        if self.eval_loader is not None:
            count = micro_batches_per_step(train.eval_batches, self.state.config.num_batches)
            feeds.append((self.feed(self.eval_loader, 1, should_stop), count))
        with parallel.using(self.state):
            self.learning.fill_table(
                rows for feed, count in feeds for step in feed.steps(count) for rows in step.micro_batches
            )
        self.model.reshard()  # without a backward, the root stays gathered
        self.loader.load_state_dict(start)

    def forward_backward(self, batches: StepBatches) -> Tensor:
        """The gradients of one step; returns this rank's share of its loss, on the device."""
        items, tokens = max(1, batches.items), max(1, batches.real_tokens)
        if self.captured is not None:
            (rows,) = batches.micro_batches
            share = self.captured(inputs_of(rows), items, tokens)
            if self.captured.replayed == 1 and dist.get_rank() == 0:
                print(f"Steps are replayed as a CUDA graph from step {self.step + 1} on.", flush=True)
        else:
            share, count = torch.zeros((), device=self.device), torch.tensor(items, device=self.device)
            of = len(batches.micro_batches)
            for index, rows in enumerate(batches.micro_batches, start=1):
                sharding.reduce_gradients(self.model, is_last=index == of)
                inputs, objective = self.learning.prepare(rows)
                read = self.sources.reader(rows) if self.sources else None
                share += self.micro_batch(inputs, count, tokens, of, objective=objective, read_losses=read)
        if self.adapted is not None:
            lora.reduce_gradients(self.model)
        return share

    def micro_batch(
        self, inputs: Mapping[str, Any], items: Tensor, tokens: Tensor | int, of: int = 1, **options: Any
    ) -> Tensor:
        """The gradients of one of `of` micro-batches on the device, added to those there are; returns its share of the loss.

        Args:
            options: of `loss.step`.
        """
        with loss.step(items, of, num_tokens=tokens, **options):
            part = self.model(**inputs, num_items_in_batch=items, use_cache=False).loss
            part.backward()
        return part.detach()

    def update(self) -> tuple[float, float]:
        """Clips, and takes the step unless a gradient is not finite; returns the norm and the learning rate."""
        config = self.recipe.optim
        share = optimizers.factor(self.step, config, self.recipe.train.steps)
        rate = optimizers.set_learning_rate(self.optimizer, share)
        norm = gradients.clip(self.model, max_norm=config.max_grad_norm, optimizer=self.optimizer)
        if gradients.accept(self.model, norm, on_nonfinite=config.on_nonfinite):
            self.skipped = 0
            self.optimizer.step()
        else:
            self.skipped += 1
        self.optimizer.zero_grad(set_to_none=True)
        if self.skipped >= config.max_skipped:
            saved = (
                f"The last checkpoint is that of step {self.saved.saved_step}."
                if self.saved.saved_step
                else "No checkpoint was saved."
            )
            raise TrainingStopped(
                f"{self.skipped} steps in a row had gradients that are not finite, the last of them step "
                f"{self.step + 1}. {saved} Lower optim.lr, lengthen optim.warmup_steps, or look at the data of these steps."
            )
        return float(norm), rate

    @staticmethod
    def peak_memory() -> int:
        """Bytes of this rank's GPU, what other ranks read included."""
        return torch.cuda.max_memory_allocated() + peer_memory.shared_gpu_bytes()

    # ----------------------------------------------------------------------------------------- evaluation

    @torch.no_grad()
    def evaluate(self) -> Evaluation:
        """The mean loss per item over `eval_batches` packed batches, the same ones each time; without that of routers."""
        assert self.eval_loader is not None, "asked of runs that have evaluation data"
        self.eval_loader.load_state_dict(copy.deepcopy(self.eval_start))
        count = micro_batches_per_step(self.recipe.train.eval_batches, self.state.config.num_batches)
        feed = self.feed(self.eval_loader, 1)
        started, total, labels, num_items = time.perf_counter(), torch.zeros((), device=self.device), 0, 0
        counts = numpy.zeros((feed.num_sources, 2), dtype=numpy.int64)
        self.model.eval()
        for _ in range(count):
            batches = feed.next()
            if isinstance(batches, End):
                break
            items = torch.tensor(max(1, batches.items), device=self.device)
            inputs, objective = self.learning.prepare(batches.micro_batches[0])
            read = self.eval_sources.reader(batches.micro_batches[0]) if self.eval_sources else None
            with loss.step(items, router_loss=False, objective=objective, read_losses=read):
                total += self.model(**inputs, num_items_in_batch=items, use_cache=False).loss * items
            labels, num_items = labels + batches.labels, num_items + batches.items
            counts += numpy.array(batches.sources, dtype=numpy.int64).reshape(counts.shape)
        self.model.train()
        self.model.reshard()  # without a backward, the root stays gathered
        if not num_items:
            raise ValueError(f"The evaluation data hold no {self.learning.objective.per} (eval_data).")
        mean = float(all_reduce(total, operation="add up the evaluation loss")) / num_items
        of_sources = self.eval_sources.figures(counts.tolist()) if self.eval_sources else None
        seconds = time.perf_counter() - started
        result = Evaluation(step=self.step, loss=mean, labels=labels, seconds=seconds, sources=of_sources)
        self.evaluated_step = self.step
        for listener in self.listeners:
            listener.on_evaluation(result)
        return result

    # --------------------------------------------------------------------------------------------- the end

    def finish(self, reason: str) -> Summary:
        """Exports what was trained, unless the run was stopped before its end.

        Raises:
            DataError: the data ended before a single step: what would be exported is not trained.
        """
        if reason != "stop" and self.step == 0:
            raise DataError(
                "The data ended before the first step: nothing was trained, and nothing is exported. "
                f"What was read: {self.loader.counters.summary()}."
            )
        folder = None
        if reason != "stop" and self.recipe.checkpoint.export:
            folder = self.exported_before() if self.step == self.first_step else None
            if folder is None:
                folder = self.export()
            elif dist.get_rank() == 0:
                print(f"Nothing to export: {folder} has the model of step {self.step}.", flush=True)
        counters = self.loader.counters
        if self.loader.reads_a_share:
            counters = counters_of_all_ranks(counters, batch_index=self.state.batch_index)
        summary = Summary(
            steps=self.step,
            reason=reason,
            directory=str(self.recipe.directory),
            export=str(folder) if folder else None,
            data=counters.summary(),
        )
        for listener in self.listeners:
            listener.on_end(summary)
        return summary

    def export(self) -> Path:
        """Writes the model, or its adapters; every rank must call it."""
        if self.adapted is None or self.recipe.lora is None:  # which go together
            return setup.export(self.recipe, self.model, self.parts)
        lora.save(self.adapted, folder := self.recipe.directory / lora.ADAPTER)
        if not self.recipe.lora.merge:
            return folder
        lora.merge(self.adapted)
        return setup.export(self.recipe, self.model, self.parts)

    def exported_before(self) -> Path | None:
        """The whole export of this step that an earlier start left, as rank 0 sees it; every rank must call it."""
        found = None
        if dist.get_rank() == 0:
            before = run_log.read_summary(self.recipe.directory)
            wanted = lora.ADAPTER if self.recipe.lora is not None and not self.recipe.lora.merge else setup.EXPORT
            if before is not None and before["steps"] == self.step and Path(before["export"] or "").name == wanted:
                found = before["export"] if setup.is_whole(Path(before["export"])) else None
        found = broadcast_object(found)
        return Path(found) if found is not None else None

    # -------------------------------------------------------------------------------------------- records

    def announce(self) -> None:
        """Tells the listeners what is about to run."""
        start = RunStart(
            name=self.recipe.name,
            directory=str(self.recipe.directory),
            steps=self.recipe.train.steps,
            first_step=self.step,
            devices=dist.get_world_size(),
            device=setup.device_name(self.device),
            parameters=self.cost.parameters,
            active_parameters=self.cost.active,
            report=self.report,
            recipe=to_dict(self.recipe),
        )
        for listener in self.listeners:
            listener.on_start(start)

    def tell_choices(self) -> None:
        """Prints which kernels `auto` took for the shapes of the first step."""
        told = report.auto_choices()
        if told and dist.get_rank() == 0:
            print(f"after the first step, on rank 0:\n{told}", flush=True)

    def record(self, batches: StepBatches, share: Tensor, norm: float, rate: float, seconds: float) -> None:
        """Hands the figures of a step to the listeners. Every rank takes part in the sums."""
        total = float(all_reduce(share, operation="add up the loss"))
        devices = dist.get_world_size()
        tflops = batches.flops / seconds / devices / 1e12
        record = StepRecord(
            step=self.step,
            loss=total,
            grad_norm=norm,
            lr=rate,
            tokens=batches.tokens,
            labels=batches.labels,
            seconds=seconds,
            tokens_per_second_per_device=batches.tokens / seconds / devices,
            tflops=tflops,
            mfu=tflops / self.peak_tflops if self.peak_tflops else None,
            peak_memory_gib=self.peak_memory() / 2**30 if self.device.type == "cuda" else None,
            expert_load=self.expert_load(),
            skipped=not math.isfinite(norm),
            sources=self.sources.figures(batches.sources) if self.sources else None,
        )
        for listener in self.listeners:
            listener.on_step(record)

    def expert_load(self) -> float | None:
        """Slots of the busiest expert of any layer, as a multiple of the even share; read every `log.every` steps."""
        if self.load is None or self.step % self.recipe.log.every:
            return None
        counts = self.load.read().values()
        return max((float(count.max() / count.float().mean()) for count in counts), default=None)


# ---------------------------------------------------------------------------------------------- randomness


def seed(recipe: Recipe, state: ParallelState) -> None:
    """Seeds every generator of this rank. SP ranks share a batch, not their dropout."""
    number = recipe.train.seed + dist.get_rank()
    random.seed(number)
    numpy.random.seed(number % 2**32)
    torch.manual_seed(number)
    torch.use_deterministic_algorithms(recipe.train.deterministic, warn_only=True)
