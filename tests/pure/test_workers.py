"""Workers of a run: all tasks are done, and what one does in its turn no other one's work overlaps, whatever ends in between."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import pytest

from harness.fault import UsageFault
from harness.files import child
from harness.verbs.workers import Share, Turns, in_rounds, serve

#: Seconds of a step of a task: long beside what a message takes.
STEP = 0.02
#: The size of a task that waits.
RESTING = 1.0


def work(pipe: Any) -> None:
    """A worker. A task is (name, steps): w works, a works alone, d ends the process, f fails. It says when each step began and ended."""
    settled: list[float] = []

    def settle() -> float:
        settled.append(time.monotonic())
        return RESTING

    turns = Turns(pipe, settle)

    def steps(task: tuple[str, str]) -> Iterator[tuple[str, tuple[str, float, float]]]:
        for step in task[1]:
            if step == "d":
                os._exit(3)
            if step == "f":
                raise UsageFault("it failed")
            if step == "w":
                start = time.monotonic()
                time.sleep(STEP)
                yield step, (task[0], start, time.monotonic())
                continue
            with turns.alone():
                start = time.monotonic()
                assert settled[-1] < start
                time.sleep(STEP)
                end = time.monotonic()
            yield step, (task[0], start, end)

    serve(pipe, steps, settle)


def done(tasks: Sequence[tuple[str, str]], jobs: int, room: float = math.inf, **of: Any) -> list[tuple[str, str, float, float]]:
    """The steps of all tasks: what, of which task, when it began and ended."""
    found: list[tuple[str, str, float, float]] = []

    def ended(task: tuple[str, str]) -> list[tuple[str, str]]:
        return [(task[0] + " again", task[1].replace("d", "", 1))]

    share = Share(partial(child.talking, work, "a worker"), lambda task, kind, value: found.append((kind, *value)), ended, room=room, **of)
    share.run(tasks, jobs)
    return found


def overlapping(steps: Sequence[tuple[str, str, float, float]], kinds: str) -> int:
    """How many pairs of steps overlap, of which the first is alone and the second one of `kinds`."""
    pairs = [(a, b) for a in steps for b in steps if a is not b and a[0] == "a" and b[0] in kinds]
    return sum(a[2] < b[3] and b[2] < a[3] for a, b in pairs)


def test_no_work_overlaps_what_is_done_alone() -> None:
    """Three workers, tasks of different lengths: what is not done alone is done at the same time."""
    tasks = [(f"task {i}", text) for i, text in enumerate(("waw", "wwa", "a", "waaw", "wwwwww", "awwww", "wwwwa", "wawa"))]
    steps = done(tasks, 3)
    assert {(name, "".join(s[0] for s in steps if s[1] == name)) for name, _ in tasks} == set(tasks)
    assert overlapping(steps, "aw") == 0
    own = [step for step in steps if step[0] == "w"]
    assert sum(a[2] < b[3] and b[2] < a[3] for a in own for b in own if a is not b) > 4
    assert [step[0] for step in done(tasks[:1], 1)] == ["w", "a", "w"]
    assert done([], 3) == []


def test_a_worker_that_ends_is_replaced_after_the_round() -> None:
    """Its task is done by another one; who works alone meanwhile is not disturbed."""
    tasks = [("first", "waw"), ("ends", "wd"), ("third", "aw"), ("fourth", "da"), ("fifth", "wwaa")]
    steps = done(tasks, 4)
    assert sorted((name, "".join(s[0] for s in steps if s[1] == name)) for name in dict.fromkeys(s[1] for s in steps)) == [
        ("ends", "w"),
        ("ends again", "w"),
        ("fifth", "wwaa"),
        ("first", "waw"),
        ("fourth again", "a"),
        ("third", "aw"),
    ]
    assert overlapping(steps, "aw") == 0


def test_a_fault_ends_the_run() -> None:
    """It is raised, in its class, and no worker is left."""
    with pytest.raises(UsageFault, match="it failed"):
        done([("fails", "wf"), ("other", "w" * 1000)], 2)


def test_tasks_have_room() -> None:
    """Those done at the same time are together as large as the room, or one alone."""
    sizes = {"large": 9.0, "small": 2.0, "other": 2.0}
    steps = done([("small", "w"), ("other", "ww"), ("large", "w"), ("small", "w")], 4, 5.0, size=lambda task: sizes[task[0]])
    large = next(step for step in steps if step[1] == "large")
    assert not any(step[2] < large[3] and large[2] < step[3] for step in steps if step is not large)
    assert len(steps) == 5


def test_who_waits_makes_room() -> None:
    """Three tasks of which two have no room together take turns in one round, since one that waits is small; and so after their turns."""
    steps = done([(f"task {i}", "waw") for i in range(3)], 3, 6.0, size=lambda task: 4.0)
    own, alone = ([step for step in steps if step[0] == kind] for kind in "wa")
    assert not any(a is not b and a[2] < b[3] and b[2] < a[3] for a in own for b in own)
    assert max(step[3] for step in own[:3]) < min(step[2] for step in alone)
    assert max(step[3] for step in alone) < min(step[2] for step in own[3:])


def test_those_that_wait_hold_no_more_than_there_is() -> None:
    """Four tasks that hold 1 while they wait and take 4, in 5.5: two wait, and a third would not fit beside them."""
    steps = done([(f"task {i}", "waw") for i in range(4)], 4, 5.5, size=lambda task: 4.0)
    alone = [step for step in steps if step[0] == "a"]
    assert sum(step[2] < min(other[3] for other in steps if other[0] == "w" and other[2] > alone[0][3]) for step in alone) == 2


def test_a_small_task_goes_before_one_that_has_no_room() -> None:
    """The large one is done when there is room."""
    sizes = {"large": 9.0, "first": 2.0, "small": 2.0}
    steps = done([("first", "w" * 8), ("large", "w"), ("small", "w")], 3, 5.0, size=lambda task: sizes[task[0]])
    assert [step[1] for step in steps if step[1] != "first"] == ["small", "large"]


def test_a_run_says_where_its_time_went() -> None:
    """Three tasks of a step beside the others and one alone: one round of three turns, and what a worker holds without a task."""
    share = Share(partial(child.talking, work, "a worker"), lambda task, kind, value: None, lambda task: [])
    share.run([(f"task {i}", "wa") for i in range(3)], 3)
    spent = share.spent
    assert (spent.rounds, spent.turns, spent.idle) == (1, 3, RESTING)
    assert 3 * STEP <= spent.in_rounds < spent.seconds - STEP


def test_who_has_nothing_to_do_holds_memory() -> None:
    """What a worker keeps between its tasks counts: two of 4 beside three of 1, idle or not, have no room in 10."""
    tasks = [*((f"first {i}", "w") for i in range(5)), *((f"then {i}", "ww") for i in range(2))]
    steps = done(tasks, 5, 10.0, size=lambda task: 4.0 if task[0].startswith("then") else 1.0)
    then = [step for step in steps if step[1].startswith("then")]
    assert len(then) == 4 and not any(a[1] != b[1] and a[2] < b[3] and b[2] < a[3] for a in then for b in then)


def test_a_round_begins_with_its_largest_task() -> None:
    """By threes in the order given; the largest is prepared first."""
    sizes = [5.0, 90.0, 1.0, 80.0, 6.0, 2.0, 70.0, 4.0]
    assert in_rounds(sizes, 3, lambda size: size) == [90.0, 5.0, 1.0, 80.0, 6.0, 2.0, 70.0, 4.0]


def test_ctrl_c_in_a_turn_ends_it_without_a_word_to_the_other_end() -> None:
    """That end may be closed by then: its error would hide the interrupt. An error of the work is told first."""

    class Pipe:
        said: list[str]

        def __init__(self) -> None:
            self.said = []

        def send(self, message: tuple[str, Any]) -> None:
            self.said.append(message[0])

        def recv(self) -> None:
            if len(self.said) > 1:
                raise ConnectionResetError

    for error, said in ((KeyboardInterrupt, ["waits"]), (ValueError, ["waits", "rests"])):
        pipe: Any = Pipe()
        with pytest.raises(KeyboardInterrupt if error is KeyboardInterrupt else ConnectionResetError), Turns(pipe, lambda: 0.0).alone():
            raise error
        assert pipe.said == said
