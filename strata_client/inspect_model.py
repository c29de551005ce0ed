"""What `strata-client inspect` prints of a model file."""

from strata_client.models.gguf_file import ModelFile


def inspect_lines(model_file: ModelFile) -> list[str]:
    """Lines about a model, safe to print on a terminal."""
    raise NotImplementedError
