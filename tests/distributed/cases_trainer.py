"""What each rank does in the tests of the trainer; see test_trainer.py."""

from __future__ import annotations

import contextlib
import io
import itertools
import os
import random
from pathlib import Path

import numpy
import torch
import torch.distributed as dist

from patchgen.runtime import parallel, random_state
from patchgen.runtime.checkpoint import CheckpointError
from patchgen.runtime.data import DataError
from patchgen.runtime.train import resume_changes, setup
from patchgen.runtime.train.recipe import Recipe, RecipeError, from_dict
from patchgen.runtime.train.records import Evaluation, Listener, Sample, StepRecord, Summary
from patchgen.runtime.train.trainer import Trainer, TrainingStopped


class Kept(Listener):
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.steps: list[StepRecord] = []
        self.evaluations: list[Evaluation] = []
        self.samples: list[tuple[int, list[Sample]]] = []

    def on_step(self, record: StepRecord) -> None:
        self.steps.append(record)

    def on_evaluation(self, evaluation: Evaluation) -> None:
        self.evaluations.append(evaluation)

    def on_samples(self, step: int, samples: list[Sample]) -> None:
        self.samples.append((step, samples))


def train(values: dict) -> tuple[list[float], list[float], Summary]:
    """Losses, gradient norms and the end of a whole run on these ranks."""
    kept = Kept()
    trainer = Trainer(from_dict(values), torch.device("cpu"), (kept,))
    summary = trainer.run()
    return [record.loss for record in kept.steps], [record.grad_norm for record in kept.steps], summary


def losses_of(recipe: Recipe) -> list[float]:
    """Losses of a run of a recipe whose decisions are made."""
    kept = Kept()
    Trainer(recipe, torch.device("cpu"), (kept,)).run()
    return [record.loss for record in kept.steps]


def train_and_print(values: dict) -> tuple[list[float], str]:
    """Losses of a run, and what it prints."""
    with contextlib.redirect_stdout(io.StringIO()) as told:
        losses, *_ = train(values)
    return losses, told.getvalue()


def train_and_log(values: dict) -> tuple[list[float], Summary]:
    """Losses and the end of a run that leaves its files behind."""
    kept, recipe = Kept(), from_dict(values)
    summary = Trainer(recipe, torch.device("cpu"), (kept, *setup.listeners(recipe))).run()
    return [record.loss for record in kept.steps], summary


def train_and_evaluate(values: dict) -> tuple[list[float], list[Evaluation]]:
    """Losses and evaluations of a run, whose forwards compute the loss alone, in evaluation mode too."""
    kept, with_logits = Kept(), []
    trainer = Trainer(from_dict(values), torch.device("cpu"), (kept,))
    trainer.model.register_forward_hook(lambda module, _, out: with_logits.append(out.logits is not None))
    trainer.run()
    assert not any(with_logits), with_logits
    return [record.loss for record in kept.steps], kept.evaluations


def train_with_samples(values: dict) -> tuple[list[float], list[tuple[int, list[Sample]]], Summary]:
    """Losses, what the prompts were continued with, and the end of a run that leaves its files behind."""
    kept, recipe = Kept(), from_dict(values)
    summary = Trainer(recipe, torch.device("cpu"), (kept, *setup.listeners(recipe))).run()
    return [record.loss for record in kept.steps], kept.samples, summary


def figures_of_sources(values: dict) -> list[tuple[float, int, dict]]:
    """Loss, labels and the figures of the sources of each step, then of each evaluation."""
    kept = Kept()
    Trainer(from_dict(values), torch.device("cpu"), (kept,)).run()
    assert all(one.step == values["train"]["steps"] for one in kept.evaluations)
    return [(one.loss, one.labels, one.sources) for one in (*kept.steps, *kept.evaluations)]


