"""Record the collectives of one training step of the real Megatron-Core 0.13.1, on a CPU.

One rank runs the library's own model, schedule, gradient finalization and optimizer. Every
process group is fake, and every function of torch.distributed that communicates is replaced by
one that writes the call down and fills the output with plausible numbers. The result is a JSON
file in the format of `tests/megatron/*.json`.

Prepare (a CPU build of torch is enough; neither apex nor Transformer Engine is needed):

    python -m venv venv && venv/bin/pip install torch==2.13.0 einops numpy packaging pyyaml
    venv/bin/pip install --no-deps megatron-core==0.13.1

Run: what is not given keeps its default in `build.DEFAULTS`.

    venv/bin/python record.py --out qknorm_tp2_sp0.json '{"tp": 2, "qk_layernorm": true}'
    venv/bin/python record.py --check ../dense_tp2_sp1.json    # record again, compare

The configuration is built in `build.py`; what stands in for something that a CPU has not got
is in `stand_ins.py`.
"""

import argparse
import json
import math
import re
import sys
from collections import Counter
from functools import cache, partial
from pathlib import Path
from typing import Any

import stand_ins  # first: replaces functions that Megatron copies when it is imported
from build import DEFAULTS, EXTRAS, Config, build_model, start_rank, wrap

import torch
from megatron.core import parallel_state as mpu
from megatron.core.distributed import DistributedDataParallel, finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func

# column or what, kind, group, bytes, module, dtype
Row = tuple[str, str, str, int, str, str]

SOURCE = "megatron-core 0.13.1, one training step run on CPU with a fake process group"
KEYS = {
    True: ("column", "kind", "group", "bytes", "module", "dtype"),
    False: ("what", "kind", "group", "bytes", "module"),
}
FORMAT_KINDS = {
    "all_reduce": "ALLREDUCE",
    "all_gather": "ALLGATHER",
    "reduce_scatter": "REDUCESCATTER",
    "all_to_all": "ALLTOALL",
}


def get_batch(config: Config) -> dict[str, torch.Tensor]:
    """One micro-batch, sent over the TP group as Megatron-LM's `get_batch_on_this_tp_rank` does."""
    shape = (config["mbs"], config["seq"])
    batch = {
        "tokens": torch.randint(config["vocab"], shape),
        "labels": torch.randint(config["vocab"], shape),
        "loss_mask": torch.ones(shape),
        "attention_mask": torch.ones(config["seq"], config["seq"]).triu(1).bool(),
        "position_ids": torch.arange(config["seq"]).expand(shape).contiguous(),
    }
    mask = batch["attention_mask"].expand(config["mbs"], 1, -1, -1).contiguous()
    batch["attention_mask"] = mask
    first, last = mpu.is_pipeline_first_stage(), mpu.is_pipeline_last_stage()
    sent = {"tokens": first, "labels": last, "loss_mask": last, "position_ids": first}
    sent["attention_mask"] = first or last
    with stand_ins.phase("data"):
        for name in [name for name in batch if sent[name]]:
            torch.distributed.broadcast(batch[name], 0, group=mpu.get_tensor_model_parallel_group())
    return batch


