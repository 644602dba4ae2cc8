"""Healthy: architectures and layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from models import Calls
from trainings.case import Training
from trainings.parts import INF, NAN, Root, chain, headed, squared, trained
from trainings.truths import LONG, healthy


def causal(length: int) -> Tensor:
    return torch.full((length, length), -INF).triu(1)


def encoder(**options: Any) -> nn.TransformerEncoder:
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True, **options)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


# --- masks ------------------------------------------------------------------------------------------------------------


@healthy()
def an_additive_mask() -> Training:
    """-inf in a root input and in each layer's."""
    model = encoder()
    return trained(model, lambda n: model(torch.randn(2, 5, 8), mask=causal(5)).square().mean())


@healthy()
def an_additive_mask_by_position() -> Training:
    model = encoder(norm_first=True)
    return trained(model, lambda n: model(torch.randn(2, 5, 8), causal(5)).square().mean())


@healthy()
def a_mask_of_booleans() -> Training:
    model = encoder()
    mask = torch.ones(5, 5, dtype=torch.bool).triu(1)
    return trained(model, lambda n: model(torch.randn(2, 5, 8), mask=mask).square().mean())


@healthy()
def a_mask_of_padding() -> Training:
    model = encoder()

    def loss_of(number: int) -> Any:
        pad = torch.arange(5) >= torch.randint(1, 6, (3,))[:, None]
        return model(torch.randn(3, 5, 8), src_key_padding_mask=pad)[~pad].square().mean()

    return trained(model, loss_of)


@healthy(batches=LONG)
def a_mask_that_comes_now_and_then() -> Training:
    """The first -inf is in batch 50; before it the mask was 0."""
    model = encoder()
    return trained(
        model,
        lambda n: model(torch.randn(2, 5, 8), mask=causal(5) if n >= 50 and n % 3 else torch.zeros(5, 5)).square().mean(),
    )


def attention(attend: Callable[..., Any], **parts: nn.Module) -> Root:
    return Root(lambda own, x, *rest: attend(own, *own.qkv(x).chunk(3, -1), *rest), qkv=nn.Linear(8, 24), **parts)


@healthy()
def a_causal_flag() -> Training:
    def attend(own: Root, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.as_tensor(own.out(nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)))

    model = attention(attend, out=nn.Linear(8, 8))
    return trained(model, squared(model, 2, 5, 8))


@healthy()
def rows_of_nothing_but_padding() -> Training:
    """The attention is nan there inside of a module, which sets these rows to 0."""

    def attend(own: Root, q: Tensor, k: Tensor, v: Tensor, pad: Tensor) -> Tensor:
        scores = (q @ k.transpose(1, 2)).masked_fill(pad[:, None], -1e9)
        empty = pad.all(-1)[:, None, None]
        weights = scores.masked_fill(pad[:, None] & ~empty, -INF).softmax(-1)
        return (weights @ v).masked_fill(empty, 0.0)

    model = Root(lambda root, x, pad: root.attention(x, pad), attention=attention(attend))

    def loss_of(number: int) -> Any:
        pad = torch.arange(5) >= torch.randint(0, 6, (3, 1))
        return model(torch.randn(3, 5, 8), pad).square().mean()

    return trained(model, loss_of)


