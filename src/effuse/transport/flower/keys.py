"""Who may take part: a certificate authority, the server's certificate, and a key for every client."""

import dataclasses
import datetime
import ipaddress
import os
from collections.abc import Sequence
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from effuse.core.errors import FederationError
from effuse.core.files import reading, writing
from effuse.transport.flower.messages import Invitation

DAYS = 3650
LOCAL = ("localhost", "127.0.0.1")
SIGNING = ec.ECDSA(hashes.SHA384())
README = """# Keys of a federation of {clients} clients

Made by `effuse keys init`. Private keys are readable by their owner only; send them over a channel that you trust.

| folder | goes to | and is used as |
|---|---|---|
| `server/` | the machine that runs the server | `effuse serve RECIPE --keys server` |
| {sites} | that client's site only | `effuse join HOST:PORT --client-id K --keys client-K` |
| `authority/` | a safe place, offline | nothing: effuse renews no certificates |

Anyone who has `ca.key` can pose as the server. When certificates expire, make new keys for all.

The server's certificate is valid for {hosts}, until {until}. A client is known by its key: `server/clients/K.pub` is
client K's, and a site that holds one key cannot take part as another client. To shut a client out, remove its `K.pub`
and serve with `--quorum`.
"""


def init(folder: Path, clients: int, hosts: Sequence[str] = ()) -> None:
    """Make all keys of a federation in a new folder."""
    if folder.exists() and any(folder.iterdir()):
        raise FederationError(f"{folder} is not empty; give a new folder, so that no key is overwritten")
    names = list(dict.fromkeys((*LOCAL, *hosts)))
    ca_key, ca = _authority()
    key, certificate = _server(ca_key, ca, names)
    pem = ca.public_bytes(serialization.Encoding.PEM)
    _write(folder / "authority" / "ca.key", _private(ca_key), secret=True)
    _write(folder / "authority" / "ca.crt", pem)
    _write(folder / "server" / "ca.crt", pem)
    _write(folder / "server" / "server.pem", certificate.public_bytes(serialization.Encoding.PEM))
    _write(folder / "server" / "server.key", _private(key), secret=True)
    for k in range(clients):
        own = ec.generate_private_key(ec.SECP384R1())
        public = own.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH) + b"\n"
        _write(folder / "server" / "clients" / f"{k}.pub", public)
        _write(folder / f"client-{k}" / "client.key", _private(own), secret=True)
        _write(folder / f"client-{k}" / "ca.crt", pem)
    sites = "`client-0/`" if clients == 1 else f"`client-0/` to `client-{clients - 1}/`"
    until = certificate.not_valid_after_utc.date().isoformat()
    readme = README.format(clients=clients, sites=sites, hosts=", ".join(names), until=until)
    _write(folder / "README.md", readme.encode())
    _write(folder / ".gitignore", b"*\n")  # keys must not be committed with a checkout


class ServerKeys:
    """The server's folder of keys."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "server" if (folder / "server").is_dir() else folder
        self.ca, self.certificate, self.key = (self._file(name) for name in ("ca.crt", "server.pem", "server.key"))
        private_key(self.key)  # an unusable key is refused before anyone waits

    def _file(self, name: str) -> Path:
        return _existing(self.folder / name, "a server's keys", "effuse keys init")

    def clients(self) -> dict[int, ec.EllipticCurvePublicKey]:
        """The public key of every client."""
        found: dict[int, ec.EllipticCurvePublicKey] = {}
        for path in self.folder.glob("clients/*.pub"):
            try:
                public = serialization.load_ssh_public_key(path.read_bytes())
            except Exception:  # the library raises many types for what it cannot read
                public = None
            named = path.stem.isascii() and path.stem.isdigit() and str(int(path.stem)) == path.stem
            if not named or not isinstance(public, ec.EllipticCurvePublicKey):
                raise FederationError(f"{path} is not an elliptic-curve public key named by a client's number; remove it")
            found[int(path.stem)] = public
        return found

    def sign(self, invitation: Invitation, run: int) -> Invitation:
        """The terms with this server's signature for this Flower run."""
        signature = private_key(self.key).sign(_offer(invitation, run), SIGNING).hex()
        return dataclasses.replace(invitation, certificate=self.certificate.read_text(), signature=signature)


