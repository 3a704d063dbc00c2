"""The packing of launch.py: fa::Args field by field, plain parameters byte by byte, and what is kept between calls. No backend."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np
import planted
import pytest

from harness.backends import Call, Fill, Loaded, launch
from harness.backends.launch import ARGS, View
from harness.fault import KernelFault
from harness.kernel import Device, Kernel, expression, find, planner
from harness.kernel.header import SIZES
from harness.problem import READS, WRITES, Problem

DEVICE = Device("cpu", "a processor")
PROBLEM = Problem.of(2, 6, 70, 64, heads_kv=3, seq_kv=131, dtype="bfloat16", causal=True, scale=0.25)


class Nowhere:
    """A backend that keeps what is submitted."""

    def __init__(self) -> None:
        self.loads = 0
        self.submitted: list[Any] = []

    def load(self, kernel: Kernel, problem: Problem, tiles: dict[str, int]) -> Loaded:
        self.loads += 1
        return Loaded(kernel, planner.plan(kernel, problem, DEVICE, tiles), {})

    def submit(self, loaded: Loaded, steps: Any, stream: int | None) -> None:
        self.submitted.append((steps, stream))


class Repeats(Nowhere):
    """The same, of what is repeated; between is called once, before what is enqueued is read."""

    repeats = 0
    between: Any = None

    def repeated(self, loaded: Loaded, words: memoryview, fills: Any, calls: Any) -> Any:
        self.repeats += 1

        def enqueue(stream: int | None) -> None:
            between, self.between = self.between, None
            if between:
                between()
            made = [call._replace(parameters=tuple(bytes(p) for p in call.parameters)) for call in calls]
            self.submitted.append(([*(Fill(words[at], size) for at, size in fills), *made], stream))

        return enqueue


def views(pass_: str, first: int = 1 << 40) -> dict[str, View]:
    """A view of each tensor of a pass, every word of its own."""
    return {name: View(first + 4096 * i, 1000 + i, 100 + i, 10 + i) for i, name in enumerate((*READS[pass_], *WRITES[pass_]))}


@pytest.mark.parametrize("pass_", ["forward", "backward"])
def test_args_hold_each_value_in_its_field(pass_: str) -> None:
    """Tensors with strides, workspaces in the header's order, sizes, shift and scale; zero where a pass has no such tensor."""
    chosen, given = find("mma_qreg_async", pass_), views(pass_)
    launcher = launch.prepare(Nowhere(), Loaded(chosen, planner.plan(chosen, PROBLEM, DEVICE), {}), PROBLEM)
    spaces = [(5 << 40) + i for i in range(len(launcher.loaded.plan.workspaces))]
    calls = [step for step in launcher.steps(given, spaces) if isinstance(step, Call)]
    assert [call[:4] for call in calls] == [(p.entry, p.grid, p.block, p.shared) for p in launcher.loaded.plan.launches]
    for call in calls:
        (args,) = np.frombuffer(call.parameters[0], ARGS)
        for name in launch.ARGS_TENSORS:
            assert tuple(args[name].tolist()) == given.get(name, (0, 0, 0, 0)), name
        assert args["workspace"].tolist() == spaces + [0] * (8 - len(spaces))
        assert [args[name] for name in (*SIZES, "scale")] == [2, 6, 3, 70, 131, 64, 61, 64, 0.25]


def test_a_workspace_that_starts_as_zero_is_filled_before_the_launches() -> None:
    """And only such a one: every pass zeroes it, at its address, with its bytes."""
    chosen = find("mma_qreg_async", "backward")
    launcher = launch.prepare(Nowhere(), Loaded(chosen, planner.plan(chosen, PROBLEM, DEVICE), {}), PROBLEM)
    spaces = launcher.loaded.plan.workspaces
    steps = launcher.steps(views("backward"), [1000 * i for i in range(len(spaces))])
    fills = [(1000 * i, space.elements * 4) for i, space in enumerate(spaces) if space.init == "zero"]
    assert fills and [tuple(step) for step in steps[: len(fills)]] == fills
    assert not [step for step in steps[len(fills) :] if isinstance(step, Fill)]


@pytest.mark.parametrize(("dtype", "form"), [("float32", "<f"), ("float64", "<d")])
def test_plain_parameters(tmp_path: Path, dtype: str, form: str) -> None:
    """Addresses in 64 bits, sizes in 32, the scale in the kernel's own precision, in the order of the header."""
    asked = ["O", "scale", "seq_kv", "Q"]
    chosen = planted.kernel(tmp_path, dtypes=f'["{dtype}"]', block=f"32\n// args = {asked}".replace("'", '"'))
    problem = Problem.of(1, 1, 8, 64, dtype=dtype)
    launcher = launch.prepare(Nowhere(), Loaded(chosen, planner.plan(chosen, problem, DEVICE), {}), problem)
    given = views("forward")
    (call,) = launcher.steps(given)
    address = [given[name].address.to_bytes(8, "little") for name in ("O", "Q")]
    assert call.parameters == (address[0], struct.pack(form, 0.125), struct.pack("<i", 8), address[1])  # type: ignore[union-attr]


def test_a_plain_parameter_of_the_other_pass_is_refused_when_prepared(tmp_path: Path) -> None:
    chosen = planted.kernel(tmp_path, block='32\n// args = ["dQ"]')
    problem = Problem.of(1, 1, 8, 64)
    with pytest.raises(KernelFault, match="asks for dQ"):
        launch.prepare(Nowhere(), Loaded(chosen, planner.plan(chosen, problem, DEVICE), {}), problem)


