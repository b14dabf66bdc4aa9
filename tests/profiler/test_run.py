"""From a job to the profile's text: the flow with kernels and a clock that the test decides; then the real ones."""

import json
import re
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from aicb import __version__
from aicb.config.job import Job
from aicb.config.model import ModelConfig
from aicb.config.parallel import ParallelConfig
from aicb.config.training import TrainingConfig
from aicb.errors import UserError
from aicb.step.kernels import GEMM, INPUT, STEP_END, Kernel, kernel_table
from aicb.times.profile import read_profile
from aicb.times.samples import kernels_of, samples_path
from profiler import kernels, run
from profiler.builders import Built
from profiler.candidates import Choice
from profiler.measure import Samples
from profiler.ranks import host
from profiler.report import layer_kernels, profile_of
from profiler.results import RankResult
from profiler.run import profile_jobs
from profiler.settings import Settings
from profiler.telemetry import Reading
from tests.profiler.fakes import FakeDevice, finish, processes

GIB = 2**30


def tiny(**model: Any) -> Job:
    sizes: dict[str, Any] = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "num_query_groups": 2}
    sizes |= {"kv_channels": 16, "ffn_hidden_size": 192, "vocab_size": 256, "name": "tiny", **model}
    return Job(
        model=ModelConfig(**sizes),
        parallel=ParallelConfig(world_size=2, tensor_model_parallel_size=2, enable_sequence_parallel=True),
        training=TrainingConfig(global_batch=1, seq_length=32),
    )


class FakeGpu(FakeDevice):
    """What run asks of a device beside the clock."""

    kind, name, slug, burn_in_s, min_time_s, torch_device = "cuda", "NVIDIA Fake 1", "Fake-1", 1.0, 0.0, None
    identity = "GPU-1"
    free = 8 * GIB
    throttle = "none"
    readings: tuple[Reading, ...] = ()
    violations: Mapping[str, float] = {}

    def burn_in(self, seconds: float) -> None:
        self.host_s += seconds

    def telemetry(self) -> dict[str, str]:
        self.host_s += 0.0
        state = {"clocks": "SM 1980 MHz, memory 3201 MHz", "power": "300 W", "temperature": "40 C"}
        return state | {"throttle": self.throttle}

    def watch(self) -> AbstractContextManager[list[Reading]]:
        return nullcontext(list(self.readings))

    def violations_s(self) -> dict[str, float]:
        return dict(self.violations)

    def spans(self, call: Callable[[], object]) -> list[tuple[str, float]]:
        """The kernel fills nine tenths of the time between the marks."""
        self.synchronize()
        start = self.device_s
        call()
        self.synchronize()
        return [("kernel", (self.device_s - start) * 9e5)]

    def free_bytes(self) -> int:
        return self.free

    def release(self) -> None:
        self.log.append("release")

    def facts(self) -> dict[str, str]:
        return {"gpu": self.name, "gpu_memory_gib": "8.0", "driver": "1", "cuda": "2", "torch": "3"}


class Bench:
    """Stand-ins for builders, choices and device. Kernel i of the table takes 100 + i us, its gradients 2 and 3 x."""

    def __init__(self, job: Job) -> None:
        self.device = FakeGpu()
        self.names = [kernel.name for kernel in kernel_table(job)]
        self.built: list[str] = []
        self.before: Callable[[str], None] = lambda _: None
        self.scale: dict[str, float] = {}
        self.layer_us = (1100.0, 3500.0)

    def us(self, name: str) -> float:
        return 100.0 + self.names.index(name)

    def work(self, us: float) -> Callable[[], None]:
        def call() -> None:
            self.device.log.append("call")
            self.device.work(us)

        return call

    def build(self, kernel: Kernel, *_: object) -> Built:
        self.before(kernel.name)
        self.built.append(kernel.name)
        us, scale = self.us(kernel.name), self.scale.get(kernel.name, 1.0)
        note = "" if scale == 1 else f"a part, x {scale}"
        return Built(self.work(us), self.work(2 * us), self.work(3 * us), scale=scale, note=note)

    def build_layer(self, *_: object) -> Built:
        return Built(self.work(self.layer_us[0]), self.work(self.layer_us[1]))


