"""Mutual TLS inside the mesh: who a process is, whom it believes, and the credentials made of both.

A folder holds `ca.pem` and, for each identity, `NAME.pem` (certificate, then its chain) and `NAME.key`. The
certificate of `gateway` carries the name `gateway.shoal`, and so on: replicas share one, wherever they run. Every check
is OpenSSL's own: the process shakes hands with itself in memory, so what is refused here is what a peer would refuse.

Files are looked at again for each new connection. New ones are used from then on; a set that cannot be used is logged
once and the former one stays. The probe of containers imports this: no settings, nothing heavy.
"""

import logging
import ssl
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import grpc

GATEWAY, SCHEDULER, WORKER, CACHE = "gateway", "scheduler", "worker", "cache"
# Whoever operates the mesh: the `shoal` command.
OPERATOR = "operator"
IDENTITIES = (GATEWAY, SCHEDULER, WORKER, CACHE, OPERATOR)
ADVICE = "`shoal certs` makes a set"

# X.509 verification results (OpenSSL's x509_vfy.h) that we have better words for.
_NOT_YET, _EXPIRED, _OTHER_NAME = 9, 10, 62
_UNKNOWN_ISSUER = (2, 7, 18, 19, 20, 21)

log = logging.getLogger("shoal.tls")


class TlsError(Exception):
    """Certificates that cannot be used. The message names the file and says what to do."""


def server_name(identity: str) -> str:
    """The name in an identity's certificate."""
    return f"{identity}.shoal"


@dataclass(frozen=True, slots=True)
class Paths:
    """Where one identity's three files are."""

    ca: Path
    certificate: Path
    key: Path

    @classmethod
    def of(cls, folder: Path, identity: str) -> "Paths":
        return cls(folder / "ca.pem", folder / f"{identity}.pem", folder / f"{identity}.key")

    def stamp(self) -> tuple[tuple[int, int, int], ...]:
        """Changes whenever a file does."""
        return tuple(map(_stamp, (self.ca, self.certificate, self.key)))


@dataclass(frozen=True, slots=True)
class Pems:
    """What the three files hold; `expires_at` is the Unix time at which each certificate file ends."""

    ca: bytes
    certificate: bytes
    key: bytes
    expires_at: dict[str, float]


class Tls:
    """One identity out of a folder. Raises TlsError if it could not be used now."""

    def __init__(self, folder: Path, identity: str) -> None:
        self.identity = identity
        self.paths = Paths.of(folder, identity)
        self._lock = threading.Lock()  # gRPC asks from threads of its own
        self._seen = self.paths.stamp()
        self._pems = read(self.paths, identity)

    def current(self) -> Pems:
        """The files as they are now, or as they last were of use."""
        with self._lock:
            stamp = self.paths.stamp()
            if stamp == self._seen:
                return self._pems
            self._seen = stamp
            try:
                self._pems = read(self.paths, self.identity)
                log.info("new certificates from %s", self.paths.certificate.parent)
            except TlsError as error:
                log.error("the former certificates stay in use: %s", error)
            return self._pems

    def channel_credentials(self) -> grpc.ChannelCredentials:
        """For a client's channel: shows this identity, believes the CA. A channel keeps what it was made with."""
        pems = self.current()
        return grpc.ssl_channel_credentials(pems.ca, pems.key, pems.certificate)

    def server_credentials(self, *, client_certificates: bool = True) -> grpc.ServerCredentials:
        """For a server: without `client_certificates` anybody may come in, who must be dealt with otherwise."""

        def fetch() -> grpc.ServerCertificateConfiguration:
            pems = self.current()
            return grpc.ssl_server_certificate_configuration(
                [(pems.key, pems.certificate)], pems.ca if client_certificates else None
            )

        return grpc.dynamic_ssl_server_credentials(fetch(), fetch, client_certificates)

    def http_server_context(self, *, client_certificates: bool) -> ssl.SSLContext:
        """For an HTTP server; hands each new connection the files as they are then."""
        made: tuple[Pems, ssl.SSLContext] | None = None

        def fresh() -> ssl.SSLContext:
            nonlocal made
            if made is None or made[0] is not self.current():
                made = (self.current(), _context(ssl.PROTOCOL_TLS_SERVER, self.paths, client_certificates))
                made[1].set_alpn_protocols(["http/1.1"])
                if client_certificates:  # a resumed session would not be verified against a new CA
                    made[1].options |= ssl.OP_NO_TICKET
                    made[1].num_tickets = 0
            return made[1]

        def choose(connection: ssl.SSLObject, _name: str | None, _context: ssl.SSLContext) -> None:
            connection.context = fresh()

        context = fresh()
        context.sni_callback = choose
        return context

    def http_client_context(self) -> ssl.SSLContext:
        """For an HTTP client: shows this identity, believes the CA."""
        return _context(ssl.PROTOCOL_TLS_CLIENT, self.paths, True)