@healthy()
def an_infinite_buffer_as_a_mask() -> Training:
    """A causal mask is a buffer of the module, as in nanoGPT without fused attention."""

    def attend(own: Root, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        weights = (q @ k.transpose(1, 2) + own.mask).softmax(-1)
        return torch.as_tensor(weights @ v)

    part = attention(attend)
    part.register_buffer("mask", causal(5))
    model = chain(part, nn.Linear(8, 4))
    return trained(model, squared(model, 2, 5, 8))


@healthy()
def a_frozen_parameter_as_a_mask() -> Training:
    """Classes that do not occur are out: a parameter without a gradient holds 0 and -inf."""
    mask = nn.Parameter(torch.tensor([0.0, 0.0, 0.0, -INF]), requires_grad=False)
    model = headed(lambda own, x: own.head(x) + own.mask, mask=mask)
    return trained(model, lambda number: nn.functional.cross_entropy(model(torch.randn(4, 4)), torch.randint(3, (4,))))


@healthy()
def a_nan_in_the_data_that_the_model_cleans() -> Training:
    """Missing values are nan, and the root replaces them."""
    model = Root(lambda root, x: root.net(x.nan_to_num()), net=chain())

    def loss_of(number: int) -> Any:
        x = torch.randn(4, 4)
        x[torch.rand(4, 4) < 0.2] = NAN
        return model(x).square().mean()

    return trained(model, loss_of)


@healthy()
def infinite_bounds_as_inputs() -> Training:
    """Lower and upper bounds of a clamp, some of them infinite."""
    model = Root(lambda root, x, low, high: root.net(x).clamp(low, high), net=chain())
    low, high = torch.tensor([-INF, -1.0, -INF, 0.0]), torch.tensor([INF, INF, 1.0, 1.0])
    return trained(model, lambda n: model(torch.randn(4, 4), low, high).square().mean())


@healthy()
def a_running_minimum() -> Training:
    """A buffer that begins as inf, as an observer's of quantisation does."""

    def observed(own: Root, x: Tensor) -> Tensor:
        with torch.no_grad():
            own.low.copy_(torch.minimum(own.low, x.min()))
            own.high.copy_(torch.maximum(own.high, x.max()))
        return x

    observer = Root(observed)
    observer.register_buffer("low", torch.tensor(INF))
    observer.register_buffer("high", torch.tensor(-INF))
    return trained(chain(observer, nn.Linear(4, 4)))


# --- architectures ----------------------------------------------------------------------------------------------------


@healthy()
def experts_of_which_some_are_unused() -> Training:
    def forward(root: Root, x: Tensor) -> Tensor:
        best = root.gate(x).argmax(-1)
        out = root.shared(x)
        for index, expert in enumerate(root.experts):
            chosen = best == index
            if chosen.any():
                out = out.index_add(0, chosen.nonzero()[:, 0], expert(x[chosen]))
        return torch.as_tensor(out)

    experts = {
        "gate": nn.Linear(4, 6),
        "shared": nn.Linear(4, 4),
        "experts": nn.ModuleList(nn.Linear(4, 4) for _ in range(6)),
    }
    return trained(Root(forward, **experts))


@healthy()
def experts_with_empty_batches() -> Training:
    """All experts are called, some with no row: their mean would be nan, their sum is 0."""

    def forward(root: Root, x: Tensor) -> Tensor:
        best = root.gate(x).argmax(-1)
        return torch.as_tensor(sum(expert(x[best == index]).sum(0) for index, expert in enumerate(root.experts)))

    return trained(Root(forward, gate=nn.Linear(4, 6), experts=nn.ModuleList(nn.Linear(4, 4) for _ in range(6))))


@healthy()
def an_lstm() -> Training:
    model = Root(lambda root, x: root.head(root.rnn(x)[0]), rnn=nn.LSTM(4, 6, 2, dropout=0.1), head=nn.Linear(6, 2))
    return trained(model, squared(model, 5, 3, 4))


@healthy()
def a_gru_of_packed_sequences() -> Training:
    def forward(root: Root, x: Tensor, lengths: Tensor) -> Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths, enforce_sorted=False)
        out, _ = nn.utils.rnn.pad_packed_sequence(root.rnn(packed)[0])
        return torch.as_tensor(root.head(out))

    model = Root(forward, rnn=nn.GRU(4, 6), head=nn.Linear(6, 2))
    return trained(model, lambda n: model(torch.randn(5, 3, 4), torch.randint(1, 6, (3,))).square().mean())


@healthy()
def batch_norm() -> Training:
    model = chain(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2)
    )
    return trained(model, squared(model, 4, 3, 6, 6))


@healthy()
def frozen_batch_norm() -> Training:
    """In eval mode in a model that trains."""
    model = chain(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))
    model[1].eval()
    return trained(model)


def normed(new: Callable[[nn.Module], nn.Module], old: Callable[[nn.Module], nn.Module]) -> Training:
    return trained(chain(new(nn.Linear(4, 8)), old(nn.Linear(8, 2))))


