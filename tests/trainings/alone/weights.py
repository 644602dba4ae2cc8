"""A weight or a buffer is bad before the forward that shows it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from trainings.case import Training
from trainings.parts import BAD, INF, NAN, Coder, Root, Square, chain, fed, headed, put, spoiled, squared, trained
from trainings.truths import hostile


def poisoned(model: Any, name: str, *where: int, value: float = NAN, **options: Any) -> Training:
    """One element of a parameter or a buffer turns bad before one batch."""

    def spoil() -> None:
        put({**dict(model.named_parameters()), **dict(model.named_buffers())}[name], value, *where)

    return spoiled(model, spoil, **options)


def replaced() -> Training:
    model = chain()
    return spoiled(model, lambda: setattr(model[2].weight, "data", torch.full((4, 8), NAN)))


hostile("2", "weight").each(
    one_element_in_place=lambda: poisoned(chain(), "2.weight", 1, 3),
    a_bias=lambda: poisoned(chain(), "2.bias", 3),
    a_new_tensor_as_data=replaced,
)


@hostile("2", "weight", ("inf", "nan"))
def through_data() -> Training:
    model = chain()
    return spoiled(model, lambda: model[2].weight.data[1, 3].fill_(INF))


def from_a_file(is_trained: bool = True) -> Training:
    """The weight is bad from the beginning."""
    model = chain()
    put(model[0].weight, NAN, 0, 0)
    model[0].weight.requires_grad_(is_trained)
    return trained(model)


hostile("0", "weight", batch=0, says="initialisation").each(from_the_checkpoint=from_a_file)
hostile("0", "weight", batch=0).each(a_frozen_one_from_the_checkpoint=lambda: from_a_file(False))


@hostile("0", "weight", never="last optimizer step")
def a_frozen_one_in_mid_run() -> Training:
    """No step changes it."""
    model = chain()
    model[0].requires_grad_(False)
    return poisoned(model, "0.weight", 0, 0)


@hostile("0", "weight", "inf")
def an_infinite_one() -> Training:
    return poisoned(chain(nn.Linear(4, 4), nn.ReLU()), "0.bias", 1, value=INF)


@hostile("1", "weight")
def a_weight_that_is_called_with_functional() -> Training:
    """torch.func.functional_call with a bad tensor for one parameter."""
    model = chain(nn.Linear(4, 4), nn.Linear(4, 4))

    def loss_of(number: int) -> Any:
        given = dict(model.named_parameters())
        if number == BAD:
            given["1.weight"] = given["1.weight"] * NAN
        return torch.func.functional_call(model, given, (torch.randn(4, 4),)).square().mean()

    return trained(model, loss_of)


@hostile(
    "1", "weight", "inf", batch=11, says="the training computed it", never="no optimizer that was seen to step holds it"
)
def a_fast_weight_of_an_inner_loop() -> Training:
    """The inner loop of one task diverges, and its weights are used in the second forward of the step."""
    model = chain(nn.Linear(4, 4), nn.Linear(4, 4))

    def loss_of(number: int) -> Any:
        fast = dict(model.named_parameters())
        gradient = torch.autograd.grad(model(torch.randn(4, 4)).square().sum(), fast["1.weight"], create_graph=True)[0]
        fast["1.weight"] = fast["1.weight"] - (1e30 if number == BAD else 0.1) * gradient * (gradient.abs() + 1) * 1e10
        return torch.func.functional_call(model, fast, (torch.randn(4, 4),)).square().mean()

    return trained(model, loss_of, lr=0.0)


@hostile("decoder.2", "weight")
def a_weight_of_decode() -> Training:
    """The root is never called."""
    model = Coder()
    return poisoned(model, "decoder.2.weight", 1, 1, loss_of=squared(model.coded))


@hostile(
    "2", "weight", ("inf", "nan"), batch=0, says="weight of 1 (LayerNorm) holds 1.18e32 before any optimizer step was seen"
)
def a_weight_that_was_never_initialised() -> Training:
    """The module after it overflows."""
    model = chain(nn.Linear(4, 4), nn.LayerNorm(4), Square())
    put(model[1].weight, 1.18e32, 2)
    return trained(model)


# --- the optimizer's ---------------------------------------------------------------------------------------------------


@hostile("0", "weight", ("nan", "inf"), batch=BAD + 1, says=("the step of SGD made it so; its lr was inf",))
def a_learning_rate_of_inf() -> Training:
    """A scheduler's bug."""
    model = chain()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: INF if epoch == BAD else 1.0)
    return trained(model, optimizer=optimizer, after=lambda n: schedule.step())


