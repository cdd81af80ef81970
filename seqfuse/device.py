"""Device functions that an operation states in Triton's language, checked without Triton."""

from __future__ import annotations

from .errors import PluginError, author_line, definition_error


def check_device_functions(cls: type, takes_numbers: bool) -> None:
    """Raise unless `value` and `derivative` of a class are both there or neither, and take what kernels pass.

    What Triton made of a function has its `arg_names`; a property or descriptor is asked when a kernel is made.

    Args:
        cls: the class.
        takes_numbers: whether it states configuration numbers, which then come second.

    Raises:
        PluginError: (SF301) quoting the author's line.
    """
    functions = {name: getattr(cls, name) for name in ("value", "derivative")}
    stated = [name for name, function in functions.items() if function is not None]
    if len(stated) == 1:
        missing = next(name for name in functions if name not in stated)
        raise definition_error(cls, f"{stated[0]} is stated without {missing}; kernels need both", stated[0])
    for name in stated:
        function = functions[name]
        names: list[str] | None = getattr(function, "arg_names", None)
        if names is None and callable(function):
            raise definition_error(cls, f"{name} must be a triton.jit function", name)
        if names is not None and len(names) != 1 + takes_numbers:
            first = "x" if name == "value" else "t"
            wanted, why = (f"({first}, P)", "a P") if takes_numbers else (f"({first})", "no P")
            said = f"{name} must take {wanted}, as the class states {why}; it takes ({', '.join(names)})"
            line = author_line(getattr(function, "fn", function), "def ")
            raise PluginError(f"{said}\n    {line}", code="SF301", operation=cls.__qualname__)
