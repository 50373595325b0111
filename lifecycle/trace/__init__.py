"""Verify a recorded trace: replay a journal against the transition table and the rules, and report every violation.

The replay believes requests and outcomes. From them it works out what must have been known, asks the table's own guards
and proofs about it, and checks the lifecycle's conclusions: what it committed, settled, routed to and gave out. A rule
is named after the guard or proof that does not hold, or after what was promised.
"""

from .replay import verify, verify_file
from .verdict import Verdict, Violation

__all__ = ["Verdict", "Violation", "verify", "verify_file"]
