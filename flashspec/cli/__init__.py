"""The command line. Flags only; the work is done elsewhere."""

from __future__ import annotations

import contextlib
import sys
from typing import Annotated

import typer
from rich.markup import escape

import flashspec
from flashspec.cli import doctor, generate, measure, plan, remote, serve, train, watch
from flashspec.cli.options import app, screen
from flashspec.errors import FlashSpecError

__all__ = ["app", "doctor", "generate", "main", "measure", "plan", "remote", "screen", "serve", "train", "watch"]


def main() -> None:
    """Entry point: a user's mistake is one line on stderr and exit code 2."""
    for stream in (sys.stdout, sys.stderr, sys.stdin):
        with contextlib.suppress(AttributeError, ValueError):
            stream.reconfigure(encoding="utf-8", errors="replace")  # type: ignore[union-attr]
    try:
        app()
    except FlashSpecError as error:
        screen.print(f"[bold red]flashspec:[/] {escape(str(error))}", soft_wrap=True)
        raise SystemExit(2) from None
    except OSError as error:  # a full disk, say; a reader that has gone is Typer's to handle
        screen.print(f"[bold red]flashspec:[/] {escape(str(error))}", soft_wrap=True)
        raise SystemExit(2) from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None


@app.callback(invoke_without_command=True)
def version(
    show: Annotated[bool, typer.Option("--version", help="Show the version.", is_eager=True)] = False,
) -> None:
    if show:
        print(f"flashspec {flashspec.__version__}")
        raise typer.Exit
