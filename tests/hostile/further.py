"""Further ways to go wrong: more operators, two faults at once, the first and the last batch, evaluations."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import rankwatch
from models import Calls
from trainings import Root, Scaled, Square, Training, chain, trained

from .backwards import Through
from .case import BAD, BATCHES, INF, NAN, fed, hostile, put, spoiled
from .forwards import middle, same, switched
from .inputs import Masked, additive

LAST = BATCHES - 1

# --- operators --------------------------------------------------------------------------------------------------------


@hostile(module="0", cause="overflow", state=("inf", "nan"))
def a_matrix_product_of_two_large_numbers() -> Training:
    model = chain()
    return fed(model, lambda x: (x.mul_(1e20), model[0].weight.data.mul_(1e25)))


@hostile(module="1", cause="overflow", state="inf")
def a_sum_of_many() -> Training:
    """Each is finite."""
    return switched(lambda x: x, lambda x: x * 0 + (x * 0 + 3e37).sum(-1, keepdim=True) * torch.ones(8) * 2)[1]


@hostile(module="1", cause="overflow", state="inf")
def a_high_power() -> Training:
    return switched(same, lambda x: (x.abs() + 20) ** 40)[1]


@hostile(module="1", cause="overflow", state="inf")
def an_exponential_in_float16() -> Training:
    return switched(same, lambda x: ((x.abs() + 12).half()).exp().float())[1]


@hostile(module="1", cause="overflow", state="inf")
def a_running_product() -> Training:
    return switched(same, lambda x: (x.abs() + 1e8).cumprod(-1))[1]


@hostile(module="1", cause=("overflow", "singular"), state="inf")
def the_reciprocal_of_a_tiny_number() -> Training:
    return switched(same, lambda x: 1 / (x * 0 + 1e-39))[1]


@hostile(module="1", cause="singular", state="inf")
def an_inverse_hyperbolic_tangent_of_one() -> Training:
    return switched(torch.tanh, lambda x: (x * 0 + 1).atanh())[1]


@hostile(module="1", cause="singular", state="inf")
def the_log1p_of_minus_one() -> Training:
    return switched(same, lambda x: (x * 0 - 1).log1p())[1]


@hostile(module="1", cause="singular", state=("inf", "nan"))
def gumbel_noise_of_zero() -> Training:
    return switched(same, lambda x: x - (-(x * 0).log()).log() * 0 - (x * 0).log())[1]


@hostile(module="1", cause=("invalid", "singular"))
def the_standard_deviation_of_one_sample() -> Training:
    return switched(same, lambda x: x / x[:1].std(0))[1]


@hostile(module="1", cause=("invalid", "singular"))
def a_mean_of_nothing() -> Training:
    return switched(same, lambda x: x - x[:0].mean())[1]


@hostile(module="1", cause=("invalid", "singular"))
def a_layer_norm_without_an_epsilon() -> Training:
    model = middle(nn.LayerNorm(8, eps=0.0))
    return spoiled(model, lambda: (model[0].weight.data.zero_(), model[0].bias.data.zero_()))


@hostile(module="1", cause="overflow", state="inf")
def a_variance_of_large_numbers() -> Training:
    return switched(same, lambda x: x + (x * 1e25).var())[1]


@hostile(module="1", cause="overflow", state="nan")
def infinities_that_cancel() -> Training:
    """exp(100) / exp(100): a softmax by hand."""
    return switched(same, lambda x: (x * 0 + 100).exp() / (x * 0 + 100).exp().sum(-1, keepdim=True))[1]


# --- two faults at once -----------------------------------------------------------------------------------------------


@hostile(module="0", cause="data")
def bad_data_and_a_bad_weight() -> Training:
    model = chain()

    def spoil(x: Tensor) -> None:
        put(x, NAN, 1, 1)
        put(model[2].weight, NAN, 1, 1)

    return fed(model, spoil)


@hostile(module="1", cause="overflow", state="inf")
def an_overflow_before_a_bad_weight() -> Training:
    model = chain(nn.Linear(4, 8), Scaled(), nn.Linear(8, 4))

    def spoil() -> None:
        model[1].gain = 1e30
        put(model[2].weight, NAN, 1, 1)

    return spoiled(model, spoil)


@hostile(module="left", cause="overflow", state="inf")
def two_branches() -> Training:
    """Both overflow; the left one is called first."""
    left, right = Scaled(), Scaled()
    model = Root(lambda root, x: root.head(root.left(x) + root.right(x)), left=left, right=right, head=nn.Linear(4, 4))

    def spoil() -> None:
        left.gain = right.gain = 1e30

    return spoiled(model, spoil)


@hostile(module="", label="loss", cause=("invalid", "singular"))
def a_bad_loss_before_a_bad_weight() -> Training:
    """The labels of batch 5 are ignored; a weight turns bad after it."""
    model = chain()

    def loss_of(number: int) -> Tensor:
        labels = torch.full((4,), -100) if number == BAD else torch.randint(4, (4,))
        return nn.functional.cross_entropy(model(torch.randn(4, 4)), labels)

    return trained(model, loss_of, before=lambda n: put(model[0].weight, NAN, 1, 1) if n == BAD + 1 else None)


# --- first and last batches -------------------------------------------------------------------------------------------


@hostile(module="1", cause="overflow", state="inf", batch=0)
def an_overflow_in_the_first_batch() -> Training:
    return fed(middle(Square()), lambda x: x.mul_(1e30), at=0)


@hostile(module="gain", cause="overflow", state=("inf", "nan"), batch=0, never="mask")
def an_overflow_beside_a_mask_in_the_first_batch() -> Training:
    """No good batch had the mask before."""
    model = Masked()
    model.gain.gain = 1e30
    return trained(model, lambda n: model(torch.randn(4, 4), mask=additive()).square().mean())


@hostile(module="0", cause="data", batch=LAST)
def data_of_the_last_batch() -> Training:
    return fed(chain(), lambda x: put(x, NAN, 1, 1), at=LAST)


@hostile(module="0", cause="data", batch=LAST, check="async")
def data_of_the_last_batch_read_later() -> Training:
    return fed(chain(), lambda x: put(x, NAN, 1, 1), at=LAST)


def a_last_loss() -> Training:
    model = chain()

    def loss_of(number: int) -> Tensor:
        labels = torch.full((4,), -100) if number == LAST else torch.randint(4, (4,))
        return nn.functional.cross_entropy(model(torch.randn(4, 4)), labels)

    return trained(model, loss_of)


@hostile(module="", label="loss", cause=("invalid", "singular"), batch=LAST)
def the_loss_of_the_last_batch() -> Training:
    return a_last_loss()


@hostile(module="", label="loss", cause=("invalid", "singular"), batch=LAST, check="async")
def the_loss_of_the_last_batch_read_later() -> Training:
    return a_last_loss()


@hostile(module="1", cause="gradient", batch=LAST, gradients=True)
def a_gradient_of_the_last_batch() -> Training:
    through = Through()
    model = chain(nn.Linear(4, 8), through, nn.Linear(8, 4))
    return trained(
        model,
        lambda n: model(torch.randn(4, 4)).square().mean(),
        before=lambda n: setattr(through, "gain", NAN if n == LAST else 1.0),
    )


@hostile(module="0", cause="data", batch=4)
def data_of_an_evaluation() -> Training:
    """After batch 4, in eval mode."""
    model = chain()
    training = trained(model, lambda n: model(torch.randn(4, 4)).square().mean())

    def step(number: int) -> None:
        training.step(number)
        model.eval()
        with torch.no_grad():
            model(torch.full((4, 4), NAN if number == 4 else 1.0))
        model.train()

    return Training(model, step)


# --- masks and data ---------------------------------------------------------------------------------------------------


@hostile(module="soft", cause=("data", "upstream"))
def a_mask_that_turns_to_nan() -> Training:
    """It was -inf in good batches; -inf * 0 is nan."""
    model = Masked()
    return trained(model, lambda n: model(torch.randn(4, 4), additive() * (0.0 if n == BAD else 1.0)).square().mean())


@hostile(module="net.0", cause="data", never="bounds", says="input[x] of the root")
def bad_data_beside_infinite_bounds() -> Training:
    model = Root(lambda root, x, bounds: root.net(x.clamp(-bounds, bounds)), net=chain())
    bounds = torch.tensor([INF, 1.0, INF, 2.0])
    return trained(model, lambda n: model(x=torch.full((4, 4), NAN if n == BAD else 0.5), bounds=bounds).square().mean())


@hostile(module="head", cause="overflow", state=("inf", "nan"), never="bounds")
def an_overflow_beside_infinite_bounds() -> Training:
    model = Root(
        lambda root, x, bounds: root.head(root.first(x).clamp(-bounds, bounds)), first=nn.Linear(4, 4), head=Scaled()
    )
    bounds = torch.tensor([INF, 1.0, INF, 2.0])
    return trained(
        model,
        lambda n: model(torch.randn(4, 4), bounds).square().mean(),
        before=lambda n: setattr(model.head, "gain", 1e30 if n == BAD else 1.0),
    )


# --- weights ----------------------------------------------------------------------------------------------------------


@hostile(module="", cause="weight", says="scale")
def a_parameter_of_the_root_at_the_end() -> Training:
    model = Root(lambda root, x: root.net(x) * root.scale, net=chain(), scale=nn.Parameter(torch.ones(4)))
    return spoiled(model, lambda: put(model.scale, NAN, 2))


@hostile(module=("table", "head"), cause="weight")
def one_weight_with_two_names() -> Training:
    model = Root(
        lambda root, t: root.head(root.norm(root.table(t))),
        table=nn.Embedding(9, 4),
        norm=nn.LayerNorm(4),
        head=nn.Linear(4, 9),
    )
    model.head.weight = model.table.weight
    return trained(
        model,
        lambda n: model(torch.randint(9, (3, 5))).square().mean(),
        before=lambda n: put(model.table.weight, NAN, 4, 1) if n == BAD else None,
    )


@hostile(module=("teacher", "teacher.0"), cause="weight")
def a_teacher_without_gradients() -> Training:
    def forward(root: Root, x: Tensor) -> Tensor:
        with torch.no_grad():
            aim = root.teacher(x)
        return torch.as_tensor(root.net(x) - aim)

    model = Root(forward, net=chain(), teacher=chain())
    model.teacher.requires_grad_(False)
    return spoiled(model, lambda: put(model.teacher[0].weight, NAN, 1, 1))


@hostile(module=("layers.0",), cause="weight")
def a_weight_of_a_compiled_model() -> Training:
    model = Root(lambda root, x: root.layers[1](root.layers[0](x)), layers=nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)]))
    compiled: Any = torch.compile(model, backend="aot_eager")
    return trained(
        model,
        lambda n: compiled(torch.randn(4, 4)).square().mean(),
        before=lambda n: put(model.layers[0].weight, NAN, 1, 1) if n == BAD else None,
    )


@hostile(module="0", cause="weight", batch=BAD + 1, state=("nan", "inf"), says=f"batch {BAD}")
def a_step_without_backward() -> Training:
    """torch.autograd.grad and a step by hand: the loss is handed to nobody."""
    model = chain()

    def step(number: int) -> None:
        out = model(torch.randn(4, 4))
        loss = out.square().mean() + ((out * 0).square().sum().sqrt() if number == BAD else 0.0)
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        with torch.no_grad():
            for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                parameter -= 0.01 * gradient

    return Training(model, step)


# --- gradients, scalers and losses ------------------------------------------------------------------------------------


def scaled(loss_of: Any, model: Any) -> Training:
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.01), torch.amp.GradScaler("cpu", init_scale=2.0**16)

    def step(number: int) -> None:
        scaler.scale(loss_of(number)).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    return Training(model, step)


@hostile(module=("", "0", "2"), cause="gradient", state=("inf", "nan"), batch=range(14, 40), says="batch 5", batches=60)
def no_scale_helps_by_default() -> Training:
    """Without gradients=True: each step is skipped, for ever, and no weight turns bad."""
    model = chain()

    def loss_of(number: int) -> Any:
        out = model(torch.randn(4, 4))
        return out.square().mean() + ((out * 0).square().sum().sqrt() if number >= BAD else 0.0)

    return scaled(loss_of, model)


@hostile(module="1", cause="overflow", state="inf")
def a_forward_under_a_scaler() -> Training:
    """No scale changes the forward."""
    model = middle(Square())

    def loss_of(number: int) -> Any:
        with torch.autocast("cpu", torch.float16):
            return model(torch.randn(4, 4) * (1e4 if number == BAD else 1)).float().square().mean()

    return scaled(loss_of, model)


@hostile(module=("first", "second"), cause="gradient", gradients=True, never="born in the backward of this module")
def a_second_use_of_an_input() -> Training:
    """What `second` is fed is also used by the root's own code, whose gradient is nan."""
    now = [0.0]

    def forward(root: Root, x: Tensor) -> Tensor:
        y = root.first(x)
        extra = (y * 0).square().sum().sqrt() if now[0] else 0.0
        return torch.as_tensor(root.second(y) + extra)

    model = Root(forward, first=nn.Linear(4, 4), second=nn.Linear(4, 4))
    return spoiled(model, lambda: now.__setitem__(0, 1.0))


