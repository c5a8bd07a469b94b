"""Whether a recipe's model can train, decided before any rank starts; refusals quote the verdict of the proof.

    model.source = 'some_model': proven, eager only: packed rows: other tokens in one document change the logits of others ...

Three questions, on the CPU, with models of a few thousand parameters:

    the type      is its head proven, as `patchgen verify` and `patchgen sweep` prove it?
    the layout    for several ranks: does it agree on two with FSDP, and with shared experts or sequences if the recipe has them?
    the recipe    does the recipe's config, shrunk, agree with upstream, with the attention and kernels that the recipe names?

The result is cached in ~/.cache/patchgen/preflight, keyed by everything it depends on.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
import os
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import transformers

from patchgen.runtime import attention, attention_kinds, model_calls, registry, seams
from patchgen.runtime.attention_backends import BACKENDS
from patchgen.runtime.attention_kinds import Kind, Names
from patchgen.runtime.compatibility import ReleaseMismatch
from patchgen.runtime.document_rows import LEFT, DocumentSeparation
from patchgen.runtime.failures import reraise_machine_failure
from patchgen.runtime.objectives.choose import teacher_recipe
from patchgen.runtime.parallel import loss
from patchgen.runtime.parts import UnknownPartError, part_files
from patchgen.runtime.train import architecture, attention_choice, data_check, modalities, router_balance
from patchgen.runtime.train import model as models
from patchgen.runtime.train.recipe import Recipe, RecipeError
from patchgen.runtime.verify import given_config, report, verdict
from patchgen.runtime.verify.comparison import train_step
from patchgen.runtime.verify.given_config import GivenConfig
from patchgen.runtime.verify.inputs import text_cases
from patchgen.runtime.verify.model_pair import build_model
from patchgen.runtime.verify.observe.facts import Fact, from_records, reason_against
from patchgen.runtime.verify.ranks import CaseFailed
from patchgen.runtime.verify.shrink import why_padding_has_no_row, with_dropout
from patchgen.runtime.verify.slices import refusal_on_ranks
from patchgen.runtime.verify.small_config import UPSTREAM_REFUSALS, SmallConfig, SmallConfigError
from patchgen.runtime.verify.training_path import cpu_attention, prove_training_path
from patchgen.runtime.verify.two_ranks import compare_on_two_ranks
from patchgen.runtime.verify.verify_model import judge

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

    from patchgen.runtime.verify.record_types import TrainingRecord

IMPLEMENTATIONS = ("torch", "chunked")
"""Seam implementations compared in addition to the run's own; they need no compiler."""


@dataclass(frozen=True)
class Preflight:
    """The verdict, and what was decided for the run.

    Attributes:
        status, reason: of the verdict.
        attention: the attention of each kind of layer.
        separates_documents: whether each packed document is computed in its own row.
        separate_pairs: modalities that must not share a row.
        facts: what was observed in steps and has an effect, which some layouts do not bear.
    """

    status: str
    reason: str
    attention: Names
    separates_documents: DocumentSeparation = False
    separate_pairs: tuple[modalities.Pair, ...] = ()
    facts: tuple[Fact, ...] = ()

    @property
    def refusal(self) -> str:
        """The verdict as text; empty if the model can train."""
        return "" if self.status == verdict.PROVEN else verdict.Verdict(self.status, self.reason).words


