"""Rows of 256k to 1M tokens on two GPUs, with layers' inputs on the device and in host memory: tokens/s, MFU, memory.

    torchrun --nproc-per-node 2 benchmarks/bench_long.py
    torchrun --nproc-per-node 2 benchmarks/bench_long.py --device cpu --tiny        # that it runs, on gloo

Qwen3-30B-A3B's width, one document per row, all ranks share it (sp), FSDP2, fp32 parameters and AdamW at a learning rate of 0:
every step has the same weights, so losses and gradients of the modes of a length can be compared.

    full         `activation_checkpointing: full`
    inputs       `full` and `offload_inputs: true`
    attention    `full`, `offload_inputs: true` and `offload_attention: true`

Gradients are compared by samples of each parameter: the distance of a mode's from those of `full`, relative, the largest of all
parameters; `repeated` is that of `full` from itself, which is not 0 where kernels add atomically. MFU is by
`runtime/train/flops.py`. A case that would end after --budget seconds is left out. With `--account TOKENS` one more
step of the last mode of that length says whose allocations the peak consists of (`peak_memory.py`).
"""

from __future__ import annotations

import argparse
import datetime
import gc
import itertools
import os
import time
from pathlib import Path
from typing import Any

import case_failures
import named_weights
import peak_memory
import result_rows
import torch
import torch.distributed as dist
from bench_train import MODEL, TINY, config_of
from packed_rows import packed_row
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import PreTrainedModel

from patchgen.runtime import attention, ops, parallel, registry, seams
from patchgen.runtime.parallel import (
    ParallelConfig,
    checkpointing,
    gradients,
    loss,
    offloaded_inputs,
    peer_memory,
    sharding,
)
from patchgen.runtime.parallel.batch import slice_batch
from patchgen.runtime.parallel.state import ParallelState
from patchgen.runtime.train import flops, optimizers

RESULTS = Path(__file__).with_name("results_long.csv")
COLUMNS = ("date", "versions", "gpus", "attention", "layers", "tokens", "mode", "loss", "norm", "gradients", "s/step")
COLUMNS += ("tokens/s/GPU", "MFU %", "peak GiB", "held GiB", "host GiB")
MODES = ("full", "inputs", "attention")
SHARE_OF_PEAK = {
    "full": 0.30,
    "inputs": 0.30,
    "attention": 0.36,
}  # to predict the time of the first cases, on the safe side
SAMPLE = 2**18


# ------------------------------------------------------------------------------------------------- attention


def attention_rates(tokens: int, device: str) -> dict[str, tuple[float, float]]:
    """Backend of SDPA -> TFLOP/s of its forward and of its backward, 16 heads of 128 with two for keys, causal."""
    found = {}
    for name in ("CUDNN_ATTENTION", "FLASH_ATTENTION"):
        try:
            with sdpa_kernel([SDPBackend.__members__[name]]):
                found[name] = _rate(tokens, device)
        except RuntimeError as error:
            print(f"{name}: {str(error).splitlines()[0]}", flush=True)
    return found


def _heads(tokens: int, device: str) -> list[Tensor]:
    generator = torch.Generator(device).manual_seed(0)
    shapes = [(1, tokens, heads, 128) for heads in (16, 2, 2)]
    made = [torch.randn(shape, generator=generator, device=device, dtype=torch.bfloat16) for shape in shapes]
    return [states.transpose(1, 2).requires_grad_() for states in made]


def _attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def _rate(tokens: int, device: str) -> tuple[float, float]:
    q, k, v = _heads(tokens, device)
    work = 2 * tokens**2 * 128 * 16 / 1e12
    for _ in range(2):
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(3)]
        marks[0].record()
        out = _attend(q, k, v)
        marks[1].record()
        out.backward(out.detach())
        marks[2].record()
    torch.cuda.synchronize()
    forward, backward = (a.elapsed_time(b) / 1e3 for a, b in itertools.pairwise(marks))
    return work / forward, 2.5 * work / backward


