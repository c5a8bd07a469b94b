"""The roles of a sequence mixer's arguments, by the names of its parameters, never by a size that happens to match.

`cu_seqlens` of 31 documents has 32 entries, which may equal the number of value heads, channels or tokens.
"""

from __future__ import annotations

import enum
import importlib.util
import inspect
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor


class Role(enum.Enum):
    """The dimensions of a tensor argument of a mixer."""

    KEY_TOKENS = "(B, S, key heads, ...)"
    VALUE_TOKENS = "(B, S, value heads, ...)"
    VALUE_HEADS = "(value heads, ...)"
    SEQUENCE = "(B, channels, S)"
    CHANNELS = "(channels, ...)"
    STATE_SEQUENCE = "(B, states, S)"
    LENGTHS = "(documents + 1,)"
    DOCUMENTS = "(B, S), the document of each token"
    DECODING_CACHE = "a decoding cache"


TOKENS = (Role.KEY_TOKENS, Role.VALUE_TOKENS)
LENGTHS = dict.fromkeys(("cu_seqlens", "cu_seq_lens_q", "cu_seq_lens"), Role.LENGTHS)

# The parameters of upstream's torch functions and of the `fla` kernels that replace them.
RULE_ROLES: Mapping[str, Role] = LENGTHS | {
    "query": Role.KEY_TOKENS,
    "key": Role.KEY_TOKENS,
    "q": Role.KEY_TOKENS,
    "k": Role.KEY_TOKENS,
    "value": Role.VALUE_TOKENS,
    "v": Role.VALUE_TOKENS,
    "g": Role.VALUE_TOKENS,
    "beta": Role.VALUE_TOKENS,
    "z": Role.VALUE_TOKENS,
    "A_log": Role.VALUE_HEADS,
    "dt_bias": Role.VALUE_HEADS,
    "D": Role.VALUE_HEADS,
    "initial_state": Role.DECODING_CACHE,
}
# The same of short convolutions, and of the package `causal_conv1d`.
CONVOLUTION_ROLES: Mapping[str, Role] = LENGTHS | {
    "hidden_states": Role.SEQUENCE,
    "x": Role.SEQUENCE,
    "weight": Role.CHANNELS,
    "bias": Role.CHANNELS,
    "seq_idx": Role.DOCUMENTS,
    "initial_state": Role.DECODING_CACHE,
    "initial_states": Role.DECODING_CACHE,
    "conv_state": Role.DECODING_CACHE,
    "conv_states": Role.DECODING_CACHE,
    "final_states_out": Role.DECODING_CACHE,
}
# The same of state-space scans by heads, with B and C of groups of heads (Mamba-2), and by channels (Mamba).
HEAD_SCAN_ROLES: Mapping[str, Role] = LENGTHS | {
    **dict.fromkeys(("hidden_states", "x", "dt", "z"), Role.VALUE_TOKENS),
    **dict.fromkeys(("B", "C"), Role.KEY_TOKENS),
    **dict.fromkeys(("A", "D", "dt_bias"), Role.VALUE_HEADS),
    "seq_idx": Role.DOCUMENTS,
    "initial_states": Role.DECODING_CACHE,
}
CHANNEL_SCAN_ROLES: Mapping[str, Role] = LENGTHS | {
    **dict.fromkeys(("hidden_states", "u", "dt", "delta", "z"), Role.SEQUENCE),
    **dict.fromkeys(("B", "C"), Role.STATE_SEQUENCE),
    **dict.fromkeys(("A", "D", "delta_bias", "dt_bias"), Role.CHANNELS),
}


