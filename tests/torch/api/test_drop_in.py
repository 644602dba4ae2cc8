"""Bugs of the Hugging Face detector that rankwatch's does not have; each test first shows that theirs has it.

What theirs leaves out of its frames (keyword inputs, containers, buffers) is in ``test_parity.py``.
"""

from __future__ import annotations

import copy
import gc
import io
import pickle
import re
import weakref
from collections import OrderedDict
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hf_oracle import Outcome, run
from models import Calls
from rankwatch import DebugUnderflowOverflow, OverflowDetected, watch
from rankwatch.hook.detector import Detector

REASON = "the oracle is the detector of transformers"
transformers = pytest.importorskip("transformers", reason=REASON)
HuggingFaceDetector = pytest.importorskip("transformers.debug_utils", reason=REASON).DebugUnderflowOverflow

pytestmark = pytest.mark.oracle

NAN = float("nan")
INF = float("inf")
X = torch.tensor([[0.5, -2.0], [0.25, 4.0]])


class Around(nn.Module):
    """``inner`` is called by ``use``; what the root is given and returns is finite whatever happens inside."""

    def __init__(self, inner: nn.Module, use: Callable[[nn.Module, Tensor], object]) -> None:
        super().__init__()
        self.inner = inner
        self.use = use

    def forward(self, x: Tensor) -> Tensor:
        self.use(self.inner, x)
        return x


def linears() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))


def theirs(model: nn.Module, use: Callable[[Any], object] = lambda model: model(X), **options: Any) -> Outcome:
    return run(HuggingFaceDetector, model, use, **options)


def ours(model: nn.Module, use: Callable[[Any], object] = lambda model: model(X), **options: Any) -> Outcome:
    return run(DebugUnderflowOverflow, model, use, **options)


def frames_in_dump(outcome: Outcome) -> int:
    """The number of frames that a detection shows; it must equal the number in the header."""
    dump = outcome.text[outcome.text.index("\nDetected inf/nan") :]
    found = re.search(r"^Last (\d+) forward frames:$", dump, re.MULTILINE)
    assert found
    assert len(re.findall(r"^ {18}\S* \w+$", dump, re.MULTILINE)) == int(found[1])
    return int(found[1])


# --- tensors that theirs crashes on -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "line"),
    [
        (torch.tensor([True, False]), "0.00e+00 1.00e+00"),
        (torch.empty(0, 3), "            empty"),
        (torch.tensor([0.5, 2.0]).to(torch.float8_e5m2), "5.00e-01 2.00e+00"),
    ],
    ids=["bool", "empty", "float8"],
)
def test_tensors_of_every_kind_are_measured(value: Tensor, line: str) -> None:
    with pytest.raises(RuntimeError):  # NotImplementedError is one
        theirs(Around(nn.Identity(), lambda inner, x: inner(value)))

    outcome = ours(Around(nn.Identity(), lambda inner, x: inner(value)), trace_batch_nums=[0])
    assert outcome.error is None
    assert f"inner Identity\n{line} input[0]\n{line} output\n" in outcome.text


def test_gpt2_with_a_padding_mask_can_be_watched() -> None:
    """It passes a boolean mask from block to block, by position."""
    config = transformers.GPT2Config(
        vocab_size=8, n_positions=4, n_embd=8, n_layer=1, n_head=1, bos_token_id=0, eos_token_id=0
    )
    model = transformers.GPT2LMHeadModel(config)
    tokens = torch.tensor([[1, 2, 3], [1, 2, 0]])

    def use(model: Any) -> None:
        model(input_ids=tokens, attention_mask=tokens.ne(0))

    with pytest.raises(NotImplementedError):
        theirs(copy.deepcopy(model), use)

    outcome = ours(model, use, trace_batch_nums=[0])

    assert outcome.error is None
    assert "0.00e+00 1.00e+00 input[2]" in outcome.text


# --- values that theirs does not see -------------------------------------------------------------------------------


def assert_only_ours_sees(build: Callable[[], nn.Module], label: str, what: str = "nan") -> None:
    unseen = theirs(build())
    assert unseen.error is None
    assert unseen.text == ""

    outcome = ours(build())
    assert isinstance(outcome.error, OverflowDetected)
    assert str(outcome.error).endswith(f"inner ({type(build().inner).__name__}), {label}: {what}")
    assert outcome.text.startswith(f"{label} has {what}s\n\nDetected inf/nan during batch_number=0\n")
    figures = f"{what:>8} {what:>8}"
    assert f"\n{figures} {label}\n" in outcome.text


def test_buffer_that_is_a_mask_is_healthy() -> None:
    inner = nn.Identity()
    inner.register_buffer("mask", torch.tensor([0.0, -INF]))

    assert ours(Around(inner, lambda inner, x: inner(x))).error is None