def attention_errors(tokens: int, device: str) -> dict[str, float]:
    """Relative errors of the last head's results and gradients against fp32, for queries at the end of a row; all others have no
    gradient. q has 2**31 elements at 1M tokens, where an offset in 32 bits would be another place."""
    q, k, v = _heads(tokens, device)
    out = _attend(q, k, v)
    upstream = torch.zeros_like(out)
    last = slice(tokens - 64, tokens)
    upstream[:, -1, last] = torch.randn(64, 128, device=device, dtype=out.dtype)
    out.backward(upstream)
    wide = [states.detach().float().requires_grad_() for states in (q[0, -1, last], k[0, -1], v[0, -1])]
    scores = wide[0] @ wide[1].T / 128**0.5
    hidden = torch.arange(tokens, device=device)[None] > torch.arange(tokens - 64, tokens, device=device)[:, None]
    expected = scores.masked_fill(hidden, -torch.inf).softmax(-1) @ wide[2]
    expected.backward(upstream[0, -1, last].float())
    grads: list[Any] = [one.grad for one in (q, k, v, *wide)]
    dq, dk, dv, *expected_grads = grads
    found = (out[0, -1, last], dq[0, -1, last], dk[0, -1], dv[0, -1])
    pairs = dict(zip(("out", "dq", "dk", "dv"), zip(found, (expected, *expected_grads), strict=True), strict=True))
    return {name: float((got.float() - want).norm() / want.norm()) for name, (got, want) in pairs.items()}


# -------------------------------------------------------------------------------------------------- a case


