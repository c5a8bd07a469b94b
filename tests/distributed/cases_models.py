"""A model trained on several ranks against upstream's own class on one; see test_models.py."""

from __future__ import annotations

import copy
import importlib
import importlib.util
import itertools
import sys
import tempfile
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import NamedTuple

import cases_sequence
import torch
import torch.distributed as dist
from rounding import FACTOR
from torch import Tensor

from patchgen.runtime import attention, parallel
from patchgen.runtime.parallel import batch, checkpointing, collectives, gradients, loss, sharding, tables

ROWS, LENGTH, VOCABULARY = 16, 16, 61
DOCUMENTS = (0, 3, 4, 10, 16)  # of a packed row
LEARNING_RATE, MAX_NORM = 1e-3, 0.7

_SMALL = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "use_cache": False,
}
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}

# model type -> (class name, what its config has beyond _SMALL)
MODELS: dict[str, tuple[str, dict]] = {
    "qwen3": ("Qwen3ForCausalLM", {}),
    "llama": ("LlamaForCausalLM", {"tie_word_embeddings": True, "num_key_value_heads": 1}),
    "qwen3_moe": ("Qwen3MoeForCausalLM", {**_EXPERTS, "num_experts": 8, "norm_topk_prob": True}),
    "qwen3_moe_router_loss": (
        "Qwen3MoeForCausalLM",
        {**_EXPERTS, "num_experts": 8, "output_router_logits": True, "router_aux_loss_coef": 0.5},
    ),
    "mixtral": ("MixtralForCausalLM", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "deepseek_v3": (
        "DeepseekV3ForCausalLM",
        {
            **_EXPERTS,
            "n_routed_experts": 8,
            "n_group": 2,
            "topk_group": 1,
            "n_shared_experts": 1,
            "first_k_dense_replace": 1,
            "num_key_value_heads": 4,
            "q_lora_rank": 16,
            "kv_lora_rank": 8,
            "qk_rope_head_dim": 4,
            "qk_nope_head_dim": 8,
            "v_head_dim": 8,
            "head_dim": 4,
        },
    ),
    "gpt_oss": (
        "GptOssForCausalLM",
        {
            **_EXPERTS,
            "num_local_experts": 4,
            "sliding_window": 3,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
        },
    ),
    "qwen3_next": (
        "Qwen3NextForCausalLM",
        {
            **_EXPERTS,
            "num_experts": 4,
            "shared_expert_intermediate_size": 16,
            "layer_types": ["linear_attention", "full_attention"],
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
            "linear_conv_kernel_dim": 3,
        },
    ),
    "qwen4_exp_text": (
        "Qwen4ExpForCausalLM",
        {
            **_EXPERTS,
            "num_experts": 4,
            "shared_expert_intermediate_size": 16,
            "layer_types": ["linear_attention", "indexed_attention"],
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
            "linear_conv_kernel_dim": 3,
            "hc_count": 2,
            "hc_lowrank": 8,
            "indexer_n_heads": 2,
            "indexer_kv_heads": 1,
            "indexer_head_dim": 8,
            "indexer_budget": 8,
            "indexer_compress_ratio": 4,
            "ple_layer_ids": [1],
            "eos_token_id": 5,
            "heads_per_ngram": 2,
            "ngram_vocab_size_base": 40,
            "make_ngram_vocab_size_divisible_by": 3,
            "split_ngram_parts": 3,
            "rope_parameters": {"mrope_section": [2, 1, 1], "rope_theta": 10000.0, "rope_type": "default"},
        },
    ),
    "qwen3_5_text": (
        "Qwen3_5ForCausalLM",
        {
            "layer_types": ["linear_attention", "full_attention"],
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
            "linear_conv_kernel_dim": 3,
        },
    ),
}


def model_type(name: str) -> str:
    return name.removesuffix("_router_loss").removesuffix("_text")


@cache
def import_generated(kind: str):
    """The committed generated module of a model type; generated on the spot where none is committed."""
    from patchgen import pipeline, provenance, upstream

    folder = provenance.generated_root() / kind
    if not folder.is_dir():
        folder = Path(tempfile.mkdtemp(prefix="patchgen-generated-")) / kind
        provenance.write(pipeline.generate(upstream.load(kind)), folder)
    specification = importlib.util.spec_from_file_location(f"generated_{kind}", folder / f"modeling_{kind}.py")
    module = importlib.util.module_from_spec(specification)
    sys.modules[specification.name] = module
    specification.loader.exec_module(module)
    return module


@cache
def config_of(name: str):
    class_name, more = MODELS[name]
    kind = model_type(name)
    module = importlib.import_module(f"transformers.models.{kind}.modeling_{kind}")
    return getattr(module, class_name).config_class(**_SMALL | more)


def build(name: str, *, generated: bool, attention_name: str):
    """The model with reproducible weights. Expert parameters are large enough for their gradients to be seen."""
    kind = model_type(name)
    module = (
        import_generated(kind) if generated else importlib.import_module(f"transformers.models.{kind}.modeling_{kind}")
    )
    cls = getattr(module, MODELS[name][0])
    config = copy.deepcopy(config_of(name))
    config._experts_implementation = "eager"
    torch.manual_seed(0)
    model = cls._from_config(config, attn_implementation=attention_name)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 0.2, generator=generator)
            elif parameter.ndim == 1:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return model.train()


