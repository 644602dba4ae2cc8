"""Our ``DebugUnderflowOverflow`` against the one of transformers: the same trainings, the text compared by lines."""

from __future__ import annotations

import re
from collections import namedtuple
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hf_oracle
from hf_oracle import Outcome, Step, check_parity, run, train
from models import Calls
from rankwatch import BatchLimitReached, DebugUnderflowOverflow, OverflowDetected
from trainings.parts import Root

REASON = "the oracle is the detector of transformers"
transformers = pytest.importorskip("transformers", reason=REASON)
HuggingFaceDetector = pytest.importorskip("transformers.debug_utils", reason=REASON).DebugUnderflowOverflow

pytestmark = pytest.mark.oracle

VOCABULARY = 40
SABOTAGED_BATCH = 2
FLOAT_MASKS = {"attn_implementation": "eager"}
"""The other implementations pass boolean masks, on which theirs crashes."""


# --- models and their batches -----------------------------------------------------------------------------------------


def t5() -> nn.Module:
    torch.manual_seed(0)
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
    config = transformers.T5Config(vocab_size=VOCABULARY, decoder_start_token_id=0, **sizes, **FLOAT_MASKS)
    return _training(transformers.T5ForConditionalGeneration(config))


def gpt2() -> nn.Module:
    torch.manual_seed(0)
    sizes = {"n_positions": 16, "n_embd": 32, "n_layer": 3, "n_head": 4, "bos_token_id": 0, "eos_token_id": 0}
    config = transformers.GPT2Config(vocab_size=VOCABULARY, **sizes, **FLOAT_MASKS)
    return _training(transformers.GPT2LMHeadModel(config))


def _training(model: Any) -> nn.Module:
    module: nn.Module = model.train()
    return module


def language_step(model: Any, number: int) -> Tensor:
    """A padded batch of random tokens. The dropout after it draws from the generator that ``train`` has seeded."""
    tokens = torch.randint(1, VOCABULARY, (2, 8))
    mask = torch.ones_like(tokens)
    mask[1, 6:] = 0
    loss: Tensor = model(input_ids=tokens, attention_mask=mask, labels=tokens).loss
    return loss


class Plain(nn.Module):
    """Only what theirs prints in full: positional arguments, tensors, and tuples of tuples as outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(8, 4)
        self.body = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(0.2), nn.Sequential(nn.Linear(8, 8)))
        self.memory = nn.LSTM(8, 8, num_layers=2, dropout=0.2)
        self.scale = Scale()
        self.head = nn.Linear(8, 1, bias=False)

    def forward(self, tokens: Tensor, factor: float) -> tuple[Tensor, None, tuple[Tensor, Tensor]]:
        sequence, state = self.memory(self.body(self.embedding(tokens)))
        return self.head(self.scale(sequence, factor, None)), None, state


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor, factor: float, bias: Tensor | None) -> Tensor:
        return self.gain * factor * x


def plain() -> nn.Module:
    torch.manual_seed(0)
    return Plain().train()


def plain_step(model: Any, number: int) -> Tensor:
    output: Tensor = model(torch.randint(8, (5, 3)), 2.0)[0]
    return output.square().mean()


class Buffered(nn.Module):
    """All that ours prints beyond theirs: buffers, keyword inputs, containers; and a module under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.pick = Pick()
        self.first = nn.Linear(4, 4)
        self.second = self.first
        self.register_buffer("shift", torch.full((4,), 0.5))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, *, batch: dict[str, Any]) -> dict[str, Any]:
        x = self.pick(batch, index=1)["picked"][0]
        return {"loss": self.second(self.first(self.norm(x) + self.shift)).square().mean(), "rest": [x, (x, None)]}


class Pick(nn.Module):
    def forward(self, batch: dict[str, Any], index: int) -> dict[str, Any]:
        return {"picked": [batch["x"][index]]}


def buffered() -> nn.Module:
    torch.manual_seed(0)
    return Buffered().train()


