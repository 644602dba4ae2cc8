"""A weight or a buffer is bad before the forward that shows it."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from trainings import Root, Training, chain, trained

from .case import BAD, INF, NAN, fed, hostile, put, spoiled

WEIGHT: dict[str, Any] = {"cause": "weight"}


@hostile(module="2", **WEIGHT)
def one_element_in_place() -> Training:
    model = chain()
    return spoiled(model, lambda: put(model[2].weight, NAN, 1, 3))


@hostile(module="2", **WEIGHT, state=("inf", "nan"))
def through_data() -> Training:
    model = chain()

    def spoil() -> None:
        model[2].weight.data[1, 3] = INF

    return spoiled(model, spoil)


@hostile(module="2", **WEIGHT)
def a_new_tensor_as_data() -> Training:
    model = chain()

    def spoil() -> None:
        model[2].weight.data = torch.full((4, 8), NAN)

    return spoiled(model, spoil)


@hostile(module="2", **WEIGHT)
def a_bias() -> Training:
    model = chain()
    return spoiled(model, lambda: put(model[2].bias, NAN, 3))


@hostile(module="0", **WEIGHT, batch=0, says="initialisation")
def from_the_checkpoint() -> Training:
    model = chain()
    put(model[0].weight, NAN, 0, 0)
    return spoiled(model, lambda: None)


@hostile(module="0", **WEIGHT, batch=0)
def a_frozen_one_from_the_checkpoint() -> Training:
    model = chain()
    put(model[0].weight, NAN, 0, 0)
    model[0].weight.requires_grad_(False)
    return spoiled(model, lambda: None)


@hostile(module="0", **WEIGHT, never="last optimizer step")
def a_frozen_one_in_mid_run() -> Training:
    """No step changes it."""
    model = chain()
    model[0].requires_grad_(False)
    return spoiled(model, lambda: put(model[0].weight, NAN, 0, 0))


@hostile(module="0", **WEIGHT, batch=BAD + 1, state=("nan", "inf"))
def a_learning_rate_of_inf() -> Training:
    """A scheduler's bug."""
    model = chain()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: INF if epoch == BAD else 1.0)

    def step(number: int) -> None:
        model(torch.randn(4, 4)).square().mean().backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()

    return Training(model, step)


@hostile(module="", cause="gradient", label="grad_output", says="gradient of the loss")
def a_gradient_of_nan() -> Training:
    """The loss is 0 + sqrt(0): finite, and its gradient is not. The step is not taken."""
    model = chain()

    def loss_of(number: int) -> Any:
        out = model(torch.randn(4, 4))
        return out.square().mean() + ((out * 0).square().sum().sqrt() if number == BAD else 0.0)

    return trained(model, loss_of)


@hostile(module="", cause="gradient", label="grad_output", says="gradient of the loss")
def a_gradient_among_accumulated_ones() -> Training:
    """Batch 5 of 4 to 7 spoils the sum; the step comes after batch 7, and is not taken."""
    model = chain()

    def loss_of(number: int) -> Any:
        out = model(torch.randn(4, 4))
        return out.square().mean() + ((out * 0).square().sum().sqrt() if number == BAD else 0.0)

    return trained(model, loss_of, accumulate=4, lr=0.1)


