#!/usr/bin/env python3
"""Write the client's plain types, and how each becomes its message and comes back, from `proto/`.

A type has the fields of its message, in order, with the proto's comments; a time or a span `x` is `x_ns`.
`generate_client_types.py` writes into the tree; `--check` fails when the tree differs from what would be
written. Needs the `codegen` dependency group.
"""

import re
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    EnumDescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
    FileDescriptorSet,
)

ROOT = Path(__file__).resolve().parent.parent
PROTO = ROOT / "proto"
CLIENT = ROOT / "ctxcache" / "client"
WIDTH = 106
TYPES = {
    "Session": "SessionFields",
    "LayerRange": "LayerRange",
    "KindAvailability": "KindAvailability",
    "LookupResult": "LookupResult",
    "SharedPrefix": "SharedPrefix",
    "MatchPrefixResponse": "PrefixMatch",
    "StreamSpec": "StoredStreams",
    "Model": "ModelFields",
    "ForgetModelResponse": "Forgotten",
    "HintResult": "HintResult",
    "LayerReadiness": "LayerReadiness",
    "Readiness": "SessionReadiness",
    "SessionEvent": "SessionEvent",
    "TierStats": "TierStats",
    "Stats": "StoreStats",
    "TenantUse": "TenantStats",
    "SessionHappening": "SessionHappening",
    "RequestMiss": "RequestMiss",
    "WhyMissResponse": "MissReport",
    "Setting": "SettingValue",
    "ReloadSettingsResponse": "SettingsReload",
    "BadSegment": "BadSegment",
    "VerifyResponse": "VerifyProgress",
    "HeldLease": "HeldLease",
    "DrainStatus": "DrainStatus",
    "EngineUse": "EngineUse",
    "FleetNode": "FleetNode",
    "Fleet": "FleetView",
    "CollectFleetResponse": "CollectedFleet",
    "PublishSessionsResponse": "PublishedSessions",
    "MethodActivity": "MethodActivity",
    "SessionActivity": "SessionActivity",
    "TenantActivity": "TenantActivity",
    "Activity": "Activity",
    "BackupResponse": "BackupPart",
    "Fault": "InjectedFault",
    "RecordedStore": "RecordedStore",
    "RecordedStreams": "RecordedStreams",
    "RecordedLayout": "RecordedLayout",
    "RecordedCall": "RecordedCall",
    "RecordResponse": "RecordingPart",
}
"""The plain type of each message that has a generated one."""
ENUMS = {
    "Durability": "Durability",
    "LookupState": "LookupState",
    "Tier": "StorageTier",
    "HintOutcome": "HintOutcome",
    "SessionChange": "SessionChange",
    "LayerState": "LayerPlace",
    "PathState": "PathState",
    "MissEvent": "MissEvent",
    "FaultKind": "InjectedFaultKind",
    "RecordedKind": "RecordedKind",
}
"""The plain enumeration of each that is generated."""
BY_HAND = {
    "StreamRange": "StreamRange",
    "ContentRange": "Content",
    "ModelProbe": "ModelProbe",
    "BlockPart": "BlockPart",
    "BlockSpace": "BlockSpace",
}
"""Plain types that are written by hand, with the same fields: only their conversions are generated."""
METHODS = {"SessionFields": "SessionInfo", "ModelFields": "ModelInfo"}
"""What `types.py` adds methods to, and its name there."""
FORMAT = {"StateKind": ("StateKind", "TOKENS"), "Dtype": ("DType", "PACKED")}
"""Enumerations of the chunk format, and the default of a field."""
ALWAYS_SET = {"StreamRange": "TOKENS_RANGE"}
"""Messages that every message which holds one has, and the default of a field."""
UNSET_IS_NO_MEMBER = {"Durability"}
TIMES = {"Timestamp", "Duration"}
SCALARS = {
    FieldDescriptorProto.TYPE_STRING: ("str", '""'),
    FieldDescriptorProto.TYPE_BYTES: ("bytes", 'b""'),
    FieldDescriptorProto.TYPE_BOOL: ("bool", "False"),
    FieldDescriptorProto.TYPE_DOUBLE: ("float", "0.0"),
}
MADE = "Made by scripts/generate_client_types.py from proto/."
ANSWERS = f'''"""Plain types of what the server answers.

{MADE}
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from ctxcache.client.open_enum import OpenEnum
from ctxcache.format.model import ModelProbe
from ctxcache.format.streams import TOKENS_RANGE, Content, DType, StateKind, StreamRange
'''
MESSAGES = f'''"""How plain types are read from messages, and written to them.

{MADE}
"""

from collections.abc import Callable
from typing import Any

from google.protobuf.message import Message

from ctxcache.client import types
from ctxcache.client.wire_values import dtype, nanoseconds, span, state_kind, time
from ctxcache.format.model import ModelProbe
from ctxcache.format.streams import Content, StreamRange
'''


