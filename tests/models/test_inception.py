"""The FID Inception, with random weights: names, shapes, its special pools, and loading."""

from pathlib import Path

import pytest
import safetensors.torch
import torch

from effuse.core.errors import DataError
from effuse.models.inception import InceptionV3, load, prepared


@pytest.fixture(scope="module")
def net() -> InceptionV3:
    """With random statistics and scales, unlike those of a new network."""
    net, generator = InceptionV3().eval(), torch.Generator().manual_seed(1)
    for module in net.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            for values, low in (
                (module.weight.data, 0.5),
                (module.running_var, 0.5),
                (module.bias.data, -0.5),
                (module.running_mean, -0.5),
            ):
                values.copy_(torch.rand(values.shape, generator=generator) + low)
    return net


@pytest.fixture(scope="module")
def weights(net: InceptionV3) -> dict[str, torch.Tensor]:
    return {k: v.contiguous() for k, v in net.state_dict().items() if not k.endswith("num_batches_tracked")}


def test_names_and_counts(weights: dict[str, torch.Tensor]) -> None:
    """The published file has 21,802,784 values without BatchNorm's weights, which are all one."""
    assert sum(v.numel() for k, v in weights.items() if not k.endswith("bn.weight")) == 21_802_784
    assert weights["Conv2d_1a_3x3.conv.weight"].shape == (32, 3, 3, 3)
    assert weights["Mixed_5b.branch1x1.bn.running_mean"].shape == (64,)
    assert weights["Mixed_6b.branch7x7dbl_5.conv.weight"].shape == (192, 128, 1, 7)
    assert weights["Mixed_7c.branch3x3dbl_3b.conv.weight"].shape == (384, 384, 3, 1)


def test_features(net: InceptionV3) -> None:
    with torch.inference_mode():
        assert net(torch.zeros(1, 3, 75, 75)).shape == (1, 2048)


def test_pools_of_the_fid_variant(net: InceptionV3) -> None:
    """An average without its padding leaves a constant unchanged at the border; the last block takes the maximum."""
    ones = torch.ones(1, 1, 3, 3)
    for name in ("Mixed_5b", "Mixed_6e", "Mixed_7b"):
        assert torch.equal(net.get_submodule(name).pool(ones), ones)  # type: ignore[operator]
    spike = torch.zeros(1, 1, 3, 3)
    spike[0, 0, 1, 1] = 1.0
    assert torch.equal(net.Mixed_7c.pool(spike), ones)
    assert net.Conv2d_1a_3x3.bn.eps == 0.001


def test_preparation() -> None:
    grey = torch.tensor([0, 255], dtype=torch.uint8).reshape(1, 1, 1, 2)
    x = prepared(grey)
    assert x.shape == (1, 3, 299, 299)
    assert torch.equal(x[:, 0], x[:, 2])
    # bilinear weights add up to 1 but for the last bit, and which bit depends on how the loop is split among threads
    assert (float(x.min()), float(x.max())) == pytest.approx((-1.0, 1.0), abs=1e-6)
    with pytest.raises(DataError, match="4 channels"):
        prepared(torch.zeros(1, 4, 2, 2, dtype=torch.uint8))


def test_loading(weights: dict[str, torch.Tensor], net: InceptionV3, tmp_path: Path) -> None:
    path = tmp_path / "inception_fid.safetensors"
    safetensors.torch.save_file(weights, path)
    x = torch.rand(1, 3, 75, 75, generator=torch.Generator().manual_seed(0))
    loaded = load(path)
    assert not any(isinstance(m, torch.nn.BatchNorm2d) for m in loaded.modules())
    assert not any(p.requires_grad for p in loaded.parameters())
    with torch.inference_mode():
        torch.testing.assert_close(loaded(x), net(x), rtol=1e-4, atol=1e-6)


def test_files_that_do_not_fit(weights: dict[str, torch.Tensor], tmp_path: Path) -> None:
    path = tmp_path / "inception_fid.safetensors"
    with pytest.raises(DataError, match="there is no file .*inception_fid.safetensors; put"):
        load(path)
    safetensors.torch.save_file({k: v for k, v in weights.items() if "Mixed_7c" not in k}, path)
    with pytest.raises(DataError, match="pytorch-fid's names: Missing key.*Mixed_7c"):
        load(path)
    path.write_bytes(b"not a tensor file")
    with pytest.raises(DataError, match="not a readable safetensors file"):
        load(path)
