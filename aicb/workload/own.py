"""What a workload of ours says of itself, held against its rows: a file cut or spliced by hand is found."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from aicb.workload.rules import ERROR

OWN_KEYS = ("pp_rank", "iterations", "micro_batches_written", "aicb_version")
# Rows that an iteration has once (some in several pieces); every other row belongs to a micro-batch.
ONCE = (
    *("grad_gather", "grad_param_comm", "grad_param_compute", "layernorm", "moe_grad_norm1", "moe_grad_norm2"),
    *("optimizer1", "optimizer2", "optimizer3"),
)
LAYER_ROWS = ("attention_layer", "attention_column", "attention_q_column")  # each layer has exactly one of them


def own_faults(
    values: Mapping[str, int | None], own: Mapping[str, int | None], names: Mapping[str, int]
) -> Iterator[tuple[int, str, str]]:
    """Yield line, text and level of what contradicts the header. `names`: how often each row name occurs."""
    for key in ("iterations", "micro_batches_written"):
        if key in own and not own[key]:
            yield 1, f"{key}: must be a whole number of at least 1", ERROR
    stage, stages = own.get("pp_rank"), values.get("pp")
    if stage is not None and stages and stage >= stages:
        yield 1, f"pp_rank: {stage} must be below pp: {stages}", ERROR
    iterations, key = own.get("iterations", 1), "micro_batches_written" if "micro_batches_written" in own else "ga"
    micro_batches = own.get(key, values.get("ga"))
    if not iterations or not micro_batches:
        return
    fits = True
    for name, count in names.items():
        times, why = iterations, f"iterations: {iterations}"
        if name not in ONCE:
            times, why = iterations * micro_batches, f"{key}: {micro_batches} x iterations: {iterations}"
        if count % times:
            fits = False
            yield 2, f"{count} rows {name[:40]} are no multiple of {why}: rows are missing, or too many", ERROR
    layers, chunks = sum(names.get(row, 0) for row in LAYER_ROWS) // (iterations * micro_batches), values.get("vpp")
    if fits and chunks and chunks > layers:
        yield 1, f"vpp: {chunks} is above the {layers} layers that the rows of a micro-batch show", ERROR