def test_calls_share_nothing_that_changes() -> None:
    """What was made for one call is as it was after another: several may be in flight."""
    chosen = find("fa2", "forward")
    problem = Problem.of(1, 2, 64, 64)
    launcher = launch.prepare(Nowhere(), Loaded(chosen, planner.plan(chosen, problem, DEVICE), {}), problem)
    first = launcher.steps(views("forward"))
    kept = [bytes(p) for step in first for p in step.parameters]  # type: ignore[union-attr]
    launcher.steps(views("forward", first=7 << 40))
    assert [p for step in first for p in step.parameters] == kept  # type: ignore[union-attr]
    assert all(type(p) is bytes for step in first for p in step.parameters)  # type: ignore[union-attr]


@pytest.mark.parametrize(("name", "pass_"), [("mma_qreg_async", "forward"), ("mma_qreg_async", "backward"), ("naive", "backward")])
def test_fixed_strides_give_the_steps_of_a_call(name: str, pass_: str) -> None:
    """The same bytes and fills, call after call, whatever the order of the addresses; what is repeated is prepared once."""
    chosen, backend = find(name, pass_), Repeats()
    problem = PROBLEM if name != "naive" else PROBLEM.with_(dtype="float32")
    launcher = launch.prepare(backend, Loaded(chosen, planner.plan(chosen, problem, DEVICE), {}), problem)
    names = list(reversed([*READS[pass_], *WRITES[pass_]]))
    fixed = launcher.fixed({name: views(pass_)[name][1:] for name in names})
    for turn in range(3):
        given, spaces = views(pass_, (turn + 1) << 40), [(turn << 30) + 256 * i for i in range(len(launcher.loaded.plan.workspaces))]
        fixed([*(given[name].address for name in names), *spaces], turn)
        assert backend.submitted[-1] == (launcher.steps(given, spaces), turn)
    assert backend.repeats == 1


def test_a_call_has_its_parameters_alone() -> None:
    """One that begins while another enqueues is given others: the first one's stay as they are."""
    chosen, backend = find("fa2", "forward"), Repeats()
    problem = Problem.of(1, 2, 64, 64)
    launcher = launch.prepare(backend, Loaded(chosen, planner.plan(chosen, problem, DEVICE), {}), problem)
    fixed = launcher.fixed(dict.fromkeys((*READS["forward"], *WRITES["forward"]), (0, 0, 0)))
    backend.between = lambda: fixed([0x70] * 5)
    fixed([0x50] * 5)
    inner, outer = (np.frombuffer(steps[0].parameters[0], ARGS)["Q"]["data"].item() for steps, _ in backend.submitted)
    assert (inner, outer, backend.repeats) == (0x70, 0x50, 2)


# -- what is kept -----------------------------------------------------------------------------------------------------


def test_a_warm_call_loads_plans_and_parses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal values are enough: another Problem object, tiles in another order."""
    backend, chosen = Nowhere(), planted.kernel(tmp_path, tile='BLOCK = "32 if causal else 64"\n// OTHER = 4')
    launch.launcher(backend, chosen, Problem.of(1, 2, 64, 64), {"BLOCK": 16, "OTHER": 2})(views("forward"), stream=0x77)
    for owner, name in [(planner, "refuse"), (planner, "names"), (planner, "_chosen"), (expression, "evaluate")]:
        monkeypatch.setattr(owner, name, lambda *given, what=name: pytest.fail(f"a warm call uses {what}"))
    for module in ("np", "struct"):  # launch.py's own names: other threads of the test runner use these modules
        monkeypatch.setattr(launch, module, None)
    launch.launcher(backend, chosen, Problem.of(1, 2, 64, 64), {"OTHER": 2, "BLOCK": 16})(views("forward"), stream=0x78)
    assert backend.loads == 1
    assert [stream for _, stream in backend.submitted] == [0x77, 0x78]
    assert backend.submitted[0][0] == backend.submitted[1][0]


def test_other_values_are_loaded_anew(tmp_path: Path) -> None:
    """Another problem, form, tile, backend, or file behind the same path."""
    backend, problem = Nowhere(), Problem.of(1, 2, 64, 64)
    chosen = planted.kernel(tmp_path, tile="BLOCK = 32")
    made = [
        launch.launcher(backend, chosen, problem),
        launch.launcher(backend, chosen, problem.with_(scale=1.0)),
        launch.launcher(backend, chosen, problem, {"BLOCK": 16}),
        launch.launcher(Nowhere(), chosen, problem),
        launch.launcher(backend, planted.kernel(tmp_path, tile="BLOCK = 48"), problem),
        launch.launcher(backend, planted.kernel(tmp_path, planted.GOOD + "// edited\n", tile="BLOCK = 48"), problem),
    ]
    assert len({id(launcher) for launcher in made}) == len(made)
    assert [dict(launcher.loaded.plan.macros)["BLOCK"] for launcher in made] == ["32", "32", "16", "32", "48", "48"]


def test_the_caches_are_bounded() -> None:
    for cache in (launch._kept, planner._kept_plan):
        assert 0 < (cache.cache_info().maxsize or 0) <= 4096
