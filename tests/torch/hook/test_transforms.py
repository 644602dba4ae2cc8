"""What torch does with a whole model gives the same for a watched one, raises nothing through us, and the watch goes on."""

from __future__ import annotations

import copy
import io
import math
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from notebook import Gain, watched


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 2, 3, padding=1)
        self.bn = nn.BatchNorm2d(2)
        self.relu = nn.ReLU()
        self.fc = nn.Linear(32, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.relu(self.bn(self.conv(x))).flatten(1))  # type: ignore[no-any-return]


X = torch.linspace(-1, 1, 80).reshape(5, 1, 4, 4)


def prepare_qat(model: Any) -> object:
    import torch.ao.quantization as quantization

    model.train().qconfig = quantization.get_default_qat_qconfig("fbgemm")
    quantization.prepare_qat(model, inplace=True)
    return model(X)


def fuse_qat(model: Any) -> object:
    import torch.ao.quantization as quantization

    quantization.fuse_modules_qat(model.train(), [["conv", "bn", "relu"]], inplace=True)
    return model(X)


def fuse(model: Any) -> object:
    import torch.ao.quantization as quantization

    quantization.fuse_modules(model.eval(), [["conv", "bn", "relu"]], inplace=True)
    return model(X)


def prepare_qat_fx(model: Any) -> object:
    from torch.ao.quantization import get_default_qat_qconfig_mapping, quantize_fx

    return quantize_fx.prepare_qat_fx(model.train(), get_default_qat_qconfig_mapping("fbgemm"), (X,))(X)


def script(model: Any) -> object:
    return str(torch.jit.script(model).code)


def script_of_a_copy(model: Any) -> object:
    return str(torch.jit.script(copy.deepcopy(model)).code)


def script_of_a_part(model: Any) -> object:
    model.fc = torch.jit.script(model.fc)
    return model(X)


def trace(model: Any) -> object:
    return str(torch.jit.trace(model.eval(), X).code)


def symbolic_trace(model: Any) -> object:
    return str(torch.fx.symbolic_trace(model).code)


def export_strict(model: Any) -> object:
    return str(torch.export.export(model.eval(), (X,), strict=True).graph)


def export(model: Any) -> object:
    return str(torch.export.export(model.eval(), (X,), strict=False).graph)


def saved(model: Any) -> object:
    stream = io.BytesIO()
    torch.save(model, stream)
    stream.seek(0)
    return torch.load(stream, weights_only=False)(X)


def pickled(model: Any) -> object:
    return pickle.loads(pickle.dumps(model))(X)


def functional_gradient(model: Any) -> object:
    parameters = {name: value.detach() for name, value in model.named_parameters()}

    def loss(values: dict[str, Tensor]) -> Tensor:
        return torch.func.functional_call(model.eval(), values, (X,)).sum()  # type: ignore[no-any-return]

    return torch.func.grad(loss)(parameters)["fc.bias"]


def fused_and_normed(model: Any) -> object:
    model.conv, model.bn = torch.nn.utils.fusion.fuse_conv_bn_eval(model.eval().conv, model.bn), nn.Identity()
    torch.nn.utils.parametrizations.weight_norm(model.fc)
    return model(X)


def moved(model: Any) -> object:
    state = {name: value.clone() for name, value in model.state_dict().items()}
    model.to("meta").to_empty(device="cpu").load_state_dict(state, assign=True)
    model.share_memory().apply(lambda module: None)
    return model(X)


QUICK = [pickled, fused_and_normed]  # the others import torch.ao, torch.jit, torch.func or torch.export
SLOW = [
    *(prepare_qat, fuse, fuse_qat, prepare_qat_fx),
    *(script, script_of_a_copy, script_of_a_part, trace, symbolic_trace, export, export_strict),
    *(saved, functional_gradient, moved),
]


@pytest.mark.parametrize("transform", [*QUICK, *(pytest.param(one, marks=pytest.mark.slow) for one in SLOW)])
def test_a_watched_model_gives_what_an_unwatched_one_gives(transform: Callable[[Any], object]) -> None:
    torch.manual_seed(0)
    bare = Net()
    model = copy.deepcopy(bare)
    detector, _ = watched(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected, found = transform(bare), transform(model)
        assert torch.equal(found, expected) if isinstance(found, Tensor) else found == expected  # type: ignore[arg-type]
        model.train()(X).sum().backward()
        before = detector.position.batch
        model(X).sum().backward()
    assert (detector.position.batch, detector.fault) == (before + 1, "")


@pytest.mark.slow
def test_a_model_that_is_quantized_in_place_is_still_watched() -> None:
    import torch.ao.quantization as quantization

    model = nn.Sequential(nn.Linear(4, 4), Gain(), nn.Linear(4, 2)).eval()
    detector, notebook = watched(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        quantization.quantize_dynamic(model, {nn.Linear}, inplace=True)
    with torch.no_grad():
        model(torch.ones(3, 4))
        model[1].gain = math.nan  # type: ignore[assignment]
        trip = notebook.trip_of(model, torch.ones(3, 4))
    assert (trip.frame.spec.module, detector.fault) == ("1", "")
