"""Upkeep: a process with a model of its own that keeps idle sessions in smaller forms, and says their costs.

The store says which models there are. Those that lie in a directory, by fingerprint and probe, are looked
after; the others' sessions are not touched. A sweep looks at one session after the other, and stops between
two of them. Prices are those of a profile that was measured here: without one, nothing is re-encoded, since a
price that is wrong throws rows away that are dear to make.

Worst case: a store that is gone in the middle of a sweep, which the next one begins anew; and a directory
whose weights are read whole to find that the store has no such model.
"""

import os
import select
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from ctxcache.client import Client
from ctxcache.client.types import ModelInfo
from ctxcache.errors import (
    CacheError,
    DeadlineExceeded,
    InvalidArgument,
    ModelFingerprintMismatch,
    Unavailable,
)
from ctxcache.format.model import ModelSpec
from gpu_worker.engines.transformers import TransformersEngine
from gpu_worker.families.model_shape import model_shape
from gpu_worker.forms.rows import torch_dtype
from gpu_worker.model.proof import adapt
from gpu_worker.model.spec import check_same, digest_again
from gpu_worker.pipeline.planned import ReturnCost
from gpu_worker.planning.layout import Return
from gpu_worker.planning.profile import Profile
from gpu_worker.profiling.measure import hardware_name
from gpu_worker.profiling.profile_file import Measured, profile_path, read_profile
from gpu_worker.saving.aging import Aged, Aging, SessionLook, kinds_text
from gpu_worker.sidecar.metrics import MetricsServer, UpkeepCounts

FIELD = "DIRECTORY"


@dataclass(frozen=True, slots=True)
class UpkeepSettings:
    """The sessions to look after, and the prices."""

    directory: Path
    models: tuple[str, ...] = ()
    """Names of models in the store; none: all that lie in the directory."""
    device: str = "cpu"
    profile_file: Path | None = None
    profile_directory: Path | None = None
    datasheet: Profile | None = None
    """Prices of a machine by its datasheet; wins over what was measured."""
    expected: tuple[Return, ...] = ()
    rent_s_per_gb_hour: float = 0.059
    thaw_s: float = 300.0
    returning: float | None = None


class Stop:
    """Set by SIGTERM or SIGINT; the second signal ends the process. Made once, in the main thread."""

    def __init__(self) -> None:
        self.is_set = False
        # Non-blocking: a handler that waited for room in a pipe would hang the process.
        self._read, self._write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        # Written to as a signal comes: right before `select` waits, a handler would run only at its end.
        signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._asked)

    def wait(self, timeout_s: float) -> None:
        """Wait until it is set, at most `timeout_s`."""
        # Not an Event: its lock may be held by the very thread that a handler interrupts.
        select.select([self._read], [], [], timeout_s)

    def _asked(self, number: int, _frame: object) -> None:
        # The second signal of that number ends the process, in
        # the middle of a session: it stays whole either way.
        signal.signal(number, signal.SIG_DFL)
        self.is_set = True


