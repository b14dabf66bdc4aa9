"""Protects users' profile files: both generations are read right, bad input is named, a failed write loses nothing."""

import errno
import os
import re
import resource
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aicb.files import MAX_BYTES, atomic_write
from aicb.times.profile import (
    KernelTime,
    Profile,
    ProfileError,
    format_profile,
    mismatches,
    parse_profile,
    read_profile,
    write_profile,
)

ROOT = Path(__file__).resolve().parent.parent
EXAMPLE = ROOT / "workload" / "aiob_inputs" / "Example.txt"

# name: max min avg, us; the sample every user of the first generation has
EXAMPLE_TIMES = {
    "Emb": (857, 782, 799),
    "layernorm": (84, 43, 70),
    "atten_qkv": (1255, 862, 889),
    "atten_flash": (786, 460, 512),
    "atten_linear": (939, 333, 349),
    "layernorm2": (116, 67, 71),
    "mlp_linear_1": (1876, 1372, 1408),
    "mlp_gelu": (560, 246, 257),
    "mlp_linear_2": (1183, 720, 742),
    "layernorm_post": (73, 68, 70),
    "logit_time": (15476, 12435, 12824),
    "param_time": (23746, 16647, 17374),
}
EXAMPLE_TEXT = "train_iter:10\n" + "".join(
    f"{name}:\n    time_gpu_max: {high}\n    time_gpu_min: {low}\n    time_gpu_avg: {avg}\n"
    for name, (high, low, avg) in EXAMPLE_TIMES.items()
)

SECOND = """\
train_iter:12
# format_version: 2
# gpu: NVIDIA H200
# hidden_size: 4096
# note: Emb: time_gpu_avg: 5
Emb:
    time_gpu_max: 857
    time_gpu_min: 782
    time_gpu_avg: 799
    weight_grad_avg: 812.5
layernorm:
    time_gpu_avg: 70.125
    input_grad_avg: 141
atten_qkv:
    time_gpu_avg: 889.5
    forward_median: 880.25
    input_grad_avg: 901
    weight_grad_avg: 915
    samples: 40
atten_rope:
    time_gpu_avg: 10
atten_flash:
    time_gpu_avg: 512
atten_linear:
    time_gpu_avg: 349
atten_residual:
    time_gpu_avg: 5.25
layernorm2:
    time_gpu_avg: 71
mlp_linear_1:
    time_gpu_avg: 1408
mlp_gelu:
    time_gpu_avg: 257.5
mlp_linear_2:
    time_gpu_avg: 742
mlp_residual:
    time_gpu_avg: 6
cross_entropy:
    time_gpu_avg: 33
param_time:
    time_gpu_avg: 17374
"""


def first_generation_sums(text: str) -> dict[str, float]:
    """What a first-generation reader makes of a file (the rules of facts/compute-profile.md), us."""
    averages: dict[str, float] = {}
    section = ""
    for line in re.split(r"\r\n|\r|\n", text):
        if line.startswith("#"):
            continue
        if opened := re.match(r"^(\w+):", line):
            section = opened[1]
        if found := re.search(r"time_gpu_avg:\s+(\d+(\.\d+)?)", line):
            averages[section] = float(found[1])
    attention = sum(avg for name, avg in averages.items() if "atten" in name) + averages["layernorm"]
    mlp = sum(avg for name, avg in averages.items() if "mlp" in name) + averages["layernorm2"]
    return {"attention": attention, "mlp": mlp, "Emb": averages["Emb"], "param_time": averages["param_time"]}


def profile(origin: dict[str, str] | None = None, **sections: KernelTime) -> Profile:
    return Profile("made.txt", 10, origin or {}, sections or {"Emb": KernelTime(1.0)})


@contextmanager
def unprivileged() -> Iterator[None]:
    """Permissions do not stop root: step down for the length of the block."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.fixture
def public() -> Iterator[Path]:
    """A folder that an unprivileged user can enter, which pytest's own is not, but not write to."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o555)
        yield folder
        folder.chmod(0o755)


# Reading


