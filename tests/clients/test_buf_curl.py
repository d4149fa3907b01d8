"""The contract from a shell: `buf curl` learns it by server reflection and speaks JSON.

buf is written in Go, with a gRPC stack of its own. Skipped, and said so, where it is not installed.
"""

import base64
import json
import shutil
import struct
import subprocess
import sys
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from google.rpc import error_details_pb2  # type: ignore[import-untyped]  # no py.typed
from server_process import ServerProcess
from xxhash import xxh3_64_intdigest

TOKENS = {"layer": -1, "kind": "STATE_KIND_TOKENS"}
KV = {"layer": 1, "kind": "STATE_KIND_KV"}
ROW_BYTES = 32
TOKEN_COUNT = 70
TIMEOUT_S = 30
# Exit codes of buf curl: eight times the number of the gRPC code.
INVALID_ARGUMENT, NOT_FOUND, ABORTED = 3 * 8, 5 * 8, 10 * 8
Json = dict[str, Any]


class Curl:
    """`buf curl` against one server."""

    def __init__(self, buf: str, target: str) -> None:
        self.buf = buf
        self.target = target

    def run(self, method: str, messages: Sequence[Json]) -> subprocess.CompletedProcess[str]:
        """Call a method of ctxcache.v1 with messages on standard input."""
        return subprocess.run(
            [
                self.buf,
                "curl",
                "--protocol",
                "grpc",
                "--http2-prior-knowledge",
                "--data",
                "@-",
                f"http://{self.target}/ctxcache.v1.{method}",
            ],
            input="\n".join(map(json.dumps, messages)),
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )

    def call(self, method: str, *messages: Json) -> list[Json]:
        """Call a method that is to succeed; returns what it answers."""
        result = self.run(method, messages)
        assert result.returncode == 0, result.stderr
        return list(documents(result.stdout))

    def fail(self, method: str, *messages: Json) -> tuple[int, error_details_pb2.ErrorInfo]:
        """Call a method that is to fail; returns the exit code and the error's details."""
        result = self.run(method, messages)
        assert result.returncode != 0, result.stdout
        details = {detail["type"]: detail["value"] for detail in json.loads(result.stderr)["details"]}
        return result.returncode, error_info(details["google.rpc.ErrorInfo"])


def documents(text: str) -> Iterator[Json]:
    """Split JSON documents that follow one another."""
    decoder, position = json.JSONDecoder(), 0
    while text[position:].strip():
        document, end = decoder.raw_decode(text[position:].lstrip())
        position = len(text) - len(text[position:].lstrip()) + end
        yield document


def error_info(encoded: str) -> error_details_pb2.ErrorInfo:
    """Decode a detail: base64 without padding, since the contract does not import its type."""
    return error_details_pb2.ErrorInfo.FromString(base64.b64decode(encoded + "=" * (-len(encoded) % 4)))


def chunk(stream: Json, token_begin: int, data: bytes) -> Json:
    """Put rows into a message: bytes as base64, 64-bit numbers as strings."""
    return {
        "chunk": {
            "stream": stream,
            "tokenBegin": str(token_begin),
            "data": base64.b64encode(data).decode(),
            "checksum": str(xxh3_64_intdigest(data)),
        }
    }


def range_of(stream: Json) -> Json:
    """One stream as a range, without the zeros that JSON leaves out."""
    ends = {"layerBegin": stream.get("layer", 0), "layerEnd": stream.get("layer", 0) + 1}
    return {"kind": stream["kind"]} | {name: value for name, value in ends.items() if value}


def token_rows() -> bytes:
    """Make the token ids that the tests save."""
    return struct.pack(f"<{TOKEN_COUNT}i", *range(500, 500 + TOKEN_COUNT))


def kv_rows() -> bytes:
    """Make the K/V rows that the tests save."""
    return bytes((7 * i + 3) % 256 for i in range(TOKEN_COUNT * ROW_BYTES))


