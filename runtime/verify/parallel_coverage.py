"""Which text types train with sequence or expert parallelism, with no code per model: measured on real ranks.

    patchgen sweep --sp 2                                                  # every causal type, into docs/coverage.md
    python -m patchgen.runtime.verify.parallel_coverage --ep 2 mixtral     # some, printed

Each type is generated, built small, and trained one step on gloo ranks; loss and every gathered gradient are compared
with upstream's own class in one process. With sequence parallelism a packed batch follows, compared with its documents
run one by one. Expert parallelism alone leaves attention to upstream, which need not keep documents apart.
"""

from __future__ import annotations

import argparse
import copy
import importlib.util
import itertools
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from patchgen.runtime import attention, parallel
from patchgen.runtime.parallel import ParallelConfig, batch, loss, sharding
from patchgen.runtime.parallel.state import ParallelState
from patchgen.runtime.verify.coverage import REFUSALS, causal_types
from patchgen.runtime.verify.inputs import text_cases
from patchgen.runtime.verify.model_pair import build_model, perturb
from patchgen.runtime.verify.ranks import CaseFailed, RankPool
from patchgen.runtime.verify.small_config import small_config

TOLERANCE = 1e-5


@dataclass(frozen=True)
class Row:
    """One model type: `reason` is empty where everything agrees; numbers are relative differences."""

    model_type: str
    reason: str = ""
    loss: float = float("nan")
    gradients: float = float("nan")
    packed_loss: float = float("nan")
    packed_gradients: float = float("nan")
    num_expert_parameters: int = 0
    seconds: float = 0.0


class NotApplicable(ValueError):
    """The type has nothing to prove here: no experts, or too few heads."""


_STATES: dict[tuple[int, int], ParallelState] = {}


def state_of(sp: int, ep: int) -> ParallelState:
    """One state per layout and process: process groups are never freed."""
    if (sp, ep) not in _STATES:
        config = ParallelConfig.for_world(dist.get_world_size(), sp=sp, ep=ep)
        _STATES[sp, ep] = ParallelState.create(config, "cpu")
    return _STATES[sp, ep]


def generated_class(head: str, file: str) -> type[nn.Module]:
    """The head of a generated modeling file."""
    name = f"patchgen_sweep_{head}"
    if name not in sys.modules:
        specification = importlib.util.spec_from_file_location(name, file)
        module = importlib.util.module_from_spec(specification)
        sys.modules[name] = module
        specification.loader.exec_module(module)
    return getattr(sys.modules[name], head)


def generated_file(head: str, folder: Path) -> Path:
    """The generated modeling file that has `head`: the committed one, or one made in `folder` with this root."""
    import transformers

    from patchgen import pipeline, provenance, upstream
    from patchgen.model_configs import config_for

    source = sys.modules[getattr(transformers, head).__module__].__file__
    kind = Path(source).stem.removeprefix("modeling_")
    committed = provenance.generated_root() / kind / f"modeling_{kind}.py"
    if committed.is_file() and f"class {head}(" in committed.read_text():
        return committed
    target = folder / head
    config = replace(config_for(kind), roots=(head,))
    provenance.write(pipeline.generate(upstream.load(kind), config), target)
    return target / f"modeling_{kind}.py"


def compare(model_type: str, head: str, file: str, sp: int, ep: int) -> dict:
    """Runs on every rank; the row of the type, as a dict."""
    import transformers

    attention.register()
    started = time.perf_counter()
    state = state_of(sp, ep)
    upstream_class = getattr(transformers, head)
    config = small_config(upstream_class.config_class).config
    text = config.get_text_config(decoder=True)
    for one in (config, text):
        one.use_cache = False
        if hasattr(one, "output_router_logits"):
            one.output_router_logits = False
    yardstick = build_model(upstream_class, config)
    perturb(yardstick)
    switch_dropout_off(yardstick)
    row = {"model_type": model_type}
    for packed in (False, True) if sp > 1 else (False,):
        cases = {case.name: dict(case.batch) for case in text_cases(config, upstream_class)}
        inputs = cases.get("packed" if packed else "plain")
        if inputs is None:
            continue
        expected_loss, expected = _one_rank(yardstick, inputs, packed)
        model = generated_class(head, file)._from_config(
            copy.deepcopy(config), attn_implementation="patchgen_eager" if sp > 1 else "eager", dtype=torch.float32
        )
        model.load_state_dict(yardstick.state_dict())
        switch_dropout_off(model)
        plan = sharding.own_plan(model)
        row["num_expert_parameters"] = len(plan)
        if ep > 1 and not plan:
            raise NotApplicable("no expert parameters")
        sharding.shard_model(model, state)
        got_loss, got = _all_ranks(model, inputs, state)
        # Some gradients are zero but for rounding (biases of keys): they are measured against the largest of all.
        least = 1e-4 * max(float(gradient.abs().max()) for gradient in expected.values())
        differences = {name: _difference(got[name], expected[name], least) for name in expected}
        worst = max(differences, key=differences.get)
        row["packed_loss" if packed else "loss"] = abs(got_loss - expected_loss) / abs(expected_loss)
        row["packed_gradients" if packed else "gradients"] = differences[worst]
        prefix = "packed " if packed else ""
        if abs(got_loss - expected_loss) / abs(expected_loss) > TOLERANCE:
            row["reason"] = f"{prefix}loss {got_loss:.7f}, upstream {expected_loss:.7f}"
        elif not differences[worst] <= TOLERANCE * 10:
            row["reason"] = f"{prefix}gradient of {worst} differs by {differences[worst]:.1e}"
        if row.get("reason"):
            break
    return row | {"seconds": time.perf_counter() - started}


