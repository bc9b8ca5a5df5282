"""Image folders made by hand: classes from subfolders or tables, splits, groups, and files that are damaged."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from effuse.core.build import build_text
from effuse.core.data import Source
from effuse.core.errors import DataError
from effuse.core.spec import text
from effuse.data.folders import CelebA, Folder
from effuse.data.images import read_image
from effuse.data.tables import read_table
from effuse.data.transforms import Channels, Crop, Flip, Resize, Shift

HAIR = "Black_Hair Brown_Hair Blond_Hair Gray_Hair"


def picture(path: Path, value: int = 0, size: tuple[int, int] = (4, 4), mode: str = "L") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new(mode, size, value if mode == "L" else (value,) * len(mode)).save(path)


@pytest.fixture
def pets(tmp_path: Path) -> Path:
    """Five cats, valued 0 to 4, and ten dogs, valued 100 to 109."""
    for i in range(5):
        picture(tmp_path / "pets" / "cat" / f"{i}.png", i)
    for i in range(10):
        picture(tmp_path / "pets" / "dog" / f"{i}.png", 100 + i)
    return tmp_path / "pets"


def values(source: Folder, split: str) -> list[int]:
    return source.load(split).images[:, 0, 0, 0].tolist()


def test_subfolders_are_classes_and_each_fifth_image_is_for_testing(pets: Path):
    train, test = Folder(path=str(pets)).load("train"), Folder(path=str(pets)).load("test")
    assert train.classes == ("cat", "dog") and train.histogram() == [4, 8] and test.histogram() == [1, 2]
    assert values(Folder(path=str(pets)), "test") == [4, 104, 109]
    assert values(Folder(path=str(pets), holdout=0.5), "test") == [1, 3, 101, 103, 105, 107, 109]


def test_train_and_test_folders_are_kept(pets: Path, tmp_path: Path):
    root = tmp_path / "split"
    root.mkdir()
    pets.rename(root / "train")
    assert len(Folder(path=str(root)).load("test")) == 3  # without a test folder images are held out
    picture(root / "test" / "dog" / "a.png", 7)
    assert values(Folder(path=str(root)), "test") == [7] and len(Folder(path=str(root)).load("train")) == 15
    picture(root / "test" / "bird" / "a.png")
    with pytest.raises(DataError, match="test/bird: a class that .*train does not have"):
        Folder(path=str(root)).load("test")


def test_a_path_is_absolute_or_local_or_under_the_data_root(pets: Path, tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert len(Folder(path="pets").load("train")) == 12
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    monkeypatch.setenv("EFFUSE_DATA", str(tmp_path))
    assert len(Folder(path="pets").load("train")) == 12
    with pytest.raises(DataError, match=r"pots: not found in .*/elsewhere nor in .* \(EFFUSE_DATA\); did you mean pets\?"):
        Folder(path="pots").load("train")
    monkeypatch.delenv("EFFUSE_DATA")
    with pytest.raises(DataError, match="pots: not found in .*/elsewhere; check the path, or set EFFUSE_DATA to the folder"):
        Folder(path="pots").load("train")


def test_groups_stay_whole_in_the_hold_out(pets: Path):
    """Five owners, each of one cat and two dogs; the fifth owner, e, is held out with all of them."""
    lines = [f"cat/{i}.png,{owner}" for i, owner in enumerate("abcde")]
    lines += [f"dog/{i}.png,{owner}" for i, owner in enumerate("aabbccddee")]
    (pets / "owners.csv").write_text("file,owner\n" + "\n".join(lines))
    source = Folder(path=str(pets), groups="owners.csv")
    assert values(source, "test") == [4, 108, 109] and source.load("test").groups.tolist() == [4, 4, 4]
    assert source.load("train").groups.tolist() == [0, 1, 2, 3, 0, 0, 1, 1, 2, 2, 3, 3]
    (pets / "owners.csv").write_text("file,owner\n" + "\n".join(lines[1:]))
    with pytest.raises(DataError, match="no line for cat/0.png; give every image a group"):
        source.load("train")


def test_a_csv_names_classes_splits_and_groups(tmp_path: Path):
    for i in range(4):
        picture(tmp_path / f"{i}.png", i)
    rows = "0.png,nevus,p2,train\n1.png,melanoma,p1,test\n2.png,melanoma,p2,train\n3.png,nevus,p1,val\n"
    (tmp_path / "meta.csv").write_text("image,diagnosis,patient,split\n" + rows)
    source = Folder(path=str(tmp_path), attributes="meta.csv", classes_from=("diagnosis",), groups="patient")
    train = source.load("train")
    assert train.classes == ("melanoma", "nevus") and train.labels.tolist() == [1, 0] and train.groups.tolist() == [1, 1]
    assert values(source, "test") == [1]
    with pytest.raises(DataError, match="no column 'diagnose'; did you mean diagnosis"):
        Folder(path=str(tmp_path), attributes="meta.csv", classes_from=("diagnose",)).load("train")
    with pytest.raises(DataError, match="the columns are diagnosis, patient; name those"):
        Folder(path=str(tmp_path), attributes="meta.csv").load("train")


def test_a_single_label_column_needs_no_naming_and_numbers_sort_as_numbers(tmp_path: Path):
    for i in range(3):
        picture(tmp_path / f"{i}.png", i)
    (tmp_path / "labels.csv").write_text("file,label\n0.png,10\n1.png,9\n2.png,10\n")
    train = Folder(path=str(tmp_path), attributes="labels.csv").load("train")
    assert train.classes == ("9", "10") and train.labels.tolist() == [1, 0, 1]


@pytest.mark.parametrize(
    "content, message",
    [
        ("", "empty; expected a heading"),
        ("file,label\n0.png\n", "line 2 has 1 values; the heading has 2 columns"),
        ("file,label\n0.png,1\n0.png,2\n", "line 3 names 0.png again"),
        ("file,label,split\n0.png,1,holiday\n", "0.png is in split 'holiday'; use train, val or test"),
        ("file,label\nghost.png,1\n", "ghost.png: not found"),
    ],
)
def test_a_table_that_is_wrong_is_refused(tmp_path: Path, content: str, message: str):
    picture(tmp_path / "0.png")
    (tmp_path / "t.csv").write_text(content)
    with pytest.raises(DataError, match=message):
        Folder(path=str(tmp_path), attributes="t.csv").load("train")


def celeba(root: Path, people: list[tuple[str, str]]) -> Path:
    """CelebA's files for people given as attribute flags and split."""
    folder = root / "celeba"
    for i in range(len(people)):
        picture(folder / "img_align_celeba" / f"{i}.jpg", 10 * i, size=(6, 8), mode="RGB")
    lines = [f"{i}.jpg  {flags}" for i, (flags, _) in enumerate(people)]
    (folder / "list_attr_celeba.txt").write_text("\n".join([str(len(people)), f"Male Young {HAIR} ", *lines]) + "\n")
    (folder / "list_eval_partition.txt").write_text("".join(f"{i}.jpg {s}\n" for i, (_, s) in enumerate(people)))
    return folder


