"""Ring attention: the sequence divided over ranks, K and V passed round, partial results merged. Modules load when first used."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..doors import doors

if TYPE_CHECKING:
    from . import job as job
    from . import record as record
    from . import start as start

__getattr__ = doors(__name__)
