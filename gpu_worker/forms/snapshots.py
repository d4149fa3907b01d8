"""Snapshots: copies of a model's recurrent and convolution state at some token, in the store beside the rows.

A state is a function of the model and of the tokens before it. So a snapshot is kept under a key of just
these: one block for each layer, in a space of the model's fingerprint and the session's salt. Forks find what
their source left; a session that was cut finds what it had up to the cut, and nothing behind it.

```
   rows        |0 ......... 512 ......... 1024 ......... 1536 ..... 1700|   every token, in the session
   snapshots             [512]          [1024]         [1536]    [1700]     blocks, by the tokens before them
   cut to 1100:                         [1024] + rows 1024..1099
```

Each block says its model, its tokens, its count and its layer once more, and is refused where they are not
those asked for. A snapshot shortens a restore and is never needed for one: rows of all tokens are kept. Worst
case: a snapshot is gone or damaged, and the state is rebuilt from rows further back.
"""

import hashlib
import logging
import struct
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from transformers import Cache

from ctxcache.client import BlockSpace, Client
from ctxcache.client.types import LookupState
from ctxcache.errors import CacheError, DeadlineExceeded, InvalidArgument
from ctxcache.format.streams import DType
from gpu_worker.errors import SnapshotMismatch
from gpu_worker.families.adapter import Adapter
from gpu_worker.families.caches import STATE_LAYERS, States, put_states, states_in
from gpu_worker.forms.rows import row_dtype, torch_dtype
from gpu_worker.planning.layout import SNAPSHOT_GRAIN_TOKENS

log = logging.getLogger(__name__)

GRAIN_TOKENS = SNAPSHOT_GRAIN_TOKENS
"""Snapshots on the way are taken at multiples of this, and looked for there."""
LAYOUT_TAG = "ctxcache.state.v1"
_DOMAIN = b"ctxcache.state.v1"
_MAGIC = b"CTXCSTA\0"
_VERSION = 1
_HEAD = struct.Struct("<8sIiq32s32sII")
"""Magic, version, layer, tokens, fingerprint, digest of the tokens, tensors, zero."""
_TENSOR = struct.Struct("<4I6I")
"""Role, number, dtype, axes, and the size of each axis."""
_ROLES = {1: "convolution", 2: "recurrent"}
_NUMBERS = {role: number for number, role in _ROLES.items()}
_MOST_AXES = 6
_ALIGN_BYTES = 16
_LOOK_UP_KEYS = 256
PENDING_LIMIT = 4
"""Snapshots that wait to be put; another one is not taken then."""

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Snapshot:
    """States of layers behind the first `token_count` tokens of a session."""

    token_count: int
    layers: Mapping[int, States]

    @classmethod
    def of(cls, adapter: Adapter, cache: Cache, token_count: int) -> "Snapshot":
        """A copy of what a cache of so many tokens holds."""
        return cls(
            token_count,
            {
                # transformers writes into the state's own tensor at the next token.
                layer: {name: state.clone() for name, state in states_of(cache, layer).items()}
                for layer in adapter.state_layers
            },
        )

    @property
    def standing(self) -> Mapping[int, int]:
        """By layer, the token at which its state stands."""
        return dict.fromkeys(self.layers, self.token_count)

    def check(self, adapter: Adapter, token_count: int) -> None:
        """Refuse states that a cache of `token_count` tokens cannot go on from. Raises SnapshotMismatch."""
        for layer, states in self.layers.items():
            if not 0 < self.token_count <= token_count:
                problem = f"it is of {self.token_count} tokens, the session has {token_count}"
                raise SnapshotMismatch(layer=layer, problem=problem)
            # States are compared with those of the proof's own pass: names, shapes and types.
            _check(adapter, layer, states)

    def put(self, adapter: Adapter, cache: Cache) -> None:
        """Have an empty cache go on from these states, which were checked."""
        for layer, states in self.layers.items():
            put_states(cache.layers[layer], states, adapter.layers[layer].device)


def states_of(cache: Cache, layer: int) -> States:
    """The tensors of a layer's state. Raises SnapshotMismatch where the cache has none."""
    held = cache.layers[layer]
    states = states_in(held) if isinstance(held, STATE_LAYERS) else {}
    if not states:
        raise SnapshotMismatch(layer=layer, problem="the cache holds none")
    return states


def _check(adapter: Adapter, layer: int, states: States) -> None:
    """Refuse what the model's own pass does not leave."""
    recurrence = adapter.layers[layer].recurrence if 0 <= layer < len(adapter.layers) else None
    if recurrence is None:
        raise SnapshotMismatch(layer=layer, problem="the layer keeps none")
    expected = {state.name: (state.shape, state.dtype) for state in recurrence.states}
    found = {name: (tuple(state.shape), state.dtype) for name, state in states.items()}
    if found != expected:
        raise SnapshotMismatch(layer=layer, problem=f"it is {found}, the model's is {expected}")


