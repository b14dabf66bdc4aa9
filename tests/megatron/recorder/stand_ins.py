"""What lets Megatron-Core 0.13.1 run on a CPU, alone: fake collectives, and stand-ins for CUDA.

Import this before Megatron: it copies some functions of torch.distributed when it is imported.
Collectives are written to `calls` and not sent; each rank is taken to hold what this one holds,
so routing to experts is made uniform. Norms, replicated linears and latent attention stand in for
those of apex and Transformer Engine. What the library itself sends is left as it is.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch._dynamo  # before anything is replaced: it lists torch's functions, each once
import torch.distributed as dist
from torch.overrides import TorchFunctionMode


@dataclass(frozen=True)
class Call:
    """One call of a collective: `bytes` counts the larger of its two buffers."""

    phase: str
    kind: str
    group: str
    group_size: int
    bytes: int
    module: str
    dtype: str
    backward: bool


calls: list[Call] = []
_phase = ["forward_backward"]
_modules: list[str] = []

GROUPS = {
    "TENSOR_MODEL_PARALLEL_GROUP": "TP",
    "TENSOR_AND_CONTEXT_PARALLEL_GROUP": "TP",
    "EXPERT_TENSOR_PARALLEL_GROUP": "TP",
    "EXPERT_MODEL_PARALLEL_GROUP": "EP",
    "DATA_PARALLEL_GROUP": "DP",
    "DATA_PARALLEL_GROUP_WITH_CP": "DP",
    "INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP": "DP",
    "EXPERT_DATA_PARALLEL_GROUP": "DP_EP",
    "MODEL_PARALLEL_GROUP": "MP(TPxPP)",
    "EXPERT_TENSOR_MODEL_PIPELINE_PARALLEL_GROUP": "ETPxEPxPP",
    "INTRA_DISTRIBUTED_OPTIMIZER_INSTANCE_GROUP": "INTRA_DISTRIBUTED_OPTIMIZER_INSTANCE",
    "EMBEDDING_GROUP": "EMB",
    "POSITION_EMBEDDING_GROUP": "POSITION_EMB",
    "PIPELINE_MODEL_PARALLEL_GROUP": "PP",
}


def group_name(group: dist.ProcessGroup) -> str:
    if group.group_desc == "EXPERT_TENSOR_AND_MODEL_PARALLEL_GROUP":  # the format has no TP x EP
        from megatron.core import parallel_state

        return "EP" if parallel_state.get_expert_model_parallel_world_size() > 1 else "TP"
    return GROUPS[group.group_desc]


@contextlib.contextmanager
def phase(name: str) -> Iterator[None]:
    """Calls made inside belong to this part of the training step."""
    _phase.append(name)
    yield
    _phase.pop()


def current_module() -> str:
    """The module that calls, or in the backward pass the module that its forward ran in."""
    if _modules:
        return _modules[-1]
    node = torch._C._current_autograd_node()
    return "" if node is None else node.metadata.get("module", "")


def watch_modules(model: torch.nn.Module) -> None:
    """Keep `current_module` up to date while the model runs."""
    for name, module in model.named_modules():
        label = name or type(module).__name__
        module.register_forward_pre_hook(lambda *_, label=label: _modules.append(label))
        module.register_forward_hook(lambda *_: _modules.pop() and None, always_call=True)


class Done:
    """The handle of a collective that is over."""

    def wait(self) -> None:
        return None


def write_down(kind: str, tensor: torch.Tensor, group: dist.ProcessGroup) -> None:
    calls.append(
        Call(
            phase=_phase[-1],
            kind=kind,
            group=group_name(group),
            group_size=group.size(),
            bytes=tensor.numel() * tensor.element_size(),
            module=current_module(),
            dtype=str(tensor.dtype).removeprefix("torch."),
            backward=torch._C._current_graph_task_id() != -1,
        )
    )


def all_reduce(tensor: torch.Tensor, op: Any = None, group: Any = None, async_op: bool = False):
    write_down("all_reduce", tensor, group)
    return Done()


def all_gather(output: torch.Tensor, tensor: torch.Tensor, group: Any = None, async_op=False):
    write_down("all_gather", output, group)
    with torch.no_grad():
        output.view(group.size(), -1).copy_(tensor.reshape(1, -1).expand(group.size(), -1))
    return Done()


def all_gather_list(outputs: list[torch.Tensor], tensor: torch.Tensor, group: Any = None):
    joined = torch.cat([output.reshape(-1) for output in outputs])
    all_gather(joined, tensor, group)
    for output, part in zip(outputs, joined.split([output.numel() for output in outputs]), strict=True):
        output.copy_(part.view_as(output))


def reduce_scatter_list(output: torch.Tensor, tensors: list[torch.Tensor], group: Any = None):
    reduce_scatter(output, torch.cat([tensor.reshape(-1) for tensor in tensors]), group=group)


def reduce_scatter(output: torch.Tensor, tensor: torch.Tensor, op=None, group=None, async_op=False):
    write_down("reduce_scatter", tensor, group)
    with torch.no_grad():
        output.view(-1).copy_(tensor.reshape(group.size(), -1)[group.rank()].clone())
    return Done()


def all_to_all(output: torch.Tensor, tensor: torch.Tensor, *_sizes: Any, group=None, **_: Any):
    write_down("all_to_all", tensor, group)
    with torch.no_grad():  # uniform routing: each rank receives as much as it sends
        output.copy_(tensor)
    return Done()


def broadcast(tensor: torch.Tensor, src: int = 0, group: Any = None, async_op: bool = False):
    write_down("broadcast", tensor, group)
    return Done()


def batch_isend_irecv(operations: list[dist.P2POp]) -> list[Done]:
    for operation in operations:
        write_down(operation.op.__name__.removeprefix("i"), operation.tensor, operation.group)
        if operation.op is dist.irecv:
            operation.tensor.data.normal_(std=0.02)
    return [Done()]


class CudaIsCpu(TorchFunctionMode):
    """Make tensors on the CPU where CUDA is asked for, and let their types read as CUDA's."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None):
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        if function is torch.Tensor.cuda:
            return args[0]
        result = function(*args, **kwargs)
        if function is torch.Tensor.type and isinstance(result, str):
            return result.replace("torch.", "torch.cuda.")
        return result