def global_batch(step: int, packed: bool) -> dict[str, Tensor]:
    """All rows of one optimizer step, with labels of uneven number per row, the last row without any."""
    generator = torch.Generator().manual_seed(100 + step)
    ids = torch.randint(0, VOCABULARY, (ROWS, LENGTH), generator=generator)
    labels = ids.clone()
    labels[torch.rand(ROWS, LENGTH, generator=generator) < 0.3] = batch.IGNORED
    labels[-1] = batch.IGNORED
    if packed:
        for start in DOCUMENTS[:-1]:
            labels[:, start] = batch.IGNORED
    return {"input_ids": ids, "labels": labels}


def positions(packed: bool) -> Tensor:
    if not packed:
        return torch.arange(LENGTH)
    return torch.cat([torch.arange(b - a) for a, b in itertools.pairwise(DOCUMENTS)])


# -------------------------------------------------------------------------------------------- one rank


class Steps(NamedTuple):
    """What three steps gave."""

    losses: list[float]
    norms: list[float]  # of the gradients
    gradients: dict[str, Tensor]  # of the first step
    parameters: dict[str, Tensor]  # after the last


@cache
def reference(name: str, packed: bool, micro_batches: int, perturbed: int = 0) -> Steps:
    """Upstream's class in one process.

    Packed rows are run document by document, so nothing of packing is taken on trust. Only with the router loss, which
    is not a sum over documents but over rows, are they packed by upstream itself, row by row.

    Args:
        perturbed: with a seed every weight is moved by one rounding error: what then differs is what rounding moves.
    """
    model = build(name, generated=False, attention_name="eager")
    if perturbed:
        generator, eps = torch.Generator().manual_seed(perturbed), torch.finfo(torch.float32).eps
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1 + eps * torch.empty_like(parameter).bernoulli_(generator=generator).mul_(2).sub_(1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    losses, norms, first = [], [], {}
    for step in range(3):
        whole = global_batch(step, packed)
        items = (whole["labels"][:, 1:] != batch.IGNORED).sum()
        total = 0.0
        for rows in torch.arange(ROWS).chunk(micro_batches):
            for piece in _pieces(name, packed, rows):
                part = {key: value[piece] for key, value in whole.items()}
                whole_row = part["labels"].shape[1] == LENGTH and packed
                more = {"position_ids": positions(True).expand(len(part["labels"]), -1)} if whole_row else {}
                out = model(**part, **more, num_items_in_batch=items, use_cache=False)
                share = out.loss
                if getattr(out, "aux_loss", None) is not None and model.config.output_router_logits:
                    share = share - model.config.router_aux_loss_coef * out.aux_loss * (1 - 1 / ROWS)
                share.backward()
                total += float(share)
        if step == 0:
            first = {key: gradient_or_zeros(parameter) for key, parameter in model.named_parameters()}
        losses.append(total)
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)))
        optimizer.step()
        optimizer.zero_grad()
    return Steps(losses, norms, first, {key: value.detach().clone() for key, value in model.named_parameters()})


def _pieces(name: str, packed: bool, rows: Tensor):
    if name.endswith("_router_loss"):
        return [(row[None], slice(None)) for row in rows]
    if not packed:
        return [(rows, slice(None))]
    return [(rows, slice(a, b)) for a, b in itertools.pairwise(DOCUMENTS)]


# ------------------------------------------------------------------------------------------ many ranks


