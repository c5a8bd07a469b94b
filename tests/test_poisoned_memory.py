"""`make test-poisoned`: whoever reads memory that nobody has written is seen, wherever it happens."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

POISONED = Path(__file__).parent / "poisoned"
PLANTED = '''
import json, subprocess, sys, threading

def forgets_one() -> list[bool]:
    """What is forgotten of a buffer, of tensors that grow, and of an index."""
    import torch

    torch.use_deterministic_algorithms(False)  # what a recipe says; it must not end the poisoning
    sums, grown, index = torch.empty(64, dtype=torch.bfloat16), torch.zeros(1).resize_(64), torch.empty(4, dtype=torch.long)
    gathered = torch.zeros(64)
    gathered.untyped_storage().resize_(0)
    gathered.untyped_storage().resize_(64 * 4)
    sums[1:] = 1
    index[1:] = 0
    seen = [bool((one * 0).sum().isnan()) for one in (sums, grown, gathered)]
    try:
        torch.zeros(8)[index]
    except IndexError:
        seen.append(True)
    return seen

if __name__ == "__main__":
    from patchgen.runtime.verify.ranks import RankPool

    pool = RankPool(1)
    found = {"a rank": pool.run(forgets_one)[0], "this process": forgets_one()}
    pool.close()
    thread = threading.Thread(target=lambda: found.update({"a thread": forgets_one()}))
    thread.start()
    thread.join()
    child = [sys.executable, "-c", "import planted, json; print(json.dumps(planted.forgets_one()))"]
    found["a child"] = json.loads(subprocess.run(child, capture_output=True, text=True, check=True).stdout)
    without = [sys.executable, "-c", "import sys, json; print('torch' in sys.modules)"]
    assert subprocess.run(without, capture_output=True, text=True, check=True).stdout.split() == ["False"]
    print(json.dumps(found))
'''


@pytest.mark.slow
def test_a_planted_reader_is_caught_in_every_process(tmp_path: Path):
    (tmp_path / "planted.py").write_text(PLANTED)
    root = str(Path(__file__).parents[1])
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(POISONED), root, str(tmp_path)))}
    run = [sys.executable, "-m", "planted"]
    done = subprocess.run(run, capture_output=True, text=True, env=environment, timeout=240)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found == {place: [True] * 4 for place in ("a rank", "this process", "a thread", "a child")}
