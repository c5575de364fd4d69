"""Schemathesis on the server's own OpenAPI description."""

import subprocess
import sys
from pathlib import Path

import pytest

from ..server.serving import serving
from .target import ARGUMENTS

CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_schema_conformance",
)


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_the_server_keeps_to_its_description(text_model, tmp_path):
    program = Path(sys.executable).with_name("schemathesis")
    options = (
        *("--checks", ",".join(CHECKS), "--phases", "examples,coverage,fuzzing"),
        *("--max-examples", "100", "--generation-deterministic", "--request-timeout", "30"),
    )
    # Short answers: 128 choices up to the whole context are many tokens.
    with serving(str(text_model), *ARGUMENTS, "--max-model-len", "64") as served:
        command = [program, "run", f"{served.base}/openapi.json", *options, "--continue-on-failure"]
        run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
        print(run.stdout)
        assert run.returncode == 0, run.stdout + run.stderr
        assert served.metrics()["requests_in_flight"] == 0
