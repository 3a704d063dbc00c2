"""The terminal: options, printing, progress and watching; all that knows click and rich. Modules load when first used."""

from __future__ import annotations

from ..doors import doors

TYPE_CHECKING = False  # as typing has it (doors.py says why)
if TYPE_CHECKING:
    from . import complete as complete
    from . import debugger as debugger
    from . import errors as errors
    from . import group as group
    from . import help as help
    from . import interrupt as interrupt
    from . import options as options
    from . import printing as printing
    from . import progress as progress
    from . import show as show
    from . import watch as watch

__getattr__ = doors(__name__)