def build(sizes: dict, state: ParallelState, device: str, attention_name: str) -> PreTrainedModel:
    with torch.device("meta"):
        model = registry.build_model(config_of(sizes), attn_implementation=attention_name).train()
    checkpointing.apply(model, "full")
    options = sharding.ShardingOptions()
    if device == "cuda":
        options = sharding.ShardingOptions(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    sharding.shard_model(model, state, options=options)
    sharding.materialise(model, device)
    for name, parameter in model.named_parameters():
        named_weights.place(named_weights.weight_of(name, parameter.shape, device), parameter)
    return model


def inputs_of(tokens: int, sizes: dict, state: ParallelState, device: str) -> dict[str, Any]:
    """This rank's slice of one document."""
    ids = packed_row(tokens, sizes["vocab_size"], 0)["input_ids"]
    inputs = slice_batch({"input_ids": ids, "labels": ids}, sp=state.sp, sp_rank=state.sp_rank)
    return {key: value.to(device) if isinstance(value, Tensor) else value for key, value in inputs.items()}


def compile_elementwise(tokens: int, sizes: dict, device: str) -> None:
    """Compiles norms and rotary embeddings for this rank's shapes, which a step of half a minute should not wait for."""
    options = {"device": device, "dtype": torch.bfloat16 if device == "cuda" else torch.float32, "requires_grad": True}
    D, heads = sizes["head_dim"], (sizes["num_attention_heads"], sizes["num_key_value_heads"])
    for shape in ((1, tokens, sizes["hidden_size"]), *((1, tokens, number, D) for number in heads)):
        weight = torch.ones(shape[-1], **options)
        states = torch.ones(shape, **options)
        for repeat in range(2):  # some layers' first input is a leaf, others' is not
            ops.rms_norm(states * 1 if repeat else states, weight, 1e-6).sum().backward()
    q, k = (torch.ones(1, tokens, number, D, **options).transpose(1, 2) for number in heads)
    cos, sin = (torch.ones(1, tokens, D, device=device, dtype=q.dtype) for _ in range(2))
    torch.stack([rotated.sum() for rotated in ops.rotary(q, k, cos, sin)]).sum().backward()


def step(model: nn.Module, optimizer, inputs: dict, state: ParallelState) -> tuple[float, dict, float, dict]:
    """Loss, gradient samples and norm, seconds and memory of one step."""
    items = loss.count_items([inputs], inputs["input_ids"].device)
    synchronise()
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    started = time.perf_counter()
    with parallel.using(state), loss.step(items):
        share = model(**inputs, num_items_in_batch=items, use_cache=False).loss
        held = torch.cuda.memory_allocated() if torch.cuda.is_available() else 0
        share.backward()
    synchronise()
    seconds = time.perf_counter() - started
    samples = {name: _sample(p.grad) for name, p in model.named_parameters() if p.grad is not None}
    synchronise()
    started = time.perf_counter()
    norm = gradients.clip(model, 1.0, optimizer=optimizer)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    synchronise()
    seconds += time.perf_counter() - started
    total = share.detach().clone()
    dist.all_reduce(total)
    peak = torch.cuda.max_memory_allocated() + peer_memory.shared_gpu_bytes() if torch.cuda.is_available() else 0
    figures = {"loss": round(float(total), 6), "norm": round(float(norm), 6), "s/step": round(seconds, 3)}
    figures |= {"peak GiB": round(peak / 2**30, 1), "held GiB": round(held / 2**30, 1)}
    return float(total), samples, seconds, figures


def _sample(gradient: Tensor) -> Tensor:
    """At most `SAMPLE` elements of this rank's part, spread evenly, fp32 on the host."""
    local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
    return local.flatten()[:: max(1, local.numel() // SAMPLE)].float().cpu()


def distance(samples: dict[str, Tensor], reference: dict[str, Tensor]) -> float:
    """The largest relative distance of a parameter's gradient, over all ranks."""
    found = [(samples[name] - want).norm() / want.norm().clamp(min=1e-30) for name, want in reference.items()]
    largest = torch.stack(found).max().to("cuda" if torch.cuda.is_available() else "cpu")
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return float(largest)


def synchronise() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    dist.barrier()


# --------------------------------------------------------------------------------------------------- the run


class Run:
    """The cases, one after the other, and their rows."""

    def __init__(self, arguments: argparse.Namespace, started: float) -> None:
        self.arguments, self.started, self.device = arguments, started, arguments.device
        self.world, self.rows, self.shares = dist.get_world_size(), [], dict(SHARE_OF_PEAK)
        self.peak = flops.peak_tflops(torch.device(self.device)) or 1.0
        self.attention = "sdpa"

    def fits(self, seconds: float) -> bool:
        """Whether a case of this length ends in time, by rank 0's clock."""
        late = torch.tensor(
            time.perf_counter() - self.started + seconds > self.arguments.budget, device=self.device, dtype=torch.int32
        )
        dist.broadcast(late, src=0)
        return not late

    def length(self, tokens: int, layers: int, modes: list[str]) -> None:
        """The modes of one length; the first of all cases is preceded by a step that is not timed."""
        sizes = (TINY if self.arguments.tiny else MODEL) | {"num_hidden_layers": layers, "max_window_layers": layers}
        sizes["max_position_embeddings"] = max(tokens, sizes["max_position_embeddings"])
        state = ParallelState.create(
            ParallelConfig.for_world(self.world, sp=self.world), self.device, head_groups=self.arguments.head_groups
        )
        model = build(sizes, state, self.device, "patchgen_sdpa")
        cost = flops.model_cost(model)
        optimizer = optimizers.adamw_for(next(model.parameters()))(
            sharding.optimizer_groups(model), lr=0.0, weight_decay=0.0
        )
        for parameter in model.parameters():  # so that the first step of a length, too, has the optimizer's states
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        inputs = inputs_of(tokens, sizes, state, self.device)
        work = cost.flops([tokens]) / 1e12
        compile_elementwise(tokens // self.world, sizes, self.device)
        reference, is_first = None, not self.rows
        for mode in modes:
            predicted = work / self.world / self.peak / self.shares[mode]
            repeats = 2 if is_first and mode == "full" else 1
            if not self.fits(repeats * predicted):
                self.say(f"{tokens} tokens, {mode}: left out, it would take {predicted:.0f} s")
                continue
            row = {"attention": self.attention, "layers": layers, "tokens": tokens, "mode": mode}
            try:
                for _ in range(repeats - 1):
                    _, reference, _, _ = step(model, optimizer, inputs, state)
                transfers = self.prepare(model, mode, layers, tokens // self.world, sizes)
                _, samples, seconds, figures = step(model, optimizer, inputs, state)
            except Exception as error:  # of one case: its row has the reason, shorter cases may follow
                row["s/step"] = case_failures.reason(error)
                self.rows.append(row)
                case_failures.leave_unless_shared(f"{mode}, {tokens}")
                break
            tflops = work / seconds / self.world
            self.shares[mode] = 0.97 * tflops / self.peak
            row |= figures | {"tokens/s/GPU": round(tokens / seconds / self.world, 1)}
            row |= {"MFU %": round(100 * tflops / self.peak, 1)} if self.device == "cuda" else {}
            row["host GiB"] = round(transfers.host_bytes / 2**30, 1) if transfers else 0.0
            row["gradients"] = f"{distance(samples, reference):.1e}" if reference else "reference"
            reference = reference or samples
            self.rows.append(row)
            self.say(" | ".join(str(row.get(column, "")) for column in COLUMNS[3:]))
        if tokens in self.arguments.account and self.fits(predicted):
            with peak_memory.recorded() as record:
                step(model, optimizer, inputs, state)
            self.account(record, model, optimizer, f"{tokens} tokens, {layers} layers, {mode}")
        model = optimizer = inputs = transfers = None
        gc.collect()  # FSDP2's hooks and their modules refer to each other
        if self.device == "cuda":
            torch.cuda.empty_cache()

    def prepare(self, model: nn.Module, mode: str, layers: int, tokens: int, sizes: dict):
        """Sets the mode; torch then has the pinned memory that its first step would wait for."""
        checkpointing.apply(model, "full")
        if mode == "full":
            return None
        per_token = sizes["hidden_size"]
        if mode == "attention":
            per_token += sizes["num_attention_heads"] * (sizes["head_dim"] + 2)
        pieces = 2 * per_token * tokens * layers // offloaded_inputs.PIECE_BYTES + 4 * layers
        if self.device == "cuda":
            pinned = [
                torch.empty(offloaded_inputs.PIECE_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(pieces)
            ]
            del pinned
        return offloaded_inputs.apply(model, attention=mode == "attention")

    def account(self, record: peak_memory.Record, model: nn.Module, optimizer, case: str) -> None:
        """Prints what the peak of a recorded step consists of, on rank 0."""
        sizes = peak_memory.account(record.trace, record.before)
        total = sum(sizes.values())
        known = {"parameters": sum(p.to_local().nbytes for p in model.parameters() if isinstance(p, DTensor))}
        known["optimizer"] = sum(
            v.to_local().nbytes if isinstance(v, DTensor) else v.nbytes
            for values in optimizer.state.values() for v in values.values() if isinstance(v, Tensor)
        )  # fmt: skip
        lines = [
            f"peak of {case}: {total / 2**30:.1f} GiB, and {peer_memory.shared_gpu_bytes() / 2**30:.1f} of peer memory"
        ]
        lines += [f"  of those {name} {size / 2**30:.2f} GiB" for name, size in known.items()]
        lines += [f"{size / 2**30:8.2f} GiB {size / total:6.1%}  {name}" for name, size in list(sizes.items())[:16]]
        self.say("\n".join(lines))

    def say(self, text: str) -> None:
        if dist.get_rank() == 0:
            print(f"{text}   (after {time.perf_counter() - self.started:.0f} s)", flush=True)


def choose_attention(run: Run) -> None:
    """Prints the rates of SDPA's backends and lets the fastest compute; checks it at the longest rows."""
    rates = attention_rates(65_536, run.device)
    run.say("; ".join(f"{name}: {a:.0f} forward, {b:.0f} backward TFLOP/s" for name, (a, b) in rates.items()))
    run.attention = max(rates, key=lambda name: 3.5 / (1 / rates[name][0] + 2.5 / rates[name][1]))
    torch.backends.cuda.enable_flash_sdp(run.attention == "FLASH_ATTENTION")
    torch.backends.cuda.enable_cudnn_sdp(run.attention == "CUDNN_ATTENTION")
    torch.backends.cuda.enable_mem_efficient_sdp(False)
    if run.arguments.check:
        errors = attention_errors(run.arguments.check, run.device)
        run.say(f"{run.attention} at {run.arguments.check} tokens against fp32: " + str(errors))
        if not max(errors.values()) < 2e-2:
            run.arguments.head_groups = 2
            run.say("that is no rounding: heads go in two groups")
    torch.cuda.empty_cache()


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--tiny", action="store_true", help="small sizes, for the CPU")
    parser.add_argument(
        "--cases", nargs="+", metavar="TOKENS:LAYERS:MODES",
        default=["262144:6:full,inputs,attention", "524288:3:full,inputs,attention", "1048576:2:attention,full,inputs"],
    )  # fmt: skip
    parser.add_argument("--head-groups", type=int, default=1)
    parser.add_argument(
        "--check", type=int, default=0, metavar="TOKENS", help="compare attention with fp32 at this length"
    )
    parser.add_argument(
        "--account", type=int, nargs="*", default=[], metavar="TOKENS", help="explain the peak of the last mode of these lengths"
    )  # fmt: skip
    parser.add_argument("--budget", type=float, default=400.0, help="seconds; a case that would end later is left out")
    return parser.parse_args()


def main() -> None:
    arguments, started = read_arguments(), time.perf_counter()
    if arguments.device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if arguments.device == "cuda" else "gloo", timeout=datetime.timedelta(seconds=300))
    attention.register()
    run = Run(arguments, started)
    choices = {"fused_moe": "auto", "causal_lm_loss": "auto", "rms_norm": "compiled", "rotary": "compiled"}
    if arguments.device == "cuda":
        choose_attention(run)
    with seams.using(**choices):
        run.say(" | ".join(COLUMNS[3:]))
        for case in arguments.cases:
            tokens, layers, modes = case.split(":")
            run.length(int(tokens), int(layers), modes.split(","))
    if dist.get_rank() == 0:
        import transformers

        gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
        versions = f"torch {torch.__version__}, transformers {transformers.__version__}"
        result_rows.append(RESULTS, COLUMNS, run.rows, versions=versions, gpus=f"{run.world} {gpu}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