# -- bytes -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Identity:
    """The identity of a snapshot: its model, its tokens, and how many they are."""

    fingerprint: bytes
    digest: bytes
    token_count: int

    def key(self, layer: int) -> bytes:
        """The key of one layer's block, 32 bytes."""
        # One block for each layer: a plan takes the states of some layers and rebuilds the others.
        return hashlib.sha256(self.digest + struct.pack("<i", layer)).digest()


def identities(fingerprint: bytes, token_ids: Sequence[int], counts: Sequence[int]) -> Iterator[Identity]:
    """The identity at each of some counts of tokens, which ascend."""
    running = hashlib.sha256(_DOMAIN + fingerprint)
    data = np.asarray(token_ids, "<i4")
    done = 0
    for count in counts:
        running.update(data[done:count].tobytes())
        done = count
        # Keys of a session's prefixes in one pass over its tokens:
        #
        #     running   H(domain, model) ── tokens 0..31 ── tokens 32..63 ── ...
        #     copies                     └─► + 32 = key    └─► + 64 = key
        digest = running.copy()
        digest.update(struct.pack("<q", count))
        yield Identity(fingerprint, digest.digest(), count)


def encoded(identity: Identity, layer: int, states: States) -> Bytes:
    """A layer's states as a block: docs/chunk_format.md. Raises UnsupportedDtype."""
    head = bytearray(
        _HEAD.pack(
            _MAGIC,
            _VERSION,
            layer,
            identity.token_count,
            identity.fingerprint,
            identity.digest,
            len(states),
            0,
        )
    )
    for name, state in states.items():
        role, _, number = name.partition(" ")
        sizes = [*state.shape, *[0] * (_MOST_AXES - state.ndim)]
        head += _TENSOR.pack(_NUMBERS[role], int(number), row_dtype(state.dtype), state.ndim, *sizes)
    # A block: [ head │ a record of each tensor ][ tensor ][ tensor ] ..., each begun on 16 bytes.
    begins = [_aligned(len(head))]
    for state in states.values():
        begins.append(_aligned(begins[-1] + state.nbytes))
    block = np.zeros(begins[-1], np.uint8)
    block[: len(head)] = np.frombuffer(head, np.uint8)
    for begin, state in zip(begins, states.values(), strict=False):
        rows = torch.from_numpy(block[begin : begin + state.nbytes]).view(state.dtype)
        rows.view(state.shape).copy_(state)
    return block


def decoded(identity: Identity, layer: int, block: Bytes) -> States:
    """The states of a block, views of it, if it is the one that is asked for. Raises SnapshotMismatch."""
    try:
        return _decoded(identity, layer, block)
    except (struct.error, ValueError, RuntimeError, KeyError) as error:
        raise SnapshotMismatch(layer=layer, problem=f"its bytes are no snapshot: {error}") from error


def _decoded(identity: Identity, layer: int, block: Bytes) -> States:
    magic, version, of, count, fingerprint, digest, tensor_count, zero = _HEAD.unpack_from(block.data)
    if (magic, version, zero) != (_MAGIC, _VERSION, 0):
        raise SnapshotMismatch(layer=layer, problem="its bytes are no snapshot of this version")
    for what, stored, expected in (
        ("layer", of, layer),
        ("token count", count, identity.token_count),
        ("model", fingerprint.hex(), identity.fingerprint.hex()),
        ("digest of tokens", digest.hex(), identity.digest.hex()),
    ):
        if stored != expected:
            raise SnapshotMismatch(layer=layer, problem=f"its {what} is {stored}, not {expected}")
    begin = _aligned(_HEAD.size + tensor_count * _TENSOR.size)
    states: dict[str, torch.Tensor] = {}
    for index in range(tensor_count):
        role, number, dtype, axes, *sizes = _TENSOR.unpack_from(block.data, _HEAD.size + index * _TENSOR.size)
        shape, kind = sizes[:axes], torch_dtype(DType(dtype))
        size_bytes = int(np.prod(shape, dtype=np.int64)) * kind.itemsize
        tensor = torch.from_numpy(block[begin : begin + size_bytes]).view(kind).view(shape)
        states[f"{_ROLES[role]} {number}"] = tensor
        begin = _aligned(begin + size_bytes)
    # A block that is cut or has more behind it is damaged, or of another layout.
    if begin != len(block):
        raise SnapshotMismatch(layer=layer, problem=f"it has {len(block)} bytes, its tensors take {begin}")
    return states


