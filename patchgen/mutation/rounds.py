"""Many mutants of many models, in separate processes: a row per mutant, appended to a file when it is judged.

An interrupted round resumes: a row identifies its mutant by a hash of its texts. Mutants that were wrong are judged again
after the code has changed.
"""

from __future__ import annotations

import ast
import contextlib
import json
import multiprocessing
import os
import resource
import signal
from collections.abc import Collection, Container, Generator, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import Empty
from typing import TYPE_CHECKING, Any

from patchgen import upstream
from patchgen.anatomy.classes import is_list
from patchgen.mutation.configuration import Configuration
from patchgen.mutation.draw import draw
from patchgen.mutation.edits import Mutant
from patchgen.runtime.parent_process import end_with_parent
from patchgen.runtime.verify import source_closure, source_keys

if TYPE_CHECKING:
    from queue import Queue

    from patchgen.runtime.verify.mutants import Verdict
    from patchgen.runtime.verify.mutants_on_ranks import Subject
    from patchgen.runtime.verify.ranks import RankPool

Row = dict[str, Any]  # what the file of rows records of one mutant
REFUSED, TOLD, EQUAL, WRONG, NOT_RUN = "refused", "told", "equal", "wrong", "not run"
# A process keeps all modules that it imported, so it is replaced after this many mutants that ran.
MUTANTS_PER_PROCESS = 100
MUTANTS_PER_POOL = 60  # the two ranks that compare mutants are replaced after as many
MEMORY_LIMIT = 8 << 30  # bytes of address space; a small model's process takes 4 GiB
# Per mutant. A changed loop may never end, in upstream's step too: the mutant then counts as not run.
CPU_SECONDS = 60.0
RANK_SAMPLE_INTERVAL = 20  # one in this many equal mutants is compared on two ranks
PRELOADED_MODULES = ["patchgen.runtime.verify.mutants", "transformers.modeling_utils"]
JUDGE_MODULES = (
    "patchgen.runtime.verify.mutants",
    "patchgen.runtime.verify.mutants_on_ranks",
    "patchgen.mutation.draw",
)


def code_hash() -> str:
    """A hash of the code that decides verdicts: the generator's and the judges'."""
    judges = source_closure.closure(JUDGE_MODULES, (*source_closure.RUNTIME, "patchgen.mutation")).values()
    return f"{source_keys.generator_hash()}-{source_closure.hash_of(judges)}"


def run(
    models: Iterable[str], count: int, seed: int, jobs: int, *, ranks: bool, records: Path | None
) -> Iterator[Row]:
    """The rows of `records` as `read` gives them, then those of further mutants until `count` of each model have run.

    Args:
        jobs: processes; two more with `ranks`.
        ranks: also compare one in `RANK_SAMPLE_INTERVAL` of the equal mutants on two ranks.
        records: a file of rows, a line each, to read and to append to.

    Raises:
        ExceptionGroup: at the end, if mutants of some models could not be tried.
        BrokenProcessPool: a process was killed.
    """
    key = code_hash()
    known = read(records, key)
    yield from known
    progress = {model: _Progress.of(row for row in known if row["model"] == model) for model in models}
    waiting = [model for model in progress if progress[model].num_run < count]
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED_MODULES)
    os.environ |= {"TRANSFORMERS_VERBOSITY": "error", "OMP_NUM_THREADS": "1"}
    with contextlib.ExitStack() as stack:
        judge = stack.enter_context(_RankJudge()) if ranks else None
        queue = stack.enter_context(context.Manager()).Queue()
        pool = stack.enter_context(
            ProcessPoolExecutor(jobs, context, initializer=set_up_worker, max_tasks_per_child=1)
        )
        running, failed = dict[str, Future[bool]](), list[Exception]()
        while waiting or running:
            while waiting and len(running) < jobs:
                model = waiting.pop(0)
                size = min(MUTANTS_PER_PROCESS, count - progress[model].num_run)
                running[model] = pool.submit(
                    _run_batch, model, seed, size, frozenset(progress[model].known), ranks, queue
                )
            message = _next_message(queue, running.values())
            if isinstance(message, str):
                finished = running.pop(message)
                if isinstance(error := finished.exception(), Exception):
                    failed.append(error)  # of one model: the others continue
                elif not finished.result() and progress[message].num_run < count:
                    waiting.append(message)
                continue
            row: Row = {**message, "code": key}
            subject = row.pop("subject", None)
            if judge is not None and subject is not None:
                row |= judge.verdict(subject)
            progress[row["model"]].add(row)
            if records is not None:
                with records.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(row) + "\n")
            yield row
    if failed:
        raise ExceptionGroup("Mutants of some models could not be tried.", failed)


