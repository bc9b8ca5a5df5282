"""The networks that benchmarks are about."""

from effuse.core.data import Shape
from effuse.core.model import Arch
from effuse.models.convnext_unet import ConvnextUnet
from effuse.models.unet import CifarUnet

ARCHS: dict[str, Arch] = {
    "3M": ConvnextUnet().resolved(Shape(28, 1, 10)),
    "36M": CifarUnet().resolved(Shape(32, 3, 10)),
}
