"""Certificates, keys and signatures of a federation in deployment.

    python credentials.py server FOLDER --hosts NAME...   # what the server machine needs
    python credentials.py node FOLDER                     # the key of a node
    python credentials.py data FILE CLIENT                # made-up texts, as data of a node
    python credentials.py sign APP KEY FOLDER             # an app that nodes shall run
    python credentials.py register SUPERLINK KEY.pub...   # nodes that may take part

Each process has a folder with what it needs and no more: docs/deployment.md says who has what.
"""

import argparse
import base64
import datetime
import hashlib
import ipaddress
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
from flwr.cli.build import build_fab_from_disk
from flwr.supercore.primitives.asymmetric_ed25519 import (
    create_message_to_sign,
    load_private_key,
    sign_message,
)

VALID_DAYS, AUTHORITY_DAYS = 30, 3650
"""The authority outlives the certificates that it issues, so that nodes keep their ca.crt."""

OPERATOR = "operator"
"""The name of the signing key in a node's list of trusted entities."""

CLASSES = ("other", "health")
TEXTS = 40
"""Private texts of a node."""


def write(path: Path, content: bytes, mode: int = 0o600) -> None:
    """Writes a file whole, with this mode from the beginning, in folders of the owner alone."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}")
    draft.unlink(missing_ok=True)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
    with open(draft, "wb", opener=lambda name, _: os.open(name, flags, mode)) as file:
        file.write(content)
    draft.replace(path)


# --- certificates ---------------------------------------------------------------------------


def make_authority(folder: Path) -> None:
    """Writes ca.key and ca.crt, which issue the certificates of a federation, if there are none."""
    if (folder / "ca.crt").exists():
        return
    key = ec.generate_private_key(ec.SECP256R1())
    extensions = [x509.BasicConstraints(ca=True, path_length=None), _usage(issues=True)]
    certificate = _certificate("fedleak CA", key, key, extensions, AUTHORITY_DAYS)
    write(folder / "ca.key", _pem(key))
    write(folder / "ca.crt", certificate, 0o644)


def issue(authority: Path, folder: Path, hosts: Sequence[str], days: float = VALID_DAYS) -> None:
    """Writes a new server.key, its certificate server.pem, and the ca.crt that it rests on.

    Args:
        authority: The folder of `make_authority`.
        folder: Where.
        hosts: Names and addresses by which the server is reached.
        days: After which it expires; negative: it has expired.
    """
    key = ec.generate_private_key(ec.SECP256R1())
    issuer = serialization.load_pem_private_key((authority / "ca.key").read_bytes(), None)
    assert isinstance(issuer, ec.EllipticCurvePrivateKey)
    extensions = [
        x509.BasicConstraints(ca=False, path_length=None),
        x509.SubjectAlternativeName([_name(host) for host in hosts]),
        x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]),
        _usage(issues=False),
    ]
    certificate = _certificate(hosts[0], key, issuer, extensions, days)
    write(folder / "server.key", _pem(key))
    write(folder / "server.pem", certificate, 0o644)
    write(folder / "ca.crt", (authority / "ca.crt").read_bytes(), 0o644)


def _certificate(
    subject: str,
    key: ec.EllipticCurvePrivateKey,
    issuer: ec.EllipticCurvePrivateKey,
    extensions: Sequence[x509.ExtensionType],
    days: float,
) -> bytes:
    now = datetime.datetime.now(datetime.UTC)
    names = [
        x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        for name in (subject, "fedleak CA")
    ]
    builder = (
        x509.CertificateBuilder()
        .subject_name(names[0])
        .issuer_name(names[1])
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now + datetime.timedelta(days=min(0.0, days) - 1))
        .not_valid_after(now + datetime.timedelta(days=days))
    )
    for extension in [
        x509.SubjectKeyIdentifier.from_public_key(key.public_key()),
        x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer.public_key()),
        *extensions,
    ]:
        critical = isinstance(extension, x509.BasicConstraints)
        builder = builder.add_extension(extension, critical=critical)
    return builder.sign(issuer, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)


def _usage(*, issues: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not issues,
        key_cert_sign=issues,
        crl_sign=issues,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _name(host: str) -> x509.GeneralName:
    with suppress(ValueError):
        return x509.IPAddress(ipaddress.ip_address(host))
    return x509.DNSName(host)


def _pem(
    key: ec.EllipticCurvePrivateKey | ed25519.Ed25519PrivateKey,
    form: serialization.PrivateFormat = serialization.PrivateFormat.PKCS8,
) -> bytes:
    unencrypted = serialization.NoEncryption()
    return key.private_bytes(serialization.Encoding.PEM, form, unencrypted)


# --- keys and signatures --------------------------------------------------------------------


def make_node_key(path: Path) -> None:
    """Writes the key of a SuperNode and, beside it, its public half, if there is none."""
    if not path.exists():
        _write_ssh_key(path, ec.generate_private_key(ec.SECP384R1()))


def make_signing_key(path: Path) -> None:
    """Writes the key that signs apps and, beside it, its public half, if there is none."""
    if not path.exists():
        _write_ssh_key(path, ed25519.Ed25519PrivateKey.generate())


def trusted_entities(signing_key: Path) -> bytes:
    """Returns what `flower-supernode --trusted-entities` reads: whose apps a node runs."""
    public = signing_key.with_suffix(".pub").read_text().strip()
    return json.dumps({OPERATOR: public}).encode()  # which is YAML, too


def sign(app: Path, signing_key: Path, folder: Path) -> Path:
    """Signs the bundle that `flwr run` makes of an app; returns the signature's file in `folder`.

    Args:
        app: Its folder.
        signing_key: Of `make_signing_key`, or an ed25519 key of `ssh-keygen`.
        folder: Where the gateway looks for signatures.
    """
    digest = hashlib.sha256(build_fab_from_disk(app))
    signed_at = int(time.time())
    message = create_message_to_sign(digest.digest(), signed_at)
    signature = base64.urlsafe_b64encode(sign_message(load_private_key(signing_key), message))
    file = folder / f"{digest.hexdigest()}.json"
    entry = {"signature": signature.decode(), "signed_at": signed_at}
    write(file, json.dumps({OPERATOR: entry}).encode(), 0o644)
    return file


def _write_ssh_key(path: Path, key: ec.EllipticCurvePrivateKey | ed25519.Ed25519PrivateKey) -> None:
    encoding, form = serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH
    write(path.with_suffix(".pub"), key.public_key().public_bytes(encoding, form) + b"\n", 0o644)
    write(path, _pem(key, serialization.PrivateFormat.OpenSSH))


# --- folders --------------------------------------------------------------------------------


def make_server(folder: Path, hosts: Sequence[str], days: float = VALID_DAYS) -> None:
    """Writes what the server machine needs, a folder for each process.

    Keys stay as they are. The certificates of SuperLink and gateway are new each time.

    Args:
        folder: Of the folders `ca`, `superlink`, `gateway`, `operator` and `nodes`; the last has
            what each node is given.
        hosts: Names and addresses by which nodes reach the gateway.
        days: After which the certificates expire.
    """
    make_authority(folder / "ca")
    issue(folder / "ca", folder / "superlink", ["superlink", "localhost", "127.0.0.1"], days)
    issue(folder / "ca", folder / "gateway", [*hosts, "localhost", "127.0.0.1"], days)
    make_signing_key(folder / "operator" / "signing")
    authority = (folder / "ca" / "ca.crt").read_bytes()
    for reader in ("operator", "nodes"):
        write(folder / reader / "ca.crt", authority, 0o644)
    entities = trusted_entities(folder / "operator" / "signing")
    write(folder / "nodes" / "trusted.yaml", entities, 0o644)


def make_data(path: Path, client: int) -> None:
    """Writes made-up private texts of a client, which no other has, if there are none."""
    from fedleak.data.notes import notes

    if path.exists():
        return
    # The server holds out the first of all notes.
    own = notes(1000)[200 + client * TEXTS :][:TEXTS]
    rows = [json.dumps({"text": note.text, "label": CLASSES[note.label]}) for note in own]
    write(path, ("\n".join(rows) + "\n").encode())


def register(superlink: str, keys: Sequence[Path]) -> int:
    """Registers public keys with a SuperLink; those that are registered stay so."""
    for key in keys:
        done = subprocess.run(
            ["flwr", "supernode", "register", str(key), superlink],
            capture_output=True,
            text=True,
            check=False,
        )
        output = done.stdout + done.stderr
        if done.returncode and "already" not in output:
            print(f"{key}: {output}", file=sys.stderr)
            return 1
        print(f"{key}: registered")
    return 0


def main() -> int:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    commands = parser.add_subparsers(required=True, dest="command")
    server = commands.add_parser("server")
    server.add_argument("folder", type=Path)
    server.add_argument("--hosts", nargs="+", required=True)
    node = commands.add_parser("node")
    node.add_argument("folder", type=Path)
    data = commands.add_parser("data")
    data.add_argument("file", type=Path)
    data.add_argument("client", type=int)
    signing = commands.add_parser("sign")
    for name in ("app", "key", "folder"):
        signing.add_argument(name, type=Path)
    registering = commands.add_parser("register")
    registering.add_argument("superlink")
    registering.add_argument("keys", type=Path, nargs="+")
    given = parser.parse_args()
    match given.command:
        case "server":
            make_server(given.folder, given.hosts)
        case "node":
            make_node_key(given.folder / "key")
        case "data":
            make_data(given.file, given.client)
        case "sign":
            print(f"signed: {sign(given.app, given.key, given.folder)}")
        case "register":
            return register(given.superlink, given.keys)
    return 0


if __name__ == "__main__":
    sys.exit(main())
