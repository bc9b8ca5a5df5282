"""The Inception-v3 that FID is defined on: the TensorFlow network of 2015-12-05, under pytorch-fid's parameter names.

It differs from the usual Inception-v3: its average pools ignore the padding, and the last block uses a maximum pool.
"""

import hashlib
from collections.abc import Callable
from pathlib import Path

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.fusion import fuse_conv_bn_eval

from effuse.core.errors import DataError, MissingError

SIDE = 299

Pool = Callable[[Tensor], Tensor]
Kernel = int | tuple[int, int]


def _average_pool(x: Tensor) -> Tensor:
    return F.avg_pool2d(x, 3, stride=1, padding=1, count_include_pad=False)


def _maximum_pool(x: Tensor) -> Tensor:
    return F.max_pool2d(x, 3, stride=1, padding=1)


def _halving_pool(x: Tensor) -> Tensor:
    return F.max_pool2d(x, 3, stride=2)


class Conv(nn.Module):
    """A convolution without bias, BatchNorm with TensorFlow's epsilon, ReLU; `load` folds BatchNorm into the convolution."""

    bn: nn.Module

    def __init__(self, inputs: int, outputs: int, kernel: Kernel, stride: int = 1, padding: Kernel = 0) -> None:
        super().__init__()
        self.conv = nn.Conv2d(inputs, outputs, kernel, stride=stride, padding=padding, bias=False)
        self.bn = nn.BatchNorm2d(outputs, eps=0.001)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.bn(self.conv(x)), inplace=True)


