"""Tables for people: a workload's totals, a profile's times and rates, the presets, two profiles side by side."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path

from aicb import units
from aicb.config.model import make_model
from aicb.config.parameters import whole_model_parameters
from aicb.config.presets import PRESETS
from aicb.times.profile import Profile, read_profile
from aicb.times.rates import FORWARD, Rate, Ratio, compare, peak_of, rates
from aicb.times.samples import kernels_of, samples_path
from aicb.workload.reading import first_lines, totals
from aicb.workload.rules import COLUMNS, KEYWORD


def show(path: Path) -> str:
    """Return the tables of a workload or a compute profile, told apart by their first word. Raises UserError."""
    if first_lines(path)[0].startswith(KEYWORD.encode()):
        return workload(path)
    return profile(read_profile(path))


def workload(path: Path) -> str:
    """Return the totals of a workload per column, group and row name."""
    total = totals(path)
    header = " ".join(f"{key} {value}" for key, value in total.header.items())
    compute = [(column, units.duration(total.compute_ns[column]), str(total.compute_ns[column])) for column in COLUMNS]
    sent = [
        (column, group, kind, f"{total.calls[column, kind, group]:,}", units.size(size), str(size))
        for (column, kind, group), size in sorted(total.sent.items())
    ]
    groups = [(group, units.size(size)) for group, size in sorted(total.group_bytes().items())]
    rows = [
        (name, f"{count:,}", units.duration(total.row_compute_ns[name]), units.size(total.row_bytes[name]))
        for name, count in total.row_counts.items()
    ]
    parts = [
        f"{path}: workload of {total.rows:,} rows\n{header}",
        units.table(("column", "compute", "ns"), compute),
        units.table(("column", "group", "collective", "calls", "bytes", "exact"), sent) if sent else "no collectives",
        units.table(("group", "bytes"), groups) if groups else "",
        units.table(("row", "rows", "compute", "bytes"), rows),
    ]
    return "\n\n".join(part for part in parts if part)


def profile(found: Profile) -> str:
    """Return the table of a compute profile: times in us, rates, and where they came from."""
    peak, achieved = peak_of(found), rates(found)
    rows = []
    for name, section in found.sections.items():
        rate = achieved.get(name, {})
        times = [
            _us(section.min),
            _us(section.avg),
            _us(section.more.get("forward_median")),
            _us(section.max),
            _us(section.input_grad),
            _us(section.weight_grad),
        ]
        rows.append((name, *times, *_rate(rate.get("forward"))))
    gpu = units.printable(found.origin.get("gpu", "unknown GPU: the file does not say"))
    known = f"{peak.tflops_16bit:g} TFLOP/s (16 bit, dense), {peak.gb_per_s:g} GB/s" if peak else "unknown"
    head = ("section", "min us", "avg us", "median us", "max us", "dgrad us", "wgrad us", "TFLOP/s", "GB/s", "of peak")
    origin = [f"  {key}: {units.printable(value)}" for key, value in found.origin.items()]
    parts = [
        f"{found.path}: compute profile, generation {found.generation}, train_iter {found.train_iter}, {gpu}",
        units.table(head, rows),
        f"rates are those of forward; peak of this GPU: {known}",
        *_kernels(Path(found.path)),
    ]
    return "\n\n".join([*parts, "origin\n" + "\n".join(origin)] if origin else parts)


def _kernels(path: Path) -> list[str]:
    """The table of what each call ran, where the samples beside the profile tell."""
    rows = []
    for section, ways in kernels_of(path).items():
        for way, spans in ways.items():
            for number, (name, group) in enumerate(groupby(spans, key=lambda span: span[0])):
                us = [one for _, one in group]
                first = (section, way) if number == 0 else ("", "")
                rows.append((*first, str(len(us)), _us(sum(us)), units.printable(name)))
    if not rows:
        return []
    head = f"kernels of one call each, of rank 0, from {samples_path(path)}"
    return [f"{head}\n{units.table(('section', 'part', 'calls', 'us', 'kernel'), rows)}"]


def _us(time: float | None) -> str:
    return "-" if time is None else f"{time:.1f}"


def _rate(rate: Rate | None) -> tuple[str, str, str]:
    if rate is None:
        return "-", "-", "-"
    share = f"{100 * rate.share:.0f} %" if rate.share is not None else "unknown"
    tflops = "-" if rate.tflops is None else f"{rate.tflops:.1f}"
    return tflops, "-" if rate.gb_per_s is None else f"{rate.gb_per_s:.0f}", share


def models() -> str:
    """Return the table of presets."""
    rows = []
    for name, preset in PRESETS.items():
        model = make_model(preset.fields, {})
        kind = "latent attention" if model.multi_latent_attention else f"{model.num_query_groups} kv heads"
        experts = f"{model.num_experts} experts, top {model.moe_router_topk}" if model.num_experts else "dense"
        rows.append(
            (
                name,
                model.name,
                f"{whole_model_parameters(model):,}",
                str(model.num_layers),
                str(model.hidden_size),
                str(model.num_attention_heads),
                kind,
                experts,
                str(preset.tensor_model_parallel_size),
            )
        )
    return units.table(("-m", "name", "parameters", "layers", "hidden", "heads", "attention", "mlp", "TP"), rows)


def comparison(a: Path, b: Path, tolerance: float | None = None) -> tuple[str, bool]:
    """Return kernel by kernel times (us) and ratios of two profiles, what differs in their origin; whether they agree.

    They agree where no time of `b` is more than `tolerance` (a fraction) apart from that of `a` and both hold the same
    sections; always without a tolerance. Raises UserError.
    """
    ratios, differing = compare(read_profile(a), read_profile(b))
    rows = [
        (one.name, one.part, _us(one.a), _us(one.b), f"{one.b / one.a:.3f}" if one.a and one.b is not None else "-")
        for one in ratios
    ]
    text = f"a: {a}\nb: {b}\n\n" + units.table(("section", "part", "a us", "b us", "b/a"), rows)
    if differing:
        lines = [
            f"  {key}\n    a: {units.printable(one)}\n    b: {units.printable(other)}" for key, one, other in differing
        ]
        text += "\n\nwhat differs in their origin\n" + "\n".join(lines)
    else:
        text += "\n\nno difference in their origin"
    if tolerance is None:
        return text, True
    said, agree = _verdict(ratios, tolerance)
    return f"{text}\n\n{said}", agree


def _verdict(ratios: list[Ratio], tolerance: float) -> tuple[str, bool]:
    """Say which times are too far apart, and what could not be compared."""
    apart: list[str] = []
    alone: list[str] = []
    unstated: list[str] = []
    for one in ratios:
        if one.a is None or one.b is None:
            (alone if one.part == FORWARD else unstated).append(f"{one.name} {one.part}")
        elif one.a != one.b and not abs(one.b - one.a) <= tolerance * one.a:
            change = f"{(one.b / one.a - 1) * 100:+.1f} %" if one.a else "from 0"
            apart.append(f"{one.name} {one.part} ({change})")
    compared = len(ratios) - len(alone) - len(unstated)
    lines = [
        f"{len(apart)} of {compared} times more than {100 * tolerance:.4g} % apart: {', '.join(apart)}"
        if apart
        else f"all of {compared} times within {100 * tolerance:.4g} %"
    ]
    if alone:
        lines.append(f"in one of the two alone: {', '.join(alone)}")
    if unstated:
        lines.append(f"not compared, as one of the two does not state it: {', '.join(unstated)}")
    return "\n".join(lines), not apart and not alone
