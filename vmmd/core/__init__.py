"""The core: who holds which slab, and who should. Pure: no I/O, no clock, no driver.

Everything is passed in, so that it can be simulated and property-tested. The
manager carries out what is decided here.
"""
