"""After a restart: compare a server with the ledger, and see that space adds up.

Asks the server as any client would, before anyone works on it. Worst case: it does not answer, which
the caller sees as Unavailable.
"""

import time
from contextlib import suppress

from ctxcache.client import CallerModel, Client
from ctxcache.client.types import SessionInfo, StorageTier, StoreStats
from ctxcache.errors import CapacityExceeded, SessionNotFound
from tests.faults.expected import Expected
from tests.faults.ledger import Ledger
from tests.faults.workload import Terms

EMPTYING_TIMEOUT_S = 20.0
BOOKS_TIMEOUT_S = 8.0
"""Sessions that expire between two looks at the books, and joins, are told from bytes that stay lost."""


def compare(client: Client, ledger: Ledger, terms: Terms) -> None:
    """Judge every session there is and every one there should be; what is found is expected from now on.

    `client` reads by stream, so that an arena smaller than a session does not matter.
    """
    _check_books(ledger, client, terms.copies, is_fresh=True)
    asked_ns = time.time_ns()
    present = {session.name: session for session in client.sessions.list()}
    answered_ns = time.time_ns()
    for name in present.keys() - ledger.sessions.keys():
        ledger.find(f"{name} is there: it was deleted, or never created")
        _remove(client, name)
    for problem in ledger.blocks.compare(client, may_be_lost=terms.may_evict):
        ledger.find(problem)
    ledger.count("verified_block_count", len(ledger.blocks.there))
    for session in list(ledger.sessions.values()):
        if (view := present.get(session.name)) is None:
            _check_absence(ledger, session, answered_ns, terms)
        elif session.expire_times_ns()[1] <= asked_ns:
            ledger.find(f"{session.name} is there, and has expired")
        else:
            _check_session(client, ledger, session, view)
    _check_books(ledger, client, terms.copies, is_fresh=False)


def empty(client: Client, ledger: Ledger) -> None:
    """Delete everything and see every byte come back."""
    for session in list(client.sessions.list()):
        _remove(client, session.name)
    ledger.sessions.clear()
    ledger.blocks.delete_all(client)
    # Expired blocks are removed when upkeep comes by, and their bytes come back behind their records.
    deadline_s = time.monotonic() + EMPTYING_TIMEOUT_S
    while (left := _left(client.admin.stats())) and time.monotonic() < deadline_s:
        time.sleep(0.05)
    if left:
        ledger.find(f"all was deleted, and there are {left}")


def _left(stats: StoreStats) -> str:
    used = [f"{tier.used_bytes} B in {tier.path}" for tier in stats.tiers if tier.used_bytes]
    counts = ((stats.session_count, "sessions"), (stats.segment_count, "segments"))
    return ", ".join([f"{count} {what}" for count, what in counts if count] + used)


def _remove(client: Client, name: str) -> None:
    with suppress(SessionNotFound):  # it has expired
        client.sessions.open(name).delete()


def _check_absence(ledger: Ledger, session: Expected, now_ns: int, terms: Terms) -> None:
    may_evict = terms.may_evict and not session.is_pinned
    if not may_evict and not session.is_gone_allowed(now_ns):
        ledger.find(f"{session.name} is lost with {len(session.live)} tokens")
    del ledger.sessions[session.name]


def _check_session(client: Client, ledger: Ledger, session: Expected, view: SessionInfo) -> None:
    if view.durable_token_count != view.token_count:
        ledger.find(f"{session.name}: {view.token_count} tokens after a restart, not all durable")
    expire_time_ns = view.expire_time_ns or 0
    has_sliding_expiry = view.ttl_ns is not None
    if not has_sliding_expiry and expire_time_ns not in session.expire_times_ns():
        ledger.find(f"{session.name} expires at {expire_time_ns}, not at one of {session.expire_times_ns()}")
    try:
        with client.sessions.open(view, CallerModel(ledger.shape.model)).read() as rows:
            tags, problem = ledger.read_tags(rows)
    except SessionNotFound:
        _check_absence(ledger, session, time.time_ns(), Terms())
        return
    except CapacityExceeded as error:
        ledger.find(f"{session.name} cannot be read: {error}")
        return
    except Exception as error:
        if type(error).__name__ in ("Unavailable", "DeadlineExceeded"):
            raise
        ledger.find(f"{session.name} cannot be read: {type(error).__name__}: {error}")
        del ledger.sessions[session.name]
        _remove(client, session.name)
        return
    ledger.count("verified_token_count", len(tags))
    ledger.find(problem)
    ledger.find(session.judge(tags))
    session.adopt(tags, session.expire_time_ns if has_sliding_expiry else expire_time_ns)
    session.is_done = False
    ledger.find(session.note(view.uid, view.generation))


def _check_books(ledger: Ledger, client: Client, copies: int, *, is_fresh: bool) -> None:
    stats = client.admin.stats()
    least_bytes, most_bytes = ledger.shape.slot_bytes, ledger.shape.longest_slot_bytes
    for tier, name in ((StorageTier.DRAM, "DRAM"), (StorageTier.SSD, "SSD")):
        used_bytes, segment_count = _use(stats, tier)
        if not segment_count * least_bytes <= used_bytes <= segment_count * most_bytes:
            ledger.find(f"{name}: {used_bytes} B are taken by {segment_count} segments")
    if not is_fresh:
        return
    if _use(stats, StorageTier.DRAM) != (0, 0):
        ledger.find("DRAM is taken right after a start")
    deadline_s = time.monotonic() + BOOKS_TIMEOUT_S
    while problems := _differences(client, copies):
        if time.monotonic() > deadline_s:
            for problem in problems:
                ledger.find(problem)
            return
        time.sleep(0.1)


def _differences(client: Client, copies: int) -> list[str]:
    """Where what is taken is not what segments take. While sessions expire, two questions differ in time."""
    problems = []
    stats = client.admin.stats()
    # Each segment has a length of its own: a pass over all of them says what they take.
    held_bytes = sum(step.checked_bytes for step in list(client.admin.verify())[-1:])
    used_bytes = sum(tier.used_bytes for tier in stats.tiers)
    if held_bytes != used_bytes:
        problems.append(f"{used_bytes} B are taken, and segments take {held_bytes} B")
    place_count = copies * stats.segment_count - stats.single_copy_segment_count
    if _use(stats, StorageTier.SSD)[1] != place_count:
        problems.append(f"{place_count} copies of segments, {_use(stats, StorageTier.SSD)[1]} of them on SSD")
    return problems


def _use(stats: StoreStats, tier: StorageTier) -> tuple[int, int]:
    uses = [use for use in stats.tiers if use.tier == tier]
    return sum(use.used_bytes for use in uses), sum(use.segment_count for use in uses)
