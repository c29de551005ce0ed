"""Every error that vmmd reports, as one tree::

    VmmError
    ├── InvalidRequest        the request makes no sense; asking again is useless
    ├── NotFound              no such device, range, model or batch
    ├── Exhausted             no room: who holds what is in `holders`
    ├── PreconditionFailed    right request, wrong moment
    │   ├── LeaseRevoked      the range is being taken back
    │   └── StaleGeneration   the file or the epoch behind it has changed
    ├── PermissionDenied      not yours
    ├── Unavailable           nothing wrong with the request; the service is not there
    │   ├── NoDevice          no usable device, or it failed
    │   └── Draining          no new sessions
    └── DriverError           a driver call failed: `call`, `code`, `name`

A message says what was asked, what is, and what to do. Each class has a stable
`reason`, which travels in the gRPC status details; clients rebuild the class
from it, never from the text. `assert` is for our own bugs only.
"""

from collections.abc import Mapping, Sequence


class VmmError(Exception):
    """Base of all errors; `message` is one line for a person."""

    reason = "internal"

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message

    def fields(self) -> dict[str, str]:
        """What travels beside the message, as text."""
        return {}

    @classmethod
    def rebuild(cls, message: str, fields: Mapping[str, str]) -> "VmmError":
        """The error again on the other side of the wire."""
        return cls(message)


class InvalidRequest(VmmError):
    """The request makes no sense."""

    reason = "invalid_request"


class NotFound(VmmError):
    """No such thing."""

    reason = "not_found"


class Exhausted(VmmError):
    """No room. `holders` says who has what, as one phrase each; `retry_s`, unless 0, when there will be."""

    reason = "exhausted"

    def __init__(
        self, message: str, requested_bytes: int = 0, free_bytes: int = 0, holders: Sequence[str] = ()
    ) -> None:
        super().__init__(message)
        self.requested_bytes = requested_bytes
        self.free_bytes = free_bytes
        self.holders = tuple(holders)
        self.retry_s = 0.0

    def fields(self) -> dict[str, str]:
        return {
            "requested_bytes": str(self.requested_bytes),
            "free_bytes": str(self.free_bytes),
            "holders": "\n".join(self.holders[:50]),
        }

    @classmethod
    def rebuild(cls, message: str, fields: Mapping[str, str]) -> "Exhausted":
        holders = fields.get("holders", "")
        return cls(
            message,
            int(fields.get("requested_bytes", "0")),
            int(fields.get("free_bytes", "0")),
            holders.split("\n") if holders else (),
        )


class PreconditionFailed(VmmError):
    """Right request, wrong moment."""

    reason = "precondition_failed"


class LeaseRevoked(PreconditionFailed):
    """The range or session is being taken back."""

    reason = "lease_revoked"


class StaleGeneration(PreconditionFailed):
    """What the request builds on has changed: a file, or the daemon's epoch."""

    reason = "stale_generation"


class PermissionDenied(VmmError):
    """The caller may not do this."""

    reason = "permission_denied"


class Unavailable(VmmError):
    """The service cannot be had now."""

    reason = "unavailable"


class NoDevice(Unavailable):
    """No usable device."""

    reason = "no_device"


class Draining(Unavailable):
    """The daemon takes no new sessions."""

    reason = "draining"


class DriverError(VmmError):
    """A driver call failed."""

    reason = "driver_error"

    def __init__(self, message: str, call: str = "", code: int = 0, name: str = "") -> None:
        super().__init__(message)
        self.call = call
        self.code = code
        self.name = name

    def fields(self) -> dict[str, str]:
        return {"call": self.call, "code": str(self.code), "name": self.name}

    @classmethod
    def rebuild(cls, message: str, fields: Mapping[str, str]) -> "DriverError":
        return cls(message, fields.get("call", ""), int(fields.get("code", "0")), fields.get("name", ""))


def _tree(cls: type[VmmError]) -> list[type[VmmError]]:
    return [cls, *(x for sub in cls.__subclasses__() for x in _tree(sub))]


BY_REASON: dict[str, type[VmmError]] = {cls.reason: cls for cls in _tree(VmmError)}
"""The class of each reason code."""
