"""What a user or a build meets before any code of ours runs: data, entry points, scripts, imports."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
from importlib.metadata import entry_points, requires, version
from pathlib import Path

import pytest

import aicb

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = ROOT / "scripts" / "megatron_workload_with_aiob.sh"

# The published sample: kernel, longest, shortest and average time in us.
EXAMPLE = [
    ("Emb", 857, 782, 799),
    ("layernorm", 84, 43, 70),
    ("atten_qkv", 1255, 862, 889),
    ("atten_flash", 786, 460, 512),
    ("atten_linear", 939, 333, 349),
    ("layernorm2", 116, 67, 71),
    ("mlp_linear_1", 1876, 1372, 1408),
    ("mlp_gelu", 560, 246, 257),
    ("mlp_linear_2", 1183, 720, 742),
    ("layernorm_post", 73, 68, 70),
    ("logit_time", 15476, 12435, 12824),
    ("param_time", 23746, 16647, 17374),
]

# A stand-in for a program: names itself, says where it runs and with what, and exits with a code of its own.
STAND_IN = """#!/bin/sh
echo {name}; pwd; for word in "$@"; do echo "<$word>"; done; exit 3
"""
WORDS = ["-m", "7", "", "two  words", "*", "--comp_filepath", "workload/x.txt"]


def run(*command: str | Path, cwd: Path, path: str | None = None) -> subprocess.CompletedProcess[str]:
    """Run `command` in `cwd`, its PATH replaced where one is given, free of this run's Python and make settings."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "MAKE", "MFLAGS"))}
    if path is not None:
        env["PATH"] = path
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, check=False)


def put(file: Path, text: str) -> Path:
    """Write an executable file, its folders too."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    file.chmod(0o755)
    return file


def test_example_profile_is_the_published_one() -> None:
    lines = ["train_iter:10"]
    for name, longest, shortest, average in EXAMPLE:
        lines += [f"{name}:", f"    time_gpu_max: {longest}", f"    time_gpu_min: {shortest}"]
        lines += [f"    time_gpu_avg: {average}"]
    example = ROOT / "workload" / "aiob_inputs" / "Example.txt"
    assert example.read_bytes() == ("\n".join(lines) + "\n").encode()


def test_version_is_the_packages_own() -> None:
    # Read from aicb/__init__.py by the build, which must not look into aicb.py of the root.
    assert version("aicb") == aicb.__version__


def test_console_command_is_the_command_line() -> None:
    (command,) = entry_points(group="console_scripts", name="aicb")
    assert command.value == "aicb.__main__:run"
    assert callable(command.load())


def test_package_never_imports_torch() -> None:
    sources = sorted((ROOT / "aicb").rglob("*.py"))
    assert ROOT / "aicb" / "__init__.py" in sources
    for source in sources:
        for node in ast.walk(ast.parse(source.read_text())):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            else:
                continue
            assert "torch" not in {name.split(".")[0] for name in names}, f"{source}:{node.lineno}"


@pytest.mark.parametrize(
    ("module", "heavy"),
    [
        ("aicb", {"torch", "pandas", "numpy", "rich", "typer"}),
        ("aicb.cli", {"torch", "pandas", "numpy"}),
    ],
)
def test_import_is_light(module: str, heavy: set[str], tmp_path: Path) -> None:
    done = run(sys.executable, "-c", f"import sys, {module}; print(*sys.modules)", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert heavy.isdisjoint(done.stdout.split())


def test_torchrun_entry_is_the_profile_command(tmp_path: Path) -> None:
    """The package must win over the module of its name, from any folder, and the exit code must come through."""
    shutil.copy(ROOT / "aicb.py", tmp_path)
    put(tmp_path / "aicb" / "__init__.py", "")
    stub = (
        "import sys\ndef run(*command: str) -> None:\n    print([*command, *sys.argv[1:]])\n    raise SystemExit(3)\n"
    )
    put(tmp_path / "aicb" / "__main__.py", stub)
    for folder in (tmp_path, ROOT, Path("/")):
        done = run(sys.executable, tmp_path / "aicb.py", "--aiob_enable", "-m", "7", cwd=folder)
        assert (done.returncode, done.stdout) == (3, "['profile', '--aiob_enable', '-m', '7']\n"), done.stderr


def test_image_installs_the_project_and_leaves_the_rest_to_its_base() -> None:
    """Dependencies come from pyproject.toml; torch and apex are the image's, built for one another."""
    text = (ROOT / "Dockerfile.cuda").read_text().replace("\\\n", " ")
    (install,) = re.findall(r"^.*\bpip3?\b.*\binstall\b.*$", text, flags=re.MULTILINE)
    assert re.findall(r"\binstall (.*)", install) == ["--no-cache-dir --editable . nvidia-ml-py"]
    assert "env -u PIP_CONSTRAINT pip" in install
    needed = {re.split(r"[^\w-]", line)[0] for line in requires("aicb") or () if "extra ==" not in line}
    assert needed == {"typer", "tomli"}  # tomli for Python 3.10