healthy().each(
    weight_norm=lambda: normed(nn.utils.parametrizations.weight_norm, nn.utils.weight_norm),
    spectral_norm=lambda: normed(nn.utils.parametrizations.spectral_norm, nn.utils.spectral_norm),
)


@healthy()
def embeddings_with_padding() -> Training:
    table = nn.Embedding(20, 4, padding_idx=0)
    model = Root(lambda root, t: root.head(root.table(t).mean(1)), table=table, head=nn.Linear(4, 2))
    return trained(model, lambda n: model(torch.randint(0, 20, (3, 5))).square().mean())


@healthy()
def sparse_gradients() -> Training:
    model = Root(
        lambda root, t: root.table(t) + root.bag(t).unsqueeze(1),
        table=nn.Embedding(20, 4, sparse=True),
        bag=nn.EmbeddingBag(20, 4, sparse=True),
    )
    optimizer = torch.optim.SparseAdam(list(model.parameters()), lr=0.01)
    return trained(model, lambda n: model(torch.randint(0, 20, (3, 5))).square().mean(), optimizer=optimizer)


@healthy()
def integers_only() -> Training:
    model = Root(
        lambda root, a, b: root.head(root.table(a) + nn.functional.one_hot(b, 4)),
        table=nn.Embedding(9, 4),
        head=nn.Linear(4, 2),
    )
    return trained(model, lambda n: model(torch.randint(9, (3, 5)), torch.randint(4, (3, 5))).square().mean())


@healthy()
def jagged_sequences() -> Training:
    model = chain(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))

    def loss_of(number: int) -> Any:
        rows = [torch.randn(int(length), 4) for length in torch.randint(1, 5, (3,))]
        return model(torch.nested.nested_tensor(rows, layout=torch.jagged)).values().square().mean()

    return trained(model, loss_of)


@healthy()
def lengths_that_vary() -> Training:
    model = encoder()
    return trained(model, lambda n: model(torch.randn(1 + n % 3, 1 + n % 7, 8)).square().mean())


@healthy()
def a_fourier_layer() -> Training:
    mix = nn.Linear(3, 3, dtype=torch.cfloat)
    return trained(Root(lambda root, x: root.head(torch.fft.irfft(root.mix(torch.fft.rfft(x)), n=4)), mix=mix, head=chain()))


@healthy()
def a_graph_with_lonely_nodes() -> Training:
    def forward(root: Root, x: Tensor, source: Tensor, target: Tensor) -> Tensor:
        total = torch.zeros_like(x).index_add(0, target, root.message(x)[source])
        degree = torch.bincount(target, minlength=len(x)).clamp(min=1)
        highest = torch.full_like(x, -INF).index_reduce(0, target, x[source], "amax")
        return torch.as_tensor(root.head(total / degree[:, None] + highest.masked_fill(highest == -INF, 0.0)))

    model = Root(forward, message=nn.Linear(4, 4), head=nn.Linear(4, 2))
    return trained(model, lambda n: model(torch.randn(6, 4), torch.randint(6, (8,)), torch.randint(4, (8,))).square().mean())


