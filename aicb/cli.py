"""The command line: options to configurations, errors to exit codes; no logic.

    aicb generate -m 7 --world_size 4096 --tp 2 --global_batch 8192 --comp_filepath profile.txt
    aicb profile -m 7 --tp 2      aicb check FILE...      aicb show FILE      aicb compare A B      aicb models
    aicb extrapolate A.csv B.csv

Exit codes: 0 done; 1 `check` found a defect, or `compare` a difference; 2 the request cannot be done (one line on
stderr says why); 130 Ctrl-C.
"""

from __future__ import annotations

import inspect
import os
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
from typer.core import TyperCommand

from aicb import __version__
from aicb.errors import UserError, nearest
from aicb.options import OPTIONS, Option
from aicb.units import printable

UsageError: type[Any] = next(base for base in typer.BadParameter.__mro__ if base.__name__ == "UsageError")
ALIKE = {"token_normalize_func": lambda word: word.replace("-", "_")}
INTERRUPTED = 130  # as a shell reports Ctrl-C
CONFIGURE = ("generate", "profile")
"""The commands that take a job's options, and with them whatever a training script says."""
F = TypeVar("F", bound=Callable[..., None])


class _Grouped(TyperCommand):
    """Lists options by group in --help, without loading rich."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        groups: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            record = None if getattr(param, "hidden", False) else param.get_help_record(ctx)
            if record:
                groups.setdefault(getattr(param, "rich_help_panel", None) or "Options", []).append(record)
        for name, records in groups.items():
            with formatter.section(name):
                formatter.write_dl(records)


app = typer.Typer(
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help="Compute profiles and SimAI workloads of large language model training.",
)


def _declarations(option: Option) -> list[str]:
    names = [*(alias for alias in option.aliases if not alias.startswith("--")), f"--{option.name}"]
    names += [alias for alias in option.aliases if alias.startswith("--")]
    return [f"{name}/--no-{name[2:]}" for name in names] if option.type is bool else names


def _parameter(option: Option) -> inspect.Parameter:
    more: dict[str, Any] = {"parser": whole_numbers, "metavar": "INTEGER[,...]"} if option.several else {}
    info = typer.Option(
        *_declarations(option), help=option.help, rich_help_panel=option.group, show_default=False, **more
    )
    return _keyword(option.name, option.type, info)


def whole_numbers(text: str) -> int | tuple[int, ...]:
    """Return the whole number that was typed, or all of those with commas between them."""
    try:
        numbers = tuple(int(part) for part in text.split(","))
    except ValueError:
        raise typer.BadParameter(f"{text!r} is not a valid integer, or several with commas between them") from None
    return numbers if len(numbers) > 1 else numbers[0]


def _keyword(name: str, kind: type, info: Any) -> inspect.Parameter:
    annotation: Any = Annotated.__class_getitem__((kind | None, info))  # type: ignore[attr-defined]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def with_options(command: F) -> F:
    """Give `command(**typed)` the options of options.py, which are too many to write as parameters."""
    parameters = [_parameter(option) for option in OPTIONS]
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return command


def _typed(values: dict[str, Any]) -> dict[str, Any]:
    """Keep what the user typed."""
    typed = {name: value for name, value in values.items() if value is not None}
    for name, value in typed.items():
        if isinstance(value, str) and (not value or value.startswith("--")):
            raise UserError(f"--{name} needs a value, not {value!r}")
    if typed.get("json") and typed.get("quiet"):
        raise UserError("--json and --quiet exclude each other: choose one")
    return typed


def _warn(message: str) -> None:
    typer.echo(f"aicb: warning: {printable(message)}", err=True)


@app.command("generate", context_settings=ALIKE, cls=_Grouped)
@with_options
def generate_command(**values: Any) -> None:
    """Write the SimAI workload of a training iteration."""
    _generate(_typed(values))


@app.command("profile", context_settings=ALIKE, cls=_Grouped)
@with_options
def profile_command(**values: Any) -> None:
    """Measure this machine's kernels, then generate."""
    typed = {"aiob_enable": True, **_typed(values)}
    if not typed["aiob_enable"]:
        raise UserError("aicb profile measures: --no-aiob_enable has no meaning here")
    if "comp_filepath" in typed and os.environ.get("RANK", "0") != "0":
        return  # nothing to measure: one rank of torchrun writes the workload
    _generate(typed)


def _generate(typed: dict[str, Any]) -> None:
    from aicb.generate import generate, profile_alone

    if not typed.get("profile_only"):
        _print_summaries(generate(typed, _warn), typed)
    elif paths := [str(path) for path in profile_alone(typed, _warn)]:
        import json

        one = {"profile": paths[0]} if len(paths) == 1 else {"profiles": paths}
        typer.echo(json.dumps(one) if typed.get("json") else "\n".join(paths))


def _print_summaries(summaries: list[dict[str, Any]], typed: dict[str, Any]) -> None:
    if not summaries:  # a rank of torchrun that only measured
        return
    if typed.get("json"):
        import json

        several = typed.get("pp_rank") == "all" or typed.get("short")
        typer.echo(json.dumps(summaries if several else summaries[0], indent=2))
    elif typed.get("quiet"):
        typer.echo("\n".join(summary["file"] for summary in summaries))
    else:
        from aicb.summary import render, result_path

        typer.echo("\n\n".join(render(summary) for summary in summaries))
        if typed.get("short"):
            results = [shlex.quote(str(result_path(Path(summary["file"])))) for summary in summaries]
            for one, other in zip(results[::2], results[1::2], strict=True):
                typer.echo(f"\nsimulate both, then: aicb extrapolate {one} {other}")


