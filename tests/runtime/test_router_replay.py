"""Routers select what was recorded, with weights and gradients of their own scores; recomputed layers what they selected first."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from torch.utils.checkpoint import CheckpointError
from transformers import LlamaConfig

from patchgen.runtime import attention, model_calls, registry
from patchgen.runtime.parallel import checkpointing, router_selection, sharding
from patchgen.runtime.parallel.experts_calls import num_experts_of
from patchgen.runtime.parallel_plan import ParallelPlan
from patchgen.runtime.router_replay import RoutingRecord, record_routing, replay_routing
from patchgen.runtime.verify.committed_models import CommittedModel, committed
from patchgen.runtime.verify.inputs import text_cases
from patchgen.runtime.verify.model_pair import build_model, perturb
from patchgen.runtime.verify.small_config import small_config

NOISE = 1e-6


def classes(name: str):
    """The generated and the upstream class of a model type."""
    found = registry.find_model(name)
    return getattr(found.load(), found.heads[0]), getattr(found.upstream(), found.heads[0])


@functools.cache
def model_of(name: str):
    """A small model whose experts all tie, and give results large enough to be told apart."""
    attention.register()
    model = build_model(classes(name)[0], small_config(classes(name)[1].config_class).config).eval()
    perturb(model)
    tie(model)
    generator = torch.Generator().manual_seed(2)
    for path in sharding.expert_paths(model):
        nn.init.normal_(model.get_parameter(path), std=0.5, generator=generator)
    return model


def routers(model: nn.Module):
    """Tensors outside experts with a row or a number per expert, `(E, ...)`."""
    for path in {path.rpartition(".")[0] for path in sharding.expert_paths(model)}:
        experts = model.get_submodule(path)
        block, E = model.get_submodule(path.rpartition(".")[0]), num_experts_of(experts)
        inside = {id(tensor) for tensor in experts.parameters()}
        for tensor in (*block.parameters(), *block.buffers()):
            if id(tensor) not in inside and tensor.is_floating_point() and E in (tensor.numel(), *tensor.shape[:1]):
                yield tensor.view(E, -1)


@torch.no_grad()
def tie(model: nn.Module) -> None:
    for rows in routers(model):
        rows.copy_(rows[:1].clone().expand_as(rows))


def add_noise(model: nn.Module) -> None:
    """Makes scores as another kernel might compute them: none differs by much, and every tie is decided."""
    generator = torch.Generator().manual_seed(1)
    for rows in routers(model):
        rows.data.add_(NOISE * torch.randn(rows.shape, generator=generator))  # of a graph, too


def with_noise(model: nn.Module) -> nn.Module:
    other = copy.deepcopy(model)
    add_noise(other)
    return other


def log_probs(model: nn.Module, batch: dict) -> Tensor:
    with torch.no_grad():
        return model(**batch, use_cache=False).logits.float().log_softmax(-1)


def batch_of(model: nn.Module) -> dict:
    return {"input_ids": text_cases(model.config, type(model))[0].batch["input_ids"]}


def has_experts(name: str) -> bool:
    return 'parallel_plan(self, experts={"' in (CommittedModel(name).folder / f"modeling_{name}.py").read_text()


WITH_EXPERTS = [name for name in committed() if has_experts(name)]
# By softmax; groups and bias; logits; a bias of its own; experts without indices; by id.
FEW = (
    "qwen3_moe",
    "deepseek_v3",
    "gpt_oss",
    "ernie4_5_moe",
    "llama4",
    "deepseek_v4",
)


@pytest.mark.parametrize(
    "name", [name if name in FEW else pytest.param(name, marks=pytest.mark.slow) for name in WITH_EXPERTS]
)
def test_a_forward_selects_what_another_selected(name):
    """The log-probabilities of a model whose routers compute a little otherwise, with and without the experts of the first model,
    against those of the first; and what it selects then, to the bit."""
    model = model_of(name)
    if not sharding.expert_paths(model):
        pytest.skip("its small config has no experts")
    batch = batch_of(model)
    with record_routing(model) as record:
        before = log_probs(model, batch)
    assert torch.equal(before, log_probs(model, batch))
    assert all(value.shape[:2] == batch["input_ids"].shape for value in record.experts.values())
    assert {value.dtype for value in record.experts.values()} == {torch.int8}
    other = with_noise(model)
    with replay_routing(other, record), record_routing(other) as again:
        after = log_probs(other, batch)
    assert record.experts.keys() == again.experts.keys()
    assert all(torch.equal(value, again.experts[layer]) for layer, value in record.experts.items())
    difference, without = ((found - before).abs().max() for found in (after, log_probs(other, batch)))
    assert difference < without / 10, (difference, without)


def by_hand(name: str, router: nn.Module, index_TK: Tensor):
    """The forward of an upstream router with the selection given: its weights as the paper of the model has them."""
    config = small_config(classes(name)[1].config_class).config

    def forward(hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        hidden_TH = hidden.reshape(-1, hidden.shape[-1]).float()
        logits_TE = linear(hidden_TH, router.weight, getattr(router, "bias", None))
        if name == "gpt_oss":
            return logits_TE, logits_TE.gather(1, index_TK).softmax(-1), index_TK
        scores_TE = logits_TE.sigmoid() if name == "deepseek_v3" else logits_TE.softmax(-1)
        weights_TK = scores_TE.gather(1, index_TK)
        if name == "ernie4_5_moe" or config.norm_topk_prob:
            weights_TK = weights_TK / weights_TK.sum(-1, keepdim=True)
        return logits_TE, weights_TK * getattr(config, "routed_scaling_factor", 1.0), index_TK

    return forward


@pytest.mark.parametrize("name", ["qwen3_moe", "deepseek_v3", "gpt_oss", "ernie4_5_moe"])
def test_weights_of_replayed_experts_have_the_gradients_computed_by_hand(name):
    """All gradients of a replayed forward against those of upstream's model whose routers are computed by hand."""
    model = with_noise(model_of(name))
    batch = batch_of(model)
    with record_routing(model_of(name)) as record:
        log_probs(model_of(name), batch)
    upstream = build_model(classes(name)[1], model.config).eval()
    upstream.load_state_dict(model.state_dict())
    for layer, index in record.experts.items():
        block = upstream.get_submodule(layer.rpartition(".")[0])
        router = block.router if hasattr(block, "router") else block.gate
        router.forward = by_hand(name, router, index.flatten(0, 1).long())
    with replay_routing(model, record):
        loss = model(**batch, labels=batch["input_ids"], use_cache=False).loss
    expected = upstream(**batch, labels=batch["input_ids"], use_cache=False).loss
    loss.backward()
    expected.backward()
    torch.testing.assert_close(loss, expected)
    theirs = dict(upstream.named_parameters())
    for key, parameter in model.named_parameters():
        if theirs[key].grad is not None:
            torch.testing.assert_close(
                parameter.grad, theirs[key].grad, rtol=1e-3, atol=1e-6, msg=lambda m, k=key: f"{k}: {m}"
            )
    for path in record.experts:
        block = model.get_submodule(path.rpartition(".")[0])
        assert (block.router if hasattr(block, "router") else block.gate).weight.grad.abs().max() > 1e-6