def losses_by_document(values: dict, count: int) -> list[list[tuple[int, int, float]]]:
    """Source, labels and loss of each document of the first micro-batches, alone in plain transformers."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(values["model"]["source"], dtype=torch.float32).eval()
    found = []
    for row in global_rows(values, count):
        documents, bounds = [], row["cu_seq_lens_q"].tolist()
        for source, (start, end) in zip(row["document_sources"].tolist(), itertools.pairwise(bounds), strict=True):
            labels = row["labels"][:, start:end]
            if (learned := int((labels[:, 1:] != -100).sum())) and source >= 0:
                with torch.no_grad():
                    loss = float(model(input_ids=row["input_ids"][:, start:end], labels=labels).loss)
                documents.append((source, learned, loss * learned))
        found.append(documents)
    return found


def draws(values: dict) -> list[tuple[float, float, float]]:
    """What each generator would give after each step of a run, whose evaluation draws from Python's and NumPy's."""
    found = []

    class Drawn(Listener):
        def on_step(self, record: StepRecord) -> None:
            state = random_state.capture()
            found.append((random.random(), numpy.random.rand(), float(torch.rand(()))))
            random_state.restore(state)

    trainer = Trainer(from_dict(values), torch.device("cpu"), (Drawn(),))
    forward = trainer.model.forward

    def draws_in_evaluation(*arguments: object, **options: object):
        if not trainer.model.training:
            random.random(), numpy.random.rand()
        return forward(*arguments, **options)

    trainer.model.forward = draws_in_evaluation
    trainer.run()
    return found


def evaluation_of_nothing(values: dict) -> str:
    """The error of an evaluation outside of a run."""
    trainer = Trainer(from_dict(values), torch.device("cpu"))
    try:
        with parallel.using(trainer.state):
            trainer.evaluate()
    except DataError as error:
        assert trainer.model.training
        return str(error)
    raise AssertionError("there was nothing to evaluate")


def recipes_read(values: dict) -> int:
    """How often a run reads the recipes of its checkpoints."""
    read, files = resume_changes.read_saved, []
    resume_changes.read_saved = lambda file: files.append(file) or read(file)
    try:
        train(values)
    finally:
        resume_changes.read_saved = read
    return len(files)


def errors_of_one_rank_in_a_resume(values: dict) -> list[str]:
    """The errors of resuming where rank 0 cannot read a recipe, and where rank 1 has other data."""

    def fails(*_: object) -> None:
        raise OSError("the disk\nis gone")

    def refuses(state: dict) -> None:
        raise DataError("other data")

    read, told = resume_changes.read_saved, []
    for broken in (0, 1):
        trainer = Trainer(from_dict(values), torch.device("cpu"))
        if dist.get_rank() == broken == 0:
            resume_changes.read_saved = fails
        elif dist.get_rank() == broken:
            trainer.loader.load_state_dict = refuses
        try:
            trainer.run()
        except DataError as error:
            told.append(str(error))
        finally:
            resume_changes.read_saved = read
    return told


def learning_rates(values: dict) -> list[float]:
    """The learning rates of the steps that a run takes."""
    kept = Kept()
    Trainer(from_dict(values), torch.device("cpu"), (kept,)).run()
    return [record.lr for record in kept.steps]


def train_with_a_disk_that_fails(values: dict, fails: int, works: int) -> tuple[int, str]:
    """Steps that are taken, and the error of the run, when no checkpoint can be written between two steps."""
    recipe, kept = from_dict(values), Kept()
    folder = recipe.directory / "checkpoints"

    class Disk(Listener):
        def on_step(self, record: StepRecord) -> None:
            if record.step == fails:
                folder.rename(folder.with_name("aside"))
                folder.touch()
            elif record.step == works:
                folder.unlink()
                folder.with_name("aside").rename(folder)

    trainer = Trainer(recipe, torch.device("cpu"), (kept, Disk()))
    try:
        trainer.run()
    except CheckpointError as error:
        return len(kept.steps), str(error)
    return len(kept.steps), ""


def second_start(values: dict) -> list[str]:
    """What `patchgen train` says on a directory in which a run takes its steps."""
    from patchgen.runtime import launch

    told = []

    class Second(Listener):
        def on_step(self, record: StepRecord) -> None:
            ranks = {name: os.environ.pop(name) for name in ("RANK", "WORLD_SIZE")}
            try:
                launch.launch(from_dict(values), fresh=record.step == 1)
            except Exception as error:
                told.append(str(error))
            os.environ.update(ranks)

    Trainer(from_dict(values), torch.device("cpu"), (Second(),)).run()
    return told


def divergence(values: dict) -> str:
    """What a run is stopped with."""
    try:
        train(values)
    except TrainingStopped as error:
        return str(error)
    raise AssertionError("the run went on")


def data_error(values: dict) -> tuple[str, int]:
    """What a run is refused with on this rank because of its data, and the steps that it took before."""
    kept = Kept()
    try:
        Trainer(from_dict(values), torch.device("cpu"), (kept,)).run()
    except DataError as error:
        return str(error), len(kept.steps)
    raise AssertionError("the data were accepted")


def data_error_where_one_sees_nothing(values: dict, disks: str) -> str:
    """The same where each rank has a disk of its own, and the file is on that of rank 0 only."""
    mine = Path(disks) / str(dist.get_rank())
    mine.mkdir()
    if dist.get_rank() == 0:
        (mine / "text.jsonl").write_text('{"text": "here"}\n')
    with contextlib.chdir(mine):
        return data_error(values)[0]


def documents(values: dict) -> tuple[list[list[int]], Summary]:
    """The documents that this rank's batch group trained on, token by token, and the end of the run."""
    trainer = Trainer(from_dict(values), torch.device("cpu"))
    forward_backward, found = trainer.forward_backward, []

    def noted(batches):
        for row in batches.micro_batches:
            ids, labels, positions = (row[name][0].tolist() for name in ("input_ids", "shift_labels", "position_ids"))
            bounds = [place for place, position in enumerate(positions) if position == 0] + [len(ids)]
            pieces = [(ids[a:b], labels[a:b]) for a, b in itertools.pairwise(bounds)]
            found.extend(tokens for tokens, learned in pieces if set(learned) != {-100})
        return forward_backward(batches)

    trainer.forward_backward = noted
    return found, trainer.run()