class SessionUpkeep:
    """The models of one directory in one store. Close it."""

    def __init__(self, client: Client, wanted: UpkeepSettings) -> None:
        """Load the model, and find it in the store.

        Raises InvalidArgument(field=...), ModelNotFound, ModelFingerprintMismatch, ModelProbeMismatch,
        UnsupportedArchitecture, Unavailable.
        """
        self._client, self._wanted = client, wanted
        self.counts = UpkeepCounts()
        self._engines: dict[str, TransformersEngine] = {}
        self._agings: dict[str, Aging] = {}
        self._fingerprints: dict[bytes, str] = {}
        model, specs = _found(client, wanted)
        try:
            for spec in specs:
                profile = wanted.datasheet or _profile(model, spec, wanted)
                name = f"models/{spec.model_id}"
                engine = TransformersEngine(model, client, spec, profile=profile, expected=wanted.expected)
                self._engines[name] = engine
                self._fingerprints[spec.fingerprint()] = name
                self._agings[name] = engine.aging(
                    rent_s_per_gb_hour=wanted.rent_s_per_gb_hour,
                    thaw_s=wanted.thaw_s,
                    returning=wanted.returning,
                )
        except BaseException:
            self.close()
            raise

    @property
    def models(self) -> tuple[str, ...]:
        """Names of the models that are looked after."""
        return tuple(self._engines)

    def close(self) -> None:
        """End the engines' threads."""
        for engine in self._engines.values():
            engine.close()

    def cost(self, session_id: str) -> ReturnCost:
        """The cost of bringing a session back now. Raises SessionNotFound, ModelFingerprintMismatch."""
        session = self._client.sessions.get(f"sessions/{session_id}")
        name = self._fingerprints.get(session.model_fingerprint)
        if name is None:
            raise ModelFingerprintMismatch(
                f"{session.name} is of {session.model}, which {self._wanted.directory} does not have",
                model=session.model,
                actual=session.model_fingerprint.hex(),
                expected=", ".join(each.hex() for each in self._fingerprints),
            )
        return self._engines[name].cost(session_id)

    def serve_metrics(self, address: str, opened: ExitStack) -> str:
        """Serve the counts until `opened` is closed. Returns `host:port`. Raises AddressUnusable."""
        server = MetricsServer(address, self.counts)
        opened.callback(server.stop)
        return server.address

    @staticmethod
    def stopping() -> Stop:
        """From here on signals end a sweep between two sessions."""
        return Stop()

    @staticmethod
    def facts(look: SessionLook, aged: Aged | None) -> dict[str, object]:
        """The facts of a session's line: bytes, seconds, its form, and the form that is due, if any."""
        line: dict[str, object] = {
            "session": look.session.name,
            "token_count": look.session.token_count,
            "idle_s": round(look.idle_s, 3),
            "form": kinds_text(look.form.kinds),
            "size_bytes": round(look.form.size_bytes),
            "rent_s_per_hour": look.rent_s_per_hour,
            "back_s": look.form.back_s,
        }
        if look.due is not None:
            line |= {
                "due": kinds_text(look.due.kinds),
                "due_size_bytes": round(look.due.size_bytes),
                "due_back_s": look.due.back_s,
            }
        return line if aged is None else {**line, "is_changed": not aged.reason, "reason": aged.reason}

    def looks(self) -> Iterator[SessionLook]:
        """All sessions as they are, and the form that each is due; nothing is changed."""
        for aging in self._agings.values():
            yield from aging.looks()

    def sweep(self, stop: Stop) -> Iterator[tuple[SessionLook, Aged | None]]:
        """Look at every session once, and give each the form that it is due, until `stop` is set.

        Raises Unavailable, DeadlineExceeded.
        """
        counts = self.counts
        try:
            for aging in self._agings.values():
                for look in aging.looks():
                    aged = aging.aged(look)
                    counts.returning = aging.returning
                    if aged is None:
                        counts.kept += 1
                    elif aged.reason:
                        counts.left[aged.reason] += 1
                    else:
                        counts.changed += 1
                        counts.freed_bytes += max(aged.before_bytes - aged.after_bytes, 0.0)
                    # Yield before `stop` is looked at: every changed session is told.
                    yield look, aged
                    if stop.is_set:
                        return
        except CacheError:
            counts.sweeps["failed"] += 1
            raise
        counts.sweeps["whole"] += 1

    def run(
        self,
        every_s: float,
        stop: Stop,
        tell: Callable[[SessionLook, Aged | None], None],
        failed: Callable[[CacheError], None],
    ) -> None:
        """Sweep every so often until `stop` is set.

        A store that does not answer is told to `failed`, and asked again the next time. Raises other errors.
        """
        while not stop.is_set:
            try:
                for look, aged in self.sweep(stop):
                    tell(look, aged)
            # A store that restarts is no reason to end a process that has a model loaded.
            except (Unavailable, DeadlineExceeded) as error:
                failed(error)
            stop.wait(every_s)


# -- which model -----------------------------------------------------------------------------------------


