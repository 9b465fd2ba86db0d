"""Generated messages are those of the .proto file, and Envoy's have the numbers that the protocol gives them."""

import subprocess
import sys
from importlib.resources import files
from pathlib import Path

from envoy.config.core.v3.base_pb2 import HeaderValue, HeaderValueOption
from envoy.service.ext_proc.v3 import external_processor_pb2 as ext_proc
from google.protobuf.descriptor_pb2 import FileDescriptorProto, FileDescriptorSet

from tandem_services.router_server.protos import router_pb2

NAME = "tandem_services/router_server/protos/router.proto"


def test_generated_code_matches_the_proto(tmp_path: Path):
    root = Path(str(files("tandem_services"))).parent
    out = tmp_path / "set"
    # In a process of its own: the compiler and NIXL bring C++ libraries that are incompatible in one process.
    command = [sys.executable, "-m", "grpc_tools.protoc", f"-I{root}", f"--descriptor_set_out={out}", NAME]
    subprocess.run(command, check=True, timeout=120)
    (compiled,) = FileDescriptorSet.FromString(out.read_bytes()).file
    for message in compiled.message_type:
        for field in message.field:
            # Derived from the name; generated code leaves it out.
            field.ClearField("json_name")
    committed = FileDescriptorProto.FromString(router_pb2.DESCRIPTOR.serialized_pb)
    assert committed == compiled, "run tools/router_protos.sh"


def numbers(message) -> dict[str, int]:
    return {field.name: field.number for field in message.DESCRIPTOR.fields}


def test_ext_proc_field_numbers_match_specification():
    assert numbers(ext_proc.ProcessingRequest).items() >= {
        ("request_headers", 2),
        ("response_headers", 3),
        ("request_body", 4),
        ("response_body", 5),
        ("request_trailers", 6),
        ("response_trailers", 7),
        ("metadata_context", 8),
        ("observability_mode", 10),
        ("protocol_config", 11),
    }
    assert numbers(ext_proc.ProcessingResponse).items() >= {
        ("request_headers", 1),
        ("response_headers", 2),
        ("request_body", 3),
        ("response_body", 4),
        ("request_trailers", 5),
        ("response_trailers", 6),
        ("immediate_response", 7),
        ("dynamic_metadata", 8),
    }
    assert numbers(ext_proc.BodyMutation)["streamed_response"] == 3
    assert (numbers(HeaderValue)["raw_value"], HeaderValueOption.OVERWRITE_IF_EXISTS_OR_ADD) == (3, 2)