class ClientKeys:
    """A site's folder of keys."""

    def __init__(self, folder: Path, client: int) -> None:
        own = folder / f"client-{client}"
        self.folder = own if own.is_dir() else folder
        self.ca = _existing(self.folder / "ca.crt", "a client's keys", "the server's operator")
        self.private = private_key(_existing(self.folder / "client.key", "a client's keys", "the server's operator"))

    def verify(self, invitation: Invitation, run: int) -> None:
        """Refuse terms that the server did not sign: anyone who reaches a SuperLink can start a run on it."""
        try:
            ca = x509.load_pem_x509_certificate(self.ca.read_bytes())
            certificate = x509.load_pem_x509_certificate(invitation.certificate.encode())
            certificate.verify_directly_issued_by(ca)
            public = certificate.public_key()
            assert isinstance(public, ec.EllipticCurvePublicKey)
            public.verify(bytes.fromhex(invitation.signature), _offer(invitation, run), SIGNING)
        except Exception:  # the library raises many types for what it cannot read
            raise FederationError("the terms are not signed by this federation's server") from None


def private_key(path: Path) -> ec.EllipticCurvePrivateKey:
    """A private key, refused where others than its owner can read or change it."""
    with reading(path):
        mode, blob = path.stat().st_mode, path.read_bytes()
    if mode & 0o077:
        raise FederationError(f"{path} can be read or changed by others (mode {mode & 0o777:o}); run `chmod 600 {path}`")
    try:
        loaded = serialization.load_pem_private_key(blob, None)
    except Exception:  # the library raises many types for what it cannot read
        loaded = None
    if not isinstance(loaded, ec.EllipticCurvePrivateKey):
        raise FederationError(f"{path} is not an elliptic-curve private key without a password; use the one that was made")
    return loaded


def _offer(invitation: Invitation, run: int) -> bytes:
    return f"effuse terms\n{run}\n{invitation.name}\n{invitation.digest}\n{invitation.owner}\n".encode()


def _authority() -> tuple[ec.EllipticCurvePrivateKey, x509.Certificate]:
    key = ec.generate_private_key(ec.SECP384R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "effuse federation authority")])
    builder = _builder(name, name, key).add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    usage = x509.KeyUsage(
        digital_signature=True,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=True,
        crl_sign=True,
        encipher_only=False,
        decipher_only=False,
    )
    return key, builder.add_extension(usage, critical=True).sign(key, hashes.SHA384())


def _server(
    ca_key: ec.EllipticCurvePrivateKey, ca: x509.Certificate, hosts: Sequence[str]
) -> tuple[ec.EllipticCurvePrivateKey, x509.Certificate]:
    key = ec.generate_private_key(ec.SECP384R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "effuse server")])
    issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(ca_key.public_key())
    builder = _builder(name, ca.subject, key).add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
    builder = builder.add_extension(x509.SubjectAlternativeName([_host(h) for h in hosts]), critical=False)
    return key, builder.add_extension(issuer, critical=False).sign(ca_key, hashes.SHA384())


def _builder(subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    made = x509.CertificateBuilder().subject_name(subject).issuer_name(issuer).public_key(key.public_key())
    made = made.serial_number(x509.random_serial_number()).not_valid_before(now - datetime.timedelta(days=1))
    made = made.not_valid_after(now + datetime.timedelta(days=DAYS))
    return made.add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)


def _host(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)


def _private(key: ec.EllipticCurvePrivateKey) -> bytes:
    form = serialization.PrivateFormat.PKCS8
    return key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption())


def _write(path: Path, blob: bytes, secret: bool = False) -> None:
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        if secret:
            path.parent.chmod(0o700)
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600 if secret else 0o644), "wb") as file:
            file.write(blob)


def _existing(path: Path, what: str, source: str) -> Path:
    if not path.is_file():
        raise FederationError(f"{path} is missing; give {what} with --keys, from {source}")
    return path
