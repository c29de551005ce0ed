"""The broker: sessions and descriptors over a SOCK_SEQPACKET Unix socket.

A connection is a session. Who connects is the kernel's word: credentials and a
pidfd. Who sends each packet too: a child that inherited the socket is refused.
"""

from vmmd.broker.broker import Broker

__all__ = ["Broker"]