# ----------------------------------------------------------------------------------------------- recomputation


def gradients(name: str, checkpoint: str) -> list[Tensor]:
    """Those of a backward in which ties are decided otherwise than in the forward: scores are a little different."""
    model = copy.deepcopy(model_of(name)).train()
    model_calls.note_calls(model)
    router_selection.install(model, {path.rpartition(".")[0] for path in sharding.expert_paths(model)})
    if checkpoint in ("full", "selective"):
        checkpointing.apply(model, checkpoint)
    elif checkpoint != "none":
        model.gradient_checkpointing_enable({"use_reentrant": checkpoint == "reentrant"})
    ids = batch_of(model)["input_ids"]
    loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    add_noise(model)
    loss.backward()
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


def are_close(ones: list[Tensor], others: list[Tensor]) -> bool:
    """To a thousandth of the largest gradient of each parameter."""
    pairs = zip(ones, others, strict=True)
    return all(bool((one - other).abs().max() <= 1e-3 * one.abs().max()) for one, other in pairs)


@pytest.mark.parametrize("checkpoint", ["full", "selective", "reentrant", "not reentrant"])
def test_layers_computed_again_select_what_they_selected_first(checkpoint, monkeypatch):
    """Gradients where all experts tie, and ties are decided otherwise in the backward, against those without recomputation; without
    what is remembered they differ, or torch sees other shapes."""
    expected = gradients("qwen3_moe", "none")
    assert are_close(expected, gradients("qwen3_moe", checkpoint))
    monkeypatch.setattr(checkpointing, "remember_selection", lambda compute: compute())
    if checkpoint == "selective":  # keeps the scores
        return
    try:
        found = gradients("qwen3_moe", checkpoint)
    except CheckpointError as error:  # upstream's loop over experts has other shapes
        assert "different metadata" in str(error)
    else:
        assert not are_close(expected, found)


