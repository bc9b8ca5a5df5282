"""Keys: who can read them, and what cannot be forged."""

import base64
import dataclasses
import ssl
import stat

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa

from effuse.core.errors import FederationError
from effuse.transport.flower import keys
from effuse.transport.flower.messages import Invitation

P384 = b"\x06\x05\x2b\x81\x04\x00\x22"  # the curve in a certificate; with 0x68 before its end it is none
INVITATION = Invitation("toy", {"rounds": "2"}, ("a", "b"), "", "")


def test_private_keys_are_their_owners_alone(tmp_path):
    keys.init(tmp_path / "keys", 2, ["fed.example.org", "10.1.2.3"])
    private = sorted(p.relative_to(tmp_path / "keys").as_posix() for p in (tmp_path / "keys").rglob("*.key"))
    assert private == ["authority/ca.key", "client-0/client.key", "client-1/client.key", "server/server.key"]
    for name in private:
        assert stat.S_IMODE((tmp_path / "keys" / name).stat().st_mode) == 0o600
        assert stat.S_IMODE((tmp_path / "keys" / name).parent.stat().st_mode) == 0o700
    assert (tmp_path / "keys" / ".gitignore").read_text() == "*\n", "keys in a checkout are not committed by accident"
    readme = (tmp_path / "keys" / "README.md").read_text()
    assert "`client-0/` to `client-1/`" in readme and "fed.example.org" in readme
    with pytest.raises(FederationError, match="is not empty"):
        keys.init(tmp_path / "keys", 2)


def test_the_servers_certificate_is_one_that_tls_accepts(tmp_path):
    keys.init(tmp_path, 1)
    context = ssl.create_default_context(cafile=str(tmp_path / "client-0" / "ca.crt"))
    assert len(context.get_ca_certs()) == 1
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(tmp_path / "server" / "server.pem", tmp_path / "server" / "server.key")


def test_clients_are_known_by_their_keys(tmp_path):
    keys.init(tmp_path, 3)
    known = keys.ServerKeys(tmp_path).clients()
    assert sorted(known) == [0, 1, 2] and all(isinstance(k.curve, ec.SECP384R1) for k in known.values())
    for k in known:
        own = keys.ClientKeys(tmp_path, k).private.public_key()
        assert own.public_numbers() == known[k].public_numbers()
    with pytest.raises(FederationError, match="is missing; give a client's keys"):
        keys.ClientKeys(tmp_path / "server", 0)
    with pytest.raises(FederationError, match="is missing; give a server's keys"):
        keys.ServerKeys(tmp_path / "client-0")


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o644])
def test_a_private_key_that_others_can_read_or_change_is_refused(mode, tmp_path):
    keys.init(tmp_path, 1)
    (tmp_path / "client-0" / "client.key").chmod(mode)
    (tmp_path / "server" / "server.key").chmod(mode)
    said = rf"can be read or changed by others \(mode {mode:o}\); run `chmod 600"
    with pytest.raises(FederationError, match=said):
        keys.ClientKeys(tmp_path, 0)
    with pytest.raises(FederationError, match=said):
        keys.ServerKeys(tmp_path)


ENCRYPTED = serialization.BestAvailableEncryption(b"password")
RSA = rsa.generate_private_key(65537, 2048)


def pem(key, protection=serialization.NoEncryption()) -> bytes:  # noqa: B008
    return key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, protection)


@pytest.mark.parametrize(
    "content",
    [b"", b"junk", b"\xff" * 100, pem(RSA), pem(ec.generate_private_key(ec.SECP384R1()), ENCRYPTED)],
    ids=["empty", "text", "bytes", "rsa", "encrypted"],
)
def test_a_file_that_is_no_key_is_refused_in_a_sentence(content, tmp_path):
    keys.init(tmp_path, 2)
    for path, use in (
        (tmp_path / "client-0" / "client.key", lambda: keys.ClientKeys(tmp_path, 0)),
        (tmp_path / "server" / "server.key", lambda: keys.ServerKeys(tmp_path)),
    ):
        path.write_bytes(content)
        with pytest.raises(FederationError, match="is not an elliptic-curve private key without a password"):
            use()
    keys.init(tmp_path / "more", 2)
    known = keys.ServerKeys(tmp_path / "more")
    (known.folder / "clients" / "1.pub").write_bytes(content)
    with pytest.raises(FederationError, match="1.pub is not an elliptic-curve public key named by a client's number"):
        known.clients()


