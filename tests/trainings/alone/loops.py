"""Healthy: who calls what, how often, and when the optimizer steps."""

from __future__ import annotations

import copy
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import prune
from torch.utils.checkpoint import checkpoint

import rankwatch
from models import Calls
from notebook import learn, take_step
from trainings.case import Training
from trainings.parts import Coder, Pair, Root, chain, evaluated, labels, squared, trained
from trainings.truths import LONG, healthy


def to_two(call: Any, **parts: nn.Module) -> Root:
    return Root(call, **parts, head=nn.Linear(4, 2))


# --- several optimizers ------------------------------------------------------------------------------------------------


def adversaries(with_scalers: bool) -> Training:
    gan = Pair(nn.LeakyReLU(0.2))
    parts = (gan.discriminator, gan.generator)
    optimizers = [torch.optim.Adam(part.parameters(), lr=1e-3, betas=(0.5, 0.9)) for part in parts]
    scalers = [torch.amp.GradScaler("cpu", init_scale=2.0**30 if with_scalers else 1.0, enabled=with_scalers) for _ in parts]
    judge = nn.functional.binary_cross_entropy_with_logits

    def step(number: int) -> float:
        total = 0.0
        for index, (optimizer, scaler) in enumerate(zip(optimizers, scalers, strict=True)):
            with torch.autocast("cpu", torch.float16, enabled=with_scalers):
                fake = gan.generator(torch.randn(4, 4))
                if index:
                    score = gan.discriminator(fake)
                    loss = judge(score.float(), torch.ones(4, 1))
                else:
                    real, score = gan.discriminator(torch.randn(4, 4) + 2), gan.discriminator(fake.detach())
                    loss = judge(real.float(), torch.ones(4, 1)) + judge(score.float(), torch.zeros(4, 1))
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            total += float(loss)
        return total

    return Training(gan, step)


healthy(forwards=-1).each(a_gan=lambda: adversaries(with_scalers=False))
healthy(forwards=-1, batches=LONG).each(a_gan_with_two_scalers=lambda: adversaries(with_scalers=True))
healthy(forwards=-1, batches=LONG, gradients=True).each(
    a_gan_with_two_scalers_and_gradients=lambda: adversaries(with_scalers=True)
)


@healthy(forwards=-1)
def a_closure() -> Training:
    model = chain()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3, line_search_fn="strong_wolfe")
    x, y = torch.randn(16, 4), torch.randn(16, 4)

    def step(number: int) -> float:
        def closure() -> float:
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(x), y)
            loss.backward()
            return float(loss)

        return float(optimizer.step(closure))

    return Training(model, step)


@healthy()
def several_losses_and_optimizers() -> Training:
    model = Root(
        lambda root, x: (root.left(root.trunk(x)), root.right(root.trunk(x))), trunk=chain(), left=chain(), right=chain()
    )
    optimizers = [torch.optim.SGD(model.trunk.parameters(), lr=0.01)]
    optimizers.append(torch.optim.SGD([*model.left.parameters(), *model.right.parameters()], lr=0.001))

    def step(number: int) -> float:
        left, right = model(torch.randn(4, 4))
        losses = (left.square().mean(), right.abs().mean(), (left - right).square().sum())
        torch.autograd.backward(losses[:2], retain_graph=True)
        losses[2].backward()
        take_step(*optimizers)
        return float(sum(losses))

    return Training(model, step)


@healthy(forwards=-1)
def meta_learning() -> Training:
    """functional_call with weights of an inner step, and a gradient through it."""
    model = chain()

    def loss_of(number: int) -> Tensor:
        weights = dict(model.named_parameters())
        x, y = torch.randn(4, 4), torch.randn(4, 4)
        inner = nn.functional.mse_loss(torch.func.functional_call(model, weights, (x,)), y)
        gradients = torch.autograd.grad(inner, list(weights.values()), create_graph=True)
        moved = {name: w - 0.1 * g for (name, w), g in zip(weights.items(), gradients, strict=True)}
        return nn.functional.mse_loss(torch.func.functional_call(model, moved, (x,)), y)

    return trained(model, loss_of)


@healthy(forwards=-1, batches=LONG)
def a_model_that_grows() -> Training:
    """A layer is added, and the optimizer exchanged, in mid-run."""
    model = chain(nn.Linear(4, 4))
    now = [trained(model)]

    def step(number: int) -> object:
        if number == 100:
            model.append(nn.Linear(4, 4))
            now[0] = trained(model)
        return now[0].step(number)

    return Training(model, step)