@hostile("0", "weight", batch=1, says="its exp_avg_sq is 0 where the weight is bad, and its eps of 0 is 0 in float32")
def adam_without_an_epsilon() -> Training:
    """0 / 0 in the first step, for what got no gradient."""
    model = chain(nn.Linear(4, 4))

    def loss_of(number: int) -> Any:
        x = torch.randn(4, 4)
        x[:, 2] = 0.0
        return model(x).square().mean()

    return trained(model, loss_of, optimizer=torch.optim.Adam(model.parameters(), lr=0.01, eps=0.0))


@hostile("0", "weight", ("inf", "nan"), batch=1, says=("the step of AdamW made it so", "its eps of 1e-08 is 0 in float16"))
def an_epsilon_that_float16_does_not_have() -> Training:
    """The squares of small gradients are 0 in float16."""
    model = chain(nn.Linear(4, 4)).half()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return trained(model, lambda n: model(torch.randn(4, 4).half()).float().square().mean() * 1e-3, optimizer=optimizer)


class Factored(torch.optim.Optimizer):
    """As Adafactor: two epsilons, of which the first one is added to squares."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in [one for one in group["params"] if one.grad is not None]:
                squares = parameter.grad.square() + group["eps"][0]
                mean = self.state[parameter].setdefault("exp_avg_sq", torch.zeros_like(squares)).lerp_(squares, 0.1)
                parameter.data.sub_(parameter.grad * mean.rsqrt(), alpha=group["lr"])


@hostile("0", "weight", batch=1, says=("the step of Factored made it so", "its eps of 1e-30 is 0 in float16"))
def two_epsilons_that_float16_does_not_have() -> Training:
    model = chain(nn.Linear(4, 4)).half()
    optimizer = Factored(model.parameters(), {"lr": 0.01, "eps": (1e-30, 1e-3)})
    return trained(model, lambda n: model(torch.randn(4, 4).half())[:, :2].float().mean(), optimizer=optimizer)


@hostile("0", "weight", ("inf", "nan"), batch=BAD + 1, says="the step of Adam made it so; its exp_avg is ")
def a_state_that_was_loaded() -> Training:
    """As from a checkpoint that was written in a narrower dtype."""
    model = chain()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

    def between(number: int) -> None:
        if number == BAD:
            optimizer.state[model[0].weight]["exp_avg"][1, 1] = INF

    return trained(model, optimizer=optimizer, between=between)


@hostile("0", "weight", batch=9, says="its exp_avg_sq is inf, since the step of batch 3 or one up to batch 6")
def a_state_that_was_inf_long_before() -> Training:
    """What is divided by inf is 0, until it is inf as well."""
    model = chain()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

    def between(number: int) -> None:
        if number in (4, 8):
            optimizer.state[model[0].weight]["exp_avg_sq" if number == 4 else "exp_avg"].fill_(INF)

    return trained(model, optimizer=optimizer, between=between)


@hostile(
    "0", "weight", batch=1, says="its exp_avg_sq is nan, and was so before the step of batch 0, when it was first looked at"
)
def a_state_that_was_bad_from_the_start() -> Training:
    model = chain()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, amsgrad=False)
    for parameter in model.parameters():
        state = {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
        optimizer.state[parameter] = {"step": torch.tensor(0.0), **state}
    optimizer.state[model[0].weight]["exp_avg_sq"].fill_(NAN)
    return trained(model, optimizer=optimizer)


@hostile("first", "weight", "inf", says="it was float32 before and is float16 now: the conversion made it so")
def a_weight_that_is_converted() -> Training:
    model = Root(
        lambda root, x: root.head(root.first(x.to(root.first.weight.dtype)).float()),
        first=nn.Linear(4, 4),
        head=nn.Identity(),
    )
    model.first.weight.data[1, 1] = 1e5
    return spoiled(model, lambda: model.first.half(), lr=0.0)


@hostile("0", "weight", says="its optimizer has not stepped since batch 3: other code wrote to it")
def a_weight_between_two_micro_batches() -> Training:
    """Batches 4 and 5 are of one step."""
    return poisoned(chain(), "0.weight", 1, 1, accumulate=2)


class Deaf(torch.optim.Optimizer):
    """It tells the scaler that it looks at ``found_inf`` itself, and does not."""

    _step_supports_amp_scaling = True

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.01})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for parameter in self.param_groups[0]["params"]:
            parameter -= 0.01 * parameter.grad / self.grad_scale  # type: ignore[attr-defined]


@hostile("0", "weight", ("inf", "nan"), batch=BAD + 1, says="the scaler had set found_inf, and Deaf took the step")
def an_optimizer_that_ignores_the_scaler() -> Training:
    model = chain()
    optimizer = Deaf(model.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)

    def loss_of(number: int) -> Any:
        out = model(torch.randn(4, 4))
        return out.square().mean() + ((out * 0).square().sum().sqrt() if number == BAD else 0.0)

    return trained(model, loss_of, optimizer=optimizer, scaler=scaler)


def merged(write: Callable[[nn.Parameter], object], make: Any = torch.optim.SGD, **options: Any) -> Training:
    """Code writes to a weight after the step of batch BAD."""
    model = chain()
    optimizer = make(model.parameters(), 0.01, **options)

    def step(number: int) -> None:
        loss = model(torch.randn(4, 4)).square().mean()
        optimizer.zero_grad()  # until now, the gradients of the last step tell how far that went
        loss.backward()
        optimizer.step()
        if number == BAD:
            write(model[0].weight)

    return Training(model, step)


hostile("0", "weight", ("inf", "nan"), batch=BAD + 1, says=("the step of SGD changes it by", "other code wrote to it")).each(
    a_merge_that_overflows=lambda: merged(
        lambda weight: weight.data.add_(1e30 * (torch.rand(8, 1) @ torch.rand(1, 4)) * 1e30)
    ),
    a_norm_of_zero=lambda: merged(lambda weight: weight.data.div_(torch.zeros(8, 1)), momentum=0.9),
)


class UnitRows(nn.Module):
    """A forward that normalises its weight in place, as heads of face recognition do."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))
        self.pruned = False

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            if self.pruned:
                self.weight[1] = 0.0
            self.weight.div_(self.weight.norm(dim=1, keepdim=True))
        return x @ self.weight.T


