"""What each verb prints: a table or JSON, files written, the verdict and the exit code. Modules load when first used."""

from __future__ import annotations

from ...doors import doors

TYPE_CHECKING = False  # as typing has it (doors.py says why)
if TYPE_CHECKING:
    from . import checks as checks
    from . import report as report
    from . import results as results
    from . import ring as ring

__getattr__ = doors(__name__)
