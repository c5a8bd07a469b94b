"""Training of generated models: a recipe in, a run directory out.

recipe.py      a recipe: reading, --set, printing                  sections.py   the types of its sections
trainer.py     the loop                                            feed.py       the micro-batches of a step
model.py       model, weights, kernels                             setup.py      data, export, listeners, profiler
adamw.py       AdamW in one pass over memory                       optimizers.py groups, AdamW, Muon; the schedule
flops.py       FLOPs per token, MFU                                memory.py     estimated memory per rank
run_plan.py    what --dry-run prints                               lora.py       adapters through PEFT
expert_lora.py adapters of stacked experts, sharded over ranks     lora_targets.py  which modules get adapters
run_log.py     JSONL, trackers                                     view.py       the terminal
page.py        report.png and the page of a run                    architecture.py  registers custom architectures
reading.py     errors, counts and random draws of reading data

from pathlib import Path

from patchgen.runtime.train.recipe import load
from patchgen.runtime.launch import launch

launch(load(Path("recipes/qwen3_moe_toy.yaml"), {"train.steps": 20}), processes=2)
"""