def set_needs(monkeypatch: pytest.MonkeyPatch, needed: Callable[[Kernel, Job], int]) -> None:
    monkeypatch.setattr(kernels, "kernel_bytes", lambda kernel, job, *_: needed(kernel, job))
    layer = sum(needed(kernel, tiny()) for kernel in layer_kernels(tiny()))
    monkeypatch.setattr(kernels, "layer_bytes", lambda *_: layer)


@pytest.fixture
def job() -> Job:
    return tiny()


@pytest.fixture
def bench(job: Job, monkeypatch: pytest.MonkeyPatch) -> Bench:
    made = Bench(job)
    choices = SimpleNamespace(
        attention=Choice("SDPA flash", "flash-attn is\nnot installed"),
        norm=Choice("torch", "apex is not installed"),
        grouped_gemm=Choice("loop", "unused"),
        weight_grad=Choice("addmm", "apex is not installed"),
        elementwise=Choice("torch.compile", "it works"),
        optimizer=Choice("torch fused AdamW", "apex is not installed"),
    )
    monkeypatch.setattr(run, "pick_device", lambda *_: made.device)
    monkeypatch.setattr(kernels, "choose", lambda *_: choices)
    set_needs(monkeypatch, lambda *_: GIB // 8)
    monkeypatch.setattr(kernels, "build", made.build)
    monkeypatch.setattr(kernels, "build_layer", made.build_layer)
    monkeypatch.setattr(kernels, "host", lambda: "node-1")
    return made


def settings(**more: Any) -> Settings:
    return Settings(**{"show_progress": False, **more})


def profiled(job: Job, folder: Path, **more: Any) -> Path:
    (path,) = profile_jobs([(job, lambda slug: folder / f"{slug}-tiny.txt")], settings(**more))
    return path


def test_the_written_file_is_exactly_this(job: Job, bench: Bench, tmp_path: Path) -> None:
    """Hand-worked. Kernels 6 and 11 have the shape of 1, a norm, and 10 that of 5: they have their times.

    The layer's parts are kernels 1 to 10, 101 + ... + 110 less 5 and 5 = 1045 us forward, of 1100: 0.950. Backward
    2 x 1045 and, for the four GEMMs, 3 x (102 + 104 + 107 + 109) = 3356 us, of 3500: 0.959. In all: 18 kernels
    100 + ... + 117 less 5, 5 and 10 = 1933, input gradients 2 x (1933 - 100 - 114 - 115 - 116 - 117) = 2742, weight
    gradients 3 x (100 + 422 + 112) = 1902.
    """
    assert bench.names[1] == "layernorm"
    text = profiled(job, tmp_path).read_text()
    text = re.sub(r"(?m)^# date: \d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00$", "# date: DATE", text)
    text = text.replace(f"# tool_version: {__version__}\n", "# tool_version: VERSION\n")
    assert text == (Path(__file__).parent / "golden_profile.txt").read_text()


def test_raw_samples_lie_beside_it_in_the_order_taken(job: Job, bench: Bench, tmp_path: Path) -> None:
    bench.scale["param_time"] = 2.5
    path = profiled(job, tmp_path, train_iter=4)
    document = json.loads((tmp_path / "Fake-1-tiny.json").read_text())
    assert document["origin"] == read_profile(path).origin
    (rank,) = document["ranks"]
    assert list(rank["kernels"]) == bench.names
    qkv, optimizer = rank["kernels"]["atten_qkv"]["weight_grad"], rank["kernels"]["param_time"]
    assert qkv == {"settled": True, "us": [306.0] * 4, "spans": [["kernel", pytest.approx(275.4)]]}
    assert optimizer["forward"]["us"] == [292.5] * 4  # 2.5 x 117
    assert optimizer["forward"]["spans"] == [["kernel", pytest.approx(263.25)]]
    ((name, us),) = kernels_of(path)["atten_qkv"]["weight_grad"]
    assert name == "kernel"
    assert us == pytest.approx(275.4)
    assert document["origin"]["note_param_time"] == "a part, x 2.5"
    assert rank["layer"]["forward"]["us"] == [1100.0] * 4
    assert sorted(found.name for found in tmp_path.iterdir()) == ["Fake-1-tiny.json", "Fake-1-tiny.txt"]


def test_what_changes_times_stands_in_the_name() -> None:
    assert Settings().marks() == []
    asked = Settings(l2="hot", fusion=False, attention_backend="sdpa", gradient_accumulation_fusion=False)
    assert asked.marks() == ["attention_sdpa", "no_fusion", "no_gradient_accumulation_fusion", "l2hot"]
    assert Settings(gradient_accumulation_fusion=True).marks() == ["gradient_accumulation_fusion"]


def test_samples_never_take_the_profiles_own_name() -> None:
    assert samples_path(Path("a/H200-v1.5.txt")) == Path("a/H200-v1.5.json")
    assert samples_path(Path("a/mine.json")) == Path("a/mine.json.json")


def test_each_kernels_tensors_go_before_the_next_come(job: Job, bench: Bench, tmp_path: Path) -> None:
    bench.before = lambda name: bench.device.log.append(f"build {name}")
    profiled(job, tmp_path)
    steps = [entry for entry in bench.device.log if entry.startswith(("build", "release"))]
    once = [name for name in bench.names if name not in ("layernorm2", "mlp_residual", "layernorm_post")]
    assert steps == [step for name in once for step in (f"build {name}", "release")] + ["release"]
    assert bench.built == once


@pytest.mark.parametrize("failure", [KeyboardInterrupt, SystemExit, RuntimeError, UserError])
def test_a_failure_midway_leaves_the_files_as_they_were(
    job: Job, bench: Bench, tmp_path: Path, failure: type[BaseException]
) -> None:
    (tmp_path / "Fake-1-tiny.txt").write_text("earlier")

    def fail(name: str) -> None:
        if name == "logit_time":
            raise failure

    bench.before = fail
    with pytest.raises(failure):
        profiled(job, tmp_path)
    assert (tmp_path / "Fake-1-tiny.txt").read_text() == "earlier"
    assert sorted(found.name for found in tmp_path.iterdir()) == ["Fake-1-tiny.txt", "Fake-1-tiny.txt.partial"]


def test_a_failure_while_writing_leaves_no_profile(job: Job, bench: Bench, tmp_path: Path) -> None:
    assert bench.names
    (tmp_path / "Fake-1-tiny.json").mkdir()
    with pytest.raises(IsADirectoryError):
        profiled(job, tmp_path)
    assert sorted(found.name for found in tmp_path.iterdir()) == ["Fake-1-tiny.json", "Fake-1-tiny.txt.partial"]


def test_too_little_memory_names_both_numbers_before_anything_is_built(
    job: Job, bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    needs = {"logit_time": 9 * GIB, "cross_entropy": 12 * GIB, "param_time": 99 * GIB}
    set_needs(monkeypatch, lambda kernel, _: needs.get(kernel.name, GIB))
    with pytest.raises(UserError) as caught:
        profiled(job, tmp_path)
    assert str(caught.value) == (
        "cross_entropy needs 12.00 GiB and NVIDIA Fake 1 has 8.00 GiB free: lower --micro_batch or --seq_length, or "
        "raise --tensor_model_parallel_size (--tp)"
    )
    assert bench.built == []


def test_what_ends_a_step_alone_may_need_more_than_there_is(
    job: Job, bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_needs(monkeypatch, lambda kernel, _: 99 * GIB if kernel.name in STEP_END else GIB // 8)
    assert list(read_profile(profiled(job, tmp_path)).sections) == bench.names


NO_MEMORY = [
    "CUDA out of memory. Tried 2 GiB\nmore",
    "DefaultCPUAllocator: can't allocate memory",
    "CUDA error: out of memory",
    "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
    "cuDNN error: CUDNN_STATUS_ALLOC_FAILED",
]


@pytest.mark.parametrize("said", NO_MEMORY)
def test_an_allocation_that_fails_all_the_same_is_the_users_error(
    job: Job, bench: Bench, tmp_path: Path, said: str
) -> None:
    def fail(name: str) -> None:
        if name == "mlp_gelu":
            raise torch.cuda.OutOfMemoryError(said) if "Tried" in said else RuntimeError(said)

    bench.before = fail
    with pytest.raises(UserError) as caught:
        profiled(job, tmp_path)
    assert str(caught.value).startswith(
        f"mlp_gelu ran out of memory: {said.splitlines()[0]}; and NVIDIA Fake 1 has 8.00"
    )


def test_a_layer_too_large_for_memory_is_left_out_and_said(job: Job, bench: Bench, tmp_path: Path) -> None:
    bench.device.free = GIB  # ten parts of an eighth
    origin = read_profile(profiled(job, tmp_path)).origin
    assert origin["sum_of_parts_over_whole_forward"] == "not measured: one layer needs up to 1.2 GiB of 1.0 GiB free"
    assert "warning_sum_of_parts" not in origin


@pytest.mark.parametrize("said", [*NO_MEMORY, "an illegal memory access was encountered"])
def test_a_layer_that_fails_loses_no_kernel(
    job: Job, bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: str
) -> None:
    def fail(*_: object) -> Built:
        raise RuntimeError(said)

    monkeypatch.setattr(kernels, "build_layer", fail)
    found = read_profile(profiled(job, tmp_path))
    assert list(found.sections) == bench.names
    why = "ran out of memory: " if said in NO_MEMORY else ""
    note = f"not measured: whole layer: {why}{said.splitlines()[0].rstrip('. ')}"
    assert found.origin["sum_of_parts_over_whole_forward"] == note
    assert found.origin["sum_of_parts_over_whole_backward"] == note
    assert bench.device.log[-1] == "release"


@pytest.mark.parametrize(
    ("cards", "refused"),
    [
        ([("a", "GPU-1"), ("a", "GPU-2")], ""),
        ([("a", "GPU-1"), ("b", "GPU-1")], ""),  # an address on the bus, not a UUID
        ([("a", ""), ("a", "")], ""),  # CPUs share
        ([("a", "GPU-1"), ("a", "GPU-2"), ("a", "GPU-1")], r"ranks 0 and 2 \(a\) measure on one GPU \(GPU-1\)"),
    ],
)
def test_ranks_of_a_host_measure_on_cards_of_their_own(cards: list[tuple[str, str]], refused: str) -> None:
    """A scheduler may show each rank one card: index 0 everywhere, and only the UUIDs differ."""
    if refused:
        with pytest.raises(UserError, match=refused):
            run._require_own_cards(cards)
    else:
        run._require_own_cards(cards)


def test_a_time_budget_is_respected_and_short_samples_are_said(job: Job, bench: Bench, tmp_path: Path) -> None:
    bench.us = lambda name: 50_000.0 if name == "mlp_linear_1" else 100.0  # type: ignore[method-assign]
    found = read_profile(profiled(job, tmp_path, time_budget=4.0))
    assert bench.device.host_s <= 4.0
    assert found.sections["mlp_linear_1"].more["samples"] == 3
    assert found.origin["samples_per_measurement"] == "3 to 10"
    # Forward 50 ms, gradients 100 and 150 ms a call, and about 0.1 s for each: 3 samples is the least.
    assert found.origin["warning_samples"] == (
        "3 of 37 measurements got fewer than 10 samples within the time budget: mlp_linear_1 forward 3, "
        "mlp_linear_1 input_grad 3, mlp_linear_1 weight_grad 3"
    )
    names = "mlp_linear_1 forward, mlp_linear_1 input_grad, mlp_linear_1 weight_grad"
    assert found.origin["not_settled"] == f"3 of 37 measurements: {names}"
    assert found.origin["warning_not_settled"] == (
        f"3 of 37 measurements did not settle within 1 % (IQR / median): {names}"
    )


def test_without_a_budget_a_slow_kernel_gets_its_samples(job: Job, bench: Bench, tmp_path: Path) -> None:
    bench.us = lambda name: 500_000.0 if name == "mlp_linear_1" else 100.0  # type: ignore[method-assign]
    found = read_profile(profiled(job, tmp_path, train_iter=12))
    assert found.sections["mlp_linear_1"].more["samples"] == 12
    assert found.train_iter == 12


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"train_iter": 0}, "--train_iter 0 must be at least 1"),
        ({"device": "tpu"}, "--device tpu must be one of auto, cuda, cpu"),
        ({"l2": "warm"}, "--l2 warm must be cold or hot"),
        ({"time_budget": 0.0}, "--time_budget 0.0 must be a number of seconds above 0"),
        ({"time_budget": float("nan")}, "--time_budget nan must be"),
    ],
)
def test_settings_that_mean_nothing_are_refused(more: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError) as caught:
        settings(**more)
    assert said in str(caught.value)


