"""Images that a denoiser of another run draws at the server, and shares of them that clients keep (FedDDA)."""

import dataclasses
from abc import abstractmethod

import torch
from pydantic import PositiveInt

from effuse.algorithms.fedavg import FedAvg
from effuse.algorithms.shared.shares import SHARE, Share
from effuse.algorithms.shared.synthesis import NOBODY, AuxiliarySet, synthesised, together
from effuse.core.capabilities import Draws
from effuse.core.metric import Images
from effuse.core.model import Arch
from effuse.core.prelude import FEDERATE, Client, Federation, Model, RecipeError, Server, message, spec
from effuse.core.recipe import Recipe
from effuse.core.sampler import Sampler
from effuse.core.task import Task
from effuse.diffusion.samplers import Ancestral
from effuse.tasks.denoise import Denoise

DRAWING = "drawing"


@message(name="feddda.server")
class Drawn(Server):
    """The classifier, and the images that the denoiser has drawn so far."""

    auxiliary: AuxiliarySet | None = None


@spec
class Drawing(FedAvg, Draws):
    """The server draws images before the federated rounds. Each client is sent some of them, once."""

    task: Task = Denoise()  # what the denoiser was trained for
    sampler: Sampler = Ancestral(batch=500)
    n: PositiveInt = 100_000  # images that the server draws
    share: PositiveInt = 10_000  # of these, at random for each client
    group: PositiveInt = 10_000  # images in a round of drawing: the most that a killed run repeats

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.share > self.n:
            raise RecipeError(f"algorithm.share: {self.share} images for each client, but n={self.n} are drawn; lower it")

    @property
    @abstractmethod
    def denoiser(self) -> tuple[str, Arch | None]:
        """The key that names the class-conditional denoiser, and the denoiser; without one nothing is drawn."""

    def check_denoiser(self, model: Model) -> None:
        """Refuse a denoiser that cannot draw images of the run's classes."""
        key, denoiser = self.denoiser
        if denoiser is None:
            return
        if not denoiser.conditional:
            raise RecipeError(f"algorithm.{key}: {denoiser.name} draws images without labels; use one with conditional=True")
        if denoiser.shape != model.arch.shape:
            drawn, wanted = tuple(denoiser.shape), tuple(model.arch.shape)
            raise RecipeError(
                f"algorithm.{key}: side, channels and classes of the {key} are {drawn}, those of the data {wanted}; "
                f"train a {key} on the same data"
            )

    def drawn_from(self, recipe: Recipe) -> list[tuple[Arch, Task]]:
        _, denoiser = self.denoiser
        return [] if denoiser is None else [(denoiser, self.task)]

    def images(self, server: Drawn) -> Images | None:
        return None if server.auxiliary is None else server.auxiliary.images(labelled=True)

    def draw_more(self, server: Drawn, fed: Federation) -> Drawn:
        """Draw the next group of images, as many of every class."""
        _, denoiser = self.denoiser
        assert denoiser is not None
        before = [] if server.auxiliary is None else [server.auxiliary]
        done = sum(len(a) for a in before)
        now = min(self.group, self.n - done)
        model = fed.workbench.machine.initial(denoiser, fed.workbench.lasting("guide"))
        evenly = [1] * denoiser.shape.classes
        drawn = synthesised(fed.workbench, NOBODY, model, now, self.sampler, evenly, self.task)
        fed.note(drawn=done + now)
        phase = FEDERATE if done + now == self.n else DRAWING
        return dataclasses.replace(server, auxiliary=together([*before, drawn]), phase=phase)

    def late(self, S: list[int], server: Drawn, fed: Federation) -> dict[int, dict[str, Share]]:
        """The shares of clients that have none yet."""
        return {k: {SHARE: self.dealt(k, server, fed)} for k in S if k not in fed.has(SHARE)}

    def dealt(self, client: int, server: Drawn, fed: Federation) -> Share:
        """A client's images, the same whenever it needs them."""
        assert server.auxiliary is not None
        source = fed.workbench.lasting("shares").child(client)
        chosen = torch.from_numpy(source.numpy().permutation(self.n)[: self.share])
        some = server.auxiliary.rows(chosen)
        return Share(some.pixels, some.labels)

    def kept_share(self, client: Client, share: Share | None) -> Share:
        """What a client was sent, now or in an earlier round."""
        if share is not None:
            client.state[SHARE] = share
        kept: Share = client.state[SHARE]
        return kept
