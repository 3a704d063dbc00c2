"""The arguments of attention, explain and ring_attention: what each of them must be, and what those of other functions are called here."""

from __future__ import annotations

import inspect
import numbers
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.autograd import forward_ad

from ..fault import Fault, meant


def wrong(what: str, why: str, hint: str, kind: type[Exception] = ValueError) -> Exception:
    """The error of an argument."""
    return kind(str(Fault(what, why, hint)))


def _shown(value: Any) -> str:
    """A value as a message has it, on one line: of a tensor its type and shape."""
    if isinstance(value, torch.Tensor):
        return f"a tensor of {value.dtype} with the shape {tuple(value.shape)}"
    return " ".join(f"{value!r:.60}".split())


# -- each argument ----------------------------------------------------------------------------------------------------


def usual(q: Any, k: Any, v: Any, kernel: Any) -> None:
    """Raise TypeError or ValueError for what is not three dense tensors and the name or path of a kernel."""
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if not isinstance(tensor, torch.Tensor):
            hint = "torch.from_numpy(array), or torch.as_tensor(values)"
            raise wrong(f"{name} is a {type(tensor).__name__}", "attention takes torch tensors", hint, TypeError)
        if tensor.is_nested:
            hint = f"{name}.to_padded_tensor(0.0), or a call for each sequence; sdpa leaves nested tensors to torch's own"
            raise wrong(f"{name} is a nested tensor", "kernels take dense ones, with rows of equal number", hint)
        if tensor.layout is not torch.strided:
            raise wrong(f"{name} is a tensor of {tensor.layout}", "kernels take dense ones", f"{name}.to_dense()")
    if isinstance(kernel, tuple | list):
        hint = "kernel='./mine_forward.cu+fa2' has the forward pass of one and the backward pass of another"
        raise wrong(f"kernel is a {type(kernel).__name__}", "it is a name, a number or a path", hint, TypeError)


def flags(**given: Any) -> None:
    """Raise ValueError for what is neither True nor False."""
    for name, value in given.items():
        if not isinstance(value, bool):
            raise wrong(f"{name} is {_shown(value)}", "it is there or not", "use True or False")


def number(name: str, value: Any, hint: str = "scale=0.125, say, or leave it out for 1/sqrt(head_dim)") -> Any:
    """A number as Python has it, also of a tensor of no dimensions. Raises ValueError for what is none."""
    if isinstance(value, torch.Tensor):
        if value.dim():
            raise wrong(f"{name} has the shape {tuple(value.shape)}", "it is one number for all scores", hint)
        if value.requires_grad and torch.is_grad_enabled():
            hint = f"{name}.detach(); attention(q * scale, k, v, scale=1.0) has a gradient of a scale"
            raise wrong(f"{name} wants a gradient", "gradients flow to q, k and v alone", hint)
        return value.item()
    if isinstance(value, bool) or not isinstance(value, numbers.Real | torch.SymFloat | torch.SymInt):
        raise wrong(f"{name} is {_shown(value)}", f"it is a number, not a {type(value).__name__}", hint)
    return value


def whole(name: str, value: Any, is_: str, hint: str) -> Any:
    """An integer. Raises ValueError for what is none. is_: what the argument is."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral | torch.SymInt):
        raise wrong(f"{name} is {_shown(value)}", is_, hint)
    return value


def shift(value: Any, causal: bool) -> Any:
    """A causal_shift. Raises ValueError for what is no integer, and where no mask is there to be shifted."""
    found = whole("causal_shift", value, "a mask is shifted by whole keys", "use an integer, or leave it out")
    if not causal:
        raise wrong("causal_shift is a mask's", "without causal=True there is none", "add causal=True, or leave it out")
    return found


def window(value: Any) -> tuple[int, int]:
    """L and R of L or (L, R). Raises ValueError for other than integers."""
    given = tuple(value) if isinstance(value, tuple | list) else (value, 0)
    is_ = "it is L or (L, R): a query sees the L keys before it, itself and the R keys after it"
    hint = "window=128, or window=(128, 0); leave it out for no window"
    if len(given) != 2:
        raise wrong(f"window is {_shown(value)}", is_, hint)
    left, right = (int(whole("window", side, is_, hint)) for side in given)
    return left, right


def softcap(value: Any) -> float:
    """The largest score as Python's number. Raises ValueError for what is none."""
    return float(number("softcap", value, "softcap=50.0, say, or leave it out"))


def borders(documents: Any) -> Any:
    """The borders of packed documents as a tensor of integers. Their values are :func:`packed`'s. Raises ValueError for what has none."""
    found = documents
    if not isinstance(documents, torch.Tensor):
        try:
            found = torch.as_tensor(documents)
        except (TypeError, ValueError, RuntimeError):
            raise wrong(f"documents is {_shown(documents)}", _CU_SEQLENS, "documents=[0, 300, 512]") from None
    if found.dim() != 1 or found.is_floating_point() or found.is_complex() or found.dtype == torch.bool:
        hint = 'mask="doc[b, q] == doc[b, k]" takes ids, of each batch its own' if found.dim() == 2 else "documents=[0, 300, 512]"
        raise wrong(f"documents is {_shown(found)}", _CU_SEQLENS, hint)
    return found


