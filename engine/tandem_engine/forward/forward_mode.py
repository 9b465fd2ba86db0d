"""What a step computes."""

from enum import Enum


class ForwardMode(Enum):
    EXTEND = "extend"
    """Prompt tokens that are not cached: a first prompt, a later chunk, an appended turn."""
    DECODE = "decode"
    """One token per request."""
    MIXED = "mixed"
    """EXTEND requests first, then DECODE requests as extends of length one."""
    TARGET_VERIFY = "target_verify"
    """Some running requests compute their last token and drafts behind it. All sequences count as extends."""
    DRAFT_EXTEND = "draft_extend"
    """A draft model catches up with tokens that it has not seen. Never a step of the scheduler."""
    IDLE = "idle"
    """Nothing: keeps ranks in step."""