def test_script_is_short_and_posix(tmp_path: Path) -> None:
    assert len(SCRIPT.read_text().splitlines()) < 40
    assert run("sh", "-n", SCRIPT, cwd=tmp_path).stderr == ""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A fresh checkout, its path with a blank in it, holding no more than the script."""
    (tmp_path / "my repo" / "scripts").mkdir(parents=True)
    shutil.copy(SCRIPT, tmp_path / "my repo" / "scripts")
    return tmp_path / "my repo"


@pytest.fixture
def system(tmp_path: Path) -> Path:
    """A PATH of a machine with the system's tools, and with no aicb, make or Python that could run it."""
    tools = tmp_path / "bin"
    tools.mkdir()
    for name in ("sh", "dirname", "env", "mkdir", "cp"):
        found = shutil.which(name)
        assert found is not None
        (tools / name).symlink_to(found)
    return put(tools / "python3", "#!/bin/sh\nexit 1\n").parent


def says(name: str, *words: str, cwd: Path) -> str:
    """What STAND_IN prints."""
    return "\n".join([name, str(cwd), *(f"<{word}>" for word in words)]) + "\n"


def test_script_prefers_the_checkouts_own_environment(checkout: Path, system: Path, tmp_path: Path) -> None:
    put(checkout / ".venv" / "bin" / "aicb", STAND_IN.format(name="own"))
    put(system / "aicb", STAND_IN.format(name="installed"))
    done = run("sh", checkout / "scripts" / SCRIPT.name, *WORDS, cwd=tmp_path, path=str(system))
    assert (done.stdout, done.stderr) == (says("own", "generate", *WORDS, cwd=tmp_path), "")
    assert done.returncode == 3


def test_script_takes_an_installed_aicb(checkout: Path, system: Path, tmp_path: Path) -> None:
    put(system / "aicb", STAND_IN.format(name="installed"))
    done = run("sh", checkout / "scripts" / SCRIPT.name, *WORDS, cwd=tmp_path, path=str(system))
    assert (done.stdout, done.stderr) == (says("installed", "generate", *WORDS, cwd=tmp_path), "")
    assert done.returncode == 3


def test_script_takes_a_python_that_can_run_the_checkout(checkout: Path, system: Path, tmp_path: Path) -> None:
    put(checkout / "aicb" / "__init__.py", "")
    put(checkout / "aicb" / "cli.py", "import os\n\ndef main(argv):\n    print(os.getcwd(), argv)\n    return 3\n")
    put(tmp_path / "aicb.py", "the user's own file, never to be taken for the module\n")
    (system / "python3").unlink()
    put(system / "python3", f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    done = run("sh", checkout / "scripts" / SCRIPT.name, *WORDS, cwd=tmp_path, path=str(system))
    assert (done.stdout, done.stderr) == (f"{tmp_path} {['generate', *WORDS]}\n", "")
    assert done.returncode == 3


def test_script_installs_into_a_fresh_checkout(checkout: Path, system: Path, tmp_path: Path) -> None:
    own = put(tmp_path / "stand-in", STAND_IN.format(name="made"))
    put(system / "make", f'#!/bin/sh\necho "$@"\nmkdir -p "$2/.venv/bin"\ncp "{own}" "$2/.venv/bin/aicb"\n')
    done = run("sh", checkout / "scripts" / SCRIPT.name, *WORDS, cwd=tmp_path, path=str(system))
    assert done.stdout == says("made", "generate", *WORDS, cwd=tmp_path)
    assert done.stderr == f"-C {checkout} -s install\n"  # stdout stays the command's own
    assert done.returncode == 3


def test_script_stops_where_the_install_fails(checkout: Path, system: Path, tmp_path: Path) -> None:
    put(system / "make", "#!/bin/sh\nexit 2\n")
    done = run("sh", checkout / "scripts" / SCRIPT.name, cwd=tmp_path, path=str(system))
    assert (done.returncode, done.stdout) == (2, "")
