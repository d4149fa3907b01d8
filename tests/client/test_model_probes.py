"""Probes in the store.

The first one stays, whatever comes later, restarts and wherever sessions are carried.
"""

import struct
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from far_side import SPEC
from server_process import COMMAND_LINE, ServerProcess

import ctxcache
from ctxcache.client import Client
from ctxcache.client.convert import model_to_wire
from ctxcache.errors import InvalidArgument, ModelFingerprintMismatch, ModelProbeMismatch
from ctxcache.format.model import ModelProbe, ModelSpec, decode_probe
from ctxcache.format.streams import TOKENS, DType, StateKind, Stream, StreamSpec
from ctxcache.v1 import model_pb2

IDS = tuple(range(16))


def probe(scale: float = 1.0, *, dtype: DType = DType.FLOAT32) -> ModelProbe:
    """Three groups of four values; all of them scaled."""
    values = [scale * value for value in (1, -2, 3, 4, 0.5, 0.5, -0.5, 9, 1e6, 2, 2, -2)]
    return ModelProbe(dtype, IDS, 4, struct.pack("<12f", *values))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server of this module's own, which tests kill."""
    with ServerProcess(tmp_path_factory.mktemp("probes") / "data") as running:
        yield running


@pytest.fixture
def client(server: ServerProcess) -> Iterator[Client]:
    """A client of it."""
    with ctxcache.connect(server.target) as connected:
        yield connected


@pytest.fixture
def spec(request: pytest.FixtureRequest) -> ModelSpec:
    """A model that no other test has."""
    return replace(SPEC, model_id="".join(c if c.isalnum() else "-" for c in request.node.name)[:100])


def kept(client: Client, spec: ModelSpec) -> ModelProbe | None:
    """The store's probe of a model."""
    return client.models.get(f"models/{spec.model_id}").probe


def test_the_first_probe_is_kept(client: Client, spec: ModelSpec) -> None:
    """A model may come without one; the first that comes stays, and those that are near it pass."""
    client.models.register(spec)
    assert kept(client, spec) is None
    client.models.register(spec, probe())
    client.models.register(spec, probe(1.0005))
    client.models.register(spec)

    assert kept(client, spec) == probe()
    listed = [model for model in client.models.list() if model.name == f"models/{spec.model_id}"]
    assert [model.probe for model in listed] == [None]


@pytest.mark.parametrize(
    ("mine", "theirs", "passes"),
    [
        (probe(1.002), probe(), False),
        (probe(0.998), probe(), False),
        (probe(1.01, dtype=DType.FLOAT16), probe(), True),
        (probe(1.02, dtype=DType.FLOAT16), probe(), False),
        (probe(1.09), probe(dtype=DType.BFLOAT16), True),
        (probe(1.11), probe(dtype=DType.BFLOAT16), False),
        (probe(-1.0), probe(), False),
        (replace(probe(), token_ids=(1, *IDS[1:])), probe(), False),
        (replace(probe(), group_size=6), probe(), False),
    ],
)
def test_probes_that_lie_apart_are_refused(
    client: Client, spec: ModelSpec, mine: ModelProbe, theirs: ModelProbe, *, passes: bool
) -> None:
    """By the coarser type's tolerance; the error says how far, and what is kept does not change."""
    client.models.register(spec, theirs)

    if passes:
        client.models.register(spec, mine)
    else:
        with pytest.raises(ModelProbeMismatch) as refused:
            client.models.register(spec, mine)
        assert f"models/{spec.model_id} computes something else" in str(refused.value)
        if mine.token_ids == IDS and mine.group_size == 4:
            assert refused.value.facts.keys() >= {"group", "measured", "allowed"}
    assert kept(client, spec) == theirs


def test_a_few_values_far_off_are_no_difference() -> None:
    """A token that goes to another expert, or one huge value, leaves the rest of a group as it is."""
    values = [float(value) for value in range(1, 65)]
    moved = [value * (5.0 if number % 16 == 3 else 1.0001) for number, value in enumerate(values)]
    one, other = (ModelProbe(DType.FLOAT32, IDS, 64, struct.pack("<64f", *each)) for each in (moved, values))

    found = one.difference(other)

    assert found is not None
    assert found.measured < found.allowed


def test_only_one_of_many_is_the_first(client: Client, server: ServerProcess, spec: ModelSpec) -> None:
    """Engines that start at once are compared with one and the same probe."""
    client.models.register(spec)

    def register(number: int) -> bytes:
        with ctxcache.connect(server.target) as own:
            model = model_to_wire(spec, probe(1.0 + number))
            request = model_pb2.RegisterModelRequest(model=model)
            return own.wire.call(own.wire.models.RegisterModel, request).probe.values

    with ThreadPoolExecutor(8) as pool:
        answers = set(pool.map(register, range(8)))

    found = kept(client, spec)
    assert found is not None
    assert answers == {found.values}


