"""One's own images: sites on this machine train one generator of a folder of pictures."""

from typing import Annotated

from pydantic import Field

from effuse.algorithms.fedavg import FedAvg
from effuse.core.errors import RecipeError
from effuse.core.recipe import Evaluate, Recipe
from effuse.core.solvers import Adam
from effuse.data.folders import Folder
from effuse.data.partition import Iid
from effuse.data.transforms import Channels, Crop, Resize
from effuse.diffusion.samplers import DpmSolver
from effuse.metrics.tones import Tones
from effuse.models.unet import Unet
from effuse.tasks.denoise import Denoise
from effuse.tasks.schedules import Cosine

WIDTHS = (32, 64, 96, 128)  # of the network, from the whole image to a quarter of its side and less
LOWEST = 7  # pixels: the image is not halved below this side
SIDES = (28, 128)
DRAWN = 64  # images of an evaluation: enough for a grid, and drawn in a minute on two cores


def images(
    path: str = "images",
    side: Annotated[int, Field(ge=8)] = 64,
    channels: Annotated[int, Field(ge=1, le=3)] = 1,
    clients: int = 3,
) -> Recipe:
    """A folder of your own images, of 28 to 128 pixels, with a subfolder for each class; cheap to evaluate."""
    if not SIDES[0] <= side <= SIDES[1]:
        raise RecipeError(
            f"images: side={side}; this recipe is for {SIDES[0]} to {SIDES[1]} pixels, such as 28, 32, 64 or 128"
        )
    halvings = 0
    while side % 2 ** (halvings + 1) == 0 and side // 2 ** (halvings + 1) >= LOWEST and halvings < len(WIDTHS) - 1:
        halvings += 1
    return Recipe(
        data=Folder(path=path, transforms=(Crop(), Resize(side=side), Channels(n=channels))),
        clients=clients,
        partition=Iid(),
        model=Unet(
            widths=WIDTHS[: halvings + 1],
            layers=1,
            attention=(side // 2**halvings,),
            middle_attention=False,
            groups=8,
            conditional=True,
        ),
        # velocity under a cosine schedule draws coarse tissue after four rounds, where noise still gives noise
        task=Denoise(target="v", schedule=Cosine(), drop=0.1),
        algorithm=FedAvg(local=Adam(lr=1e-3, batch=32, epochs=1, clip=1.0)),
        rounds=100,
        evaluate=Evaluate(every=25, grid=DRAWN, metrics=(Tones(n=DRAWN),)),
        sampler=DpmSolver(steps=20, guidance=1.0),
    )