def _found(client: Client, wanted: UpkeepSettings) -> tuple[PreTrainedModel, list[ModelSpec]]:
    """The directory's model, and the descriptions in the store that are of it."""
    if not (wanted.directory / "config.json").is_file():
        raise InvalidArgument(
            field=FIELD, problem=f"{wanted.directory} has no model: there is no config.json"
        )
    infos = [client.models.get(name) for name in wanted.models] or list(client.models.list())
    candidates = [info.spec for info in infos if wanted.models or _may_be(info, wanted.directory)]
    refused: list[CacheError] = []
    by_dtype: dict[torch.dtype, tuple[PreTrainedModel, list[ModelSpec]]] = {}
    # The model is loaded once for each type that the store has it in. Matches in two types need a name.
    for dtype in dict.fromkeys(torch_dtype(spec.dtype) for spec in candidates):
        loading = _Directory(wanted.directory, dtype, wanted.device)
        same = []
        for spec in (each for each in candidates if torch_dtype(each.dtype) is dtype):
            try:
                loading.check(spec)
                same.append(spec)
            # Where the model was asked for by name, the first refusal is told.
            except (InvalidArgument, ModelFingerprintMismatch) as error:
                refused.append(error)
        if same:
            by_dtype[dtype] = loading.model, same
    if refused and wanted.models:
        raise refused[0]
    if not by_dtype:
        names = ", ".join(info.name for info in infos[:8]) or "none at all"
        raise InvalidArgument(
            field=FIELD, problem=f"the store has no model that lies in {wanted.directory}; it has {names}"
        )
    if len(by_dtype) > 1:
        names = ", ".join(f"models/{spec.model_id}" for _, specs in by_dtype.values() for spec in specs)
        raise InvalidArgument(field="--model", problem=f"{names} compute in different types: name one")
    return next(iter(by_dtype.values()))


def _may_be(info: ModelInfo, directory: Path) -> bool:
    """Whether a model of the store has the directory's size: only those are compared by their weights."""
    config = AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    text = config.get_text_config(decoder=True)
    return (info.layer_count, info.hidden_size) == (text.num_hidden_layers, text.hidden_size)


class _Directory:
    """One directory's model in one type, which is compared with the store's."""

    def __init__(self, path: Path, dtype: torch.dtype, device: str) -> None:
        self._path = path
        try:
            loaded: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
                path, dtype=dtype, local_files_only=True, trust_remote_code=False
            )
            self.model = loaded.to(torch.device(device)).train(mode=False)  # type: ignore[arg-type]
        except (OSError, ValueError, RuntimeError, AssertionError) as error:
            problem = f"{path} cannot be loaded: {' '.join(str(error).split())[:200]}"
            raise InvalidArgument(field=FIELD, problem=problem) from error
        self._digests: dict[str, str] = {}

    def check(self, spec: ModelSpec) -> None:
        """Compare all that a fingerprint has. Only the engine that saved knows the tokenizer.

        Raises InvalidArgument, ModelFingerprintMismatch.
        """
        check_same(self.model, spec, self._digest(spec.weights_digest), f"lies in {self._path}")

    def _digest(self, described: str) -> str:
        scheme = described.partition(":")[0]
        if scheme not in self._digests:
            self._digests[scheme] = digest_again(described, self._path, self.model, field="weights_digest")
        return self._digests[scheme]


def _profile(model: PreTrainedModel, spec: ModelSpec, wanted: UpkeepSettings) -> Profile:
    """The machine as it was measured for this model. Raises InvalidArgument(field="--profile")."""
    measured = _measured(model, spec, wanted)
    if measured is None:
        problem = (
            f"none of {spec.model_id} on this machine: `ctxcache worker profile {wanted.directory}` "
            "makes one, --hardware takes a datasheet"
        )
        raise InvalidArgument(field="--profile", problem=problem)
    # Prices of another shape would throw rows away that are dear to make.
    if measured.model.layers != model_shape(adapt(model), measured.model.name).layers:
        problem = (
            f"that of {measured.model.name} is of another model than {spec.model_id}, or of another type"
        )
        raise InvalidArgument(field="--profile", problem=problem)
    return measured.profile


def _measured(model: PreTrainedModel, spec: ModelSpec, wanted: UpkeepSettings) -> Measured | None:
    if wanted.profile_file is not None:
        return read_profile(wanted.profile_file)
    hardware = hardware_name(model.device)
    for name in (spec.model_id, wanted.directory.resolve().name) if wanted.profile_directory else ():
        path = profile_path(wanted.profile_directory or Path(), hardware=hardware, model=name)
        if path.is_file():
            return read_profile(path)
    return None
