"""Our own subset of Envoy's definitions says what they say: every field's number, type and repetition, every value of
an enumeration. Names of messages do not travel, so only those of fields are compared."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest
from envoy.config.core.v3 import base_pb2
from envoy.extensions.filters.http.ext_proc.v3 import processing_mode_pb2
from envoy.service.ext_proc.v3 import external_processor_pb2
from envoy.type.v3 import http_status_pb2
from google.protobuf.descriptor import Descriptor, EnumDescriptor, FieldDescriptor
from grpc_tools import protoc

from kvsync.extproc.protocol import messages

FOLDER = Path(messages.__file__).parent
THEIRS = {
    name: found
    for file in (external_processor_pb2, processing_mode_pb2, base_pb2, http_status_pb2)
    for name, found in file.DESCRIPTOR.message_types_by_name.items()
}
OURS = dict(messages.DESCRIPTOR.message_types_by_name)
HEALTH = {"HealthCheckRequest", "HealthCheckResponse"}


def kind(field: FieldDescriptor) -> tuple[object, ...]:
    """What decides how a field travels."""
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        entry = field.message_type.fields_by_name
        return ("map", kind(entry["key"]), kind(entry["value"]))
    # The values of an enumeration travel as int32 does.
    number = FieldDescriptor.TYPE_INT32 if field.type == FieldDescriptor.TYPE_ENUM else field.type
    name = field.message_type.name if field.message_type is not None else None
    oneof = field.containing_oneof.name if field.containing_oneof is not None else None
    return (field.number, number, field.is_repeated, name, oneof)


def enums(message: Descriptor) -> dict[str, EnumDescriptor]:
    return dict(message.enum_types_by_name)


@pytest.mark.parametrize("name", sorted(OURS.keys() - HEALTH))
def test_a_message(name: str) -> None:
    ours, theirs = OURS[name], THEIRS[name]
    for field in ours.fields:
        assert kind(field) == kind(theirs.fields_by_name[field.name]), field.full_name
    for enum, values in enums(ours).items():
        known = enums(theirs)[enum].values_by_name
        assert {value.name: value.number for value in values.values} == {
            name: value.number for name, value in known.items()
        }


def test_health() -> None:
    """As the protocol's specification has it (grpc.health.v1)."""
    request, response = messages.HealthCheckRequest, messages.HealthCheckResponse
    assert request(service="ab").SerializeToString() == b"\x0a\x02ab"
    assert response(status=response.NOT_SERVING).SerializeToString() == b"\x08\x02"
    assert dict(response.ServingStatus.items()) == {"UNKNOWN": 0, "SERVING": 1, "NOT_SERVING": 2, "SERVICE_UNKNOWN": 3}


def test_the_modules_are_what_the_definitions_make(tmp_path: Path) -> None:
    """After a change: make protocol."""
    shutil.copy(FOLDER / "extproc.proto", tmp_path)
    arguments = ["protoc", f"-I{tmp_path}", f"--python_out={tmp_path}", f"--pyi_out={tmp_path}", "extproc.proto"]
    # The definitions of google.protobuf come with the tools.
    arguments.insert(1, f"-I{Path(protoc.__file__).parent / '_proto'}")
    assert protoc.main(arguments) == 0, sys.stderr
    for name in ("extproc_pb2.py", "extproc_pb2.pyi"):
        assert (tmp_path / name).read_text() == (FOLDER / name).read_text(), name
