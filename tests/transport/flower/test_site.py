"""A site's side: which terms it accepts, what it does not disclose, and what it trains on."""

import dataclasses
import json
import re
import stat
from types import SimpleNamespace

import pytest
import torch
from PIL import Image
from toy import ADAM, ToyImages, ToyUnet, toy_recipe

from effuse.algorithms.fedavg import FedAvg
from effuse.algorithms.feddifrc import FedDifRC
from effuse.algorithms.fedphd import FedPhD
from effuse.algorithms.shared.guides import Encoder
from effuse.core.errors import DataError, FederationError, ModelError, RecipeError, TrainingError
from effuse.core.federation import Order
from effuse.core.rng import Stream
from effuse.core.wire import encode
from effuse.data.folders import Folder
from effuse.models import pretrained
from effuse.models.local import LocalCopy
from effuse.models.pretrained import FromPretrained
from effuse.models.resnet import Cnn
from effuse.models.unet import Unet
from effuse.privacy.histogram import Laplace
from effuse.runs import driver
from effuse.runs.folder import RunFolder
from effuse.tasks.classify import Classify
from effuse.tools.preview import what_leaves
from effuse.transport.flower.commands import Served, address, is_loopback, served, source
from effuse.transport.flower.consent import Consent
from effuse.transport.flower.messages import Invitation
from effuse.transport.flower.site import Site, relabelled


def resolved(**changes):
    recipe = toy_recipe(**changes)
    return recipe.resolved(recipe.data.load("train"))


def invitation_of(recipe, name="toy", classes=("dark", "light")) -> Invitation:
    return Invitation(name, recipe.saved(), classes, "", "")


def site_at(folder, client=0, data=None, consent=Consent()) -> Site:  # noqa: B008
    """A site, with the sentences that it shows in `shown`."""
    shown: list[str] = []
    site = Site(folder, client, data, consent, "cpu", shown.append)
    site.shown = shown
    return site


def test_the_first_manifest_is_shown_and_pinned_and_any_other_is_refused(tmp_path):
    site = site_at(tmp_path)
    invitation = invitation_of(resolved())
    assert site.enrol(invitation).client == 0
    assert any("seed=0" in line for line in site.shown)
    again = site_at(tmp_path)
    assert again.enrol(invitation).session != site.session
    with pytest.raises(FederationError, match="has agreed to the manifest [0-9a-f]{12} and not to"):
        again.enrol(invitation_of(resolved(seed=1)))
    with pytest.raises(FederationError, match=r"to accept that one too, join with --allow toy@[0-9a-f]{64}$"):
        again.enrol(invitation_of(resolved(seed=1)))
    with pytest.raises(FederationError, match="has agreed"):  # the meaning of labels is part of the manifest
        again.enrol(invitation_of(resolved(), classes=("light", "dark")))


def test_a_site_that_is_asked_a_second_run_accepts_it_by_its_hash(tmp_path):
    """Without deleting files; a process that allows another hash, or none, still refuses."""
    first, second = invitation_of(resolved()), invitation_of(resolved(seed=1))
    site_at(tmp_path).enrol(first)
    with pytest.raises(FederationError, match="this site accepts toy@"):
        site_at(tmp_path, consent=Consent.given(None, f"toy@{first.digest}")).enrol(second)
    site = site_at(tmp_path, consent=Consent.given(None, f"toy@{second.digest}"))
    assert site.enrol(second).client == 0
    assert any("which was pinned; it is replaced" in line for line in site.shown)
    with pytest.raises(FederationError, match="has agreed"):
        site_at(tmp_path).enrol(first)


