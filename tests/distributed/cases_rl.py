"""What each rank does in the tests of the calls for reinforcement learning; see test_rl.py."""

from __future__ import annotations

import cases_models
import cases_sequence
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from patchgen.runtime import attention, registry, rl, seams
from patchgen.runtime.checkpoint import stream_weights
from patchgen.runtime.media_sizes import IMAGE
from patchgen.runtime.parallel import sharding
from patchgen.runtime.verify.media_samples import SampleBuilder
from patchgen.runtime.verify.model_pair import build_model, perturb
from patchgen.runtime.verify.small_config import small_config

ROWS, LENGTH, STEPS = 8, 15, 2  # SP 2 has to pad
TEMPERATURE, CLIP, MAX_NORM = 0.8, 0.2, 0.7
OPTIMIZER = {"lr": 5e-3, "eps": 1e-4}


def rollouts() -> tuple[dict[str, Tensor], Tensor, Tensor]:
    """Rows padded left and right, which tokens were drawn, and the advantage of each row."""
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(3, cases_models.VOCABULARY, (ROWS, LENGTH), generator=generator)
    mask = torch.ones(ROWS, LENGTH, dtype=torch.long)
    mask[0, :4], mask[1, -5:], mask[2, :1], mask[3, :2], mask[3, -2:] = 0, 0, 0, 0, 0
    drawn = mask.bool() & (torch.arange(LENGTH) >= 6)
    return {"input_ids": ids, "attention_mask": mask}, drawn, torch.randn(ROWS, generator=generator)


def clipped(values: Tensor, told: tuple[Tensor, Tensor, Tensor, int]) -> Tensor:
    """PPO's: the sum over drawn tokens, divided by those of all ranks."""
    before, drawn, advantages, count = told
    ratio = (values - before).exp()
    gain = torch.minimum(ratio * advantages[:, None], ratio.clamp(1 - CLIP, 1 + CLIP) * advantages[:, None])
    return -gain[drawn].sum() / count


def of_upstream(name: str) -> tuple[Tensor, list[float], list[float], dict[str, Tensor]]:
    """The same by plain transformers on one process: log-probabilities, losses, norms, and the trained weights."""
    model = cases_models.build(name, generated=False, attention_name="eager")
    inputs, drawn, advantages = rollouts()
    mask = inputs["attention_mask"]
    counts = (mask[:, 1:] * mask[:, :-1]).bool()

    def values() -> Tensor:
        logits = model(**inputs, use_cache=False).logits[:, :-1].float() / TEMPERATURE
        chosen = logits.log_softmax(-1).gather(2, inputs["input_ids"][:, 1:, None]).squeeze(2)
        return F.pad(chosen.masked_fill(~counts, 0), (1, 0))

    optimizer = torch.optim.AdamW(model.parameters(), **OPTIMIZER)
    before, losses, norms = values().detach(), [], []
    for _ in range(STEPS):
        loss = clipped(values(), (before, drawn, advantages, int(drawn.sum())))
        loss.backward()
        losses.append(float(loss.detach()))
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)))
        optimizer.step()
        optimizer.zero_grad()
    return before, losses, norms, model.state_dict()


def steps(name: str, micro_batches: int, *, router_loss: bool = False, **layout: int):
    """The same on ranks: log-probabilities of this rank's rows and which they are, losses, norms, trained weights.

    The first loss is also that of the log-probabilities asked for before, bit for bit.
    """
    attention.register()
    seams.configure(fused_moe="torch")
    state = cases_sequence.state_of(**layout)
    model = sharding.shard_model(cases_models.build(name, generated=True, attention_name="patchgen_sdpa"), state)
    inputs, drawn, advantages = rollouts()
    mine = torch.arange(ROWS).chunk(state.config.num_batches)[state.batch_index].chunk(micro_batches)
    batches = [{key: value[rows] for key, value in inputs.items()} for rows in mine]
    before = [rl.log_probs(model, batch, state, temperature=TEMPERATURE) for batch in batches]
    told = [(b, drawn[rows], advantages[rows], int(drawn.sum())) for b, rows in zip(before, mine, strict=True)]
    seen: list[bool] = []

    def loss_function(values: Tensor, told: tuple) -> Tensor:
        if len(seen) < micro_batches:
            seen.append(torch.equal(values.detach(), told[0]))
        return clipped(values, told)

    optimizer = torch.optim.AdamW(sharding.optimizer_groups(model), **OPTIMIZER)
    options = {"temperature": TEMPERATURE, "max_grad_norm": MAX_NORM, "router_loss": router_loss}
    pairs = list(zip(batches, told, strict=True))
    done = [rl.update(model, optimizer, pairs, loss_function, state, **options) for _ in range(STEPS)]
    assert all(seen), "update computes other log-probabilities than log_probs"
    assert all(one.taken for one in done)
    weights = dict(stream_weights(model, layout="stacked"))
    found = torch.cat(before), torch.cat(mine), [one.loss for one in done], [one.grad_norm for one in done]
    return *found, weights if dist.get_rank() == 0 else {}


