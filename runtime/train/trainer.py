"""The training loop.

trainer = Trainer(recipe, device)         # on every rank, after torch.distributed is up
summary = trainer.run()

feed.py yields the micro-batches      forward_backward() and launch_step() launch a step, finish_step() reads its figures
listeners receive each record
"""

from __future__ import annotations

import copy
import gc
import math
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from patchgen.kernels import choices
from patchgen.runtime import parallel
from patchgen.runtime.data import DataConfig, Loader
from patchgen.runtime.data.agreement import run_on_all_ranks
from patchgen.runtime.objectives import learning
from patchgen.runtime.objectives.batch import inputs_of
from patchgen.runtime.parallel import gradients, loss, peer_memory, report, sharding, unused, watch
from patchgen.runtime.parallel.collectives import all_reduce
from patchgen.runtime.parallel.reshard import reshard
from patchgen.runtime.parallel.state import ParallelState
from patchgen.runtime.train import (
    ending,
    evaluation,
    first_loss,
    flops,
    host_copies,
    lora,
    optimizers,
    reading,
    router_balance,
    router_loads,
    run_lock,
    run_log,
    samples,
    setup,
    start_times,
)
from patchgen.runtime.train import model as models
from patchgen.runtime.train.captured import CapturedStep
from patchgen.runtime.train.feed import Batches, End, Feed, StepBatches, micro_batches_per_step, require_first_step
from patchgen.runtime.train.host_copies import HostCopies
from patchgen.runtime.train.launched import LOAD, LOSS, NORM, SOURCES, LaunchedStep, Update, record_of
from patchgen.runtime.train.recipe import Recipe, to_dict
from patchgen.runtime.train.records import Evaluation, Listener, RunStart, Summary, TrainingStopped
from patchgen.runtime.train.run_checkpoints import RunCheckpoints
from patchgen.runtime.train.signals import StopRequest
from patchgen.runtime.train.sources import SourceLosses


