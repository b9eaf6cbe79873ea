"""Why a URL does not answer as an OpenAI server, in words that say what to write instead."""

import ssl
import urllib.error
from http import HTTPStatus
from http.client import BadStatusLine
from urllib.parse import urlsplit

from mesh.bench.report import CannotMeasure
from mesh.cli.reach import answers, speaks_http, speaks_tls


def why_not(base: str, error: Exception) -> CannotMeasure:
    """What to tell of `error`, with which asking `base` for its models ended. May ask it what it speaks instead."""
    said = f"{base}/v1/models does not answer as an OpenAI server"
    if isinstance(error, urllib.error.HTTPError):
        error.close()  # it is the answer, with its connection
        if error.code in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN):
            return CannotMeasure(f"{base} wants an API key ({error}): give one with --api-key KEY, or SHOAL_API_KEY")
        return CannotMeasure(f"{said}: {error}")
    reason = error.reason if isinstance(error, urllib.error.URLError) else error
    if isinstance(reason, ssl.SSLCertVerificationError):
        return CannotMeasure(f"{base} is not trusted ({reason.verify_message}): name its CA with --ca FILE")
    if not base.startswith(("http://", "https://")):
        return CannotMeasure(f"{base} is no URL: write http://HOST:PORT, or grpc://HOST:PORT for Shoal's gRPC")
    other = _other_way(base) if _speaks_otherwise(reason) else ""
    return CannotMeasure(f"{said}: {other or error}")


def _speaks_otherwise(reason: object) -> bool:
    """Whether it looks as if something else than HTTP, or the wrong kind of it, were spoken there."""
    if isinstance(reason, ssl.SSLError | ConnectionResetError):  # RemoteDisconnected is one, too
        return True
    return isinstance(reason, BadStatusLine) and not str(reason).strip().isprintable()  # binary


def _other_way(base: str) -> str:
    """What is spoken there instead, and how to name that; empty where nobody listens or none of it is known."""
    parts = urlsplit(base)
    address = parts.netloc.rpartition("@")[2]
    if parts.port is None:
        address += ":443" if parts.scheme == "https" else ":80"
    grpc_advice = f"it is a gRPC port: write grpc://{address}"
    if speaks_tls(address, "http/1.1"):
        return (
            f"it speaks TLS: write https://{address}, and name its CA with --ca FILE" if parts.scheme == "http" else ""
        )
    if speaks_tls(address):
        return f"{grpc_advice}, and name its CA with --ca FILE"
    if answers(address, None):
        return grpc_advice
    return f"it speaks no TLS: write http://{address}" if parts.scheme == "https" and speaks_http(address) else ""
