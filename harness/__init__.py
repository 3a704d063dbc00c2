"""The harness: from a kernel file and a problem to outputs, verdicts, times and figures. Its rooms load when first used."""

from __future__ import annotations

from .doors import doors

TYPE_CHECKING = False  # as typing has it (doors.py says why)
if TYPE_CHECKING:  # what the command line opens
    from . import check as check
    from . import dataset as dataset
    from . import kernel as kernel
    from . import report as report
    from . import ring as ring
    from . import terminal as terminal
    from . import verbs as verbs

__getattr__ = doors(__name__)
