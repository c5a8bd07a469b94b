"""The proof of the path that a run takes: the attention, seams, loss and batches that `patchgen train` would choose.

The eager proof (`proof.py`) says that generated code computes what upstream computes. A run computes otherwise: another
attention, kernels behind the seams, packed rows with the positions and lengths that the data pipeline hands over, a loss
that is a share of a step. Here upstream's class, eager and one document at a time, is compared with the generated class as
the trainer calls it:

    causality      a later token changes no earlier logits, unless it does so upstream
    plain          rows of one document; the number of labels of the step is handed in
    padded         zeros of the mask behind the tokens, and before them; where upstream itself reads the padding only if equal
    packed         a row of several documents against each alone: logits, loss, every gradient
    leak           other tokens in one document change no logits of the others
    chunks         the packed row again, its loss in chunks of a few tokens
    accumulation   two micro-batches are one step
    media          the same with images, videos and audio, where the model takes them
    router loss    of one row

`training_checks.py` makes them. The bar is `TOLERANCE` of the norm, or in units of rounding: `ROUNDING` times
what upstream's own result moves by when its weights move by their last bit, for models are worse conditioned than the bar.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from patchgen.runtime import attention, attention_kinds
from patchgen.runtime.attention_backends import BACKENDS
from patchgen.runtime.attention_kinds import Kind, Names
from patchgen.runtime.document_rows import LEFT, Separated
from patchgen.runtime.parallel import ParallelConfig
from patchgen.runtime.parallel.state import ParallelState
from patchgen.runtime.verify import head_kinds
from patchgen.runtime.verify.model_pair import config_class_of
from patchgen.runtime.verify.shrink import shrink, with_dropout
from patchgen.runtime.verify.training_checks import Check, Comparison, told

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

ON_CPU = tuple(name for name in attention.ORDER if BACKENDS[name].has_cpu_backward)
"""Attention that runs on the CPU without compiling; others are stood in for by the fastest of them with the features."""


def on_cpu(names: Names, asked: Iterable[Kind], config: PreTrainedConfig) -> Names:
    """The attention of a run as the CPU can compute it: itself, or what the CPU would choose."""
    is_there = all(name in (*ON_CPU, attention.BY_LAYER) for name in attention_kinds.all_names(names))
    return names if is_there else attention_kinds.choose(asked, config, device_type="cpu")


@dataclass(frozen=True)
class TrainingPath:
    """What a run would choose, what was compared under it, and what failed."""

    attention: Names
    """What a run on this machine takes, by heads of the small form."""
    ran_with: Names
    """What the comparison ran with: the same, or what computes the same features on the CPU."""
    seams: Mapping[str, str] = field(default_factory=dict)
    asked: tuple[Kind, ...] = ()
    """What each kind of layer asks of its attention."""
    checks: tuple[Check, ...] = ()
    failures: tuple[str, ...] = ()
    left_out: Mapping[str, str] = field(default_factory=dict)
    """The checks that tell nothing of this model, and why."""
    separates_documents: Separated = False
    """Whether a run computes each packed document in a row of its own (`model_calls.separate_documents`): only so is the
    model right in packed rows, since nothing tells it where documents end."""

    @property
    def reason(self) -> str:
        """Why the model cannot train on this path, in one sentence; empty if it can."""
        return self.failures[0] if self.failures else "" if self.checks else "nothing was compared."

    @property
    def worst(self) -> float:
        """The largest relative difference of all checks."""
        return max((check.worst for check in self.checks), default=0.0)


def prove_training_path(
    upstream_class: type[PreTrainedModel] | None,
    generated_class: type[PreTrainedModel],
    config: PreTrainedConfig,
    *,
    named_attention: Names | None = None,
    named_seams: Mapping[str, str | None] | None = None,
    asked_config: PreTrainedConfig | None = None,
    media: bool = True,
) -> TrainingPath:
    """Compares the generated class, as a run calls it, with upstream's.

    Args:
        upstream_class: None for a model that was made from a file: then the generated class itself, eager and one
            document at a time, is what it is compared with.
        config: a small one, without dropout.
        named_attention, named_seams: what a recipe names; the rest is chosen as a run chooses it.
        asked_config: the same with the dropout that a run has, for what it asks of the attention; None: `config`.
        media: compare with images, videos and audio as well, where the model takes them.
    """
    attention.register()
    config = _without_router_loss(config)
    reference_class = upstream_class or generated_class
    of_rows = False
    if (kind := head_kinds.kind_of(reference_class.__name__)) is not None:
        of_rows = head_kinds.is_of_rows(reference_class, kind)
        pair = (head_kinds.scored(one, kind, of_rows=of_rows) for one in (reference_class, generated_class))
        reference_class, generated_class = pair
    path = Comparison(reference_class, generated_class, config, media)
    path.only = head_kinds.OF_ROWS if of_rows else ()
    path.items = functools.partial(head_kinds.num_items, kind)
    try:
        path, asked = choices_of(path, asked_config or config, named_seams or {})
    except Exception as error:
        own = path.upstream_refusal()
        whose = "upstream's own class fails on a document" if own else "its first step fails"
        return TrainingPath(named_attention or "", "", failures=(f"{whose}: {told(own or error)}",))
    chosen = named_attention or attention_kinds.choose(asked, config)
    found = TrainingPath(chosen, chosen, path.seams, asked)
    if lacking := attention_kinds.missing_features(chosen, asked):
        able = attention_kinds.choose(asked, config)
        failure = f"attention '{chosen}' lacks {' and '.join(lacking)}, which the model needs; '{able}' has it."
        return replace(found, failures=(failure,))
    path.ran_with = on_cpu(chosen, asked, config)
    with one_rank() as state:
        path.state = state
        path = _run(path)
    return replace(
        found,
        ran_with=path.ran_with,
        checks=tuple(path.checks),
        failures=tuple(path.failures),
        left_out=path.left_out,
        separates_documents=path.separates_documents,
    )


def _run(path: Comparison) -> Comparison:
    """All comparisons, packed or, where that fails, with each document in a row of its own; returns which of them holds."""
    path.run()
    # A row for each document is for models that mix packed ones upstream, too; in others it would hide a leak of ours.
    if path.failures and path.mixes_documents_upstream():
        for apart in (path.with_documents_apart(how) for how in (True, LEFT) if how != path.separates_documents):
            apart.run()
            if not apart.failures:
                return apart
    return path


def choices_of(
    path: Comparison, config: PreTrainedConfig, named_seams: Mapping[str, str | None]
) -> tuple[Comparison, tuple[Kind, ...]]:
    """What each kind of layer asks for, and the comparison: with documents apart where upstream's model mixes them and ours
    takes them in no other way."""
    try:
        return path, path.choices(config, named_seams)
    except Exception as error:
        if not path.mixes_documents_upstream():
            raise
        apart = path.with_documents_apart()
        try:
            return apart, apart.choices(config, named_seams)
        except Exception:
            raise error from None


@functools.lru_cache(maxsize=8)
def _asked(generated_class: type[PreTrainedModel], config_text: str) -> tuple[Kind, ...]:
    config = config_class_of(generated_class).from_dict(json.loads(config_text))
    small = shrink(config).config
    devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
    with torch.random.fork_rng(devices):  # a run that asks while it starts has its own
        path = Comparison(generated_class, generated_class, _without_router_loss(small), media=True)
        return choices_of(path, with_dropout(path.config, config), {})[1]


def asked_of_attention(generated_class: type[PreTrainedModel], config: PreTrainedConfig) -> tuple[Kind, ...]:
    """What packed rows make each kind of layer ask of its attention, found by running a small form of the model."""
    attention.register()
    return _asked(generated_class, config.to_json_string(use_diff=False))


def merge_paths(paths: Mapping[str, TrainingPath]) -> TrainingPath:
    """One record of several variants of a model; the first gives the names, checks of the others carry their variant's."""
    (_, first), *others = paths.items()
    checks, failures, left_out = list(first.checks), list(first.failures), dict(first.left_out)
    asked = dict.fromkeys(kind for path in paths.values() for kind in path.asked)
    for variant, path in others:
        checks += [replace(check, name=f"{check.name}, {variant}") for check in path.checks]
        failures += [f"variant {variant}: {failure}" for failure in path.failures]
        left_out |= {f"{name}, {variant}": reason for name, reason in path.left_out.items()}
    return replace(
        first,
        checks=tuple(checks),
        failures=tuple(failures),
        left_out=left_out,
        asked=tuple(asked),
        separates_documents=next(
            (path.separates_documents for path in paths.values() if path.separates_documents), False
        ),
    )


@contextlib.contextmanager
def one_rank() -> Iterator[ParallelState]:
    """The parallel state of a run on one rank."""
    store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]  # documented there
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        yield ParallelState.create(ParallelConfig.for_world(1), "cpu")
    finally:
        dist.destroy_process_group()


def _without_router_loss(config: PreTrainedConfig) -> PreTrainedConfig:
    """The language-model loss alone: the router loss of several rows is not a mean over labels."""
    config = copy.deepcopy(config)
    for one in (config, config.get_text_config(decoder=True)):
        if hasattr(one, "output_router_logits"):
            one.output_router_logits = False
    return config
