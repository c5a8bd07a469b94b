"""Where the main thread of each process is, sampled: started in any Python process by its environment, read as a timeline.

    environment = stack_samples.environment(folder)          # for a command and all that it starts
    print("\\n".join(stack_samples.timeline(folder)))         # a line for each stretch of time in one function

A process writes `PID.json` as it goes, so nothing is lost when it is killed. Nothing is installed: Python imports
`sitecustomize` from a folder on its path, which imports this file.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from pathlib import Path

FOLDER = "STACK_SAMPLES"  # environment variable
INTERVAL, WRITE_EVERY = 0.02, 1.0  # seconds
OWN = ("patchgen", "benchmarks")


def environment(folder: Path) -> dict[str, str]:
    """The environment of this process, with what lets a command and its children sample themselves into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    site = (
        f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); import stack_samples; stack_samples.start()"
    )
    (folder / "sitecustomize.py").write_text(site + "; sys.path.pop(0)\n")
    path = os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH"))))
    return os.environ | {FOLDER: str(folder), "PYTHONPATH": path}


def start() -> None:
    """Samples the main thread of this process in the background."""
    main = threading.main_thread().ident
    threading.Thread(target=_sample, args=(main, Path(os.environ[FOLDER])), daemon=True).start()


def _sample(main: int | None, folder: Path) -> None:
    samples: list[tuple[float, str, str]] = []
    written = time.time()
    while True:
        time.sleep(INTERVAL)
        frame = sys._current_frames().get(main) if main is not None else None
        if frame is None:
            continue
        own, innermost = "", _name(frame)
        while frame is not None:
            if any(f"{os.sep}{part}{os.sep}" in frame.f_code.co_filename for part in OWN):
                own = own or _name(frame)
            frame = frame.f_back
        now = time.time()
        if samples and samples[-1][1:] == (own, innermost):
            pass  # the stretch goes on
        else:
            samples.append((now, own, innermost))
        if now - written > WRITE_EVERY:
            path = folder / f"{os.getpid()}.json"
            path.with_suffix(".new").write_text(json.dumps({"argv": sys.argv[:4], "end": now, "samples": samples}))
            path.with_suffix(".new").replace(path)
            written = now


def _name(frame) -> str:
    return f"{Path(frame.f_code.co_filename).stem}.{frame.f_code.co_name}"


def timeline(folder: Path, shortest: float = 0.25) -> list[str]:
    """For each process its stretches in one function of ours, with the innermost functions in which it was longest."""
    lines = []
    for path in sorted(folder.glob("*.json")):
        found = json.loads(path.read_text())
        samples, end = found["samples"], found["end"]
        if not samples:
            continue
        lines.append(f"{path.stem} {' '.join(str(part)[:60] for part in found['argv'])}")
        ends = [start for start, *_ in samples[1:]] + [end]
        stretches: list[tuple[float, str, dict[str, float]]] = []
        for (begin, own, innermost), until in zip(samples, ends, strict=True):
            if not stretches or stretches[-1][1] != own:
                stretches.append((begin, own, {}))
            inner = stretches[-1][2]
            inner[innermost] = inner.get(innermost, 0.0) + until - begin
        for begin, own, inner in stretches:
            length = sum(inner.values())
            if length >= shortest:
                most = sorted(inner.items(), key=lambda item: -item[1])[:4]
                shown = ", ".join(f"{name} {seconds:.2f}" for name, seconds in most)
                lines.append(f"  {begin - samples[0][0]:7.2f} +{length:6.2f} {own or 'libraries'}   ({shown})")
    return lines
