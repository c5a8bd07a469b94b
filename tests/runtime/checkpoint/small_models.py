"""Small models with weights of their own, and checkpoints of them in every layout; for the tests beside this file."""

from __future__ import annotations

import copy
import gc
import json
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

SMALL = {
    "vocab_size": 31, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 8, "max_position_embeddings": 32, "use_cache": False,
}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12}


def moe_config(**more):
    from transformers import Qwen3MoeConfig

    return Qwen3MoeConfig(**SMALL, **EXPERTS, **more)


def generated_class():
    from patchgen.runtime import registry

    return registry.find_model("qwen3_moe").load().Qwen3MoeForCausalLM


def build(cls, config, *, seed: int = 0, device: str = "cpu"):
    """A model with random weights everywhere, constants included."""
    with torch.device(device):
        model = cls._from_config(copy.deepcopy(config), attn_implementation="eager")
    if device == "cpu":
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return model


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Everything in a folder's safetensors files."""
    found = {}
    for file in sorted(Path(folder).glob("*.safetensors")):
        found |= load_file(file)
    return found


def storages() -> dict[int, int]:
    """The bytes of every tensor that Python can reach, by address: not of what `gc.freeze` has set apart."""
    gc.collect()
    alive = [one for one in gc.get_objects() if type(one) in (torch.Tensor, torch.nn.Parameter)]
    return {
        one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in alive if one.device.type == "cpu"
    }


def new_bytes(request) -> Callable[[], int]:
    """Counts the bytes of tensors that are made from here on; `request`: of the test, after which all is collected again."""
    before = storages()
    gc.freeze()  # a process that has run other tests has a million objects: going through them takes a second
    request.addfinalizer(gc.unfreeze)
    return lambda: sum(size for address, size in storages().items() if address not in before)


def rewrite(folder: Path, target: Path, change) -> Path:
    """A copy of a checkpoint, one file, with `change` applied to its tensors."""
    target.mkdir(parents=True)
    changed = change(dict(tensors(folder)))
    save_file({name: tensor.contiguous() for name, tensor in changed.items()}, target / "model.safetensors")
    for name in ("config.json", "generation_config.json"):
        if (folder / name).is_file():
            (target / name).write_text((folder / name).read_text())
    return target


def stacked(found: dict) -> dict:
    """Experts as `gate_up_proj [E, 2I, H]` and `down_proj [E, H, I]`."""
    result = {name: tensor for name, tensor in found.items() if ".experts." not in name}
    for prefix in sorted({name.split(".experts.")[0] for name in found if ".experts." in name}):
        count = len(
            {name.split(".experts.")[1].split(".")[0] for name in found if name.startswith(f"{prefix}.experts.")}
        )

        def of(part, prefix=prefix, count=count):
            return torch.stack([found[f"{prefix}.experts.{place}.{part}.weight"] for place in range(count)])

        result[f"{prefix}.experts.gate_up_proj"] = torch.cat([of("gate_proj"), of("up_proj")], dim=1)
        result[f"{prefix}.experts.down_proj"] = of("down_proj")
    return result


def transposed(found: dict) -> dict:
    """Stacks with their last two dimensions exchanged."""
    return {name: tensor.transpose(1, 2) if ".experts." in name else tensor for name, tensor in stacked(found).items()}


def merged(found: dict, ending: str = "") -> dict:
    """Stacks of gate, up and down by themselves."""
    result = {}
    for name, tensor in stacked(found).items():
        if name.endswith("gate_up_proj"):
            gate, up = tensor.chunk(2, dim=1)
            result[name.replace("gate_up_proj", "gate_proj") + ending] = gate
            result[name.replace("gate_up_proj", "up_proj") + ending] = up
        else:
            result[name + (ending if ".experts." in name else "")] = tensor
    return result


def mixed(found: dict) -> dict:
    """One layer stacked, the other with one key per expert."""
    one = {name: tensor for name, tensor in stacked(found).items() if ".layers.0." in name}
    return {name: tensor for name, tensor in found.items() if ".layers.0." not in name} | one


LAYOUTS = {
    "per-expert": lambda found: found,
    "stacked": stacked,
    "transposed": transposed,
    "merged": merged,
    "merged.weight": lambda found: merged(found, ".weight"),
    "mixed": mixed,
}


def change_config(folder: Path, **fields) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


def require_loads(original, folder: Path) -> None:
    """Plain transformers loads a folder, and it is the original."""
    loaded, info = type(original).from_pretrained(folder, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    wanted = original.state_dict()
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in loaded.state_dict().items())
