"""The measuring function against a device whose every duration the test decides."""

from collections.abc import Callable
from itertools import cycle, repeat

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from profiler.measure import MAX_SAMPLES, Budget, Samples, measure, pool, spread
from tests.profiler.fakes import FakeDevice


def steady(us: float) -> FakeDevice:
    return FakeDevice(repeat(us))


def noisy(us: float) -> FakeDevice:
    return FakeDevice(cycle([us, 2 * us]))


def test_order_of_a_batch_has_no_wait_between_the_calls() -> None:
    device = steady(10_000)
    measure(device.call, device, samples=4, cap_s=1.0)
    # 3 calls of 10 ms are 30 ms >= 25 ms of warm-up; then 4 samples with one wait at the end.
    assert device.log == ["flush", "call", "sync"] * 3 + ["spin", "flush", "mark", "call", "mark"] * 4 + ["sync"]


def test_a_hot_cache_is_not_flushed_but_the_queue_is_filled() -> None:
    device = steady(10_000)
    measure(device.call, device, samples=3, cap_s=1.0, l2="hot")
    assert "flush" not in device.log
    assert device.log.count("spin") == 3


@pytest.mark.parametrize(("us", "warm_ups"), [(1_000_000, 3), (10_000, 3), (5_000, 5), (1_000, 25)])
def test_warm_up_is_at_least_3_calls_and_25_ms(us: float, warm_ups: int) -> None:
    device = steady(us)
    samples = measure(device.call, device, samples=10, cap_s=1e6)
    assert device.calls - len(samples.raw) in (warm_ups, warm_ups + 1)  # + 1: rounding at exactly 25 ms


@pytest.mark.parametrize(("cap_s", "warm_ups"), [(0.02, 10), (0.01, 5), (0.002, 3), (0.0, 3)])
def test_a_short_cap_halves_the_warm_up_but_3_calls(cap_s: float, warm_ups: int) -> None:
    device = steady(1_000)
    samples = measure(device.call, device, samples=10, cap_s=cap_s)
    assert device.calls - len(samples.raw) in (warm_ups, warm_ups + (warm_ups > 3))  # + 1: rounding at the very end
    assert len(samples.raw) >= min(10, warm_ups - 1), "the other half is for samples"


def test_settled_at_once_takes_what_was_asked_for() -> None:
    samples = measure((device := steady(1000)).call, device, samples=10, cap_s=1.0)
    assert samples.settled
    assert len(samples.raw) == 10
    assert samples.raw == pytest.approx([1000] * 10)


def test_a_spread_that_settles_late_gets_more_samples() -> None:
    # 25 warm-ups; of the first 10 samples half are 1.5 x, then all are equal: IQR 0 once under a quarter are slow.
    slow_start = iter([1000.0] * 25 + [1000.0, 1500.0] * 5 + [1000.0] * 10_000)
    samples = measure((device := FakeDevice(slow_start)).call, device, samples=10, cap_s=10.0)
    assert samples.settled
    assert len(samples.raw) == 40
    assert samples.max == pytest.approx(1500), "no sample is dropped"


def test_never_settled_stops_at_the_cap_and_says_so() -> None:
    samples = measure((device := noisy(1000)).call, device, samples=10, cap_s=1.0)
    assert not samples.settled
    assert device.host_s <= 1.0
    assert 500 < len(samples.raw) < 700  # 1 s less the warm-up, at 1.5 ms each


def test_never_settled_stops_at_the_most_samples() -> None:
    samples = measure((device := noisy(1)).call, device, samples=10, cap_s=1e6)
    assert not samples.settled
    assert len(samples.raw) == MAX_SAMPLES


def test_a_short_cap_gives_fewer_samples_but_3() -> None:
    assert len(measure((device := steady(100_000)).call, device, samples=10, cap_s=0.75).raw) == 4
    assert device.host_s == pytest.approx(0.7)  # 3 warm-ups, then 4 samples
    assert len(measure((device := steady(100_000)).call, device, samples=10, cap_s=0.0).raw) == 3


def test_without_a_budget_the_cap_does_not_take_asked_samples_away() -> None:
    assert len(measure((device := steady(1e6)).call, device, samples=10, cap_s=0.3, least=10).raw) == 10


def test_fewer_than_asked_is_not_settled() -> None:
    assert not measure((device := steady(100_000)).call, device, samples=10, cap_s=0.75).settled


