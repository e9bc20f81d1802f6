"""A Terraform provider that knows schemas and owns no cloud: Terraform plans and applies against it, offline.

It speaks Terraform's plugin protocol (version 6) on a socket that TF_REATTACH_PROVIDERS names. What a cloud would
have settled (computed values) is unknown in a plan and made up when it is applied.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import msgpack
from tf.gen import tfplugin_pb2 as wire
from tf.gen import tfplugin_pb2_grpc as service

UNKNOWN = msgpack.ExtType(0, b"\x00")
NESTINGS = {"single": 1, "list": 2, "set": 3, "map": 4}
Json = dict[str, Any]


def _attribute(name: str, schema: Json) -> Any:
    flags = {flag: schema.get(flag, False) for flag in ("required", "optional", "computed", "sensitive")}
    if "nested_type" not in schema:
        return wire.Schema.Attribute(name=name, type=json.dumps(schema["type"]).encode(), **flags)
    inside = schema["nested_type"]
    fields = [_attribute(key, item) for key, item in inside["attributes"].items()]
    nested = wire.Schema.Object(attributes=fields, nesting=NESTINGS[inside["nesting"]])
    return wire.Schema.Attribute(name=name, nested_type=nested, **flags)


def _block(schema: Json) -> Any:
    inner = [
        wire.Schema.NestedBlock(
            type_name=name,
            block=_block(item["block"]),
            nesting=NESTINGS[item["nesting_mode"]],
            min_items=item.get("min_items", 0),
            max_items=item.get("max_items", 0),
        )
        for name, item in schema.get("block_types", {}).items()
    ]
    return wire.Schema.Block(attributes=[_attribute(k, a) for k, a in schema["attributes"].items()], block_types=inner)


def _schema(schema: Json) -> Any:
    return wire.Schema(version=0, block=_block(schema))


def _resolve(value: Any, schema: Json, *, applied: bool) -> Any:
    """``value`` with what nobody said in it: unknown in a plan, made up when ``applied``."""
    if not isinstance(value, dict):
        return value
    for name, attribute in schema["attributes"].items():
        given = value.get(name)
        if given is None or isinstance(given, msgpack.ExtType):
            if attribute.get("computed"):
                value[name] = _made_up(name, attribute) if applied else UNKNOWN
        elif "nested_type" in attribute:
            value[name] = _each(given, attribute["nested_type"], attribute["nested_type"]["nesting"], applied)
    for name, block in schema.get("block_types", {}).items():
        if value.get(name) is not None:
            value[name] = _each(value[name], block["block"], block["nesting_mode"], applied)
    return value


def _each(value: Any, schema: Json, nesting: str, applied: bool) -> Any:
    if nesting == "single":
        return _resolve(value, schema, applied=applied)
    if nesting == "map":
        return {key: _resolve(item, schema, applied=applied) for key, item in value.items()}
    return [_resolve(item, schema, applied=applied) for item in value]


def _made_up(name: str, attribute: Json) -> Any:
    if "nested_type" not in attribute:
        return _made_up_type(name, attribute["type"])
    inside = attribute["nested_type"]
    item = {key: _made_up(key, field) for key, field in inside["attributes"].items()}
    return {"single": item, "list": [item], "set": [item], "map": {}}[inside["nesting"]]


def _made_up_type(name: str, kind: Any) -> Any:
    if isinstance(kind, str):
        text = "198.51.100.7" if name in {"address", "network_ip", "nat_ip", "ip_addresses"} else f"stub-{name}"
        return {"string": text, "number": 1, "bool": False, "dynamic": None}[kind]
    if kind[0] == "object":
        return {key: _made_up_type(key, item) for key, item in kind[1].items()}
    return {} if kind[0] == "map" else [_made_up_type(name, kind[1])]


def _read(sent: Any) -> Any:
    if sent.msgpack:
        return msgpack.unpackb(sent.msgpack, raw=False, strict_map_key=False)
    return json.loads(sent.json or b"null")


def _sent(value: Any) -> Any:
    return wire.DynamicValue(msgpack=msgpack.packb(value))


class Stub(service.ProviderServicer):  # type: ignore[misc]
    """Answers for one provider, after its schema."""

    def __init__(self, schema: Json) -> None:
        self._schema = schema

    def GetProviderSchema(self, request: Any, context: Any) -> Any:
        resources = {name: _schema(schema) for name, schema in self._schema["resource_schemas"].items()}
        sources = {name: _schema(schema) for name, schema in self._schema["data_source_schemas"].items()}
        return wire.GetProviderSchema.Response(
            provider=_schema(self._schema["provider"]), resource_schemas=resources, data_source_schemas=sources
        )

    def ValidateProviderConfig(self, request: Any, context: Any) -> Any:
        return wire.ValidateProviderConfig.Response()

    def ValidateResourceConfig(self, request: Any, context: Any) -> Any:
        return wire.ValidateResourceConfig.Response()

    def ValidateDataResourceConfig(self, request: Any, context: Any) -> Any:
        return wire.ValidateDataResourceConfig.Response()

    def ConfigureProvider(self, request: Any, context: Any) -> Any:
        return wire.ConfigureProvider.Response()

    def StopProvider(self, request: Any, context: Any) -> Any:
        return wire.StopProvider.Response()

    def GetFunctions(self, request: Any, context: Any) -> Any:
        return wire.GetFunctions.Response()

    def UpgradeResourceState(self, request: Any, context: Any) -> Any:
        return wire.UpgradeResourceState.Response(upgraded_state=_sent(json.loads(request.raw_state.json)))

    def ReadResource(self, request: Any, context: Any) -> Any:
        return wire.ReadResource.Response(new_state=request.current_state)

    def PlanResourceChange(self, request: Any, context: Any) -> Any:
        schema = self._schema["resource_schemas"][request.type_name]
        planned = _resolve(_read(request.proposed_new_state), schema, applied=False)
        return wire.PlanResourceChange.Response(planned_state=_sent(planned))

    def ApplyResourceChange(self, request: Any, context: Any) -> Any:
        schema = self._schema["resource_schemas"][request.type_name]
        built = _resolve(_read(request.planned_state), schema, applied=True)
        return wire.ApplyResourceChange.Response(new_state=_sent(built))

    def ReadDataSource(self, request: Any, context: Any) -> Any:
        schema = self._schema["data_source_schemas"][request.type_name]
        return wire.ReadDataSource.Response(state=_sent(_resolve(_read(request.config), schema, applied=True)))


@contextmanager
def serving(schemas: list[Json], folder: Path) -> Iterator[Mapping[str, str]]:
    """Serve ``schemas`` on sockets in ``folder``; yields the environment in which Terraform uses them."""
    servers, attached = [], {}
    for number, schema in enumerate(schemas):
        server = grpc.server(ThreadPoolExecutor(4), options=[("grpc.max_send_message_length", 64 << 20)])
        service.add_ProviderServicer_to_server(Stub(schema), server)
        address = f"{folder}/{number}.sock"
        server.add_insecure_port(f"unix:{address}")
        server.start()
        servers.append(server)
        source = schema["source"] if schema["source"].count("/") == 2 else f"registry.terraform.io/{schema['source']}"
        attached[source] = {
            "Protocol": "grpc",
            "ProtocolVersion": 6,
            "Pid": os.getpid(),
            "Test": True,
            "Addr": {"Network": "unix", "String": address},
        }
    try:
        yield {
            "TF_REATTACH_PROVIDERS": json.dumps(attached),
            "TF_CLI_CONFIG_FILE": os.devnull,
            "TF_IN_AUTOMATION": "1",
            "CHECKPOINT_DISABLE": "1",
        }
    finally:
        for server in servers:
            server.stop(0).wait()
