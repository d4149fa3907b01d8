"""SSD paths that sessions lie on, and what becomes of sessions when one of them is lost."""

from cache_rig import SEGMENT_TOKENS, MemoryRig, Writer


def paths_of(rig: MemoryRig, session_id: str) -> list[int]:
    """The SSD path of each of a session's segments."""
    session = rig.cache.state.session(rig.tenant, session_id)
    return [segment.ssd.path_index for segment in session.segments if segment.ssd]


async def test_a_session_lies_on_one_path_and_sessions_on_all(rig: MemoryRig) -> None:
    """Segments of a session stay together, however they are written; sessions share the paths out."""
    for i in range(8):
        await rig.create(f"s{i}")
    for _ in range(3):
        for i in range(8):
            await rig.append(f"s{i}", Writer(i).make(SEGMENT_TOKENS), is_durable=True)

    homes = [set(paths_of(rig, f"s{i}")) for i in range(8)]
    assert [len(home) for home in homes] == [1] * 8
    assert sorted(path for home in homes for path in home) == [0] * 4 + [1] * 4
    await rig.restart()
    await rig.append("s0", Writer(0).make(SEGMENT_TOKENS), is_durable=True)
    assert set(paths_of(rig, "s0")) == homes[0]


async def test_a_session_goes_on_elsewhere_when_its_path_is_full_or_fenced(rig: MemoryRig) -> None:
    """It moves once, and stays where it went."""
    await rig.create("s")
    await rig.append("s", Writer(1).make(SEGMENT_TOKENS), is_durable=True)
    (home,) = paths_of(rig, "s")
    rig.ssd.fence(home)
    for _ in range(3):
        await rig.append("s", Writer(1).make(SEGMENT_TOKENS), is_durable=True)

    assert paths_of(rig, "s") == [home, 1 - home, 1 - home, 1 - home]