def nothing_changes(name: str) -> tuple[bool, bool, bool]:
    """A loss that is not a number: whether the step was taken, whether the weights are the same; an empty step is refused."""
    attention.register()
    state = cases_sequence.state_of()
    model = sharding.shard_model(cases_models.build(name, generated=True, attention_name="patchgen_sdpa"), state)
    start = {key: value.clone() for key, value in stream_weights(model)}
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    inputs, _, _ = rollouts()
    done = rl.update(model, optimizer, [(inputs, None)], lambda values, _: values.sum() * float("nan"), state)
    same = all(torch.equal(value, start[key]) for key, value in stream_weights(model))
    try:
        rl.update(model, optimizer, [], clipped, state)
    except ValueError as error:
        return done.taken, same, "batches is empty" in str(error)
    return done.taken, same, False


# ----------------------------------------------------------------------------------- rows with images


def image_rows(name: str):
    """Upstream's model of a type that computes positions from images, and rows with some, padded left, without positions."""
    found = registry.find_model(name)
    upstream_class = getattr(found.upstream(), found.heads[0])
    upstream = build_model(upstream_class, small_config(upstream_class.config_class).config).eval()
    perturb(upstream)
    builder = SampleBuilder(upstream)
    item = builder.maker.item
    rows = [builder.sample([5, item(IMAGE, 0), 3, item(IMAGE, 1), 2]), builder.sample([4, item(IMAGE, 2), 3])]
    inputs = dict(builder.case("rows", rows).batch)
    del inputs["labels"]
    missing = (inputs["attention_mask"] == 0).sum(1).tolist()
    for field in ("input_ids", "attention_mask", "mm_token_type_ids"):
        inputs[field] = torch.stack([row.roll(n) for row, n in zip(inputs[field], missing, strict=True)])
    return upstream, inputs


def upstreams_image_log_probs(name: str) -> Tensor:
    upstream, inputs = image_rows(name)
    mask = inputs["attention_mask"]
    with torch.no_grad():
        chosen = upstream(**inputs, use_cache=False).logits[:, :-1].log_softmax(-1)
    chosen = chosen.gather(2, inputs["input_ids"][:, 1:, None]).squeeze(2)
    return F.pad(chosen.masked_fill(mask[:, 1:] * mask[:, :-1] == 0, 0), (1, 0))


def image_log_probs(name: str, **layout: int) -> tuple[Tensor, Tensor]:
    """`rl.log_probs` of these rows, and the values that `rl.update` hands to its loss."""
    attention.register()
    upstream, inputs = image_rows(name)
    found = registry.find_model(name)
    generated = getattr(found.load(), found.heads[0])
    model = generated._from_config(upstream.config, attn_implementation="patchgen_sdpa", dtype=torch.float32)
    model.load_state_dict(upstream.state_dict())
    state = cases_sequence.state_of(**layout)
    model = sharding.shard_model(model, state)
    before = rl.log_probs(model, inputs, state)
    seen: list[Tensor] = []

    def loss_function(values: Tensor, _: None) -> Tensor:
        seen.append(values.detach().clone())
        return values.sum()

    optimizer = torch.optim.SGD(sharding.optimizer_groups(model), lr=0.0)
    rl.update(model, optimizer, [(inputs, None)], loss_function, state)
    return before, seen[0]
