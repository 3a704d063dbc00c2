"""A .cu file -> Kernel (its header, read without compiling) -> Plan (launches with their sizes)."""

from . import new as new
from . import planner as planner
from .catalogue import NoSuchPass as NoSuchPass
from .catalogue import catalogue as catalogue
from .catalogue import find as find
from .catalogue import is_path as is_path
from .catalogue import parts as parts
from .kernel import Kernel as Kernel
from .plan import Device as Device
from .plan import LaunchPlan as LaunchPlan
from .plan import Plan as Plan
from .plan import Workspace as Workspace
from .tree import ADD as ADD
from .tree import INCLUDE as INCLUDE
from .tree import KERNELS as KERNELS
from .tree import MERGE as MERGE
from .tree import ROUND as ROUND
from .tree import include_closure as include_closure