@pytest.mark.parametrize("checkpoint", ["full", "reentrant"])
def test_a_backward_after_the_replay_recomputes_what_was_replayed(checkpoint):
    """Gradients of layers recomputed when the context has ended, against those of layers that are not recomputed, to the bit."""
    found = []
    with record_routing(model_of("qwen3_moe")) as record:
        log_probs(model_of("qwen3_moe"), batch_of(model_of("qwen3_moe")))
    for kind in ("none", checkpoint):
        model = with_noise(model_of("qwen3_moe")).train()
        if kind == "full":
            checkpointing.apply(model, "full")
        elif kind != "none":
            model.gradient_checkpointing_enable({"use_reentrant": True})
            model_calls.note_calls(model)
        ids = batch_of(model)["input_ids"]
        with replay_routing(model, record):
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        found.append([parameter.grad for parameter in model.parameters() if parameter.grad is not None])
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))


# ------------------------------------------------------------------------------------------ toys, and what is refused

E, K, H = 8, 2, 4


class Experts(nn.Module):
    num_experts = E

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(E, H, H, generator=torch.Generator().manual_seed(0)))

    def forward(self, hidden_TH, index_TK, weights_TK):
        return (weights_TK[..., None] * torch.einsum("th,tkhi->tki", hidden_TH, self.weight[index_TK])).sum(1)


