"""Saved models: opened by effuse, opened by diffusers alone, and as the start of a run."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from effuse.core.build import build
from effuse.core.data import Shape
from effuse.core.errors import EffuseError, ModelError
from effuse.core.grammar import parse
from effuse.core.model import Arch, Model, fill
from effuse.core.rng import Stream
from effuse.core.sampler import Sampler
from effuse.core.spec import text
from effuse.core.wire import decode, encode
from effuse.diffusion.samplers import Ancestral, Ddim, DpmSolver
from effuse.models.convnext_unet import ConvnextUnet
from effuse.models.pretrained import FromPretrained
from effuse.models.resnet import Cnn
from effuse.models.saved import load_model
from effuse.models.unet import Unet
from effuse.tasks.denoise import Denoise
from effuse.tasks.schedules import Linear

SHAPE = Shape(8, 1, 3)
TINY = Unet(widths=(8, 16), layers=1, attention=(4,), groups=4).resolved(SHAPE)
LABELLED = Unet(widths=(8, 16), layers=1, attention=(4,), groups=4, conditional=True).resolved(SHAPE)
TASK = Denoise(schedule=Linear(steps=30))

# what a colleague without effuse would write
ALONE = """
import sys, numpy, torch
from diffusers import DDIMPipeline, DDPMPipeline, DDPMScheduler, UNet2DModel
torch.set_num_threads(1)
root = sys.argv[1]
ancestral = DDPMPipeline.from_pretrained(root + "/ancestral")
ancestral.set_progress_bar_config(disable=True)
a = ancestral(batch_size=3, generator=torch.Generator().manual_seed(7), num_inference_steps=30, output_type="np").images
ddim = DDIMPipeline.from_pretrained(root + "/ddim")
ddim.set_progress_bar_config(disable=True)
b = ddim(batch_size=3, generator=torch.Generator().manual_seed(7), num_inference_steps=10, eta=0.5, output_type="np").images
unet = UNet2DModel.from_pretrained(root + "/labelled", subfolder="unet")
scheduler = DDPMScheduler.from_pretrained(root + "/labelled", subfolder="scheduler")
generator, labels = torch.Generator().manual_seed(7), torch.tensor([0, 1, 2])
c = torch.randn(3, 1, 8, 8, generator=generator)
scheduler.set_timesteps(30)
with torch.no_grad():
    for t in scheduler.timesteps:
        c = scheduler.step(unet(c, t, labels).sample, t, c, generator=generator).prev_sample
c = (c / 2 + 0.5).clamp(0, 1).permute(0, 2, 3, 1).numpy()
assert not [m for m in sys.modules if m.split(".")[0] == "effuse"]
numpy.savez(root + "/alone.npz", a=a, b=b, c=c)
"""


def saved(arch: Arch, folder: Path, sampler: Sampler | None = Ancestral()) -> Model:
    model = arch.initial(Stream((1,)))
    net = arch.build()
    fill(net, model)
    arch.save(net, folder, None if sampler is None else sampler.scheduler(TASK))
    return model


def drawn(model: Model, sampler: Sampler, labels: torch.Tensor | None) -> np.ndarray:
    """Effuse's images for seed 7, in the range and layout of diffusers' pipelines."""
    net = model.arch.build().eval()
    fill(net, model)
    x = sampler.draw(net, TASK, torch.Size((3, 1, 8, 8)), labels, torch.Generator().manual_seed(7), lambda: None)
    return (x / 2 + 0.5).permute(0, 2, 3, 1).numpy()


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Thread counts change float sums, so both processes use one."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("one_thread")
def test_diffusers_alone_draws_the_same_images(tmp_path: Path) -> None:
    """In a process that never imports effuse: both pipelines, and a plain loop for the class-conditional model."""
    plain = saved(TINY, tmp_path / "ancestral")
    saved(TINY, tmp_path / "ddim", Ddim())
    labelled = saved(LABELLED, tmp_path / "labelled")
    for folder in ("ancestral", "ddim"):
        index = json.loads((tmp_path / folder / "model_index.json").read_text())
        assert index["unet"] == ["diffusers", "UNet2DModel"]
    assert json.loads((tmp_path / "labelled/unet/config.json").read_text())["_class_name"] == "UNet2DModel"
    done = subprocess.run([sys.executable, "-c", ALONE, str(tmp_path)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    alone = np.load(tmp_path / "alone.npz")
    np.testing.assert_allclose(drawn(plain, Ancestral(), None), alone["a"], atol=1e-5)
    np.testing.assert_allclose(drawn(plain, Ddim(steps=10, eta=0.5), None), alone["b"], atol=1e-5)
    np.testing.assert_allclose(drawn(labelled, Ancestral(), torch.tensor([0, 1, 2])), alone["c"], atol=1e-5)
    assert alone["a"].std() > 0.05 and alone["c"].std() > 0.05


@pytest.mark.parametrize(
    "arch",
    [TINY, LABELLED, ConvnextUnet(conditional=True).resolved(SHAPE), Cnn(widths=(8,), norm="batch").resolved(SHAPE)],
    ids=lambda arch: f"{arch.name}-{getattr(arch, 'conditional', '')}",
)
def test_round_trip(arch: Arch, tmp_path: Path) -> None:
    model = saved(arch, tmp_path / "model", None if isinstance(arch, Cnn) else DpmSolver())
    again, scheduler = load_model(tmp_path / "model")
    assert again.arch == arch
    assert again.params.digest() == model.params.digest() and again.buffers.digest() == model.buffers.digest()
    assert (scheduler is None) == isinstance(arch, Cnn)
    if scheduler is not None:
        assert scheduler["_class_name"] == "DPMSolverMultistepScheduler"
        assert scheduler["beta_end"] == pytest.approx(2 / 3) and scheduler["trained_betas"] is None  # 0.02 x 1000 / 30
    assert not [f for f in (tmp_path / "model").rglob("*") if f.suffix in (".bin", ".pt", ".pkl")]


def test_warm_start_travels_as_the_concrete_network(tmp_path: Path) -> None:
    """The recipe keeps the path and the digest; the model, and so every message, has neither."""
    model = saved(LABELLED, tmp_path / "model")
    start = build(parse(f"from_pretrained(folder={str(tmp_path / 'model')!r})"), Arch, "model").resolved(SHAPE)
    assert isinstance(start, FromPretrained) and start.sha256 == model.params.digest()
    assert start.parts == LABELLED.parts and start.conditional
    first = start.initial(Stream((9,)))
    assert first.arch == LABELLED and first.params.digest() == model.params.digest()
    assert str(tmp_path).encode() not in encode(first, Model)
    assert decode(encode(first, Model), Model).arch == LABELLED
    assert build(parse(text(start)), Arch, "model") == start


def test_warm_start_of_shapes_only(tmp_path: Path) -> None:
    saved(LABELLED, tmp_path / "model")
    start = FromPretrained(folder=str(tmp_path / "model")).resolved(SHAPE)
    with torch.device("meta"):
        assert start.initial(Stream((9,))).params.hollow
        assert all(p.is_meta for p in start.build().parameters())


def test_warm_start_from_a_plain_diffusers_model(tmp_path: Path) -> None:
    """A model trained with diffusers' own defaults, without effuse."""
    from diffusers import UNet2DModel

    torch.manual_seed(0)
    theirs = UNet2DModel(
        sample_size=8,
        in_channels=1,
        out_channels=1,
        layers_per_block=1,
        block_out_channels=(8, 16),
        norm_num_groups=4,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    ).eval()
    theirs.save_pretrained(tmp_path)
    start = FromPretrained(folder=str(tmp_path)).resolved(SHAPE)
    model = start.initial(Stream((0,)))
    assert isinstance(model.arch, Unet) and model.arch.shape == SHAPE and model.arch.attention == (4,)
    x, t = torch.randn(2, 1, 8, 8), torch.tensor([3, 40])
    with torch.no_grad():
        assert torch.equal(start.build().eval()(x, t), theirs(x, t).sample)