@dataclass(frozen=True)
class _Contract:
    """Messages and enumerations by name, the module of each, and comments by the full name of a part."""

    messages: dict[str, DescriptorProto]
    enums: dict[str, EnumDescriptorProto]
    modules: dict[str, str]
    comments: dict[str, str]


def main() -> None:
    """Write or check; exits 1 with the names of the files that differ."""
    contract = _contract()
    wanted = {
        CLIENT / "answers.py": _formatted(_answers(contract)),
        CLIENT / "messages.py": _formatted(_messages(contract)),
    }
    differing = [path for path, text in wanted.items() if not path.exists() or path.read_text() != text]
    if "--check" not in sys.argv[1:]:
        for path in differing:
            path.write_text(wanted[path])
    elif differing:
        names = ", ".join(str(path.relative_to(ROOT)) for path in differing)
        sys.exit(f"out of date, run `make proto`: {names}")


def _contract() -> _Contract:
    sources = sorted(str(path.relative_to(PROTO)) for path in (PROTO / "ctxcache").rglob("*.proto"))
    with tempfile.NamedTemporaryFile() as made:
        command = [
            sys.executable,
            "-m",
            "grpc_tools.protoc",
            f"--proto_path={PROTO}",
            "--include_source_info",
        ]
        if subprocess.run([*command, "-o", made.name, *sources], check=False, cwd=PROTO).returncode:  # noqa: S603
            sys.exit("protoc failed; what it printed is above")
        files = FileDescriptorSet.FromString(made.read()).file
    contract = _Contract({}, {}, {}, {})
    for file in files:
        _add(contract, file)
    return contract


def _add(contract: _Contract, file: FileDescriptorProto) -> None:
    # A path is the numbers of fields and indexes that lead to a part, see SourceCodeInfo.
    said = {tuple(place.path): place.leading_comments for place in file.source_code_info.location}
    module = f"{Path(file.name).stem}_pb2"
    for index, message in enumerate(file.message_type):
        contract.messages[message.name] = message
        contract.modules[message.name] = module
        contract.comments[message.name] = said.get((4, index), "")
        for number, field in enumerate(message.field):
            contract.comments[f"{message.name}.{field.name}"] = said.get((4, index, 2, number), "")
    for index, enum in enumerate(file.enum_type):
        contract.enums[enum.name] = enum
        contract.modules[enum.name] = module
        contract.comments[enum.name] = said.get((5, index), "")
        for number, value in enumerate(enum.value):
            contract.comments[f"{enum.name}.{value.name}"] = said.get((5, index, 2, number), "")


# -- the types -----------------------------------------------------------------------------------------


def _answers(contract: _Contract) -> str:
    enums = [line for name in ENUMS for line in _enum(contract, name)]
    types = [line for name in _ordered(contract) for line in _type(contract, name)]
    return "\n".join([ANSWERS, *enums, *types])