@pytest.fixture(scope="module")
def curl(running_server: ServerProcess) -> Curl:
    """Find buf beside this Python, or on the path."""
    beside = Path(sys.executable).with_name("buf")
    buf = str(beside) if beside.exists() else shutil.which("buf")
    if buf is None:
        pytest.skip("THE CONTRACT IS NOT TESTED BY REFLECTION: buf is not installed")
    return Curl(buf, running_server.target)


@pytest.fixture(scope="module")
def model(curl: Curl) -> Json:
    """Register a model that can save K/V of its second layer."""
    spec = {
        "name": "models/buf-curl",
        "architecture": "TinyForCausalLM",
        "dtype": "DTYPE_FLOAT16",
        "layerCount": 2,
        "hiddenSize": 8,
        "kvHeadCount": 1,
        "headSize": 8,
        "isRelocatable": True,
        "streams": [{"streams": range_of(KV), "rowBytes": ROW_BYTES, "dtype": "DTYPE_FLOAT16"}],
    }
    (registered,) = curl.call("ModelService/RegisterModel", {"model": spec})
    return registered


@pytest.fixture
def session(curl: Curl, model: Json) -> str:
    """Create an empty session; returns its name."""
    request = {"sessionId": f"curl:{uuid.uuid4()}", "model": model["name"], "layout": [range_of(KV)]}
    (created,) = curl.call("SessionService/CreateSession", request)
    return str(created["name"])


def append(session: str, model: Json) -> list[Json]:
    """List the messages of an append of all rows."""
    return [
        {"header": {"name": session, "modelFingerprint": model["fingerprint"], "writeOffset": "0"}},
        chunk(TOKENS, 0, token_rows()),
        chunk(KV, 0, kv_rows()),
        {"commit": {"tokenCount": str(TOKEN_COUNT), "durability": "DURABILITY_DISK"}},
    ]


def test_reflection_lists_every_service(curl: Curl) -> None:
    """A client without the .proto files finds out what there is."""
    command = [curl.buf, "curl", "--protocol", "grpc", "--http2-prior-knowledge", "--list-services"]
    result = subprocess.run([*command, f"http://{curl.target}"], capture_output=True, text=True, check=True)

    assert set(result.stdout.split()) >= {
        "ctxcache.v1.AdminService",
        "ctxcache.v1.ArenaService",
        "ctxcache.v1.BlockService",
        "ctxcache.v1.HintService",
        "ctxcache.v1.ModelService",
        "ctxcache.v1.PrefixService",
        "ctxcache.v1.SessionService",
        "grpc.health.v1.Health",
    }


def test_a_unary_call_answers_in_json(curl: Curl, session: str, model: Json) -> None:
    """Names are camelCase, 64-bit numbers strings, bytes base64, enums by name, durations `3600s`."""
    (found,) = curl.call("SessionService/GetSession", {"name": session})

    assert found["name"] == session
    assert isinstance(found["generation"], str)
    assert (int(found["generation"]) > 0, found["ttl"]) == (True, "3600s")
    assert found["layout"] == [range_of(TOKENS), range_of(KV)]
    assert len(base64.b64decode(found["modelFingerprint"])) == 32


def test_a_client_stream_appends(curl: Curl, session: str, model: Json) -> None:
    """Messages are lines on standard input, rows base64, checksums decimal."""
    (response,) = curl.call("SessionService/AppendSession", *append(session, model))

    assert response["session"]["tokenCount"] == str(TOKEN_COUNT)
    assert response["session"]["durableTokenCount"] == str(TOKEN_COUNT)


def test_a_server_stream_reads_what_was_appended(curl: Curl, session: str, model: Json) -> None:
    """A header, then each stream's rows with checksums that hold."""
    curl.call("SessionService/AppendSession", *append(session, model))

    request = {"name": session, "modelFingerprint": model["fingerprint"]}
    header, *messages = curl.call("SessionService/ReadSession", request)

    chunks = [message["chunk"] for message in messages]
    data = [base64.b64decode(item["data"]) for item in chunks]
    assert header["header"]["range"] == {"end": str(TOKEN_COUNT)}
    assert [item["stream"] for item in chunks] == [TOKENS, KV]
    assert data == [token_rows(), kv_rows()]
    assert [int(item["checksum"]) for item in chunks] == [xxh3_64_intdigest(item) for item in data]


