"""What ranks tell each other through torch's store: values of any size, in pieces that it takes."""

from __future__ import annotations

from datetime import timedelta

from harness.ring import place

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