def test_example_is_the_published_sample() -> None:
    read = read_profile(EXAMPLE)
    assert read == parse_profile(EXAMPLE_TEXT, "x")
    assert first_generation_sums(EXAMPLE.read_text())["attention"] == 1820
    assert {name: (t.max, t.min, t.avg) for name, t in read.sections.items()} == EXAMPLE_TIMES
    assert list(read.sections) == list(EXAMPLE_TIMES)  # file order
    assert (read.train_iter, read.generation, read.origin) == (10, 1, {})
    assert (read.sections["Emb"].line, read.sections["layernorm"].line) == (2, 6)
    assert read.sections["Emb"].input_grad is None
    assert read.sections["Emb"].weight_grad is None


def test_second_generation_is_read() -> None:
    read = parse_profile(SECOND, "x")
    assert (read.train_iter, read.generation) == (12, 2)
    assert read.origin["gpu"] == "NVIDIA H200"
    assert read.origin["note"] == "Emb: time_gpu_avg: 5"
    qkv = read.sections["atten_qkv"]
    assert (qkv.avg, qkv.min, qkv.max, qkv.input_grad, qkv.weight_grad) == (889.5, None, None, 901, 915)
    assert qkv.more["forward_median"] == 880.25
    assert qkv.more["samples"] == 40
    assert (read.sections["Emb"].input_grad, read.sections["Emb"].weight_grad) == (None, 812.5)


@pytest.mark.parametrize(
    "text",
    [
        "\ufefftrain_iter:10\r\nEmb:\r\n    time_gpu_avg: 799\r\n",
        "train_iter: 10 \rEmb: \r\ttime_gpu_avg:799",
        "# see http://a.b: ask\n# http://a.b\n#\n\ntrain_iter:10\n\n  # 12:30 noon\nEmb:\n time_gpu_avg: 7.99e2\n",
    ],
)
def test_harmless_differences_are_read_normally(text: str) -> None:
    assert parse_profile(text, "x") == profile(Emb=KernelTime(799.0))


def test_unknown_sections_are_kept_and_rounded_averages_pass() -> None:
    text = "train_iter:1\nmystery_9:\n time_gpu_max: 3\n time_gpu_min: 3\n time_gpu_avg: 2\n"
    assert parse_profile(text, "x").sections == {"mystery_9": KernelTime(2, 3, 3)}


HEAD = "train_iter:10\nEmb:\n    time_gpu_avg: "


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "p.txt:1: found an empty file, expected the first line 'train_iter:N'"),
        ("\n# only: this\n", "p.txt:3: found an empty file"),
        ("Emb:\n    time_gpu_avg: 1\n", "p.txt:1: found 'Emb:', expected the first line 'train_iter:N'"),
        ("train_iter:0\n", "p.txt:1: found 'train_iter:0', expected"),
        ("train_iter:-3\n", "p.txt:1: found 'train_iter:-3', expected"),
        ("train_iter:1.5\n", "N >= 1"),
        ("train_iter:ten\n", "p.txt:1: found 'train_iter:ten'"),
        ("train_iter:" + "9" * 5000, "p.txt:1: found 'train_iter:999"),
        ("train_iter:10\n", "p.txt:2: found no section, expected at least one such as 'Emb:'"),
        ("train_iter:10\n    time_gpu_avg: 1\n", "p.txt:2: found the key 'time_gpu_avg' before any section"),
        (HEAD + "nan\n", "p.txt:3: found 'nan' for 'time_gpu_avg' of section 'Emb', expected a finite number"),
        (HEAD + "inf\n", "p.txt:3: found 'inf'"),
        (HEAD + "1e999\n", "p.txt:3: found '1e999'"),
        (HEAD + "-1\n", "p.txt:3: found '-1'"),
        (HEAD + "fast\n", "p.txt:3: found 'fast'"),
        (HEAD + "\n", "p.txt:3: found ''"),
        (HEAD + "1_000\n", "p.txt:3: found '1_000'"),
        (HEAD + "\u0661\n", "p.txt:3: found '\u0661'"),
        (HEAD + "12 34\n", "p.txt:3: found '12 34'"),
        (HEAD + "1\n    input_grad_avg: ?\n", "p.txt:4: found '?' for 'input_grad_avg' of section 'Emb'"),
        (HEAD + "1\n    time_gpu_avg: 1\n", "p.txt:4: found 'time_gpu_avg' a second time in section 'Emb'"),
        (HEAD + "1\nEmb:\n", "p.txt:4: found a second section 'Emb' (first on line 2)"),
        (HEAD + "1\nlayernorm:\n    time_gpu_min: 1\n", "p.txt:4: found section 'layernorm' without 'time_gpu_avg'"),
        ("train_iter:10\nEmb:\nlayernorm:\n", "p.txt:2: found section 'Emb' without 'time_gpu_avg'"),
        (HEAD + "1\nEmb = 3\n", "p.txt:4: found 'Emb = 3', expected a section such as 'Emb:' or an indented key"),
        (HEAD + "1\ntime_gpu_max: 1\n", "p.txt:4: found 'time_gpu_max: 1', expected"),
        (HEAD + "1\n    time_gpu_m", "p.txt:4: found 'time_gpu_m', expected"),
        ("train_iter:10\n# gpu: A\n# gpu: B\n", "p.txt:3: found the comment key 'gpu' a second time"),
        ("train_iter:10\nE\0mb:\n", "p.txt:2: found a NUL byte"),
        ("train_iter:10\n" + "x" * 10**6, "p.txt:2: found 'xxx"),
    ],
)
def test_bad_text_is_named_with_its_line(text: str, expected: str) -> None:
    with pytest.raises(ProfileError) as caught:
        parse_profile(text, "p.txt")
    message = str(caught.value)
    assert expected in message
    assert len(message.splitlines()) == 1
    assert len(message) < 300