@pytest.mark.parametrize("name", ["01", "x", "\N{SUPERSCRIPT TWO}", "-1"])
def test_a_public_key_has_a_clients_number_for_a_name(name, tmp_path):
    """`01` would be client 1 once more, and Python takes a superscript for a digit."""
    keys.init(tmp_path, 2)
    folder = tmp_path / "server" / "clients"
    (folder / f"{name}.pub").write_bytes((folder / "0.pub").read_bytes())
    with pytest.raises(FederationError, match="named by a client's number"):
        keys.ServerKeys(tmp_path).clients()


def test_terms_are_the_servers_own(tmp_path):
    """A signature is for one run and one manifest of one federation; any other terms are refused."""
    keys.init(tmp_path / "a", 1)
    keys.init(tmp_path / "b", 1)
    server, client = keys.ServerKeys(tmp_path / "a"), keys.ClientKeys(tmp_path / "a", 0)
    signed = server.sign(dataclasses.replace(INVITATION, owner=0), 7)
    client.verify(signed, 7)
    forged = [
        (signed, 8),
        (dataclasses.replace(signed, recipe={"rounds": "3"}), 7),
        (dataclasses.replace(signed, classes=("b", "a")), 7),
        (dataclasses.replace(signed, name="other"), 7),
        (dataclasses.replace(signed, owner=1), 7),
        (INVITATION, 7),
        (keys.ServerKeys(tmp_path / "b").sign(INVITATION, 7), 7),
        (dataclasses.replace(signed, certificate="junk"), 7),
        (dataclasses.replace(signed, certificate=client.ca.read_text()), 7),
    ]
    for invitation, run in forged:
        with pytest.raises(FederationError, match="not signed by this federation's server"):
            client.verify(invitation, run)


@pytest.mark.parametrize("what", ["clients/0.pub", "ca.crt"])
def test_keys_of_kinds_that_the_library_does_not_know_are_refused(what, tmp_path):
    """A compressed point in a public key, and a certificate of another curve: the library raises errors of its own kinds."""
    keys.init(tmp_path, 1)
    if what == "ca.crt":
        path = tmp_path / "client-0" / "ca.crt"
        whole = path.read_text().splitlines()
        blob = base64.b64decode("".join(whole[1:-1])).replace(P384, P384[:-2] + b"\x68\x22")
        lines = [whole[0], base64.b64encode(blob).decode(), whole[-1]]
        path.write_text("\n".join(lines) + "\n")
        offered = keys.ServerKeys(tmp_path).sign(INVITATION, 7)
        with pytest.raises(FederationError, match="not signed by this federation's server"):
            keys.ClientKeys(tmp_path, 0).verify(offered, 7)
        return
    path = tmp_path / "server" / what
    kind, blob = path.read_text().split()[:2]
    damaged = base64.b64decode(blob).replace(b"nistp384\x00\x00\x00a\x04", b"nistp384\x00\x00\x00a\x02")
    path.write_text(f"{kind} {base64.b64encode(damaged).decode()}\n")
    with pytest.raises(FederationError, match="0.pub is not an elliptic-curve public key"):
        keys.ServerKeys(tmp_path).clients()


def test_a_certificate_of_an_unknown_version_is_refused(tmp_path):
    """The version is the number after the tag a0 03 02 01."""
    keys.init(tmp_path, 1)
    offered = keys.ServerKeys(tmp_path).sign(INVITATION, 7)
    whole = offered.certificate.splitlines()
    blob = base64.b64decode("".join(whole[1 : whole.index("-----END CERTIFICATE-----")]))
    damaged = base64.b64encode(blob.replace(b"\xa0\x03\x02\x01\x02", b"\xa0\x03\x02\x01\x12", 1)).decode()
    text = f"-----BEGIN CERTIFICATE-----\n{damaged}\n-----END CERTIFICATE-----\n"
    with pytest.raises(FederationError, match="not signed by this federation's server"):
        keys.ClientKeys(tmp_path, 0).verify(dataclasses.replace(offered, certificate=text), 7)
