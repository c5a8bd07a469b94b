"""Objectives: what a run learns. `docs/objectives.md` says how to choose one and how to write one.

base.py       the class that an objective is              batch.py      what it computes from, in every layout
choose.py     from a recipe to the objective              learning.py   what runs before the forward that is learned from
heads.py      sequence classifiers on generated models    reference.py  log-probabilities before training, kept
dpo.py, reward.py, classification.py, distillation.py     those that ship
"""

from patchgen.runtime.objectives.base import NextToken, Objective
from patchgen.runtime.objectives.batch import Batch

__all__ = ["Batch", "NextToken", "Objective"]