def _enum(contract: _Contract, name: str) -> Iterator[str]:
    enum = contract.enums[name]
    prefix = re.sub(r"(?<!^)(?=[A-Z])", "_", name).upper() + "_"
    yield f"class {ENUMS[name]}(OpenEnum):"
    yield _class_doc(contract.comments[name])
    for value in enum.value:
        if value.number or name not in UNSET_IS_NO_MEMBER:
            yield f"    {value.name.removeprefix(prefix)} = {value.number}"
            yield _doc(contract.comments[f"{name}.{value.name}"])


def _type(contract: _Contract, name: str) -> Iterator[str]:
    yield f"@dataclass(frozen=True, slots=True)\nclass {TYPES[name]}:"
    yield _class_doc(contract.comments[name])
    for field in contract.messages[name].field:
        kind, default = _hint(field)
        yield f"    {_plain_name(field)}: {kind} = {default}"
        yield _doc(contract.comments[f"{name}.{field.name}"])


def _ordered(contract: _Contract) -> list[str]:
    """Names of messages, those first that others have fields of."""
    ordered: list[str] = []

    def put(name: str) -> None:
        for field in contract.messages[name].field:
            if _type_name(field) in TYPES:
                put(_type_name(field))
        if name not in ordered:
            ordered.append(name)

    for name in TYPES:
        put(name)
    return ordered


def _hint(field: FieldDescriptorProto) -> tuple[str, str]:
    """A field's type in Python, and its default."""
    name = _type_name(field)
    if _is_map(field):
        # A dict has no hash: two facts that are equal have one by their other fields.
        return "Mapping[str, str]", "field(default_factory=dict, hash=False)"
    if name in FORMAT:
        kind, member = FORMAT[name]
        default = f"{kind}.{member}"
    elif name in ENUMS:
        kind, default = ENUMS[name], f"{ENUMS[name]}.UNSPECIFIED"
    elif name in TIMES or not name:
        kind, default = SCALARS.get(field.type, ("int", "0"))
    else:
        kind, default = _plain(name), ALWAYS_SET.get(name, "None")
    if _is_repeated(field):
        return f"tuple[{kind}, ...]", "()"
    return (f"{kind} | None", "None") if _may_be_unset(field) else (kind, default)


def _doc(comment: str) -> str:
    words = " ".join(comment.split())
    if len(words) <= WIDTH - 6:
        return f'    """{words}"""'
    return textwrap.indent("\n".join([*textwrap.wrap(f'"""{words}', WIDTH), '"""']), "    ")


def _class_doc(comment: str) -> str:
    words = " ".join(comment.split())
    summary, _, rest = words.partition(". ")
    if not rest or len(words) <= WIDTH - 6:
        return _doc(words)
    lines = [f'"""{summary}.', "", *textwrap.wrap(rest, WIDTH), '"""']
    return textwrap.indent("\n".join(lines), "    ")


# -- their conversions ---------------------------------------------------------------------------------


def _messages(contract: _Contract) -> str:
    names = [*BY_HAND, *_ordered(contract)]
    modules = sorted({contract.modules[name] for name in names})
    return "\n".join(
        [
            MESSAGES + f"from ctxcache.v1 import {', '.join(modules)}\n",
            *(line for name in names for line in (_reader(contract, name), _writer(contract, name))),
            "WRITERS: dict[type, Callable[[Any], Message]] = {",
            *(f"    {_class(name)}: write_{_snake(name)}," for name in names),
            "}",
        ]
    )


def _reader(contract: _Contract, name: str) -> str:
    said = "message" if contract.messages[name].field else "_message"
    fields = [f"        {_plain_name(field)}={_read(field)}," for field in contract.messages[name].field]
    head = f"def read_{_snake(name)}({said}: {_wire_class(contract, name)}) -> {_class(name)}:"
    return "\n".join([head, f"    return {_class(name)}(", *fields, "    )", ""])