def from_masked_groups(logits_TE, ids):
    """Two of four groups; weights are the scores that are left (DeepSeek-V2)."""
    scores = logits_TE.softmax(-1)
    groups = scores.view(-1, 4, E // 4).max(-1).values.topk(2, dim=-1, sorted=False)[1]
    mask = torch.zeros(len(scores), 4).scatter(1, groups, 1).repeat_interleave(E // 4, 1)
    return scores.masked_fill(mask == 0, 0.0).topk(K, dim=-1)


def by_id(logits_TE, ids):
    index_TK = torch.stack([ids % E, (ids + 1) % E], -1)
    return logits_TE.softmax(-1).gather(1, index_TK), index_TK


class Block(nn.Module):
    def __init__(self, select):
        super().__init__()
        self.gate, self.experts, self.select = nn.Linear(H, E), Experts(), select

    def forward(self, hidden_TH, ids):
        weights_TK, index_TK = self.select(self.gate(hidden_TH), ids)
        return self.experts(hidden_TH, index_TK, weights_TK)


class Toy(nn.Module):
    def __init__(self, select, num_layers=2):
        super().__init__()
        torch.manual_seed(3)
        self.embed, self.layers = nn.Embedding(32, H), nn.ModuleList(Block(select) for _ in range(num_layers))

    def get_parallel_plan(self):
        return ParallelPlan(tuple(f"layers.{number}.experts.weight" for number in range(len(self.layers))))

    def forward(self, input_ids, num_layers=None):
        hidden_TH = self.embed(input_ids).flatten(0, 1)
        for layer in self.layers[:num_layers]:
            hidden_TH = hidden_TH + layer(hidden_TH, input_ids.flatten())
        return hidden_TH.view(*input_ids.shape, H)


IDS = torch.arange(12).view(2, 6)


def recorded(model: nn.Module, ids: Tensor = IDS) -> RoutingRecord:
    with record_routing(model) as record:
        model(input_ids=ids)
    return record


def test_groups_are_those_of_the_replayed_experts():
    """Weights that a router takes from scores without the other groups, against its scores at the recorded experts."""
    model = Toy(from_masked_groups, num_layers=1)
    record = recorded(model)
    nn.init.normal_(model.layers[0].gate.weight, generator=torch.Generator().manual_seed(9))
    given = []
    model.layers[0].experts.register_forward_pre_hook(lambda _, args: given.extend(args[1:]))
    with replay_routing(model, record):
        model(input_ids=IDS)
    scores = model.layers[0].gate(model.embed(IDS).flatten(0, 1)).softmax(-1)
    assert torch.equal(given[0], record.experts["layers.0.experts"].flatten(0, 1).long())
    assert torch.equal(given[1], scores.gather(1, given[0])) and bool((given[1] > 0).all())
    assert not torch.equal(recorded(model).experts["layers.0.experts"], record.experts["layers.0.experts"])


def test_experts_that_are_looked_up_are_compared():
    model = Toy(by_id)
    record = recorded(model)
    with replay_routing(model, record):
        model(input_ids=IDS)
    record.experts["layers.1.experts"][0, 0] = torch.tensor([5, 6])
    message = r"not replayed in 1 layers: layers.1.experts has 8 experts, and for 1 tokens"
    with pytest.raises(RuntimeError, match=message), replay_routing(model, record):
        model(input_ids=IDS)


def test_experts_that_another_way_than_topk_gave_are_compared():
    """A router that calls topk and then gives its experts what it sorted: replaced, and given all the same."""

    def by_sort(logits_TE, ids):
        logits_TE.topk(K)
        index_TK = logits_TE.argsort(-1, descending=True)[:, :K]
        return logits_TE.gather(1, index_TK), index_TK

    model = Toy(by_sort)
    record = RoutingRecord(
        {f"layers.{number}.experts": torch.tensor([[[6, 7]]]).expand(2, 6, 2) for number in range(2)}
    )
    with pytest.raises(RuntimeError, match="not replayed in 2 layers"), replay_routing(model, record):
        model(input_ids=IDS)


def test_a_record_is_saved_and_loaded_and_made_from_rows_of_an_engine(tmp_path):
    """Rows without the last token and without padding, as vLLM tells them, against the record; routers select for the rest."""
    model = Toy(from_masked_groups)
    record = recorded(model)
    record.save(tmp_path / "routing.safetensors")
    loaded = RoutingRecord.load(tmp_path / "routing.safetensors")
    assert loaded.multiple == 1 and loaded.experts.keys() == record.experts.keys()
    assert all(torch.equal(loaded.experts[layer], value) for layer, value in record.experts.items())
    whole = torch.stack([*record.experts.values()], 2).numpy()  # B S L K
    mask = torch.tensor([[1, 1, 1, 1, 0, 0], [0, 0, 1, 1, 1, 1]])
    made = RoutingRecord.of_rows(model, [whole[0, :3], whole[1, 2:5]], mask)
    for layer, value in record.experts.items():
        assert torch.equal(made.experts[layer][0, :3], value[0, :3]) and torch.equal(
            made.experts[layer][1, 2:5], value[1, 2:5]
        )
        assert bool((made.experts[layer][0, 3:] == -1).all()) and bool((made.experts[layer][1, [0, 1, 5]] == -1).all())
    with replay_routing(model, made), record_routing(model) as again:
        model(input_ids=IDS)
    assert all(torch.equal(again.experts[layer], value) for layer, value in record.experts.items())
    with pytest.raises(ValueError, match="names one expert twice"):
        RoutingRecord.of_rows(model, [whole[0] * 0, whole[1]])
    with pytest.raises(ValueError, match="The rows have 1 layers; Toy has 2"):
        model.config = LlamaConfig(num_hidden_layers=4)
        RoutingRecord.of_rows(model, [whole[0, :, :1]])


def test_compiled_layers_are_recorded_and_replayed():
    """Layers that were compiled and called before, against the same that were not."""
    plain, model = Toy(from_masked_groups), Toy(from_masked_groups)
    for layer in model.layers:
        layer.compile(backend="eager")
    model(input_ids=IDS)
    record = recorded(model)
    assert all(torch.equal(value, record.experts[layer]) for layer, value in recorded(plain).experts.items())
    for value in record.experts.values():
        value[0, 0] = torch.tensor([0, 1])
    with replay_routing(model, record), replay_routing(plain, record):
        assert torch.equal(model(input_ids=IDS), plain(input_ids=IDS))


class Wrapper(nn.Module):
    """As PEFT wraps experts that have adapters."""

    def __init__(self, base_layer):
        super().__init__()
        self.base_layer = base_layer

    def forward(self, *args):
        return self.base_layer(*args)


def test_experts_with_adapters_have_the_names_of_those_without():
    """A record of a model replays in one whose experts are wrapped, and the other way round."""
    plain, model = Toy(from_masked_groups), Toy(from_masked_groups)
    recorded(model)
    for layer in model.layers:
        layer.experts = Wrapper(Wrapper(layer.experts))
    paths = tuple(f"layers.{number}.experts.base_layer.base_layer.weight" for number in range(2))
    model.get_parallel_plan = lambda: ParallelPlan(paths)
    record = recorded(model)
    assert all(torch.equal(value, record.experts[layer]) for layer, value in recorded(plain).experts.items())
    for one, other in ((plain, model), (model, plain)):
        with replay_routing(one, recorded(other)):
            one(input_ids=IDS)


def test_what_is_not_replayed_is_an_error():
    model = Toy(from_masked_groups)
    record = recorded(model)
    with (
        pytest.raises(RuntimeError, match="not replayed: layers.1.experts did not run"),
        replay_routing(model, record),
    ):
        model(input_ids=IDS, num_layers=1)
    one = RoutingRecord({"layers.0.experts": record.experts["layers.0.experts"]})
    with pytest.raises(ValueError, match="no experts for layers.1.experts"), replay_routing(model, one):
        model(input_ids=IDS)
    with pytest.raises(ValueError, match="6 tokens per row, the model runs on 5"), replay_routing(model, record):
        model(input_ids=IDS[:, :5])
    with pytest.raises(ValueError, match="has 2 rows, the model is called with 1"), replay_routing(model, record):
        model(input_ids=IDS[:1])
    narrow = RoutingRecord({layer: value[..., :1] for layer, value in record.experts.items()})
    with pytest.raises(ValueError, match="has 1 experts per token, the model 2"), replay_routing(model, narrow):
        model(input_ids=IDS)
    with pytest.raises(ValueError, match="layers.0.experts ran twice"), record_routing(model):
        model(input_ids=IDS)
        model(input_ids=IDS)
    for wrong, told in (
        (0, "names one expert twice"),
        (-1, "no experts for any token"),
        ([1, -1], "must have 2 experts"),
    ):
        edited = {layer: torch.empty_like(value).copy_(torch.tensor(wrong)) for layer, value in record.experts.items()}
        with (
            pytest.raises(ValueError, match=f"layers.0.experts: .*{told}"),
            replay_routing(model, RoutingRecord(edited)),
        ):
            pass
    for foreign in ([E, E + 1], [128, 255], [1000, 2000]):
        edited = {layer: value.short() for layer, value in record.experts.items()}
        edited["layers.1.experts"][1, 5] = torch.tensor(foreign)
        message = "not replayed in 1 layers: layers.1.experts has 8 experts, and for 1 tokens"
        with pytest.raises(RuntimeError, match=message), replay_routing(model, RoutingRecord(edited)):
            model(input_ids=IDS)
    other = RoutingRecord({"layers.2.experts": record.experts["layers.0.experts"]})
    with (
        pytest.raises(ValueError, match="of another model: Toy has no experts layers.2"),
        replay_routing(model, other),
    ):
        pass
    assert not router_selection.WATCHERS and not router_selection._RUNNING
