"""The installed command: `fa-cli` and `python -m fa_cli`. Ctrl-C has its handler before anything slow is imported."""

from __future__ import annotations

from .harness.terminal import interrupt


def main() -> None:
    """Run the command line."""
    interrupt.at_once()
    from .cli import main as verbs

    interrupt.command(verbs)


if __name__ == "__main__":
    main()