def switch_dropout_off(model: nn.Module) -> None:
    """Randomness is not what is compared."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name in ("attention_dropout", "dropout", "dropout_p", "attn_dropout", "hidden_dropout"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)


def _one_rank(model: nn.Module, inputs: dict, packed: bool) -> tuple[float, dict[str, Tensor]]:
    model.zero_grad()
    model.train()
    items = (inputs["labels"][:, 1:] != batch.IGNORED).sum()
    total = 0.0
    for piece in _documents(inputs) if packed else [slice(None)]:
        part = {name: inputs[name][:, piece] for name in ("input_ids", "labels")}
        share = model(**part, num_items_in_batch=items).loss
        share.backward()
        total += float(share.detach())
    return total, {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def _documents(inputs: dict) -> list[slice]:
    starts = [int(place) for place in torch.nonzero(inputs["position_ids"][0] == 0).view(-1)]
    return list(itertools.starmap(slice, itertools.pairwise([*starts, inputs["input_ids"].shape[1]])))


def _all_ranks(model: nn.Module, inputs: dict, state: ParallelState) -> tuple[float, dict[str, Tensor]]:
    rows = torch.arange(inputs["input_ids"].shape[0]).chunk(state.config.num_batches)[state.batch_index]
    mine = batch.slice_batch({name: value[rows] for name, value in inputs.items()}, sp=state.sp, sp_rank=state.sp_rank)
    items = loss.count_items([mine], "cpu")
    model.train()
    with parallel.using(state), loss.step(items):
        share = model(**mine, num_items_in_batch=items).loss
        share.backward()
    total = share.detach().clone()
    dist.all_reduce(total)
    gradients = {
        name: (p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad).clone()
        for name, p in model.named_parameters()
        if p.grad is not None
    }
    return float(total), gradients


def _difference(got: Tensor, expected: Tensor, least: float) -> float:
    return float((got - expected).abs().max() / expected.abs().max().clamp(min=least))


# ----------------------------------------------------------------------------------------------- sweep


def sweep(model_types: list[str], *, sp: int = 1, ep: int = 1, world: int = 2) -> list[Row]:
    """The rows of some types, or of all; types that do not apply are left out. Prints one line each as it goes."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    from patchgen.errors import PatchgenError

    pool = RankPool(world)
    rows = []
    with tempfile.TemporaryDirectory(prefix="patchgen-sweep-") as folder:
        for model_type in model_types or causal_types():
            head = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type]
            try:
                file = str(generated_file(head, Path(folder)))
                row = Row(**pool.run(compare, model_type, head, file, sp, ep, timeout=120)[0])
            except CaseFailed as failure:  # is an AssertionError, so it comes before those that generation raises
                row = Row(model_type, reason=_last_line(str(failure)))
            except (PatchgenError, *REFUSALS) as refusal:
                row = Row(model_type, reason=f"not generated: {' '.join(str(refusal).split())[:140]}")
            if "NotApplicable" in row.reason:
                continue
            rows.append(row)
            print(_line(row), flush=True)
    pool.close()
    return rows


def _last_line(trace: str) -> str:
    other = (" ", "rank ", "ranks ", "Traceback")
    lines = [line for line in trace.splitlines() if line and not line.startswith(other)]
    return (lines[0] if lines else trace.strip())[:160]


def _line(row: Row) -> str:
    if row.reason:
        return f"failed  {row.model_type}: {row.reason}"
    numbers = asdict(row)
    figures = " ".join(
        f"{name} {numbers[name]:.1e}" for name in ("loss", "gradients", "packed_loss", "packed_gradients")
    )
    return f"ok      {row.model_type}: {figures}"


def main(arguments: list[str]) -> int:
    """Prints the rows and their counts."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sp", type=int, default=1)
    parser.add_argument("--ep", type=int, default=1)
    parser.add_argument("--world", type=int, default=2)
    parser.add_argument("model_types", nargs="*")
    options = parser.parse_args(arguments)
    rows = sweep(options.model_types, sp=options.sp, ep=options.ep, world=options.world)
    print(f"{len(rows)} types, {sum(not row.reason for row in rows)} agree")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