class Trainer:
    """One run on this rank. Its parts are attributes, which can be replaced before `run`.

    Attributes:
        model, optimizer, loader, state, listeners: as built from the recipe.
        step: optimizer steps taken.
        report: the layout of ranks and what implements each seam, as text.
        adapted: PEFT's wrapper of the model; None: no adapters are trained.
    """

    def __init__(self, recipe: Recipe, device: torch.device, listeners: tuple[Listener, ...] = ()) -> None:
        recipe = router_balance.decided(recipe)
        self.recipe, self.device, self.listeners = recipe, device, listeners
        # First: ranks with different layouts would wait for process groups that the others never join.
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
        setup.seed_rank(recipe)
        setup.require_shared(recipe.directory)
        self.parts, self.loader, self.eval_loader = run_on_all_ranks(self.open_data)
        start_times.mark("data")
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
        start_times.mark("weights")
        self.seams = models.configure_seams(recipe, self.model)
        with router_balance.switched_on(recipe, self.model):
            self.report = models.check_slices_and_report(recipe, self.model, self.state, self.seams)
        if balance := router_balance.summary(recipe, self.model):
            self.report += f"\nbalance   {balance}"
        start_times.mark("checks")
        models.set_pad_token(self.model, self.parts.tokenizer)
        self.learning = learning.build(recipe, self.model, self.state, device, self.adapted)
        self.source_losses = self.build_source_losses(recipe.data)
        self.eval_source_losses = self.build_source_losses(recipe.eval_data)
        self.cost = flops.model_cost(self.model)
        self.peak_tflops = recipe.log.peak_tflops or flops.peak_tflops(device)
        self.optimizer = optimizers.build(self.model, recipe.optim)
        self.captured = CapturedStep(self.model, self.state, device, self.micro_batch) if train.cuda_graph else None
        self.forward_options = router_balance.forward_options(recipe)
        self.biases = router_balance.biases_of_run(recipe, self.model)
        self.router_loads = router_loads.of_run(recipe, self.model, self.biases) if recipe.log.expert_load else None
        self.step, self.evaluated_step = 0, 0
        self.launched: LaunchedStep | None = None
        self.mark = time.perf_counter()  # when the step before had ended
        self.skipped, self.num_skipped = 0, 0  # in a row, and in the whole run
        self.prompts = samples.of_recipe(recipe, self.model, self.parts.tokenizer)
        self.checkpoints: RunCheckpoints | None = None  # set by `run`, which also reads the log's best step
        self.best = evaluation.BestStep(train.patience)

    def open_data(self) -> tuple[setup.DataParts, Loader, Loader | None]:
        """Tokenizer, processor and both loaders, so that errors of the evaluation data come now and not after hours."""
        recipe, parts = self.recipe, setup.data_parts(self.recipe)
        group = self.state.batch_index, self.state.config.num_batches
        loader, eval_data = setup.loader_of_group(recipe.data, parts, *group), recipe.evaluation_data
        with reading.naming_section("eval_data"):
            return parts, loader, setup.loader_of_group(eval_data, parts, *group) if eval_data else None

    # ------------------------------------------------------------------------------------------ the loop

    def run(self) -> Summary:
        """Trains until the last step, the end of the data, or a request to stop; saves, exports, returns a summary."""
        recipe, steps = self.recipe, self.recipe.train.steps
        self.checkpoints = RunCheckpoints(recipe, self.model, self.optimizer, self.loader)
        with ExitStack() as cleanup, ExitStack() as watched:
            cleanup.enter_context(run_lock.locked(recipe.directory))
            cleanup.push(self.checkpoints.print_failed_save)
            for listener in self.listeners:
                cleanup.callback(listener.close)
            stop = cleanup.enter_context(StopRequest())
            if self.eval_loader is not None:
                require_first_step(self.feed(self.eval_loader, 1), self.eval_loader, copy.deepcopy(self.eval_start))
            self.compute_reference(stop.requested)
            position = self.checkpoints.resume()
            self.first_step = self.step = self.checkpoints.saved_step
            self.num_skipped = run_log.num_skipped(recipe.directory, self.step) if dist.get_rank() == 0 else 0
            self.best = self.checkpoints.best_of_log(recipe.train.patience)
            if self.step >= steps and dist.get_rank() == 0:
                print(
                    f"Nothing to train: {recipe.directory} has {self.step} of {steps} steps. Start anew with --fresh, or "
                    "raise train.steps to continue.",
                    flush=True,
                )
            self.announce()
            choices.reset()  # forgets those of a proof in this process, or of an objective's reference
            # A request shortens the timeout, but not in the first step: kernels are compiled there, and the usual time between
            # events is unknown.
            stop_requested = lambda: stop.has_arrived() and self.step > self.first_step  # noqa: E731
            watched.enter_context(
                watch.Watch(self.model, timeout=recipe.parallel.stall_timeout, stop_requested=stop_requested)
            )
            watched.enter_context(parallel.using(self.state))
            profiler = watched.enter_context(setup.profiler(recipe))
            feed = self.feed(self.loader, self.num_micro_batches, stop.requested)
            start_times.mark("checkpoint")
            is_over, self.mark = self.step >= steps or self.best.is_over, time.perf_counter()
            upcoming: StepBatches | End = (
                End("steps" if self.step >= steps else "patience") if is_over else feed.next()
            )
            while isinstance(upcoming, StepBatches):
                batches = upcoming
                share = self.forward_backward(batches)
                if self.step == 0 and self.learning.objective.is_models_own:
                    first_loss.require_plausible(share, self.model, recipe)
                self.finish_step()  # of the step before, while the device computes this one
                # Prepared and agreed on meanwhile, too.
                upcoming = feed.next() if self.step + 1 < steps else End("steps")
                self.launched = self.launch_step(batches, share)
                self.step, position = self.step + 1, batches.position
                if self.step <= self.first_step + 2:
                    self.finish_first_step()
                if profiler is not None:
                    profiler.step()
                saves = recipe.checkpoint.every and self.step % recipe.checkpoint.every == 0 and self.step < steps
                evaluates = recipe.train.eval_every and self.step % recipe.train.eval_every == 0
                if saves or evaluates or isinstance(upcoming, End):
                    self.finish_step()
                if saves:
                    self.checkpoints.save(self.step, position, asynchronous=recipe.checkpoint.asynchronous)
                if evaluates:
                    self.keep_if_best(self.evaluate(), position)
                    if self.best.is_over and isinstance(upcoming, StepBatches):
                        upcoming = End("patience")
                if saves or evaluates:
                    self.mark = time.perf_counter()
            is_unevaluated = self.first_step < self.step != self.evaluated_step
            if self.eval_loader is not None and upcoming.reason != "stop" and is_unevaluated:
                self.keep_if_best(self.evaluate(), position)
            watched.close()  # the rest is writing, which has no time limit
            self.checkpoints.wait_for_pending()
            if self.checkpoints.saved_step != self.step:
                self.checkpoints.save(self.step, position, asynchronous=False)
            return ending.finish(self, upcoming.reason)

    def feed(self, loader: Batches, num_micro_batches: int, should_stop: Callable[[], bool] = lambda: False) -> Feed:
        """The steps of a loader."""
        evaluates = loader is self.eval_loader
        source_losses = self.eval_source_losses if evaluates else self.source_losses
        return Feed(
            loader,
            self.state,
            num_micro_batches,
            self.cost,
            should_stop,
            objective=self.learning.objective,
            num_sources=len(source_losses.names) if source_losses else 0,
            require_row=setup.row_check(self.model),
            section="eval_data" if evaluates else "data",
        )

    def build_source_losses(self, data: DataConfig | None) -> SourceLosses | None:
        """What accumulates the losses of each data source; None if there is only one."""
        if data is None or len(data.sources) == 1:
            return None
        # The losses of a replayed step cannot be read.
        reads_losses = self.learning.objective.is_models_own and not self.recipe.train.cuda_graph
        return SourceLosses(data.source_names, self.state, self.device, reads_losses=reads_losses)

    @reading.kept_generators()
    def compute_reference(self, should_stop: Callable[[], bool] = lambda: False) -> None:
        """Fills the objective's reference table with the model before the run, over all data of the run. On a request to stop it
        keeps what it has, and the loop ends before its first step."""
        if self.learning.table is None:
            return
        train, position = self.recipe.train, copy.deepcopy(self.loader.state_dict())
        feeds = [(self.feed(self.loader, self.num_micro_batches, should_stop), train.steps)]
        if self.eval_loader is not None:
            eval_steps = micro_batches_per_step(train.eval_batches, self.state.config.num_batches)
            feeds.append((self.feed(self.eval_loader, 1, should_stop), eval_steps))
        with parallel.using(self.state):
            self.learning.fill_table(
                rows for feed, steps in feeds for step in feed.steps(steps) for rows in step.micro_batches
            )
        reshard(self.model)
        self.loader.load_state_dict(position)

    def forward_backward(self, batches: StepBatches) -> Tensor:
        """The gradients of one step; returns this rank's share of its loss, on the device."""
        items, tokens = max(1, batches.items), max(1, batches.real_tokens)
        if self.captured is not None:
            (rows,) = batches.micro_batches
            share = self.captured(inputs_of(rows), items, tokens)
            if self.captured.replayed == 1 and dist.get_rank() == 0:
                print(f"Steps are replayed as a CUDA graph from step {self.step + 1} on.", flush=True)
        else:
            share, num_items = torch.zeros((), device=self.device), host_copies.on_device(items, self.device)
            num_micro_batches = len(batches.micro_batches)
            for index, rows in enumerate(batches.micro_batches, start=1):
                sharding.reduce_gradients(self.model, is_last=index == num_micro_batches)
                inputs, objective = self.learning.prepare(rows)
                read = self.source_losses.reader(rows) if self.source_losses else None
                share += self.micro_batch(
                    inputs, num_items, tokens, num_micro_batches, objective=objective, read_losses=read
                )
        if self.adapted is not None:
            lora.reduce_gradients(self.model)
        return share

    def micro_batch(
        self,
        inputs: Mapping[str, Any],
        items: Tensor,
        tokens: Tensor | int,
        num_micro_batches: int = 1,
        **options: Any,
    ) -> Tensor:
        """Accumulates the gradients of one micro-batch on the device; returns its share of the loss.

        Args:
            items, tokens, num_micro_batches: of the step; `items` are labels, documents or pairs, as the objective counts.
            options: of `loss.step`.
        """
        with loss.step(items, num_micro_batches, num_tokens=tokens, **options):
            share = self.model(**inputs, **self.forward_options, num_items_in_batch=items, use_cache=False).loss
            share.backward()
        return share.detach()

    def launch_update(self) -> Update:
        """Clips gradients, steps the optimizer if they are finite, and moves `biases`; waits for the device only with an optimizer
        that needs to know whether they are."""
        config = self.recipe.optim
        rate = optimizers.set_learning_rate(
            self.optimizer, optimizers.lr_factor(self.step, config, self.recipe.train.steps)
        )
        parts: gradients.Parts = []
        norm = gradients.clip(self.model, max_norm=config.max_grad_norm, optimizer=self.optimizer, parts=parts)
        unused.drop_unused_gradients(self.model)
        is_finite = torch.isfinite(norm)
        if is_left_to_device := optimizers.can_skip(self.optimizer, norm.device):
            optimizers.take_where(self.optimizer, is_finite)
        if is_left_to_device or is_finite:
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        if self.biases is not None:
            self.biases.after_step(self.step + 1, was_taken=is_finite)
        return Update(self.step + 1, rate, norm, parts, is_left_to_device)

    def finish_update(self, update: Update, norm: float) -> None:
        """Counts a step that was skipped, once the host knows the norm.

        Raises:
            TrainingStopped: `optim.max_skipped` steps in a row were skipped.
            NonFiniteGradient: with `optim.on_nonfinite: stop`.
        """
        if math.isfinite(norm):
            self.skipped = 0
            return
        config = self.recipe.optim
        if update.is_left_to_device:
            optimizers.take_back(self.optimizer)
        gradients.report_nonfinite(self.model, norm, on_nonfinite=config.on_nonfinite, parts=update.parts)
        self.skipped, self.num_skipped = self.skipped + 1, self.num_skipped + 1
        if self.skipped >= config.max_skipped:
            last = self.checkpoints.saved_step if self.checkpoints is not None else 0
            saved = f"The last checkpoint is that of step {last}." if last else "No checkpoint was saved."
            raise TrainingStopped(
                f"{self.skipped} steps in a row had gradients that are not finite, the last of them step "
                f"{update.number}. {saved} Lower optim.lr, raise optim.warmup_steps, or check the data of these steps."
            )

    def update(self) -> tuple[float, float]:
        """Launches the update and waits for it; returns the norm before clipping and the learning rate. Errors as of
        `finish_update`."""
        update = self.launch_update()
        norm = float(update.norm)
        self.finish_update(update, norm)
        return norm, update.rate

    @staticmethod
    def peak_memory() -> int:
        """Peak bytes allocated on this rank's GPU, including memory shared with other ranks."""
        return torch.cuda.max_memory_allocated() + peer_memory.shared_gpu_bytes()

    # ----------------------------------------------------------------------------------------- evaluation

    def evaluate(self) -> Evaluation:
        """Measures the loss on the evaluation data, continues the recipe's prompts, and tells the listeners (collective)."""
        result = evaluation.measure(self)
        self.evaluated_step = self.step
        for listener in self.listeners:
            listener.on_evaluation(result)
        if self.prompts is not None:
            texts = self.prompts.continued(self.model, self.state, self.device)
            for listener in self.listeners:
                listener.on_samples(self.step, texts)
        return result

    def keep_if_best(self, result: Evaluation, position: dict[str, Any]) -> None:
        """Counts an evaluation for `train.patience`; a new best step is saved and kept, with `checkpoint.keep_best`."""
        assert self.checkpoints is not None, "set by `run`"
        if self.best.add(result.step, result.loss) and self.recipe.checkpoint.keep_best:
            self.checkpoints.keep(self.step)
            if self.checkpoints.saved_step != self.step:
                self.checkpoints.save(self.step, position, asynchronous=self.recipe.checkpoint.asynchronous)

    # -------------------------------------------------------------------------------------------- records

    def announce(self) -> None:
        """Sends the start of the run to the listeners."""
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

    def finish_first_step(self) -> None:
        """After each of the first two steps of a start: prints which kernels `auto` chose, and how long the start took."""
        self.finish_step()
        start_times.mark(f"step {self.step}")
        if is_first := self.step == self.first_step + 1:
            freeze_objects()
        chosen = report.auto_choices() if is_first else ""
        text = f"after the first step, on rank 0:\n{chosen}" if chosen else ""
        if dist.get_rank() == 0 and (text := text if is_first else start_times.summary(f"step {self.step}")):
            print(text, flush=True)
        self.mark = time.perf_counter()

    def launch_step(self, batches: StepBatches, share: Tensor) -> LaunchedStep:
        """Launches the update of a step whose gradients are there, and the copies of its figures (collective)."""
        figures = {LOSS: all_reduce(share, operation="add up the loss")}
        if self.source_losses and (sums := self.source_losses.take_sums()) is not None:
            figures[SOURCES] = sums
        update = self.launch_update()
        if self.router_loads is not None and update.number % self.recipe.log.every == 0:
            loads = self.router_loads.read_on_device()
            figures |= {f"{LOAD}{path}": counts for path, counts in loads.items()}
        return LaunchedStep(update, batches, HostCopies(figures | {NORM: update.norm}))

    def finish_step(self) -> None:
        """Waits for the figures of a launched step, if there is one, and sends them to the listeners; errors as of
        `finish_update`."""
        launched, self.launched = self.launched, None
        if launched is None:
            return
        figures = launched.figures.read(f"compute step {launched.update.number}")
        now = time.perf_counter()
        seconds, self.mark = now - self.mark, now
        self.finish_update(launched.update, float(figures[NORM]))
        record = record_of(
            launched,
            figures,
            seconds,
            peak_tflops=self.peak_tflops,
            peak_memory=self.peak_memory() if self.device.type == "cuda" else None,
            source_losses=self.source_losses,
            router_loads=self.router_loads,
        )
        for listener in self.listeners:
            listener.on_step(record)


def freeze_objects() -> None:
    """Collects garbage once more, then exempts all live objects from later collections.

    Libraries, model and compiled code are millions of objects that live as long as the run. A full collection would take a few
    tenths of a second for them, in which the host launches nothing.
    """
    gc.collect()
    gc.freeze()
