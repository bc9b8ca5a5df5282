"""Machines that are fast: which ones serve a recipe, and how many. Nothing else of this package is imported from outside."""

from effuse.fast.speed import cpu_slots, keep, machine_for, machines_for, pick_speed

__all__ = ["cpu_slots", "keep", "machine_for", "machines_for", "pick_speed"]
