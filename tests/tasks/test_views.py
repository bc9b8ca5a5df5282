"""Two views of an image: crops, mirrors and colours by hand, and SimCLR's loss between them."""

import math

import pytest
import torch

from effuse.core.model import Net
from effuse.core.task import Batch
from effuse.models.resnet import Cnn
from effuse.tasks.views import NUMBERS, Views, bilinear, told_apart, turned

# numbers at which nothing changes: all of the image, not mirrored, no other colours
STILL = torch.tensor([1.0, 0.5, 0.0, 0.0, 0.9, 0.9, 0.9, 0.5, 0.5, 0.5, 0.5])
GREY = torch.tensor([[-1.0, -0.5, 0.0], [0.25, 0.5, 0.75], [1.0, -0.25, 0.1]])[None, None]


def changed(task: Views, x: torch.Tensor, **numbers: float) -> torch.Tensor:
    """The view of one image with some of the numbers changed, named u0 to u10."""
    u = STILL.clone()
    for name, value in numbers.items():
        u[int(name[1:])] = value
    return task.view(x, u[None])


def test_numbers_at_which_nothing_changes():
    colour = torch.rand(1, 3, 4, 4, generator=torch.Generator().manual_seed(0)) * 2 - 1
    for x in (GREY, colour):
        torch.testing.assert_close(changed(Views(), x), x, atol=1e-6, rtol=0)
        torch.testing.assert_close(changed(Views(), x, u4=0.1), x.flip(3), atol=1e-6, rtol=0)
        torch.testing.assert_close(changed(Views(flip=False), x, u4=0.1), x, atol=1e-6, rtol=0)


def test_a_crop_by_hand():
    """A quarter of a 4 x 4 image is 2 x 2. From the left, two pixels become four at 0.25 * 4 * (i + 1/2) / 2 - 1/2.

    That is -0.25, 0.25, 0.75, 1.25: the first and the last are between two pixels; outside, the border is repeated.
    """
    weights = bilinear(torch.tensor([0.0]), torch.tensor([0.5]), 4)[0]
    wanted = [[1.0, 0.0, 0.0, 0.0], [0.75, 0.25, 0.0, 0.0], [0.25, 0.75, 0.0, 0.0], [0.0, 0.75, 0.25, 0.0]]
    torch.testing.assert_close(weights, torch.tensor(wanted))
    x = torch.linspace(-1, 1, 16).view(1, 1, 4, 4)
    half = changed(Views(area=0.25), x, u0=0.0)  # at the top left; the sides are square at u1 = 1/2
    torch.testing.assert_close(half[0, 0], torch.tensor(wanted) @ x[0, 0] @ torch.tensor(wanted).T, atol=1e-6, rtol=0)
    other = changed(Views(area=0.25), x, u0=0.0, u2=1.0, u3=1.0)  # at the bottom right
    torch.testing.assert_close(other, -half.flip(2, 3), atol=1e-6, rtol=0)


def test_crops_are_stretched_by_at_most_a_third():
    """A quarter of the area at u1 = 0 and 1: height 0.5 * sqrt(4/3) = 0.577 and width 0.433, and the other way round."""
    x = torch.linspace(-1, 1, 64).view(1, 1, 8, 8)  # rises by 16/63 a row and by 2/63 a column
    for u1, height, width in ((0.0, 0.57735, 0.43301), (1.0, 0.43301, 0.57735)):
        view = changed(Views(area=0.25), x, u0=0.0, u1=u1, u2=0.5, u3=0.5)[0, 0]
        rise = ((view[4, 4] - view[3, 4]) * 63 / 16, (view[4, 4] - view[4, 3]) * 63 / 2)
        assert [float(r) for r in rise] == pytest.approx([height, width], rel=1e-4)


def test_brightness_and_contrast_by_hand():
    """At strength 0.5 both change by up to 40 %. In [0, 1] the values 0.2 and 0.4 become 0.28 and 0.56.

    Their mean is 0.3, so contrast 1.4 makes 0.3 -+ 0.14 of them.
    """
    x = torch.tensor([0.2, 0.4]).repeat(2).view(1, 1, 2, 2) * 2 - 1
    brighter = changed(Views(), x, u5=0.0, u7=1.0)
    torch.testing.assert_close((brighter[0, 0, 0] + 1) / 2, torch.tensor([0.28, 0.56]))
    sharper = changed(Views(), x, u5=0.0, u8=1.0)
    torch.testing.assert_close((sharper[0, 0, 0] + 1) / 2, torch.tensor([0.16, 0.44]))
    torch.testing.assert_close(changed(Views(), x, u5=0.85, u7=1.0), x), "a fifth of the views keeps its colours"


def test_saturation_and_grey_by_hand():
    """Red 0.5 alone has brightness 0.299 * 0.5 = 0.1495. Saturation 0.6 leaves 0.1495 + 0.6 (0.5 - 0.1495) = 0.3598 of it.

    Green and blue become 0.4 * 0.1495 = 0.0598. A grey view has 0.1495 everywhere.
    """
    x = torch.tensor([0.5, 0.0, 0.0]).view(1, 3, 1, 1).expand(1, 3, 2, 2) * 2 - 1
    pale = changed(Views(), x, u5=0.0, u9=0.0)
    torch.testing.assert_close((pale[0, :, 0, 0] + 1) / 2, torch.tensor([0.3598, 0.0598, 0.0598]))
    grey = changed(Views(), x, u6=0.1)
    torch.testing.assert_close((grey[0, :, 1, 1] + 1) / 2, torch.full((3,), 0.1495))
    torch.testing.assert_close(changed(Views(grey=0.05), x, u6=0.1), x)


