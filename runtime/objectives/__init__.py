"""Training objectives. `docs/objectives.md` explains how to choose one and how to write one.

base.py       the base class                              batch.py      the inputs of a loss, in every layout
choose.py     from a recipe to the objective              learning.py   reference and teacher forwards before the training one
heads.py      task heads on generated models              reference.py  cached log-probabilities before training
dpo.py, reward.py, classification.py, tokens.py, embedding.py, distillation.py     the built-in objectives
"""

from patchgen.runtime.objectives.base import NextToken, Objective
from patchgen.runtime.objectives.batch import Batch

__all__ = ["Batch", "NextToken", "Objective"]