def decide_trainable(recipe: Recipe, world: int = 1) -> Recipe:
    """Refuses a model that cannot train; returns the recipe with its attention, document separation, modality separation and
    router loss decided.

    Args:
        world: the number of ranks, as far as it is known.

    Raises:
        RecipeError: the model cannot train, or not on these ranks.
    """
    if (teacher := teacher_recipe(recipe)) is not None:
        recipe = replace(recipe, teacher=decide_trainable(teacher, world).model)
    data_check.require_data(recipe)
    if (recipe.train.batches_per_step > 1 or recipe.parallel.sp > 1) and (
        reason := loss.why_not_additive(_head_and_config(recipe)[0])
    ):
        raise RecipeError(
            f"train.batches_per_step = {recipe.train.batches_per_step}, parallel.sp = {recipe.parallel.sp}: {reason}"
        )
    if reason := why_padding_has_no_row(_head_and_config(recipe)[1]):
        raise RecipeError(f"model.source = '{recipe.model.source}': {reason}")
    recipe = router_balance.decided(recipe)
    proven = router_balance.as_proven(recipe)
    decision = examine(proven)
    if decision.refusal:
        raise RecipeError(f"model.source = '{recipe.model.source}': {decision.refusal}")
    separate = decision.separates_documents or recipe.model.separate_documents or False
    if separate == LEFT and recipe.parallel.sp > 1:
        sp, name = recipe.parallel.sp, f"'{recipe.model.source}'"
        raise RecipeError(f"parallel.sp = {sp}: {model_calls.no_slices(name, sp)} Set parallel.sp: 1.")
    # First ranks that share experts but no sequence: what they refuse is not due to parallel.sp.
    for key, shares_sequence in (("ep", False), ("sp", True)):
        size = getattr(recipe.parallel, key)
        if size > 1 and (refusal := _refusal_on_ranks(proven, decision.attention, shares_sequence=shares_sequence)):
            raise RecipeError(f"parallel.{key} = {size}: '{recipe.model.source}': {refusal}")
    section = recipe.parallel
    ranks = max(world, math.lcm(section.sp, section.ep) * section.dp_replicate)
    if refusal := reason_against(decision.facts, ranks=ranks, sp=section.sp):
        raise RecipeError(f"model.source = '{recipe.model.source}': {refusal}")
    if ranks > 1 and (refusal := two_ranks_refusal(recipe, decision.separates_documents)):
        raise RecipeError(f"model.source = '{recipe.model.source}': {refusal}")
    if decision.separates_documents and recipe.model.separate_documents is False:
        raise RecipeError(
            f"model.separate_documents = false: in packed rows '{recipe.model.source}' would see other documents. Remove "
            "the key."
        )
    recipe = modalities.with_separate_pairs(recipe, decision.separate_pairs)
    return replace(recipe, model=replace(recipe.model, attention=decision.attention, separate_documents=separate))


def _refusal_on_ranks(recipe: Recipe, attention_name: Names, *, shares_sequence: bool) -> str:
    """Why the model, shrunk, refuses several ranks or sequence slices with the run's attention; "" if it does not."""
    head, config = _head_and_config(recipe)
    attention_name = cpu_attention(attention_name, attention_choice.kinds_of(head, config), config)
    attention.register()
    small = _shrunk_config(head, config, given_config.of_class(head))
    model = head._from_config(small, attn_implementation=attention_name, dtype=torch.float32)
    return refusal_on_ranks(model, shares_sequence=shares_sequence)


def two_ranks_refusal(recipe: Recipe, separates: DocumentSeparation) -> str:
    """Why the model cannot train on ranks as this recipe lays them out, in the words of its proof on two; empty if it can.

    What was compared comes from the record beside the generated file, or from the cache; the rest is compared now, on two
    processes of this machine. A layout that is refused by a type's small config is left to the run's own checks.

    Raises:
        RecipeError: the machine failed while they were compared.
    """
    head, config = _head_and_config(recipe)
    generated = architecture.generated_model_of(head)
    if _upstream_class(generated, head) is None:
        return ""
    section = recipe.parallel
    layouts = ("fsdp2", *(["ep2"] if section.ep > 1 else []), *(["sp2"] if section.sp > 1 else []))
    reasons = report.read_two_ranks(generated.directory, generated.file, head.__name__)
    if reasons is None:
        parts = {"two ranks": head.__name__, "files": _file_hashes(head, config), "separates": separates}
        path = _cache_folder() / f"{_hash_of(parts)}.json"
        reasons = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        try:
            missing = [layout for layout in layouts if layout not in reasons]
            found = compare_on_two_ranks(generated, head.__name__, separates=separates, layouts=missing)
        except CaseFailed as failure:
            raise RecipeError(
                f"model.source = '{recipe.model.source}': it could not be compared on two processes of this machine, as a run on "
                f"several ranks requires: {verdict.one_line(failure.first_error)} To fix: free memory, and start it again."
            ) from failure
        reasons |= {layout: verdict.one_line(result.reason) for layout, result in found.items()}
        if missing:
            _write_cache(path, reasons)
    told = verdict.on_two_ranks({layout: reasons.get(layout, "") for layout in layouts})
    return "" if told.status == verdict.PROVEN else told.words