@pytest.mark.parametrize(
    "wrong",
    [
        {"dtype": model_pb2.DTYPE_UNSPECIFIED},
        {"dtype": model_pb2.DTYPE_INT8},
        {"token_ids": []},
        {"token_ids": [-1]},
        {"token_ids": [0] * 65},
        {"group_size": 0},
        {"group_size": 5},
        {"group_size": -4},
        {"values": b""},
        {"values": b"\0\0\x80\x3f" * 8193},
        {"values": b"\0\0\x80\x3f" * 3 + b"\0\0\x80"},
        {"values": struct.pack("<4f", 1, 2, 3, float("nan"))},
        {"values": struct.pack("<4f", 1, 2, 3, float("inf"))},
        {"values": bytes(16)},
    ],
)
def test_what_is_no_probe_is_refused(client: Client, spec: ModelSpec, wrong: dict[str, object]) -> None:
    """With the field, and the model is not registered."""
    facts = {"dtype": model_pb2.DTYPE_FLOAT32, "token_ids": IDS, "group_size": 4, "values": probe().values}
    message = model_to_wire(spec)
    message.probe.CopyFrom(model_pb2.ModelProbe(**{**facts, **wrong}))  # type: ignore[arg-type]

    with pytest.raises(InvalidArgument, match=r"model\.probe"):
        client.wire.call(client.wire.models.RegisterModel, model_pb2.RegisterModelRequest(model=message))

    assert spec.model_id not in [model.name.removeprefix("models/") for model in client.models.list()]


def test_bytes_of_a_probe_are_read_or_refused() -> None:
    """At every length and with every head, as a damaged file has them."""
    whole = probe().encode()
    assert decode_probe(whole) == probe()
    damaged = [whole[:size] for size in range(len(whole))]
    damaged += [whole[:at] + b"\x7f" + whole[at + 1 :] for at in range(12)]
    for part in damaged:
        try:
            found = decode_probe(part)
        except ValueError:
            continue
        assert found.problem() == ""
        assert found.encode() == part


def test_probes_survive_and_travel(server: ServerProcess, spec: ModelSpec, tmp_path: Path) -> None:
    """SIGKILL right after the answer, a backup laid out elsewhere, sessions exported to another store."""
    with ctxcache.connect(server.target) as client:
        model = client.models.register(spec, probe())
        session = client.sessions.create(model, id=spec.model_id, layout=[])
        session.append({TOKENS: np.arange(5, dtype=np.int32).reshape(-1, 1)})
    server.kill9()
    server.start()
    with ctxcache.connect(server.target) as client:
        assert kept(client, spec) == probe()
        model = client.models.register(spec, probe())
        client.sessions.open(f"sessions/{spec.model_id}", model).append(
            {TOKENS: np.arange(5, dtype=np.int32).reshape(-1, 1)}
        )
    _run(server.target, "export", "--store", "--to", tmp_path / "backup")
    _run(server.target, "export", spec.model_id, "--to", tmp_path / "export")
    sizes = ("--data-directory", tmp_path / "restored", "--ssd-size-bytes", "64MiB")
    _run(server.target, "import", tmp_path / "backup", "--new-store", *sizes)

    with ServerProcess(tmp_path / "restored") as other, ctxcache.connect(other.target) as client:
        assert kept(client, spec) == probe()
    with ServerProcess(tmp_path / "empty") as other, ctxcache.connect(other.target) as client:
        _run(other.target, "import", tmp_path / "export")
        assert kept(client, spec) == probe()
        client.sessions.open(f"sessions/{spec.model_id}").delete()
        client.admin.delete_model(f"models/{spec.model_id}")
        client.models.register(spec, probe(2.0))
        refused = _run(other.target, "import", tmp_path / "export", code=4)
        assert "MODEL_PROBE_MISMATCH" in refused or "computes something else" in refused
        assert list(client.sessions.list()) == []


def _run(target: str, *arguments: str | Path, code: int = 0) -> str:
    command = [*COMMAND_LINE, "--target", target, *map(str, arguments)]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == code, done.stderr
    return done.stdout + done.stderr


@pytest.mark.parametrize(
    ("changes", "fields", "said"),
    [
        ({"weights_digest": "other"}, "weights_digest", "weights_digest ('w', not 'other')"),
        ({"rope": "x", "settings": "y"}, "rope,settings", "rope ("),
        ({"dtype": DType.FLOAT32}, "dtype", "dtype ("),
    ],
)
def test_what_makes_it_another_model_is_named(
    client: Client, spec: ModelSpec, changes: dict[str, object], fields: str, said: str
) -> None:
    """An id that is taken says by which fields the two models differ."""
    client.models.register(spec)

    with pytest.raises(ModelFingerprintMismatch) as refused:
        client.models.register(replace(spec, **changes))  # type: ignore[arg-type]

    assert refused.value.fields == fields
    assert said in str(refused.value)


def test_packed_kinds_are_named(client: Client, spec: ModelSpec) -> None:
    """A model that may be stored in few bits is another one, and that is what is said."""
    packed = StreamSpec(Stream(0, StateKind.HIDDEN_INT8), 64, DType.PACKED)
    client.models.register(spec)

    with pytest.raises(
        ModelFingerprintMismatch, match="packed kinds: only registered none; only asked for HIDDEN_INT8"
    ):
        client.models.register(replace(spec, streams=(*spec.streams, packed)))
    with pytest.raises(
        ModelFingerprintMismatch, match="the same state kinds, of other layers, row sizes or types"
    ):
        client.models.register(
            replace(spec, streams=tuple(one._replace(row_bytes=8) for one in spec.streams))
        )