def test_celeba_has_sixteen_classes_and_the_first_hair_colour_counts(tmp_path: Path, monkeypatch):
    """Label = 8 Male + 4 Young + hair: a young man with black and grey hair is 12, an old woman with grey hair 3."""
    people = [
        ("1 1 1 -1 -1 1", "0"),
        ("-1 -1 -1 -1 -1 1", "0"),
        ("1 1 -1 -1 -1 -1", "0"),
        ("1 -1 -1 1 -1 -1", "2"),
        ("1 1 1 -1 -1 -1", "1"),
    ]
    celeba(tmp_path, people)
    monkeypatch.setenv("EFFUSE_DATA", str(tmp_path))
    source = CelebA(transforms=(Crop(), Resize(side=4)))
    train, test = source.load("train"), source.load("test")
    assert train.labels.tolist() == [12, 3] and test.labels.tolist() == [9]
    assert len(train.classes) == 16 and train.classes[12] == "Male=1 Young=1 Black_Hair"
    assert train.shape == (4, 3, 16)


def test_celeba_s_format_in_any_folder_with_identities_as_groups(tmp_path: Path):
    folder = celeba(tmp_path, [("1 1 1 -1 -1 1", "0"), ("-1 -1 -1 -1 -1 1", "0"), ("1 -1 1 1 1 1", "2")])
    (folder / "identity.txt").write_text("0.jpg 77\n1.jpg 5\n2.jpg 77\n")
    source = Folder(
        path=str(folder / "img_align_celeba"),
        attributes="../list_attr_celeba.txt",
        classes_from=("Male",),
        groups="../identity.txt",
        transforms=(Crop(),),
    )
    train = source.load("train")
    assert train.labels.tolist() == [1, 0] and train.classes == ("-1", "1") and train.groups.tolist() == [1, 0]
    assert build_text(text(source), Source, "data") == source


