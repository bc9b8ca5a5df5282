"""The denoising objective: Ho et al., 2020, Eq. 14, with v and x0 targets (Salimans and Ho, 2022) and Min-SNR weights."""

from typing import Annotated, Literal

import torch
import torch.nn.functional as F
from pydantic import Field, PositiveFloat
from torch import Tensor

from effuse.core.spec import spec
from effuse.core.task import Batch, Prediction
from effuse.tasks.schedules import Linear, NoiseSchedule, signal_and_noise

NULL = -1  # the null label; a conditional network maps it to its last embedding
# diffusers' names for what a network predicts
PREDICTION_TYPES = {"epsilon": "epsilon", "v": "v_prediction", "x0": "sample"}


@spec
class Denoise(Prediction):
    """Predict the noise in an image, or equivalently its velocity or the clean image."""

    target: Literal["epsilon", "v", "x0"] = "epsilon"
    distance: Literal["mse", "huber"] = "mse"
    schedule: NoiseSchedule = Linear()
    min_snr: PositiveFloat | None = None  # gamma of Hang et al., 2023; None weighs all time steps equally
    drop: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.0  # share of labels replaced by the null label, for guidance

    def draw(self, n: int, image: torch.Size, labels: Tensor, generator: torch.Generator) -> dict[str, Tensor]:
        """Time steps, noise and dropped labels, drawn in this order, and the amplitudes of signal and noise."""
        device = generator.device
        t = torch.randint(self.schedule.steps, (n,), generator=generator, device=device)
        noise = torch.randn((n, *image), generator=generator, device=device)
        dropped = torch.rand(n, generator=generator, device=device) < self.drop
        # looked up here so that a captured step needs no table
        a, s = signal_and_noise(self.schedule, device)[t].view(n, 2, *[1] * len(image)).unbind(1)
        return {"t": t, "noise": noise, "dropped": dropped, "a": a, "s": s}

    def inputs(self, batch: Batch) -> tuple[Tensor, ...]:
        """The noisy images, their time steps and labels."""
        return self.noisy(batch), batch.drawn["t"], self.labels(batch)

    def noisy(self, batch: Batch) -> Tensor:
        """x_t = sqrt(alpha_bar_t) x_0 + sqrt(1 - alpha_bar_t) epsilon."""
        return batch.drawn["a"] * batch.x + batch.drawn["s"] * batch.drawn["noise"]

    def labels(self, batch: Batch) -> Tensor:
        """The labels with the dropped ones replaced by the null label."""
        return torch.where(batch.drawn["dropped"], NULL, batch.labels)

    def wanted(self, batch: Batch) -> Tensor:
        """The target of the network's output."""
        match self.target:
            case "epsilon":
                return batch.drawn["noise"]
            case "v":
                return batch.drawn["a"] * batch.drawn["noise"] - batch.drawn["s"] * batch.x
            case "x0":
                return batch.x

    def error(self, output: Tensor, batch: Batch) -> Tensor:
        """The loss of each image: the mean over its pixels."""
        measure = F.mse_loss if self.distance == "mse" else F.smooth_l1_loss
        error = measure(output.float(), self.wanted(batch), reduction="none").flatten(1).mean(1)
        return error if self.min_snr is None else error * self.weight(batch, self.min_snr)

    def weight(self, batch: Batch, gamma: float) -> Tensor:
        """The Min-SNR weight: min(SNR, gamma) for the error of x0, and its equivalent for those of epsilon and v."""
        snr = (batch.drawn["a"] / batch.drawn["s"]).square().flatten()
        per_target: dict[str, Tensor | int] = {"epsilon": snr, "v": snr + 1, "x0": 1}
        return snr.clamp(max=gamma) / per_target[self.target]
