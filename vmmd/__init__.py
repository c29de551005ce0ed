"""vmmd: the daemon that owns GPU memory and arbitrates trades of it."""
