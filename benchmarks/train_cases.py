"""The cases of `bench_train.py`: their implementation and checkpointing, and a comparison of their rows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from case_failures import OUT_OF_MEMORY
from case_rows import UNFINISHED

CASE_COLUMNS = ("layers", "who", "layout", "ckpt", "tokens/GPU")  # the columns that identify a case
TRANSFORMERS = "transformers"
TITAN = "torchtitan"
WHO = {
    TRANSFORMERS: TRANSFORMERS,
    TITAN: TITAN,
    "torchtitan, EP2": TITAN,
    "torchtitan, EP4": TITAN,
}  # those that are not ours
LAYOUTS: dict[str, dict] = {
    "FSDP": {},
    "FSDP, kept gathered": {"reshard_after_forward": False},
    "FSDP, collectives": {"shard_exchange": "collectives"},
    "FSDP, graph": {"cuda_graph": True},
    TRANSFORMERS: {},
    TITAN: {},
    "torchtitan, EP2": {"ep": 2},
    "torchtitan, EP4": {"ep": 4},
    "EP2": {"ep": 2},
    "EP4": {"ep": 4},
    "EP8": {"ep": 8},
    "EP2, peer memory": {"ep": 2, "expert_exchange": "peer_memory"},
    "EP2, peer memory, graph": {"ep": 2, "expert_exchange": "peer_memory", "cuda_graph": True},
    "EP4, peer memory": {"ep": 4, "expert_exchange": "peer_memory"},
    "EP4, peer memory, graph": {"ep": 4, "expert_exchange": "peer_memory", "cuda_graph": True},
    "SP2": {"sp": 2},
    "EP2 x SP2": {"ep": 2, "sp": 2},
    "EP4 x SP2": {"ep": 4, "sp": 2},
    "EP2 x SP2, peer memory": {"ep": 2, "sp": 2, "expert_exchange": "peer_memory"},
    "EP4 x SP2, peer memory": {"ep": 4, "sp": 2, "expert_exchange": "peer_memory"},
}


def describe(layers: int, name: str, mode: str, tokens: int) -> dict:
    """The columns that identify a case."""
    who = WHO.get(name, "ours")
    layout = name if who == "ours" else name.partition(", ")[2] or "FSDP"
    return {"layers": layers, "who": who, "layout": layout, "ckpt": mode, "tokens/GPU": tokens}


def has_mode(case: Mapping, above: int, rows: Iterable[Mapping]) -> bool:
    """Whether a case is measured with its checkpointing: by its tokens, or, for torchtitan, if faster modes do not fit."""
    if case["who"] != TITAN:
        return (case["tokens/GPU"] > above) == (case["ckpt"] == "full")
    same = [row for row in rows if all(row[name] == case[name] for name in CASE_COLUMNS if name != "ckpt")]
    return all(row["s/step"] in (OUT_OF_MEMORY, UNFINISHED) for row in same)


def compare(rows: list[dict]) -> list[str]:
    """Fills in `ratio`; returns the cases that did not run, and those whose first step differs from the fastest peer's."""
    problems = []
    peers = [row for row in rows if row["who"] != "ours" and "loss 1" in row]
    reference = {row["tokens/GPU"]: row for row in sorted(peers, key=lambda row: -row["s/step"])}
    for row in rows:
        case, other = f"{row['who']} {row['layout']} at {row['tokens/GPU']}", reference.get(row["tokens/GPU"])
        if "loss 1" not in row:
            if row["s/step"] != OUT_OF_MEMORY:
                problems.append(f"{case}: {row['s/step']}")
            continue
        if row["loss 1"] != row["loss 1"]:
            problems.append(f"{case}: the loss is not a number")
        if other is None:
            continue
        row["ratio"] = round(row["tokens/s/GPU"] / other["tokens/s/GPU"], 2)
        for key, bar in (("loss 1", 1e-3), ("norm 1", 3e-2)):
            if not abs(row[key] - other[key]) <= bar * abs(other[key]):  # also if one is not a number
                problems.append(f"{case}: {key} {row[key]}, {other['who']} {other['layout']} {other[key]}")
    return problems