def test_only_what_was_allowed_is_accepted(tmp_path):
    recipe = resolved()
    invitation = invitation_of(recipe)
    site_at(tmp_path / "a", consent=Consent.given(None, f"toy@{invitation.digest[:16]}")).enrol(invitation)
    for wrong in (f"toy@{'0' * 16}", f"other@{invitation.digest}"):
        with pytest.raises(FederationError, match="accepts .* only"):
            site_at(tmp_path / "b", consent=Consent.given(None, wrong)).enrol(invitation)
    (tmp_path / "run").mkdir()
    RunFolder(tmp_path / "run").create(recipe, "toy", "served", "cpu", None, {})
    consent = Consent.given(tmp_path / "run" / "manifest.json", None)
    site_at(tmp_path / "c", consent=consent).enrol(invitation)
    with pytest.raises(FederationError, match="seed is 1 at the server and 0 here"):
        site_at(tmp_path / "d", consent=consent).enrol(invitation_of(resolved(seed=1)))
    with pytest.raises(FederationError, match="expected RECIPE@HASH with 12 or more digits"):
        Consent.given(None, "toy@123")


def test_a_manifest_is_read_in_the_closed_grammar(tmp_path):
    for key, value, error in (
        ("algorithm", "__import__('os').system('id')", RecipeError),
        ("algorithm", "nonsense()", RecipeError),
        ("rounds", "-1", RecipeError),
    ):
        recipe = resolved().saved() | {key: value}
        with pytest.raises(error):
            site_at(tmp_path / key).enrol(Invitation("toy", recipe, ("dark", "light"), "", ""))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("reproducible", "True  # False"),
        ("reproducible", "True # \x1b[2K\x1b[1Greproducible=False"),
        ("reproducible", "(True)"),
        ("rounds", "0x2"),
        ("rounds", " 2"),
        ("seed", "False"),
        ("wire", '"fp32"'),
        ("data", "toy_images()  # of the trial"),
        ("task", None),  # a default, which could differ between versions
    ],
)
def test_a_manifest_says_what_it_means(key, value, tmp_path):
    """It is refused unless it is written as the site itself would write it, before anything of it is shown or pinned."""
    recipe = {k: v for k, v in (resolved().saved() | {key: value}).items() if v is not None}
    site = site_at(tmp_path)
    with pytest.raises((FederationError, RecipeError)) as refused:
        site.enrol(Invitation("toy", recipe, ("dark", "light"), "", ""))
    assert str(refused.value).isprintable() and key in str(refused.value)
    with pytest.raises((FederationError, RecipeError), match=key):  # nor does a dry run show it
        what_leaves(site, Invitation("toy", recipe, ("dark", "light"), "", ""))
    assert not site.shown and not (tmp_path / "manifest.json").exists()


@pytest.mark.parametrize("words", ["\x1b[2K", "a\nb", "\u202egnp.exe", "x" * 201])
def test_names_that_cannot_be_shown_are_refused(words, tmp_path):
    for name, classes in ((words, ("dark", "light")), ("toy", ("dark", words))):
        site = site_at(tmp_path)
        with pytest.raises(FederationError, match="a name that cannot be shown") as refused:
            site.enrol(invitation_of(resolved(), name=name, classes=classes))
        assert str(refused.value).isprintable() and not site.shown


def test_a_manifest_of_endless_rounds_is_refused_before_it_is_rehearsed(tmp_path):
    recipe = resolved().saved() | {"rounds": "1000000000"}
    with pytest.raises(RecipeError, match="rounds: 1000000000 is wrong, input should be less than or equal to 100000"):
        what_leaves(site_at(tmp_path), Invitation("toy", recipe, ("dark", "light"), "", ""))


def test_a_site_shows_control_characters_as_escapes(tmp_path):
    """In sentences, in errors whose words come from file names, and in the log."""
    site = site_at(tmp_path)
    site.report("  class=\x1b[31mred\x07\u202e\udc80")
    site.failed(DataError("scans/\x1b]0;owned\x07.png: cannot be read"))
    assert site.shown == [r"  class=\x1b[31mred\x07\u202e\udc80", r"refused: scans/\x1b]0;owned\x07.png: cannot be read"]
    log = (tmp_path / "site.log").read_text()
    assert r"class=\x1b[31mred\x07" in log and "\x1b" not in log and "\x07" not in log


