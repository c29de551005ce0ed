"""Names that users choose, by rules that daemon and clients share."""

import re

_CONVERSATION = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", re.ASCII)


def conversation_problem(name: str) -> str | None:
    """One line where a conversation cannot have this name, else None."""
    if _CONVERSATION.fullmatch(name):
        return None
    return (
        f"{name[:80]!r} is no name for a conversation: it has 1 to 64 letters, digits, dots, underscores or hyphens,"
        " a letter or digit first"
    )