def test_a_truncated_celeba_table_is_refused(tmp_path: Path, monkeypatch):
    folder = celeba(tmp_path, [("1 1 1 -1 -1 1", "0"), ("1 1 1 -1 -1 1", "2")])
    table = folder / "list_attr_celeba.txt"
    table.write_text("\n".join(table.read_text().splitlines()[:-1]))
    monkeypatch.setenv("EFFUSE_DATA", str(tmp_path))
    with pytest.raises(DataError, match="says 2 images, but it has 1"):
        CelebA().load("train")


def test_mixed_sizes_are_an_error_only_without_resize(pets: Path):
    picture(pets / "cat" / "1.png", 1, size=(6, 5))
    with pytest.raises(DataError, match=r"cat/1.png: 5x6 pixels, but .*cat/0.png has 4x4; add resize"):
        Folder(path=str(pets)).load("train")
    assert Folder(path=str(pets), transforms=(Resize(side=8),)).load("train").shape.side == 8


def test_mixed_channels_are_an_error_without_channels(pets: Path):
    picture(pets / "cat" / "1.png", 1, mode="RGB")
    with pytest.raises(DataError, match=r"3 channels, but .* has 1; add channels\(1\)"):
        Folder(path=str(pets)).load("train")
    moved = Folder(path=str(pets), transforms=(Channels(n=1), Flip(), Shift(pad=3))).load("train")
    assert moved.flip and moved.shift == 3


def test_palettes_transparency_and_bits_become_plain_pixels(tmp_path: Path):
    picture(tmp_path / "a" / "0.png", 200, mode="RGBA")
    Image.new("P", (4, 4), 0).save(tmp_path / "a" / "1.png")
    Image.new("1", (4, 4), 1).save(tmp_path / "a" / "2.png")
    train = Folder(path=str(tmp_path), transforms=(Channels(n=3),)).load("train")
    assert train.images[:, :, 0, 0].tolist() == [[200] * 3, [0] * 3, [255] * 3]


def test_sixteen_bit_grey_keeps_its_range(tmp_path: Path):
    (tmp_path / "a").mkdir()
    for i in range(2):
        Image.fromarray(np.full((4, 4), 40000 + i, np.uint16)).save(tmp_path / "a" / f"{i}.png")
    train = Folder(path=str(tmp_path)).load("train")
    assert train.peak == 65535 and train.images.dtype == torch.int32 and train.images[:, 0, 0, 0].tolist() == [40000, 40001]
    picture(tmp_path / "a" / "2.png")
    with pytest.raises(DataError, match="white is 255, but in .* it is 65535; store all with one bit depth"):
        Folder(path=str(tmp_path)).load("train")


