"""Certificates, made by openssl as they are needed."""

import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Self


@dataclass(frozen=True)
class Pki:
    """Files that openssl made."""

    directory: Path

    def with_both_sides(self) -> Self:
        """Make two authorities, `ca` and `other`, and of `ca` a server's certificate and a client's."""
        for name in ("ca", "other"):
            self.authority(name)
        for name in ("server", "client"):
            self.issue(name, "ca")
        return self

    def authority(self, name: str) -> Path:
        """Make an authority; its certificate."""
        self._run(
            "req",
            "-x509",
            "-newkey",
            "ec",
            "-pkeyopt",
            "ec_paramgen_curve:prime256v1",
            "-nodes",
            "-days",
            "2",
            "-subj",
            f"/CN={name}",
            "-keyout",
            f"{name}.key",
            "-out",
            f"{name}.pem",
        )
        return self.directory / f"{name}.pem"

    def issue(
        self,
        name: str,
        authority: str,
        *,
        days: int = 2,
        common_name: str | None = None,
        names: str = "",
        address: str = "IP:127.0.0.1",
    ) -> tuple[Path, Path]:
        """Make a certificate for 127.0.0.1; it and its key. Negative days: it has expired.

        `names`: further ones, as openssl writes them: `URI:…,DNS:…`. `address`: another one, or none.
        """
        self._run(
            "req",
            "-newkey",
            "ec",
            "-pkeyopt",
            "ec_paramgen_curve:prime256v1",
            "-nodes",
            "-keyout",
            f"{name}.key",
            "-subj",
            f"/CN={common_name or name}",
            "-out",
            f"{name}.csr",
        )
        (self.directory / "san").write_text(f"subjectAltName={','.join(filter(None, (address, names)))}\n")
        self._run(
            "x509",
            "-req",
            "-in",
            f"{name}.csr",
            "-CA",
            f"{authority}.pem",
            "-CAkey",
            f"{authority}.key",
            "-CAcreateserial",
            "-days",
            str(days),
            "-extfile",
            "san",
            "-out",
            f"{name}.pem",
        )
        return self.directory / f"{name}.pem", self.directory / f"{name}.key"

    def _run(self, *arguments: str) -> None:
        subprocess.run(["openssl", *arguments], cwd=self.directory, check=True, capture_output=True)