@app.command("check")
def check_command(
    files: Annotated[list[Path], typer.Argument(help="workload files")],
    strict: Annotated[bool, typer.Option("--strict", help="exit with 1 on warnings too")] = False,
    notes: Annotated[bool, typer.Option("--notes", help="say where the simulator counts in its own way")] = False,
) -> None:
    """Check workloads against every rule of the format: errors (the simulator misreads or dies) and warnings."""
    from collections import Counter

    from aicb.workload.reading import FINDINGS_MAX, check
    from aicb.workload.rules import ERROR, NOTE, WARNING

    faulty = False
    for path in files:
        levels = Counter[str]()
        for finding in check(path, with_notes=notes):
            levels[finding.level] += 1
            if finding.level == NOTE or levels[ERROR] + levels[WARNING] <= FINDINGS_MAX:
                typer.echo(f"{path}:{finding.line}: {finding.level}: {finding.text}")
        errors, warnings = levels[ERROR], levels[WARNING]
        faulty = faulty or errors > 0 or (strict and warnings > 0)
        if errors + warnings > FINDINGS_MAX:
            typer.echo(f"{path}: and {errors + warnings - FINDINGS_MAX} findings more")
        if not errors:
            typer.echo(f"{path}: no defect found" if not warnings else f"{path}: no error, {warnings} warning(s)")
    raise typer.Exit(1 if faulty else 0)


@app.command("show")
def show_command(file: Annotated[Path, typer.Argument(help="a workload or a compute profile")]) -> None:
    """Show a workload's totals, or a profile's table."""
    from aicb.show import show

    typer.echo(show(file))


@app.command("compare")
def compare_command(
    a: Annotated[Path, typer.Argument(help="a compute profile")],
    b: Annotated[Path, typer.Argument(help="another")],
    tolerance: Annotated[
        str | None, typer.Option(metavar="PERCENT", help="exit with 1 where a kernel differs by more, such as 5%")
    ] = None,
) -> None:
    """Compare two compute profiles kernel by kernel."""
    from aicb.show import comparison
    from aicb.units import percentage

    most = None if tolerance is None else percentage(tolerance)
    if tolerance is not None and most is None:
        raise UserError(f"--tolerance {tolerance!r} must be a percentage, such as 5%")
    text, agree = comparison(a, b, most)
    typer.echo(text)
    raise typer.Exit(0 if agree else 1)


@app.command("extrapolate")
def extrapolate_command(
    a: Annotated[Path, typer.Argument(help="result of the simulator (...EndToEnd.csv) for one file of --short")],
    b: Annotated[Path, typer.Argument(help="result for the other")],
    workload: Annotated[
        list[Path] | None, typer.Option(help="the workloads, where neither name nor place tells")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="print JSON (us)")] = False,
    csv: Annotated[bool, typer.Option("--csv", help="print the simulator's own two lines")] = False,
) -> None:
    """Work out the whole iteration from two short simulations."""
    from aicb.workload.extrapolate import as_csv, as_json, as_table, extrapolate

    if json and csv:
        raise UserError("--json and --csv exclude each other: choose one")
    found = extrapolate((a, b), workload or ())
    if json:
        from json import dumps

        typer.echo(dumps(as_json(found), indent=2))
    else:
        typer.echo(as_csv(found) if csv else as_table(found))


@app.command("models")
def models_command(
    export: Annotated[
        str | None, typer.Option(metavar="NAME", help="print a preset as TOML, to edit and give to -m")
    ] = None,
) -> None:
    """List the presets, or print one as TOML."""
    if export is not None:
        from aicb.models.toml import export_toml

        typer.echo(export_toml(export), nl=False)
        return
    from aicb.show import models

    typer.echo(models())


@app.callback(invoke_without_command=True)
def _version(version: Annotated[bool, typer.Option("--version", help="Show the version and exit.")] = False) -> None:
    if version:
        typer.echo(f"aicb {__version__}")
        raise typer.Exit


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv) or ["--help"]
    try:
        if arguments[0] in CONFIGURE:
            arguments[1:] = _understood(arguments[1:])
        code = typer.main.get_command(app).main(args=arguments, prog_name="aicb", standalone_mode=False)
    except UsageError as error:
        return _fail(_usage(error))
    except UserError as error:
        return _fail(str(error))
    except BrokenPipeError:  # `aicb show FILE | head`
        sys.stdout = Path(os.devnull).open("w")  # noqa: SIM115 - Python flushes stdout once more at its end
        return 0
    except OSError as error:
        return _fail(f"{error.filename or 'the output'}: {error.strerror or error}")
    except (KeyboardInterrupt, typer.Abort):
        code = INTERRUPTED
    if code == INTERRUPTED:  # typer may report Ctrl-C either way
        _fail("interrupted")
    return code if isinstance(code, int) else 0


def _understood(words: list[str]) -> list[str]:
    """Take Megatron-LM's words too; one warning names those that say nothing about the workload."""
    from aicb.words import translate

    kept, silent = translate(words)
    if silent and "--help" not in kept:
        verb = "have" if len(silent) > 1 else "has"
        _warn(f"{', '.join(silent)} {verb} no effect on the workload")
    return kept


def _usage(error: Any) -> str:
    name = str(getattr(error, "option_name", ""))
    if type(error).__name__ == "NoSuchOption" and error.ctx is not None:
        from aicb.words import known_flags

        known = [opt for param in error.ctx.command.get_params(error.ctx) for opt in param.opts] + known_flags()
        return f"no such option: {name}{nearest(name, known)}; nothing was done"
    return str(error.format_message())


def _fail(message: str) -> int:
    typer.echo(f"aicb: error: {printable(message)}", err=True)
    return 2