def _same(inputs: int, outputs: int, kernel: Kernel) -> Conv:
    """A convolution that preserves the size of the grid."""
    height, width = (kernel, kernel) if isinstance(kernel, int) else kernel
    return Conv(inputs, outputs, kernel, padding=(height // 2, width // 2))


class Mixed(nn.Module):
    """Parallel branches, concatenated along the channels; "a|b" at the end of a branch stands for two outputs."""

    def __init__(self, branches: list[list[str]], pool: Pool, **convs: Conv) -> None:
        super().__init__()
        for name, conv in convs.items():
            self.add_module(name, conv)
        self.branches = branches
        self.pool = pool

    def forward(self, x: Tensor) -> Tensor:
        out: list[Tensor] = []
        for *chain, last in self.branches:
            y = x
            for name in chain:
                y = self._step(name, y)
            out.extend(self._step(name, y) for name in last.split("|"))
        return torch.cat(out, dim=1)

    def _step(self, name: str, x: Tensor) -> Tensor:
        return self.pool(x) if name == "pool" else self.get_submodule(name)(x)


def _grid35(inputs: int, pooled: int) -> Mixed:
    return Mixed(
        [
            ["branch1x1"],
            ["branch5x5_1", "branch5x5_2"],
            ["branch3x3dbl_1", "branch3x3dbl_2", "branch3x3dbl_3"],
            ["pool", "branch_pool"],
        ],
        _average_pool,
        branch1x1=_same(inputs, 64, 1),
        branch5x5_1=_same(inputs, 48, 1),
        branch5x5_2=_same(48, 64, 5),
        branch3x3dbl_1=_same(inputs, 64, 1),
        branch3x3dbl_2=_same(64, 96, 3),
        branch3x3dbl_3=_same(96, 96, 3),
        branch_pool=_same(inputs, pooled, 1),
    )


def _to_grid17() -> Mixed:
    return Mixed(
        [["branch3x3"], ["branch3x3dbl_1", "branch3x3dbl_2", "branch3x3dbl_3"], ["pool"]],
        _halving_pool,
        branch3x3=Conv(288, 384, 3, stride=2),
        branch3x3dbl_1=_same(288, 64, 1),
        branch3x3dbl_2=_same(64, 96, 3),
        branch3x3dbl_3=Conv(96, 96, 3, stride=2),
    )


def _grid17(width: int) -> Mixed:
    across, down = (1, 7), (7, 1)
    return Mixed(
        [
            ["branch1x1"],
            ["branch7x7_1", "branch7x7_2", "branch7x7_3"],
            ["branch7x7dbl_1", "branch7x7dbl_2", "branch7x7dbl_3", "branch7x7dbl_4", "branch7x7dbl_5"],
            ["pool", "branch_pool"],
        ],
        _average_pool,
        branch1x1=_same(768, 192, 1),
        branch7x7_1=_same(768, width, 1),
        branch7x7_2=_same(width, width, across),
        branch7x7_3=_same(width, 192, down),
        branch7x7dbl_1=_same(768, width, 1),
        branch7x7dbl_2=_same(width, width, down),
        branch7x7dbl_3=_same(width, width, across),
        branch7x7dbl_4=_same(width, width, down),
        branch7x7dbl_5=_same(width, 192, across),
        branch_pool=_same(768, 192, 1),
    )


def _to_grid8() -> Mixed:
    return Mixed(
        [["branch3x3_1", "branch3x3_2"], ["branch7x7x3_1", "branch7x7x3_2", "branch7x7x3_3", "branch7x7x3_4"], ["pool"]],
        _halving_pool,
        branch3x3_1=_same(768, 192, 1),
        branch3x3_2=Conv(192, 320, 3, stride=2),
        branch7x7x3_1=_same(768, 192, 1),
        branch7x7x3_2=_same(192, 192, (1, 7)),
        branch7x7x3_3=_same(192, 192, (7, 1)),
        branch7x7x3_4=Conv(192, 192, 3, stride=2),
    )


def _grid8(inputs: int, pool: Pool) -> Mixed:
    return Mixed(
        [
            ["branch1x1"],
            ["branch3x3_1", "branch3x3_2a|branch3x3_2b"],
            ["branch3x3dbl_1", "branch3x3dbl_2", "branch3x3dbl_3a|branch3x3dbl_3b"],
            ["pool", "branch_pool"],
        ],
        pool,
        branch1x1=_same(inputs, 320, 1),
        branch3x3_1=_same(inputs, 384, 1),
        branch3x3_2a=_same(384, 384, (1, 3)),
        branch3x3_2b=_same(384, 384, (3, 1)),
        branch3x3dbl_1=_same(inputs, 448, 1),
        branch3x3dbl_2=_same(448, 384, 3),
        branch3x3dbl_3a=_same(384, 384, (1, 3)),
        branch3x3dbl_3b=_same(384, 384, (3, 1)),
        branch_pool=_same(inputs, 192, 1),
    )


class InceptionV3(nn.Module):
    """Images of 299 x 299 x 3 in [-1, 1] to 2048 features, averaged over the grid."""

    def __init__(self) -> None:
        super().__init__()
        self.Conv2d_1a_3x3 = Conv(3, 32, 3, stride=2)
        self.Conv2d_2a_3x3 = Conv(32, 32, 3)
        self.Conv2d_2b_3x3 = _same(32, 64, 3)
        self.Conv2d_3b_1x1 = Conv(64, 80, 1)
        self.Conv2d_4a_3x3 = Conv(80, 192, 3)
        self.Mixed_5b = _grid35(192, pooled=32)
        self.Mixed_5c = _grid35(256, pooled=64)
        self.Mixed_5d = _grid35(288, pooled=64)
        self.Mixed_6a = _to_grid17()
        self.Mixed_6b = _grid17(128)
        self.Mixed_6c = _grid17(160)
        self.Mixed_6d = _grid17(160)
        self.Mixed_6e = _grid17(192)
        self.Mixed_7a = _to_grid8()
        self.Mixed_7b = _grid8(1280, _average_pool)
        self.Mixed_7c = _grid8(2048, _maximum_pool)

    def forward(self, x: Tensor) -> Tensor:
        for layer in (
            self.Conv2d_1a_3x3,
            self.Conv2d_2a_3x3,
            self.Conv2d_2b_3x3,
            _halving_pool,
            self.Conv2d_3b_1x1,
            self.Conv2d_4a_3x3,
            _halving_pool,
            self.Mixed_5b,
            self.Mixed_5c,
            self.Mixed_5d,
            self.Mixed_6a,
            self.Mixed_6b,
            self.Mixed_6c,
            self.Mixed_6d,
            self.Mixed_6e,
            self.Mixed_7a,
            self.Mixed_7b,
            self.Mixed_7c,
        ):
            x = layer(x)
        return x.mean(dim=(2, 3))


def prepared(images: Tensor) -> Tensor:
    """Stored images (uint8, grey or RGB) as the network's input: RGB, 299 x 299, [-1, 1]."""
    channels = images.shape[1]
    if channels not in (1, 3):
        raise DataError(f"Inception reads grey or RGB images, these have {channels} channels; use encoder=classifier()")
    x = images.float().expand(-1, 3, -1, -1) / 255.0
    return F.interpolate(x, size=(SIDE, SIDE), mode="bilinear", align_corners=False) * 2.0 - 1.0


def weights_digest(path: Path) -> str:
    """SHA-256 of the weights file."""
    with require_weights(path).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def load(path: Path) -> InceptionV3:
    """The network with the weights of a safetensors file, ready to use."""
    with torch.device("meta"):
        net = InceptionV3()
    try:
        net.load_state_dict(safetensors.torch.load_file(require_weights(path)), strict=True, assign=True)
    except SafetensorError as error:
        raise DataError(f"{path} is not a readable safetensors file ({error}); copy it again") from None
    except RuntimeError as error:
        first = str(error).splitlines()[1].strip()
        raise DataError(f"{path} does not hold the FID Inception under pytorch-fid's names: {first}") from None
    for module in net.eval().requires_grad_(False).modules():
        if isinstance(module, Conv):  # saves one of three passes over memory
            assert isinstance(module.bn, nn.BatchNorm2d)
            module.conv, module.bn = fuse_conv_bn_eval(module.conv, module.bn), nn.Identity()
    return net


def require_weights(path: Path) -> Path:
    """The path, if there is a file; otherwise an error that says what belongs there."""
    if not path.is_file():
        raise MissingError(
            f"the Inception weights for FID are missing: there is no file {path}; put inception_fid.safetensors (with "
            "pytorch-fid's parameter names; docs/runs.md says how to make it) there, or point EFFUSE_DATA at its folder, "
            "or use encoder=classifier()"
        )
    return path