def rows_of_length_0(make: Any) -> Training:
    model = chain(nn.Linear(4, 4), UnitRows(), nn.Linear(4, 2))

    def between(number: int) -> None:
        model[1].pruned = number == BAD

    return trained(model, optimizer=make(model.parameters(), 0.01), between=between)


hostile("1", "weight", batch=BAD + 1, says="the step of SGD made it so, or code that wrote to it afterwards").each(
    a_forward_that_divides_its_weight_by_0=lambda: rows_of_length_0(torch.optim.SGD),  # whose gradients are gone by then
)
hostile("1", "weight", batch=BAD + 1, says="changes it by 0.1 at most: other code wrote to it").each(
    a_forward_that_divides_its_weight_by_0_beside_adam=lambda: rows_of_length_0(torch.optim.NAdam),
)
hostile("0", "weight", ("inf", "nan"), batch=BAD + 1, says="the step of AdamW changes it by 0.1 at most: other code").each(
    a_norm_of_zero_beside_adamw=lambda: merged(lambda weight: weight.data.div_(torch.zeros(8, 1)), torch.optim.AdamW),
)


@hostile("0", "weight", ("inf", "nan"), batch=BAD + 1, never="no optimizer step")
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


# --- seldom read, shared -----------------------------------------------------------------------------------------------


