"""What ranks tell each other through torch's store: values of any size, in pieces that it takes."""

from __future__ import annotations

import os
import re
import shlex
import socket
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

import pytest
from rooms import ROOT

from harness.fault import EnvironmentFault
from harness.ring import place, start

#: What torch 2.11's store takes at most; it ends the connection at more.
LIMIT = 8 << 20


class Values(dict[str, bytes]):
    """A store in memory, with the limit of torch's."""

    def set(self, key: str, value: bytes | str) -> None:
        self[key] = value.encode() if isinstance(value, str) else value
        assert len(self[key]) <= LIMIT

    def set_timeout(self, timeout: timedelta) -> None:
        pass


def test_a_value_larger_than_the_store_takes_arrives_whole() -> None:
    """A shard of O is 67 MB at 32k tokens; nothing is mixed up with the value after it."""
    store = object.__new__(place.Store)
    store.rank, store.size, store.timeout, store._count, store._store = 0, 1, 5.0, 0, Values()
    large = bytes(range(256)) * (20 << 12)
    assert store.gather(large) == [large]
    assert store.gather({"small": 1}) == [{"small": 1}]
    store.rank, store.size = 1, 2
    store._store.set("fa_cli/0/3/0", "9")  # what only the first rank wants, the others do not fetch: it is not there
    assert store.gather("mine", to_all=False) == [None, None]


def test_only_the_first_rank_waits_at_the_end() -> None:
    """It judges for minutes before it closes, longer than --timeout: the others leave the store, which is in its process, before it."""
    values = Values()
    stores = []
    for rank in range(2):
        store = object.__new__(place.Store)
        store.rank, store.size, store.timeout, store._count, store._store = rank, 2, 5.0, 0, values
        stores.append(store)
    stores[1].close()
    closed = set(values)
    assert len(closed) == 1
    stores[0].close()
    assert set(values) > closed


@pytest.mark.parametrize(
    ("rank", "said"),
    [(0, "Stuck: rank 1 did not answer within 2 s\nrank 0 waited for rank 1"), (1, "error: no store at localhost:{port} within 2 s")],
)
def test_a_rank_that_never_joins_a_store(rank: int, said: str) -> None:
    """The first rank names it after one timeout, not five; without the first rank there is no store."""
    pytest.importorskip("torch.distributed")
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    first = "import time\n" if rank else "import torch.distributed, time\n"  # the time is the first rank's, torch's words are the other's
    code = (
        f"{first}"
        "from harness.ring import place\n"
        "print(time.monotonic(), flush=True)\n"
        f"place.control(place.Place({rank}, 2, 0, 'store'), 2.0)"
    )
    here = os.environ | {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False, timeout=60, env=here)
    seconds = time.monotonic() - float(done.stdout)
    assert done.returncode == (4 if rank else 1) and said.format(port=port) in done.stderr, done
    assert "frame #" not in done.stderr, "torch's C++ frames"
    assert rank or seconds < 8


def test_a_store_without_a_port(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is somebody's variable, and no fault of ours."""
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    for port in ("abc", "99999", "-1"):
        monkeypatch.setenv("MASTER_PORT", port)
        with pytest.raises(EnvironmentFault, match=f"MASTER_PORT is '{port}'"):
            place.control(place.Place(0, 2, 0, "store"), 1.0)


def two_nodes() -> dict[str, list[str]]:
    """The commands of docs/ring.md for two nodes that try them, by launcher."""
    text = (ROOT / "docs" / "ring.md").read_text()
    section = text[text.index("For two nodes of eight GPUs each") :]
    assert section.count("\n") <= 25 and all(
        f"`{name}" in section for name in ("MASTER_PORT", "MASTER_ADDR", "NCCL_SOCKET_IFNAME=", "-iface")
    )
    lines = [shlex.split(line, comments=True) for line in re.findall(r"^(?:mpiexec|torchrun) .* doctor --ring.*$", section, re.M)]
    return {line[0]: line[1:] for line in lines}


def test_the_page_tries_two_nodes_by_mpi() -> None:
    """With two ranks, and this machine as the node."""
    words = [word.replace("node0:8,node1:8", "localhost:2").replace("16", "2") for word in two_nodes()["mpiexec"]]
    words = [
        start.mpiexec(),
        *(each for word in words for each in ([sys.executable, str(ROOT / "cli.py")] if word == "fa-cli" else [word])),
    ]
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=60, env=os.environ | {"FA_CLI_DEVICE": "cpu"})
    assert done.returncode == 0 and "GB/s each way" in done.stdout and "PASS ring of 2 ranks on 1 host" in done.stdout, done


def test_the_page_tries_two_nodes_by_torchrun() -> None:
    """Every option is one of torchrun's, and the rest is our command."""
    run = pytest.importorskip("torch.distributed.run")
    given = run.get_args_parser().parse_args(two_nodes()["torchrun"])
    assert (given.nnodes, given.nproc_per_node, given.node_rank, given.master_addr, given.no_python) == ("2", "8", 0, "node0", True)
    assert [given.training_script, *given.training_script_args] == ["fa-cli", "doctor", "--ring"]


def test_the_script_of_the_page_over_two_torchruns(tmp_path: Path) -> None:
    """ring.py of docs/pytorch.md, by one torchrun a node: both end by themselves, and O and dK are those of the whole sequence."""
    pytest.importorskip("torch.distributed.run")
    block = next(each for each in (ROOT / "docs" / "pytorch.md").read_text().split("```") if "# ring.py: " in each)
    words = re.search(r"on each of two nodes with (--nnodes 2 --node-rank) 0 \(or 1\) (--master-addr) node0", block)
    assert words and block.count("dist.destroy_process_group()") == 1
    check = """
rows, rank = slice(256 * dist.get_rank(), 256 * dist.get_rank() + 256), dist.get_rank()
whole = []
for x in (q, k, v):
    every = [torch.empty_like(x) for _ in range(2)]
    dist.all_gather(every, x.detach())
    whole.append(torch.cat(every, 2).double().requires_grad_())
right = torch.nn.functional.scaled_dot_product_attention(*whole, is_causal=True)
right.sum().backward()
assert (o - right[:, :, rows]).abs().max() < 1e-5 and (k.grad - whole[1].grad[:, :, rows]).abs().max() < 1e-4
print("rank", rank, "is right")
"""
    script = tmp_path / "ring.py"
    text = block.removeprefix("python\n").replace("from fa_cli ", "from harness.torch_op ")
    script.write_text(text.replace("dist.destroy_process_group()", f"{check}dist.destroy_process_group()"))
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    here = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "FA_CLI_THREADS": "1"}
    own = ["--nproc-per-node", "1", "--master-port", str(port), *words[1].split(), "{}", words[2], "127.0.0.1", str(script)]
    commands = [[sys.executable, "-m", "torch.distributed.run", *(each.format(node) for each in own)] for node in (0, 1)]
    nodes = [subprocess.Popen(each, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=here) for each in commands]
    try:
        said = [each.communicate(timeout=200)[0] for each in nodes]
    finally:
        for each in nodes:
            each.kill()
    assert [each.returncode for each in nodes] == [0, 0] and all(f"rank {node} is right" in said[node] for node in (0, 1)), said
