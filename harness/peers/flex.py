"""PyTorch's flex_attention (Dong et al. 2024, arXiv 2412.05496), compiled: masks and scores as functions, and tiles that see nothing skipped.

Its block mask is made before any timing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..formula import Formula
from ..formula.tree import Binary, Call, Choice, Compare, Logic, Minus, Name, Node, Not, Number, Real
from ..formula.tree import Tensor as Element
from ..formula.value import OPERATIONS
from ..problem import Problem
from .base import ANY_DIMS
from .on_torch import Attention, Step, Tensor, TorchDevice, TorchPeer, module, version


@dataclass(frozen=True, kw_only=True)
class Flex(TorchPeer):
    """flex_attention on (B, H, S, D) tensors. backend: its kernel option BACKEND; "" is Triton's."""

    backend: str = ""
    compiles: bool = True
    forms: tuple[str, ...] = ("mask", "score")
    repeats: bool = False

    def attention(self, problem: Problem, device: TorchDevice) -> Attention:
        """The compiled function, with its block mask."""
        import torch

        flex = module(self, "torch.nn.attention.flex_attention")
        torch._dynamo.config.recompile_limit = 1 << 20  # a problem is another function, and is compiled again
        mask, score = functions(problem, device)
        names = problem.formulas["mask"].names if problem.mask else frozenset()
        batch, heads = (problem.batch if "b" in names else None), (problem.heads_q if names & {"h", "h_kv"} else None)
        block = mask and flex.create_block_mask(mask, batch, heads, problem.seq_q, problem.seq_kv, device=device)
        options = {"score_mod": score, "block_mask": block, "scale": problem.scale, "enable_gqa": problem.heads_q != problem.heads_kv}
        if self.backend:
            options["kernel_options"] = {"BACKEND": self.backend}
        newer = hasattr(flex, "AuxRequest")
        asked = {"return_aux": flex.AuxRequest(lse=True)} if newer else {"return_lse": True}
        run = torch.compile(flex.flex_attention, dynamic=False)

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Sequence[Tensor]:
            if self.backend or torch.is_grad_enabled():  # FLASH's logsumexp has no gradient, and is ln 2 times the right one (torch 2.11)
                return (run(q, k, v, **options),)
            o, more = run(q, k, v, **options, **asked)
            return o, more.lse if newer else more

        return attend

    def ran(self, step: Step, pass_: str) -> str:
        """The function, its backend, and torch's version."""
        return f"flex_attention, {self.backend or 'Triton'}, {version('torch')}"


def functions(problem: Problem, device: TorchDevice) -> tuple[Callable[..., Tensor] | None, Callable[..., Tensor] | None]:
    """mask_mod and score_mod of a problem; None where it has none."""
    import torch

    tensors = {name: torch.tensor(array, device=device) for name, array in problem.values().items()} if problem.tensors else {}
    group, shift, formulas = problem.heads_q // problem.heads_kv, problem.default_shift, problem.formulas

    def names(b: Tensor, h: Tensor, q_row: Tensor, k: Tensor) -> dict[str, Any]:
        return {
            **{"b": b, "h": h, "q": q_row + shift, "q_row": q_row, "k": k, "h_kv": h // group},
            **{"seq_q": problem.seq_q, "seq_kv": problem.seq_kv},
        }

    def mask(b: Tensor, h: Tensor, q_row: Tensor, k: Tensor) -> Tensor:
        seen = k <= q_row + problem.causal_shift if problem.causal else k >= 0
        return seen & _value(formulas["mask"], names(b, h, q_row, k), tensors) if "mask" in formulas else seen

    def score(s: Tensor, b: Tensor, h: Tensor, q_row: Tensor, k: Tensor) -> Tensor:
        return _value(formulas["score"], names(b, h, q_row, k) | {"s": s}, tensors)

    return mask if problem.causal or "mask" in formulas else None, score if "score" in formulas else None


def _value(formula: Formula, names: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Any:
    """The value of a formula with torch's functions; lengths are numbers of Python."""
    import torch

    def of(node: Node) -> Any:
        match node:
            case Number(number):
                return number
            case Name(name):
                return names[name]
            case Element(name, indices, _):
                return tensors[name][tuple(names[f"{index}_row" if index == "q" else index] for index in indices)]
            case Real(inner):
                found = of(inner)
                return found.to(torch.float32) if isinstance(found, torch.Tensor) else float(found)
            case Minus(inner):
                return -of(inner)
            case Not(inner):
                found = of(inner)
                return ~found if isinstance(found, torch.Tensor) else not found
            case Choice(test, body, other):
                chosen = of(test)
                return torch.where(chosen, of(body), of(other)) if isinstance(chosen, torch.Tensor) else of(body if chosen else other)
            case Binary(op, left, right) | Compare(op, left, right):
                return OPERATIONS[op](of(left), of(right))
            case Logic(op, left, right):
                return of(left) & of(right) if op == "and" else of(left) | of(right)
            case Call("min" | "max" as function, (one, two)):
                a, b = of(one), of(two)
                return (
                    torch.where(a < b if function == "min" else a > b, a, b)
                    if isinstance(a < b, torch.Tensor)
                    else min(a, b)
                    if function == "min"
                    else max(a, b)
                )
            case Call(function, (inner,)):
                found = of(inner)
                if function == "abs" or isinstance(found, torch.Tensor):
                    return abs(found) if function == "abs" else getattr(torch, function)(found)
                return getattr(torch, function)(torch.tensor(found)).item()
        raise AssertionError(node)

    return of(formula.tree)


PEERS = (
    Flex(
        name="flex",
        device="cuda",
        dtypes=("float32", "float16", "bfloat16"),
        modules=("torch", "triton"),
        install="pip install triton",
        dims_v=ANY_DIMS,
        arch=(80, 999),
    ),
    Flex(
        name="flex-flash",
        device="cuda",
        dtypes=("float16", "bfloat16"),
        modules=("torch", "triton", "cutlass", "flash_attn.cute"),
        install="pip install flash-attn-4==4.0.0b36",
        arch=(90, 129),
        backend="FLASH",
    ),
)