def refusal_of_another_recipe(values: dict) -> str:
    """What two ranks are told that were started with different recipes, layouts included: they would wait for groups."""
    rank = dist.get_rank()
    values = {**values, "optim": {"lr": 1e-3 * (1 + rank)}, "parallel": {"ep": 1 + rank}}
    return refusal(values)


def refusal_of_a_disk_of_its_own(directory: str) -> str:
    """What two ranks are told whose run directories are not the same."""
    setup.SHARED_SECONDS = 0.5
    try:
        setup.require_shared(Path(directory) / str(dist.get_rank()))
    except RecipeError as error:
        return str(error)
    raise AssertionError("the directory was accepted")


PROBE = [5, 80, 33, 120, 7, 61, 250, 9]


def train_adapters(values: dict) -> dict:
    """A run with adapters: losses, names of what is trained, and logits of `PROBE` after it."""
    kept = Kept()
    trainer = Trainer(from_dict(values), torch.device("cpu"), (kept,))
    trainer.run()
    with torch.no_grad(), parallel.using(trainer.state):
        logits = trainer.model.eval()(input_ids=torch.tensor([PROBE]), use_cache=False).logits
    return {
        "losses": [record.loss for record in kept.steps],
        "trained": [name for name, parameter in trainer.model.named_parameters() if parameter.requires_grad],
        "logits": logits.clone(),
    }


def refusal(values: dict) -> str:
    """What a recipe is refused with."""
    try:
        Trainer(from_dict(values), torch.device("cpu"))
    except RecipeError as error:
        return str(error)
    raise AssertionError("the recipe was accepted")


def refusal_of_a_run(values: dict) -> str:
    """What a recipe is refused with once its run starts."""
    trainer = Trainer(from_dict(values), torch.device("cpu"))
    try:
        trainer.run()
    except RecipeError as error:
        return str(error)
    raise AssertionError("the run was accepted")


def logits_of(values: dict, ids: list[int]) -> torch.Tensor:
    """The logits of a recipe's model before its run."""
    trainer = Trainer(from_dict(values), torch.device("cpu"))
    with torch.no_grad(), parallel.using(trainer.state):
        return trainer.model.eval()(input_ids=torch.tensor([ids]), use_cache=False).logits.clone()


def global_rows(values: dict, count: int) -> list[dict]:
    """The first micro-batches of the run, whole, as one rank sees them."""
    from patchgen.runtime.data import build_loader

    recipe = from_dict(values)
    parts = setup.data_parts(recipe)
    loader = build_loader(recipe.data, tokenizer=parts.tokenizer, batch_index=0, num_batches=1)
    return [next(loader) for _ in range(count)]


def recipe_of(folder: Path, **changes: dict) -> dict:
    """A small recipe on real text, its weights in `folder/start`, its run in `folder/run`; sections may be changed."""
    values = {
        "model": {"source": str(folder / "start")},
        "data": {
            "sources": [{"path": str(folder / "text.jsonl")}],
            "tokens_per_batch": 64,
            "cache_dir": str(folder / "cache"),
        },
        "optim": {"lr": 3e-3, "weight_decay": 0.1, "warmup_steps": 3, "schedule": "cosine", "max_grad_norm": 0.5},
        "train": {"steps": 6, "batches_per_step": 4},
        "checkpoint": {"export": False},
        "log": {"directory": str(folder / "run")},
    }
    for section, fields in changes.items():
        values[section] = {**values.get(section, {}), **fields}
    return values