@pytest.mark.parametrize("damage", [lambda raw: b"", lambda raw: b"not an image", lambda raw: raw[: len(raw) // 2]])
def test_a_corrupt_image_is_named(pets: Path, damage):
    noise = np.random.default_rng(0).integers(0, 256, (64, 64), dtype=np.uint8)
    Image.fromarray(noise).save(pets / "dog" / "3.png")
    (pets / "dog" / "3.png").write_bytes(damage((pets / "dog" / "3.png").read_bytes()))
    with pytest.raises(DataError, match="dog/3.png: cannot be read as an image .*replace or remove the file"):
        Folder(path=str(pets), transforms=(Resize(side=4),)).load("train")


def test_an_image_of_too_many_pixels_is_refused_before_it_is_decoded(pets: Path, monkeypatch):
    """36 million pixels in some kilobytes."""
    Image.new("1", (6000, 6000)).save(pets / "dog" / "3.png")
    assert (pets / "dog" / "3.png").stat().st_size < 100_000
    monkeypatch.setattr("PIL.ImageFile.ImageFile.load", lambda picture: pytest.fail("decoded"))
    with pytest.raises(DataError, match="dog/3.png: 6000x6000 pixels, more than 33,554,432; store it smaller"):
        read_image(pets / "dog" / "3.png")


def test_a_file_of_another_format_is_not_opened_by_its_content(pets: Path, monkeypatch):
    """Pillow would start Ghostscript for PostScript, whatever the file is called."""
    monkeypatch.setattr("subprocess.Popen", lambda *args, **options: pytest.fail("a program was started"))
    (pets / "dog" / "3.png").write_bytes(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 4 4\n%%EndComments\nshowpage\n")
    with pytest.raises(DataError, match="dog/3.png: cannot be read as an image .cannot identify"):
        Folder(path=str(pets)).load("train")


def test_columns_that_combine_to_too_many_classes_are_refused(tmp_path: Path):
    """Three columns of 30 values each in 30 lines are 27,000 classes."""
    picture(tmp_path / "0.png")
    (tmp_path / "t.csv").write_text("file,a,b,c\n" + "".join(f"{i}.png,{i},{i},{i}\n" for i in range(30)))
    with pytest.raises(DataError, match="a, b, c combine to 27,000 classes, more than 10,000; choose columns with fewer"):
        Folder(path=str(tmp_path), attributes="t.csv", classes_from=("a", "b", "c")).load("train")


def test_a_class_whose_name_cannot_be_shown_is_refused(tmp_path: Path):
    picture(tmp_path / "a\x1b[31m" / "0.png")
    picture(tmp_path / "b" / "0.png")
    with pytest.raises(DataError, match=r"the class 'a\\x1b\[31m' has characters that cannot be shown; rename it"):
        Folder(path=str(tmp_path)).load("train")


def test_floating_point_pixels_are_refused(tmp_path: Path):
    (tmp_path / "a").mkdir()
    Image.fromarray(np.zeros((4, 4), np.float32)).save(tmp_path / "a" / "0.tiff")
    with pytest.raises(DataError, match="pixels of mode F; store 8 bits"):
        Folder(path=str(tmp_path)).load("train")


def test_a_transform_that_fails_names_the_file(pets: Path):
    with pytest.raises(DataError, match=r"cat/0.png: crop\(side=9\): the image is only 4x4"):
        Folder(path=str(pets), transforms=(Crop(side=9),)).load("train")


def test_folders_without_images_say_what_is_missing(tmp_path: Path):
    with pytest.raises(DataError, match="no subfolders; put the images of each class in one"):
        Folder(path=str(tmp_path)).load("train")
    (tmp_path / "cat").mkdir()
    with pytest.raises(DataError, match="cat: no images"):
        Folder(path=str(tmp_path)).load("train")
    picture(tmp_path / "cat" / "0.png")
    with pytest.raises(DataError, match="no images in the test split; raise holdout=0.2 or add images"):
        Folder(path=str(tmp_path)).load("test")
    with pytest.raises(DataError, match="not a folder"):
        Folder(path=str(tmp_path / "cat" / "0.png")).load("train")


def test_a_table_with_semicolons_is_recognised(pets: Path):
    """As spreadsheets in many countries export them."""
    (pets / "table.csv").write_text("file;label\ncat/0.png;a\n")
    with pytest.raises(DataError, match="its values are separated by semicolons; export it with commas"):
        Folder(path=str(pets), attributes="table.csv").load("train")


@pytest.mark.parametrize("number", ["9" * 5000, "\u00b2"])
def test_a_number_of_images_that_python_cannot_read_is_refused(tmp_path: Path, number: str):
    (tmp_path / "t.txt").write_text(f"{number}\nMale\na.png 1\n")
    with pytest.raises(DataError, match="t.txt: (its first line says|the first two lines must be)"):
        read_table(tmp_path / "t.txt")
