"""The manager: carries out plans of the core with a driver, undoing what failed.

Everything here runs on one asyncio loop and owns its state without locks; what
blocks (creating, filling, reading files) goes to worker threads and touches
driver slabs only.
"""

from vmmd.manager.manager import Manager

__all__ = ["Manager"]