def set_up_worker() -> None:
    """Limits the memory of a worker process, and has it end with the process that started it."""
    limit_memory()
    end_with_parent()


def limit_memory(size: int = MEMORY_LIMIT) -> None:
    """Limits this process to `size` bytes of address space: a changed size may take all memory, and end every process."""
    resource.setrlimit(resource.RLIMIT_AS, (size, resource.getrlimit(resource.RLIMIT_AS)[1]))


def _next_message(queue: Queue[Row | str], running: Collection[Future[bool]], seconds: float = 10.0) -> Row | str:
    """The next row, or the name of a model whose process is done.

    Raises:
        BrokenProcessPool: a process was killed, and will put no message.
    """
    while True:
        try:
            return queue.get(timeout=seconds)
        except Empty:
            for future in running:
                if future.done():
                    future.result()


@dataclass
class _Progress:
    """The hashes of the mutants of one model that have a verdict, and how many of these ran."""

    known: set[str]
    num_run: int = 0

    @classmethod
    def of(cls, rows: Iterable[Row]) -> _Progress:
        progress = cls(set())
        for row in rows:
            progress.add(row)
        return progress

    def add(self, row: Row) -> None:
        self.known.add(row["mutant"])
        self.num_run += row["verdict"] != NOT_RUN


def read(records: Path | None, key: str) -> list[Row]:
    """The last row of each mutant in a file, without wrong ones that were judged by other code than `key`."""
    if records is None or not records.is_file():
        return []
    rows = map(json.loads, records.read_text(encoding="utf-8").splitlines())
    last = {(row["model"], row["mutant"]): row for row in rows}
    return [row for row in last.values() if row["verdict"] != WRONG or row["code"] == key]


def _run_batch(model: str, seed: int, count: int, known: frozenset[str], ranks: bool, queue: Queue[Row | str]) -> bool:
    """Puts the rows of mutants into a queue until `count` of them have run, then the model; whether the mutants ran out."""
    num_run = 0
    try:
        for row in try_mutants(model, seed, count, known=known, ranks=ranks):
            num_run += row["verdict"] != NOT_RUN
            queue.put(row)
    finally:
        queue.put(model)
    return num_run < count


def try_mutants(
    model: str, seed: int, count: int, *, known: Container[str] = (), ranks: bool = False, observes: bool = True
) -> Iterator[Row]:
    """The rows of random mutants of a model, until `count` of them have run.

    Args:
        known: hashes of mutants to skip.
        ranks: add to the rows of some equal mutants the `subject` that `mutants_on_ranks` compares.
        observes: whether a fact of an equal mutant's steps tells it.
    """
    import gc
    import warnings

    import torch

    from patchgen.runtime.verify.mutants import Judge
    from patchgen.runtime.verify.mutants_on_ranks import Subject

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    origin = upstream.load(model)
    judge = Judge(origin, observes=observes)
    lines = judge.executed()
    gc.freeze()
    num_run = num_equal = 0

    def executed(first: int, last: int) -> bool:
        return any(first <= n <= last for n in lines)

    for mutant in draw(origin.text, seed, executed, Configuration.of(origin)):
        if num_run >= count:
            return
        if mutant.digest in known:
            continue
        with _cpu_time_limit(CPU_SECONDS), _cached_walk():
            verdict = judge.verdict(mutant)
        num_run += verdict.kind != NOT_RUN
        num_equal += verdict.kind == EQUAL
        row = _row(model, seed, mutant) | {"verdict": verdict.kind, "by": verdict.by, "detail": verdict.detail}
        row |= comparisons(verdict)
        if ranks and verdict.kind == EQUAL and num_equal % RANK_SAMPLE_INTERVAL == 1:
            row["subject"] = Subject(origin.module, judge.head, mutant.text, mutant.modules, dict(verdict.files))
        yield row


