"""How a profile is measured, as the command line says it."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from aicb.errors import require
from profiler.candidates import Wanted
from profiler.device import DEVICES
from profiler.measure import COLD, HOT

_KEPT_APART = ("l2", "train_iter", "min_time", "sustained")


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings(Wanted):
    """How to measure, and which kernels."""

    train_iter: int = 10
    """Samples of each measurement, at least (fewer only within a time_budget, and then the profile says so)."""
    device: str = "auto"
    """auto or cuda: this rank's card; cpu: this machine's processor."""
    l2: str = COLD
    """Whether the last-level cache is flushed before each call."""
    min_time: float | None = None
    """Seconds that each measurement samples at least; None: what the device needs."""
    sustained: float = 0.0
    """Seconds under load before the samples of each measurement count."""
    time_budget: float | None = None
    """Seconds for the whole measuring on a rank."""
    resume: bool = False
    """Go on from what an earlier try kept."""
    force: bool = False
    """Throw away what an earlier try kept."""
    show_progress: bool = True

    def __post_init__(self) -> None:
        Wanted.__post_init__(self)
        require(self.train_iter >= 1, f"--train_iter {self.train_iter} must be at least 1")
        require(self.device in DEVICES, f"--device {self.device} must be one of {', '.join(DEVICES)}")
        require(self.l2 in (COLD, HOT), f"--l2 {self.l2} must be {COLD} or {HOT}")
        for name, seconds, allowed in (
            ("min_time", self.min_time, "of 0 or more"),
            ("sustained", self.sustained, "of 0 or more"),
            ("time_budget", self.time_budget, "above 0"),
        ):
            least = seconds is None or seconds > 0 or (seconds == 0 and allowed != "above 0")
            require(
                least and (seconds is None or seconds < float("inf")),
                f"--{name} {seconds} must be a number of seconds {allowed}",
            )
        require(
            self.time_budget is None or not (self.sustained or self.min_time),
            "--time_budget excludes --sustained and --min_time: it shares its seconds out itself",
        )
        require(
            not (self.resume and self.force),
            "--resume and --force exclude each other: go on from what is kept, or throw it away",
        )

    def marks(self) -> list[str]:
        """Return what of this is not the default and changes the times, as file names carry it."""
        return [*Wanted.marks(self), *(["l2hot"] if self.l2 == HOT else [])]

    def sampling(self) -> dict[str, str]:
        """What must agree for two tries to be parts of one profile."""
        return {name: str(value) for name, value in asdict(self).items() if name in _KEPT_APART}