def test_bad_files_are_named(tmp_path: Path) -> None:
    (tmp_path / "binary").write_bytes(b"train_iter:10\nEmb:\n\xff\xfe")
    (tmp_path / "huge").touch()
    os.truncate(tmp_path / "huge", MAX_BYTES + 1)
    os.mkfifo(tmp_path / "fifo")  # opening it would wait for a writer that never comes
    for path, expected in {
        tmp_path / "binary": "binary:3: found the byte 0xff, expected UTF-8 text",
        tmp_path / "huge": "found 16777217 bytes, expected a compute profile of at most 16777216 bytes",
        tmp_path / "fifo": "found not a regular file",
        tmp_path: "found a folder",
        tmp_path / "absent.txt": "cannot be read (No such file or directory)",
        Path("/dev/zero"): "/dev/zero: found not a regular file",
        Path("nul\0byte"): "'nul\\x00byte': cannot be read",
        Path("two\nlines"): "'two\\nlines': cannot be read",
    }.items():
        with pytest.raises(ProfileError, match=re.escape(expected)) as caught:
            read_profile(path)
        assert len(str(caught.value).splitlines()) == 1


def test_unreadable_file(tmp_path: Path) -> None:
    path = tmp_path / "secret.txt"
    path.write_text(EXAMPLE_TEXT)
    path.chmod(0)
    with unprivileged(), pytest.raises(ProfileError, match=r"secret\.txt: cannot be read \(Permission denied\)"):
        read_profile(path)


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzz") / "fuzz.txt"


edits = st.lists(st.tuples(st.integers(0, 1200), st.integers(0, 40), st.binary(max_size=6)), min_size=1, max_size=4)


@given(data=st.one_of(st.binary(max_size=200), edits))
def test_no_bytes_raise_anything_but_a_profile_error(data: bytes | list[tuple[int, int, bytes]], scratch: Path) -> None:
    content = EXAMPLE_TEXT.encode() if isinstance(data, list) else data
    for start, length, new in data if isinstance(data, list) else []:
        content = content[:start] + new + content[start + length :]
    scratch.write_bytes(content)
    try:
        read = read_profile(scratch)
    except ProfileError as error:
        message = str(error)
    else:
        assert read.train_iter >= 1
        assert all(0 <= t.avg < float("inf") for t in read.sections.values())
        return
    assert message.startswith(f"{scratch}:")
    assert len(message.splitlines()) == 1


# Writing


def test_first_generation_reader_reads_both_generations() -> None:
    # Hand-added: attention 70 + 889 + 512 + 349, mlp 71 + 1408 + 257 + 742.
    sums = {"attention": 1820, "mlp": 2478, "Emb": 799, "param_time": 17374}
    assert first_generation_sums(EXAMPLE_TEXT) == sums
    assert first_generation_sums(format_profile(parse_profile(EXAMPLE_TEXT, "x"))) == sums
    # attention 70.125 + 889.5 + 10 + 512 + 349 + 5.25, mlp 71 + 1408 + 257.5 + 742 + 6; cross_entropy in neither.
    written = format_profile(parse_profile(SECOND, "x"))
    assert first_generation_sums(written) == {"attention": 1835.875, "mlp": 2484.5, "Emb": 799, "param_time": 17374}