def test_a_manifest_cannot_make_a_site_read_a_path_of_its_own(tmp_path, monkeypatch):
    """A server is told nothing of a folder that it names; it sends the architecture of its own saved model instead."""
    run_folder = tmp_path / "run"
    saved = resolved(rounds=1)
    driver.run(saved, run_folder)
    continued = dataclasses.replace(saved, model=FromPretrained(folder=str(run_folder / "model"))).resolved(
        saved.data.load("train")
    )
    assert continued.portable.model == saved.model and continued.portable.portable == continued.portable
    site = site_at(tmp_path / "site", data=ToyImages())
    monkeypatch.setattr(pretrained, "read_arch", lambda *args: pytest.fail("a path was opened"))
    with pytest.raises(RecipeError, match="from_pretrained.* would read a path of this machine"):
        site.enrol(invitation_of(continued))
    within = dataclasses.replace(saved, algorithm=FedDifRC(local=ADAM, guide=Encoder(network=continued.model), tdcl=0.0))
    with pytest.raises(RecipeError, match="from_pretrained.* would read a path of this machine"):
        site.enrol(invitation_of(within))
    assert not site.shown
    site.enrol(invitation_of(saved))


def test_a_secret_of_its_own_unless_the_recipe_says_reproducible(tmp_path):
    """Each site has its own secret in its randomness; with `reproducible` there is none, and the seed alone decides."""
    private, open_ = resolved(), resolved(reproducible=True)
    a, b, c = (site_at(tmp_path / n) for n in "abc")
    a.enrol(invitation_of(private)), b.enrol(invitation_of(private)), c.enrol(invitation_of(open_))
    assert a.worker.secret != b.worker.secret and len(a.worker.secret) == 32 and c.worker.secret == b""
    kept = (tmp_path / "a" / "secret").read_bytes()
    mode = stat.S_IMODE((tmp_path / "a" / "secret").stat().st_mode)
    assert mode == 0o600 and not (tmp_path / "c" / "secret").exists()
    again, other = (site_at(tmp_path / "a") for _ in range(2))
    again.enrol(invitation_of(private))
    assert (tmp_path / "a" / "secret").read_bytes() == kept and again.worker.secret == a.worker.secret != kept
    (tmp_path / "a" / "manifest.json").unlink()
    other.enrol(invitation_of(resolved(seed=1)))
    assert (tmp_path / "a" / "secret").read_bytes() == kept and other.worker.secret != a.worker.secret, "of another manifest"


def test_a_site_is_one_client(tmp_path):
    site = site_at(tmp_path, client=2)
    with pytest.raises(FederationError, match="before the terms"):
        site.perform(b"", b"")
    site.enrol(invitation_of(resolved()))
    order = Order("train", 0, 0, 0, 1, None, "")
    with pytest.raises(FederationError, match="this is client 2, not client 1"):
        site.perform(encode(order, Order), b"")
    with pytest.raises(FederationError, match="there is no client 7"):
        site_at(tmp_path / "b", client=7).enrol(invitation_of(resolved()))


def pictures(folder, names) -> Folder:
    for name in names:
        (folder / name).mkdir(parents=True)
        for i in range(5):
            Image.new("L", (4, 4), 40 * i).save(folder / name / f"{i}.png")
    return Folder(path=str(folder))


def test_an_error_discloses_no_file_or_class_of_the_site(tmp_path):
    """A folder that is named after a patient is no class of the federation; only the site reports its name."""
    site = site_at(tmp_path / "site")
    with pytest.raises(DataError, match="no class 'Jane Doe'") as caught:
        relabelled(pictures(tmp_path / "scans", ["light", "Jane Doe"]).load("train"), ("dark", "light"))
    assert site.disclosed(caught.value) == "DataError; the details are in the site's own log"
    assert site.disclosed(OSError("/srv/Jane Doe/1.png: truncated")) == "OSError; the details are in the site's own log"
    assert site.disclosed(TrainingError("the loss became nan")) == "the loss became nan"
    assert stat.S_IMODE((tmp_path / "site").stat().st_mode) == 0o700