@hostile("table", "weight", batch=range(BAD, 30), batches=30)
def a_row_that_is_seldom_read() -> Training:
    model = headed(lambda root, tokens: root.head(root.table(tokens)), table=nn.Embedding(50, 4))

    def loss_of(number: int) -> Any:
        return model(torch.randint(40, (4, 3)) if number < 28 else torch.tensor([[45]])).square().mean()

    return poisoned(model, "table.weight", 45, 1, loss_of=loss_of)


@hostile(("", "table"), "weight")
def a_tied_head() -> Training:
    """F.linear(x, table.weight) in the root's forward; the bad row is not among the tokens."""
    model = Root(
        lambda root, tokens: nn.functional.linear(root.norm(root.table(tokens)), root.table.weight),
        table=nn.Embedding(50, 4),
        norm=nn.LayerNorm(4),
    )
    return poisoned(model, "table.weight", 45, 1, loss_of=lambda n: model(torch.randint(40, (4, 3))).square().mean())


@hostile(("table", "head"), "weight")
def one_weight_with_two_names() -> Training:
    table, norm, head = nn.Embedding(9, 4), nn.LayerNorm(4), nn.Linear(4, 9)
    model = Root(lambda root, t: root.head(root.norm(root.table(t))), table=table, norm=norm, head=head)
    head.weight = table.weight
    return poisoned(model, "table.weight", 4, 1, loss_of=lambda n: model(torch.randint(9, (3, 5))).square().mean())


@hostile("experts.2", "weight", batch=(BAD, 7))
def an_expert_that_is_seldom_used() -> Training:
    """Bad since batch 5, called in batch 7."""
    model = Root(lambda root, x, which: root.experts[which](x), experts=nn.ModuleList(nn.Linear(4, 4) for _ in range(3)))

    def loss_of(number: int) -> Any:
        return model(torch.randn(4, 4), 2 if number in (1, 7) else number % 2).square().mean()

    return poisoned(model, "experts.2.weight", 1, 1, loss_of=loss_of)


@hostile(("teacher", "teacher.0"), "weight")
def a_teacher_without_gradients() -> Training:
    def forward(root: Root, x: Tensor) -> Tensor:
        with torch.no_grad():
            aim = root.teacher(x)
        return torch.as_tensor(root.net(x) - aim)

    model = Root(forward, net=chain(), teacher=chain().requires_grad_(False))
    return poisoned(model, "teacher.0.weight", 1, 1)


@hostile("target.0", "weight")
def a_target_network() -> Training:
    """The moving average of another network, in the same root."""
    net = chain()
    target = copy.deepcopy(net).requires_grad_(False)
    model = Root(lambda root, x: root.net(x) - root.target(x).detach() + 1, net=net, target=target)

    def after(number: int) -> None:
        with torch.no_grad():
            for own, other in zip(target.parameters(), net.parameters(), strict=True):
                own.lerp_(other, 0.1)

    return poisoned(model, "target.0.weight", 1, 1, after=after)


# --- of modules --------------------------------------------------------------------------------------------------------


