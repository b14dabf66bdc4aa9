"""Real processes over gloo on 127.0.0.1: all ranks succeed or all fail, and none waits for one that is gone."""

import subprocess
import textwrap

import pytest

from aicb.errors import UserError
from profiler.ranks import Ranks, host
from tests.profiler.fakes import finish, processes


def start(code: str, size: int = 2, timeout_s: int = 60) -> list[subprocess.Popen[str]]:
    """Run `code` in `size` processes that hold the process group; `ranks` is at hand."""
    held = f"""
        import os, sys, time
        from profiler.ranks import Ranks, process_group
        ranks = Ranks.from_environment()
        with process_group(ranks, {timeout_s}):
    """
    return processes(textwrap.dedent(held) + textwrap.indent(textwrap.dedent(code), " " * 4), size)


def test_objects_of_different_size_come_together_on_every_rank_without_numpy() -> None:
    code = """
        sys.modules["numpy"] = None
        print(ranks.exchange({"rank": ranks.rank, "us": [0.5] * (1 + 1000 * ranks.rank)})[1]["us"][-1])
        print([len(each) for each in ranks.exchange("x" * ranks.rank)])
    """
    assert finish(start(code)) == [(0, "0.5\n[0, 1]\n")] * 2


def test_failing_ranks_fail_all_with_their_messages() -> None:
    code = """
        def work():
            if ranks.rank == 0:
                return "fine"
            raise UserError("it does not fit") if ranks.rank == 1 else RuntimeError("two\\nlines")
        ranks.together(work)
        print("not reached")
    """
    said = f"error: rank 1 ({host()}): it does not fit; rank 2 ({host()}): RuntimeError: two lines\n"
    assert finish(start(code, size=3)) == [(2, said)] * 3


def test_a_rank_that_dies_is_noticed_at_once() -> None:
    code = """
        if ranks.rank == 1:
            os._exit(9)
        ranks.together(lambda: None)
    """
    (code_0, said), (code_1, _) = finish(start(code, timeout_s=3600))  # the group's own patience outlasts finish's
    assert (code_0, code_1) == (2, 9)
    assert said.startswith(f"error: rank 0 ({host()}) lost the other ranks: ")


def test_a_rank_that_hangs_is_given_up_after_the_timeout() -> None:
    code = """
        from datetime import timedelta
        import torch.distributed as dist
        # Only now that they have met: how long that takes is the machine's business.
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=2), dist.group.WORLD)
        time.sleep(600) if ranks.rank else ranks.together(lambda: None)
    """
    waits, hangs = start(code, timeout_s=300)
    try:
        ((ended, said),) = finish([waits])
    finally:
        hangs.kill()
        hangs.communicate()
    assert ended == 2
    assert said.startswith(f"error: rank 0 ({host()}) lost the other ranks: ")


def test_a_rank_whose_others_never_come_says_so() -> None:
    alone, absent = start("print('not reached')", timeout_s=3)
    absent.kill()
    ((code, said), _) = finish([alone, absent])
    assert code == 2
    assert said.startswith(f"error: rank 0 ({host()}) cannot reach the other ranks: ")


@pytest.mark.parametrize("end", ["done", "failed", "lost"])
def test_nothing_holds_the_group_once_it_has_ended(end: str) -> None:
    # What is left of it when the interpreter unloads aborts the process now and then: exit code -6.
    code = f"""
        import os, weakref
        import torch.distributed as dist
        from profiler.ranks import Ranks, process_group
        def fail():
            raise ValueError("no such luck")
        ranks = Ranks.from_environment()
        caught = None
        try:
            with process_group(ranks, 60):
                group = weakref.ref(dist.group.WORLD)
                assert group() is not None
                if "{end}" == "lost" and ranks.rank:
                    os._exit(9)
                ranks.together(fail if "{end}" == "failed" else int)
        except UserError as error:
            caught = error  # and its traceback with it
        assert (caught is None) == ("{end}" == "done"), caught
        print("held" if group() is not None or dist.is_initialized() else "gone")
    """
    assert finish(processes(code, 2))[0] == (0, "gone\n")


def test_what_choosing_kernels_loads_holds_no_group() -> None:
    # torch.distributed.nn takes the group of the moment it is loaded as a default, and optimizers load it.
    code = """
        import sys, weakref
        import torch
        import torch.distributed as dist
        from profiler.implementations import choose
        from profiler.ranks import Ranks, process_group
        from tests.profiler.numerics import small_job
        ranks = Ranks.from_environment()
        with process_group(ranks, 60):
            group = weakref.ref(dist.group.WORLD)
            ranks.together(lambda: choose(small_job("gpt_tp", "float32"), torch.device("cpu")) and None)
        assert "torch.distributed.nn.functional" in sys.modules
        print("held" if group() is not None else "gone")
    """
    assert finish(processes(code, 2)) == [(0, "gone\n")] * 2


def test_without_torchrun_there_is_one_rank_and_no_group() -> None:
    alone = Ranks.from_environment({})
    assert alone == Ranks()
    assert alone.exchange("mine") == ["mine"]
    with pytest.raises(ZeroDivisionError):  # one rank's own error needs no wrapping
        alone.together(lambda: 1 // 0)


@pytest.mark.parametrize(
    ("environ", "said"),
    [
        ({"RANK": "0"}, "WORLD_SIZE=(unset) is no rank or size"),
        ({"RANK": "0", "WORLD_SIZE": "0"}, "WORLD_SIZE=0 is no rank or size"),
        ({"RANK": "x", "WORLD_SIZE": "2"}, "RANK=x is no rank or size"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "LOCAL_RANK=(unset) is no rank or size"),
        (
            {"RANK": "2", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"},
            "RANK=2 must be less than WORLD_SIZE=2",
        ),
    ],
)
def test_half_set_variables_are_refused(environ: dict[str, str], said: str) -> None:
    with pytest.raises(UserError) as caught:
        Ranks.from_environment(environ)
    assert said in str(caught.value)
