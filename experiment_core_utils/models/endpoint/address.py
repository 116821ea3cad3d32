"""Whether a server runs on this machine, and as which processes, by its address."""

import ipaddress
import os
import socket
from collections.abc import Sequence

import psutil

from experiment_core_utils.config.served import ServedModel


def is_loopback(host: str) -> bool:
    """Whether every address that a host's name stands for is one of this machine's loopback."""
    try:
        found = {each[4][0] for each in socket.getaddrinfo(host, None, proto=socket.IPPROTO_TCP)}
    except OSError:
        return False
    return bool(found) and all(ipaddress.ip_address(each).is_loopback for each in found)


def listening_pids(served: Sequence[ServedModel]) -> list[tuple[int, ...]]:
    """Of each server the processes of this machine, without this one, that listen at its port; none where they cannot
    be seen.
    """
    try:
        found = psutil.net_connections("tcp")
    except psutil.Error:
        found = []
    others = [each for each in found if each.status == psutil.CONN_LISTEN and each.pid not in (None, os.getpid())]
    return [
        tuple(sorted({each.pid for each in others if each.laddr.port == server.port}))
        if is_loopback(server.host)
        else ()
        for server in served
    ]