@hostile(("embeddings", "embeddings.dropout"), "weight", says="position_embeddings")
def the_parameter_of_an_enclosing_module() -> Training:
    """As in a vision transformer: the position embeddings are the container's own."""
    embeddings = Root(
        lambda own, x: own.dropout(own.projection(x) + own.position_embeddings),
        position_embeddings=nn.Parameter(torch.zeros(5, 4)),
        projection=nn.Linear(4, 4),
        dropout=nn.Dropout(0.0),
    )
    model = headed(lambda root, x: root.head(root.embeddings(x)), embeddings=embeddings)
    return poisoned(model, "embeddings.position_embeddings", 2, 2, sizes=(2, 5, 4))


def scaling(forward: Callable[..., Any]) -> Training:
    return poisoned(Root(forward, net=chain(), scale=nn.Parameter(torch.ones(4))), "scale", 2)


hostile("net.0", "weight", says="scale").each(
    the_parameter_of_the_root=lambda: scaling(lambda root, x: root.net(x * root.scale)),
)
hostile("", "weight", says="scale").each(
    a_parameter_of_the_root_at_the_end=lambda: scaling(lambda root, x: root.net(x) * root.scale),
)


@hostile("mix", "weight")
def in_a_parameter_list() -> Training:
    def mixed(own: Root, x: Tensor) -> Tensor:
        for part in own.parts:
            x = x * part
        return x

    mix = Root(mixed, parts=nn.ParameterList(nn.Parameter(torch.ones(4)) for _ in range(3)))
    return poisoned(headed(lambda root, x: root.head(root.mix(x)), mix=mix), "mix.parts.1", 2)


def attention(name: str, *where: int) -> Training:
    model = Root(
        lambda root, x: root.head(root.attention(x, x, x, need_weights=False)[0]),
        attention=nn.MultiheadAttention(8, 2, batch_first=True),
        head=nn.Linear(8, 4),
    )
    return poisoned(model, f"attention.{name}", *where, sizes=(2, 5, 8))


# MultiheadAttention uses out_proj's weight, not its forward.
hostile(("attention", "attention.out_proj"), "weight", says="out_proj").each(
    a_projection_that_is_never_called=lambda: attention("out_proj.weight", 2, 2)
)
hostile("attention", "weight").each(
    the_projection_of_the_values=lambda: attention("in_proj_weight", 20, 2),
    # Fused attention on a CPU gives a finite output for a nan query.
    a_query_that_attention_swallows=lambda: attention("in_proj_weight", 2, 2),
    a_bias_that_attention_swallows=lambda: attention("in_proj_bias", 2),
)


@hostile("own", "weight")
def a_query_weight_in_own_attention() -> Training:
    """Attention with parameters of its own, and the fused function."""

    def attend(own: Root, x: Tensor) -> Tensor:
        q, k, v = ((x @ w).unsqueeze(1) for w in (own.q, own.k, own.v))
        return nn.functional.scaled_dot_product_attention(q, k, v).squeeze(1)

    own = Root(attend, **{name: nn.Parameter(torch.randn(8, 8) * 0.3) for name in "qkv"})
    model = Root(lambda root, x: root.head(root.own(x)), own=own, head=nn.Linear(8, 4))
    return poisoned(model, "own.q", 2, 2, sizes=(2, 5, 8))


def normed(norm: Callable[[nn.Module], nn.Module], name: str, value: float) -> Training:
    return poisoned(chain(norm(nn.Linear(4, 8)), nn.Linear(8, 4)), f"0.{name}", 2, 0, value=value)


def without_direction() -> Training:
    """A row of the direction is pruned."""
    model = chain(nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)), nn.Tanh(), nn.Linear(4, 4))
    return spoiled(model, lambda: model[0].parametrizations.weight.original1[1].data.zero_())