def test_hue_by_hand():
    """A third of a turn makes red green, two thirds make it blue; greys stay. At most a tenth is turned at strength 0.5."""
    red, turns = torch.tensor([1.0, 0.0, 0.0]).view(1, 3, 1, 1), torch.tensor
    torch.testing.assert_close(turned(red, turns([1 / 3])).flatten(), torch.tensor([0.0, 1.0, 0.0]), atol=1e-6, rtol=0)
    torch.testing.assert_close(turned(red, turns([-1 / 3])).flatten(), torch.tensor([0.0, 0.0, 1.0]), atol=1e-6, rtol=0)
    grey = torch.full((1, 3, 1, 1), 0.3)
    torch.testing.assert_close(turned(grey, turns([0.2])), grey)
    colour = torch.tensor([0.5, 0.3, 0.4]).view(1, 3, 1, 1)
    view = changed(Views(), colour * 2 - 1, u5=0.0, u10=1.0)
    torch.testing.assert_close((view + 1) / 2, turned(colour, turns([0.1])))


def test_what_is_drawn():
    """Both views have numbers of their own; over many images they have the shares that the task names."""
    task, x = Views(), torch.zeros(4000, 1, 2, 2)
    u = task.draw(4000, x.shape[1:], torch.zeros(4000), torch.Generator().manual_seed(0))["views"]
    assert u.shape == (4000, 2, NUMBERS) and not torch.equal(u[:, 0], u[:, 1])
    assert abs((u[:, :, 4] < 0.5).float().mean() - 0.5) < 0.02 and abs((u[:, :, 5] < 0.8).float().mean() - 0.8) < 0.02
    image = torch.rand(4, 1, 4, 4, generator=torch.Generator().manual_seed(1))
    batch = Batch(image, torch.zeros(4), task, {"views": u[:4]})
    seen = task.seen(batch)
    torch.testing.assert_close(seen[:4], task.view(image, u[:4, 0]))
    torch.testing.assert_close(seen[4:], task.view(image, u[:4, 1]))
    assert seen.min() >= -1 and seen.max() <= 1


# two images: views (1, 0), (0, 1), and (1, 0) again, (1, 0)
Z = torch.tensor([[2.0, 0.0], [0.0, 3.0], [1.0, 0.0], [5.0, 0.0]])


def test_simclr_by_hand():
    """T = 0.5. The first views (1, 0) and (0, 1) have the second views (1, 0) and (1, 0).

    Image 0: the first view has its other view at cosine 1, the rest at 0 and 1: -ln(e^2 / (e^2 + e^2 + 1)) = 0.758624.
    Its second view has the same. Image 1: the first view has all others at cosine 0: ln 3 = 1.098612.
    The second has its other view at 0, the rest at 1 and 1: ln(1 + 2 e^2) = 2.758624.
    """
    assert math.log(2 + math.exp(-2)) == pytest.approx(0.758624, abs=1e-6)
    assert math.log(1 + 2 * math.exp(2)) == pytest.approx(2.758624, abs=1e-6)
    assert told_apart(Z, None, 0.5).tolist() == pytest.approx([0.758624, (1.098612 + 2.758624) / 2], abs=1e-6)


def test_the_tasks_loss_is_simclrs_at_its_temperature():
    task, x = Views(T=0.2), torch.rand(3, 1, 4, 4, generator=torch.Generator().manual_seed(0))
    batch = Batch(x, torch.zeros(3), task, task.draw(3, x.shape[1:], torch.zeros(3), torch.Generator().manual_seed(1)))
    net = Net(Cnn(side=4, channels=1, classes=5, widths=(4,), groups=2).build())
    wanted = told_apart(net(task.seen(batch)), None, 0.2).mean()
    assert torch.equal(task.loss(net, batch), wanted) and wanted > 0.1


def test_a_padded_batch_equals_the_unpadded_one():
    """Two images, and copies of the first as padding: as negatives they would be the nearest of all."""
    z = torch.randn(4, 3, generator=torch.Generator().manual_seed(0), requires_grad=True)
    first, second = z.chunk(2)
    padded = torch.cat([first, first[:1], first[:1], second, second[:1], second[:1]])
    weight = torch.tensor([1.0, 1.0, 0.0, 0.0])
    batch = Batch(torch.zeros(4), torch.zeros(4), Views(), weight=weight)
    found, plain = batch.mean(told_apart(padded, weight, 0.04)), told_apart(z, None, 0.04).mean()
    torch.testing.assert_close(found, plain)
    torch.testing.assert_close(*(torch.autograd.grad(loss, z, retain_graph=True)[0] for loss in (found, plain)))
    assert abs(told_apart(padded, None, 0.04)[:2].mean() - plain) > 0.1, "copies that count would change it"


def test_an_image_alone_has_nothing_to_be_told_from():
    assert told_apart(torch.tensor([[1.0, 0.0], [0.0, 1.0]]), None, 0.5).tolist() == [0.0]


def test_similarities_are_in_fp32_under_autocast():
    exact = told_apart(Z + 0.3, None, 0.04)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(told_apart(Z + 0.3, None, 0.04), exact)
        assert (Z @ Z.T).dtype == torch.bfloat16, "otherwise this shows nothing"
