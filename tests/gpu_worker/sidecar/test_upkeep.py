"""`ctxcache worker age` and `cost` as an operator runs them: processes, on a real store."""

import json
import os
import shlex
import signal
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.request import urlopen

import pytest
import torch
from server_process import ServerProcess
from tiny_models import build
from transformers import PreTrainedModel
from worker_process import ON_ONE_THREAD, examples_of, nursery

import ctxcache
from ctxcache.client import Client
from ctxcache.client.types import SessionInfo
from ctxcache.format.packing import LOSSY_KINDS
from ctxcache.format.streams import StateKind
from gpu_worker.engines.transformers import TransformersEngine
from gpu_worker.families.model_shape import model_shape
from gpu_worker.model.proof import adapt
from gpu_worker.model.spec import model_spec
from gpu_worker.planning.datasheets import known_profile
from gpu_worker.planning.plan import Method, RestorePlan
from gpu_worker.profiling.measure import hardware_name
from gpu_worker.profiling.profile_file import Measured, profile_path, write_profile
from gpu_worker.saving.aging import STAGED
from gpu_worker.sidecar.upkeep import SessionUpkeep, Stop, UpkeepSettings
from tests.nursery import Forked

PROMPT = list(range(5, 75))
REPLY_TOKENS = 4
LAYERS = 3
HUGE = "1e12"
"""A rent by which nothing is worth keeping."""


@dataclass(frozen=True)
class Ran:
    """A command's output, and its exit code."""

    code: int
    stdout: str
    stderr: str

    @property
    def lines(self) -> list[dict[str, object]]:
        """Its JSON lines."""
        return [json.loads(line) for line in self.stdout.splitlines()]


@dataclass(frozen=True)
class Bed:
    """A store, a model's directory with a profile of it where profiles are looked for, and sessions."""

    server: ServerProcess
    client: Client
    model: PreTrainedModel
    directory: Path

    @property
    def environment(self) -> dict[str, str]:
        """Names the store and the place of profiles."""
        cache = str(self.directory.parent)
        return {**os.environ, "CTXCACHE_TARGET": self.server.target, "XDG_CACHE_HOME": cache}

    def start(self, words: Sequence[str], stdout: int | None, stderr: int) -> Forked:
        """Start a command of the worker's."""
        return nursery().start(ON_ONE_THREAD, words, self.environment, stdout=stdout, stderr=stderr)

    def run(self, *words: str) -> Ran:
        """Run a command of the worker's to its end."""
        outputs = [self.directory.with_name(f"std{name}") for name in ("out", "err")]
        with outputs[0].open("w") as stdout, outputs[1].open("w") as stderr:
            code = self.start(words, stdout.fileno(), stderr.fileno()).wait(180)
        return Ran(code, *(path.read_text() for path in outputs))

    def age(self, *words: str) -> Ran:
        """Run `age` on this store; whatever is not used at the moment is idle."""
        return self.run("age", str(self.directory), "--thaw-s", "0", *words)

    def example(self, name: str, number: int) -> list[str]:
        """An example that a command's help ends with, on this store and any port."""
        line = examples_of(name)[number].replace("/models/smollm2", str(self.directory))
        return shlex.split(line.replace(":7424", ":0"))[2:]

    def save(self, session_id: str) -> SessionInfo:
        """A session of one turn, saved as K/V."""
        plan = RestorePlan.uniform(Method.KV, LAYERS)
        spec = model_spec(self.model, model_id="tiny", packed_kinds=LOSSY_KINDS)
        with TransformersEngine(self.model, self.client, spec, plan) as engine:
            engine.turn(session_id, PROMPT, max_new_tokens=REPLY_TOKENS, eos_token_ids=())
            assert engine.wait(session_id) is None
        return self.client.sessions.get(f"sessions/{session_id}")

    def kinds(self, name: str) -> set[StateKind]:
        """The kinds of a session's rows, beside its token ids."""
        return {stream.kind for stream in self.client.sessions.get(name).streams()} - {StateKind.TOKENS}


