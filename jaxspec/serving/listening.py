"""The socket that the server listens on, made before jax is imported, which takes seconds."""

import socket

from jaxspec.errors import LoadError, UsageError, one_line


def bound_socket(host: str, port: int) -> socket.socket:
    """A listening socket. It is made before anything slow, so that a port that is taken is reported
    at once."""
    try:
        [(family, kind, number, _, address), *_] = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        listening = socket.socket(family, kind, number)
    except OSError as error:
        raise UsageError(f"host is {host!r}: {one_line(error)}; expected an address") from error
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
        listening.listen(2048)
    except OSError as error:
        listening.close()
        raise LoadError(
            f"cannot listen on {host} port {port}: {one_line(error)}; choose another --port, or "
            "end what uses it"
        ) from error
    return listening