@hostile(module="0", **WEIGHT, batch=1)
def adam_without_an_epsilon() -> Training:
    """0 / 0 in the first step, for what got no gradient."""
    root = chain(nn.Linear(4, 4))
    optimizer = torch.optim.Adam(root.parameters(), lr=0.01, eps=0.0)

    def step(number: int) -> None:
        x = torch.randn(4, 4)
        x[:, 2] = 0.0
        root(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return Training(root, step)


@hostile(module="table", **WEIGHT, batch=range(BAD, 30), batches=30)
def a_row_that_is_seldom_read() -> Training:
    model = Root(lambda root, tokens: root.head(root.table(tokens)), table=nn.Embedding(50, 4), head=nn.Linear(4, 4))

    def loss_of(number: int) -> Tensor:
        loss: Tensor = model(torch.randint(40, (4, 3)) if number < 28 else torch.tensor([[45]])).square().mean()
        return loss

    return trained(model, loss_of, before=lambda n: put(model.table.weight, NAN, 45, 1) if n == BAD else None)


@hostile(module=("", "table"), **WEIGHT)
def a_tied_head() -> Training:
    """F.linear(x, table.weight) in the root's forward; the bad row is not among the tokens."""

    def forward(root: Root, tokens: Tensor) -> Tensor:
        return nn.functional.linear(root.norm(root.table(tokens)), root.table.weight)

    model = Root(forward, table=nn.Embedding(50, 4), norm=nn.LayerNorm(4))
    return trained(
        model,
        lambda n: model(torch.randint(40, (4, 3))).square().mean(),
        before=lambda n: put(model.table.weight, NAN, 45, 1) if n == BAD else None,
    )


class Patches(nn.Module):
    """As in a vision transformer: the position embeddings are the container's own."""

    def __init__(self) -> None:
        super().__init__()
        self.position_embeddings = nn.Parameter(torch.zeros(5, 4))
        self.projection, self.dropout = nn.Linear(4, 4), nn.Dropout(0.0)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.dropout(self.projection(x) + self.position_embeddings)
        return out


@hostile(module=("embeddings", "embeddings.dropout"), **WEIGHT, says="position_embeddings")
def the_parameter_of_an_enclosing_module() -> Training:
    model = Root(lambda root, x: root.head(root.embeddings(x)), embeddings=Patches(), head=nn.Linear(4, 4))
    return spoiled(model, lambda: put(model.embeddings.position_embeddings, NAN, 2, 2), sizes=(2, 5, 4))


@hostile(module=("net.0",), **WEIGHT, says="scale")
def the_parameter_of_the_root() -> Training:
    model = Root(lambda root, x: root.net(x * root.scale), net=chain(), scale=nn.Parameter(torch.ones(4)))
    return spoiled(model, lambda: put(model.scale, NAN, 2))


@hostile(module=("mix",), **WEIGHT)
def in_a_parameter_list() -> Training:
    class Mix(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ParameterList(nn.Parameter(torch.ones(4)) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            for part in self.parts:
                x = x * part
            return x

    model = Root(lambda root, x: root.head(root.mix(x)), mix=Mix(), head=nn.Linear(4, 4))
    return spoiled(model, lambda: put(model.mix.parts[1], NAN, 2))


def attending() -> Root:
    return Root(
        lambda root, x: root.head(root.attention(x, x, x, need_weights=False)[0]),
        attention=nn.MultiheadAttention(8, 2, batch_first=True),
        head=nn.Linear(8, 4),
    )


@hostile(module=("attention", "attention.out_proj"), **WEIGHT, says="out_proj")
def a_projection_that_is_never_called() -> Training:
    """MultiheadAttention uses out_proj's weight, not its forward."""
    model = attending()
    return spoiled(model, lambda: put(model.attention.out_proj.weight, NAN, 2, 2), sizes=(2, 5, 8))


@hostile(module=("attention",), **WEIGHT)
def the_projection_of_the_values() -> Training:
    model = attending()
    return spoiled(model, lambda: put(model.attention.in_proj_weight, NAN, 20, 2), sizes=(2, 5, 8))


@hostile(module=("attention",), **WEIGHT)
def a_query_that_attention_swallows() -> Training:
    """Fused attention on a CPU gives a finite output for a nan query."""
    model = attending()
    return spoiled(model, lambda: put(model.attention.in_proj_weight, NAN, 2, 2), sizes=(2, 5, 8))


@hostile(module=("attention",), **WEIGHT)
def a_bias_that_attention_swallows() -> Training:
    model = attending()
    return spoiled(model, lambda: put(model.attention.in_proj_bias, NAN, 2), sizes=(2, 5, 8))


class Own(nn.Module):
    """Attention with parameters of its own, and the fused function."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Parameter(torch.randn(8, 8) * 0.3) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = ((x @ w).unsqueeze(1) for w in (self.q, self.k, self.v))
        return nn.functional.scaled_dot_product_attention(q, k, v).squeeze(1)


@hostile(module="own", **WEIGHT)
def a_query_weight_in_own_attention() -> Training:
    model = Root(lambda root, x: root.head(root.own(x)), own=Own(), head=nn.Linear(8, 4))
    return spoiled(model, lambda: put(model.own.q, NAN, 2, 2), sizes=(2, 5, 8))


@hostile(module=("0", "0.parametrizations.weight", "0.parametrizations.weight.0"), **WEIGHT, state=("inf", "nan"))
def under_weight_norm() -> Training:
    model = chain(nn.utils.parametrizations.weight_norm(nn.Linear(4, 8)), nn.Linear(8, 4))
    return spoiled(model, lambda: put(model[0].parametrizations.weight.original0, INF, 2, 0))


@hostile(module=("0", "0.parametrizations.weight", "0.parametrizations.weight.0"), **WEIGHT)
def under_spectral_norm() -> Training:
    model = chain(nn.utils.parametrizations.spectral_norm(nn.Linear(4, 8)), nn.Linear(8, 4))
    return spoiled(model, lambda: put(model[0].parametrizations.weight.original, NAN, 2, 0))


@hostile(module="0", **WEIGHT, state=("inf", "nan"))
def under_the_old_weight_norm() -> Training:
    model = chain(nn.utils.weight_norm(nn.Linear(4, 8)), nn.Linear(8, 4))
    return spoiled(model, lambda: put(model[0].weight_g, NAN, 2, 0))


@hostile(module="1", **WEIGHT, state=("inf", "nan"))
def a_running_mean() -> Training:
    """A frozen BatchNorm in a model that trains."""
    model = chain(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))
    model[1].eval()
    return spoiled(model, lambda: put(model[1].running_mean, INF, 2))


@hostile(notice="running_var", batches=60)
def a_running_variance_after_large_data() -> Training:
    """1e25 squared: the training goes on, and every evaluation after it is wrong."""
    return fed(chain(nn.BatchNorm1d(4), nn.Linear(4, 4)), lambda x: x.mul_(1e25))


@hostile(module=("rotary", "head"), **WEIGHT)
def a_table_of_positions() -> Training:
    """A buffer that is in no checkpoint."""

    class Rotary(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("table", torch.ones(4), persistent=False)

        def forward(self, x: Tensor) -> Tensor:
            return x * self.get_buffer("table")

    model = Root(lambda root, x: root.head(root.rotary(x)), rotary=Rotary(), head=nn.Linear(4, 4))
    return spoiled(model, lambda: put(model.rotary.table, NAN, 2))


@hostile(module="0", **WEIGHT, batch=BAD + 1, state=("inf", "nan"), never="no optimizer step")
def a_master_weight() -> Training:
    """The optimizer has float32 copies; 1e5 does not fit into the model's float16."""
    model = chain().half()
    masters = [p.detach().clone().float().requires_grad_() for p in model.parameters()]
    optimizer = torch.optim.SGD(masters, lr=0.01)

    def step(number: int) -> None:
        model(torch.randn(4, 4).half()).float().square().mean().backward()
        for parameter, master in zip(model.parameters(), masters, strict=True):
            master.grad = parameter.grad.float()
            parameter.grad = None
        optimizer.step()
        with torch.no_grad():
            if number == BAD:
                masters[0][1, 1] = 1e5
            for parameter, master in zip(model.parameters(), masters, strict=True):
                parameter.copy_(master)

    return Training(model, step)


@hostile(module=("target.0",), **WEIGHT)
def a_target_network() -> Training:
    """The moving average of another network, in the same root."""
    net = chain()
    model = Root(
        lambda root, x: root.net(x) - root.target(x).detach(), net=net, target=copy.deepcopy(net).requires_grad_(False)
    )
    optimizer = torch.optim.SGD(model.net.parameters(), lr=0.01)

    def step(number: int) -> None:
        if number == BAD:
            put(model.target[0].weight, NAN, 1, 1)
        (model(torch.randn(4, 4)) + 1).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for own, other in zip(model.target.parameters(), model.net.parameters(), strict=True):
                own.lerp_(other, 0.1)

    return Training(model, step)


@hostile(module="lstm", **WEIGHT)
def in_an_lstm() -> Training:
    model = Root(lambda root, x: root.head(root.lstm(x)[0]), lstm=nn.LSTM(4, 6, 2), head=nn.Linear(6, 4))
    return spoiled(model, lambda: put(model.lstm.weight_hh_l1, NAN, 1, 1), sizes=(5, 2, 4))


@hostile(module=("gate", "norm"), **WEIGHT)
def a_norm() -> Training:
    model = Root(lambda root, x: root.head(root.norm(x)), norm=nn.LayerNorm(4), head=nn.Linear(4, 4))
    return spoiled(model, lambda: put(model.norm.weight, NAN, 1))


@hostile(module="0", **WEIGHT, state="inf")
def an_infinite_one() -> Training:
    model = chain(nn.Linear(4, 4), nn.ReLU())
    return fed(model, lambda x: put(model[0].bias, INF, 1))


@hostile(module="adapted", **WEIGHT, says="lora_b")
def an_adapter() -> Training:
    """Low-rank matrices as parameters of the module that uses them."""

    class Adapted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.base = nn.Linear(4, 4).requires_grad_(False)
            self.lora_a, self.lora_b = nn.Parameter(torch.randn(2, 4)), nn.Parameter(torch.zeros(4, 2))

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.base(x) + x @ self.lora_a.T @ self.lora_b.T
            return out

    model = Root(lambda root, x: root.adapted(x), adapted=Adapted())
    return spoiled(model, lambda: put(model.adapted.lora_b, NAN, 1, 1))


@hostile(module=("experts.2",), **WEIGHT, batch=(BAD, 7))
def an_expert_that_is_seldom_used() -> Training:
    """Bad since batch 5, called in batch 7."""
    model = Root(lambda root, x, which: root.experts[which](x), experts=nn.ModuleList(nn.Linear(4, 4) for _ in range(3)))
    return trained(
        model,
        lambda n: model(torch.randn(4, 4), 2 if n in (1, 7) else n % 2).square().mean(),
        before=lambda n: put(model.experts[2].weight, NAN, 1, 1) if n == BAD else None,
    )


@hostile(module="1", **WEIGHT)
def a_weight_that_is_called_with_functional() -> Training:
    """torch.func.functional_call with a bad tensor for one parameter."""
    model = chain(nn.Linear(4, 4), nn.Linear(4, 4))

    def loss_of(number: int) -> Tensor:
        given = dict(model.named_parameters())
        if number == BAD:
            given["1.weight"] = given["1.weight"] * NAN
        loss: Tensor = torch.func.functional_call(model, given, (torch.randn(4, 4),)).square().mean()
        return loss

    return trained(model, loss_of)


@hostile(module=("first",), **WEIGHT, says="weight")
def a_weight_whose_output_is_hidden() -> Training:
    """The first module's output is clamped and cleaned at once."""
    model = Root(
        lambda root, x: root.head(root.first(x).nan_to_num().clamp(-1, 1)), first=nn.Linear(4, 4), head=nn.Linear(4, 4)
    )
    return spoiled(model, lambda: put(model.first.weight, NAN, 1, 1))


@hostile(module=("functional", "head"), **WEIGHT, says="hidden")
def a_parameter_of_a_module_that_is_never_called() -> Training:
    """The parent computes with a child's weight."""

    class Functional(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.hidden = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.linear(x, self.hidden.weight, self.hidden.bias)

    model = Root(lambda root, x: root.head(root.functional(x)), functional=Functional(), head=nn.Linear(4, 4))
    return spoiled(model, lambda: put(model.functional.hidden.weight, NAN, 1, 1))


@hostile(module="1", cause="overflow", state="inf", never="weight was already")
def a_huge_but_finite_weight() -> Training:
    """A flipped exponent bit."""
    model = chain(nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 4))

    def spoil() -> None:
        put(model[1].weight, 3e38, 1, 1)
        put(model[0].bias, 100.0, 1)

    return spoiled(model, spoil)
