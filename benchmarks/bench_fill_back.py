"""Three ways to put features onto placeholder tokens whose embeddings are sliced: time and bytes per rank, forward and
backward, with equal results.

    python benchmarks/bench_fill_back.py --ranks 4 --tokens 8192 --hidden 2048 --share 0.5

    exchange   embeddings and features to (S, H/n) and (F, H/n) by all-to-all, scatter, embeddings back by all-to-all
    gather     embeddings of the whole sequence on every rank, scatter, keep the slice
    own        embeddings stay; features of the tower's slices are gathered, each rank keeps those of its tokens (ours)

The tower leaves each rank a slice of the feature rows in all three.

    S tokens of the sequence   F feature rows   H hidden size   n ranks
"""

from __future__ import annotations

import argparse
import csv
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from patchgen.runtime.parallel import ParallelConfig, collectives, media, sequence
from patchgen.runtime.parallel.state import ParallelState
from patchgen.runtime.verify.ranks import RankPool

RESULTS = Path(__file__).with_name("results_fill_back.csv")
REPEATS = 5


def exchange(embeddings, features, mask, state):
    """To all tokens of a part of the hidden size, and back."""
    n = state.sp
    full = sequence.scatter_heads([embeddings.unflatten(-1, (n, -1))], state, operation="to parts")[0].flatten(2)
    part = sequence.scatter_heads([features[None].unflatten(-1, (n, -1))], state, operation="features")[0].flatten(2)
    everywhere = collectives.all_gather(mask, state.sp_group, dim=1, operation="mask")
    filled = full.masked_scatter(everywhere[..., None], part)
    return sequence.gather_heads(filled[:, :, None], state, operation="back").flatten(2)


def gather(embeddings, features, mask, state):
    """All embeddings on every rank."""
    rows = collectives.gather_rows(features, state.sp_group, operation="features")  # pyright: ignore[reportCallIssue]  # torch's decorator
    by_token = embeddings.transpose(0, 1)
    full = collectives.gather_rows(by_token, state.sp_group, operation="embeddings").transpose(0, 1)  # pyright: ignore[reportCallIssue]  # torch's decorator
    everywhere = collectives.all_gather(mask, state.sp_group, dim=1, operation="mask")
    filled = full.masked_scatter(everywhere[..., None], rows)
    return filled.chunk(state.sp, dim=1)[state.sp_rank]


def exchange_features(embeddings, features, mask, state):
    """Only features are exchanged."""
    rows = collectives.gather_rows(features, state.sp_group, operation="features")  # pyright: ignore[reportCallIssue]  # torch's decorator
    return embeddings.masked_scatter(mask[..., None], media.local_features(rows, mask, state))


WAYS = {"exchange": exchange, "gather": gather, "own": exchange_features}


def measure(tokens: int, hidden: int, share: float) -> list[dict]:
    """A row for each variant: the least milliseconds of `REPEATS` runs, and received MB; runs on every rank."""
    n = dist.get_world_size()
    state = ParallelState.create(ParallelConfig.for_world(n, sp=n), "cpu")
    generator = torch.Generator().manual_seed(0)
    count = int(tokens * share) // n * n
    mask = torch.zeros(1, tokens, dtype=torch.bool)
    mask[0, torch.randperm(tokens, generator=generator)[:count]] = True
    embeddings = torch.randn(1, tokens, hidden, generator=generator).chunk(n, dim=1)[state.sp_rank].clone()
    features = torch.randn(count, hidden, generator=generator).chunk(n)[state.sp_rank].clone()
    weights = torch.randn(1, tokens, hidden, generator=generator).chunk(n, dim=1)[state.sp_rank]
    local_mask = mask.chunk(n, dim=1)[state.sp_rank].contiguous()
    moved = (n - 1) / n
    bytes_of = {
        "exchange": 4 * moved * (2 * tokens * hidden + count * hidden) / n,
        "gather": 4 * moved * (tokens * hidden + count * hidden),
        "own": 4 * moved * count * hidden,
    }
    rows, expected = [], None
    for name, way in WAYS.items():
        seconds = []
        for _ in range(REPEATS):
            inputs = [tensor.clone().requires_grad_() for tensor in (embeddings, features)]
            dist.barrier()
            started = time.perf_counter()
            out = way(*inputs, local_mask, state)
            (out * weights).sum().backward()
            dist.barrier()
            seconds.append(time.perf_counter() - started)
        results = (out.detach(), inputs[0].grad, inputs[1].grad)
        expected = expected or results
        for actual, reference in zip(results, expected, strict=True):
            torch.testing.assert_close(actual, reference, rtol=0, atol=0)
        row = {"ranks": n, "tokens": tokens, "hidden": hidden, "features": count, "way": name}
        rows.append(row | {"ms": round(1e3 * min(seconds), 1), "received_MB": round(2 * bytes_of[name] / 1e6, 1)})
    return rows


def main(arguments: list[str]) -> None:
    """Prints the rows and appends them to the results."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--share", type=float, default=0.5)
    options = parser.parse_args(arguments)
    pool = RankPool(options.ranks)
    rows = pool.run(measure, options.tokens, options.hidden, options.share)[0]
    pool.close()
    is_new = not RESULTS.is_file()
    with RESULTS.open("a", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        if is_new:
            writer.writeheader()
        writer.writerows(rows)
    for row in rows:
        print(" ".join(f"{key} {value}" for key, value in row.items()))


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    import bench_fill_back

    bench_fill_back.main(sys.argv[1:])