_CU_SEQLENS = "they are cu_seqlens, the same for every batch: integers 0, …, seq, with one document between two of them"


def packed(values: Any, length: int) -> None:
    """Raise ValueError where a tensor of borders does not rise from 0 to the length. It reads them: on a GPU that waits."""
    count = values.shape[0]
    if count and bool((values[0] == 0) & (values[-1] == length) & (values[1:] >= values[:-1]).all()):
        return
    found = values.tolist()
    shown = ", ".join(map(str, found if count <= 6 else [*found[:3], "…", *found[-2:]]))
    ids = count == length and found == sorted(found)
    hint = "these look like the document of each position: give the borders, as [0, 300, 512]" if ids else "documents=[0, 300, 512]"
    raise wrong(f"documents are [{shown}], for {length} rows", f"they rise from 0 to the number of rows, {length}", hint)


def logits(sinks: Any, q: Any) -> Any:
    """Sinks. Raises TypeError for what is no tensor, ValueError for other than a real number of each query head on q's device."""
    heads = q.shape[1] if q.dim() == 4 else 1
    if not isinstance(sinks, torch.Tensor):
        hint = f"sinks=torch.zeros({heads}), or a parameter of the model"
        raise wrong(f"sinks is {_shown(sinks)}", "sinks are a torch tensor, a logit of each query head", hint, TypeError)
    if q.dim() == 4 and (tuple(sinks.shape) != (heads,) or not sinks.is_floating_point()):
        hint = f"give it the shape ({heads},) and a type of real numbers"
        raise wrong(f"sinks is {_shown(sinks)}", "sinks are a logit of each query head", hint)
    if sinks.device != q.device:  # a kernel is given their address
        raise wrong(f"sinks are on {sinks.device}, q on {q.device}", "they must be on one device", f"sinks.to({str(q.device)!r})")
    return sinks


def formulas(given: Mapping[str, Any]) -> dict[str, Any]:
    """The masks and scores of a call: mask, score, tensors, window, softcap and documents, or some of these; empty where it has none.

    A window is two integers afterwards, documents are a tensor. Raises ValueError, for a tensor that is none TypeError.
    """
    found = dict.fromkeys(("mask", "score", "tensors", "window", "softcap", "documents")) | dict(given)
    for kind, instead in (
        ("mask", "sdpa(q, k, v, attn_mask=…), or mask=\"seen[q, k] != 0\", tensors={'seen': …}"),
        ("score", "score=\"s + bias[q, k]\", tensors={'bias': …}"),
    ):
        value = found[kind]
        if value is not None and not isinstance(value, str) and not callable(value):
            block = getattr(value, "mask_mod", None) is not None
            hint = "mask=block_mask.mask_mod" if block else instead if isinstance(value, torch.Tensor) else f"leave {kind} out for none"
            raise wrong(f"{kind} is {type(value).__name__ if block else _shown(value)}", f"a {kind} is a text or a function", hint)
    tensors = found["tensors"] = {} if found["tensors"] is None else found["tensors"]
    if not isinstance(tensors, Mapping):
        raise wrong(f"tensors is {_shown(tensors)}", "it has those that mask and score name", "tensors={'slope': slope}")
    for name, value in tensors.items():
        if not isinstance(value, torch.Tensor):
            raise wrong(f"{name} of tensors is {_shown(value)}", "it is a torch tensor", "torch.as_tensor(values)", TypeError)
    for name, check in (("window", window), ("softcap", softcap), ("documents", borders)):
        if found[name] is not None:
            found[name] = check(found[name])
    if any(found[name] is not None for name in found if name != "tensors"):
        return found
    if tensors:
        raise wrong("tensors without a mask or score", "they are those that mask and score name", "leave them out, or name them: slope[h]")
    return {}


# -- what is not there ------------------------------------------------------------------------------------------------

#: What to do where a derivative is not there.
BY_AUTOGRAD = "use .backward() or torch.autograd.grad"


def no_second(*_: Any) -> Any:
    """The gradient of a backward pass: a RuntimeError."""
    raise RuntimeError(f"attention has no second derivative: its backward pass has no gradient\nhint: {BY_AUTOGRAD}, without create_graph")


def looped(op: Any) -> Callable[..., Any]:
    """The vmap rule of an operator: a call for each slice. torch's own loop warns, and takes no operator whose tensors stand in lists."""

    def each_slice(info: Any, in_dims: tuple[Any, ...], *given: Any) -> tuple[Any, Any]:
        def at(value: Any, dim: Any, i: int) -> Any:
            if isinstance(value, list | tuple):
                return [at(one, of, i) for one, of in zip(value, dim, strict=True)]
            return value if dim is None else value.select(dim, i)

        if not info.batch_size:
            raise wrong(
                "vmap over a dimension of 0", "without a slice nothing says what a call gives", "leave out the empty call", RuntimeError
            )
        calls = [op(*(at(value, dim, i) for value, dim in zip(given, in_dims, strict=True))) for i in range(info.batch_size)]
        outputs = tuple(torch.stack(parts) for parts in zip(*calls, strict=True))
        return outputs, (0,) * len(outputs)

    return each_slice


