"""Who may look at the page, and who may press its buttons.

On loopback everybody on this machine may look. Anywhere else nothing is shown without the token, and buttons need it
everywhere. Requests of other sites' pages are kept out: on loopback by the Host header (a name that was made to point
to this machine), in front of the buttons by the token's own header, which no other site can send.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field

TOKEN_HEADER = "x-token"


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach such an address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def host_of(header: str) -> str:
    """The name in a Host header, without the port: `[::1]:8642` is ::1."""
    if header.startswith("["):
        return header[1:].partition("]")[0]
    return header.partition(":")[0]


@dataclass(frozen=True, slots=True)
class Access:
    """The rules of one dashboard, which listens at `host`:`port`."""

    host: str
    port: int
    token: str = field(default_factory=lambda: secrets.token_urlsafe(24), repr=False)

    @property
    def open(self) -> bool:
        """Whether looking needs no token."""
        return is_loopback(self.host)

    @property
    def cookie(self) -> str:
        """Browsers keep cookies by host name and forget the port: two dashboards must not take each other's."""
        return f"vla_stream_{self.port}"

    @property
    def look_key(self) -> str:
        """What that cookie holds: leave to look, from which the token cannot be found."""
        return hashlib.sha256(f"look {self.token}".encode()).hexdigest()

    def is_ours(self, host_header: str) -> bool:
        """On loopback a page under another name is another site's. Elsewhere the token keeps those out."""
        return not self.open or is_loopback(host_of(host_header))

    def fits(self, token: str | None) -> bool:
        return token is not None and hmac.compare_digest(token.encode(), self.token.encode())

    def may_look(self, token: str | None, cookies: Mapping[str, str]) -> bool:
        """token: from the address or the header."""
        key = cookies.get(self.cookie, "")
        return self.open or self.fits(token) or hmac.compare_digest(key.encode(), self.look_key.encode())
