"""The private names of torch that rankwatch reads: what each is for, and what it is where torch lacks the name.

Another version of torch may lack any of them. Then less is seen, and the training goes on. Not on this page are

- the tables of a module (``_parameters``, ``_buffers``, ``_modules``, ``_forward_hooks``) and a tensor's ``_version``, which
  extensions of torch read everywhere;
- what is within a unit of FSDP: its many names are those of ``replicas/fsdp_units.py`` and ``measure/shards.py``;
- what a compiled model is made of: ``hook/compiled/``; the operators by autograd's names: ``rerun/graph_nodes.py``;
- the kernels ``torch._foreach_...``, which torch's optimizers are made of, and the switch of oneDNN: ``rerun/wider.py``;
- two functions of process groups in ``tell/``, which loads without torch.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, _guards, nn
from torch.nn.modules import batchnorm
from torch.nn.parallel import DistributedDataParallel
from torch.utils import _python_dispatch

from .parts import parameters_in

# What is no function of ours is torch's own: some run in every hook.

graph_task: Callable[[], int] = getattr(torch._C, "_current_graph_task_id", lambda: -1)
"""The number of the backward that the calling thread is in; -1: in none. Without it, no backward is noticed while it runs."""

graph_node: Callable[[], Any] = getattr(torch._C, "_current_autograd_node", lambda: None)
"""The node of autograd's graph whose backward runs. Without it, no operator of a backward has a line."""

is_any_autocast_enabled: Callable[[], bool] = getattr(torch._C, "_is_any_autocast_enabled", lambda: True)
"""Whether to look at the autocast of each device. Without it, all are looked at, which takes longer."""

raw_stream: Callable[[int], int] = getattr(
    torch._C, "_cuda_getCurrentRawStream", lambda index: torch.cuda.current_stream(index).cuda_stream
)
"""The current stream of a CUDA device, as a number. What it is without the name takes ten times as long."""


def is_transformed() -> bool:
    """Whether the calling code runs inside a transformation of ``torch.func``, or torch does not tell."""
    peek = getattr(getattr(torch._C, "_functorch", None), "peek_interpreter_stack", lambda: None)
    return not hasattr(torch._C, "_len_torch_dispatch_stack") or peek() is not None


_eval_frame: Any = getattr(getattr(torch._C, "_dynamo", None), "eval_frame", None)

set_eval_frame: Callable[[Any], Any] = getattr(_eval_frame, "set_eval_frame", lambda callback: None)
"""Switches the compiler off, or on again. Without it, the hooks of a compiled model break its graph."""


def never_compile(function: Callable[..., Any]) -> None:
    """Prevents that ``function`` becomes a graph of its own. When called inside of a graph, it is still traced."""
    code = function.__code__
    skip_code = getattr(_eval_frame, "skip_code", None)
    if skip_code is not None:  # torch 2.4
        skip_code(code)
    elif hasattr(_eval_frame, "set_code_exec_strategy"):
        action = getattr(_eval_frame, "_FrameAction", None) or _eval_frame.FrameAction
        strategy = getattr(_eval_frame, "_FrameExecStrategy", None) or _eval_frame.FrameExecStrategy
        _eval_frame.set_code_exec_strategy(code, strategy(action.SKIP, action.DEFAULT))


def compile_once_more() -> bool:
    """Makes room for a second graph of each piece of code. Returns whether there may be one.

    torch compiles a piece of code 8 times at most, and runs it without a graph from then on. The training may also have asked for
    an error where code is compiled again.
    """
    dynamo = sys.modules.get("torch._dynamo")
    if dynamo is None:
        return False
    config, stance = dynamo.config, getattr(dynamo.eval_frame, "_stance", None)
    limit = next((name for name in _LIMITS if hasattr(config, name)), None)
    if limit is None or getattr(config, "error_on_recompile", False) or getattr(stance, "stance", "default") != "default":
        return False
    if not _given_room:
        _given_room.append(getattr(config, limit))
        setattr(config, limit, 2 * _given_room[0])
    return True


_LIMITS = "recompile_limit", "cache_size_limit"
"""What torch calls it, and called it before 2.6."""

_given_room: list[int] = []
"""The user's limit, once it was doubled."""

_tracing_context: Any = getattr(_guards, "TracingContext", None)


def is_tracing() -> bool:
    """Whether torch works on a graph. While torch 2.4 does, ``torch.compiler.is_compiling()`` may be False."""
    return _tracing_context is not None and _tracing_context.try_get() is not None


modes_on: Callable[[], int] = getattr(torch._C, "_len_torch_dispatch_stack", lambda: 0)
"""How many modes are on. Without it, the modes of the user see our operations."""

modes: Callable[[], Sequence[Any]] = getattr(_python_dispatch, "_get_current_dispatch_mode_stack", lambda: ())
"""The modes that are on, the innermost last."""

without_modes: Callable[[], AbstractContextManager[Any]] = getattr(_python_dispatch, "_disable_current_modes", nullcontext)
"""Within it, all modes are off."""


def is_fake(mode: Any) -> bool:
    """Whether tensors have no values under this mode."""
    fake = getattr(sys.modules.get("torch._subclasses.fake_tensor"), "FakeTensorMode", None)
    return fake is not None and isinstance(mode, fake)


def active_ddp() -> Any:
    """The DDP module that runs its forward now; None: none does."""
    return getattr(DistributedDataParallel, "_active_ddp_module", None)


