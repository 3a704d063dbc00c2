"""The language of masks and scores: a text is parsed once into a tree, which has a value, C++ and a derivative by s. Never `eval`.

    --mask "q - k < 1024"                    a mask: which keys a query sees
    --score "s + exp2(-h - 1) * (k - q)"     a score: what takes the place of s before the softmax

It is the language of header expressions (kernel/expression.py) with real numbers. A mask is made of integers only, so that it is the same
in every arithmetic; a score is real. The types are checked when the text is parsed, and so are the ranges of integers.
"""

from .formula import Formula as Formula
from .given import Given as Given
from .given import checked as checked
from .mistake import Mistake as Mistake
from .named import DOCUMENT as DOCUMENT
from .named import SINKS as SINKS
from .named import as_border as as_border
from .named import as_softcap as as_softcap
from .named import as_window as as_window
from .named import capped as capped
from .named import is_causal as is_causal
from .named import stated as stated
from .named import windowed as windowed
from .parse import LANGUAGES as LANGUAGES
from .parse import parsed as parsed
from .tree import EXTENTS as EXTENTS
from .tree import FUNCTIONS as FUNCTIONS
from .tree import INTEGERS as INTEGERS
