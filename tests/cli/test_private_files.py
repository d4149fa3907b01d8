"""The rights of other users on a server's files.

Other users have none, whatever the umask, and whatever was there before.
"""

import os
import stat
from collections.abc import Iterable
from pathlib import Path

import pytest
from command_line import ctxcache
from pki import Pki
from server_process import ServerDidNotStart, ServerProcess, write_secret
from stored import store_session

from ctxcache import connect
from ctxcache.cli.failures import ExitCode
from ctxcache.client.credentials import ClientTls
from ctxcache.errors import InvalidConfiguration
from ctxcache.runtime.files import check_secret, secret_refusal

CARELESS = ("sh", "-c", 'umask 0; exec "$@"', "sh")
"""Runs a command such that it makes files for everybody, by default."""
STRANGER = 12345
AS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="only root may give files away")


def open_to_others(paths: Iterable[Path]) -> dict[str, str]:
    """Those of the paths that anybody else has a right to, with their modes."""
    modes = {}
    for path in paths:
        try:
            modes[path] = stat.S_IMODE(path.lstat().st_mode)
        except FileNotFoundError:
            # A running server has put it in another one's place, by whose name it is looked at.
            if path.suffix != ".partial":
                raise
    return {str(path): f"{mode:04o}" for path, mode in modes.items() if mode & 0o077}


def refused(data_directory: Path, *options: str) -> tuple[int, str]:
    """The exit code and the sentence with which a server does not start."""
    with pytest.raises(ServerDidNotStart) as caught, ServerProcess(data_directory, *options):
        pass
    return caught.value.returncode or 0, str(caught.value)


def test_nothing_that_is_made_is_for_others(tmp_path: Path) -> None:
    """Records, segments, sockets, lessons, a backup, an export, a recording.

    With umask 0, in a directory that was there.
    """
    data = tmp_path / "data"
    data.mkdir(mode=0o755)
    with ServerProcess(data, wrapper=CARELESS) as server:
        store_session(server.target, "a")
        for name, verb in (
            ("backup", ("export", "--store", "--to", "FILE")),
            ("export", ("export", "a", "--to", "FILE")),
            ("recording.jsonl", ("trace", "record", "FILE", "--duration", "1s")),
        ):
            given = [str(tmp_path / name) if word == "FILE" else word for word in verb]
            ran = ctxcache("--target", server.target, *given)
            assert not ran.exit_code, ran.stderr
            assert open_to_others([tmp_path / name]) == {}

        assert open_to_others(data.rglob("*")) == {}
        assert {path.name for path in data.iterdir() if path.is_socket()} == {
            "control.sock", "ctxcache.sock", "ctxcache.sock.bulk",
        }  # fmt: skip
        assert server.terminate() == 0
    assert open_to_others(data.rglob("*")) == {}


def test_what_was_left_to_others_is_taken_from_them(tmp_path: Path) -> None:
    """By the next start; a group's right to write into the directory goes as well."""
    data = tmp_path / "data"
    with ServerProcess(data) as server:
        assert server.terminate() == 0
    for path in data.rglob("*"):
        path.chmod(0o777 if path.is_dir() else 0o666)
    data.chmod(0o775)
    (data / "ssd").chmod(0o755)

    with ServerProcess(data) as server:
        assert open_to_others(path for path in data.rglob("*") if path.name != "ssd") == {}
        assert stat.S_IMODE(data.stat().st_mode) == 0o755
        assert "mode_tightened" in server.stderr


def test_a_directory_that_everybody_may_write_is_refused(tmp_path: Path) -> None:
    """The data directory's as an SSD directory's: before anything is made in it, with what to do."""
    data, ssd = tmp_path / "data", tmp_path / "disk"
    data.mkdir()
    data.chmod(0o777)
    code, sentence = refused(data)
    assert code == ExitCode.DATA_DIRECTORY_UNUSABLE
    assert f"every user may write to it (mode 0777): chmod 700 {data}" in sentence
    assert list(data.iterdir()) == []

    ssd.mkdir()
    ssd.chmod(0o777)
    code, sentence = refused(tmp_path / "other", "--ssd-directories", str(ssd))
    assert code == ExitCode.DATA_DIRECTORY_UNUSABLE
    assert f"chmod 700 {ssd}" in sentence
    assert list(ssd.iterdir()) == []


