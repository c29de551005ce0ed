"""How sizes are said to people, by the daemon's messages and the client's lines alike."""


def size_text(n_bytes: int) -> str:
    """A size in GiB, below 0.1 GiB in MiB."""
    gib = n_bytes / 2**30
    return f"{gib:.2f} GiB" if gib >= 0.1 else f"{n_bytes / 2**20:.2f} MiB"