def examine(recipe: Recipe) -> Preflight:
    """The decision, from the cache if possible.

    Raises:
        RecipeError: there is no such model, or none was generated.
    """
    attention_choice.require_available(recipe.model.attention)
    head, config = _head_and_config(recipe)
    named_seams = {name: seams.without_rounding(name, getattr(recipe.kernels, name)) for name in seams.names()}
    media = recipe.has_media
    dtype = models.compute_dtype(recipe)
    path = _cache_folder() / f"{_cache_key(head, config, recipe.model.attention, named_seams, media, dtype)}.json"
    if path.is_file():
        cached = json.loads(path.read_text(encoding="utf-8"))
        return Preflight(**cached | {"facts": from_records(cached["facts"])})
    decision, asked = _decide(head, config, recipe.model.attention, named_seams, media=media)
    if not decision.refusal:  # chosen again for the real head size, which the shrunk model does not have
        decision = replace(
            decision, attention=attention_choice.choose(recipe.model.attention, head, config, asked, dtype)
        )
    if media and not decision.refusal:
        decision = with_modalities(decision, head, config)
    _write_cache(path, asdict(decision))
    return decision


def _write_cache(path: Path, content: Mapping[str, object]) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(f".{os.getpid()}")
        temporary.write_text(json.dumps(content), encoding="utf-8")
        temporary.replace(path)
    except OSError as error:
        warnings.warn(
            f"The verdict cannot be cached, so each start computes it again, which takes seconds: {verdict.one_line(error)}",
            stacklevel=2,
        )


def _head_and_config(recipe: Recipe) -> tuple[type[PreTrainedModel], PreTrainedConfig]:
    """The generated head, and the config or sub-config that it takes."""
    config = models.read_config(recipe.model)
    try:
        return models.find_head_and_config(config, architecture.register(recipe.model))
    except ImportError as error:  # a package that upstream's code needs
        reason = f"upstream's own class fails: {type(error).__name__}: {error}"
        words = verdict.Verdict(verdict.GENERATED, verdict.one_line(reason)).words
        raise RecipeError(f"model.source = '{recipe.model.source}': {words}") from error
    except (registry.UnknownModelError, ReleaseMismatch) as error:
        kind = config.model_type
        if isinstance(error, ReleaseMismatch | UnknownPartError):
            raise RecipeError(f"model.source = '{recipe.model.source}': {error}") from error
        raise RecipeError(
            f"model.source = '{recipe.model.source}': no generated model takes a {type(config).__name__}. Generate one with "
            f"`patchgen generate {kind}`, which gives the reason if it cannot."
        ) from error


def _decide(
    head: type[PreTrainedModel],
    config: PreTrainedConfig,
    named_attention: Names | None,
    named_seams: Mapping[str, str | None],
    *,
    media: bool,
) -> tuple[Preflight, tuple[Kind, ...]]:
    """The verdict, and the attention features that each kind of layer needs."""
    generated = architecture.generated_model_of(head)
    upstream_class, given = _upstream_class(generated, head), given_config.read(generated.directory)
    if upstream_class is not None:
        type_verdict, training = _type_verdict(generated, head)
        if type_verdict.status != verdict.PROVEN:
            return Preflight(type_verdict.status, type_verdict.reason, ""), ()
        is_chosen = bool(named_attention) or any(named_seams.values())
        if training is not None and not is_chosen and _is_default(config, given):
            observed = _with_effect(from_records(training.get("observed", ())))
            decision = Preflight(type_verdict.status, "", "", training["separates_documents"], facts=observed)
            return decision, report.read_kinds(training)
    small = _shrunk_config(upstream_class or head, config, given)
    proof = prove_training_path(
        upstream_class,
        head,
        small,
        named_attention=named_attention,
        named_seams=named_seams,
        config_with_dropout=with_dropout(small, config),
        media=media,
    )
    status = verdict.PROVEN if not proof.reason else verdict.EAGER_ONLY if upstream_class else verdict.GENERATED
    decision = Preflight(
        status,
        verdict.one_line(proof.reason),
        proof.attention,
        proof.separates_documents,
        facts=_with_effect(proof.facts),
    )
    return decision, proof.attention_kinds


def _with_effect(facts: Iterable[Fact]) -> tuple[Fact, ...]:
    return tuple(fact for fact in facts if fact.effect)


def with_modalities(decision: Preflight, head: type[PreTrainedModel], config: PreTrainedConfig) -> Preflight:
    """The same decision, with the pairs of modalities that must not share a row."""
    reference = _upstream_class(architecture.generated_model_of(head), head) or head
    pairs = modalities.separate_pairs(
        reference,
        head,
        _shrunk_config(reference, config, given_config.of_class(head)),
        attention_name=decision.attention,
        separates_documents=decision.separates_documents,
    )
    return replace(decision, separate_pairs=pairs)


