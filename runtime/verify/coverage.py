"""For how many text types of transformers a small config exists that upstream's own class trains on.

python -m patchgen.runtime.verify.coverage                 # every causal type, one line each: ok or the reason
python -m patchgen.runtime.verify.coverage mixtral mamba2  # some
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

import torch

from patchgen.runtime.verify.comparison import train_step
from patchgen.runtime.verify.inputs import text_cases
from patchgen.runtime.verify.model_pair import build_model
from patchgen.runtime.verify.small_config import SmallConfigError, small_config

# What upstream's classes raise on a config or an input that they do not serve.
REFUSALS = (
    SmallConfigError, RuntimeError, ValueError, TypeError, LookupError, AttributeError, AssertionError, ImportError,
)  # fmt: skip


@dataclass(frozen=True)
class Coverage:
    """One model type: `reason` is empty where every case ran forward and backward with a finite loss."""

    model_type: str
    is_moe: bool = False
    num_cases: int = 0
    reason: str = ""
    unclassified: tuple[str, ...] = ()


def causal_types() -> tuple[str, ...]:
    """Every model type that transformers serves with a causal language model."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return tuple(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def cover(model_type: str) -> Coverage:
    """Builds upstream's causal head of `model_type` small and trains it one step on every case."""
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    try:
        head = getattr(transformers, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type])
        small = small_config(head.config_class)
        model = build_model(head, small.config)
        cases = text_cases(small.config, head)
        for case in cases:
            step = train_step(model, case)
            if not all(tensor.isfinite().all() for name, tensor in step.outputs.items() if name in ("loss", "logits")):
                return Coverage(model_type, reason=f"case {case.name}: loss or logits are not finite")
            if len(step.dead()) == len(step.gradients):
                return Coverage(model_type, reason=f"case {case.name}: no parameter has a gradient")
    except REFUSALS as refusal:
        reason = " ".join(f"{type(refusal).__name__}: {refusal}".split())
        return Coverage(model_type, reason=reason[:160])
    return Coverage(model_type, _is_moe(model), len(cases), unclassified=small.unclassified)


def _is_moe(model: torch.nn.Module) -> bool:
    """Whether a live module holds or routes to several experts."""
    for module in model.modules():
        name = type(module).__name__
        if "Experts" in name or "SparseMoe" in name or "MoE" in name or ("Moe" in name and "Block" in name):
            return True
    return False


def main(model_types: list[str]) -> int:
    """Prints one line per type and the counts; 1 if a type that was named on the command line failed."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    found = []
    for model_type in model_types or causal_types():
        row = cover(model_type)
        found.append(row)
        kind = "moe  " if row.is_moe else "dense"
        detail = f" (unclassified: {', '.join(row.unclassified)})" if row.unclassified else ""
        print(
            f"failed  {row.model_type}: {row.reason}" if row.reason else f"ok {kind} {row.model_type}{detail}",
            flush=True,
        )
    ok = [row for row in found if not row.reason]
    print(f"{len(found)} types, {len(ok)} ok, of which {sum(row.is_moe for row in ok)} with experts")
    return 1 if model_types and len(ok) < len(found) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
