"""The gateway's settings. Every field is a variable SHOAL_GATEWAY_<FIELD>."""

import ipaddress
from typing import ClassVar, Self

from pydantic import Field, model_validator

from mesh.settings import ModelSettings


class GatewaySettings(ModelSettings):
    """Read once in `__main__`; handed down as what each part needs. `model` may be a comma-separated list."""

    service: ClassVar[str] = "GATEWAY"

    http_port: int = Field(8000, ge=0, le=65535, description="Port of the OpenAI HTTP API. 0 = any free port.")
    grpc_port: int = Field(50051, ge=0, le=65535, description="Port of the gRPC API. 0 = any free port.")
    redis_url: str = Field(
        "", description="Redis that holds the tenants' buckets; it must not evict. Empty = buckets of this process."
    )
    tenants_file: str = Field(
        "", description="TOML file of API keys and tenants (gateway/tenants.py). Empty = no keys are asked for."
    )
    client_certs: str = Field(
        "none",
        pattern="^(none|required)$",
        description="With TLS: required = only clients that show a certificate of the CA come in, by HTTP or gRPC.",
    )
    allow_anonymous: bool = Field(
        False, description="Serve without API keys although `host` is not loopback. Without it such a start is refused."
    )
    sse_commit_s: float = Field(
        10.0,
        ge=0,
        description="Most seconds that a stream's HTTP status waits for the first result, so that early failures are"
        " true 4xx and 5xx.",
    )
    request_timeout_s: float = Field(600.0, gt=0, description="Most seconds from a request's arrival to its end.")
    queue_timeout_s: float = Field(60.0, gt=0, description="Most seconds of one wait in the scheduler's queue.")
    no_scheduler_s: float = Field(
        2.0, ge=0, description="Seconds that a new request waits for a scheduler when none answers, before its 503."
    )
    max_body_bytes: int = Field(8 * 1024 * 1024, ge=1024, description="Largest request; more is a 413.")
    body_timeout_s: float = Field(
        30.0, gt=0, description="Seconds that a client may take to send a request's headers, and as many for its body."
    )
    max_choices: int = Field(16, ge=1, le=16, description="Largest `n`.")
    max_in_flight: int = Field(
        1024, ge=1, description="Requests that this process works on at once; more get a 503 with Retry-After."
    )
    max_connections: int = Field(
        0,
        ge=0,
        description="Most HTTP connections at once; the longest idle gives way, else a new one gets a 503."
        " 0 = half of the file descriptors, 8192 at most.",
    )
    client_write_timeout_s: float = Field(
        30.0, gt=0, description="Seconds without progress after which a client that does not read is cut off."
    )
    cut_s: float = Field(
        2.0, ge=0, description="After drain_s: seconds for the in-band errors of what was cut to leave."
    )

    @property
    def models(self) -> tuple[str, ...]:
        """Each model of the list, once, in order."""
        return tuple(dict.fromkeys(filter(None, (name.strip() for name in self.model.split(",")))))

    @model_validator(mode="after")
    def _have_certificates_to_ask_for(self) -> Self:
        if self.client_certs == "required" and not self.tls_dir:
            raise ValueError(
                "client_certs is required and TLS is off: set SHOAL_TLS_DIR, or SHOAL_GATEWAY_CLIENT_CERTS=none"
            )
        return self

    @model_validator(mode="after")
    def _ask_for_keys_outside_loopback(self) -> Self:
        if not self.tenants_file and not self.allow_anonymous and not _is_loopback(self.host):
            raise ValueError(
                f"host {self.host} is not loopback and there are no API keys: set SHOAL_GATEWAY_TENANTS_FILE, or"
                " SHOAL_GATEWAY_ALLOW_ANONYMOUS=true to serve anyone"
            )
        return self


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"
