"""A generated model in TRL's trainers, its experts fused. On the CPU as it stands:

    python examples/with_trl.py grpo --model runs/qwen3_moe_toy/export        # or sft, dpo

The model is handed over as an object: given a path, TRL builds upstream's class. TRL computes the language-model head by
itself, so `causal_lm_loss` serves in none of its trainers; it does in transformers.Trainer.
"""

from __future__ import annotations

import argparse
import copy

import torch
from datasets import Dataset
from transformers import AutoConfig, AutoTokenizer
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer

from patchgen.runtime import registry, seams
from patchgen.runtime.data.builtin import documented_functions


def lower_case(completions: list[str], **_) -> list[float]:
    """A reward for GRPO: the share of lower-case letters."""
    return [sum(letter.islower() for letter in text) / max(1, len(text)) for text in completions]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("trainer", choices=("sft", "dpo", "grpo"))
    parser.add_argument("--model", required=True, help="a folder with weights and tokenizer, or a name on the Hub")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--output", default="runs/with_trl")
    options = parser.parse_args()

    seams.configure(fused_moe="auto")  # Triton's kernels on a GPU, grouped products elsewhere
    head = registry.find_head(AutoConfig.from_pretrained(options.model))
    model = head.from_pretrained(options.model, attn_implementation="sdpa", dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token

    questions = [f"What does {signature} do?\n" for signature, _ in documented_functions()[:64]]
    answers = [docs.splitlines()[0] for _, docs in documented_functions()[:64]]
    common = {
        "output_dir": options.output, "max_steps": options.steps, "per_device_train_batch_size": 2, "logging_steps": 1,
        "learning_rate": 1e-3, "report_to": [], "save_strategy": "no", "bf16": torch.cuda.is_available(),
    }  # fmt: skip
    if options.trainer == "sft":
        data = Dataset.from_dict({"prompt": questions, "completion": answers})
        trainer = SFTTrainer(model, SFTConfig(**common), train_dataset=data, processing_class=tokenizer)
    elif options.trainer == "dpo":
        data = Dataset.from_dict({"prompt": questions, "chosen": answers, "rejected": answers[1:] + answers[:1]})
        # Without one TRL builds the reference itself, of upstream's class.
        reference = copy.deepcopy(model)
        trainer = DPOTrainer(model, reference, DPOConfig(**common), train_dataset=data, processing_class=tokenizer)
    else:
        data = Dataset.from_dict({"prompt": questions})
        arguments = GRPOConfig(**common, num_generations=2, max_completion_length=16)
        trainer = GRPOTrainer(model, lower_case, args=arguments, train_dataset=data, processing_class=tokenizer)
    trainer.train()
    trainer.save_model(options.output)  # upstream's layout: plain transformers loads it
    print(f"trained: {options.output}")


if __name__ == "__main__":
    main()
