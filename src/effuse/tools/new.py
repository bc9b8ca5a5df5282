"""Write a recipe file for a folder of images: `effuse new`."""

import os
from pathlib import Path
from typing import Any

from effuse.core.errors import DataError, RunError
from effuse.core.files import write_atomically
from effuse.core.recipe_file import SUFFIX, written
from effuse.data.folders import list_subfolders
from effuse.data.images import read_image
from effuse.recipes.images import images

CHOICES = (28, 32, 64, 128)
LOOKED_AT = 20  # images that decide the size
COMMENTS = {
    "data": "Your images, a subfolder for each class. The path is relative to this file.\n"
    'Patients: add groups="patients.csv" (file name, patient) here, and by_group=True to the partition.',
    "clients": "How many sites there are. On one machine they are simulated.",
    "partition": "Who holds what: iid(), label_skew(beta=0.5) for sites with different classes; `effuse list partition`.",
    "model": "The network; its size decides time and memory (`effuse check` estimates both).",
    "task": "Denoising, by velocity: good images come earlier. drop is how often the class is hidden, which guidance needs.",
    "algorithm": "How the sites train together; `effuse list algorithm`. local is what a site does in a round.",
    "rounds": "More rounds, better images: look at samples/ in the run folder, and `effuse resume` goes on after a stop.",
    "evaluate": "When to draw and measure. Keep n and grid small: every image costs sampler.steps network evaluations.",
    "sampler": "How images are drawn; 20 steps of this one are as good as hundreds of others.",
    "ema": "A moving average over rounds, such as 0.9, often draws better; None has none.",
    "seed": "Another seed gives another run; the same one repeats it.",
}


def new_recipe(name: str, data: Path, clients: int, side: int | None) -> tuple[Path, dict[str, Any]]:
    """Look at the images of a folder and write NAME.toml for them; returns its path and what was found."""
    path = Path(name if name.endswith(SUFFIX) else name + SUFFIX)
    if path.exists():
        raise RunError(f"{path} exists; choose another name, or remove it")
    if not data.is_dir():
        raise DataError(f"--data {data}: not a folder; give the folder that holds a subfolder of images for each class")
    found = look(data)
    chosen = side or fitting(found["side"])
    place = data if data.is_absolute() else Path(os.path.relpath(data, path.parent))
    recipe = images(str(place), side=chosen, channels=found["channels"], clients=clients)
    head = (
        f"{found['images']:,} images in {found['classes']} classes, about {found['side']} pixels wide.\n"
        f"`effuse check {path}` tells what it costs, `effuse run {path}` trains; --set changes a key for one run."
    )
    write_atomically(path, written(recipe, COMMENTS, head).encode())
    return path, found | {"chosen": chosen, "file": str(path)}


def look(data: Path) -> dict[str, int]:
    """Number of images and classes, and the side and channels of some of them."""
    listing = list_subfolders(data)
    step = max(1, len(listing.files) // LOOKED_AT)
    shapes = [read_image(data / file)[0].shape for file in listing.files[::step]]
    sides = sorted(min(shape[-2:]) for shape in shapes)
    channels = 3 if any(shape[1] > 1 for shape in shapes) else 1
    return {
        "images": len(listing.files),
        "classes": len(listing.classes),
        "side": sides[len(sides) // 2],
        "channels": channels,
    }


def fitting(side: int) -> int:
    """The largest side that is offered and does not enlarge the images; small images are enlarged to the smallest."""
    return max((choice for choice in CHOICES if choice <= side), default=CHOICES[0])
