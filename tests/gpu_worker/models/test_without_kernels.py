"""A machine without the CPU kernels: torch computes what it can, and the rest is refused before a step."""

import pytest
import torch

from gpu_worker.measure.logits import model_logits
from gpu_worker.models.errors import LoadError
from gpu_worker.models.registry import load
from mesh.models import ModelFolder


def test_without_kernels_torch_computes_and_says_so(no_compiler, caplog, saved):
    folder, cpu = ModelFolder("m", saved()), torch.device("cpu")
    model = load(folder, cpu, "auto", _silent)
    assert model.precision == "fp32"
    assert "several times slower" in caplog.text
    assert model_logits(model, [1, 2, 3], cpu).shape[0] == 3


@pytest.mark.parametrize(("precision", "kernels"), [("int8", "auto"), ("int8", "torch"), ("fp32", "native")])
def test_what_only_kernels_can_do_is_refused_without_them(no_compiler, saved, precision, kernels):
    with pytest.raises(LoadError, match="needs the CPU kernels"):
        load(ModelFolder("m", saved()), torch.device("cpu"), precision, _silent, kernels)


def _silent(fraction: float, what: str) -> None:
    """No progress."""
