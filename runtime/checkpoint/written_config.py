"""The `config.json` of an export: the source's own text, with what the run changed.

    source's fields, run changed nothing       the file, byte for byte
    quantised weights                          without the fields that say how: the export has none
    a changed field                            in its place; all other fields as the source has them
    changed rope                               `rope_parameters`, which transformers 5 reads, and `rope_theta` and `rope_scaling`,
                                               which transformers 4 and several servers read

What transformers 5 writes for itself renames and drops fields that others read.
"""

from __future__ import annotations

import copy
import json
import warnings
from collections.abc import Callable, Iterator, Mapping

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from patchgen.runtime.checkpoint.layout import class_name
from patchgen.runtime.checkpoint.model_files import config_files
from patchgen.runtime.checkpoint.quantised import without_quantisation
from patchgen.runtime.checkpoint.safetensor_files import CONFIG

DTYPE_FIELDS = ("dtype", "torch_dtype")
FILE_FIELDS = (*DTYPE_FIELDS, "architectures", "transformers_version", "_name_or_path")
"""Config fields that describe the files next to it, not the model."""
ROPE = "rope_parameters"
_OLD_ROPE = ("rope_theta", "rope_scaling", "rope_local_base_freq", "global_rope_theta", "local_rope_theta")
_NOT_SCALING = ("rope_theta", "partial_rotary_factor")


def config_text(model: PreTrainedModel, source: str | None, dtype: torch.dtype | None) -> str:
    """The config of an export.

    Args:
        source: the text of the original's config.json, which is that of the model or contains it; None: there is none.
        dtype: of most of the written weights; None: none is a floating-point tensor.
    """
    if source is None:
        fields = without_quantisation(json.loads(config_files(model, dtype)[CONFIG]))
        return _text(_readable(model.config, fields, lambda own: _set_rope(own, _as_json(model.config))))
    fields = without_quantisation(json.loads(source))
    own = own_config(fields, model)
    assert own is not None, "the source's config contains that of the model"
    now = without_quantisation(_as_json(model.config))
    changes = changed_fields(_as_read(model.config, own), now)
    if changes:
        readable = _readable(model.config, own, lambda candidate: _apply(candidate, changes, now))
        own.clear()
        own.update(readable)
    if own is fields and class_name(model) not in (fields.get("architectures") or ()):
        fields["architectures"] = [class_name(model)]
    if dtype is not None:
        set_dtype(fields, dtype, is_part=own is not fields)
    return source if fields == json.loads(source) else _text(fields)


def own_config(fields: dict, model: PreTrainedModel) -> dict | None:
    """The model's own config within a config, at any depth."""
    if fields.get("model_type") == model.config.model_type:
        return fields
    inner = (own_config(value, model) for value in fields.values() if isinstance(value, dict))
    return next((config for config in inner if config is not None), None)


def changed_fields(before: Mapping, now: Mapping) -> dict:
    """The fields that differ, except FILE_FIELDS."""
    changed = {}
    for key, value in now.items():
        if key in FILE_FIELDS or (key in before and before[key] == value):
            continue
        if isinstance(value, dict) and isinstance(before.get(key), dict):
            value = changed_fields(before[key], value)
            if not value:
                continue
        changed[key] = value
    return changed


def set_dtype(fields: dict, dtype: torch.dtype, *, is_part: bool) -> None:
    """Makes a config say what its files hold.

    Args:
        dtype: of the written weights.
        is_part: the config also describes weights that were copied: loading must not round either.
    """
    recorded = next((getattr(torch, str(level[key]), None) for level, key in _dtype_places(fields)), None)
    if is_part:
        dtype = dtype if recorded is None else torch.promote_types(recorded, dtype)
        places = [(fields, key) for key in DTYPE_FIELDS if fields.get(key)]
    else:
        places = list(_dtype_places(fields)) or [(fields, DTYPE_FIELDS[0])]
    if recorded == dtype:
        return
    for level, key in places:
        level[key] = str(dtype).removeprefix("torch.")


