"""Whether a server runs on this machine, by its address."""

import ipaddress
import socket


def is_loopback(host: str) -> bool:
    """Whether every address that a host's name stands for is one of this machine's loopback."""
    try:
        found = {each[4][0] for each in socket.getaddrinfo(host, None, proto=socket.IPPROTO_TCP)}
    except OSError:
        return False
    return bool(found) and all(ipaddress.ip_address(each).is_loopback for each in found)