@hostile(module="", label="loss", cause=("singular", "overflow", "invalid"), state="inf")
def a_text_that_does_not_fit() -> Training:
    """CTC: the target is longer than the input."""
    model = nn.Linear(4, 6)
    loss_of_ctc = nn.CTCLoss()

    def loss_of(number: int) -> Tensor:
        steps = torch.tensor([2 if number == BAD else 8] * 3)
        loss: Tensor = loss_of_ctc(
            model(torch.randn(8, 3, 4)).log_softmax(-1), torch.randint(1, 6, (3, 4)), steps, torch.tensor([4] * 3)
        )
        return loss

    return trained(model, loss_of)


@hostile(module="loss", label="output", cause=("invalid", "singular"))
def a_loss_that_is_a_module() -> Training:
    model = Root(lambda root, x, labels: root.loss(root.net(x), labels), net=chain(), loss=nn.CrossEntropyLoss())
    return trained(model, lambda n: model(torch.randn(4, 4), torch.full((4,), -100) if n == BAD else torch.randint(4, (4,))))


@hostile(module="", label="output", cause=("invalid", "singular"))
def a_loss_in_the_roots_output() -> Training:
    """As in transformers."""

    def forward(root: Root, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = root.net(x)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}

    model = Root(forward, net=chain())
    return trained(
        model, lambda n: model(torch.randn(4, 4), torch.full((4,), -100) if n == BAD else torch.randint(4, (4,)))["loss"]
    )


@hostile(module=("1", "0"), cause=("upstream", "invalid"), label="scores")
def a_mark() -> Training:
    """Between two modules, the user marks a tensor that is nan."""
    now = [1.0]

    def score(x: Tensor) -> Tensor:
        scores = x * now[0]
        rankwatch.detect_overflow(scores, "scores")
        return scores.nan_to_num()

    model = chain(nn.Linear(4, 4), Calls(score), nn.Linear(4, 4))
    return spoiled(model, lambda: now.__setitem__(0, NAN))
