"""The three calls of reinforcement learning: a sharded model learns from what a copy of it writes. On the CPU as it stands:

    torchrun --nproc-per-node 2 examples/reinforce.py --model runs/qwen3_moe_toy/export --ep 2

The engine that writes is plain transformers here. A running vLLM takes the stream in `reload_weights`: see the page
docs/tasks/weights_to_vllm.md.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, AutoTokenizer

from patchgen.runtime import attention, registry, rl, seams
from patchgen.runtime.checkpoint import load_pretrained
from patchgen.runtime.parallel import ParallelConfig, gloo_groups, sharding
from patchgen.runtime.parallel.state import ParallelState

PROMPTS = ["def ", "class ", "import ", "return "]


class Engine:
    """Writes with upstream's class."""

    def __init__(self, folder: str) -> None:
        self.config, self.tokenizer = AutoConfig.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
        self.upstream = MODEL_FOR_CAUSAL_LM_MAPPING[type(self.config)]
        self.tokenizer.padding_side = "left"
        self.tokenizer.pad_token = self.tokenizer.pad_token or self.tokenizer.eos_token

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        self.model = self.upstream.from_pretrained(None, config=self.config, state_dict=dict(weights))

    def write(self, prompts: list[str], length: int) -> tuple[dict[str, Tensor], Tensor]:
        """Inputs of whole sequences, and which of their tokens were drawn."""
        asked = self.tokenizer(prompts, return_tensors="pt", padding=True, return_token_type_ids=False)
        ids = self.model.generate(
            **asked, do_sample=True, top_k=0, max_new_tokens=length, min_new_tokens=length,
            pad_token_id=self.tokenizer.pad_token_id,
        )  # fmt: skip
        drawn = torch.zeros_like(ids, dtype=torch.bool)
        drawn[:, asked["input_ids"].shape[1] :] = True
        mask = torch.cat([asked["attention_mask"], drawn[:, asked["input_ids"].shape[1] :].long()], dim=1)
        return {"input_ids": ids, "attention_mask": mask}, drawn


def clipped(log_probs: Tensor, told: tuple[Tensor, Tensor, Tensor, int]) -> Tensor:
    """PPO's loss: this batch's part of a mean over all drawn tokens."""
    before, drawn, advantages, count = told
    ratio = (log_probs - before).exp()
    gain = torch.minimum(ratio * advantages[:, None], ratio.clamp(0.8, 1.2) * advantages[:, None])
    return -gain[drawn].sum() / count


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True, help="a folder with weights and tokenizer")
    parser.add_argument("--ep", type=int, default=1)
    parser.add_argument("--sp", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--replay-routing", action="store_true", help="updates select the experts of the first forward"
    )
    options = parser.parse_args()
    gloo_groups.use_one_worker()
    dist.init_process_group("gloo")

    # The trainer: FSDP2 x EP x SP.
    attention.register()
    seams.configure(fused_moe="auto")
    layout = ParallelConfig.for_world(dist.get_world_size(), sp=options.sp, ep=options.ep)
    state = ParallelState.create(layout, "cpu")
    config = AutoConfig.from_pretrained(options.model)
    with torch.device("meta"):
        model = registry.build_model(config, attn_implementation="patchgen_sdpa", dtype=torch.float32)
    sharding.shard_model(model, state)
    load_pretrained(model, options.model)
    optimizer = torch.optim.AdamW(sharding.optimizer_groups(model), lr=2e-3)

    engine = Engine(options.model)
    for number in range(options.rounds):
        engine.load_weights(rl.stream_weights(model))
        torch.manual_seed(number * layout.num_batches + state.batch_index)  # ranks that share a sequence draw the same
        inputs, drawn = engine.write(PROMPTS * 4, length=12)
        texts = engine.tokenizer.batch_decode(inputs["input_ids"].masked_fill(~drawn, engine.tokenizer.pad_token_id))
        rewards = torch.tensor([sum(letter.islower() for letter in text) / len(text) for text in texts])
        routing = None
        if options.replay_routing:
            with rl.record_routing(model, state) as routing:
                before = rl.log_probs(model, inputs, state)
        else:
            before = rl.log_probs(model, inputs, state)
        count = int(drawn.sum()) * layout.num_batches
        told = (before, drawn, (rewards - rewards.mean()) / (rewards.std() + 1e-6), count)
        done = [rl.update(model, optimizer, [(inputs, told)], clipped, state, routing=[routing]) for _ in range(2)]
        if dist.get_rank() == 0:
            losses = ", ".join(f"{one.loss:+.4f}" for one in done)
            print(f"round {number + 1}: reward {rewards.mean():.3f}, losses {losses}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