def is_reducing(ddp: Any) -> bool:
    """Whether a DDP module reduces gradients over ranks: those of its own group, which need not be torch's default one.

    Where there is no default one, ranks may come and go behind a hook of the user's, as torchft has it.
    """
    is_hooked = bool(comm_hooks_of(ddp)) and not torch.distributed.is_initialized()
    return is_hooked or ddp.process_group.size() > 1


def comm_hooks_of(ddp: Any) -> Sequence[tuple[Callable[..., Any], Any]]:
    """What the user has registered to reduce gradients in the place of DDP."""
    return getattr(ddp, "_comm_hooks", ())


def keeping_version(value: Tensor) -> AbstractContextManager[Any]:
    """What is written to a tensor meanwhile must be undone at the end: autograd does not know of it then."""
    keeping = getattr(torch.autograd.grad_mode, "_unsafe_preserve_version_counter", None)
    return nullcontext() if keeping is None or value.is_inference() else keeping(value)


def found_inf(scaler: Any, optimizer: Any) -> bool:
    """Whether a ``GradScaler`` that has come to an optimizer's step has skipped it. Waits for the device."""
    states = getattr(scaler, "_per_optimizer_states", {})
    found = states[id(optimizer)].get("found_inf_per_device", {}) if id(optimizer) in states else {}
    return any(bool(one.item()) for one in found.values())


def fsdp1_handle(module: nn.Module) -> Any:
    """What a unit of ``FullyShardedDataParallel`` has its flat parameter in; None: it is no unit."""
    return getattr(module, "_handle", None)


def fsdp2_groups(module: nn.Module) -> list[Any]:
    """The groups of parameters of a unit of ``fully_shard``; empty: it is no unit."""
    state: Any = getattr(module, "_get_fsdp_state", lambda: None)()
    groups = getattr(state, "_fsdp_param_groups", None) or [getattr(state, "_fsdp_param_group", None)]
    return [group for group in groups if group is not None]


def shard_of(value: Any) -> Tensor:
    """What this rank has of a DTensor, or of a parameter that DeepSpeed's ZeRO 3 has cut; the tensor itself, if it is neither."""
    shard: Tensor = getattr(value, "_local_tensor", value)
    cut = getattr(value, "ds_tensor", None)
    return cut if isinstance(cut, Tensor) and not value.numel() else shard


def has_rpc() -> bool:
    """Whether ``torch.distributed.rpc`` was set up: then values are sent that nothing of ours sees."""
    rpc = sys.modules.get("torch.distributed.rpc")
    return rpc is not None and bool(getattr(rpc, "_is_current_rpc_agent_set", lambda: False)())


process_groups: Any = getattr(torch._C, "_distributed_c10d", None)
"""The classes of process groups and their work; None: this torch has none."""


class GroupFacts(NamedTuple):
    """A process group: its ``name`` is the same on all members, and ``title`` is for people. ``ranks`` are those of the job.

    ``has_two_orders``: what is on the host and what is on devices have a backend each, and so an order each.
    """

    name: str
    title: str
    ranks: tuple[int, ...]
    is_default: bool
    has_two_orders: bool


def group_facts(group: Any) -> GroupFacts | None:
    """None: torch does not tell, or nobody else is in the group."""
    world = getattr(torch.distributed.distributed_c10d, "_world", None)
    ranks = tuple(getattr(world, "pg_group_ranks", {}).get(group, ()))
    name = getattr(world, "pg_names", {}).get(group)
    if len(ranks) < 2 or name is None:
        return None
    backends = {one.partition(":")[2] for one in str(getattr(world, "pg_backend_config", {}).get(group, "")).split(",")}
    title = str(getattr(group, "group_desc", "")).replace("undefined", "")
    return GroupFacts(str(name), title, ranks, getattr(world, "default_pg", None) is group, len(backends) > 1)


def groups_so_far() -> Sequence[tuple[Any, int]]:
    """The process groups that there are, each with the number of its collectives so far, as torch counts them."""
    if process_groups is None:
        return ()
    world = getattr(torch.distributed.distributed_c10d, "_world", None)
    return [(group, _collectives_of(group)) for group in list(getattr(world, "pg_map", ()))]


def _collectives_of(group: Any) -> int:
    try:
        return int(group._get_sequence_number_for_group())
    except (RuntimeError, AttributeError):  # this backend does not count
        return 0


NORMS_WITH_STATISTICS: Any = getattr(batchnorm, "_NormBase", (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d))
"""The modules whose buffers a forward in training mode changes."""


def takes_fast_path(layer: nn.TransformerEncoderLayer) -> bool:
    """Whether torch runs a layer as one operator, with other numbers, if no module of it has a hook and its input allows it."""
    attention: Any = layer.self_attn
    try:
        is_able = attention._qkv_same_embed_dim and bool(layer.activation_relu_or_gelu)
        is_able = is_able and attention.batch_first and attention.in_proj_bias is not None and attention.num_heads % 2 == 0
        is_able = is_able and layer.norm1.eps == layer.norm2.eps and torch.backends.mha.get_fastpath_enabled()
    except AttributeError:
        return False
    if layer.training or not is_able or torch.is_autocast_enabled():
        return False
    return not (torch.is_grad_enabled() and any(one.requires_grad for one in parameters_in(layer)))
