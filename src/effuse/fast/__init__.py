"""Fast machines: which ones serve a recipe, and how many. Other packages import only these names."""

from effuse.fast.speed import cpu_slots, keep, machine_for, machines_for, pick_speed

__all__ = ["cpu_slots", "keep", "machine_for", "machines_for", "pick_speed"]
