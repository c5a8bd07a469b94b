"""How much code `generate` imports: it may shrink."""

from __future__ import annotations

from patchgen.runtime.verify.source_closure import closure

LIMIT = 12_104
"""Lines; lower it with the code. What a generated file computes is the proof's to judge, not another reader's. 11,500 without
what takes the parents of a fork into its file (`inherited.py`) and says which head is missing; 50 of the
last have decoders that count positions themselves look them up by slice and by document (`language_sp.py`), and 15 have counts
along tokens go on from one slice to the next (`fill_back.py`); 59 mend a statement that fails in upstream, where a release has it
(`hand_edits.py`), and start what observes a proof."""
OTHERS = ("patchgen.runtime", "patchgen.commands", "patchgen.kernels", "patchgen.executed_code")


def test_generate_imports_no_more_lines_than_it_did():
    files = {
        name: path
        for name, path in closure(("patchgen.commands.generation",), ("patchgen",)).items()
        if not name.startswith(OTHERS)
    }
    lines = {name: len(path.read_text(encoding="utf-8").splitlines()) for name, path in files.items()}
    assert lines["patchgen.pipeline"] and sum(lines.values()) <= LIMIT, sorted(lines, key=lines.__getitem__)[-10:]
