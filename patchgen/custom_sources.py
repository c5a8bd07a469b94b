"""Modeling files that are not part of transformers: the refusals of all passes are one error, and so are all missing imports."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from pathlib import Path

from patchgen.anatomy import Anatomy, ClassInfo
from patchgen.anatomy.classes import parameter_names
from patchgen.anatomy.own_losses import CROSS_ENTROPIES
from patchgen.anatomy.vocabulary import uses_projection, with_methods
from patchgen.errors import ConfigError, PassMismatch
from patchgen.model_configs import ModelConfig, shown_file
from patchgen.source import Module
from patchgen.upstream import Upstream


def combined_refusal(upstream: Upstream, config: ModelConfig, refusals: Sequence[PassMismatch]) -> PassMismatch:
    """The refusals of all passes as one error, with the config that skips these passes; a single refusal as it is."""
    if len(refusals) == 1:
        return refusals[0]
    names = dict.fromkeys(error.pass_name for error in refusals)
    expected = "".join(f'        "{name}": Expect(0, reason="..."),\n' for name in names)
    messages = "\n\n".join(map(str, refusals))
    return PassMismatch(
        f"{len(names)} passes refuse {upstream.origin}: {', '.join(names)}.\n\n{messages}\n\n"
        f"To leave sites that no fix above covers as upstream wrote them, declare it for each pass in {config_path(upstream)}:\n\n"
        "    from patchgen.model_configs import Expect, ModelConfig\n\n"
        f'    CONFIG = ModelConfig(model="{config.model}", expect={{\n{expected}    }})',
        tuple(site for error in refusals for site in error.sites),
        refusals[0].pass_name,
    )


TARGETS = ("labels", "label", "targets", "target", "target_ids")  # of a loss, as forwards call them
HEAD = """
    class {name}(PreTrainedModel, GenerationMixin):
        def forward(self, input_ids=None, attention_mask=None, position_ids=None, labels=None, **kwargs):
            logits = self.lm_head(...)  # nn.Linear(..., config.vocab_size)
            loss = None
            if labels is not None:
                loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
            return CausalLMOutputWithPast(loss=loss, logits=logits)
"""


def require_head(anatomy: Anatomy) -> None:
    """Raises ConfigError, with the candidates and what to write, if a file on disk has no causal head."""
    if anatomy.upstream.given is None or anatomy.own_heads():
        return
    own = [info for info in anatomy.classes.values() if anatomy.upstream.is_own(info.name)]
    reasons = {info.name: reason for info in own if (reason := _why_no_head(anatomy, info))}
    listed = "".join(f"\n  {name}: {reason}" for name, reason in reasons.items())
    name = next(iter(reasons), "MyForCausalLM")
    models = [info.name for info in own if anatomy.is_model(info.name)]
    other = f"\nOr generate for a model without a head: --head {models[-1]}." if models else ""
    nearest_ones = f" Nearest to one:{listed}" if listed else ""
    raise ConfigError(
        f"{anatomy.upstream.given} has no causal head: a PreTrainedModel whose forward takes `labels` and computes a loss of "
        f"logits over config.vocab_size.{nearest_ones}\nTo fix: write it as\n{HEAD.format(name=name)}{other}"
    )


def _why_no_head(anatomy: Anatomy, info: ClassInfo) -> str:
    """What a class with a forward lacks of a causal head; empty if it has nothing of one."""
    found = anatomy.method(info.name, "forward")
    if found is None:
        meanings = {ast.unparse(base): anatomy.names.resolve(base) or "" for base in info.node.bases}
        unknown = [base for base, full in meanings.items() if not full or full.startswith(anatomy.upstream.package)]
        what = "whose code the file neither has nor imports by name from transformers"
        return f"it inherits from {unknown[0]}, {what}" if unknown else ""
    code, takes = with_methods(anatomy, info.name, found[1]), parameter_names(found[1])
    other = next((name for name in TARGETS if name in takes and name != "labels"), "")
    has_loss = bool(anatomy.names.operations(*code) & CROSS_ENTROPIES)
    projects = uses_projection(anatomy, info.name, found[1])
    if not has_loss and not projects and not {*TARGETS} & {*takes}:
        return ""
    lacks = ["it is no PreTrainedModel"] * (not anatomy.is_model(info.name))
    if "labels" not in takes:
        lacks.append(f"its forward takes `{other}`, not `labels`" if other else "its forward takes no `labels`")
    lacks += ["it computes no cross entropy"] * (not has_loss)
    lacks += ["it has no nn.Linear to config.vocab_size"] * (not projects)
    return "; ".join(lacks)


def config_path(upstream: Upstream) -> str:
    """The path of a model's config, which may not exist: for a file on disk beside it, else in `model_configs`."""
    if upstream.given is None:
        return shown_file(upstream.model)
    given = Path(upstream.given)
    name = f"patchgen_{upstream.model}.py"
    return upstream.config_file or str(given.with_name(name) if given.suffix == ".py" else given / name)


def check_imports(module: Module, upstream: Upstream) -> None:
    """Raises ConfigError if the generated form of a file on disk would import, at its top level, modules that are not beside
    it, or hides the names of torch or transformers, by which passes know what code means, in a star import."""
    if upstream.version is not None or upstream.module.startswith("transformers."):
        return
    package_prefix = f"{upstream.package}."
    missing: list[str] = []
    for statement in (node for node in module.statements if isinstance(node, ast.ImportFrom)):
        name = statement.module or ""
        is_of_package = name == upstream.package  # `from . import parts`
        modules = [alias.name for alias in statement.names] if is_of_package else []
        modules += [name.removeprefix(package_prefix).split(".")[0]] if name.startswith(package_prefix) else []
        absent = [f"{module_name}.py" for module_name in modules if f"{module_name}.py" not in upstream.siblings]
        missing += [f"{file}, which it imports: put the file beside {upstream.origin}" for file in absent]
        if statement.names[0].name == "*" and name.split(".")[0] in ("torch", "transformers"):
            missing.append(f"names hidden by `{ast.unparse(statement)}`: write out those that the file uses")
    if missing:
        listed = "".join(f"\n  {message}" for message in dict.fromkeys(missing))
        raise ConfigError(f"{upstream.given or upstream.origin} imports what cannot be found:{listed}")