def buffered_step(model: Any, number: int) -> Tensor:
    loss: Tensor = model(batch={"x": (None, torch.randn(3, 4))})["loss"]
    return loss


MODELS = pytest.mark.parametrize(
    ("build", "step"),
    [
        pytest.param(t5, language_step, id="t5"),
        pytest.param(gpt2, language_step, id="gpt2"),
        pytest.param(buffered, buffered_step, id="buffered"),
        pytest.param(plain, plain_step, id="plain"),
    ],
)


def ending(outcome: Outcome) -> tuple[str, int | None]:
    """How a training ended, and in the forward of which batch. Another ValueError than the detector's goes through."""
    if outcome.error is None:
        return "finished", None
    text = str(outcome.error)
    if isinstance(outcome.error, OverflowDetected) or text.startswith("DebugUnderflowOverflow: inf/nan detected"):
        return "detected", outcome.batch
    if isinstance(outcome.error, BatchLimitReached) or text.startswith("DebugUnderflowOverflow: aborting after"):
        return "stopped", outcome.batch
    raise outcome.error


def both(build: Callable[[], nn.Module], step: Step, **options: Any) -> tuple[Outcome, Outcome, hf_oracle.Extras]:
    """Theirs and ours over the same training, compared."""
    theirs = train(HuggingFaceDetector, build(), step, **options)
    model = build()
    ours = train(DebugUnderflowOverflow, model, step, **options)
    assert ending(ours) == ending(theirs)
    return theirs, ours, check_parity(theirs.text, ours.text, model)


# --- traces -----------------------------------------------------------------------------------------------------------


@MODELS
def test_trace(build: Callable[[], nn.Module], step: Step) -> None:
    theirs, ours, extras = both(build, step, trace_batch_nums=[1, 3])

    assert theirs.error is None
    assert ours.text.count("*** Starting batch number=1 ***") == ours.text.count("*** Starting batch number=3 ***") == 1
    assert ours.text.count("*** Starting") == 2
    if build is plain:
        assert ours.text == theirs.text
    else:
        assert ("", "output") in extras.opened


def test_trace_shows_what_theirs_does_not() -> None:
    """All the differences: they show that each allowance of the comparison is used, and where."""
    _, ours, extras = both(buffered, buffered_step, trace_batch_nums=[0], batches=1)

    assert extras.buffers == [("norm", "running_mean"), ("norm", "running_var"), ("", "shift")]
    assert extras.keywords == [("pick", "input[index]"), ("", "input[batch][x][0]"), ("", "input[batch][x][1]")]
    assert extras.opened == [("pick", "input[0]"), ("pick", "output"), ("", "output")]
    labels = [line.rsplit(" ", 1)[1] for line in ours.text.split("\n") if " output" in line]
    assert labels[-4:] == ["output[loss]", "output[rest][0]", "output[rest][1][0]", "output[rest][1][1]"]


# --- detections -------------------------------------------------------------------------------------------------------


def fill(parameter: str, value: float) -> Callable[[nn.Module], None]:
    def spoil(model: nn.Module) -> None:
        model.get_parameter(parameter).data.view(-1)[1:3] = value

    return spoil


def gain(parameter: str) -> Callable[[nn.Module], None]:
    """Scales a weight of about one hugely: the weight stays finite, its product does not."""

    def spoil(model: nn.Module) -> None:
        weight = model.get_parameter(parameter).data
        weight.mul_(0.9 * torch.finfo(weight.dtype).max / weight.abs().max())

    return spoil