def test_a_sites_own_folder_is_trained_on_whole_and_nothing_of_its_path_is_in_the_terms(tmp_path):
    own = pictures(tmp_path / "private-scans", ["light", "dark"])
    site = site_at(tmp_path / "site", data=own)
    invitation = invitation_of(resolved())
    site.enrol(invitation)
    assert len(site.shard(resolved(), invitation.classes)) == 8  # a fifth is held out for the site's own testing
    assert "private-scans" not in json.dumps(invitation.recipe)


def test_a_site_has_its_cores_for_itself_unless_bits_count(tmp_path, monkeypatch):
    """Six threads and three clients are two for each of them in a simulation; this machine has seven."""
    used: list[int] = []
    model = ToyUnet(dropout=0.0)  # networks with dropout do not train side by side
    monkeypatch.setattr(torch, "get_num_threads", lambda: 7)
    own = pictures(tmp_path / "scans", ["light", "dark"])
    for name, data, reproducible in (("a", own, False), ("b", own, True), ("c", None, False)):
        site = site_at(tmp_path / name, data=data)
        site.enrol(invitation_of(resolved(model=model, threads=6, reproducible=reproducible)))
        monkeypatch.setattr(torch, "set_num_threads", used.append)
        site.perform(encode(Order("train", 0, 0, 0, 0, None, ""), Order), job_body(model=model))
    assert used == [7, 2, 2]


def test_labels_follow_the_names_of_classes_and_not_their_order(tmp_path):
    """This site has only `light` images, which are class 0 here and class 1 in the federation."""
    data = pictures(tmp_path / "pictures", ["light"]).load("train")
    assert data.labels.unique().tolist() == [0]
    mapped = relabelled(data, ("dark", "light"))
    assert mapped.labels.unique().tolist() == [1] and mapped.classes == ("dark", "light")
    assert torch.equal(mapped.images, data.images)
    with pytest.raises(DataError, match="no class 'light'; its classes: dark, grey"):
        relabelled(data, ("dark", "grey"))


def test_labels_that_are_only_counted_follow_the_names_too(tmp_path):
    """FedPhD's clients send a histogram, with any network; here of four images of `light`, the federation's second class."""
    recipe = resolved(algorithm=FedPhD(local=ADAM, variant="none"))
    assert not recipe.model.conditional
    shard = site_at(tmp_path / "site", data=pictures(tmp_path / "pictures", ["light"])).shard(recipe, ("dark", "light"))
    assert shard.histogram == [0, 4]
    unlabelled = site_at(tmp_path / "other", data=pictures(tmp_path / "all", ["scans"]))
    with pytest.raises(DataError, match="no class 'scans'"):
        unlabelled.shard(recipe, ("dark", "light"))
    assert len(unlabelled.shard(resolved(), ("dark", "light"))) == 4, "FedAvg counts no labels"


def test_images_of_another_shape_are_refused(tmp_path):
    site = site_at(tmp_path / "site", data=ToyImages(side=5))
    with pytest.raises(
        RecipeError, match=r"are 4x4 with 1 channel, this site's are 5x5 with 1 channel; add resize\(side=4\)"
    ):
        site.enrol(invitation_of(resolved()))


def test_a_classifier_is_relabelled_too(tmp_path):
    recipe = toy_recipe(task=Classify(), model=Cnn(side=4, channels=1, classes=2))
    site = site_at(tmp_path / "site", data=pictures(tmp_path / "pictures", ["light"]))
    site.enrol(invitation_of(recipe))
    assert site.shard(recipe, ("dark", "light")).histogram == [0, 4]


