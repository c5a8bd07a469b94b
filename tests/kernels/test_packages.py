"""A package that is installed but broken is passed over by `auto`, refused where it is named, and told of with its reason."""

from __future__ import annotations

import pytest
import torch

from patchgen.kernels import packages
from patchgen.kernels.elementwise import formulas, norm_quack
from patchgen.kernels.loss import causal_lm_loss, linear_cross_entropy
from patchgen.kernels.moe import auto as moe_auto
from patchgen.runtime import seams
from patchgen.runtime.parallel import report
from patchgen.runtime.train import model as models
from patchgen.runtime.train.recipe import KernelsConfig, RecipeError

BROKEN = "raise OSError('libcute.so: undefined symbol')"


@pytest.fixture
def broken(tmp_path, monkeypatch):
    """On a machine with a GPU, so far as anyone asks: `quack` and `sonicmoe` are found, and fail when they are imported."""
    for name in ("quack", "sonicmoe"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(BROKEN)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    packages.failed_import.cache_clear()
    yield
    packages.failed_import.cache_clear()


class OnGPU(torch.Tensor):
    """Its values are on the CPU."""

    is_cuda = True


def test_a_broken_package_is_passed_over_and_the_report_says_why(broken):
    with seams.using(rms_norm="auto"):
        hidden = torch.randn(2, 8).as_subclass(OnGPU)
        chosen = norm_quack.norm_for(hidden)
        assert chosen is formulas.rms_norm_compiled
        reasons = seams.passed_over("rms_norm")
        assert "OSError: libcute.so: undefined symbol" in reasons["quack"]
        assert "auto; without quack: it needs the package quack-kernels" in report._implementation("rms_norm", None)


@pytest.mark.parametrize(("seam", "name"), [("rms_norm", "quack"), ("fused_moe", "sonic")])
def test_a_broken_package_that_is_named_is_refused_before_anything_runs(broken, seam, name):
    with pytest.raises(RecipeError, match=rf"kernels.{seam} = '{name}' cannot run here: .*undefined symbol"):
        models.require_kernels(KernelsConfig(**{seam: name}))
    with seams.using(**{seam: name}), pytest.raises(ValueError, match="cannot run here: .*undefined symbol"):
        report.require_seams({seam: {"Module": 1}}, {seam: name})


def test_without_triton_nothing_of_auto_needs_it(monkeypatch):
    """A GPU, and a Triton that does not import: experts by torch, the loss in chunks, formulas as they are written."""
    reason = "ImportError: libtriton.so"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    for module in (packages, moe_auto, linear_cross_entropy):
        monkeypatch.setattr(module, "failed_import", {"triton": reason}.get)
    hidden = torch.randn(2, 4, 8).as_subclass(OnGPU)
    assert moe_auto.choose_backend(hidden, hidden, hidden, None) == "torch"
    assert reason in linear_cross_entropy.unsupported(torch.nn.Linear(8, 16), hidden)
    assert packages.compiled(formulas.rms_norm) is formulas.rms_norm
    logits, labels = torch.randn(1, 4, 8), torch.tensor([[1, 2, -100, 3]])
    expected = causal_lm_loss.losses_of_rows(logits, labels)
    monkeypatch.setattr(torch, "compile", None)
    causal_lm_loss._compiled.cache_clear()
    found = causal_lm_loss.losses_of_rows(logits.as_subclass(OnGPU), labels)
    assert torch.equal(found.as_subclass(torch.Tensor), expected)