def test_unsuitable_folders_are_refused(tmp_path: Path) -> None:
    from diffusers import UNet2DModel

    with pytest.raises(ModelError, match="no model folder at"):
        FromPretrained(folder=str(tmp_path / "none")).resolved(SHAPE)
    model = saved(TINY, tmp_path / "model")
    with pytest.raises(ModelError, match="made for 8x8x1 images of 3 classes, the data has 16x16x1 images"):
        FromPretrained(folder=str(tmp_path / "model")).resolved(Shape(16, 1, 3))
    with pytest.raises(ModelError, match="are not those of the recipe"):
        FromPretrained(folder=str(tmp_path / "model"), sha256=model.params.zeros().digest()).resolved(SHAPE)
    blocks = {"down_block_types": ("SkipDownBlock2D",), "up_block_types": ("SkipUpBlock2D",)}
    odd = UNet2DModel(sample_size=8, in_channels=1, out_channels=1, block_out_channels=(32,), **blocks)
    odd.save_pretrained(tmp_path / "odd")
    with pytest.raises(ModelError, match="down_block_types is"):
        FromPretrained(folder=str(tmp_path / "odd")).resolved(SHAPE)


def test_damaged_weights_are_refused(tmp_path: Path) -> None:
    saved(TINY, tmp_path / "model")
    weights = tmp_path / "model/unet/diffusion_pytorch_model.safetensors"
    values = load_file(weights)
    save_file({k: v for k, v in values.items() if k != "conv_in.bias"}, weights, {"format": "pt"})
    with pytest.raises(ModelError, match="missing keys conv_in.bias"):
        load_model(tmp_path / "model")
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(ModelError, match="cannot be read"):
        load_model(tmp_path / "model")
    weights.rename(weights.with_suffix(".bin"))
    with pytest.raises(ModelError, match="as safetensors"):
        load_model(tmp_path / "model")


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("classes=3", "classes=-1", "greater than or equal to 0"),
        ("channels=1", "channels=99999", "less than or equal to 4096"),
        ("widths=[4]", "widths=[2000000]", "of shape .* does not fit cnn"),
    ],
)
def test_a_configuration_that_does_not_fit_its_weights_takes_no_memory(tmp_path, old, new, words):
    """Two million channels would be 144 TB of weights; the shapes are compared before anything is allocated."""
    arch = Cnn(widths=(4,), groups=2).resolved(SHAPE)
    arch.save(arch.build(), tmp_path, None)
    config = tmp_path / "config.json"
    assert old in config.read_text()
    config.write_text(config.read_text().replace(old, new))
    with pytest.raises(EffuseError, match=words):
        load_model(tmp_path)
