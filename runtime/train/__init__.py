"""Training of generated models: a recipe in, a run directory out.

recipe.py      the types of a recipe; reading, --set, printing     setup.py      model, weights, optimizers, loaders
trainer.py     the loop                                            optimizers.py groups, AdamW, Muon; the schedule
adamw.py       AdamW in one pass over memory
flops.py       FLOPs per token, MFU                                memory.py     estimated memory per rank
run_plan.py    what --dry-run prints                               lora.py       adapters through PEFT
expert_lora.py adapters of stacked experts, sharded over ranks     lora_targets.py  which modules get adapters
run_log.py     JSONL, trackers                                     view.py       the terminal
page.py        report.png and the page of a run                    architecture.py  registers custom architectures

from patchgen.runtime.train.recipe import load
from patchgen.runtime.launch import launch

launch(load("recipes/qwen3_moe_toy.yaml", {"train.steps": 20}), processes=2)
"""
