"""Router replay over FSDP x EP x SP: what one process records, ranks replay, and what ranks record is the same."""

from __future__ import annotations

import cases_rl
import cases_routing as cases
import pytest
import torch

LAYOUTS = pytest.mark.parametrize(
    "layout", [{"sp": 2}, {"ep": 2}, {"sp": 2, "ep": 2}], ids=["sp2", "fsdp-ep2", "sp2-ep2"]
)
NAMES = pytest.mark.parametrize("name", ["qwen3_moe", "deepseek_v3", "gpt_oss"])
BOUND = 1e-3  # of log-probabilities, by noise of NOISE in routers


@pytest.fixture(scope="module")
def recorded(one_rank):
    """Model type -> log-probabilities and experts of all rows by one process; computed once."""
    results = {}

    def of(name: str):
        if name not in results:
            [(values, _, routing)] = one_rank.run(cases.record, name)
            results[name] = values, routing
        return results[name]

    return of


@LAYOUTS
@NAMES
def test_ranks_replay_what_one_process_recorded(name, layout, recorded, one_rank, two_ranks):
    """Log-probabilities against those of the recording process, whose routers have no noise: equal up to the noise, and not without
    the record. The step that follows, with layers computed again, against one process without recomputation."""
    before, routing = recorded(name)
    [(_, _, _, expected)] = one_rank.run(cases.replay, name, routing)
    results = two_ranks.run(cases.replay, name, routing, "full", **layout)
    for found, without, mine, _ in results:
        assert (found - before[mine]).abs().max() < BOUND < (without - before[mine]).abs().max()
    changes = results[0][-1]
    routers = [key for key in changes if "mlp.gate." in key or "mlp.router." in key]
    assert routers and all(bool(changes[key].any()) for key in routers if key.endswith("weight"))
    for key, change in expected.items():
        torch.testing.assert_close(changes[key], change, rtol=1e-3, atol=1e-5 * float(change.abs().max()) + 1e-7)


@LAYOUTS
def test_ranks_record_what_one_process_does(layout, recorded, two_ranks):
    """Experts of full rows on every rank, of rows that sp has to pad, against those that one process selects, to the bit."""
    _, routing = recorded("gpt_oss")
    for _, mine, found in two_ranks.run(cases.record, "gpt_oss", **layout):
        assert found.experts.keys() == routing.experts.keys() and found.multiple == layout.get("sp", 1)
        for layer, value in routing.experts.items():
            assert value.shape == (cases_rl.ROWS, cases_rl.LENGTH, 2)
            real = cases_rl.rollouts()[0]["attention_mask"][mine].bool()
            assert torch.equal(found.experts[layer][:, : cases_rl.LENGTH][real], value[mine][real])
            assert found.experts[layer].shape[1] == cases_rl.LENGTH + cases_rl.LENGTH % layout.get("sp", 1)


def test_the_page_runs(one_rank):
    """The calls of docs/tasks/router_replay.md: the reference and the model after a small step, with the recorded experts, against
    the model before it."""
    [(before, of_reference, after)] = one_rank.run(cases.page)
    assert (of_reference - before).abs().max() < BOUND and (after - before).abs().max() < BOUND