def test_a_dry_run_shows_what_would_leave_and_agrees_with_the_rehearsal(tmp_path):
    """Two rounds of FedAvg: two updates of 69 parameters (1*4*9+4, 4*4+4, 4*1*9+1 less none), 4 bytes each."""
    recipe = resolved()
    site = site_at(tmp_path, data=ToyImages())
    shown = "\n".join(what_leaves(site, invitation_of(recipe)))
    n = 4 * 9 + 4 + 4 * 4 + 4 + 4 * 9 + 1
    assert f"to train: 2 messages, {2 * n} parameters, {8 * n} bytes" in shown
    assert "Update(model: a model (network, parameters, buffers), weight: float, loss: float or nothing)" in shown
    assert "mixed with this site's secret" in shown
    steps = recipe.rounds * recipe.algorithm.local.steps_on(len(ToyImages().load("train")))
    said = rf"on this machine: about [\d.e-]+ hours of training \({steps} steps of [\d.e-]+ s\), [\d.e-]+ GB"
    assert re.search(said, shown)
    assert not (tmp_path / "manifest.json").exists()  # a dry run agrees to nothing


def test_a_dry_run_says_what_weights_counts_and_refusals_tell(tmp_path):
    """Four toy pictures of each class; with uniform weights nothing tells their number but FedPhD's counts."""

    def shown(**changes):
        own = pictures(tmp_path / f"{len(list(tmp_path.iterdir()))}", ["light", "dark"])
        return "\n".join(what_leaves(site_at(tmp_path / "site", data=own), invitation_of(resolved(**changes))))

    number = "its `weight` tells the server the number of images here, 8"
    assert number in shown() and number not in shown(algorithm=FedAvg(local=ADAM, weights="uniform"))
    counted = "its `counts` tells the server the numbers of images here, "
    assert counted not in shown()
    assert f"{counted}exactly" in shown(algorithm=FedPhD(local=ADAM, variant="none"))
    noisy = FedPhD(local=ADAM, variant="none", histogram=Laplace(epsilon=0.5))
    assert f"{counted}with the noise of laplace(epsilon=0.5)" in shown(algorithm=noisy)
    assert "says why: the size, channels and number of classes of the images" in shown()


def test_a_site_shows_how_many_images_of_each_class_take_part_and_how_many_do_not(tmp_path):
    """Five pictures of `light`, the federation's second class, and none of its first; one is held out, four take part."""
    recipe = resolved(model=Unet(widths=(8,), layers=1, attention=(), groups=4, conditional=True))
    site = site_at(tmp_path / "site", data=pictures(tmp_path / "pictures", ["light"]))
    counts = "4 images: dark 0, light 4; held out: 1"
    assert f"client 0 would train on {counts}" in what_leaves(site, invitation_of(recipe))
    site.enrol(invitation_of(recipe))
    assert site.shown[-1] == f"client 0 is ready with {counts}"


def test_a_site_may_train_without_held_out_images(tmp_path):
    """A fifth of one picture is none: the site trains on it, and shows why none is held out."""
    Image.new("L", (4, 4)).save(one_of(tmp_path / "pictures" / "light"))
    site = site_at(tmp_path / "site", data=Folder(path=str(tmp_path / "pictures")))
    site.enrol(invitation_of(resolved()))
    counts = "client 0 is ready with 1 image: light 1; held out: none that can be read ("
    assert site.shown[-1].startswith(counts) and "no images in the test split; raise holdout=0.2" in site.shown[-1]


def test_a_share_of_the_recipes_data_holds_nothing_out(tmp_path):
    """40 toy images of two greys for three clients."""
    site = site_at(tmp_path / "site")
    site.enrol(invitation_of(resolved()))
    dark, light = site.shard(resolved(), ("dark", "light")).histogram
    assert site.shown[-1] == f"client 0 is ready with {dark + light} images: dark {dark}, light {light}"


def one_of(folder):
    folder.mkdir(parents=True)
    return folder / "1.png"