class NoRandomState:
    """Megatron's tracker of CUDA's random state, of which a CPU has none."""

    def fork(self, *_: Any) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def get_states(self) -> dict[str, Any]:
        return {}

    def set_states(self, states: dict[str, Any]) -> None:
        return None


class Stream:
    """A CUDA stream that has nothing to wait for."""

    def __init__(self, *_: Any, **__: Any) -> None:
        return None

    def wait_stream(self, _: Any) -> None:
        return None

    def record_event(self) -> "Stream":
        return self

    def synchronize(self) -> None:
        return None


class ReplicatedLinear(torch.nn.Linear):
    """Transformer Engine's `TELinear` with `parallel_mode="duplicated"`."""

    def __init__(self, in_features: int, out_features: int, *, config: Any, **_: Any) -> None:
        super().__init__(in_features, out_features, bias=False, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel

    def forward(self, tensor: torch.Tensor) -> tuple[torch.Tensor, None]:
        return super().forward(tensor), None


class LatentAttention(torch.nn.Module):
    """Core attention whose values are not as wide as its keys, as Transformer Engine's."""

    def __init__(self, *_: Any, softmax_scale: float, **__: Any) -> None:
        super().__init__()
        self.scale = softmax_scale

    def forward(self, query: Any, key: Any, value: Any, *_: Any, **__: Any) -> torch.Tensor:
        query, key, value = (tensor.permute(1, 2, 0, 3) for tensor in (query, key, value))
        attend = torch.nn.functional.scaled_dot_product_attention
        output = attend(query, key, value, is_causal=True, scale=self.scale)
        return output.permute(2, 0, 1, 3).flatten(2)


def torch_norm(_cls: type, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any):
    """Torch's norm for apex's, marked: unmarked, Megatron refuses it with sequence parallelism."""
    kind = torch.nn.LayerNorm if config.normalization == "LayerNorm" else torch.nn.RMSNorm
    norm = kind(hidden_size, eps=eps)
    for parameter in norm.parameters():
        parameter.sequence_parallel = config.sequence_parallel
    return norm


def uniform_logits(router: Any, tensor: torch.Tensor) -> torch.Tensor:
    """Router logits under which each expert gets as many tokens as any other."""
    # As moe_utils.router_gating_linear, which fails without Transformer Engine in 0.13.1.
    dtype = {"fp32": torch.float32, "fp64": torch.float64}.get(router.config.moe_router_dtype, tensor.dtype)
    logits = torch.nn.functional.linear(tensor.to(dtype), router.weight.to(dtype))
    experts, chosen = router.config.num_moe_experts, router.topk
    flat = logits.view(-1, experts)
    first = torch.arange(len(flat)).unsqueeze(1) * chosen
    picks = (first + torch.arange(chosen)) % experts
    return (flat + torch.zeros_like(flat).scatter(1, picks, 100.0)).view_as(logits)


def replace_collectives() -> None:
    dist.all_reduce, dist.broadcast = all_reduce, broadcast
    dist.all_gather_into_tensor = dist._all_gather_base = all_gather
    dist.reduce_scatter_tensor = dist._reduce_scatter_base = reduce_scatter
    dist.all_gather, dist.reduce_scatter = all_gather_list, reduce_scatter_list
    dist.all_to_all_single = all_to_all
    dist.batch_isend_irecv = batch_isend_irecv


def remember_modules_in_backward() -> None:
    """Let each node of a custom autograd function remember the module of its forward."""
    apply = torch.autograd.Function.apply.__func__

    def remembering(cls: type, *args: Any, **kwargs: Any) -> Any:
        result = apply(cls, *args, **kwargs)
        for output in result if isinstance(result, tuple) else (result,):
            if isinstance(output, torch.Tensor) and output.grad_fn is not None:
                output.grad_fn.metadata.setdefault("module", current_module())
        return result

    torch.autograd.Function.apply = classmethod(remembering)


def replace_cuda() -> None:
    torch.compile = lambda function, **_: function
    torch.cuda.current_device = lambda: "cpu"
    torch.cuda.synchronize = torch.cuda.set_device = lambda *_: None
    torch.cuda.Stream = Stream
    torch.cuda.current_stream = torch.cuda.default_stream = lambda *_: Stream()
    torch.cuda.stream = lambda *_: contextlib.nullcontext()
    CudaIsCpu().__enter__()


def patch_megatron() -> None:
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer.moe.router import TopKRouter
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    random._CUDA_RNG_STATE_TRACKER = NoRandomState()
    random._CUDA_RNG_STATE_TRACKER_INITIALIZED = True
    random._get_cuda_rng_state = lambda *_, **__: None
    random._set_cuda_rng_state = lambda *_, **__: None
    WrappedTorchNorm.__new__ = staticmethod(torch_norm)
    TopKRouter.gating = uniform_logits


replace_collectives()
remember_modules_in_backward()
replace_cuda()
patch_megatron()