def _aligned(size_bytes: int) -> int:
    return -(-size_bytes // _ALIGN_BYTES) * _ALIGN_BYTES


# -- in the store ------------------------------------------------------------------------------------


class Snapshots:
    """One model's snapshots in a store. Used by one thread; puts run on the client's."""

    def __init__(
        self,
        client: Client,
        adapter: Adapter,
        fingerprint: bytes,
        *,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        """`check` raises why states that were computed until now are not the model's."""
        self._client, self._adapter, self._fingerprint = client, adapter, fingerprint
        self._check = check
        self._pending: deque[Future[int]] = deque()
        self.taken_count = 0
        """Snapshots that were put, or are about to be."""
        self.skipped_count = 0
        """Snapshots that were not taken, because others waited."""

    def latest(self, token_ids: Sequence[int], salt: bytes = b"") -> int:
        """The most of these tokens of which the store has a snapshot; 0 for none.

        Looks for a snapshot of all tokens, and at multiples of GRAIN_TOKENS. A store that fails has none.
        """
        count = len(token_ids)
        # The end is looked for too: turns end anywhere, and leave a snapshot there.
        counts = [*range(GRAIN_TOKENS, count, GRAIN_TOKENS), count] if count else []
        prefixes = list(identities(self._fingerprint, token_ids, counts))[::-1]
        # One layer stands for all: its block is put last (`take`), so that the others are there already.
        first, space = self._adapter.state_layers[0], self._space(salt)
        try:
            # From the longest prefix down: most restores find theirs in the first request.
            for begin in range(0, len(prefixes), _LOOK_UP_KEYS):
                some = prefixes[begin : begin + _LOOK_UP_KEYS]
                answers = self._client.blocks.look_up(space, [each.key(first) for each in some])
                for identity, answer in zip(some, answers, strict=True):
                    if answer.state is LookupState.HIT:
                        return identity.token_count
        except CacheError as error:
            # No restore needs a snapshot: a store that fails costs the shortcut, not the session.
            log.warning("snapshots_not_found reason=%s error=%s", error.reason, error)
        return 0

    def load(
        self, token_ids: Sequence[int], token_count: int, layers: Sequence[int], salt: bytes = b""
    ) -> Snapshot | None:
        """The states of some layers at `token_count`; None where one of them is gone or damaged.

        Raises InvalidArgument(field="token_count") for more tokens than there are.
        """
        if not 0 < token_count <= len(token_ids):
            raise InvalidArgument(field="token_count", problem=f"not within [1, {len(token_ids)}]")
        (identity,) = identities(self._fingerprint, token_ids, [token_count])
        try:
            blocks = self._client.blocks.load(self._space(salt), [identity.key(layer) for layer in layers])
            states = {
                layer: decoded(identity, layer, block[0].view(np.uint8))
                for layer, block in zip(layers, blocks, strict=True)
                if block is not None
            }
        except CacheError as error:
            log.warning("snapshot_not_loaded tokens=%d reason=%s error=%s", token_count, error.reason, error)
            return None
        # Plans count on all of these layers: some of them
        # alone would stand at a token that no rows go on from.
        return Snapshot(token_count, states) if len(states) == len(layers) else None

    def take(
        self, cache: Cache, token_ids: Sequence[int], salt: bytes = b"", ttl_s: float | None = None
    ) -> bool:
        """Begin to put the states of a cache that holds just these tokens; False where others still wait.

        The states are copied before this returns: the cache may go on. Raises SnapshotMismatch.
        """
        while self._pending and self._pending[0].done():
            _settle(self._pending.popleft())
        # Copies of states take memory: behind a slow store they would pile up.
        if len(self._pending) >= PENDING_LIMIT:
            self.skipped_count += 1
            return False
        (identity,) = identities(self._fingerprint, token_ids, [len(token_ids)])
        blocks = {
            identity.key(layer): encoded(identity, layer, states_of(cache, layer))
            for layer in reversed(self._adapter.state_layers)
        }
        try:
            self._check()
            self._pending.append(self._client.blocks.put_async(self._space(salt), blocks, ttl_s=ttl_s))
        except CacheError as error:
            log.warning("snapshot_not_put reason=%s error=%s", error.reason, error)
            self.skipped_count += 1
            return False
        self.taken_count += 1
        return True

    def wait(self, timeout_s: float = 60.0) -> None:
        """Wait until what was taken is in the store, or was refused by it. Raises DeadlineExceeded."""
        while self._pending:
            _settle(self._pending[0], timeout_s)
            self._pending.popleft()

    def _space(self, salt: bytes) -> BlockSpace:
        return BlockSpace(model_fingerprint=self._fingerprint, layout_tag=LAYOUT_TAG, salt=salt)


def _settle(future: Future[int], timeout_s: float = 0.0) -> None:
    """Take the result of a put. A store without room keeps no snapshot: sessions come back from rows."""
    try:
        future.result(timeout_s)
    except TimeoutError as error:
        raise DeadlineExceeded(target="a snapshot", timeout_s=str(timeout_s)) from error
    except CacheError as error:
        log.warning("snapshot_not_put reason=%s error=%s", error.reason, error)
