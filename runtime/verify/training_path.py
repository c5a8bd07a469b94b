"""The proof of the training path: the attention, seams, loss and batches that `patchgen train` would choose.

The eager proof (`proof.py`) says that generated code computes what upstream computes. A run uses another attention, kernels
behind the seams, packed rows with the positions and lengths of the data pipeline, and a loss that is a share of a step. Here
upstream's class, eager and one document at a time, is compared with the generated class as the trainer calls it:

    causality      a later token changes no earlier logits, unless it does so upstream
    plain          rows of one document, with the number of labels of the step
    padded         an attention mask, padding right or left; left out if upstream itself reads the padding and ours differs
    packed         a row of several documents against each alone: logits, loss, every gradient
    leak           other tokens in one document change no logits of the others
    chunks         the packed row again, its loss in chunks of a few tokens
    accumulation   two micro-batches are one step
    media          the same with images, videos and audio, if the model takes them
    router loss    of one row
    large weights  plain rows, with weights on which clamps and caps bite (`large_weights.py`)
    bf16           plain rows, in units of upstream's own error in bf16 (`bf16.py`)

The checks are in `training_checks.py`. A difference passes below `TOLERANCE`, relative, or if it is at most `ROUNDING_FACTOR`
times as far as rounding errors in its weights move upstream's own result (`conditioning.py`).
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
from patchgen.runtime.document_rows import LEFT, DocumentSeparation
from patchgen.runtime.failures import reraise_machine_failure
from patchgen.runtime.parallel import ParallelConfig, gloo_groups
from patchgen.runtime.parallel.state import ParallelState
from patchgen.runtime.verify import given_config, head_kinds
from patchgen.runtime.verify.comparison import nan_is_largest
from patchgen.runtime.verify.model_pair import config_class_of
from patchgen.runtime.verify.observe import observer
from patchgen.runtime.verify.observe.facts import Fact
from patchgen.runtime.verify.shrink import with_dropout
from patchgen.runtime.verify.small_config import set_router_loss
from patchgen.runtime.verify.training_checks import Check, Comparison
from patchgen.runtime.verify.verdict import one_line_error

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

CPU_ATTENTION = tuple(name for name in attention.ORDER if BACKENDS[name].has_cpu_backward)
"""Attention that runs on the CPU without compiling; the fastest of these with the required features replaces any other."""


def cpu_attention(names: Names, kinds: Iterable[Kind], config: PreTrainedConfig) -> Names:
    """The attention of a run if the CPU can compute it, else what a run on the CPU would choose."""
    runs_on_cpu = all(name in (*CPU_ATTENTION, attention.BY_LAYER) for name in attention_kinds.all_names(names))
    return names if runs_on_cpu else attention_kinds.choose(kinds, config, device_type="cpu")


@dataclass(frozen=True)
class TrainingPath:
    """What a run would choose, what was compared, and what failed."""

    attention: Names
    """What a run of the small model on this machine uses."""
    compared_attention: Names
    """What the comparison used: the same, or an attention with the same features that runs on the CPU."""
    seams: Mapping[str, str] = field(default_factory=dict)
    attention_kinds: tuple[Kind, ...] = ()
    """What each kind of layer requires of its attention."""
    checks: tuple[Check, ...] = ()
    failures: tuple[str, ...] = ()
    left_out: Mapping[str, str] = field(default_factory=dict)
    """The checks that mean nothing for this model, and why."""
    separates_documents: DocumentSeparation = False
    """Whether a run computes each packed document in a row of its own (`model_calls.separate_documents`), because the model
    has no other way to know where documents end."""
    facts: tuple[Fact, ...] = ()
    """What was observed in steps that passed every check."""
    executed_lines: frozenset[int] = frozenset()
    """Lines of the generated file that these steps ran."""

    @property
    def reason(self) -> str:
        """Why the model cannot train on this path, in one sentence; empty if it can."""
        return self.failures[0] if self.failures else "" if self.checks else "nothing was compared."

    @property
    def worst(self) -> float:
        """The largest relative difference of all checks."""
        return max((check.worst for check in self.checks), default=0.0, key=nan_is_largest)


def prove_training_path(
    upstream_class: type[PreTrainedModel] | None,
    generated_class: type[PreTrainedModel],
    config: PreTrainedConfig,
    *,
    named_attention: Names | None = None,
    named_seams: Mapping[str, str | None] | None = None,
    config_with_dropout: PreTrainedConfig | None = None,
    media: bool = True,
) -> TrainingPath:
    """Compares the generated class, as a run calls it, with upstream's.

    Args:
        upstream_class: None for a model that was generated from a file: it is compared with the generated class itself,
            eager and one document at a time.
        config: a small one, without dropout.
        named_attention, named_seams: what a recipe names; the rest is chosen as a run chooses it.
        config_with_dropout: `config` with the dropout of a run, which decides what the attention must support; None: `config`.
        media: compare with images, videos and audio as well, if the model takes them.
    """
    attention.register()
    config = _without_router_loss(config)
    comparison = _build_comparison(upstream_class or generated_class, generated_class, config, media)
    try:
        comparison, kinds = attention_requirements(comparison, config_with_dropout or config, named_seams or {})
    except Exception as error:
        reraise_machine_failure(error)
        upstream_error = comparison.upstream_error()
        problem = "upstream's own class fails on a document" if upstream_error else "its first step fails"
        failure = f"{problem}: {one_line_error(upstream_error or error)}"
        return TrainingPath(named_attention or "", "", failures=(failure,))
    attention_name = named_attention or attention_kinds.choose(kinds, config)
    training_path = TrainingPath(attention_name, attention_name, comparison.seams, kinds)
    if lacking := attention_kinds.missing_features(attention_name, kinds):
        able = attention_kinds.choose(kinds, config)
        failure = (
            f"attention '{attention_name}' lacks {' and '.join(lacking)}, which the model needs; '{able}' has it."
        )
        return replace(training_path, failures=(failure,))
    comparison.compared_attention = cpu_attention(attention_name, kinds, config)
    with single_rank() as state:
        comparison.state = state
        comparison = _run_checks(comparison)
        facts, executed_lines = ((), frozenset()) if comparison.failures else observer.facts_of(comparison)
    facts = observer.on_slices(comparison, facts)
    return replace(
        training_path,
        compared_attention=comparison.compared_attention,
        checks=tuple(comparison.checks),
        failures=tuple(comparison.failures),
        left_out=comparison.left_out,
        separates_documents=comparison.separates_documents,
        facts=facts,
        executed_lines=executed_lines,
    )


def observed_facts(
    upstream_class: type[PreTrainedModel],
    generated_class: type[PreTrainedModel],
    config: PreTrainedConfig,
    *,
    media: bool = True,
) -> tuple[Fact, ...]:
    """What is observed in steps of the generated class, without comparing them; arguments as of `prove_training_path`."""
    attention.register()
    config = _without_router_loss(config)
    comparison = _build_comparison(upstream_class, generated_class, config, media)
    comparison, kinds = attention_requirements(comparison, config, {})
    comparison.compared_attention = cpu_attention(attention_kinds.choose(kinds, config), kinds, config)
    with single_rank() as comparison.state:
        facts, _ = observer.facts_of(comparison)
    return observer.on_slices(comparison, facts)


def _build_comparison(
    reference_class: type[PreTrainedModel],
    generated_class: type[PreTrainedModel],
    config: PreTrainedConfig,
    media: bool,
) -> Comparison:
    """Of two classes; other heads than those of language models are compared as one of these."""
    unpacked_only = False
    if (kind := head_kinds.kind_of(reference_class.__name__)) is not None:
        unpacked_only = head_kinds.takes_unpacked_only(reference_class, kind)
        reference_class, generated_class = (
            head_kinds.as_language_model(model_class, kind, unpacked_only=unpacked_only)
            for model_class in (reference_class, generated_class)
        )
    comparison = Comparison(reference_class, generated_class, config, media)
    comparison.check_names = head_kinds.UNPACKED_CHECKS if unpacked_only else ()
    comparison.count_labels = functools.partial(head_kinds.num_items, kind)
    return comparison


def _run_checks(comparison: Comparison) -> Comparison:
    """Runs all checks on packed rows or, if some fail, with each document in a row of its own, if upstream mixes
    them; returns the comparison that passed, else the first."""
    comparison.run()
    # Separate rows are for models whose packed documents mix upstream, too; in others they would hide a leak of ours.
    if comparison.failures and comparison.mixes_documents_upstream():
        for separate in (
            comparison.with_separate_documents(separated)
            for separated in (True, LEFT)
            if separated != comparison.separates_documents
        ):
            separate.run()
            if not separate.failures:
                return separate
    return comparison


def attention_requirements(
    comparison: Comparison, config: PreTrainedConfig, named_seams: Mapping[str, str | None]
) -> tuple[Comparison, tuple[Kind, ...]]:
    """What each kind of layer requires of its attention, and the comparison: with separate documents if upstream's model
    mixes them and ours fails on packed rows."""
    try:
        return comparison, comparison.choose(config, named_seams)
    except Exception as error:
        if not comparison.mixes_documents_upstream():
            raise
        separate = comparison.with_separate_documents()
        try:
            return separate, separate.choose(config, named_seams)
        except Exception as second:
            reraise_machine_failure(second)
            raise error from None


@functools.lru_cache(maxsize=8)
def _find_attention_kinds(generated_class: type[PreTrainedModel], config_text: str) -> tuple[Kind, ...]:
    config = config_class_of(generated_class).from_dict(json.loads(config_text))
    small = given_config.of_class(generated_class).shrink(config).config
    devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
    with torch.random.fork_rng(devices):  # the caller may be a starting run
        comparison = Comparison(generated_class, generated_class, _without_router_loss(small), media=True)
        return attention_requirements(comparison, with_dropout(comparison.config, config), {})[1]


def find_attention_kinds(generated_class: type[PreTrainedModel], config: PreTrainedConfig) -> tuple[Kind, ...]:
    """What each kind of layer requires of its attention on packed rows, found by running a small form of the model."""
    attention.register()
    return _find_attention_kinds(generated_class, json.dumps(config.to_dict()))


def merge_paths(paths: Mapping[str, TrainingPath]) -> TrainingPath:
    """One record of several variants of a model; checks of all but the first carry the variant's name."""
    (_, first), *others = paths.items()
    checks, failures, left_out = list(first.checks), list(first.failures), dict(first.left_out)
    kinds = dict.fromkeys(kind for path in paths.values() for kind in path.attention_kinds)
    for variant, path in others:
        checks += [replace(check, name=f"{check.name}, {variant}") for check in path.checks]
        failures += [f"variant {variant}: {failure}" for failure in path.failures]
        left_out |= {f"{name}, {variant}": reason for name, reason in path.left_out.items()}
    return replace(
        first,
        checks=tuple(checks),
        failures=tuple(failures),
        left_out=left_out,
        attention_kinds=tuple(kinds),
        separates_documents=next(filter(None, (path.separates_documents for path in paths.values())), False),
        facts=observer.merged([fact for path in paths.values() for fact in path.facts]),
        executed_lines=frozenset().union(*(path.executed_lines for path in paths.values())),
    )


@contextlib.contextmanager
def single_rank() -> Iterator[ParallelState]:
    """The parallel state of a run on one rank."""
    store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]  # documented there
    gloo_groups.use_one_worker()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        yield ParallelState.create(ParallelConfig.for_world(1), "cpu")
    finally:
        dist.destroy_process_group()


def _without_router_loss(config: PreTrainedConfig) -> PreTrainedConfig:
    """A copy of the config with the language-model loss only: the router loss of several rows is no mean over labels."""
    config = copy.deepcopy(config)
    set_router_loss(config, False)
    return config
