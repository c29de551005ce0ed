"""Files that only save time: where they are kept, and how they are written."""

import contextlib
import os
from pathlib import Path


def cache_directory(kind: str) -> Path | None:
    """``$XDG_CACHE_HOME/strata/KIND`` (``~/.cache/strata/KIND``); None where no such place is known.

    It may not exist or not be writable.
    """
    base = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(base):  # the specification of these variables has relative ones ignored
        return Path(base) / "strata" / kind
    try:
        return Path.home() / ".cache" / "strata" / kind
    except RuntimeError:  # no HOME, and nobody in the user database
        return None


def write_at_once(path: Path, contents: bytes) -> None:
    """Writes a file, mode 0600, at once: a reader finds all of it or the one before. Errors: `OSError`."""
    import tempfile  # whoever only reads does without

    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name)
    try:
        with open(descriptor, "wb") as file:
            file.write(contents)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
