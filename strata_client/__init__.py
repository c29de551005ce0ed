"""strata-client: maps memory that vmmd leases, generates text from it, and lends it to other engines.

    import strata_client

    with strata_client.connect() as client, client.range(64 << 20) as memory: ...

``docs/library.md`` in the repository is about the library. It is imported when it is
first used: the command line starts without it.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from strata_client.connection import NoDaemon as NoDaemon
    from strata_client.library import Client as Client
    from strata_client.library import Device as Device
    from strata_client.library import Range as Range
    from strata_client.library import connect as connect
    from strata_client.library import connect_async as connect_async
    from strata_client.view import View as View
    from vmmd.errors import Exhausted as Exhausted
    from vmmd.errors import InvalidRequest as InvalidRequest
    from vmmd.errors import LeaseRevoked as LeaseRevoked
    from vmmd.errors import NoDevice as NoDevice
    from vmmd.errors import PermissionDenied as PermissionDenied
    from vmmd.errors import Unavailable as Unavailable
    from vmmd.errors import VmmError as VmmError

_PLACES = {
    "strata_client.connection": ("NoDaemon",),
    "strata_client.library": ("Client", "Device", "Range", "connect", "connect_async"),
    "strata_client.view": ("View",),
    "vmmd.errors": (
        "Exhausted",
        "InvalidRequest",
        "LeaseRevoked",
        "NoDevice",
        "PermissionDenied",
        "Unavailable",
        "VmmError",
    ),
}
_PLACE_OF = {name: place for place, names in _PLACES.items() for name in names}

__all__ = list(_PLACE_OF)


def __getattr__(name: str) -> Any:
    if name not in _PLACE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_PLACE_OF[name]), name)