@contextlib.contextmanager
def _cpu_time_limit(seconds: float) -> Generator[None, None, None]:
    """Raises TimeoutError in the block after that much CPU time: wall time would depend on the machine's load."""

    def stop(number: int, frame: object) -> None:
        raise TimeoutError(f"still running after {seconds:.0f} s of CPU time")

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


@contextlib.contextmanager
def _cached_walk() -> Generator[None, None, None]:
    """Replaces `ast.walk` by one that caches the nodes below each class and function, in the same order: passes walk the
    same ones again and again, which is half of the generator's time. A pass that changes code parses a new tree."""
    nodes_below: dict[int, list[ast.AST]] = {}  # the lists keep their roots alive, so no id is used again

    def walk(node: ast.AST) -> Iterator[ast.AST]:
        if not isinstance(node, (ast.ClassDef, ast.FunctionDef)):
            return iter(_below(node))
        if id(node) not in nodes_below:
            nodes_below[id(node)] = _below(node)
        return iter(nodes_below[id(node)])

    before, ast.walk = ast.walk, walk
    try:
        yield
    finally:
        ast.walk = before


def _below(node: ast.AST) -> list[ast.AST]:
    """The nodes of a tree, breadth first."""
    nodes = [node]
    for parent in nodes:  # the list grows while it is read
        for name in parent._fields:
            value = getattr(parent, name, None)
            if is_list(value):
                nodes += [item for item in value if isinstance(item, ast.AST)]
            elif isinstance(value, ast.AST):
                nodes.append(value)
    return nodes


def comparisons(verdict: Verdict, prefix: str = "") -> Row:
    """What an equal mutant was compared in, and what was left out and why, as fields of its row."""
    found = {f"{prefix}compared": list(verdict.compared), f"{prefix}left_out": dict(verdict.left_out)}
    return {name: value for name, value in found.items() if value}


def _row(model: str, seed: int, mutant: Mutant) -> Row:
    return {
        "model": model,
        "seed": seed,
        "mutant": mutant.digest,
        "operator": mutant.operator,
        "keeps_meaning": mutant.keeps_meaning,
        "where": mutant.where,
        "change": mutant.change[:400],
    }


class _RankJudge:
    """Two ranks, restarted after `MUTANTS_PER_POOL` mutants: they keep all modules that they imported."""

    def __init__(self) -> None:
        self._pool: RankPool | None = None
        self._num_judged = 0

    def verdict(self, subject: Subject) -> Row:
        """The fields to add to the row of a mutant that is equal in one process."""
        from patchgen.runtime.verify import mutants_on_ranks
        from patchgen.runtime.verify.ranks import RankPool
        from patchgen.runtime.verify.told import TWO_RANKS

        if self._pool is None or self._num_judged % MUTANTS_PER_POOL == 0:
            self.close()
            self._pool = RankPool(2)
        self._num_judged += 1
        verdict_on_ranks = mutants_on_ranks.verdict(self._pool, subject)
        if verdict_on_ranks.kind == WRONG:  # the proof on two ranks makes the same comparison
            return {"verdict": TOLD, "by": TWO_RANKS, "detail": verdict_on_ranks.detail, "ranks": TOLD}
        return {
            "ranks": verdict_on_ranks.kind,
            "ranks_by": verdict_on_ranks.by,
            "ranks_detail": verdict_on_ranks.detail,
            **comparisons(verdict_on_ranks, "ranks_"),
        }

    def __enter__(self) -> _RankJudge:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        if self._pool is not None:
            self._pool.close()