@healthy(forwards=-1)
def a_gradient_penalty() -> Training:
    """A critic whose gradient is part of the loss: a backward through a backward."""
    model = chain(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))

    def loss_of(number: int) -> Any:
        x = torch.randn(4, 4).requires_grad_()
        score = model(x)
        (gradient,) = torch.autograd.grad(score.sum(), x, create_graph=True)
        penalty: Tensor = (gradient.norm(dim=-1) - 1).square().mean()
        return penalty + score.mean()

    return trained(model, loss_of)


# --- what is trained, and in which mode --------------------------------------------------------------------------------


@healthy()
def fine_tuning_in_eval_mode() -> Training:
    return trained(chain(nn.Linear(4, 8), nn.Dropout(0.5), nn.BatchNorm1d(8), nn.Linear(8, 2)).eval())


@healthy()
def fine_tuning_in_eval_mode_with_evaluations() -> Training:
    model = chain(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 2)).eval()
    return trained(model, before=lambda n: evaluated(model, n % 3))


@healthy()
def evaluations_between() -> Training:
    model = chain(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 4))

    def before(number: int) -> None:
        if number % 10 == 9:
            model.eval()
            evaluated(model, 3)
            model.train()

    return trained(model, before=before)


@healthy(forwards=-1)
def an_extra_forward_now_and_then() -> Training:
    """In training mode, without a backward."""
    model = chain()
    return trained(model, before=lambda n: model(torch.randn(4, 4)) if n % 10 == 9 else None)


@healthy()
def a_frozen_root_with_an_adapter() -> Training:
    model = to_two(lambda root, x: root.head(root.adapter(root.backbone(x))), backbone=chain(), adapter=chain())
    model.requires_grad_(False).eval()
    model.adapter.requires_grad_(True)
    return trained(model)


@healthy()
def low_rank_adapters() -> Training:
    def adapted() -> Root:
        base, down, up = nn.Linear(4, 4).requires_grad_(False), nn.Linear(4, 2, bias=False), nn.Linear(2, 4, bias=False)
        nn.init.zeros_(up.weight)
        return Root(lambda own, x: own.base(x) + own.lora_b(own.lora_a(x)) * 4, base=base, lora_a=down, lora_b=up)

    model = chain(adapted(), nn.GELU(), adapted())
    return trained(model, lambda n: (model(torch.randn(4, 4)) - 1).square().mean())


@healthy()
def pruned_weights() -> Training:
    model = chain(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
    prune.l1_unstructured(model[0], "weight", 0.5)
    return trained(model)


@healthy()
def siblings_that_share_weights() -> Training:
    """Two forwards of one module, in one forward of the root; and a tied head."""
    table = nn.Embedding(20, 4)
    model = Root(
        lambda root, a, b: root.table(a) @ root.norm(root.table(b)).transpose(1, 2),
        table=table,
        norm=nn.LayerNorm(4),
        again=table,
    )
    return trained(model, lambda n: model(torch.randint(20, (2, 3)), torch.randint(20, (2, 3))).square().mean())


@healthy()
def a_moving_average() -> Training:
    """The copy is evaluated after each batch; it is not watched."""
    model = chain()
    average = torch.optim.swa_utils.AveragedModel(model, avg_fn=lambda old, new, number: 0.9 * old + 0.1 * new)

    def after(number: int) -> None:
        average.update_parameters(model)
        evaluated(average, 1)

    return trained(model, after=after)


@healthy()
def a_teacher_in_the_root() -> Training:
    net = chain()
    teacher = copy.deepcopy(net).requires_grad_(False).eval()
    model = Root(lambda root, x: (root.net(x), root.teacher(x).detach()), net=net, teacher=teacher)

    def loss_of(number: int) -> Tensor:
        with torch.no_grad():
            for old, new in zip(teacher.parameters(), net.parameters(), strict=True):
                old.lerp_(new, 0.1)
        return nn.functional.mse_loss(*model(torch.randn(4, 4)))

    return trained(model, loss_of)


# --- who calls whom ----------------------------------------------------------------------------------------------------


def coded() -> Training:
    """The root is never called."""
    model = Coder()
    return trained(model, squared(model.coded))


healthy().each(encode_and_decode=coded)
healthy(gradients=True).each(encode_and_decode_with_gradients=coded)


@healthy()
def a_list_of_layers() -> Training:
    """The loop itself calls a root's layers."""
    model = nn.ModuleList([nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)])

    def loss_of(number: int) -> Tensor:
        x = torch.randn(4, 4)
        for layer in model:
            x = layer(x)
        return x.square().mean()

    return trained(model, loss_of)