@pytest.fixture(scope="module")
def bed(server: ServerProcess, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bed]:
    """One store and one model for all of them, each test with sessions of its own."""
    path = tmp_path_factory.mktemp("upkeep")
    model = build("llama")
    model.save_pretrained(path / "smollm2")
    torch.set_num_threads(1)
    hardware = hardware_name(torch.device("cpu"))
    profiles = path / "ctxcache" / "profiles"
    slow = replace(known_profile("cpu"), gemm_flops_per_s=1e6, attention_flops_per_s=1e6)
    measured = Measured(model_shape(adapt(model), "smollm2"), slow)
    write_profile(profile_path(profiles, hardware=hardware, model="smollm2"), measured)
    with ctxcache.connect(server.target) as client:
        client.models.register(model_spec(model, model_id="tiny", packed_kinds=LOSSY_KINDS))
        yield Bed(server, client, model, path / "smollm2")


def _left(client: Client) -> list[str]:
    return [one.name for one in client.sessions.list() if one.name.startswith(f"sessions/{STAGED}")]


def test_a_dry_run_says_forms_and_prices_and_changes_nothing(bed: Bed) -> None:
    """Each session by a line; what it says of bytes and bringing back is what `cost` says."""
    saved = bed.save("chat-17")
    dear = {str(line["session"]): line for line in bed.age("--dry-run", "--json", "--rent", HUGE).lines}
    cheap = bed.run(*bed.example("age", 0))
    cost = bed.run(*bed.example("cost", 0), f"sessions/{saved.name[9:]}")

    assert bed.client.sessions.get(saved.name) == saved
    line = dear[saved.name]
    assert (line["form"], line["due"], line["token_count"]) == ("kv:0-2", "tokens", saved.token_count)
    assert line["due_size_bytes"] == 4 * saved.token_count
    assert line["rent_s_per_hour"] == pytest.approx(float(HUGE) * float(str(line["size_bytes"])) / 1e9)
    (shown,) = [one for one in cheap.stdout.splitlines() if one.startswith(f"{saved.name} ")]
    assert (cheap.code, "  kv:0-2 " in shown) == (0, True)
    assert "->" not in shown
    assert cost.lines[0] == cost.lines[1]
    assert cost.lines[0]["token_count"] == saved.token_count
    # Token ids are read for a recomputation alone.
    assert cost.lines[0]["size_bytes"] == float(str(line["size_bytes"])) - 4 * saved.token_count


def test_a_sweep_changes_what_is_due_and_that_once(bed: Bed) -> None:
    """Idle sessions of the directory's model, and no other's; a second sweep finds nothing to do."""
    names = [bed.save(f"due-{number}").name for number in range(3)]
    other = model_spec(bed.model, model_id="other", weights_digest="another")
    bed.client.sessions.create(bed.client.models.register(other), id="others")
    bed.client.sessions.open(names[2]).update(is_pinned=True)
    first = bed.age("--json", "--rent", HUGE)
    again = bed.age("--json", "--rent", HUGE)

    assert (first.code, again.code) == (0, 0), first.stderr
    changed = {line["session"] for line in first.lines if line["is_changed"]}
    assert changed >= set(names[:2])
    assert not changed & {names[2], "sessions/others"}
    assert [bed.kinds(name) for name in names] == [set(), set(), {StateKind.KV}]
    assert "changed" in first.stderr
    assert not again.lines
    assert not _left(bed.client)