@pytest.mark.parametrize("value", [NAN, INF, -INF], ids=str)
def test_python_floats_are_seen(value: float) -> None:
    what = "nan" if value != value else "inf"

    assert_only_ours_sees(lambda: Around(Calls(lambda x, scale: x), lambda inner, x: inner(x, value)), "input[1]", what)
    assert_only_ours_sees(lambda: Around(Calls(lambda x: value), lambda inner, x: inner(x)), "output", what)


# --- batches ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch", [0, 2])
def test_batch_of_a_detection_at_the_root_is_right(batch: int) -> None:
    def use(model: nn.Module) -> None:
        for number in range(batch + 1):
            model(X / (number != batch))

    assert f"Detected inf/nan during batch_number={batch + 1}\n" in theirs(nn.Identity(), use).text

    outcome = ours(nn.Identity(), use)
    assert f"Detected inf/nan during batch_number={batch}\n" in outcome.text
    assert f"batch {batch}: (root)" in str(outcome.error)


@pytest.mark.parametrize("traced", [[0], [0, 2], [5]])
def test_ring_is_bounded_after_a_traced_batch(traced: list[int]) -> None:
    def use(model: nn.Module) -> None:
        for _ in range(8):
            model(X)
        model(X * NAN)

    assert frames_in_dump(theirs(linears(), use, max_frames_to_save=2, trace_batch_nums=traced)) > 2

    assert frames_in_dump(ours(linears(), use, max_frames_to_save=2, trace_batch_nums=traced)) == 2


def test_nan_in_a_traced_batch_does_not_abort_the_next() -> None:
    def use(model: nn.Module) -> None:
        model(X * NAN)
        model(X)
        model(X)

    wrong = theirs(linears(), use, trace_batch_nums=[0])
    assert wrong.error is not None
    assert "Detected inf/nan during batch_number=1\n" in wrong.text

    outcome = ours(linears(), use, trace_batch_nums=[0])
    assert outcome.error is None
    assert "     nan      nan output" in outcome.text
    assert "Detected" not in outcome.text


def test_nan_after_a_traced_batch_with_nan_is_detected() -> None:
    def use(model: nn.Module) -> None:
        model(X * NAN)
        model(X)
        model(X * NAN)

    outcome = ours(linears(), use, trace_batch_nums=[0])

    assert isinstance(outcome.error, OverflowDetected)
    assert "Detected inf/nan during batch_number=2\n" in outcome.text


def test_training_can_go_on_after_a_detection() -> None:
    errors: list[int] = []

    def use(model: nn.Module) -> None:
        for number in range(6):
            try:
                model(X * (NAN if number in (1, 4) else 1))
            except ValueError:
                errors.append(number)

    theirs(linears(), use)
    assert errors == [1, 2, 3, 4, 5]

    errors.clear()
    outcome = ours(linears(), use)
    assert errors == [1, 4]
    assert re.findall(r"batch_number=(\d)", outcome.text) == ["1"]
    assert outcome.text.count("rankwatch: tripped again: rank 0 of 1 (") == 1


# --- the end of a watch, and models that change or are copied ---------------------------------------------------------


def state(model: nn.Module) -> list[dict[str, Any]]:
    """Everything that a module holds, its hooks included, and the hooks of all modules and optimizers."""
    everywhere = [
        {name: dict(value) for name, value in vars(module).items() if "_hooks" in name and isinstance(value, dict)}
        for module in map(import_module, ("torch.nn.modules.module", "torch.optim.optimizer"))
    ]
    modules = [
        {name: dict(value) if isinstance(value, dict) else value for name, value in vars(module).items()}
        for module in model.modules()
    ]
    return everywhere + modules


def test_close_restores_the_model() -> None:
    model = linears()
    before = state(model)
    HuggingFaceDetector(model)
    assert not hasattr(HuggingFaceDetector, "close")
    assert state(model) != before  # for good

    model = linears()
    before = state(model)
    detector = DebugUnderflowOverflow(model)
    assert state(model) != before
    detector.close()
    detector.close()
    assert state(model) == before
    model(X * NAN)


def end_by_an_error(model: nn.Module) -> None:
    raise ZeroDivisionError


@pytest.mark.parametrize(
    ("last", "ends"),
    [
        pytest.param(lambda model: model(X), nullcontext(), id="finite"),
        pytest.param(lambda model: model(X * NAN), pytest.raises(OverflowDetected), id="nan"),
        pytest.param(end_by_an_error, pytest.raises(ZeroDivisionError), id="an error of the user"),
    ],
)
def test_context_manager_restores_the_model(last: Callable[[Any], None], ends: AbstractContextManager[object]) -> None:
    model = linears()
    before = state(model)

    with ends, DebugUnderflowOverflow(model):
        model(X)
        last(model)

    assert state(model) == before
    with DebugUnderflowOverflow(model):  # it can be watched again
        model(X)
    assert state(model) == before


