"""The structs of csrc/colibri.h as ctypes, parsed from the header: arguments of the kernels, and the kernel table."""

import ctypes
import re
import struct
from collections.abc import Callable
from ctypes import c_double, c_float, c_int, c_int32, c_int64, c_void_p
from pathlib import Path
from typing import Any

HEADER = Path(__file__).with_name("csrc") / "colibri.h"
TYPES = {"int64_t": c_int64, "int32_t": c_int32, "float": c_float, "double": c_double}
CODES = {c_void_p: "P", c_int64: "q", c_int32: "i", c_float: "f", c_double: "d"}
CALL = ctypes.CFUNCTYPE(c_int, ctypes.c_char_p)  # a kernel takes its struct, here as bytes


def fields_of(body: str) -> list[tuple[str, Any]]:
    """The fields that the declarations between the braces of a struct name, with their ctypes."""
    fields: list[tuple[str, Any]] = []
    for declaration in body.split(";")[:-1]:
        if function := re.search(r"\(\*(\w+)\)", declaration):
            fields.append((function[1], CALL))
            continue
        kind, names = declaration.replace("const ", "").split(None, 1)
        fields += [(name.strip(" *"), c_void_p if "*" in name else TYPES[kind]) for name in names.split(",")]
    return fields


text = re.sub(r"/\*.*?\*/", "", HEADER.read_text(encoding="utf-8"), flags=re.DOTALL)
bodies = {name: body for body, name in re.findall(r"typedef struct \{([^}]*)\} (\w+);", text)}
# By C name, in the order in which colibri_size() numbers them.
STRUCTS: dict[str, Any] = {
    name: type(name, (ctypes.Structure,), {"_fields_": fields_of(body)}) for name, body in bodies.items()
}
# Kernel -> the struct it is called with.
CALLS = {
    kernel: STRUCTS[name] for kernel, name in re.findall(r"int \(\*(\w+)\)\(const (\w+) \*\)", bodies["kernels_t"])
}
READ_MEMORY = ctypes.CFUNCTYPE(c_int64, c_void_p, c_int64)


def packer(kind: Any) -> Callable[..., bytes]:
    """A function from the values of a struct's fields, in order, to its bytes; 0 is the null pointer."""
    codes = "".join(CODES[field] for _, field in kind._fields_)
    return struct.Struct(f"{codes}0P").pack  # 0P: filled to a whole number of pointers, as C does
