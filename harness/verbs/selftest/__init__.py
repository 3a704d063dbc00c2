"""Mutation tests of the judge: wrong kernels made from the tree's own sources, and the check that must find each."""

from .trial import selftest as selftest
