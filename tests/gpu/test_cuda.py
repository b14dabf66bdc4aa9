"""What only a CUDA GPU can show: `python3 -m pytest -m gpu tests/gpu`, or scripts/gpu_check.sh for all of it."""

import importlib.util
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from aicb.errors import UserError
from aicb.step.kernels import kernel_table
from aicb.times.profile import read_profile
from profiler.builders import Built, build
from profiler.device import Cuda, pick_device
from profiler.implementations import choose
from profiler.kernels import Bench, choose_and_check
from profiler.measure import measure
from profiler.ranks import Ranks
from profiler.run import profile_jobs
from profiler.settings import Settings
from tests.profiler import test_builders as on_cpu
from tests.profiler.numerics import TOLERANCES, kernels, small_job

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU"),
    pytest.mark.filterwarnings("default"),  # what a driver or a library says is no failure of ours
]


@pytest.fixture(scope="module")
def card() -> Cuda:
    found = pick_device("auto")
    assert isinstance(found, Cuda)
    found.burn_in(0.5)
    return found


def cpu(result: object) -> object:
    """The same on the CPU, where the float64 reference is."""
    if isinstance(result, tuple):
        return tuple(cpu(part) for part in result)
    return result.cpu() if isinstance(result, Tensor) else result


def fetched(ready: Built) -> Built:
    """A kernel that runs on the card and whose tensors and results are seen on the CPU."""
    input_grad, weight_grad = ready.input_grad, ready.weight_grad
    return Built(
        lambda: cpu(ready.forward()),
        None if input_grad is None else lambda: cpu(input_grad()),
        None if weight_grad is None else lambda: cpu(weight_grad()),
        tensors={name: tensor.detach().cpu() for name, tensor in ready.tensors.items()},
    )


@pytest.mark.parametrize(("kind", "name"), on_cpu.cases())
def test_bfloat16_kernels_agree_with_float64(kind: str, name: str, card: Cuda) -> None:
    torch.manual_seed(0)
    job = small_job(kind, "bfloat16", flash=name == "atten_flash")
    kernel = kernels(job)[name]
    ready = fetched(build(kernel, job, card.torch_device, choose(job, card.torch_device)))
    if kernel.op == "residual":
        on_cpu.check_residual(ready, TOLERANCES["bfloat16"])
    elif kernel.op == "router":
        on_cpu.check_router_ignoring_near_ties(kernel, ready)
    else:
        on_cpu.check_against_reference(kernel, ready, TOLERANCES["bfloat16"])


def test_a_gemm_takes_what_a_loop_by_hand_takes(card: Cuda) -> None:
    one = torch.randn(4096, 4096, device=card.torch_device, dtype=torch.bfloat16)
    for _ in range(20):
        torch.mm(one, one)
    start, end = card.mark(), None
    for _ in range(100):
        torch.mm(one, one)
    end = card.mark()
    card.synchronize()
    by_hand = card.elapsed_us(start, end) / 100
    samples = measure(lambda: torch.mm(one, one), card, samples=50, cap_s=1.0, l2="hot")
    assert samples.median == pytest.approx(by_hand, rel=0.2)


def test_a_slow_host_does_not_read_as_a_slow_kernel(card: Cuda) -> None:
    one = torch.randn(1024, device=card.torch_device)

    def call() -> None:
        end = time.perf_counter() + 300e-6
        while time.perf_counter() < end:
            pass
        one.add_(1)

    for l2 in ("hot", "cold"):
        assert measure(call, card, samples=20, cap_s=0.5, l2=l2).median < 100


def test_the_spin_lasts_about_as_long_as_asked(card: Cuda) -> None:
    start = card.mark()
    card.spin(0.01)
    end = card.mark()
    card.synchronize()
    assert card.elapsed_us(start, end) == pytest.approx(10_000, rel=0.3)


def test_a_cold_cache_is_slower_than_a_hot_one(card: Cuda) -> None:
    one = torch.randn(2 * 2**20, device=card.torch_device)  # 8 MiB, within every L2 of today's data-centre cards
    hot, cold = (measure(one.sum, card, samples=50, cap_s=0.5, l2=l2).median for l2 in ("hot", "cold"))
    assert cold > hot


def test_the_card_is_described(card: Cuda) -> None:
    facts = card.facts()
    assert facts["gpu"] == torch.cuda.get_device_name()
    assert float(facts["gpu_memory_gib"]) > 1
    assert facts["cuda"] == torch.version.cuda
    if importlib.util.find_spec("pynvml"):
        assert facts["driver"] != "unknown"
        assert card.telemetry()["clocks"].startswith("SM ")


def test_too_large_a_job_is_refused_before_anything_is_allocated(card: Cuda) -> None:
    job = small_job("llama_gqa", "bfloat16", flash=True)
    job = replace(job, training=replace(job.training, micro_batch=2**26, global_batch=2**29))
    before = torch.cuda.memory_allocated()
    with pytest.raises(UserError, match="lower --micro_batch"):
        choose_and_check(job, Bench(card, Settings(), Ranks()))
    assert torch.cuda.memory_allocated() == before


@pytest.mark.parametrize("kind", ["gpt_tp", "gqa_qk_norm_sp", "mla_no_q_lora_sp", "moe_loop_shared_sp"])
def test_the_whole_flow(kind: str, tmp_path: Path) -> None:
    job = small_job(kind, "bfloat16", flash=True)
    settings = Settings(time_budget=5.0, show_progress=False)
    (path,) = profile_jobs([(job, lambda slug: tmp_path / f"{slug}.txt")], settings)
    assert path is not None
    found = read_profile(path)
    assert found.origin["gpu"] == torch.cuda.get_device_name()
    assert list(found.sections) == [kernel.name for kernel in kernel_table(job)]
    assert all(section.avg > 0 for section in found.sections.values())
    assert torch.cuda.memory_allocated() < 2**30, "the kernels' tensors are still held"