def _upstream_class(generated: registry.GeneratedModel, head: type[PreTrainedModel]) -> type[PreTrainedModel] | None:
    """The class that a head was generated from; None: `model.code` is the generated folder, without its source."""
    if generated.is_from_user_file and generated.source is None:
        return None
    return getattr(generated.upstream(), head.__name__)


def _type_verdict(
    generated: registry.GeneratedModel, head: type[PreTrainedModel]
) -> tuple[verdict.Verdict, TrainingRecord | None]:
    """The verdict on a head and the record of its training path: the recorded one if it applies here, else computed now."""
    assert head.config_class is not None, "a generated head names its configuration"
    recorded = report.read_training(generated.directory, generated.file, head.__name__)
    if recorded is not None and _has_current_attention(
        recorded, given_config.read(generated.directory).small_config(head.config_class)
    ):
        return verdict.Verdict(verdict.PROVEN), recorded
    type_verdict, proof = judge(generated, head=head.__name__, implementations=IMPLEMENTATIONS)
    training = proof.training if proof is not None else None
    return type_verdict, report.training_record(training) if training is not None else None


def _has_current_attention(recorded: TrainingRecord, small: SmallConfig) -> bool:
    """Whether a recorded comparison ran with the attention that would be chosen on a CPU now."""
    chosen = attention_kinds.choose(report.read_kinds(recorded), small.config, device_type="cpu")
    return chosen == recorded["compared_with"]


def _is_default(config: PreTrainedConfig, given: GivenConfig) -> bool:
    """Whether a config shrinks to the one that its type was proven with."""
    try:
        return given.shrink(config).config.to_dict() == given.small_config(type(config)).config.to_dict()
    except SmallConfigError:  # told by `_shrunk_config`
        return False


def _shrunk_config(
    model_class: type[PreTrainedModel], config: PreTrainedConfig, given: GivenConfig
) -> PreTrainedConfig:
    """A config of the same options at small sizes; if the model refuses it, warns and returns one with its class's defaults."""
    try:
        small = given.shrink(config).config
        train_step(build_model(model_class, small), text_cases(small, model_class)[0])
    except UPSTREAM_REFUSALS as refusal:
        reraise_machine_failure(refusal)
        warnings.warn(
            "This config cannot be compared with upstream at small sizes "
            f"({verdict.one_line(f'{type(refusal).__name__}: {refusal}')}): the proof before the run uses "
            f"{type(config).__name__} with its defaults, not the options set here.",
            stacklevel=2,
        )
        return given.small_config(type(config)).config
    return small


@functools.cache
def _code_hash() -> str:
    """A hash of runtime and kernels, which both the comparison and the compared model run on."""
    digest = hashlib.sha256()
    for folder in ("runtime", "kernels"):
        for path in sorted((Path(attention.__file__).parents[1] / folder).glob("**/*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()


def _cache_key(
    head: type[PreTrainedModel],
    config: PreTrainedConfig,
    named_attention: Names | None,
    named_seams: Mapping[str, str | None],
    media: bool,
    dtype: torch.dtype,
) -> str:
    parts = {
        "files": _file_hashes(head, config),
        "head": head.__name__,
        "compared": _upstream_class(architecture.generated_model_of(head), head) is not None,
        "config": config.to_dict(),
        "attention": named_attention,
        "usable": [name for name, backend in BACKENDS.items() if backend.unavailable() is None],
        "seams": dict(named_seams),
        "media": media,
        "dtype": str(dtype),
    }
    return _hash_of(parts)


def _file_hashes(head: type[PreTrainedModel], config: PreTrainedConfig) -> list[str]:
    """Of the generated files that a head and its parts are from, and of the configurations and given values beside them."""
    modules = [architecture.file_of(head), *part_files(head, config)]
    files = [file for module in modules for file in sorted(module.parent.glob("*.py"))]
    files += [file for module in modules if (file := module.with_name(given_config.FILE_NAME)).is_file()]
    return [hashlib.sha256(file.read_bytes()).hexdigest() for file in files]


def _hash_of(parts: Mapping[str, object]) -> str:
    """A hash of these, of the code that compares, and of the releases."""
    everything = {**parts, "code": _code_hash(), "versions": [torch.__version__, transformers.__version__]}
    return hashlib.sha256(json.dumps(everything, sort_keys=True, default=str).encode()).hexdigest()[:32]


def _cache_folder() -> Path:
    return Path.home() / ".cache" / "patchgen" / "preflight"