def test_a_queue_is_published_and_withdrawn(curl: Curl, session: str) -> None:
    """A stream both ways.

    An answer for each request, an event for the session, and the end after a half-close.
    """
    job = {"jobId": "job", "session": session, "newTokenCount": "7", "position": 0}
    responses = curl.call(
        "HintService/Schedule",
        {"sequence": "1", "hello": {"engine": "buf-curl", "grace": "1.5s"}},
        {"sequence": "2", "delta": {"put": [job, {**job, "jobId": "other", "session": "sessions/nobody"}]}},
        {"sequence": "3", "delta": {"gone": [{"jobId": "other", "end": "JOB_END_CANCELLED"}]}},
    )

    answers = [response["acknowledgement"] for response in responses if "acknowledgement" in response]
    events = [event for response in responses for event in response.get("events", {}).get("events", [])]
    assert [answer["sequence"] for answer in answers] == ["1", "2", "3"]
    assert (answers[0]["grace"], answers[0]["jobLimit"]) == ("1.500s", 4096)
    assert answers[1]["missing"] == [{"jobId": "other", "reason": "SESSION_NOT_FOUND"}]
    assert {event["session"] for event in events} <= {session}
    assert responses[-1] == {"withdrawn": {"jobCount": 1}}


def test_hints_are_answered_one_by_one(curl: Curl, session: str) -> None:
    """By name: accepted, missing."""
    actions = [
        {"actionId": "a", "session": session, "expect": {"returnIn": "30s"}},
        {"actionId": "b", "session": "sessions/nobody", "retain": {}, "ttl": "60s", "priority": 5},
    ]
    (response,) = curl.call("HintService/Hint", {"messageId": "m", "actions": actions})

    assert response["results"] == [
        {"actionId": "a", "outcome": "HINT_OUTCOME_ACCEPTED"},
        {"actionId": "b", "outcome": "HINT_OUTCOME_MISSING", "reason": "SESSION_NOT_FOUND"},
    ]


def test_a_missing_session_is_told_by_its_reason(curl: Curl) -> None:
    """The exit code carries the gRPC code, the details the reason and its facts."""
    code, info = curl.fail("SessionService/GetSession", {"name": "sessions/nobody"})

    assert (code, info.reason, info.domain) == (NOT_FOUND, "SESSION_NOT_FOUND", "ctxcache")
    assert info.metadata["session"] == "sessions/nobody"


def test_a_malformed_field_is_named(curl: Curl) -> None:
    """ErrorInfo says which field and what is wrong with it."""
    code, info = curl.fail("SessionService/GetSession", {"name": "nobody"})

    assert (code, info.reason) == (INVALID_ARGUMENT, "INVALID_FIELD")
    assert info.metadata["field"] == "name"


def test_rows_that_changed_on_the_way_are_refused(curl: Curl, session: str, model: Json) -> None:
    """A checksum that does not hold ends the append, and nothing of it is visible."""
    messages = append(session, model)
    messages[1]["chunk"]["checksum"] = "1"

    code, info = curl.fail("SessionService/AppendSession", *messages)

    assert (code, info.reason) == (INVALID_ARGUMENT, "CHECKSUM_MISMATCH")
    (found,) = curl.call("SessionService/GetSession", {"name": session})
    assert "tokenCount" not in found


def test_a_conditional_change_of_another_generation_is_refused(curl: Curl, session: str) -> None:
    """The error says which generation the session is at."""
    request = {"name": session, "ifGenerationMatch": "7", "keepFirst": "0"}

    code, info = curl.fail("SessionService/TruncateSession", request)

    assert (code, info.reason) == (ABORTED, "GENERATION_MISMATCH")
    (found,) = curl.call("SessionService/GetSession", {"name": session})
    assert info.metadata["actual"] == found["generation"]