def test_model_that_nobody_holds_is_freed() -> None:
    """Code written for theirs closes nothing: it drops the model and the detector."""
    for detector in (HuggingFaceDetector, DebugUnderflowOverflow):
        model = linears()
        detector(model)
        alive = weakref.ref(model)
        del model
        gc.collect()
        leaked = alive()
        for watching in [found for found in gc.get_objects() if type(found) is DebugUnderflowOverflow]:
            watching.close()
        assert leaked is None, detector


def test_modules_added_later_are_watched() -> None:
    def use(model: Any) -> None:
        model(X)
        model.append(nn.Sequential(nn.Linear(2, 2)))
        model[0] = nn.Tanh()
        model(X)

    unseen = theirs(linears(), use, trace_batch_nums=[1]).text
    assert "2.0 Linear" not in unseen
    assert "0 Tanh" not in unseen

    model = linears()
    before = len(state(model))
    headers = re.findall(r"^ {18}(\S* \w+)$", ours(model, use, trace_batch_nums=[1]).text, re.MULTILINE)
    assert headers == ["0 Tanh", "1 Linear", "2.0 Linear", "2 Sequential", " Sequential"]
    assert len(state(model)) == before + 2
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def shared() -> nn.Module:
    linear = nn.Linear(2, 2)
    return nn.Sequential(OrderedDict(encoder=linear, decoder=linear))


def test_report_names_a_shared_module_by_all_its_names(capsys: pytest.CaptureFixture[str]) -> None:
    assert "decoder" not in theirs(shared(), lambda model: model(X * NAN)).text

    with pytest.raises(OverflowDetected), watch(model := shared()):
        model(X * NAN)

    assert "encoder (Linear, also decoder), output: nan" in capsys.readouterr().out


def test_drop_in_names_a_shared_module_by_all_its_names() -> None:
    """The drop-in's frames equal theirs to the letter, so only the exception has room for the other names."""
    outcome = ours(shared(), lambda model: model(X * NAN))

    assert "encoder Linear" in outcome.text
    assert "decoder" in str(outcome.error)


@pytest.mark.parametrize("traced", [[], [0]])
def test_drop_in_prints_no_escapes_of_a_name(traced: list[int], capsys: pytest.CaptureFixture[str]) -> None:
    model = nn.Sequential(OrderedDict({"\x1b[2J\nforged": nn.Linear(2, 2)}))
    with suppress(OverflowDetected), DebugUnderflowOverflow(model, trace_batch_nums=traced):
        model(X * NAN)
    told = capsys.readouterr().out
    assert "\\x1b[2J\\nforged" in told
    assert "\x1b" not in told


def count(kind: type) -> int:
    return sum(type(found) is kind for found in gc.get_objects())


def test_deep_copy_is_not_watched(capsys: pytest.CaptureFixture[str]) -> None:
    model = linears()
    HuggingFaceDetector(model)
    before = count(HuggingFaceDetector)
    clone = copy.deepcopy(model)
    assert count(HuggingFaceDetector) == before + 1
    with pytest.raises(ValueError, match="inf/nan detected"):
        clone(X * NAN)
    assert "Detected" in capsys.readouterr().out

    model = linears()
    with DebugUnderflowOverflow(model, trace_batch_nums=[0]):
        before = count(DebugUnderflowOverflow) + count(Detector)
        clone = copy.deepcopy(model)
        assert count(DebugUnderflowOverflow) + count(Detector) == before
        clone.append(nn.Linear(2, 2))
        clone(X * NAN)  # neither raises nor is the traced batch 0
        assert capsys.readouterr().out == ""
        model(X)
        with pytest.raises(OverflowDetected):
            model(X * NAN)
    assert set(clone.state_dict()) > set(model.state_dict())


def saved_by_pickle(model: nn.Module) -> bytes:
    return pickle.dumps(model)


def saved_by_torch(model: nn.Module) -> bytes:
    file = io.BytesIO()
    torch.save(model, file)
    return file.getvalue()


@pytest.mark.parametrize(
    ("save", "load"),
    [
        pytest.param(saved_by_pickle, pickle.loads, id="pickle"),
        pytest.param(saved_by_torch, lambda data: torch.load(io.BytesIO(data), weights_only=False), id="torch"),
    ],
)
def test_pickled_model_is_not_watched(save: Callable[[nn.Module], bytes], load: Callable[[bytes], Any]) -> None:
    model = linears()
    HuggingFaceDetector(model)
    data = save(model)
    assert b"DebugUnderflowOverflow" in data
    with pytest.raises(ValueError, match="inf/nan detected"):
        load(data)(X * NAN)

    model = linears()
    with DebugUnderflowOverflow(model):
        model(X)
        data = save(model)
        assert b"DebugUnderflowOverflow" not in data
        assert b"Detector" not in data
        clone = load(data)
        clone(X * NAN)
        assert torch.equal(clone.get_parameter("0.weight"), model.get_parameter("0.weight"))
