"""Files: exact reads and checked records; sets that are written or appended whole, under the lock of their folder."""

from .reading import JSON_DEPTH as JSON_DEPTH
from .reading import JSON_LIMIT as JSON_LIMIT
from .reading import OBJECTS as OBJECTS
from .reading import TABLE_LIMIT as TABLE_LIMIT
from .reading import TEXT as TEXT
from .reading import TEXTS as TEXTS
from .reading import WHOLE as WHOLE
from .reading import Json as Json
from .reading import Kind as Kind
from .reading import exposed as exposed
from .reading import json_bytes as json_bytes
from .reading import open_regular as open_regular
from .reading import or_null as or_null
from .reading import parse_json as parse_json
from .reading import read_exact as read_exact
from .reading import read_json as read_json
from .reading import read_text as read_text
from .reading import sha256 as sha256
from .writing import JOURNAL as JOURNAL
from .writing import READERS_SECONDS as READERS_SECONDS
from .writing import append_files as append_files
from .writing import disk_fault as disk_fault
from .writing import locked as locked
from .writing import make_folder as make_folder
from .writing import settle as settle
from .writing import write_files as write_files
