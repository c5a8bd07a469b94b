"""A value is computed once per tensor, and again when somebody wrote to it."""

import torch

from patchgen.runtime.tensor_cache import TensorCache


def test_values_follow_what_the_tensor_holds():
    calls = []
    last = TensorCache(lambda tensor: calls.append(1) or int(tensor[-1]))
    bounds = torch.tensor([0, 3, 7])
    assert (last(bounds), last(bounds), len(calls)) == (7, 7, 1)
    bounds.copy_(torch.tensor([0, 2, 5]))  # a loader that fills its buffers anew
    assert (last(bounds), len(calls)) == (5, 2)
    assert last(bounds.clone()) == 5
    with torch.inference_mode():
        assert last(torch.tensor([4])) == 4