def read(paths: Paths, identity: str) -> Pems:
    """The files, checked as a peer would check them now. Raises TlsError."""
    ca, certificate, key = map(_bytes, (paths.ca, paths.certificate, paths.key))
    client = _context(ssl.PROTOCOL_TLS_CLIENT, paths, True)
    server = _context(ssl.PROTOCOL_TLS_SERVER, paths, True)
    ca_ends = [ssl.cert_time_to_seconds(str(ca["notAfter"])) for ca in client.get_ca_certs()]
    try:
        ends = _shake_hands(client, server, server_name(identity))
    except ssl.SSLCertVerificationError as error:
        raise TlsError(_refusal(error, paths, identity, ca_ends)) from None
    except ssl.SSLError as error:
        raise TlsError(f"{paths.certificate}: cannot be used ({error.reason}); {ADVICE}") from None
    return Pems(ca, certificate, key, {paths.certificate.name: ends, paths.ca.name: max(ca_ends, default=ends)})


def _stamp(path: Path) -> tuple[int, int, int]:
    try:
        found = path.stat()
    except OSError:
        return (0, 0, 0)
    return (found.st_mtime_ns, found.st_size, found.st_ino)


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise TlsError(f"{path}: {error.strerror}; {ADVICE}") from None


def _context(protocol: int, paths: Paths, verify: bool) -> ssl.SSLContext:
    """One end of a connection: TLS 1.2 or later, the identity, the CA. Raises TlsError for a file that is none."""
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    if verify:
        context.verify_mode = ssl.CERT_REQUIRED
        _load_ca(context, paths.ca)
    _load_ca(ssl.SSLContext(protocol), paths.certificate)  # tells a bad certificate from a bad key
    try:
        # A key with a password would make OpenSSL ask at the terminal.
        context.load_cert_chain(paths.certificate, paths.key, password="")
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise TlsError(f"{paths.key}: is not the key of {paths.certificate.name}; {ADVICE}") from None
        raise TlsError(f"{paths.key}: is no PEM key without a password; {ADVICE}") from None
    return context


def _load_ca(context: ssl.SSLContext, path: Path) -> None:
    try:
        context.load_verify_locations(path)
    except ssl.SSLError:
        raise TlsError(f"{path}: holds no PEM certificate; {ADVICE}") from None


def _shake_hands(client: ssl.SSLContext, server: ssl.SSLContext, name: str) -> float:
    """Both ends in memory, each verifying the other; returns when the certificate ends. Raises ssl.SSLError."""
    up, down = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = (client.wrap_bio(down, up, server_hostname=name), server.wrap_bio(up, down, server_side=True))
    waiting = set(ends)
    while waiting:
        for end in ends:
            try:
                end.do_handshake()
                waiting.discard(end)
            except ssl.SSLWantReadError:
                continue
    certificate = ends[0].getpeercert() or {}
    return ssl.cert_time_to_seconds(str(certificate["notAfter"]))


def _refusal(error: ssl.SSLCertVerificationError, paths: Paths, identity: str, ca_ends: Sequence[float]) -> str:
    """What to tell of a certificate that OpenSSL would not take."""
    path = paths.certificate
    if error.verify_code == _EXPIRED:
        if ca_ends and max(ca_ends) < time.time():
            path = paths.ca
        return f"{path}: has expired; put a new one there (`shoal certs --force` makes a new set)"
    if error.verify_code == _NOT_YET:
        return f"{path}: is not valid yet; is this machine's clock right?"
    if error.verify_code == _OTHER_NAME:
        return f"{path}: does not carry the name {server_name(identity)}; {ADVICE}"
    if error.verify_code in _UNKNOWN_ISSUER:
        return f"{path}: is not signed by {paths.ca.name}; {ADVICE}"
    return f"{path}: cannot be used ({error.verify_message}); {ADVICE}"
