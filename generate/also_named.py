"""also_named: parameters under a second name, the one that users of nanochat know."""

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def also_named(**names: str) -> Callable[[Callable[Arguments, Result]], Callable[Arguments, Result]]:
    """Decorate a function that takes each parameter also under another name: other name=own name. Both at once is the
    TypeError that it is without."""

    def decorate(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
        @functools.wraps(function)
        def call(*arguments: Arguments.args, **options: Arguments.kwargs) -> Result:
            for other, own in names.items():
                if other in options and own not in options:
                    options[own] = options.pop(other)
            return function(*arguments, **options)

        return call

    return decorate
