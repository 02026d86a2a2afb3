# SPDX-License-Identifier: Apache-2.0
"""Engines of another make at the other end of the side channel.

The listener of the base's connector takes any three values for a question about the
rank that the last two name, and its thread ends at anything else, or at a rank that
it does not have: no engine could make its acquaintance any more. So the first question
of this protocol, ``GetRanks``, has that form and names a rank that every engine has.
Its tag tells the protocol's version.
"""

import re

import msgspec

from .wire.codec import PROTOCOL_VERSION

ANSWER_FRAMES = 2
"""An empty one and the answer; the base's listener sends more."""

NO_ANSWER = (
    "what answers is no engine with this fork's connector; all engines of a "
    "deployment must have it"
)

_MAX_QUESTION_BYTES = 256
_BASE_QUESTION = b"get_meta_msg"
_OUR_QUESTION = re.compile(r"get_ranks(?:_([0-9]{1,4}))?")


def other_asker(question: bytes) -> str | None:
    """What differs, if an engine of another version or connector introduces itself.

    ``None``: it is not the first question of any engine.
    """
    if len(question) > _MAX_QUESTION_BYTES:
        return None
    try:
        asked = msgspec.msgpack.decode(question, type=list)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None
    kind = asked[0] if asked else None
    if kind == _BASE_QUESTION:
        return "the other engine has the base's connector, this one the fork's"
    found = _OUR_QUESTION.fullmatch(kind) if isinstance(kind, str) else None
    if found is None:
        return None
    theirs = found[1] or "an older one"
    return f"protocol differs (local {PROTOCOL_VERSION}, remote {theirs})"