healthy().each(
    accumulation=lambda: trained(chain(), accumulate=4),
    checkpointing=lambda: trained(
        to_two(lambda root, x: root.head(checkpoint(root.block, x, use_reentrant=False)), block=chain())
    ),
    reentrant_checkpointing=lambda: trained(
        to_two(
            lambda root, x: root.head(checkpoint(root.block, root.first(x), use_reentrant=True)),
            first=nn.Linear(4, 4),
            block=chain(nn.Linear(4, 8), nn.Dropout(0.1), nn.Linear(8, 4)),
        )
    ),
)


@healthy()
def checkpointing_of_the_whole() -> Training:
    net = chain()
    return trained(net, lambda n: checkpoint(net, torch.randn(4, 4), use_reentrant=False).square().mean())


@healthy(forwards=-1)
def a_compiled_module() -> Training:
    """Only a part of the model is compiled."""
    model = to_two(lambda root, x: root.head(root.part(x)), part=chain())
    model.part.compile(backend="aot_eager")
    return trained(model)


@healthy(forwards=-1)
def a_compiled_model() -> Training:
    model = chain()
    return trained(model, squared(torch.compile(model, backend="aot_eager")))


@healthy(forwards=-1)
def a_compiled_step() -> Training:
    """Forward and loss are one compiled function."""
    model = chain()

    @torch.compile(backend="aot_eager")
    def loss_of(x: Tensor) -> Tensor:
        return torch.as_tensor(model(x).square().mean())

    return trained(model, lambda n: loss_of(torch.randn(4, 4)))


@healthy()
def marks() -> Training:
    """What the user marks is finite; the mask that is added after it is not."""

    def score(x: Tensor) -> Tensor:
        rankwatch.detect_overflow(x, "scores")
        return (x + torch.full((4, 4), -float("inf")).triu(1)).softmax(-1)

    return trained(chain(nn.Linear(4, 4), Calls(score), nn.Linear(4, 4)))


@healthy(forwards=-1)
def batches_that_are_skipped() -> Training:
    """The user looks at the loss, and does not learn from a bad one."""
    model = chain()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step(number: int) -> float:
        known = labels(number % 20 == 7)
        loss = nn.functional.cross_entropy(model(torch.randn(4, 4)), known)
        if not torch.isfinite(loss):
            return 0.0
        learn(loss, optimizer)
        return float(loss)

    return Training(model, step)


@healthy(forwards=-1)
def forwards_that_raise() -> Training:
    """The loop catches an error of the model and repeats the batch, as after too little memory."""
    model = chain()

    def before(number: int) -> None:
        if number % 20 == 7:
            with suppress(RuntimeError):
                model(torch.randn(4, 3))

    return trained(model, before=before)


# --- numbers that go up and down ---------------------------------------------------------------------------------------


@healthy(batches=LONG)
def clipping() -> Training:
    model = chain()
    return trained(
        model,
        lambda n: model(torch.randn(4, 4) * (30 if n % 50 == 49 else 1)).square().mean(),
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3),
        between=lambda n: nn.utils.clip_grad_norm_(model.parameters(), 1.0),
    )


@healthy(batches=LONG)
def a_warm_up() -> Training:
    """The learning rate and the norms of the activations grow."""
    model = chain(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 100))
    weight = torch.randn(4, 4) * 30

    def loss_of(number: int) -> Tensor:
        x = torch.randn(16, 4)
        return nn.functional.mse_loss(model(x), x @ weight)

    return trained(model, loss_of, optimizer=optimizer, after=lambda n: schedule.step())


@healthy(batches=LONG)
def rewards_with_spikes() -> Training:
    """Policy gradients: the loss changes its sign and its size, by 1e5 at times."""
    policy = chain(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 3))

    def loss_of(number: int) -> Any:
        choice = torch.distributions.Categorical(logits=policy(torch.randn(8, 4)))
        action = choice.sample()
        reward = torch.randn(8) * 10.0 ** (5 if number % 40 == 39 else int(torch.randint(0, 3, ())))
        return -(choice.log_prob(action) * reward).mean() - 0.01 * choice.entropy().mean()

    return trained(
        policy,
        loss_of,
        optimizer=torch.optim.Adam(policy.parameters(), lr=1e-3),
        between=lambda n: nn.utils.clip_grad_norm_(policy.parameters(), 0.5),
    )


@healthy(batches=LONG)
def a_bad_sample_now_and_then() -> Training:
    """Outliers x30 in the data, which the loss survives."""
    model = chain(nn.Linear(4, 8), nn.LayerNorm(8), nn.ReLU(), nn.Linear(8, 4))
    return trained(
        model,
        lambda n: nn.functional.smooth_l1_loss(model(torch.randn(4, 4) * (30 if n % 60 == 59 else 1)), torch.zeros(4, 4)),
    )