@dataclass(frozen=True)
class Call:
    """A call of upstream's function, with each argument under the name of its parameter.

    Attributes:
        values: by name, in the order of the call.
        positional: how many of them are passed by position, as upstream does: a kernel that replaces the function may name
            them differently.
    """

    function: Callable[..., Any]
    roles: Mapping[str, Role]
    values: Mapping[str, Any]
    positional: int

    @classmethod
    def of(
        cls, function: Callable[..., Any], roles: Mapping[str, Role], args: Collection[Any], kwargs: Mapping[str, Any]
    ) -> Call:
        """The call `function(*args, **kwargs)`.

        Raises:
            TypeError: more positional arguments than the function has parameters.
        """
        kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        names = [name for name, parameter in inspect.signature(function).parameters.items() if parameter.kind in kinds]
        if len(args) > len(names):
            raise TypeError(f"{_name(function)} takes {names}; found {len(args)} positional arguments.")
        return cls(function, roles, {**dict(zip(names, args, strict=False)), **kwargs}, len(args))

    @property
    def name(self) -> str:
        return _name(self.function)

    def tensors_with(self, *roles: Role) -> dict[str, Tensor]:
        """The tensors of these roles."""
        return {
            name: value
            for name, value in self.values.items()
            if isinstance(value, Tensor) and self.roles.get(name) in roles
        }

    def without(self, role: Role) -> Call:
        """The call without the arguments of a role."""
        dropped = [name for name in self.values if self.roles.get(name) is role]
        # Positional arguments after a dropped one are passed by name.
        positional = min([self.positional, *map(list(self.values).index, dropped)])
        values = {name: value for name, value in self.values.items() if name not in dropped}
        return replace(self, values=values, positional=positional)

    def with_values(self, values: Mapping[str, Any]) -> Call:
        return replace(self, values={**self.values, **values})

    def run(self) -> Any:
        values = list(self.values.items())
        return self.function(*(value for _, value in values[: self.positional]), **dict(values[self.positional :]))

    def require_roles(self) -> None:
        """Raises ValueError for a tensor parameter of the function or its kernel without a known role.

        What only matches `**kwargs` is not checked: models pass down all arguments of their forward.
        """
        parameters = set(inspect.signature(self.function).parameters) | set(
            _closure(self.function, "applicable_params", ())
        )
        unknown = [
            n for n, v in self.values.items() if isinstance(v, Tensor) and n in parameters and n not in self.roles
        ]
        if unknown:
            raise ValueError(
                f"{self.name} takes the tensor '{unknown[0]}' of shape {tuple(self.values[unknown[0]].shape)}, and it is "
                f"unknown whether it spans tokens, heads or channels. Known arguments: {sorted(self.roles)}. To fix: add its "
                "role in runtime/parallel/mixer_arguments.py."
            )

    def require_shapes(self, expected: Mapping[Role, tuple[int, ...]]) -> None:
        """Raises ValueError for tensors whose first dimensions are not those of their role."""
        for name, value in self.tensors_with(*expected).items():
            sizes = expected[self.roles[name]]
            if tuple(value.shape[: len(sizes)]) != sizes:
                raise ValueError(
                    f"'{name}' of {self.name} has the shape {tuple(value.shape)}: expected {self.roles[name].value}, "
                    f"here {sizes} first."
                )


@torch.compiler.assume_constant_result  # a compiler cannot call a function whose closure it has read
def separates_documents(function: Callable[..., Any], package: str) -> bool:
    """Whether a kernel of `package` replaces upstream's torch implementation, which ignores document boundaries."""
    # transformers decides when it decorates the function: an installed package may lack the kernel.
    decided = _closure(function, "is_new_implementation", None)
    return importlib.util.find_spec(package) is not None if decided is None else decided


def _closure(function: Callable[..., Any], variable: str, default: Any) -> Any:
    """A closure variable of transformers' decorator around a function that a kernel may replace."""
    names = getattr(getattr(function, "__code__", None), "co_freevars", ())
    cells = getattr(function, "__closure__", None) or ()
    return cells[names.index(variable)].cell_contents if variable in names else default


def _name(function: Callable[..., Any]) -> str:
    return getattr(function, "__name__", "a sequence mixer")
