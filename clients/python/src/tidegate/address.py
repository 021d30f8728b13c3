"""Determines the client's address behind proxies.

Each proxy appends the address of its own peer to a header. So the entries on the right were written
by trusted machines, and the walk begins there:

    X-Forwarded-For:  6.6.6.6,         198.51.100.7,      10.0.0.2          peer 10.0.0.1
                      sent by the      peer of 10.0.0.2:  peer of 10.0.0.1: of the socket:
                      client: ignored  not trusted,       trusted,          trusted
                                       so the client      continue          ◀── the walk begins here

1. If the peer of the socket is not trusted, it is the client, and no header is read.
2. Otherwise the entries of one header are read from the right, across all its lines. The first that
   is not trusted is the client.
3. An entry that is not an address ends the walk, and the previous hop is the client.
4. If all entries are trusted, the leftmost one is the client. If there are no entries, the peer is.

An IPv6 host owns a whole network, so clients are counted by /64. An IPv6 address that contains an
IPv4 address (mapped, `64:ff9b::/96`, `2002::/16`) is counted as the IPv4 address.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Union

from .errors import InvalidInput

IPAddress = Union[ipaddress.IPv4Address, ipaddress.IPv6Address]
_Network = Union[ipaddress.IPv4Network, ipaddress.IPv6Network]

_ENTRIES_MAX = 100
_HEADER_BYTES_MAX = 16 * 1024
_NODE_BYTES_MAX = 128
_NETWORK_BYTES_MAX = 64
#: IPv6 networks whose addresses contain an IPv4 address, and the number of bits before it.
_EMBEDDING = ((0xFFFF << 32, 96), (0x0064_FF9B << 96, 96), (0x2002 << 112, 16))
_ZONE = re.compile(r"[A-Za-z0-9\-._~]+")
_TOKEN = re.compile(r"[A-Za-z0-9!#$%&'*+\-.^_`|~]+")
_WITHOUT_ADDRESS = ("x-forwarded-host", "x-forwarded-port", "x-forwarded-proto")
#: The peer of a request that came through a Unix socket or from a test client.
LOCAL_PEER = ipaddress.IPv4Address("127.0.0.1")


class TrustedProxies:
    """The proxies that are trusted to report client addresses, and the header in which they do.

    `networks` are strings such as `10.0.0.0/8` or `192.0.2.7`; none by default. `header` is one
    header name, by default `X-Forwarded-For`. Raises `InvalidInput` if one of them is malformed.
    """

    def __init__(self, networks: Iterable[str] = (), header: str = "X-Forwarded-For") -> None:
        if isinstance(networks, str):
            raise InvalidInput("trusted_proxies must be a list such as ['10.0.0.0/8']")
        self._networks = [_parse_network(text) for text in networks]
        if not isinstance(header, str) or not _TOKEN.fullmatch(header):
            raise InvalidInput("expected the name of one header, such as X-Forwarded-For")
        self.header = header.lower()
        if self.header in _WITHOUT_ADDRESS:
            raise InvalidInput(
                f"the header {header} contains no address; expected one such as X-Forwarded-For"
            )

    def client_address(self, peer: str | None, lines: Sequence[str]) -> IPAddress:
        """Returns the client's address, given the peer of the socket and all lines of the
        forwarding header.

        A peer that is not an IP address (a Unix socket) is treated as 127.0.0.1.
        """
        hop = parse_peer(peer)
        if not self._trusts(hop):
            return hop
        for address in self._hops_from_right(lines):
            if address is None:
                break
            hop = address
            if not self._trusts(hop):
                break
        return hop

    def _trusts(self, address: IPAddress) -> bool:
        if not self._networks:
            return False
        embedded = _embedded_v4(address)
        return any(embedded in network or address in network for network in self._networks)

    def _hops_from_right(self, lines: Sequence[str]) -> Iterator[IPAddress | None]:
        entries_left, bytes_left = _ENTRIES_MAX, _HEADER_BYTES_MAX
        is_forwarded = self.header == "forwarded"
        for line in reversed(lines):
            # The server has decoded the bytes of a header as Latin-1, so a character is a byte.
            rest: str | None = line[max(0, len(line) - bytes_left) :]
            assert rest is not None
            is_cut = len(rest) < len(line)
            bytes_left -= len(rest)
            while rest is not None:
                if entries_left == 0:
                    return
                entries_left -= 1
                comma = _last_comma(rest) if is_forwarded else rest.rfind(",")
                if comma < 0 and is_cut:
                    yield None
                    return
                entry = rest[comma + 1 :]
                rest = rest[:comma] if comma >= 0 else None
                node = _parse_for(entry) if is_forwarded else entry
                yield None if node is None else _parse_node(node)


def parse_peer(peer: str | None) -> IPAddress:
    """Returns the address of a socket's peer.

    A peer that is not an IP address is treated as 127.0.0.1.
    """
    try:
        return _canonical(ipaddress.ip_address((peer or "").partition("%")[0]))
    except ValueError:
        return LOCAL_PEER


def address_subject(address: IPAddress) -> str:
    """Returns the subject of a client: `ip:203.0.113.9` or `ip:2001:db8:1:2::/64`."""
    address = _embedded_v4(address)
    if address.version == 4:
        return f"ip:{address}"
    return f"ip:{ipaddress.IPv6Network((int(address) >> 64 << 64, 64))}"


def _canonical(address: IPAddress) -> IPAddress:
    """Returns an IPv4-mapped address as IPv4, and any other one as it is."""
    if address.version == 6 and address.ipv4_mapped is not None:
        return address.ipv4_mapped
    return address


def _embedded_v4_network(bits: int, prefix: int) -> tuple[int, int] | None:
    for embedding, before in _EMBEDDING:
        if prefix >= before and (bits ^ embedding) >> (128 - before) == 0:
            return bits >> (96 - before) & 0xFFFF_FFFF, min(prefix - before, 32)
    return None


def _embedded_v4(address: IPAddress) -> IPAddress:
    if address.version == 4:
        return address
    found = _embedded_v4_network(int(address), 128)
    return address if found is None else ipaddress.IPv4Address(found[0])


def _parse_network(text: str) -> _Network:
    form = "networks and addresses have the form 10.0.0.0/8, 203.0.113.7, 2001:db8::/32 or ::1"
    if not isinstance(text, str):
        raise InvalidInput(f"expected a network as a string; {form}")
    shown = text[:_NETWORK_BYTES_MAX]
    _, slash, bits = text.partition("/")
    if (
        len(text) > _NETWORK_BYTES_MAX
        or "%" in text
        or (slash and not re.fullmatch("[0-9]{1,3}", bits))
    ):
        raise InvalidInput(f"expected a network (found {shown!r}); {form}")
    try:
        network = ipaddress.ip_network(text)
    except ValueError as error:
        raise InvalidInput(f"expected a network: {error} (found {shown!r}); {form}") from None
    if network.version == 6:
        found = _embedded_v4_network(int(network.network_address), network.prefixlen)
        if found is not None:
            return ipaddress.IPv4Network(found)
    return network


def _parse_node(entry: str) -> IPAddress | None:
    """Parses an entry of a forwarding header: an address, optional port, brackets and zone."""
    if len(entry) > _NODE_BYTES_MAX:
        return None
    text = entry.strip(" \t")
    try:
        if text.startswith("["):
            inside, bracket, after = text[1:].partition("]")
            if not bracket or (after and not (after[0] == ":" and _is_port(after[1:]))):
                return None
            return _parse_v6(inside)
        if text.count(":") <= 1:
            v4, colon, port = text.partition(":")
            return ipaddress.IPv4Address(v4) if not colon or _is_port(port) else None
        return _parse_v6(text)
    except ValueError:
        return None


def _parse_v6(text: str) -> IPAddress | None:
    address, percent, zone = text.partition("%")
    if percent and not _ZONE.fullmatch(zone):
        return None
    return _canonical(ipaddress.IPv6Address(address))


def _is_port(port: str) -> bool:
    if port.startswith("_"):
        return bool(_ZONE.fullmatch(port[1:]))
    return bool(re.fullmatch("[0-9]+", port)) and len(port.lstrip("0")) <= 5 and int(port) <= 65535


def _last_comma(line: str) -> int:
    """Returns the index of the last comma that separates two elements of `Forwarded`, or -1.

    Quotes are paired from the right, so that a client cannot quote what a proxy appends.
    """
    is_quoted = False
    for at in range(len(line) - 1, -1, -1):
        char = line[at]
        if char == "," and not is_quoted:
            return at
        if char == '"' and not (is_quoted and at > 0 and line[at - 1] == "\\"):
            is_quoted = not is_quoted
    return -1


def _parse_for(element: str) -> str | None:
    """Returns the only `for` of an element of `Forwarded`, or `None` if it is malformed."""
    whitespace = " \t\n\r\f"
    rest, node = element.strip(whitespace), None
    while True:
        name, equals, rest = rest.partition("=")
        if not equals or not _TOKEN.fullmatch(name):
            return None
        split = _split_value(rest)
        if split is None:
            return None
        value, after = split
        if name.lower() == "for":
            if node is not None:
                return None
            node = value
        after = after.lstrip(whitespace)
        if not after:
            return node
        if after[0] != ";":
            return None
        rest = after[1:].lstrip(whitespace)


def _split_value(text: str) -> tuple[str, str] | None:
    if not text.startswith('"'):
        plain = re.match(r"[^; \t]*", text)
        value = plain.group() if plain else ""
        return (value, text[len(value) :]) if value and not re.search(r'["\\=]', value) else None
    quoted = re.match(r'"((?:[^"\\]|\\.)*)"', text, re.DOTALL)
    if quoted is None:
        return None
    return re.sub(r"\\(.)", r"\1", quoted.group(1), flags=re.DOTALL), text[quoted.end() :]
