"""Requests and responses as the other end of the wire sees them."""

from __future__ import annotations

from typing import Any

import numpy as np
from tritonclient.grpc import service_pb2
from tritonclient.utils import deserialize_bytes_tensor, serialize_byte_tensor, triton_to_np_dtype


def tensors_of(request: Any) -> dict[str, np.ndarray[Any, Any]]:
    """Tensors of a request as a server reads them."""
    found = {}
    for tensor, content in zip(request.inputs, request.raw_input_contents, strict=True):
        if tensor.datatype == "BYTES":
            value = deserialize_bytes_tensor(content)
        else:
            value = np.frombuffer(content, dtype=triton_to_np_dtype(tensor.datatype))
        found[tensor.name] = value.reshape(tuple(tensor.shape))
    return found


def response(**outputs: Any) -> Any:
    """A stream response with these outputs."""
    message = service_pb2.ModelStreamInferResponse()
    for name, value in outputs.items():
        array = np.array([value if isinstance(value, list) else [value]])
        texts = array.dtype.kind in "SUO"
        if texts:
            array = np.array([[value]], dtype=np.object_)
        kind = "BYTES" if texts else {"seed": "UINT64"}.get(name, "INT32")
        message.infer_response.outputs.add(name=name, datatype=kind, shape=array.shape)
        content = (
            serialize_byte_tensor(array).item() if texts else array.astype(triton_to_np_dtype(kind)).tobytes()
        )
        message.infer_response.raw_output_contents.append(content)
    return message
