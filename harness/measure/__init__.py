"""Samples -> medians, spreads and verdicts of a comparison; what the device can do at most."""

from .sampling import POLICY as POLICY
from .sampling import TIMINGS as TIMINGS
from .sampling import Policy as Policy
from .sampling import Timed as Timed
from .sampling import Timing as Timing
from .sampling import measure as measure
from .sampling import together as together
