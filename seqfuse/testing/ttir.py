"""What Triton's intermediate representation of a kernel says about its addresses."""

from __future__ import annotations

import re

_DEFINED = re.compile(r"^\s*(%[\w#:, %]+?)\s*=\s*(?:\"?)([\w.]+)(.*)$")
_NAME = re.compile(r"%[\w]+")


def int32_multiplications(ttir: str) -> int:
    """How many 32-bit products the addresses in a kernel's Triton IR are made of: each may wrap beyond 2^31 elements.

    Coordinates of descriptors are 32-bit by their nature and not counted.
    """
    operation: dict[str, tuple[str, list[str], str]] = {}
    carried: dict[str, list[str]] = {}
    roots: list[str] = []
    for line in ttir.splitlines():
        line = line.split(" loc(")[0]
        for name, value in re.findall(r"(%[\w]+) = (%[\w]+)", line.partition("iter_args(")[2]):
            carried.setdefault(name, []).append(value)
        match = _DEFINED.match(line)
        if match is None:
            continue
        results, kind, rest = match.groups()
        inputs = _NAME.findall(rest.partition("iter_args(")[0])
        for result in results.split(","):
            operation[result.strip().split(":")[0]] = (kind, inputs, rest)
        if kind == "tt.addptr":
            roots.extend(inputs[1:2])
    seen: set[str] = set()
    products = 0
    while roots:
        name = roots.pop().split("#")[0]
        if name in seen:
            continue
        seen.add(name)
        roots.extend(carried.get(name, ()))
        kind, inputs, rest = operation.get(name, ("", [], ""))
        if kind == "tt.load":
            continue  # an index read from memory is what it is
        products += kind == "arith.muli" and re.search(r": (?:tensor<[\dx]*x)?i32", rest) is not None
        roots.extend(inputs)
    return products
