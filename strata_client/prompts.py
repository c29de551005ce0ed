"""The prompts that a command line means: arguments, files, standard input."""

import os
import sys

import click


class ClientError(Exception):
    """The command cannot be carried out; the message is one line for a person."""


def prompt_text(prompt: str | None, prompt_file: str | None, name: str = "the prompt") -> str:
    """A prompt's characters. Errors: `UsageError` (two prompts), `ClientError` (`name` is not UTF-8, no access)."""
    from strata_client.text import read_prompt_file

    if prompt is not None and prompt_file is not None:
        raise click.UsageError("a prompt and -f were given: give one of them")
    try:
        if prompt_file is not None:
            return read_prompt_file(prompt_file)
        data = os.fsencode(prompt) if prompt is not None else sys.stdin.buffer.read() if sys.stdin else b""
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ClientError(f"{name} is not UTF-8 text: byte {error.start} is 0x{data[error.start]:02x}") from error
    except ValueError as error:
        raise ClientError(str(error)) from error
    except OSError as error:
        raise ClientError(f"cannot read {prompt_file or 'standard input'}: {error.strerror or error}") from error


def prompt_texts(prompts: tuple[str, ...], prompt_file: str | None, prompts_file: str | None) -> list[tuple[str, str]]:
    """The prompts of a batch, each with a name for errors. Errors: as `prompt_text`."""
    from strata_client.text import read_prompts_file

    if prompts_file is None:
        if len(prompts) <= 1:
            return [("", prompt_text(prompts[0] if prompts else None, prompt_file))]
        if prompt_file is not None:
            raise click.UsageError("prompts and -f were given: give one of them")
        return [
            (name := f"prompt {number}", prompt_text(prompt, None, name)) for number, prompt in enumerate(prompts, 1)
        ]
    if prompts or prompt_file is not None:
        raise click.UsageError("--prompts and another prompt were given: give one of them")
    try:
        return read_prompts_file(prompts_file)
    except ValueError as error:
        raise ClientError(str(error)) from error
    except OSError as error:
        raise ClientError(f"cannot read {prompts_file}: {error.strerror or error}") from error