def agrees(
    name: str,
    *,
    sp: int = 1,
    ep: int = 1,
    dp_replicate: int = 1,
    packed: bool = False,
    micro_batches: int = 1,
    generated: bool = True,
    attention_name: str = "patchgen_eager",
    checkpoint: str = "none",
    tolerance: float = 1e-5,
    expert_capacity: int | None = None,
    expert_exchange: str = "all_to_all",
    meta: bool = False,
    reduce_last: str = "",
    **options: object,
) -> dict[str, float]:
    """Trains three steps on all ranks and compares with `reference`; returns the largest relative differences."""
    attention.register()
    exchange = {"expert_capacity": expert_capacity, "expert_exchange": expert_exchange}
    state = cases_sequence.state_of(sp=sp, ep=ep, dp_replicate=dp_replicate, **exchange)
    model = build(name, generated=generated, attention_name=attention_name)
    whole_tensors = {key: value.clone() for key, value in model.state_dict().items()}
    if meta:
        model = on_meta(model)
    checkpointing.apply(model, checkpoint)
    sharding.shard_model(model, state, options=sharding.ShardingOptions(**options))
    assert bool(tables.of_model(model)) == ("shard_tables_above" in options), "toys have small tables"
    if meta:
        sharding.materialise(model, "cpu")
        sharding.load_full_tensors(model, whole_tensors)
    optimizer = torch.optim.AdamW(sharding.optimizer_groups(model), lr=LEARNING_RATE, fused=True)

    losses, norms, first = [], [], {}
    for step in range(3):
        micro = [slice_of_step(step, packed, state, index, micro_batches) for index in range(micro_batches)]
        items, tokens = loss.count_items(micro, "cpu"), loss.count_tokens(micro, "cpu")
        total = torch.zeros(())
        with parallel.using(state):
            for inputs in micro:
                if reduce_last:
                    last = inputs is micro[-1]
                    sharding.reduce_gradients(model, is_last=last, accumulate_unsharded=reduce_last == "shards too")
                with loss.step(items, micro_batches, num_tokens=tokens):
                    share = model(**inputs, num_items_in_batch=items, use_cache=False).loss
                    share.backward()
                total += share.detach()
        dist.all_reduce(total)
        losses.append(float(total))
        if step == 0:
            first = {key: full_tensor(gradient_or_zeros(parameter)) for key, parameter in model.named_parameters()}
        norm = gradients.clip(model, MAX_NORM)
        gradients.accept(model, norm, on_nonfinite="stop")  # parameters that no rank used do not decay
        norms.append(float(norm))
        optimizer.step()
        optimizer.zero_grad()
    last = {key: full_tensor(parameter.detach()) for key, parameter in model.named_parameters()}
    if dist.get_rank() != 0:
        return {}
    case = (name, packed, micro_batches)
    return compare(Steps(losses, norms, first, last), reference(*case), tolerance, partial(reference, *case))


def on_meta(model):
    cls, config = type(model), model.config
    with torch.device("meta"):
        return cls._from_config(config, attn_implementation=config._attn_implementation).train()


def slice_of_step(step: int, packed: bool, state, index: int, micro_batches: int) -> dict:
    """This rank's slice of its rows in one micro-batch."""
    rows = torch.arange(ROWS).chunk(micro_batches)[index].chunk(state.config.num_batches)[state.batch_index]
    whole = global_batch(step, packed)
    mine = {key: value[rows] for key, value in whole.items()}
    mine["position_ids"] = positions(packed).expand(len(rows), -1)
    return batch.slice_batch(mine, sp=state.sp, sp_rank=state.sp_rank)


def gradient_or_zeros(parameter: Tensor) -> Tensor:
    """A copy of the gradient; zeros for parameters of which only an order is used: those that select keys."""
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.clone()


def full_tensor(tensor: Tensor) -> Tensor:
    # The clone waits for the gather, before anything changes what is gathered.
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).clone()


def difference(got: Tensor, expected: Tensor) -> float:
    return float((got - expected).abs().max() / expected.abs().max().clamp(min=1e-12))


def difference_in_norm(got: Tensor, expected: Tensor) -> float:
    return float((got - expected).norm() / expected.norm().clamp(min=1e-12))


def compare(
    got: Steps, expected: Steps, tolerance: float, perturbed: Callable[[int], Steps] | None = None
) -> dict[str, float]:
    """The largest relative differences; raises with the worst where one is over the tolerance and not due to rounding.

    Gradients are compared element by element, parameters in norm: AdamW moves an element by its gradient's sign, so
    where that is all but zero, rounding moves it, and with it the later steps. How far depends on the processor; so what
    is over the tolerance is held against what one rounding error in the weights moves.

    Args:
        perturbed: gives the reference with its weights moved by one rounding error, by a seed.
    """
    found = differences(got, expected)
    beyond = {key: value for key, value in found.items() if not value <= tolerance}
    if beyond and perturbed is not None:
        moved = [differences(perturbed(seed), expected) for seed in (1, 2, 3)]
        # Of three, the middle one: one of them may send a token to another expert, which moves everything.
        bars = {key: min(FACTOR * sorted(one[key] for one in moved)[1], 100 * tolerance) for key in beyond}
        beyond = {key: value for key, value in beyond.items() if not value <= bars[key]}
    if beyond:
        lines = [f"{' '.join(key)}: {value:.2e}" for key, value in beyond.items()]
        raise AssertionError(f"over {tolerance}:\n" + "\n".join(lines) + f"\n{got.losses} against {expected.losses}")
    return {label: max(value for (of, _), value in found.items() if of == label) for label in Steps._fields}