def forward_step(config: Config, _iterator: Any, model: Any) -> tuple[torch.Tensor, Any]:
    batch = get_batch(config)
    labels = batch["labels"] if mpu.is_pipeline_last_stage() else None
    output = model(batch["tokens"], batch["position_ids"], batch["attention_mask"], labels=labels)

    def loss(losses: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        value = losses.float().mean()
        return value, {"lm loss": value.detach()}

    return output, loss


def finalize(*arguments: Any) -> None:
    with stand_ins.phase("grad_finalize"):
        finalize_model_grads(*arguments)


def train_step(config: Config, model: DistributedDataParallel, optimizer: Any) -> None:
    """`train_step` of Megatron-LM, with the three scalars that it sends for its log."""
    # Each of two chained optimizers gathers all parameters; count the gathering once, as meant.
    model.start_param_sync = cache(model.start_param_sync)
    model.config.grad_scale_func = optimizer.scale_loss
    model.config.finalize_model_grads_func = finalize
    model.zero_grad_buffer()
    optimizer.zero_grad()
    get_forward_backward_func()(
        forward_step_func=partial(forward_step, config),
        data_iterator=None,
        model=[model],
        num_microbatches=config["num_microbatches"],
        seq_length=config["seq"],
        micro_batch_size=config["mbs"],
        forward_only=False,
    )
    with stand_ins.phase("optimizer"):
        success, norm, _ = optimizer.step()
    if not (success and math.isfinite(norm) and norm > 0):
        raise SystemExit(f"the optimizer step failed: gradient norm {norm}")
    with stand_ins.phase("post_step_logging"):
        for _ in range(2):  # did the update succeed, and the norm of the gradient
            torch.distributed.all_reduce(torch.zeros(1), group=mpu.get_model_parallel_group())
        if mpu.is_pipeline_last_stage():  # the loss and the number of micro-batches
            group = mpu.get_data_parallel_group(with_context_parallel=True)
            torch.distributed.all_reduce(torch.zeros(2), group=group)


def in_format(call: stand_ins.Call) -> tuple[bool, Row]:
    """Whether SimAI's text can say this call, and its row."""
    group = call.group
    if call.phase == "post_step_logging" and group == "DP":
        group = "DPxCP"
    module = re.sub(r"layers\.\d+", "layers.*", call.module)
    if call.kind in ("send", "recv"):
        what = "pipeline"
    elif group in ("TP", "EP") and call.phase != "data":
        column = "ig" if call.backward or call.phase == "grad_finalize" else "fwd"
        return True, (column, FORMAT_KINDS[call.kind], group, call.bytes, module, call.dtype)
    elif group in ("DP", "DP_EP"):
        return True, ("wg", FORMAT_KINDS[call.kind], group, call.bytes, "", call.dtype)
    else:
        what = call.phase
    return False, (what, call.kind, group, call.bytes, "", call.dtype)


def rows_of(calls: list[stand_ins.Call]) -> dict[str, list[dict[str, Any]]]:
    """The calls, counted, as the two lists of a recording; groups of one rank are left out."""
    counts = Counter(in_format(call) for call in calls if call.group_size > 1)
    lists = {True: [], False: []}
    for (sayable, row), count in sorted(counts.items()):
        lists[sayable].append(dict(zip(KEYS[sayable], row, strict=False)) | {"count": count})
    return {"collectives": lists[True], "not_in_the_workload_format": lists[False]}


def parameters_of(model: torch.nn.Module) -> list[list[Any]]:
    rows = []
    for name, tensor in model.named_parameters():
        part = "dense" if getattr(tensor, "allreduce", True) else "expert"
        mark = "sequence_parallel" if getattr(tensor, "sequence_parallel", False) else ""
        rows.append([name, list(tensor.shape), part, mark])
    return rows


def mla_shapes(tensors: list[list[Any]]) -> dict[str, list[int]]:
    """The shapes of the latent attention's linears in the first layer."""
    names = [(name.partition("layers.0.self_attention.")[2], shape) for name, shape, *_ in tensors]
    return {name: shape for name, shape in names if name.startswith("linear")}


def record(config: Config) -> dict[str, Any]:
    """Run one training step of the configuration; return its recording."""
    torch.manual_seed(1)
    rank = start_rank(config)
    model = build_model(config)
    stand_ins.watch_modules(model)
    wrapped, optimizer = wrap(config, model)
    stand_ins.calls.clear()
    train_step(config, wrapped, optimizer)
    tensors = parameters_of(model)
    return {
        "source": f"{SOURCE}, rank {rank}",
        "config": {key: value for key, value in config.items() if value != EXTRAS.get(key, EXTRAS)}
        | ({"mla_shapes": mla_shapes(tensors)} if config["mla"] else {}),
        "parameters": {
            word: sum(math.prod(shape) for _, shape, *marks in tensors if word in marks)
            for word in ("dense", "expert", "sequence_parallel")
        },
        "parameter_tensors": tensors,
    } | rows_of(stand_ins.calls)


def as_text(recording: dict[str, Any]) -> str:
    """JSON with one row of each list on a line."""
    parts = []
    for key, value in recording.items():
        if isinstance(value, list) and value:
            rows = ",\n".join(f"  {json.dumps(row)}" for row in value)
            parts.append(f' "{key}": [\n{rows}\n ]')
        else:
            parts.append(f' "{key}": {json.dumps(value)}')
    return "{\n" + ",\n".join(parts) + "\n}\n"


def differences(new: dict[str, Any], old: dict[str, Any]) -> list[str]:
    lines = []
    for key, value in old.items():
        if key == "parameters" and new[key] != value:
            lines.append(f"{key}: {new[key]} against {value}")
        if not isinstance(value, list) or new[key] == value:
            continue
        lines.append(f"{key}: not the same list")
        ours, theirs = [json.dumps(r) for r in new[key]], [json.dumps(r) for r in value]
        lines += [f"{key}: only now: {row}" for row in ours if row not in theirs]
        lines += [f"{key}: only then: {row}" for row in theirs if row not in ours]
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("config", nargs="?", default="{}", help="JSON: what differs from DEFAULTS")
    parser.add_argument("--out", type=Path, help="where to write the recording")
    parser.add_argument("--check", type=Path, help="a recording to make again and compare with")
    arguments = parser.parse_args()
    old = json.loads(arguments.check.read_text()) if arguments.check else None
    given = (old["config"] if old else {}) | json.loads(arguments.config)
    given.pop("mla_shapes", None)
    unknown = given.keys() - DEFAULTS.keys() - EXTRAS.keys()
    if unknown:
        parser.error(f"unknown settings: {sorted(unknown)}")
    recording = record(DEFAULTS | EXTRAS | given)
    if arguments.out:
        arguments.out.write_text(as_text(recording))
    found = differences(recording, old) if old else []
    print("\n".join(found) or "same" if old else as_text(recording))
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
