"""Which manifests a site accepts, and that what it shows of one is what it runs."""

import dataclasses
from pathlib import Path

from effuse.core.errors import FederationError
from effuse.core.grammar import clip
from effuse.core.recipe import Recipe, read_manifest
from effuse.transport.flower.messages import Invitation

LONGEST_NAME = 200  # characters of a class or a recipe's name
MIN_DIGITS = 12  # hexadecimal digits of a hash that --allow must have


@dataclasses.dataclass(frozen=True)
class Consent:
    """Which manifests a site accepts: the first that comes, or only that of a file, or only that of a hash."""

    recipe: dict[str, str] | None = None
    name: str | None = None
    digest: str | None = None

    @classmethod
    def given(cls, file: Path | None, allow: str | None) -> "Consent":
        """From the command line's `--recipe FILE` and `--allow RECIPE@HASH`."""
        name, at, digest = (allow or "").partition("@")
        if allow is not None and (not at or len(digest) < MIN_DIGITS or set(digest) - set("0123456789abcdef")):
            raise FederationError(
                f"--allow {allow}: expected RECIPE@HASH with {MIN_DIGITS} or more digits of the manifest's hash"
            )
        return cls(Recipe.restore(read_manifest(file)["recipe"]).saved() if file else None, name or None, digest or None)

    def check(self, invitation: Invitation) -> None:
        """Refuse a manifest that the site does not accept."""
        if self.digest is not None and (invitation.name != self.name or not invitation.digest.startswith(self.digest)):
            raise FederationError(
                f"this site accepts {self.name}@{self.digest} only, not {invitation.name}@{invitation.digest}"
            )
        if self.recipe is not None and self.recipe != invitation.recipe:
            key = next(k for k in (*self.recipe, *invitation.recipe) if self.recipe.get(k) != invitation.recipe.get(k))
            offered, own = invitation.recipe.get(key), self.recipe.get(key)
            raise FederationError(f"this site accepts only its own recipe: {key} is {offered} at the server and {own} here")


def read_as_shown(invitation: Invitation) -> Recipe:
    """The recipe of a server's terms. It must be written as this version would write it, so that what is shown is what runs.

    Otherwise `True  # False` would be read as true, and characters that move a terminal's cursor could hide the difference.
    """
    for words in (invitation.name, *invitation.classes, *invitation.recipe):
        if not words.isprintable() or len(words) > LONGEST_NAME:
            raise FederationError(f"the server's terms have a name that cannot be shown: {clip(ascii(words))}")
    recipe = Recipe.restore(invitation.recipe)
    meant = recipe.saved()
    for key in dict.fromkeys((*meant, *invitation.recipe)):
        if (offered := invitation.recipe.get(key)) != meant.get(key):
            raise FederationError(
                f"the server's manifest has {key}={clip(ascii(offered))}, which this version of effuse writes as "
                f"{clip(ascii(meant.get(key)))}; the site accepts no other form, so ask for a server of this version"
            )
    return recipe