def no_forward_mode(*tensors: Any) -> None:
    """Raise RuntimeError for a tensor that forward mode differentiates: torch would take a call as constant."""
    if forward_ad._current_level >= 0 and any(forward_ad.unpack_dual(t).tangent is not None for t in tensors):
        raise RuntimeError(f"attention has no forward-mode derivative: torch would take it as constant\nhint: {BY_AUTOGRAD}")


def untransformed(*tensors: Any) -> None:
    """Raise RuntimeError for a tensor that torch.func differentiates: grad, vjp, jacrev."""
    functorch = torch._C._functorch
    for tensor in tensors:
        while functorch.is_functorch_wrapped_tensor(tensor):
            if functorch.is_gradtrackingtensor(tensor):
                why = "its gradient is torch.autograd's, in reverse mode, once"
                raise wrong("attention has no derivative for torch.func", why, BY_AUTOGRAD, RuntimeError)
            tensor = functorch.get_unwrapped(tensor)


#: What the arguments of other functions are called here: why, and what to do.
_NAMES = {
    **dict.fromkeys(("softmax_scale", "sm_scale"), ("it is called scale here", "scale=0.125, say, or leave it out for 1/sqrt(head_dim)")),
    "window_size": ("it is called window here", "window=128, or (128, 0); leave it out where flash-attn has (-1, -1)"),
    "block_mask": ("the function that a block mask is made of is enough", "mask=mask_mod, or mask=block_mask.mask_mod"),
    "mask_mod": ("it is called mask here", "mask=mask_mod"),
    "score_mod": ("it is called score here", "score=score_mod"),
    **dict.fromkeys(("cu_seqlens", "cu_seqlens_q", "cu_seqlens_k"), ("it is called documents here", "documents=cu_seqlens")),
}
#: By function: the arguments of the other one, with why it is none and what to do.
_OTHERS = {
    "attention": _NAMES | {
        **dict.fromkeys(("page_table", "block_tables"), ("it is called block_table here", "block_table=page_table")),
        **{f"descale_{name}": ("it has FlashAttention-3's name here", f"{name}_descale=descale") for name in "qkv"},
        **dict.fromkeys(("seq_lens", "seqused_k", "kv_lens"), ("it is called cache_seqlens here", "cache_seqlens=seq_lens")),
        "is_causal": ("attention calls it causal, and aligns it bottom-right", "causal=True, or sdpa(q, k, v, is_causal=True), which is torch's mask"),
        "enable_gqa": ("attention takes k and v with fewer heads as they are", "leave it out"),
        "attn_mask": ("attention has masks as texts and functions", 'mask="q - k < 1024", or sdpa, which takes it as torch does'),
        "dropout_p": ("no kernel has it", "sdpa takes it, and leaves the call to torch's own"),
    },
    "explain": _NAMES,
    "ring_attention": _NAMES | {
        "is_causal": ("it is called causal here", "causal=True"),
        "process_group": ("it is called group here", "group=process_group"),
        **dict.fromkeys(("mask", "score", "tensors", "mask_mod", "score_mod", "block_mask"), ("positions in a text are those of one rank's rows", "window, softcap and documents go over ranks")),
        "sinks": ("they need the logsumexp of all ranks", "sinks go with attention"),
    },
    "sdpa": {
        "causal": ("sdpa has torch's names", "is_causal=True, which is aligned top-left"),
        "causal_shift": ("sdpa's mask is torch's, aligned top-left", "attention(q, k, v, causal=True, causal_shift=...)"),
        "return_lse": ("sdpa returns what torch's own does", "attention(q, k, v, return_lse=True)"),
    },
}  # fmt: skip


def unexpected(function: Callable[..., Any], more: Sequence[Any], others: Mapping[str, Any]) -> Exception:
    """The error of arguments that a function has not. more: those without a name."""
    parameters = inspect.signature(function).parameters.values()
    known = [each.name for each in parameters if each.kind not in (each.VAR_KEYWORD, each.VAR_POSITIONAL)]
    if more:
        what = f"{function.__name__}() got {_shown(more[0])} after q, k and v"
        return wrong(what, "its other arguments have names", f"name it: {', '.join(known[3:6])}, …", TypeError)
    name = min(others)
    why, hint = _OTHERS.get(function.__name__, {}).get(name, ("", meant(name, known).rstrip() or f"it takes {', '.join(known)}"))
    return wrong(f"{function.__name__}() got an unexpected keyword argument {name!r}", why, hint, TypeError)
