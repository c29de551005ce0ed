"""Drivers: physical memory, its descriptors and its mappings."""