def _dtype_places(fields: dict) -> Iterator[tuple[dict, str]]:
    """Where a config names a dtype: the outer levels first."""
    yield from ((fields, key) for key in DTYPE_FIELDS if fields.get(key))
    for value in fields.values():
        if isinstance(value, dict):
            yield from _dtype_places(value)


def _text(fields: dict) -> str:
    return json.dumps(fields, indent=2, ensure_ascii=False) + "\n"


def _as_read(config: PreTrainedConfig, fields: dict) -> dict:
    """What transformers reads from a config's fields."""
    # JSON has no infinity: transformers writes an object instead.
    return _as_json(type(config).from_dict(config._decode_special_floats(copy.deepcopy(fields))))


def _as_json(config: PreTrainedConfig) -> dict:
    """All fields of a config as JSON holds them: names of labels, for one, have strings as keys."""
    return json.loads(json.dumps(config._encode_special_floats(config.to_dict())))


def _readable(config: PreTrainedConfig, fields: dict, change: Callable[[dict], None]) -> dict:
    """The changed fields, if transformers reads the config from them; without the old fields of rope, if it reads another one
    from both forms; as transformers writes it, with a warning, if neither works."""
    now = _as_json(config)
    changed = copy.deepcopy(fields)
    change(changed)
    for candidate in (changed, _without_old_rope(changed)):
        read = _as_read(config, candidate)
        if not changed_fields(read, now) and not changed_fields(now, read):
            return candidate
    warnings.warn(
        f"transformers does not read the changed {type(config).__name__} from the fields of the original's config.json: the "
        "export has those that transformers writes, without fields that only others read.",
        stacklevel=3,
    )
    written = json.loads(config.to_json_string(use_diff=True))
    _set_rope(written, now)
    return written


def _without_old_rope(fields: dict) -> dict:
    inner = {key: _without_old_rope(value) if isinstance(value, dict) else value for key, value in fields.items()}
    return {key: value for key, value in inner.items() if ROPE not in fields or key not in _OLD_ROPE}


def _apply(fields: dict, changes: Mapping, now: Mapping) -> None:
    """Writes changed fields of a config. Those of a config inside it go where the source has them: in an entry of its name, or, in
    the flat form of older releases, beside the fields of the outer one."""
    for key, value in changes.items():
        if key == ROPE:
            _set_rope(fields, now, changed=value)
        elif isinstance(value, dict) and isinstance(now[key], dict) and "model_type" in now[key]:
            inner = fields.get(key, fields)
            _apply(inner if isinstance(inner, dict) else fields, value, now[key])
        else:
            fields[key] = now[key]


def _set_rope(fields: dict, now: Mapping, changed: Mapping | None = None) -> None:
    """Writes both forms of rope, at each level of `now`; `changed`: at this level only, and these entries of it."""
    rope = now.get(ROPE)
    if changed is None:
        for key, value in now.items():
            if isinstance(value, dict) and isinstance(fields.get(key), dict):
                _set_rope(fields[key], value)
    if not isinstance(rope, dict):
        return
    fields[ROPE] = copy.deepcopy(rope)
    if any(
        isinstance(value, dict) for value in rope.values()
    ):  # one for each type of layers: the old form has no place for it
        for key in _OLD_ROPE:
            fields.pop(key, None)
        return
    for key in (name for name in _NOT_SCALING if rope.get(name) is not None):
        fields[key] = rope[key]
    if changed is not None and set(changed) <= {*_NOT_SCALING} and fields.get("rope_scaling"):
        return  # as the source has it
    scaling = {key: value for key, value in rope.items() if key not in _NOT_SCALING}
    if scaling.get("rope_type", "default") != "default" or len(scaling) > 1:
        old_name = {"type": scaling["rope_type"]} if "type" in (fields.get("rope_scaling") or ()) else {}
        fields["rope_scaling"] = old_name | scaling
    elif "rope_scaling" in fields:
        fields["rope_scaling"] = None
