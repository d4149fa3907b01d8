"""Studies of a folder of traces: compared figures, printed tables, the results file and the exit code."""

import json
from functools import partial
from pathlib import Path

import pytest

from lab.placement.regimes import REGIMES
from lab.studies import capacity, margin
from lab.studies.margin import broken


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two chats of three turns, a trace in which nobody returns, and a file that is none."""
    made = tmp_path / "traces"
    made.mkdir()
    rows = [f"{name},{turn * 60_000 + i},{2000},{200}" for turn in range(3) for i, name in enumerate("ab")]
    head = "session_id,arrival_ms,new_input_tokens,output_tokens"
    (made / "chats.csv").write_text("\n".join([head, *rows]) + "\n")
    (made / "once.csv").write_text(f"{head}\na,0,2000,10\nb,1,2000,10\n")
    (made / "README.md").write_text("about them\n")
    return made


def _run(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    monkeypatch.setattr("sys.argv", ["margin", *map(str, arguments)])
    with pytest.raises(SystemExit) as end:
        margin.main()
    return int(end.value.code or 0)


def test_a_folder_is_judged_and_what_is_there_is_not_run_again(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """And a baseline that is better by more than 2 points is told, and ends it with 1."""
    results = tmp_path / "results.jsonl"
    options = (folder, "--footprint", "1", "--policies", "lru,gdsf", "--results", results)
    assert _run(monkeypatch, *options) == 0
    said = capsys.readouterr().out
    assert "left out: README.md, once.csv" in said
    assert said.count("| chats.csv |") == 1
    found = [json.loads(line) for line in results.read_text().splitlines()]
    assert [each["policy"] for each in found] == ["value", "lru", "gdsf"]
    assert all(0 < each["share"] < 1 for each in found)

    found[2]["share"] = found[0]["share"] + 0.03
    results.write_text("".join(json.dumps(each) + "\n" for each in found))
    assert _run(monkeypatch, *options) == 1
    assert "0.0300 BELOW GDSF" in capsys.readouterr().out


def test_a_regime_and_an_earlier_result_are_in_the_table(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The nine regimes are judged as traces are, and the page says what was found before."""
    monkeypatch.setattr(margin, "REGIMES", {"fresh": partial(REGIMES["fresh"], count=300)})
    before, page = tmp_path / "before.jsonl", tmp_path / "page.md"
    earlier = {"trace": "fresh", "multiple": 1.0, "policy": "value", "share": 0.1234}
    before.write_text(json.dumps(earlier) + "\n")
    options = ("--regimes", "--footprint", "1", "--policies", "lru,belady")

    assert _run(monkeypatch, folder, *options, "--before", before, "--write", page) == 0
    (row,) = [line for line in page.read_text().splitlines() if line.startswith("| fresh |")]
    assert row.split(" | ")[2] == "0.1234"
    value, bound = (float(row.split(" | ")[column]) for column in (3, -2))
    assert 0 < value <= bound


def test_a_folder_without_a_trace_is_no_success(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing was held to anything."""
    assert _run(monkeypatch, tmp_path) == 1


def test_block_lru_is_never_above() -> None:
    """Not even by less than 2 points; other baselines may be, by that. The bound is no baseline."""
    assert list(broken({"value": 0.5, "lru": 0.5, "arc": 0.515, "belady": 0.9})) == []
    assert list(broken({"value": 0.5, "lru": 0.50009})) == []
    assert list(broken({"value": 0.5, "lru": 0.501})) == ["0.0010 below block LRU"]
    assert list(broken({"value": 0.5, "lru": 0.4, "arc": 0.53})) == ["0.0300 below arc"]


def test_a_page_gets_the_table_of_capacities(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Between its marks; a page without marks stays as it is, and what was found is not found again."""
    results, page, other = (tmp_path / name for name in ("results.jsonl", "page.md", "other.md"))
    page.write_text(f"before\n{capacity.BEGIN}\nold\n{capacity.END}\nafter\n")
    other.write_text("no marks\n")
    options = [str(folder), "--results", str(results)]
    for target, end in ((page, SystemExit), (other, ValueError)):
        monkeypatch.setattr("sys.argv", ["capacity", *options, "--write", str(target)])
        with pytest.raises(end):
            capacity.main()

    rows = [line for line in page.read_text().splitlines() if line.startswith("| `chats`")]
    assert page.read_text().startswith("before\n")
    assert page.read_text().endswith("\nafter\n")
    assert "old" not in page.read_text()
    assert rows == [line for line in capsys.readouterr().out.splitlines() if "`chats`" in line][:1]
    assert "-" not in rows[0]
    found = [json.loads(line) for line in results.read_text().splitlines()]
    assert len(found) == len(capacity.SERIES) * len(capacity.MULTIPLES)
    assert other.read_text() == "no marks\n"