def test_written_text_is_exactly_this() -> None:
    emb = KernelTime(799.12345, 782.0, 857.5, {"weight_grad_avg": 1e15, "forward_p20": 0.0004, "forward_p80": -0.0})
    made = Profile("x", 10, {"format_version": "2", "gpu": "", "note": " padded "}, {"Emb": emb})
    assert format_profile(made) == (
        "train_iter:10\n# format_version: 2\n# gpu:\n# note: padded\nEmb:\n"
        "    time_gpu_max: 857.5\n    time_gpu_min: 782\n    time_gpu_avg: 799.123\n"
        "    weight_grad_avg: 1000000000000000\n    forward_p20: 0\n    forward_p80: 0\n"
    )
    assert format_profile(parse_profile(EXAMPLE_TEXT, "x")) == EXAMPLE_TEXT
    assert format_profile(parse_profile(SECOND, "x")) == SECOND


@pytest.mark.parametrize(
    ("made", "expected"),
    [
        (profile(Emb=KernelTime(1, more={"foo_time_gpu_avg": 1})), "key 'foo_time_gpu_avg' of section 'Emb'"),
        (profile(Emb=KernelTime(1, more={"grad_time_gpu_min": 1})), "not ending in time_gpu_avg or time_gpu_min"),
        (profile(Emb=KernelTime(1, more={"time_gpu_max": 1})), "key 'time_gpu_max'"),
        (profile(Emb=KernelTime(1, more={"two words": 1})), "key 'two words'"),
        (profile(Emb=KernelTime(float("nan"))), "'time_gpu_avg' of section 'Emb' is nan, expected a finite number"),
        (profile(Emb=KernelTime(1, max=float("inf"))), "'time_gpu_max' of section 'Emb' is inf"),
        (profile(Emb=KernelTime(1, more={"input_grad_avg": -1})), "'input_grad_avg' of section 'Emb' is -1"),
        (Profile("made.txt", 1, {}, {"Emb:\nx": KernelTime(1)}), "section name 'Emb:\\nx'"),
        (profile({"gpu": "A\nEmb:"}), "origin 'gpu' is 'A\\nEmb:', expected a word and one line of text"),
        (profile({"gpu": "A\rB"}), "origin 'gpu'"),
        (profile({"gpu": "A\0B"}), "origin 'gpu'"),
        (profile({"gpu": "\ud800"}), "origin 'gpu'"),
        (profile({"a: b": "c"}), "origin 'a: b'"),
        (profile({"": "c"}), "origin ''"),
        (Profile("made.txt", 0, {}, {"Emb": KernelTime(1)}), "train_iter 0 and 1 sections to write"),
        (Profile("made.txt", 1, {}, {}), "train_iter 1 and 0 sections to write"),
    ],
)
def test_what_a_reader_would_misread_is_not_written(made: Profile, expected: str, tmp_path: Path) -> None:
    with pytest.raises(ProfileError, match=re.escape(expected)) as caught:
        write_profile(made, tmp_path / "new.txt")
    assert str(caught.value).startswith("made.txt: ")
    assert len(str(caught.value).splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


words = st.from_regex(r"[a-z_]\w{0,12}", fullmatch=True)
times = st.integers(0, 10**11).map(lambda ns: ns / 1000)
keys = words.filter(lambda key: not key.endswith(("time_gpu_avg", "time_gpu_min", "time_gpu_max")))
kernels = st.builds(
    KernelTime, times, st.none() | times, st.none() | times, st.dictionaries(keys, times, max_size=4), st.just(0)
)
values = st.text(st.characters(exclude_categories=["Cc", "Cs", "Zl", "Zp"])).map(str.strip)
profiles = st.builds(
    Profile,
    st.just("x"),
    st.integers(1, 10**17),
    st.dictionaries(words, values, max_size=5),
    st.dictionaries(words, kernels, min_size=1, max_size=5),
)


@given(profiles)
def test_round_trip(made: Profile) -> None:
    read = parse_profile(format_profile(made), "y")
    assert read == made
    assert list(read.sections) == list(made.sections)
    assert list(read.origin) == list(made.origin)


def test_mismatches_lists_each_differing_field() -> None:
    stated = profile(
        {"hidden_size": "4096", "dtype": "BFloat16", "seq_length": "4096.0", "micro_batch": "1", "gpu": "A"}
    )
    asked = {"hidden_size": "5120", "dtype": "bfloat16", "seq_length": "4096", "micro_batch": "one", "tp": "8"}
    assert mismatches(stated, asked) == ["hidden_size: profile 4096, asked 5120", "micro_batch: profile 1, asked one"]
    assert mismatches(profile(), asked) == []  # a first-generation file states nothing


def test_import_stays_cheap() -> None:
    code = (
        f"import sys; before = set(sys.modules); sys.path.insert(0, {str(ROOT)!r}); import aicb.times.profile;"
        "print(sorted({'torch', 'numpy', 'pandas', 'json', 'typer'} & (set(sys.modules) - before)))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


# Atomic writing


def test_write_replaces_and_creates_folders(tmp_path: Path) -> None:
    path = tmp_path / "new" / "deeper" / ("n" * 251 + ".txt")  # as long as a name can be
    write_profile(parse_profile(EXAMPLE_TEXT, "x"), path)
    assert path.read_text() == EXAMPLE_TEXT
    write_profile(parse_profile(SECOND, "x"), path)
    assert path.read_text() == SECOND
    assert list(path.parent.iterdir()) == [path]


def write_half(path: Path, failure: type[BaseException]) -> None:
    with atomic_write(path) as file:
        file.write(b"half of the new")
        file.flush()
        raise failure


@pytest.mark.parametrize("failure", [RuntimeError, KeyboardInterrupt, SystemExit, OSError])
@pytest.mark.parametrize("existed", [True, False])
def test_failure_leaves_the_old_file_and_no_temporary(
    failure: type[BaseException], existed: bool, tmp_path: Path
) -> None:
    path = tmp_path / "out.txt"
    if existed:
        path.write_text("old")
    with pytest.raises(failure):
        write_half(path, failure)
    assert [p.read_text() for p in tmp_path.iterdir()] == (["old"] if existed else [])


def test_full_disk_names_the_file(tmp_path: Path) -> None:
    path = tmp_path / "out.txt"
    path.write_text("old")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))  # write() fails as on a full disk
    try:
        with pytest.raises(OSError, match="File too large") as caught, atomic_write(path) as file:
            file.write(b"x" * 100_000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert caught.value.errno == errno.EFBIG
    assert caught.value.filename == str(path)
    assert [p.read_text() for p in tmp_path.iterdir()] == ["old"]


def test_unwritable_folder_names_the_file(public: Path) -> None:
    with unprivileged(), pytest.raises(PermissionError) as caught, atomic_write(public / "out.txt"):
        pytest.fail("the block must not start")
    assert str(caught.value).endswith(f"'{public / 'out.txt'}'")  # and not the temporary's name
    assert list(public.iterdir()) == []


def test_write_protected_file_is_not_replaced(public: Path) -> None:
    public.chmod(0o777)
    path = public / "kept.txt"
    path.write_text("old")
    path.chmod(0o444)
    with unprivileged(), pytest.raises(PermissionError), atomic_write(path):
        pytest.fail("the block must not start")
    assert [p.read_text() for p in public.iterdir()] == ["old"]


def test_only_a_regular_file_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "file").touch()
    for name, error in {"folder": IsADirectoryError, "fifo": OSError, "file/out.txt": OSError}.items():
        with pytest.raises(error), atomic_write(tmp_path / name):
            pytest.fail("the block must not start")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["fifo", "file", "folder"]


def test_permissions_follow_umask_then_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "out.txt"
    before = os.umask(0o027)
    try:
        with atomic_write(path) as file:
            file.write(b"one")
        assert stat.S_IMODE(path.stat().st_mode) == 0o640
        path.chmod(0o604)
        with atomic_write(path) as file:
            file.write(b"two")
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o604
    assert path.read_bytes() == b"two"


def test_a_symbolic_link_stays(tmp_path: Path) -> None:
    (tmp_path / "real.txt").write_text("old")
    (tmp_path / "link.txt").symlink_to("real.txt")
    with atomic_write(tmp_path / "link.txt") as file:
        file.write(b"new")
    assert (tmp_path / "link.txt").is_symlink()
    assert (tmp_path / "real.txt").read_text() == "new"
