"""Whether a server runs on this machine, and as which processes, by its address."""

import ipaddress
import os
import socket

import psutil

from experiment_core_utils.config.served import ServedModel


def is_loopback(host: str) -> bool:
    """Whether every address that a host's name stands for is one of this machine's loopback."""
    try:
        found = {each[4][0] for each in socket.getaddrinfo(host, None, proto=socket.IPPROTO_TCP)}
    except OSError:
        return False
    return bool(found) and all(ipaddress.ip_address(each).is_loopback for each in found)


def listening_pids(served: ServedModel) -> tuple[int, ...]:
    """Processes of this machine, without this one, that listen at a server's port; none where they cannot be seen."""
    if not is_loopback(served.host):
        return ()
    try:
        found = psutil.net_connections("tcp")
    except psutil.Error:
        return ()
    pids = {each.pid for each in found if each.status == psutil.CONN_LISTEN and each.laddr.port == served.port}
    return tuple(sorted(pid for pid in pids if pid is not None and pid != os.getpid()))