def test_addresses_and_which_may_be_served_without_keys(tmp_path):
    assert address("127.0.0.1:80") == ("127.0.0.1", 80) and address("[::1]:9000") == ("::1", 9000)
    for wrong in ("localhost", "host:", ":80", "host:99999", "host:x"):
        with pytest.raises(FederationError, match="is not an address"):
            address(wrong)
    assert is_loopback("127.0.0.1") and is_loopback("::1") and is_loopback("localhost")
    assert not is_loopback("0.0.0.0") and not is_loopback("example.org")
    with pytest.raises(FederationError, match="without --keys anyone who reaches it"):
        served(Served("0.0.0.0:8000"), "toy", 3)
    assert served(Served("0.0.0.0:8000", insecure=True), "toy", 3)
    assert source("recipe") is None and source('folder("x")') == Folder(path="x")
    with pytest.raises(RecipeError):
        source("nothing_like_it()")


def test_an_error_about_an_order_is_disclosed_without_paths(tmp_path):
    """A job that fails on a file discloses neither the file nor the site's folder."""
    site = site_at(tmp_path / "hospital")
    assert (
        site.disclosed(FileNotFoundError("/scans/jane-doe.png"))
        == "FileNotFoundError; the details are in the site's own log"
    )
    assert (
        site.disclosed(DataError("scans/jane-doe.png cannot be read")) == "DataError; the details are in the site's own log"
    )
    site.enrol(invitation_of(resolved()))
    with pytest.raises(FederationError) as missing:
        site.perform(encode(Order("train", 1, 1, 0, 0, "0_0", "0_0"), Order), job_body())
    assert "hospital" in str(missing.value) and "hospital" not in site.disclosed(missing.value)
    assert "client folder its folder has no snapshot '0_0'" in site.disclosed(missing.value)


def test_a_copy_that_differs_is_disclosed_without_its_place(tmp_path):
    """The site's folder of published networks may be named after a person; the pinned hash is the server's own."""

    folder = tmp_path / "jane doe" / "net"
    folder.mkdir(parents=True)
    (folder / "weights").write_bytes(b"another")
    copy = SimpleNamespace(name="copy", folder="net", path=folder, files=("weights",), optional=(), sha256="0" * 64)
    with pytest.raises(ModelError, match="jane doe") as caught:
        LocalCopy.verified(copy)
    site = site_at(tmp_path / "site")
    sentence = site.disclosed(caught.value)
    assert "jane" not in sentence and str(tmp_path) not in sentence
    assert sentence.startswith("the files in '...' are not those of the recipe: their SHA-256 is ")
    bare = ModelError(f"{tmp_path}/jane doe/net: its model_type is x; supported are clip, dinov2")
    assert site.disclosed(bare) == "...; supported are clip, dinov2"


def job_body(**changes) -> bytes:
    """The body of an order to train."""
    recipe = resolved(**changes)
    job = recipe.algorithm.jobs["train"]
    return encode(job.arguments(model=recipe.model.initial(Stream(("test",)))), job.arguments)


def test_a_pinned_manifest_that_is_damaged_is_another_manifest(tmp_path):
    site, offered = site_at(tmp_path / "site"), invitation_of(resolved())
    for blob in ("{}", "[]", '{"digest": 7}'):
        (tmp_path / "site" / "manifest.json").write_text(blob)
        with pytest.raises(
            FederationError, match=r"the manifest \(damaged\) and not to \w+; to accept that one too, join with --allow"
        ):
            site.agree(offered)


def test_a_site_deletes_what_a_killed_write_left(tmp_path):
    """Each such file may be as large as a model, and a site may be killed often."""
    site = site_at(tmp_path / "site")
    (tmp_path / "site" / ".1_0.state.abc.partial").write_bytes(b"half")
    site.enrol(invitation_of(resolved()))
    assert not list((tmp_path / "site").glob(".*.partial"))
