"""Problem <-> data/<folder>/*.bin + meta.json: generating, reading and writing; storage types and rounding."""

from .folder import Dataset as Dataset
from .folder import check_size as check_size
from .folder import open_ as open_
from .folder import read_forward as read_forward
from .folder import write as write
from .folder import write_outputs as write_outputs
