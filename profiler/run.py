"""Profile jobs on this machine: every kernel of kernel_table, forward and gradients, on every rank; a file for each.

python aicb.py --aiob_enable -m 7 --tp 4
torchrun --nproc_per_node 8 aicb.py --aiob_enable -m 7 --tp 4
python aicb.py --aiob_enable -m 7 --tp 1,2,4,8 --profile_only
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime, timezone
from pathlib import Path

from aicb.config.job import Job
from aicb.errors import UserError, require
from aicb.files import atomic_write
from aicb.times.profile import write_profile
from aicb.times.samples import samples_path
from profiler.device import pick_device
from profiler.implementations import Choices
from profiler.kernels import Bench, choose_and_check, measure_job
from profiler.measure import MIN_SAMPLES
from profiler.partial import Partial
from profiler.ranks import Ranks, host, process_group
from profiler.report import profile_of, raw_json
from profiler.results import RankResult
from profiler.settings import Settings

Asked = tuple[Job, Callable[[str], Path]]
"""A job, and what gives its profile's path for the GPU's short name, or refuses it by a UserError."""


def profile_jobs(wanted: Sequence[Asked], settings: Settings) -> list[Path]:
    """Measure jobs on every rank, one after another; return the profiles' paths on rank 0, nothing elsewhere.

    The raw samples lie beside each profile as JSON. A kernel whose shape this run has measured is not measured again.
    Raises UserError on every rank when it failed on any; what was measured is then kept in a `.partial` file.
    """
    ranks = Ranks.from_environment()
    with process_group(ranks):
        device = ranks.together(lambda: pick_device(settings.device, ranks.local_rank, ranks.local_size))
        _require_own_cards(ranks.exchange((host(), device.identity)))
        bench = Bench(device, settings, ranks)
        ready = ranks.together(lambda: _ready(wanted, bench))  # may refuse, and must before anything is measured
        for (job, _), (path, choices) in zip(wanted, ready, strict=True):
            _profile(job, choices, path, bench)
    return [] if ranks.rank else [path for path, _ in ready]


def _ready(wanted: Sequence[Asked], bench: Bench) -> list[tuple[Path, Choices]]:
    """Return where the profiles will lie and what runs. Raises UserError where one may not, or does not fit."""
    ready = []
    for job, name_of in wanted:
        path = name_of(bench.device.slug)
        Partial(path, bench.ranks).check(bench.settings.resume, bench.settings.force)
        ready.append((path, choose_and_check(job, bench)))
    return ready


def _profile(job: Job, choices: Choices, path: Path, bench: Bench) -> None:
    """Measure one job and write its profile; with --resume, one that is there is left as it is."""
    settings, ranks, part = bench.settings, bench.ranks, Partial(path, bench.ranks)
    if settings.resume and ranks.exchange(path.exists())[0]:
        return
    with _keeping(part, ranks):
        own = ranks.together(lambda: measure_job(job, choices, bench, part, path.name))
        everyone = ranks.exchange(own)
        ranks.together(lambda: None if ranks.rank else _write(job, settings, path, everyone))
    part.remove()


@contextmanager
def _keeping(part: Partial, ranks: Ranks) -> Iterator[None]:
    """Say what a failure leaves: in the user's error, or beside what it is instead."""
    try:
        yield
    except UserError as error:
        raise UserError("; ".join(filter(None, (str(error), part.kept())))) from error
    except BaseException:
        if part.kept() and not ranks.rank:
            sys.stderr.write(f"aicb: {part.kept()}\n")
        raise


def _require_own_cards(cards: list[tuple[str, str]]) -> None:
    """Raise UserError, on every rank alike, where two of a host measure on one card."""
    first: dict[tuple[str, str], int] = {}
    for rank, card in enumerate(cards):
        require(
            not card[1] or card not in first,
            f"ranks {first.get(card)} and {rank} ({card[0]}) measure on one GPU ({card[1]}): give each a card of its "
            "own (CUDA_VISIBLE_DEVICES), or lower torchrun's --nproc_per_node",
        )
        first[card] = rank


def _write(job: Job, settings: Settings, path: Path, results: list[RankResult]) -> None:
    """Write the samples, then the profile: a profile that exists is complete."""
    now = datetime.now(timezone.utc).isoformat(timespec="seconds")
    profile = profile_of(
        job, results, path=str(path), train_iter=max(settings.train_iter, MIN_SAMPLES), l2=settings.l2, date=now
    )
    with atomic_write(samples_path(path)) as file:
        file.write(raw_json(profile, results))
    write_profile(profile, path)
