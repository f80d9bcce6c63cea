"""How every command says no."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import typer


@contextmanager
def refusing() -> Iterator[None]:
    """A ValueError within becomes one line on standard error, and exit code 2."""
    try:
        yield
    except ValueError as error:
        typer.secho(f"error: {error}", fg="red", err=True)
        raise typer.Exit(2) from error
