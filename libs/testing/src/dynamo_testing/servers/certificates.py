"""Certificates for tests of TLS, made with the openssl command."""

from __future__ import annotations

import subprocess
from pathlib import Path


def make_certificates(folder: Path, **hosts: str) -> Path:
    """Make ``ca.crt`` and, signed by it, a certificate and key per name for the host given, such as IP:127.0.0.1."""

    def openssl(*words: str) -> None:
        subprocess.run(["openssl", *words], cwd=folder, check=True, capture_output=True)  # noqa: S603, S607 - a test's

    make = ["req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2"]
    openssl(*make, "-keyout", "ca.key", "-out", "ca.crt", "-subj", "/CN=ca")
    for name, host in hosts.items():
        signed = ["-CA", "ca.crt", "-CAkey", "ca.key", "-addext", f"subjectAltName={host}"]
        openssl(*make, "-keyout", f"{name}.key", "-out", f"{name}.crt", "-subj", f"/CN={name}", *signed)
    return folder
