"""What FedDifRC's classifiers and guides are trained on: data sets, and how their images are divided among clients."""

from typing import Literal

from effuse.core.data import Partition, Source
from effuse.core.errors import RecipeError
from effuse.data.dirichlet import LabelSkew
from effuse.data.folders import Folder
from effuse.data.idx import MNIST
from effuse.data.npz import CIFAR10, CIFAR100
from effuse.data.partition import NID2, Domains, Iid, LongTail
from effuse.data.sources import Union, Validation
from effuse.data.transforms import Channels, Flip, Resize, Shift, Transform

Data = Literal["cifar10", "cifar100", "tiny", "digits5", "office", "ham10000", "eurosat"]
Scenario = Literal[
    "iid", "nid1-0.05", "nid1-0.2", "nid1-0.5", "nid2", "tail-10", "tail-50", "tail-100", "tail-200", "domains"
]

AUGMENTED: tuple[Transform, ...] = (Shift(pad=4), Flip())
DOMAINS: dict[Data, tuple[int, ...]] = {"digits5": (1, 4, 3, 2), "office": (3, 2, 2, 3)}  # clients of each, as the paper has
FRACTIONS: dict[Data, float] = {"digits5": 0.1, "office": 0.2}
# the smallest class has so few images for each other client and class that equal sizes of NID2 leave 2,800 images or fewer
RARE: tuple[Data, ...] = ("cifar100", "tiny", "ham10000")


def judged(source: Source, validation: bool) -> Source:
    """The same, or with a fifth of its training images in the place of the test set."""
    return Validation(source=source, share=0.2) if validation else source


def plain(data: Data, root: str = "", transforms: tuple[Transform, ...] = ()) -> Source:
    """A data set, scaled to 32 pixels; Tiny-ImageNet, HAM10000 and EuroSAT to 64."""

    def folder(name: str, side: int, more: tuple[Transform, ...] = ()) -> Folder:
        path = f"{root}/{name}" if root else name
        return Folder(path=path, transforms=(Resize(side=side), Channels(n=3), *more))

    if data == "cifar10":
        return CIFAR10(transforms=transforms)
    if data == "cifar100":
        return CIFAR100(transforms=transforms)
    if data == "digits5":
        first = MNIST(transforms=(Resize(side=32), Channels(n=3)))
        return Union(sources=(first, *(folder(name, 32) for name in ("usps", "svhn", "syn"))), transforms=transforms)
    if data == "office":
        names = ("caltech", "webcam", "amazon", "dslr")
        return Union(sources=tuple(folder(f"office/{name}", 32) for name in names), transforms=transforms)
    return folder(data if data != "tiny" else "tiny-imagenet", 64, transforms)


def partition_of(data: Data, scenario: Scenario, smoke: bool) -> tuple[int, Partition]:
    """The number of clients, and the rule that divides the images among them."""
    kind, _, value = scenario.partition("-")
    if kind == "nid2":
        return 7, NID2(sizes="shared" if data in RARE and not smoke else "equal")
    if kind == "iid" or (smoke and kind == "domains"):
        return 10, Iid()
    if kind == "domains":
        if data not in DOMAINS:
            raise RecipeError(f"feddifrc: {data} has no domains; choose digits5 or office")
        return sum(DOMAINS[data]), Domains(per_domain=DOMAINS[data], fraction=FRACTIONS[data])
    skew = LabelSkew(beta=float(value) if kind == "nid1" else 0.2, mask=True, minimum=2 if smoke else 10, top_up=smoke)
    return 10, skew if kind == "nid1" else LongTail(rho=float(value), then=skew)