# Several ranks


def result(rank: int, job: Job, factor: float, **more: Any) -> RankResult:
    """A rank on which every time is 100 us x `factor`, one sample in ten twice that."""
    samples = Samples((100.0 * factor,) * 9 + (200.0 * factor,), settled=True)
    state = {"clocks": "c", "power": "p", "temperature": "t", "throttle": "none"}
    ways = {kernel.name: ("forward", *kernels.WAYS[kernel.gradients]) for kernel in kernel_table(job)}
    made = RankResult(
        rank=rank,
        host=f"node-{rank}",
        facts={"gpu": "NVIDIA H200"},
        start=state,
        end=state,
        choices={},
        notes={},
        kernels={name: dict.fromkeys(parts, samples) for name, parts in ways.items()},
        layer={"forward": samples.scaled(10), "input_grad": samples.scaled(14)},
    )
    return replace(made, **more)


def origin_of(job: Job, *results: RankResult) -> dict[str, str]:
    return dict(profile_of(job, results, path="x", train_iter=10, l2="cold", date="d").origin)


def test_ranks_are_pooled_and_the_slowest_is_named(job: Job) -> None:
    both = (result(0, job, 1.0), result(1, job, 1.5))
    found = profile_of(job, both, path="x", train_iter=10, l2="cold", date="d")
    emb = found.sections["Emb"]
    assert (emb.min, emb.max) == (100, 300)
    assert emb.avg == pytest.approx((9 * 100 + 200 + 9 * 150 + 300) / 20)
    assert emb.more["samples"] == 20
    assert emb.more["forward_median"] == 150  # 9 x 100, then 9 x 150: the 10th is 150
    assert emb.weight_grad == 150
    assert emb.more["weight_grad_avg"] == pytest.approx(137.5)
    assert found.origin["ranks_measured"] == "2"
    # 18 kernels; 13 input gradients; weight gradients of 5 GEMMs and the embedding: 37 medians of 150 us.
    assert found.origin["slowest_rank"] == "1 (node-1), 5550.0 us for all kernels"
    assert found.origin["rank_spread_percent"] == "50.00"
    assert found.origin["host"] == "node-0, node-1"
    assert "warning_gpus" not in found.origin