def half(build: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    return lambda: build().half()


@pytest.mark.parametrize("max_frames_to_save", [21, *(pytest.param(frames, marks=pytest.mark.slow) for frames in (1, 1000))])
@pytest.mark.parametrize(
    ("build", "step", "spoil", "labels"),
    [
        pytest.param(
            t5, language_step, gain("encoder.block.1.layer.0.layer_norm.weight"), ["output has infs"], id="t5-overflow"
        ),
        pytest.param(
            t5,
            language_step,
            fill("decoder.block.1.layer.1.EncDecAttention.q.weight", float("nan")),
            ["weight has nans", "output has nans"],
            id="t5-nan-weight",
        ),
        pytest.param(gpt2, language_step, gain("transformer.h.1.ln_2.weight"), ["output has infs"], id="gpt2-overflow"),
        pytest.param(
            half(gpt2), language_step, gain("transformer.h.2.ln_1.weight"), ["output has infs"], id="gpt2-half-overflow"
        ),
        pytest.param(
            gpt2,
            language_step,
            fill("transformer.h.1.mlp.c_fc.bias", float("inf")),
            ["bias has infs", "output has infs"],
            id="gpt2-inf-bias",
        ),
        pytest.param(plain, plain_step, gain("scale.gain"), ["output has infs"], id="plain-overflow"),
        pytest.param(
            plain,
            plain_step,
            fill("memory.bias_hh_l1", float("nan")),
            ["bias_hh_l1 has nans", "output[0] has nans", "output[1][0] has nans", "output[1][1] has nans"],
            id="plain-nan-weight",
        ),
    ],
)
def test_detection(
    build: Callable[[], nn.Module],
    step: Step,
    spoil: Callable[[nn.Module], None],
    labels: list[str],
    max_frames_to_save: int,
) -> None:
    def spoiled_step(model: Any, number: int) -> Tensor:
        if number == SABOTAGED_BATCH:
            spoil(model)
        return step(model, number)

    theirs, ours, _ = both(build, spoiled_step, max_frames_to_save=max_frames_to_save)

    assert ending(theirs) == ("detected", SABOTAGED_BATCH)
    assert ours.text.split("\n")[: len(labels) + 2] == [
        *labels,
        "",
        f"Detected inf/nan during batch_number={SABOTAGED_BATCH}",
    ]
    if build is plain:
        assert ours.text == theirs.text
    if max_frames_to_save == 1000:
        assert [ours.text.count(f"*** Starting batch number={number} ***") for number in range(4)] == [1, 1, 1, 0]


def test_detection_that_shows_the_end_of_the_batch_before() -> None:
    """The ring reaches back over the start of a batch: the batch's header comes before its first frame."""

    def step(model: Any, number: int) -> Tensor:
        if number == 1:
            fill("body.0.bias", float("inf"))(model)
        return plain_step(model, number)

    theirs, ours, _ = both(plain, step, max_frames_to_save=4)

    assert ending(theirs) == ("detected", 1)
    assert ours.text == theirs.text
    items = hf_oracle.parse(ours.text)
    lines = [item if isinstance(item, str) else f"{item.module} {item.module_class}" for item in items]
    assert lines == [
        "bias has infs",
        "output has infs",
        "",
        "Detected inf/nan during batch_number=1",
        "Last 4 forward frames:",
        "abs min  abs max  metadata",
        "head Linear",
        " Plain",
        "",
        "",
        "                  *** Starting batch number=1 ***",
        "abs min  abs max  metadata",
        "embedding Embedding",
        "body.0 Linear",
        *[""] * 4,
    ]


# --- stopping after a batch -------------------------------------------------------------------------------------------


@MODELS
@pytest.mark.parametrize("traced", [[], [1], *(pytest.param(traced, marks=pytest.mark.slow) for traced in ([0], [0, 1, 2]))])
def test_abort_after_batch(build: Callable[[], nn.Module], step: Step, traced: list[int]) -> None:
    theirs, ours, _ = both(build, step, trace_batch_nums=traced, abort_after_batch_num=1)

    assert ending(theirs) == ("stopped", 1)
    assert ours.text.count("*** Starting") == len([number for number in traced if number <= 1])


def test_abort_after_batch_comes_before_its_backward() -> None:
    for detector in (HuggingFaceDetector, DebugUnderflowOverflow):
        model = plain()
        before = {name: parameter.clone() for name, parameter in model.named_parameters()}
        assert train(detector, model, plain_step, abort_after_batch_num=0).batch == 0
        assert all(torch.equal(parameter, before[name]) for name, parameter in model.named_parameters())


# --- corners of the format --------------------------------------------------------------------------------------------


class Chain(nn.Module):
    """Modules called one after the other; the last result stays inside."""

    def __init__(self, *calls: Callable[..., Any]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(map(Calls, calls))

    def forward(self, x: Tensor) -> Tensor:
        value: Any = x
        for part in self.parts:
            value = part(value)
        return x


X = torch.tensor([[0.5, -2.0], [0.25, 4.0]])


def compare(build: Callable[[], nn.Module], use: Callable[[Any], object], **options: Any) -> tuple[Outcome, Outcome]:
    torch.manual_seed(0)
    theirs = run(HuggingFaceDetector, build(), use, **options)
    torch.manual_seed(0)
    model = build()
    ours = run(DebugUnderflowOverflow, model, use, **options)
    assert ending(ours) == ending(theirs), ours.text
    check_parity(theirs.text, ours.text, model)
    return theirs, ours


Pair = namedtuple("Pair", ["left", "right"])


@pytest.mark.parametrize(
    "call",
    [
        pytest.param(lambda x: None, id="none"),
        pytest.param(lambda x: "text", id="text"),
        pytest.param(lambda x: (), id="empty-tuple"),
        pytest.param(lambda x: (x, ()), id="empty-tuple-inside"),
        pytest.param(lambda x: [], id="empty-list"),
        pytest.param(lambda x: (x, {}), id="empty-dict-inside"),
        pytest.param(lambda x: (x, 1.5, True, None, (x, "text", None)), id="mixed"),
        pytest.param(lambda x: torch.max(x, 0), id="struct-sequence"),
        pytest.param(lambda x: Pair(x, 2 * x), id="namedtuple"),
        pytest.param(lambda x: x.long(), id="integers"),
        pytest.param(lambda x: torch.complex(x, x), id="complex"),
        pytest.param(lambda x: x.double() * 1e-250, id="doubles"),
        pytest.param(lambda x: x.bfloat16() * 1e37, id="bfloat16"),
        pytest.param(lambda x: x.t()[1:], id="strided"),
        pytest.param(lambda x: x.sum(), id="scalar"),
        pytest.param(lambda x: torch.linspace(-1, 3, 200_001), id="large"),
        pytest.param(lambda x: [x, {"a": (x, [x])}], id="nested"),
    ],
)
def test_values(call: Callable[[Tensor], Any]) -> None:
    compare(lambda: Chain(call, lambda value: None), lambda model: model(X), trace_batch_nums=[0])


@pytest.mark.parametrize("values", [["inf"], ["nan"], ["nan", "inf"], ["-inf", "1"]], ids="+".join)
def test_both_kinds_of_a_detection_are_named(values: list[str]) -> None:
    bad = torch.tensor([float(value) for value in values])

    theirs, ours = compare(lambda: Chain(lambda x: bad), lambda model: model(X))

    assert ours.text == theirs.text


def test_nan_in_a_traced_batch_is_named_beside_the_trace() -> None:
    """Not judged, but theirs still prints ``output has nans`` there: people grep for it."""
    theirs, ours = compare(lambda: Chain(lambda x: x / 0 * 0), lambda model: model(X), trace_batch_nums=[0])

    assert "output has nans" in theirs.text
    assert ours.text == theirs.text


def test_parameter_that_a_module_has_twice() -> None:
    class Tied(nn.Linear):
        def __init__(self) -> None:
            super().__init__(2, 2, bias=False)
            self.tied = self.weight

    compare(Tied, lambda model: model(X), trace_batch_nums=[0])


def test_weight_swapped_between_two_calls() -> None:
    """No version counter sees it. (A change in place through ``.data`` is seen by nothing; see the recorder.)"""

    def update(self: Root, x: Tensor) -> Any:
        x = self.inner(x)
        self.inner.weight.data = self.inner.weight.data * 2
        return self.inner(x)

    compare(lambda: Root(update, inner=nn.Linear(2, 2)), lambda model: model(X), trace_batch_nums=[0])


def test_inference_and_eval_are_batches() -> None:
    def use(model: nn.Module) -> None:
        model(X)
        with torch.inference_mode():
            model(X)
        model.eval()
        with torch.no_grad():
            model(X)

    _, ours = compare(lambda: Chain(torch.sin), use, trace_batch_nums=range(3))

    assert ours.text.count("*** Starting") == 3


def test_submodule_called_on_its_own() -> None:
    """``generate`` calls a T5's encoder in this way: theirs counts these frames as part of the next batch."""

    def use(model: Any) -> None:
        model.parts[0](X)
        model(X)
        model.parts[1](X)
        model.parts[0](X / 0)

    _, ours = compare(lambda: Chain(torch.sin, torch.cos), use)

    assert "batch_number=1" in ours.text


def test_submodule_called_on_its_own_is_traced() -> None:
    def use(model: Any) -> None:
        model.parts[0](X)
        model(X)

    compare(lambda: Chain(torch.sin, torch.cos), use, trace_batch_nums=[0])


@pytest.mark.parametrize(
    "masks",
    [
        pytest.param({"src_key_padding_mask": torch.tensor([[False, False, True], [False] * 3])}, id="padding"),
        pytest.param({"mask": nn.Transformer.generate_square_subsequent_mask(3)}, id="causal"),
    ],
)
def test_masks_of_a_torch_transformer_are_healthy(masks: dict[str, Tensor]) -> None:
    """torch passes its padding and causal masks on as -inf, by keyword: that is no overflow, and theirs lets it be."""

    def build() -> nn.Module:
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    theirs, _ = compare(build, lambda model: model(torch.ones(2, 3, 8), **masks))

    assert theirs.error is None


# --- the comparison itself --------------------------------------------------------------------------------------------


def _swap_first_frames(text: str) -> str:
    start, first, second, rest = text.split(" " * 18, 3)
    return (" " * 18).join([start, second, first, rest])


@pytest.mark.parametrize(
    "spoil",
    [
        pytest.param(lambda text: text.replace("e-01", "e-02", 1), id="figure"),
        pytest.param(lambda text: text.replace(" input[0]\n", " input[1]\n", 1), id="label"),
        pytest.param(lambda text: text.replace("running_mean", "running_median", 1), id="unknown-buffer"),
        pytest.param(lambda text: text.replace("input[index]", "input[indices]", 1), id="unknown-keyword"),
        pytest.param(lambda text: text.replace("output[rest][1][1]", "outputs[rest][1][1]", 1), id="foreign-part"),
        pytest.param(lambda text: text.replace("norm BatchNorm1d", "norm BatchNorm2d", 1), id="class"),
        pytest.param(lambda text: text.replace("first Linear", "second Linear", 1), id="name"),
        pytest.param(lambda text: text.replace("\n\n", "\n", 1), id="blank-line"),
        pytest.param(lambda text: text.replace("number=1", "number=0", 1), id="batch-number"),
        pytest.param(lambda text: text + "\n", id="line-at-end"),
        pytest.param(lambda text: re.sub(r"\n.* bias\n", r"\n", text, count=1), id="line-missing"),
        pytest.param(lambda text: text.replace("abs min  abs", "abs min abs", 1), id="space"),
        pytest.param(_swap_first_frames, id="order"),
    ],
)
def test_the_comparison_sees(spoil: Callable[[str], str]) -> None:
    theirs, ours, _ = both(buffered, buffered_step, trace_batch_nums=[1])
    spoiled = spoil(ours.text)
    assert spoiled != ours.text

    with pytest.raises((AssertionError, KeyError)):
        check_parity(theirs.text, spoiled, buffered())
