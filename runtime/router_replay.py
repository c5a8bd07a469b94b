"""Router replay: the experts that a forward selects are recorded, and selected by a later one.

    with record_routing(model, state) as record:
        rl.log_probs(model, inputs, state)
    with replay_routing(model, record, state):      # other weights, other kernels, another layout: the same experts
        rl.log_probs(later, inputs, state)

Only the selection is replayed: weights of the selected experts are computed from the router's own scores, with their gradient. A
record may also come from an engine that generates (`RoutingRecord.of_rows`).

    B rows   S tokens of a row   s of this rank's slice   L layers of experts   K experts per token
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from patchgen.runtime import model_calls
from patchgen.runtime.parallel import router_selection, sharding
from patchgen.runtime.parallel.collectives import all_gather
from patchgen.runtime.parallel.experts_calls import num_experts_of
from patchgen.runtime.parallel.state import ParallelState

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ROUTERS_OWN = -1
"""In a record: the router selects for this token itself."""


@dataclass
class RoutingRecord:
    """The experts that were selected in one forward.

    Attributes:
        experts: path of an experts module -> `(B, S, K)`, the experts of each token of the full rows, int8 or int16; -1 for tokens
            whose router selects itself.
        multiple: rows may have been padded to a multiple of this, by `sp`.
    """

    experts: dict[str, Tensor] = field(default_factory=dict)
    multiple: int = 1

    def __post_init__(self) -> None:
        self._is_checked = False

    def require_distinct(self) -> None:
        """Raises ValueError if a token names an expert twice, or only some of its experts, or a layer none at all."""
        if self._is_checked:
            return
        for name, experts_BSK in self.experts.items():
            K, ordered = experts_BSK.shape[-1], experts_BSK.sort(-1).values
            # Zeros where an engine recorded nothing are the usual mistake.
            if bool(((ordered[..., 1:] == ordered[..., :-1]) & (ordered[..., 1:] >= 0)).any()):
                raise ValueError(
                    f"{name}: a token names one expert twice. To fix: pass no rows for what was not recorded, or "
                    f"{ROUTERS_OWN} in all {K} columns."
                )
            if bool(((ordered[..., 0] < 0) != (ordered[..., -1] < 0)).any()):
                raise ValueError(f"{name}: a token must have {K} experts, or {ROUTERS_OWN} in all {K} columns.")
            if bool((ordered[..., -1] < 0).all()):
                raise ValueError(f"{name}: the record has no experts for any token.")
        self._is_checked = True

    @classmethod
    def of_rows(
        cls, model: nn.Module, rows: Sequence[Any], attention_mask: Tensor | None = None, *, width: int | None = None
    ) -> RoutingRecord:
        """A record from what another engine tells of each sequence, for example vLLM's `routed_experts`.

        Args:
            model: its experts modules name the layers.
            rows: for each row an array or tensor `(n, L, K)` for its first n tokens, L all layers of experts or all layers of the
                model. Routers select for the other tokens: vLLM tells nothing of the last one, which it never computes.
            attention_mask: `(B, S)`, 0 for padding: the tokens of a row begin at its first 1. None: at its first place.
            width: S, without a mask.

        Raises:
            ValueError: a row has more tokens than its place, another number of layers, or a token that names an expert twice.
        """
        given = [torch.as_tensor(row).to("cpu", torch.int32) for row in rows]
        if attention_mask is None:
            S = max(len(row) for row in given) if width is None else width
            attention_mask = torch.ones(len(given), S)
        elif len(given) != len(attention_mask):
            raise ValueError(f"There are {len(given)} rows of experts for {len(attention_mask)} rows of tokens.")
        B, S = attention_mask.shape
        starts = (attention_mask != 0).int().argmax(1).tolist()
        L, K = given[0].shape[1:]
        whole = torch.full((B, S, L, K), ROUTERS_OWN, dtype=torch.int32)
        for place, row, start in zip(whole, given, starts, strict=True):
            if row.shape[1:] != (L, K) or start + len(row) > S:
                raise ValueError(
                    f"A row of experts must have the shape (n, {L}, {K}) with at most {S - start} tokens, its place in the row; "
                    f"found {tuple(row.shape)}."
                )
            place[start : start + len(row)] = row
        dtype = router_selection.index_dtype(int(whole.max()) + 1)
        layers = _layers_of_array(model, L)
        record = cls({path: whole[:, :, layer].to(dtype).contiguous() for path, layer in layers.items()})
        record.require_distinct()
        return record

    def save(self, path: str | Path) -> None:
        """Writes a safetensors file."""
        tensors = {name: value.cpu().contiguous() for name, value in self.experts.items()}
        save_file(tensors, path, metadata={"multiple": str(self.multiple)})

    @classmethod
    def load(cls, path: str | Path) -> RoutingRecord:
        """Reads what `save` wrote, to the host."""
        with safe_open(path, framework="pt") as file:
            experts = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  not a dict
            return cls(experts, int(file.metadata()["multiple"]))

    def to(self, device: torch.device | str) -> RoutingRecord:
        """On another device; a replay moves what it needs itself."""
        moved = RoutingRecord({name: value.to(device) for name, value in self.experts.items()}, self.multiple)
        moved._is_checked = self._is_checked
        return moved


def _layers_of_array(model: nn.Module, L: int) -> dict[str, int]:
    """Path of an experts module -> its index in an array of L layers."""
    paths = list(_experts_of(model).values())
    if len(paths) == L:
        return {path: index for index, path in enumerate(paths)}
    config: Any = model.config
    num_layers = config.get_text_config(decoder=True).num_hidden_layers
    numbers = {path: int(found[0]) for path in paths if (found := re.findall(r"(?<=\.)\d+(?=\.)", path))}
    if num_layers == L and len(numbers) == len({*numbers.values()}) == len(paths):
        return numbers
    raise ValueError(
        f"The rows have {L} layers; {type(model).__name__} has {len(paths)} with experts, of {num_layers}. To fix: pass all of "
        "either, in the model's order."
    )


def _experts_of(model: nn.Module) -> dict[nn.Module, str]:
    """The experts modules of a model, in its order, with their paths."""
    found = {path.rpartition(".")[0] for path in sharding.expert_paths(model)}
    ordered = [path for path, _ in model.named_modules() if path in found]
    if not ordered:
        raise ValueError(f"{type(model).__name__} reports no experts, so there is no routing to record or replay.")
    router_selection.install(model, ordered)
    return {model.get_submodule(path): router_selection.name_of(path) for path in ordered}


@contextlib.contextmanager
def record_routing(model: PreTrainedModel, state: ParallelState | None = None) -> Iterator[RoutingRecord]:
    """Records the experts that routers select in the one forward of `model` inside; the record is filled at the end.

    Each rank records its slice; at the end those of a sequence exchange them (collective, with `sp`). Layers that are computed
    again in a backward inside are not recorded twice. Compiled layers run uncompiled.

    Raises:
        ValueError: the model has no experts; more than one forward.
        RuntimeError: nothing was selected.
    """
    record = RoutingRecord()
    recorder = _Recorder(model)
    with _watching(model, recorder):
        yield record
    if not recorder.slices:
        raise RuntimeError(f"No layer of {type(model).__name__} selected experts while routing was recorded.")
    record.experts.update({name: _full_rows(value, state) for name, value in recorder.slices.items()})
    record.multiple = 1 if state is None else state.sp
    record._is_checked = True  # a topk selects none twice


@contextlib.contextmanager
def replay_routing(
    model: PreTrainedModel, record: RoutingRecord, state: ParallelState | None = None
) -> Iterator[None]:
    """Routers of `model` select what `record` says in forwards of the same rows inside, and in their backwards, also later ones.

    With any `sp` and `ep`, whatever those of the record were. What torch.compile compiled runs uncompiled. A router loss counts
    what routers would select. At the end the host waits for the device, to compare what experts were given with the record.

    Raises:
        ValueError: a layer, rows, tokens or experts per token that the record has not; a token that names an expert twice, a layer
            without any.
        RuntimeError: at the end, naming them: layers of the record that did not run, or whose experts were not given what it says.
    """
    replayer = _Replayer(model, record, state)
    with _watching(model, replayer):
        yield
    replayer.require_replayed()


@contextlib.contextmanager
def _watching(model: nn.Module, watcher: _Recorder | _Replayer) -> Iterator[None]:
    model_calls.carry_into_checkpoints(model)
    noting = model.register_forward_pre_hook(watcher.note_rows, with_kwargs=True)
    router_selection.WATCHERS.append(watcher)
    try:
        # A compiled layer was traced without looking at what is selected.
        with torch.compiler.set_stance("force_eager"):
            yield
    finally:
        router_selection.WATCHERS.remove(watcher)
        noting.remove()


class _OfModel:
    """What a recorder and a replayer share: the names of a model's experts, and the number of its rows."""

    def __init__(self, model: nn.Module) -> None:
        self._names = _experts_of(model)
        self._model_name = type(model).__name__.removeprefix("FSDP")
        self.num_rows = 0

    def names(self, experts: nn.Module) -> str | None:
        return self._names.get(experts)

    def note_rows(self, _: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        named = (kwargs.get("input_ids"), kwargs.get("inputs_embeds"), *args)
        self.num_rows = next((len(value) for value in named if isinstance(value, Tensor)), 0)


class _Recorder(_OfModel):
    """Has the selections of this rank's tokens, `(B, s, K)`, by name, after a forward."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.slices: dict[str, Tensor] = {}

    def wanted(self, name: str, num_tokens: int, device: torch.device) -> Tensor | None:
        return None

    def given(self, name: str, selected: Tensor | None, num_replaced: int, index: Tensor | None) -> None:
        selected_TK = _selection(name, selected, index)
        if name in self.slices:
            raise ValueError(f"{name} ran twice: a record has one forward. To fix: one record_routing for each.")
        if (apart := model_calls.documents_apart()) is not None:
            self.slices[name] = apart.packed(selected_TK.view(*apart.is_token.shape, -1))
        else:
            rows = _num_rows(name, self.num_rows, len(selected_TK))
            self.slices[name] = selected_TK.view(rows, -1, selected_TK.shape[1])
        if selected is None:
            experts = next(module for module, other in self._names.items() if other == name)
            self.slices[name] = self.slices[name].to(router_selection.index_dtype(num_experts_of(experts)))


class _Replayer(_OfModel):
    def __init__(self, model: nn.Module, record: RoutingRecord, state: ParallelState | None) -> None:
        super().__init__(model)
        record.require_distinct()
        self._record, self._state = record, state
        self._num_experts = {name: num_experts_of(experts) for experts, name in self._names.items()}
        self._replayed: dict[str, int] = dict.fromkeys(record.experts, 0)
        self._differing: dict[str, Tensor] = {}
        if unknown := sorted(record.experts.keys() - {*self._names.values()}):
            raise ValueError(
                f"The record is of another model: {self._model_name} has no experts {', '.join(unknown[:4])}."
            )

    def wanted(self, name: str, num_tokens: int, device: torch.device) -> Tensor | None:
        if name not in self._record.experts:
            raise ValueError(
                f"The record has no experts for {name}, which runs; it has {len(self._record.experts)} layers."
            )
        whole_BSK = self._record.experts[name].to(device, non_blocking=True)
        apart, sp = model_calls.documents_apart(), 1 if self._state is None else self._state.sp
        B = whole_BSK.shape[0]
        num_rows = apart.shape[0] if apart is not None else _num_rows(name, self.num_rows, num_tokens)
        if num_rows != B:
            raise ValueError(f"{name}: the record has {B} rows, the model is called with {num_rows}.")
        if apart is not None:
            whole_BSK = apart.unpack_states(self._fitted(name, whole_BSK, apart.shape[1], 1))
        else:
            s = num_tokens // B  # of the layer: those of an encoder and a decoder differ
            whole_BSK = self._fitted(name, whole_BSK, s * sp, sp)
            if sp > 1:
                whole_BSK = whole_BSK.narrow(1, self._state.sp_rank * s, s)  # pyright: ignore[reportOptionalMemberAccess]
        return whole_BSK.reshape(num_tokens, -1)

    def _fitted(self, name: str, whole_BSK: Tensor, width: int, multiple: int) -> Tensor:
        """Without the padding of the layout that recorded, with that of this one."""
        S = whole_BSK.shape[1]
        if S - self._record.multiple >= width or width - multiple >= S:
            padded = f", padded to a multiple of {multiple}," if multiple > 1 else ""
            raise ValueError(f"{name}: the record has {S} tokens per row, the model runs on {width}{padded}.")
        return F.pad(whole_BSK[:, :width], (0, 0, 0, max(0, width - S)), value=ROUTERS_OWN)

    def given(self, name: str, selected: Tensor | None, num_replaced: int, index: Tensor | None) -> None:
        found = _selection(name, selected, index)
        wanted_TK = self.wanted(name, len(found), found.device)
        assert wanted_TK is not None
        if wanted_TK.shape != found.shape:
            raise ValueError(
                f"{name}: the record has {wanted_TK.shape[1]} experts per token, the model {found.shape[1]}."
            )
        ordered_TK = wanted_TK.sort(-1).values.int()
        differs_T = (ordered_TK != found.sort(-1).values).any(-1)
        if index is not None and index.shape == wanted_TK.shape:
            # Classes beyond the experts (zero-computation experts) may be told to experts by other numbers.
            are_experts_T = ordered_TK[:, -1] < self._num_experts[name]
            differs_T |= are_experts_T & (ordered_TK != index.sort(-1).values).any(-1)
        differing = (differs_T & (ordered_TK[:, 0] >= 0)).sum()
        self._differing[name] = differing + self._differing.get(name, 0)
        self._replayed[name] += 1

    def require_replayed(self) -> None:
        """Waits for the device."""
        if missing := [name for name, times in self._replayed.items() if not times]:
            raise RuntimeError(
                f"Routing was not replayed: {', '.join(missing[:4])}"
                f"{f' and {len(missing) - 4} more' if len(missing) > 4 else ''} did not run."
            )
        counts = torch.stack([*self._differing.values()]).tolist()
        if differing := {name: count for name, count in zip(self._differing, counts, strict=True) if count}:
            name, count = next(iter(differing.items()))
            raise RuntimeError(
                f"Routing was not replayed in {len(differing)} layers: {name} has {self._num_experts[name]} experts, and for "
                f"{count} tokens they are other ones than in the record. It selects otherwise than by one topk, or the record is "
                "of another model."
            )


def _selection(name: str, selected: Tensor | None, index: Tensor | None) -> Tensor:
    """What `topk` selected, `(T, K)`; without one, what experts are given: looked up by token, for example."""
    if selected is not None:
        return selected
    if index is None:
        raise RuntimeError(f"{name}: its experts are not told which tokens are theirs, and no topk ran before.")
    return index.reshape(-1, index.shape[-1])


def _num_rows(name: str, num_rows: int, num_tokens: int) -> int:
    if num_rows == 0 or num_tokens % num_rows:
        raise ValueError(f"{name} got {num_tokens} tokens, which are not those of {num_rows} rows.")
    return num_rows


def _full_rows(value_BsK: Tensor, state: ParallelState | None) -> Tensor:
    """Gathers `(B, s, K)` to `(B, s * sp, K)`."""
    if state is None or state.sp == 1:
        return value_BsK
    # As bytes: not every backend sends int16.
    as_bytes = value_BsK.contiguous().view(torch.uint8)
    return all_gather(as_bytes, state.sp_group, dim=1, operation="gather routing").view(value_BsK.dtype)