def test_different_gpus_and_throttling_are_warned_of(job: Job) -> None:
    hot = {"clocks": "c", "power": "p", "temperature": "t", "throttle": "power cap"}
    origin = origin_of(job, result(0, job, 1.0), result(1, job, 1.0, facts={"gpu": "NVIDIA A100"}, end=hot))
    assert origin["warning_gpus"] == "the ranks measured different devices: rank 0 NVIDIA H200, rank 1 NVIDIA A100"
    assert origin["warning_throttled"] == "rank 1 power cap"


def test_the_sum_check_warns_beyond_a_tenth(job: Job) -> None:
    # Ten parts of 100 us over a layer of 1000 us; their 10 + 4 gradients over 1400.
    origin = origin_of(job, result(0, job, 1.0))
    assert origin["sum_of_parts_over_whole_forward"] == "1.000"
    assert origin["sum_of_parts_over_whole_backward"] == "1.000"
    assert "warning_sum_of_parts" not in origin
    slow = {"forward": Samples((800.0, 800.0), True), "input_grad": Samples((1300.0, 1300.0), True)}
    origin = origin_of(job, result(0, job, 1.0, layer=slow))
    assert origin["warning_sum_of_parts"] == (
        "the sum of the kernels is 1.250 x the measured layer in forward (more than 10% apart)"
    )
    both = {"forward": Samples((2000.0, 2000.0), True), "input_grad": Samples((700.0, 700.0), True)}
    assert origin_of(job, result(0, job, 1.0, layer=both))["warning_sum_of_parts"] == (
        "the sum of the kernels is 0.500 x the measured layer in forward and 2.000 x the measured layer in backward "
        "(more than 10% apart)"
    )