def test_sigterm_ends_it_between_two_sessions(bed: Bed) -> None:
    """Told sessions are changed, the others are as they were; the process says so, and ends well."""
    names = {bed.save(f"stopped-{number}").name for number in range(4)}
    errors = bed.directory.with_name("stopped.err")
    with errors.open("w") as stderr:
        words = [*bed.example("age", 1), "--rent", HUGE, "--thaw-s", "0", "--json"]
        process = bed.start(words, None, stderr.fileno())
        assert process.stdout is not None
        told = [json.loads(process.stdout.readline())]
        address = errors.read_text().partition("metrics at ")[2].split()[0]
        with urlopen(f"http://{address}/metrics") as answer:
            shown = answer.read().decode()
        process.send_signal(signal.SIGTERM)
        told += [json.loads(line) for line in process.stdout.read().splitlines()]
        code = process.wait(180)

    assert code == 0, errors.read_text()
    assert 'ctxcache_upkeep_sessions_total{reason="",result="changed"}' in shown
    assert f"{len(told)} changed" in errors.read_text()
    changed = {str(line["session"]) for line in told}
    assert all(bed.kinds(name) == (set() if name in changed else {StateKind.KV}) for name in names)
    assert not _left(bed.client)


def test_a_sweep_that_is_told_to_stop_looks_at_no_further_session(bed: Bed) -> None:
    """In process, where a signal cannot come late: one session is changed, and the next one is not."""

    class Asked(Stop):
        def __init__(self) -> None:
            self.is_set = False

    names = {bed.save(f"asked-{number}").name for number in range(3)}
    settings = UpkeepSettings(
        bed.directory, datasheet=known_profile("cpu"), thaw_s=0.0, rent_s_per_gb_hour=float(HUGE)
    )
    stop, upkeep = Asked(), SessionUpkeep(bed.client, settings)
    try:
        for _, aged in upkeep.sweep(stop):
            stop.is_set = aged is not None
    finally:
        upkeep.close()

    assert upkeep.counts.changed == 1
    assert upkeep.counts.sweeps.total() == 0
    assert sum(bed.kinds(name) == {StateKind.KV} for name in names) >= 2


@pytest.mark.parametrize(
    ("words", "code", "problem"),
    [
        (["--every", "60", "--dry-run"], 5, "a dry run is one look"),
        (["--model", "models/nobody"], 3, "models/nobody is not registered"),
        (["--hardware", "abacus"], 5, "'abacus' is not one of"),
        (["--rent", "0"], 5, "rent: 0.0 s per GB and hour is none"),
        (["--returning", "1.5"], 2, "--returning"),
        (["--device", "cuda:7"], 5, "cannot be loaded"),
        (["--store", "127.0.0.1:1"], 6, "no answer from 127.0.0.1:1"),
    ],
)
def test_mistakes_are_one_sentence_and_a_code(bed: Bed, words: list[str], code: int, problem: str) -> None:
    """Nothing is changed by what cannot be."""
    ran = bed.age(*words)

    assert (ran.code, problem in ran.stderr, ran.stdout) == (code, True, ""), ran.stderr


def test_a_model_without_profile_or_of_another_kind_is_refused(bed: Bed, tmp_path: Path) -> None:
    """A price that is not known throws nothing away; other models' sessions have no cost here."""
    bed.save("priced")
    unpriced = bed.age("--directory", str(tmp_path), "--rent", HUGE)
    build("qwen2").save_pretrained(tmp_path / "qwen")
    unknown = bed.run("age", str(tmp_path / "qwen"))
    wrong = bed.run("age", str(tmp_path / "qwen"), "--model", "models/tiny")
    foreign = model_spec(bed.model, model_id="foreign", weights_digest="another")
    bed.client.sessions.create(bed.client.models.register(foreign), id="foreign")
    costs = [bed.run("cost", str(bed.directory), name) for name in ("foreign", "nowhere")]

    assert (unpriced.code, "none of tiny on this machine: `ctxcache worker profile" in unpriced.stderr) == (
        5,
        True,
    )
    assert (unknown.code, "the store has no model that lies in" in unknown.stderr) == (5, True)
    assert (wrong.code, "is not what lies in" in wrong.stderr) == (4, True)
    assert [ran.code for ran in costs] == [4, 3]
    assert bed.kinds("sessions/priced") == {StateKind.KV}