@AS_ROOT
def test_another_users_directory_is_refused(tmp_path: Path) -> None:
    """Also by root, whose files its owner could not use afterwards; and so is one file of his within."""
    data = tmp_path / "data"
    data.mkdir(0o700)
    os.chown(data, STRANGER, STRANGER)
    code, sentence = refused(data)
    assert code == ExitCode.DATA_DIRECTORY_UNUSABLE
    assert f"belongs to user {STRANGER}, and this process is user 0" in sentence

    os.chown(data, 0, 0)
    with ServerProcess(data) as server:
        assert server.terminate() == 0
    os.chown(data / "metadata" / "CURRENT", STRANGER, STRANGER)
    code, sentence = refused(data)
    assert code == ExitCode.DATA_DIRECTORY_UNUSABLE
    assert f"metadata/CURRENT belongs to user {STRANGER}" in sentence


def test_secrets_that_others_may_read_are_refused(tmp_path: Path) -> None:
    """A server's tokens and key, a client's token and key: by the file's name, with what to do."""
    pki = Pki(tmp_path)
    pki.authority("ca")
    certificate, key = pki.issue("server", "ca")
    key.chmod(0o644)
    tls = ("--tls-certificate", str(certificate), "--tls-key", str(key))
    code, sentence = refused(tmp_path / "data", *tls)
    assert code == ExitCode.CONFIGURATION
    assert f"tls_key: {key}: every user may read it (mode 0644): chmod 600 {key}" in sentence

    hashes = tmp_path / "hashes"
    write_secret(hashes, "")
    hashes.chmod(0o622)
    code, sentence = refused(tmp_path / "data", "--token-hashes", str(hashes))
    assert code == ExitCode.CONFIGURATION
    assert f"token_hashes: {hashes}: every user may change it (mode 0622)" in sentence

    token = tmp_path / "token"
    write_secret(token, "secret")
    token.chmod(0o604)
    with pytest.raises(InvalidConfiguration, match=r"every user may read it \(mode 0604\)"):
        connect(token_file=token)
    with pytest.raises(InvalidConfiguration, match=r"server\.key: every user may read it"):
        connect(tls=ClientTls(certificate, certificate, key))


@AS_ROOT
def test_a_secret_as_a_pod_mounts_it_is_taken(tmp_path: Path) -> None:
    """Root's, to be read by a group of this process, behind two links.

    The same of another group is refused.
    """
    version = tmp_path / "..2026"
    version.mkdir()
    write_secret(version / "token", "secret")
    (tmp_path / "..data").symlink_to(version.name)
    (tmp_path / "token").symlink_to("..data/token")
    mounted = tmp_path / "token"

    mounted.chmod(0o440)
    check_secret(mounted, secret_refusal("token_hashes", mounted))
    os.chown(mounted, 0, STRANGER)
    mounted.chmod(0o440)
    with pytest.raises(InvalidConfiguration, match=f"group {STRANGER} may read it"):
        check_secret(mounted, secret_refusal("token_hashes", mounted))
    os.chown(mounted, 0, 0)
    mounted.chmod(0o460)
    with pytest.raises(InvalidConfiguration, match="group 0 may change it"):
        check_secret(mounted, secret_refusal("token_hashes", mounted))


def test_the_doctor_looks_at_all_of_it(tmp_path: Path) -> None:
    """The doctor ends with a start's exit code where a start would refuse.

    Modes that a start would mend are told, and left.
    """
    data, hashes = tmp_path / "data", tmp_path / "hashes"
    with ServerProcess(data) as server:
        assert server.terminate() == 0
    (data / "metadata").chmod(0o755)
    write_secret(hashes, "")
    hashes.chmod(0o644)
    ran = ctxcache("doctor", "-o", "json", "--data-directory", str(data), "--token-hashes", str(hashes))
    found = {finding["name"]: finding for finding in ran.document["findings"]}

    assert ran.exit_code == ExitCode.CONFIGURATION
    assert found[f"modes of {data}"]["status"] == "degraded"
    assert f"{data / 'metadata'} among them" in found[f"modes of {data}"]["found"]
    assert found[f"modes of {data / 'ssd'}"]["status"] == "ok"
    assert "every user may read it" in found[f"modes of {hashes}"]["found"]
    assert stat.S_IMODE((data / "metadata").stat().st_mode) == 0o755
