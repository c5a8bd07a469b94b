"""Loops that step through data and carry a value: by what their number of steps is computed from."""

from __future__ import annotations

import ast

import pytest
from generation_cases import anatomy_of

from patchgen.anatomy.sequence_loops import carrying_loop

FILE = """
import torch
{above}

class Example:
    def forward(self, x, config, layers, slots):
        out = h = torch.zeros_like(x)
        length, count, i = x.shape[1], self.count, 0
        parts = []
        {loop}
            {body}
        return h
"""
STEP = "h = h + self.step(x, h)"
THROUGH_DATA = (
    "for i in range(x.shape[1]):",
    "for i in range(x.shape[1] // self.chunk_size):",
    "for i in range(0, length, config.chunk_size):",
    "for i in range(length - 1, 0, -1):",
    "for t in x.unbind(1):",
    "for t in torch.split(x, self.chunk_size, 1):",
    "for i, t in enumerate(x):",
    "for t, s in zip(x.unbind(1), h.unbind(1)):",
    "while i < length:",
    "while x.shape[1] > i:",
    "while True:",
)
OTHERS = (
    "for i in range(4):",
    "for i in range(self.count):",
    "for i in range(count):",
    "for i in range(1, len(self.layers)):",
    "for i in range(config.num_layers // 2):",
    "for layer in self.layers:",
    "for t, layer in zip(x.unbind(1), self.layers):",
    "for t in (x, h):",
    "while i < self.count:",
)


def found(loop: str, body: str = STEP, above: str = "") -> str:
    anatomy = anatomy_of(FILE.format(loop=loop, body=body, above=above))
    node = carrying_loop(anatomy, anatomy.classes["Example"].methods["forward"])
    return ast.unparse(node).split("\n")[0] if node is not None else ""


@pytest.mark.parametrize("loop", [*THROUGH_DATA, *OTHERS])
def test_a_loop_steps_through_data_if_data_says_how_often(loop: str):
    assert found(loop) == (loop if loop in THROUGH_DATA else "")


@pytest.mark.parametrize("body", ["i += 1", "y = self.step(x)", "with torch.no_grad(): y = x\n            h = y"])
def test_a_loop_that_carries_no_data_is_none(body: str):
    assert found("for t in x.unbind(1):", body) == ""


@pytest.mark.parametrize("body", ["for k in (1, 2): h += t", "try: h += t\n            finally: pass"])
def test_what_is_added_in_an_inner_statement_is_carried(body: str):
    assert found("for t in x.unbind(1):", body) == "for t in x.unbind(1):"


@pytest.mark.parametrize(
    ("body", "carries"),
    [
        ("h[0] = self.step(t, h[0])", True),
        ("h[:, i] = self.step(t, h[:, i - 1])", True),
        ("h[:, i:] = h[:, i:] + t", True),
        ("h[i // 2] = h[i // 2] + t", True),
        ("h[0] += t", True),
        ("parts.append(self.step(t, parts[-1]))", True),
        ("parts.extend([self.step(t, p) for p in parts])", True),
        ("h[0][0] = self.step(t, h[0][0])", True),
        ("h[0], y = self.step(t, h[0])", True),
        ("h.mul_(0.9).add_(t)", True),
        ("h[:, 0].add_(t)", True),
        ("h.view(-1)[i].add_(t)", True),
        ("h.copy_(self.step(t, h))", True),
        ("h.copy_(self.step(t))", False),
        ("h.index_add_(0, self.rows, t)", False),
        ("h.index_add_(0, self.rows, self.step(t, h))", True),
        ("torch.add(h, t, out=h)", True),
        ("torch.relu_(h); parts.append(h + t)", True),
        ("parts.insert(0, self.step(t, parts[0]))", True),
        ("parts.put(t); y = self.step(parts)", True),
        ("out[:, i] = self.step(t, h[:, i - 1])", True),
        ("out[:, i] = self.step(t, h[:, i])", False),
        ("self.h = self.step(t, self.h)", True),
        ("self.h = self.step(t); y = self.h", False),
        ("self.h[0] = self.step(t, self.h[0])", True),
        ("y = self.step(t); y.mul_(2)", False),
        ("t.mul_(2)", False),
        ("y = h; y.add_(t)", True),
        ("h[:, i].mul_(0.9).add_(t)", False),
        ("h[i][0] = self.step(t, h[i][0])", False),
        ("h[:, i] = self.step(t)", False),
        ("h[:, i] = h[:, i] * t", False),
        ("h[:, i] += t", False),
        ("y = h[i]; h[i] = y * t", False),
        ("parts.append(self.step(t))", False),
        ("parts.append(self.step(t)); y = t if len(parts) > 3 else x", False),
    ],
)
def test_a_value_that_is_left_in_a_part_is_carried(body: str, carries: bool):
    loop = "for i, t in enumerate(x.unbind(1)):"
    assert found(loop, body) == (loop if carries else "")


@pytest.mark.parametrize(
    ("loop", "body", "carries"),
    [
        ("for t, s in zip(x.unbind(1), slots):", "h[:, s] = h[:, s] * 0.5 + t", True),
        ("for t, s in zip(x.unbind(1), slots):", "h[:, s] += t", True),
        ("for s in slots:", "h[s] = self.step(x, h[s])", True),
        ("for i, s in enumerate(slots):", "h[s] += x[i]", True),
        ("for i in slots.range(length):", "h[i] += x[i]", True),
        ("for i in range(length):", "h[:, i] += x[:, i]", False),
        ("for i in range(length):", "i = 0; h[:, i] += x[:, i]", True),
        ("for i in reversed(range(length)):", "h[:, i] += x[:, i]", False),
        ("for i, t in zip(range(length), x.unbind(1)):", "h[:, i] += t", False),
        ("for k, (i, t) in enumerate(zip(range(length), x)):", "h[:, i] += t", False),
        ("for i in range(0, length, config.size):", "h[:, i:i + config.size] += x[:, i:i + config.size]", False),
        ("for i in range(0, length, config.size):", "h[:, i:i + 2] += x[:, i:i + 2]", True),
        ("for i in range(0, length, count):", "h[:, i:i + count] += x[:, i:i + count]", False),
        ("for i in range(0, length, count):", "count = 9; h[:, i:i + count] += x[:, i:i + count]", True),
        ("for i in range(length):", "h[:, i:i + 1] += x[:, i:i + 1]", False),
        ("for i in range(length):", "h[:, i:i + 2] += x[:, i:i + 2]", True),
    ],
)
def test_a_place_is_a_steps_own_if_the_loop_counts_it(loop: str, body: str, carries: bool):
    assert bool(found(loop, body)) == carries


def test_elements_that_are_called_are_no_data():
    assert found("for layer in layers:", "h = layer(h)") == ""
    assert found("for layer in layers:", "h = h * layer") == "for layer in layers:"


def test_a_range_is_pythons():
    assert found("for i in range(self.count):", above="from elsewhere import range") == ""
    assert found("for i in zip(x, self.layers):", above="def zip(*parts):\n    return parts[0]") != ""


def test_what_is_made_on_the_device_of_the_data_is_carried():
    """A decay that starts as a number: in code that only asks for a device, every name that is read counts."""
    loop = "t = torch.ones((), device=x.device)\n        for i in range(x.shape[1]):"
    assert found(loop, "out[:, i] = x[:, i] * t; t = t * 0.9").startswith("for i in range(x.shape[1]):")