def test_of_many_measurements_the_first_three_are_named(job: Job) -> None:
    """Each use of the profile repeats these lines: 18 kernels, 13 input and 6 weight gradients are 37 measurements."""
    first = result(0, job, 1.0)
    assert not {"warning_not_settled", "warning_samples"} & set(origin_of(job, first))
    few = Samples((1.0, 2.0), settled=False)
    names = list(first.kernels)[:4]  # Emb, layernorm, atten_qkv, atten_flash: 2 + 2 + 3 + 2 measurements
    noisy = {name: dict.fromkeys(times, few) if name in names else times for name, times in first.kernels.items()}
    origin = origin_of(job, replace(first, kernels=noisy))
    assert origin["not_settled"] == ("9 of 37 measurements, such as Emb forward, Emb weight_grad, layernorm forward")
    assert origin["warning_not_settled"] == (
        "9 of 37 measurements did not settle within 1 % (IQR / median), such as Emb forward, Emb weight_grad, "
        "layernorm forward"
    )
    assert origin["warning_samples"] == (
        "9 of 37 measurements got fewer than 10 samples within the time budget, such as Emb forward 2, "
        "Emb weight_grad 2, layernorm forward 2"
    )


def test_the_layer_of_a_mixture_has_experts_and_no_dense_mlp() -> None:
    experts = {"num_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 32, "moe_layer_freq": (0, 1)}
    names = [kernel.name for kernel in layer_kernels(tiny(**experts, moe_shared_expert_intermediate_size=32))]
    assert names == [
        *("layernorm", "atten_qkv", "atten_flash", "atten_linear", "atten_residual", "layernorm2"),
        *("moe_router", "moe_permute", "moe_unpermute", "mlp_linear_1", "mlp_gelu", "mlp_linear_2"),
        *("mlp_shared_linear_1", "mlp_shared_gelu", "mlp_shared_linear_2", "mlp_shared_residual", "mlp_residual"),
    ]


def test_every_kind_of_gradient_is_measured(job: Job) -> None:
    kinds = {kernel.gradients for kernel in kernel_table(job)}
    assert kinds == set(kernels.WAYS)
    assert kernels.WAYS[GEMM] == ("input_grad", "weight_grad")
    assert kernels.WAYS[INPUT] == ("input_grad",)


def test_a_failing_rank_stops_both_and_no_file_is_written(tmp_path: Path) -> None:
    code = f"""
        from pathlib import Path
        from aicb.errors import UserError
        from profiler import kernels, run
        from tests.profiler.test_run import tiny
        build = kernels.build
        def failing(kernel, *more):
            if run.Ranks.from_environment().rank == 1 and kernel.name == "mlp_linear_1":
                raise UserError("no such luck")
            return build(kernel, *more)
        kernels.build = failing
        settings = run.Settings(device="cpu", l2="hot", time_budget=0.5, show_progress=False)
        run.profile_jobs([(tiny(), lambda slug: Path({str(tmp_path)!r}) / "out.txt")], settings)
    """
    said = f"error: rank 1 ({host()}): no such luck; {{}} of 18 kernels are kept in {tmp_path}/out.txt.rank{{}}.partial"
    said += ": --resume goes on from there\n"
    assert finish(processes(code, size=2)) == [(2, said.format(18, 0)), (2, said.format(7, 1))]
    assert sorted(found.name for found in tmp_path.iterdir()) == ["out.txt.rank0.partial", "out.txt.rank1.partial"]


# The real kernels


@pytest.mark.parametrize("l2", ["cold", "hot"])
def test_real_kernels_on_this_cpu(job: Job, tmp_path: Path, l2: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = profiled(job, tmp_path, device="cpu", l2=l2, time_budget=1.0, show_progress=True)
    assert path == tmp_path / "CPU-tiny.txt"
    found = read_profile(path)
    table = {kernel.name: kernel for kernel in kernel_table(job)}
    assert list(found.sections) == list(table)
    for name, section in found.sections.items():
        assert section.avg > 0
        assert (section.input_grad is not None) == (table[name].gradients in (GEMM, INPUT))
        assert (section.weight_grad is not None) == (table[name].gradients in (GEMM, "weight"))
        assert section.more["samples"] >= 3
    assert found.origin["l2"] == l2
    assert found.origin["gpu"].startswith("CPU ")
    assert float(found.origin["sum_of_parts_over_whole_backward"]) > 0
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "profiling 1/19 Emb"
    assert lines[-1] == "profiling 19/19 whole layer"