def differences(got: Steps, expected: Steps) -> dict[tuple[str, str], float]:
    """The relative difference of each number and tensor, by its field of `Steps` and its step or name."""
    found = {}
    for label in ("losses", "norms"):
        pairs = zip(getattr(got, label), getattr(expected, label), strict=True)
        found |= {(label, f"of step {step}"): abs(a - b) / abs(b) for step, (a, b) in enumerate(pairs)}
    for label, measure in (("gradients", difference), ("parameters", difference_in_norm)):
        ours, theirs = getattr(got, label), getattr(expected, label)
        if set(ours) != set(theirs):
            raise AssertionError(f"{label}: other names {sorted(set(ours) ^ set(theirs))}")
        found |= {(label, key): measure(ours[key], theirs[key]) for key in theirs}
    return found


# ----------------------------------------------------------------------------------------- other cases


def documents_stay_apart(name: str, attention_name: str, sp: int) -> None:
    """Changing a token of document 3 changes later outputs of document 3, and no output of another document.

    The changed token is in one rank's slice, the document and its neighbours in several. Without experts nothing may
    change by a bit; with experts other tokens share a matrix product with the changed one, so rounding may.
    """
    attention.register()
    state = cases_sequence.state_of(sp=sp)
    model = build(name, generated=True, attention_name=attention_name).eval()
    start, end = DOCUMENTS[2], DOCUMENTS[3]
    changed_at = start + 1

    def logits(change: bool) -> Tensor:
        whole = global_batch(0, True)
        ids = whole["input_ids"][:1].clone()
        if change:
            ids[0, changed_at] = (ids[0, changed_at] + 1) % VOCABULARY
        inputs = {"input_ids": ids, "position_ids": positions(True)[None]}
        mine = batch.slice_batch(inputs, sp=state.sp, sp_rank=state.sp_rank)
        with torch.no_grad(), parallel.using(state):
            own = model(**mine).logits
        return collectives.all_gather(own, state.sp_group, dim=1, operation="test")

    before, after = logits(False), logits(True)
    bound = 1e-5 * float(before.abs().max()) if any("expert" in key for key, _ in model.named_parameters()) else 0.0
    differs = ((before - after).abs() > bound).any(dim=-1)[0]
    outside = torch.ones(LENGTH, dtype=torch.bool)
    outside[start:end] = False
    assert not differs[outside].any(), f"outputs of other documents changed at {torch.nonzero(differs & outside)}"
    assert differs[changed_at:end].all(), "the document itself did not change"
    assert not differs[start:changed_at].any(), "earlier tokens of the document changed"


def frozen_parameters_stay(name: str) -> None:
    """With embeddings and one layer's attention frozen, the other gradients are those of the whole model."""
    attention.register()
    state = cases_sequence.state_of(sp=2, ep=2)
    model = build(name, generated=True, attention_name="patchgen_eager")
    frozen = [key for key, _ in model.named_parameters() if "embed_tokens" in key or "layers.0.self_attn" in key]
    for key in frozen:
        model.get_parameter(key).requires_grad_(False)
    sharding.shard_model(model, state)
    one_backward(model, state)
    assert all(model.get_parameter(key).grad is None for key in frozen)
    own = {key: full_tensor(p.grad) for key, p in model.named_parameters() if p.grad is not None}
    if dist.get_rank() == 0:
        expected = reference(name, False, 1).gradients
        assert set(own) == set(expected) - set(frozen)
        worst = max(difference(own[key], expected[key]) for key in own)
        assert worst < 1e-5, worst


def one_backward(model, state) -> float:
    inputs = slice_of_step(0, False, state, 0, 1)
    items = loss.count_items([inputs], "cpu")
    with parallel.using(state), loss.step(items):
        share = model(**inputs, num_items_in_batch=items, use_cache=False).loss
        share.backward()
    total = share.detach().clone()
    dist.all_reduce(total)
    return float(total)
