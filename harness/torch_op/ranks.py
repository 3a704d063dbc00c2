"""Ranks of a torch.distributed process group: what they agree on before a call, and the messages of one."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist

from ..fault import Fault
from .copies import Messages


def members(group: Any) -> Any:
    """The process group of a group, a mesh of one dimension, or None for the world. Raises RuntimeError where there is none."""
    if not (dist.is_available() and dist.is_initialized()):
        why = "attention over ranks sends messages by torch.distributed"
        raise _error(RuntimeError, "there is no process group", why, "call torch.distributed.init_process_group(...) below torchrun")
    if hasattr(group, "get_group"):
        group = group.get_group()
    if group not in (None, dist.GroupMember.NON_GROUP_MEMBER) and not isinstance(group, dist.ProcessGroup):
        why = "it is a ProcessGroup, or a DeviceMesh of one dimension"
        raise _error(TypeError, f"group is {group!r:.40}", why, "leave it out for all ranks")
    group = group or dist.group.WORLD
    if dist.get_rank(group) < 0:
        raise _error(ValueError, "this process is not in the group", "it is a rank of another", "call it on the ranks of the group only")
    return group


def carriers(group: Any) -> dict[str, str]:
    """What moves the tensors of each kind of device."""
    found = (pair.split(":") for pair in dist.get_backend_config(group).split(","))
    return {device: by for device, by in found if by != "undefined"}


#: Bytes of what a rank tells the others.
_RECORD = 4096


def agree(name: str, mine: Mapping[str, Any], group: Any, free: Sequence[str] = (), wrong: str = "") -> list[dict[str, Any]]:
    """What each rank says of its call, where only the fields named in free differ. wrong: why this rank cannot take part.

    Raises ValueError on all ranks where one of them cannot or where others differ, RuntimeError where one does not answer.
    """
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    said = json.dumps({**mine, "wrong": wrong[:300]}, default=str).encode()
    if len(said) > _RECORD:  # a long path of a kernel
        said = json.dumps({"wrong": wrong[:300], **{key: _short(value) for key, value in mine.items()}}, default=str).encode()
    device = "cpu" if "cpu" in carriers(group) else torch.device("cuda", torch.cuda.current_device())
    record = torch.frombuffer(bytearray(said.ljust(_RECORD)), dtype=torch.uint8).to(device)
    every = [torch.empty_like(record) for _ in range(size)]
    try:
        dist.all_gather(every, record, group)
        found = [json.loads(each.cpu().numpy().tobytes()) for each in every]
    except RuntimeError as error:
        raise _lost(name, group, error) from error
    if wrong:
        raise ValueError(wrong)
    if others := [f"rank {each}: {found[each]['wrong']}" for each in range(size) if found[each]["wrong"]]:
        raise _error(ValueError, f"{name} cannot begin on rank {rank}", "; ".join(others), "all ranks take part or none")
    same = {key for key, value in found[0].items() if all(key in each and each[key] == value for each in found)}
    for field in dict.fromkeys(key for each in found for key in each if key not in free and key not in same):
        values: dict[str, list[int]] = {}
        for each, record in enumerate(found):
            values.setdefault(json.dumps(record.get(field)), []).append(each)
        if len(values) > 1:
            kinds = ", ".join(f"{value} on rank {' and '.join(map(str, ranks))}" for value, ranks in values.items())
            why = f"all ranks call it with the same arguments{' and shapes but for the rows' if 'rows' in free else ''}"
            raise _error(ValueError, f"the ranks of {name} differ in {field}: {kinds}", why, f"give {field} the same value on all ranks")
    return found


def _short(value: Any) -> Any:
    """A long text by its end and checksum."""
    return f"...{value[-80:]} {zlib.crc32(value.encode()):08x}" if isinstance(value, str) and len(value) > 100 else value


def _error(kind: type[Exception], what: str, why: str, hint: str) -> Exception:
    return kind(str(Fault(what, why, hint)))


def _lost(name: str, group: Any, error: Exception) -> Exception:
    """A rank that has ended, or that the group has waited for too long."""
    what = f"{name} cannot go on: rank {dist.get_rank(group)} of {dist.get_world_size(group)} has lost another rank"
    why = f"a rank ended, or did not answer within the timeout of the process group: {str(error).partition(chr(10))[0]}"
    return _error(
        RuntimeError, what, why, "read what the other ranks have printed; init_process_group(timeout=...) sets how long ranks wait"
    )


# -- messages ---------------------------------------------------------------------------------------------------------


class Arrival:
    """Messages on their way: what is sent stays as it is, and what is received is not read, before wait()."""

    def __init__(self, group: Any, works: list[Any], held: list[Any], received: list[Any]) -> None:
        self._group, self._works, self._held, self._received = group, works, held, received

    def wait(self) -> list[Any]:
        """What was received. On a GPU the current stream waits. Raises RuntimeError where a rank has ended."""
        try:
            for work in self._works:
                work.wait()
        except RuntimeError as error:
            raise _lost("ring_attention", self._group, error) from error
        self._works, self._held = [], []
        return self._received


class _Copied(Arrival):
    """The same by copy engines: one that nobody waits for, since a launch beside it failed, keeps its tensors until the stream has."""

    def __del__(self) -> None:
        with suppress(RuntimeError):
            for ended in self._works:
                ended.wait()


def exchange(
    group: Any, messages: Sequence[tuple[int, Any]], expected: Sequence[tuple[int, Any]], copies: Messages | None = None
) -> Arrival:
    """Begin to send (rank of the group, contiguous tensor) and to receive (rank, tensor to fill), also tensors without elements: NCCL
    wants all ranks in the first message of a group. copies: what carries them in place of the group, and row_major tensors too.

    Raises RuntimeError where a rank has ended.
    """
    if copies:
        ended = copies.exchange(messages, expected)
        return _Copied(group, [ended], [each for _, each in messages], [each for _, each in expected])
    ways = [(dist.isend, each) for each in messages] + [(dist.irecv, each) for each in expected]
    try:
        works = dist.batch_isend_irecv([dist.P2POp(way, tensor, dist.get_global_rank(group, rank), group) for way, (rank, tensor) in ways])
    except RuntimeError as error:
        raise _lost("ring_attention", group, error) from error
    return Arrival(group, works, [tensor for _, tensor in messages], [tensor for _, tensor in expected])
