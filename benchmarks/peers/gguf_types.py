"""A GGUF file with its matrices in another type, so that peers run equal weight types.

Owns the copy only: all fields and vectors stay as they are, every matrix is de-quantised and stored
again by the `gguf` library. One tensor at a time is held in f32. Files are made once, in a folder
of the caller's, written aside and renamed.
"""

import os
from pathlib import Path

import gguf

TYPES = {
    "f32": (gguf.GGMLQuantizationType.F32, gguf.LlamaFileType.ALL_F32),
    "f16": (gguf.GGMLQuantizationType.F16, gguf.LlamaFileType.MOSTLY_F16),
    "bf16": (gguf.GGMLQuantizationType.BF16, gguf.LlamaFileType.MOSTLY_BF16),
    "q8_0": (gguf.GGMLQuantizationType.Q8_0, gguf.LlamaFileType.MOSTLY_Q8_0),
    "q4_0": (gguf.GGMLQuantizationType.Q4_0, gguf.LlamaFileType.MOSTLY_Q4_0),
    "q4_1": (gguf.GGMLQuantizationType.Q4_1, gguf.LlamaFileType.MOSTLY_Q4_1),
}


def prepared(source: Path, dtype: str, folder: Path) -> Path:
    """The file with matrices in `dtype`: `source` itself where they are, else a copy in `folder`.

    Raises
    ------
    ValueError
        A type that is none of TYPES.
    OSError
        The source cannot be read, or the folder not written.
    """
    if dtype not in TYPES:
        raise ValueError(f"dtype: {dtype!r} is none of {', '.join(TYPES)}")
    kind, file_type = TYPES[dtype]
    reader = gguf.GGUFReader(source)
    if all(t.tensor_type == kind for t in reader.tensors if len(t.shape) > 1):
        return source
    target = folder / f"{source.stem}-{dtype}.gguf"
    if target.exists():
        return target
    folder.mkdir(parents=True, exist_ok=True)
    aside = target.with_suffix(f".{os.getpid()}")
    architecture = reader.fields["general.architecture"].contents()
    writer = gguf.GGUFWriter(aside, architecture, use_temp_file=True)
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name in ("general.architecture", "general.file_type"):
            continue
        sub_type = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(name, field.contents(), field.types[0], sub_type)
    writer.add_file_type(file_type)
    for tensor in reader.tensors:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        to = kind if len(tensor.shape) > 1 else gguf.GGMLQuantizationType.F32
        writer.add_tensor(tensor.name, gguf.quants.quantize(values, to), raw_dtype=to)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    aside.replace(target)
    return target
