"""A .cu file -> Kernel (its header, read without compiling) -> Plan (launches with their sizes)."""

from . import new as new
from .kernel import INCLUDE as INCLUDE
from .kernel import KERNELS as KERNELS
from .kernel import Kernel as Kernel
from .kernel import NoSuchPass as NoSuchPass
from .kernel import catalogue as catalogue
from .kernel import find as find
from .kernel import include_closure as include_closure
from .kernel import is_path as is_path
from .plan import Device as Device
from .plan import LaunchPlan as LaunchPlan
from .plan import Plan as Plan
from .plan import Workspace as Workspace
