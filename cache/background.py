"""Threads whose work nobody waits for."""

from __future__ import annotations

import os
import sys

_STEPS = 10
"""Of niceness: a tenth of the share of a thread that computes, enough for many times the pages that it fills. At the end of
the scale (19) a thread that holds the interpreter, or a lock, would keep others waiting for longer than its work takes."""


def step_back() -> None:
    """From now on the calling thread takes the processor time that others leave, and a little more.

    A CPU device computes with every processor there is, and its threads wait for the slowest of them: what a copy takes from one
    would be taken from all. Only Linux gives threads a priority of their own; elsewhere this does nothing.
    """
    if sys.platform == "linux":
        os.nice(_STEPS)
