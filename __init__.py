"""fa-cli as a package: `from fa_cli import run, experiment, attention`. A name loads what it needs when it is first used (PEP 562).

run and experiment are the verbs of that name, Problem is what run takes, frame makes a DataFrame of experiment's rows; attention and sdpa
are PyTorch operators, ring_attention and context_parallel the same over the ranks of a process group.
"""

from __future__ import annotations

TYPE_CHECKING = False  # as typing has it (harness/__init__.py says why)
if TYPE_CHECKING:
    from .harness.problem import Problem as Problem
    from .harness.report import frame as frame
    from .harness.torch_op import attention as attention
    from .harness.torch_op import attention_flash as attention_flash
    from .harness.torch_op import attention_naive as attention_naive
    from .harness.torch_op import attention_tiled as attention_tiled
    from .harness.torch_op import context_parallel as context_parallel
    from .harness.torch_op import explain as explain
    from .harness.torch_op import quantize as quantize
    from .harness.torch_op import ring_attention as ring_attention
    from .harness.torch_op import sdpa as sdpa
    from .harness.verbs.experiment import experiment as experiment
    from .harness.verbs.run import run as run

    __version__: str
else:

    def __getattr__(name):
        from importlib import import_module, metadata
        from sys import modules

        if name == "__version__":
            return metadata.version("fa-harness")
        if name not in _HOMES:
            raise AttributeError(
                f"module {__name__!r} has no attribute {name!r}", name=name, obj=modules[__name__]
            )  # Python finds a near one
        try:
            return getattr(import_module(f".harness.{_HOMES[name]}", __name__), name)
        except ModuleNotFoundError as error:
            if error.name != "torch":
                raise
            hint = import_module(".harness.fault", __name__).install_extra("torch")
            raise ImportError(f"{name} is an operator of PyTorch, which is not installed\nhint: {hint}", name="torch") from None

    def __dir__():
        return [*globals(), *_HOMES, "__version__"]


_HOMES = {"experiment": "verbs.experiment", "Problem": "problem", "frame": "report", "run": "verbs.run"}
_HOMES |= dict.fromkeys(
    (
        "attention",
        "attention_flash",
        "attention_naive",
        "attention_tiled",
        "context_parallel",
        "explain",
        "quantize",
        "ring_attention",
        "sdpa",
    ),
    "torch_op",
)
