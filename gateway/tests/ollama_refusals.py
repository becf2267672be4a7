"""Checks errors of Ollama's own Python client, for the scripts beside this one."""

from ollama import ResponseError


def check_refusals(cases) -> None:
    """Cases are calls, each with the status and the words of its error."""
    for refused, status, words in cases:
        try:
            refused()
        except ResponseError as error:
            assert error.status_code == status and words in error.error, error
        else:
            raise AssertionError(words)
