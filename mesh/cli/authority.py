"""A certificate authority for development: signs a certificate for each identity. EC P-256, SHA-256; writes no files.

Imports the `cryptography` package, which only `shoal certs` needs: import this where it is used.
"""

import datetime
import ipaddress
from collections.abc import Iterable
from dataclasses import dataclass

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import ExtendedKeyUsageOID

from mesh.cli.problem import Problem
from mesh.tls import server_name

# For clocks that are a little behind.
EARLIER = datetime.timedelta(minutes=5)
# Of a DNS name, and of each part of it (RFC 1035).
MOST_HOST, MOST_LABEL = 253, 63


@dataclass(frozen=True, slots=True)
class Validity:
    """From when to when a certificate counts."""

    start: datetime.datetime
    end: datetime.datetime

    @classmethod
    def days(cls, days: float) -> "Validity":
        """From a little before now until that many days from now."""
        now = datetime.datetime.now(datetime.UTC)
        return cls(now - EARLIER, now + datetime.timedelta(days=days))


class Authority:
    """A CA with a key of its own. `pem` and `key_pem` are what is written down."""

    def __init__(self, valid: Validity) -> None:
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = _name("Shoal development CA")
        certificate = (
            _builder(self._name, self._name, self._key, valid)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(_usage(signs_certificates=True), critical=True)
            .sign(self._key, hashes.SHA256())
        )
        self.pem = certificate.public_bytes(Encoding.PEM)
        self.key_pem = _key_pem(self._key)

    def issue(self, identity: str, valid: Validity, hosts: Iterable[str] = ()) -> tuple[bytes, bytes]:
        """Certificate and key, as PEM, for `identity`, client and server, that is also reached as `hosts`."""
        key = ec.generate_private_key(ec.SECP256R1())
        names = [x509.DNSName(server_name(identity)), *map(_alternative, dict.fromkeys(hosts))]
        uses = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
        certificate = (
            _builder(_name(server_name(identity)), self._name, key, valid)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_usage(signs_certificates=False), critical=True)
            .add_extension(x509.ExtendedKeyUsage(uses), critical=False)
            .add_extension(x509.SubjectAlternativeName(names), critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()), critical=False)
            .sign(self._key, hashes.SHA256())
        )
        return certificate.public_bytes(Encoding.PEM), _key_pem(key)


def _alternative(host: str) -> x509.GeneralName:
    """An IP address or a DNS name. Raises Problem for what is neither."""
    try:
        return x509.IPAddress(ipaddress.ip_address(host.strip("[]")))
    except ValueError:
        pass
    labels = host.removeprefix("*.").split(".")
    fits = len(host) <= MOST_HOST and all(len(label) <= MOST_LABEL for label in labels)
    if not (fits and host.isascii() and all(label.replace("-", "").isalnum() for label in labels)):
        raise Problem(f"--host {host}: no host name and no address", "leave out scheme, port and path")
    return x509.DNSName(host)


def _name(common_name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, common_name)])


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, valid: Validity
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(valid.start)
        .not_valid_after(valid.end)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )


def _usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