@healthy()
def a_variational_autoencoder() -> Training:
    def forward(root: Root, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mean, log_variance = root.encoder(x).chunk(2, -1)
        return root.decoder(mean + torch.randn_like(mean) * (log_variance / 2).exp()), mean, log_variance

    model = Root(forward, encoder=nn.Linear(4, 4), decoder=nn.Linear(2, 4))

    def loss_of(number: int) -> Any:
        x = torch.randn(8, 4)
        out, mean, log_variance = model(x)
        divergence = (mean.square() + log_variance.exp() - 1 - log_variance).sum(-1).mean() / 2
        return divergence + nn.functional.mse_loss(out, x)

    return trained(model, loss_of)


@healthy()
def diffusion() -> Training:
    """Noise of many sizes is predicted; the first step's signal-to-noise ratio is large."""
    net = chain(nn.Linear(5, 16), nn.SiLU(), nn.Linear(16, 4))
    model = Root(lambda root, x, t: root.net(torch.cat([x, t], -1)), net=net)
    kept = torch.cumprod(1 - torch.linspace(1e-4, 0.05, 100), 0)

    def loss_of(number: int) -> Any:
        x, noise, t = torch.randn(8, 4), torch.randn(8, 4), torch.randint(100, (8,))
        a = kept[t, None]
        guess = model(a.sqrt() * x + (1 - a).sqrt() * noise, t[:, None] / 100)
        weight = (a / (1 - a)).clamp(max=1e4)
        return (weight * (guess - noise).square()).mean() * 1e-4

    return trained(model, loss_of)


@healthy()
def contrastive_pairs() -> Training:
    """Logits of a hundred and more, and a learned temperature."""

    def forward(root: Root, a: Tensor, b: Tensor) -> Any:
        left, right = (nn.functional.normalize(part, dim=-1) for part in (root.left(a), root.right(b)))
        return root.scale.exp() * left @ right.T

    model = Root(forward, left=nn.Linear(4, 8), right=nn.Linear(4, 8), scale=nn.Parameter(torch.tensor(4.6)))

    def loss_of(number: int) -> Tensor:
        x, which = torch.randn(6, 4), torch.arange(6)
        logits = model(x, x + 0.1 * torch.randn(6, 4)) * 10
        return nn.functional.cross_entropy(logits, which) + nn.functional.cross_entropy(logits.T, which)

    return trained(model, loss_of)


@healthy()
def connectionist_temporal_classification() -> Training:
    """Some targets are longer than what can be read from the input: their loss is inf, and is set to 0."""
    model = nn.Linear(4, 6)
    loss_of_ctc = nn.CTCLoss(zero_infinity=True)

    def loss_of(number: int) -> Any:
        steps = torch.randint(2, 9, (3,))
        targets, lengths = torch.randint(1, 6, (3, 5)), torch.randint(1, 6, (3,))
        return loss_of_ctc(model(torch.randn(8, 3, 4)).log_softmax(-1), targets, steps, lengths)

    return trained(model, loss_of)


@healthy()
def a_mixture_with_impossible_parts() -> Training:
    """Log probabilities of -inf inside of the loss; its sum is finite."""
    model = chain()
    possible = torch.tensor([0.0, 0.0, -INF, 0.0])
    return trained(
        model, lambda n: -(model(torch.randn(4, 4)) + possible).log_softmax(-1)[:, [0, 1, 3]].logsumexp(-1).mean()
    )


@healthy()
def a_skipped_layer() -> Training:
    """Stochastic depth."""

    def forward(root: Root, x: Tensor) -> Tensor:
        for layer in root.layers:
            if torch.rand(()) > 0.3:
                x = x + layer(x) / 4
        return torch.as_tensor(root.head(x))

    return trained(Root(forward, layers=nn.ModuleList(nn.Linear(4, 4) for _ in range(4)), head=nn.Linear(4, 2)))


@healthy()
def in_place_operations() -> Training:
    """Outputs are changed in their own memory, by the next module and by the root."""

    def forward(root: Root, x: Tensor) -> Tensor:
        out = root.first(x).add_(1.0).mul_(0.5)
        out = root.act(out)
        out[:, 0] = 0.0
        out += x.sum(-1, keepdim=True)
        return torch.as_tensor(root.head(out.clone().clamp_(-2, 2)))

    return trained(Root(forward, first=nn.Linear(4, 4), act=Calls(lambda x: x.mul_(0.9)), head=nn.Linear(4, 2)))


@healthy()
def outputs_without_elements() -> Training:
    """Some modules return None, text, an empty tensor, or whole numbers."""
    model = Root(
        lambda root, x: {"y": root.net(x), "empty": root.empty(x), "rest": root.rest(x)},
        net=chain(),
        empty=Calls(lambda x: x[:0]),
        rest=Calls(lambda x: (None, "text", x.argmax(-1), x > 0)),
    )
    return trained(model, lambda n: model(torch.randn(4, 4))["y"].square().mean())


@healthy()
def uninitialised_memory() -> Training:
    """A module hands out a fresh buffer whose unused part may hold anything, and the root reads only what was written."""
    part = Calls(lambda x: torch.cat([x, x * 1e30], -1))
    return trained(Root(lambda root, x: root.head(root.part(x)[:, :4]), part=part, head=nn.Linear(4, 2)))
