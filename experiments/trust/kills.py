"""Kill gen-data, run and experiment at every fsync and rename, and at random moments; the next command must work, nothing lost or doubled.

    python experiments/trust/kills.py [--random 100] [--seed N]

Each kill is SIGKILL of a process of its own, in a copy of a folder. Then the next command runs, and the folder is checked: every set of
files is the old or the new one, every row and its samples are there once, env.json names the runs, nothing temporary is left. Needs a
C++ compiler, no GPU; about three minutes on one core. Exit code 1 where something does not hold.
"""

from __future__ import annotations

import argparse
import random
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "support")]

import kills  # noqa: E402


def tell(text: str) -> None:
    """A line of the table, at once."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def main() -> int:
    """Print a line for each scenario and the totals; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--random", type=int, default=100, help="random kills in all (default: 100)")
    parser.add_argument("--seed", type=int, default=42)
    given = parser.parse_args()
    draw, done, failed = random.Random(given.seed), [0, 0], 0
    tell(f"{'killed command':36} {'at a point':>10} {'at random':>10} {'not held':>9}")
    with kills.workplace() as place:
        for number, scenario in enumerate(kills.SCENARIOS.values()):
            start = kills.prepared(scenario, place / f"start{number}")
            points, seconds = kills.points(scenario, start, place / f"whole{number}")
            share = given.random // len(kills.SCENARIOS) + (number < given.random % len(kills.SCENARIOS))
            ways = [{"kill_at": point} for point in range(points)] + [{"kill_after": draw.uniform(0, seconds)} for _ in range(share)]
            wrong = 0
            for attempt, way in enumerate(ways):
                try:
                    kills.attempt(scenario, start, place / f"{number}-{attempt}", **way)
                except AssertionError as error:
                    wrong += 1
                    sys.stderr.write(f"{scenario.name}, {way}: {error}\n")
            tell(f"{scenario.name:36} {points:10} {share:10} {wrong:9}")
            done, failed = [done[0] + points, done[1] + share], failed + wrong
    tell(f"{'all':36} {done[0]:10} {done[1]:10} {failed:9}")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
