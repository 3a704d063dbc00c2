"""Errors only: kernels over matrices and random cases of shapes, types, masks, scales, inputs and schedules, each against float64."""

from .cases import CROSS as CROSS
from .cases import EDGES as EDGES
from .cases import GROUPS as GROUPS
from .cases import HEAD_DIMS as HEAD_DIMS
from .cases import SCALES as SCALES
from .cases import SCHEDULES as SCHEDULES
from .cases import SHIFTS as SHIFTS
from .cases import Case as Case
from .cases import matrix as matrix
from .fuzz import draw as draw
from .fuzz import fuzz as fuzz
from .fuzz import takes as takes
from .judge import Backends as Backends
from .judge import CaseResult as CaseResult
from .judge import compile_ahead as compile_ahead
from .judge import run_case as run_case
from .large import NoRoom as NoRoom
from .sanitizer import run_under_sanitizer as run_under_sanitizer
from .sanitizer import sanitizer_child_needed as sanitizer_child_needed
from .verify import verify as verify
