"""Answers about one header, kept until another header is asked about: contracts share most of their questions."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import TypeVar

from qconvert.formats.tensors import HeaderView

Answer = TypeVar("Answer")


def once_a_view(ask: Callable[[HeaderView], Answer]) -> Callable[[HeaderView], Answer]:
    """Remember the answer for the last view object. Callers change neither answers nor what a view holds."""
    last: tuple[HeaderView, Answer] | None = None

    @wraps(ask)
    def asked(view: HeaderView) -> Answer:
        nonlocal last
        if last is None or last[0] is not view:
            last = view, ask(view)
        return last[1]

    return asked
