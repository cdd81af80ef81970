"""What Triton's intermediate representation of a kernel says about its addresses and the order of its accesses."""

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


def late_reads(ttir: str) -> int:
    """How many single values a kernel reads from a tensor that other threads of the program may have written already.

    A scalar is loaded by each thread for itself. Where a block is stored to the same tensor behind it, a reduction must
    stand between the two: its barrier is what makes all threads read before one of them writes.
    """
    base: dict[str, str] = {}
    unordered: dict[str, int] = {}
    late = 0
    for line in ttir.splitlines():
        match = _DEFINED.match(line)
        names: list[str] = _NAME.findall(line)
        if match is not None and match.group(2) in ("tt.addptr", "tt.splat", "tt.broadcast", "tt.bitcast"):
            base[names[0]] = base.get(names[1], names[1])
        elif match is not None and match.group(2) == "tt.load" and ": !tt.ptr<" in line:
            root = base.get(names[1], names[1])
            unordered[root] = unordered.get(root, 0) + 1
        elif '"tt.reduce"' in line:
            unordered.clear()
        elif " tt.store " in line and ": tensor<" in line:
            late += unordered.pop(base.get(names[0], names[0]), 0)
    return late