def _read(field: FieldDescriptorProto) -> str:
    value = f"message.{field.name}"
    if _is_map(field):
        return f"dict({value})"
    if _is_repeated(field):
        inner = _read_value(field, "part")
        return f"tuple({value})" if inner == "part" else f"tuple([{inner} for part in {value}])"
    read = _read_value(field, value)
    return f'{read} if message.HasField("{field.name}") else None' if _may_be_unset(field) else read


def _read_value(field: FieldDescriptorProto, value: str) -> str:
    name = _type_name(field)
    if not name:
        return value
    if name in TIMES:
        return f"nanoseconds({value})"
    if name in FORMAT:
        return f"{_snake_of(FORMAT[name][0])}({value})"
    return f"types.{ENUMS[name]}({value})" if name in ENUMS else f"read_{_snake(name)}({value})"


def _writer(contract: _Contract, name: str) -> str:
    fields = [f"        {field.name}={_write(contract, field)}," for field in contract.messages[name].field]
    head = f"def write_{_snake(name)}(plain: {_class(name)}) -> {_wire_class(contract, name)}:"
    return "\n".join([head, f"    return {_wire_class(contract, name)}(", *fields, "    )", ""])


def _write(contract: _Contract, field: FieldDescriptorProto) -> str:
    value = f"plain.{_plain_name(field)}"
    if _is_map(field):
        return value
    if _is_repeated(field):
        inner = _write_value(contract, field, "part")
        return value if inner == "part" else f"[{inner} for part in {value}]"
    written = _write_value(contract, field, value)
    # An unset field is None to the message's constructor too.
    return f"None if {value} is None else {written}" if _may_be_unset(field) and written != value else written


def _write_value(contract: _Contract, field: FieldDescriptorProto, value: str) -> str:
    name = _type_name(field)
    if not name:
        return value
    if name in TIMES:
        return f"{'time' if name == 'Timestamp' else 'span'}({value})"
    if name in contract.enums:
        return f"{_wire_class(contract, name)}.ValueType({value})"
    return f"write_{_snake(name)}({value})"


# -- names ---------------------------------------------------------------------------------------------


def _type_name(field: FieldDescriptorProto) -> str:
    return field.type_name.rpartition(".")[2]


def _is_repeated(field: FieldDescriptorProto) -> bool:
    return field.label == FieldDescriptorProto.LABEL_REPEATED


def _is_map(field: FieldDescriptorProto) -> bool:
    """Whether it is a map of texts, the only kind of map that messages with a plain type have."""
    return _type_name(field) == f"{field.name.title().replace('_', '')}Entry"


def _may_be_unset(field: FieldDescriptorProto) -> bool:
    name = _type_name(field)
    is_message = field.type == FieldDescriptorProto.TYPE_MESSAGE and name not in ALWAYS_SET
    return is_message or field.HasField("oneof_index")


def _plain_name(field: FieldDescriptorProto) -> str:
    return f"{field.name}_ns" if _type_name(field) in TIMES else field.name


def _plain(name: str) -> str:
    return BY_HAND.get(name) or TYPES[name]


def _class(name: str) -> str:
    plain = _plain(name)
    is_format = plain in {"StreamRange", "Content", "ModelProbe"}
    return plain if is_format else f"types.{METHODS.get(plain, plain)}"


def _wire_class(contract: _Contract, name: str) -> str:
    return f"{contract.modules[name]}.{name}"


def _snake(name: str) -> str:
    plain = _plain(name)
    return _snake_of(METHODS.get(plain, plain))


def _snake_of(name: str) -> str:
    return "dtype" if name == "DType" else re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower()


def _formatted(text: str) -> str:
    command = ["ruff", "format", "--stdin-filename", "made.py", "-"]
    path = Path(sys.executable).parent / command[0]
    return subprocess.run(  # noqa: S603
        [path, *command[1:]], input=text, capture_output=True, text=True, check=True, cwd=ROOT
    ).stdout


if __name__ == "__main__":
    main()
