"""Writing a GGUF file through the package gguf: metadata, the list of tensors, and one tensor after the other."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from octavo.artifact.atomic_folder import locked_folder, write_error


@dataclass(frozen=True)
class Content:
    """The tensors of a file: shape and type (f32, f16 or q8_0) by name, and their data in float32 in the same order."""

    shapes: Mapping[str, tuple[tuple[int, ...], str]]
    data: Iterable[Tensor]


def write_file(gguf: Any, path: Path, architecture: str, metadata: Mapping[str, Any], content: Content) -> int:
    """Write the file `path`, which appears whole or not at all, and return its size in bytes.

    Args:
        gguf: the package.
        path: of the file.
        architecture: its name in GGUF.
        metadata: keys and values: numbers, booleans, strings, and lists of them.
        content: the tensors.

    Raises:
        LockedError: another program writes the file.
        WriteError: the disk is full, or refused the write for another reason.
    """
    with locked_folder(path):
        return _write(gguf, path, architecture, metadata, content)


def _write(gguf: Any, path: Path, architecture: str, metadata: Mapping[str, Any], content: Content) -> int:
    partial = path.parent / f".{path.name}.partial"
    writer = gguf.GGUFWriter(partial, architecture)
    types = {name: gguf.GGMLQuantizationType[kind.upper()] for name, (_, kind) in content.shapes.items()}
    try:
        for key, value in metadata.items():
            _add(writer, key, value)
        for name, (shape, _) in content.shapes.items():
            stored = gguf.quant_shape_to_byte_shape(shape, types[name]) if types[name].name == "Q8_0" else shape
            dtype = np.dtype({"F32": "float32", "F16": "float16"}.get(types[name].name, "uint8"))
            writer.add_tensor_info(name, stored, dtype, int(np.prod(stored)) * dtype.itemsize, raw_dtype=types[name])
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for (name, (shape, _)), tensor in zip(content.shapes.items(), content.data, strict=True):
            if tuple(tensor.shape) != tuple(shape):
                raise ValueError(f"{name} must have the shape {list(shape)}, got {list(tensor.shape)}")
            writer.write_tensor_data(gguf.quantize(tensor.contiguous().numpy(), types[name]))
        writer.close()
        partial.rename(path)
        return path.stat().st_size
    except OSError as error:
        raise write_error(path, error) from error
    finally:
        writer.close()
        partial.unlink(missing_ok=True)


def _add(writer: Any, key: str, value: Any) -> None:
    """Add a key and its value, in the type that readers expect."""
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    elif value:  # the format has no type for the elements of an empty list
        writer.add_array(key, value)