def test_the_device_is_kept_busy_longer_than_the_host_needs_to_queue_a_call() -> None:
    device = FakeDevice(repeat(10.0), queue_s=100e-6)
    measure(device.call, device, samples=5, cap_s=1.0)
    assert min(device.spins) == pytest.approx(220e-6)  # twice 100 us and 20 us


def test_sampling_lasts_as_long_as_asked_for() -> None:
    """1 ms calls settle at once: without a least time 10 samples, with 0.1 s about a hundred."""
    device = steady(1000)
    assert len(measure(device.call, device, samples=10, cap_s=1.0, l2="hot").raw) == 10
    samples = measure(device.call, device, samples=10, cap_s=1.0, l2="hot", min_s=0.1)
    assert 100 <= len(samples.raw) <= 200  # a batch is as long as all before it
    assert samples.settled
    few = measure((device := steady(1.0)).call, device, samples=10, cap_s=9.0, l2="hot", min_s=3.0)
    assert len(few.raw) == MAX_SAMPLES  # however short the calls are


def test_the_device_is_under_load_before_the_samples_count() -> None:
    """2 s of 1 ms calls, queued without a mark, in batches: one call alone, then 50 at a time."""
    device = steady(1000)
    measure(device.call, device, samples=5, cap_s=1.0, l2="hot", sustained_s=2.0)
    before = device.log[: device.log.index("mark")]
    assert 2000 <= before.count("call") <= 2100
    assert before[:54] == ["call", "sync", *["call"] * 50, "sync", "call"]


def test_the_flush_is_not_part_of_the_time_but_of_the_cap() -> None:
    device = FakeDevice(cycle([100.0, 200.0]), flush_s=0.01)
    samples = measure(device.call, device, samples=10, cap_s=1.0)
    assert samples.max == pytest.approx(200)
    assert 90 < len(samples.raw) < 100
    assert device.host_s <= 1.0


def test_statistics_of_hand_worked_samples() -> None:
    samples = Samples((6.0, 1.0, 2.0, 3.0, 4.0, 5.0), settled=True)
    assert (samples.min, samples.max, samples.avg, samples.median) == (1, 6, 3.5, 3.5)
    assert (samples.p20, samples.p80) == (2, 5)  # of 1..6: positions 0.2 x 5 = 1 and 4
    assert spread(samples.raw) == pytest.approx((4.75 - 2.25) / 3.5)
    assert samples.scaled(2).raw == (12, 2, 4, 6, 8, 10)
    assert spread([0.0, 0.0, 0.0]) == 0


def test_pooled_ranks_keep_every_sample_and_settle_only_together() -> None:
    one, two = Samples((1.0, 3.0), settled=True), Samples((2.0, 10.0), settled=False)
    assert pool([one, two]) == Samples((1.0, 3.0, 2.0, 10.0), settled=False)


@settings(max_examples=30)
@given(st.lists(st.floats(1, 1e6), min_size=1, max_size=50), st.integers(1, 30), st.floats(0, 5))
def test_whatever_the_times_the_counts_hold(times: list[float], asked: int, cap_s: float) -> None:
    device = FakeDevice(cycle(times))
    samples = measure(device.call, device, samples=asked, cap_s=cap_s)
    assert 3 <= len(samples.raw) <= MAX_SAMPLES
    assert samples.settled <= (len(samples.raw) >= asked)
    assert device.calls >= len(samples.raw) + 3


def budget(total_s: float | None, parts: int, times: list[float]) -> tuple[list[float], Callable[[], float]]:
    """The caps of `parts` measurements that take `times`."""
    clock = [0.0]
    shared = Budget(total_s, parts, each_s=0.3, now=lambda: clock[0])
    caps = []
    for seconds in times:
        caps.append(shared.next_cap())
        clock[0] += seconds
    return caps, lambda: clock[0]


def test_a_budget_is_shared_and_what_is_left_goes_to_the_later_ones() -> None:
    caps, _ = budget(1.0, 5, [0.2, 0.2, 0.0, 0.3, 0.3])
    assert caps == pytest.approx([0.2, 0.2, 0.2, 0.3, 0.3])
    assert budget(1.0, 2, [2.0, 0.0])[0] == pytest.approx([0.3, 0.0])
    assert budget(None, 2, [9.0, 9.0])[0] == [0.3, 0.3]


def test_a_budget_is_respected_by_the_whole_of_measuring() -> None:
    device = noisy(1000)
    shared = Budget(2.0, 20, each_s=0.3, now=device.now)
    for _ in range(20):
        measure(device.call, device, samples=10, cap_s=shared.next_cap())
    assert 1.9 < device.host_s <= 2.0