PARAMETRIZED = ("0", "0.parametrizations.weight", "0.parametrizations.weight.0")
hostile(PARAMETRIZED, "weight", ("inf", "nan")).each(
    under_weight_norm=lambda: normed(nn.utils.parametrizations.weight_norm, "parametrizations.weight.original0", INF),
)
hostile(PARAMETRIZED, "invalid", says="a row of v is 0").each(
    a_row_that_is_pruned_under_weight_norm=lambda: without_direction(),
)
hostile(PARAMETRIZED, "weight").each(
    under_spectral_norm=lambda: normed(nn.utils.parametrizations.spectral_norm, "parametrizations.weight.original", NAN),
)
hostile("0", "weight", ("inf", "nan")).each(under_the_old_weight_norm=lambda: normed(nn.utils.weight_norm, "weight_g", NAN))


@hostile("1", "weight", ("inf", "nan"))
def a_running_mean() -> Training:
    """A frozen BatchNorm in a model that trains."""
    model = chain(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))
    model[1].eval()
    return poisoned(model, "1.running_mean", 2, value=INF)


@hostile(notice="running_var", batches=60)
def a_running_variance_after_large_data() -> Training:
    """1e25 squared: the training goes on, and every evaluation after it is wrong."""
    return fed(chain(nn.BatchNorm1d(4), nn.Linear(4, 4)), lambda x: x.mul_(1e25))


@hostile(("rotary", "head"), "weight")
def a_table_of_positions() -> Training:
    """A buffer that is in no checkpoint."""
    rotary = Root(lambda own, x: x * own.table)
    rotary.register_buffer("table", torch.ones(4), persistent=False)
    return poisoned(headed(lambda root, x: root.head(root.rotary(x)), rotary=rotary), "rotary.table", 2)


@hostile("table", "weight", says="running")
def a_buffer_of_a_quantiser() -> Training:
    """A code book that is kept as a moving average."""

    def quantised(own: Root, x: Tensor) -> Tensor:
        out: Tensor = x + own.running
        with torch.no_grad():
            own.running.lerp_(x.mean(0), 0.1)
        return out

    table = Root(quantised)
    table.register_buffer("running", torch.zeros(4))
    model = headed(lambda root, x: root.head(root.table(x)), table=table)
    return spoiled(model, lambda: table.running.fill_(NAN))


@hostile("lstm", "weight")
def in_an_lstm() -> Training:
    model = Root(lambda root, x: root.head(root.lstm(x)[0]), lstm=nn.LSTM(4, 6, 2), head=nn.Linear(6, 4))
    return poisoned(model, "lstm.weight_hh_l1", 1, 1, sizes=(5, 2, 4))


@hostile(("gate", "norm"), "weight")
def a_norm() -> Training:
    return poisoned(headed(lambda root, x: root.head(root.norm(x)), norm=nn.LayerNorm(4)), "norm.weight", 1)


@hostile("adapted", "weight", says="lora_b")
def an_adapter() -> Training:
    """Low-rank matrices as parameters of the module that uses them."""
    adapted = Root(
        lambda own, x: own.base(x) + x @ own.lora_a.T @ own.lora_b.T,
        base=nn.Linear(4, 4).requires_grad_(False),
        lora_a=nn.Parameter(torch.randn(2, 4)),
        lora_b=nn.Parameter(torch.zeros(4, 2)),
    )
    return poisoned(Root(lambda root, x: root.adapted(x), adapted=adapted), "adapted.lora_b", 1, 1)


@hostile("first", "weight", says="weight")
def a_weight_whose_output_is_hidden() -> Training:
    """The first module's output is clamped and cleaned at once."""
    model = headed(lambda root, x: root.head(root.first(x).nan_to_num().clamp(-1, 1)), first=nn.Linear(4, 4))
    return poisoned(model, "first.weight", 1, 1)


@hostile(("functional", "head"), "weight", says="hidden")
def a_parameter_of_a_module_that_is_never_called() -> Training:
    """The parent computes with a child's weight."""
    functional = Root(lambda own, x: nn.functional.linear(x, own.hidden.weight, own.hidden.bias), hidden=nn.Linear(4, 4))
    model = headed(lambda root, x: root.head(root.functional(x)), functional=functional)
    return poisoned(model, "functional.hidden.weight", 1, 1)
