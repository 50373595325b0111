"""The suite against an engine that agrees to everything: a test that passes there would prove nothing."""

import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

HERE = Path(__file__).parent
CHOSEN = "yes-sglang,yes-vllm"


def test_no_test_passes_against_an_engine_that_answers_200_to_everything(tmp_path: Path) -> None:
    """Every one of them fails, by its own assertion and not in a fixture."""
    report = tmp_path / "report.xml"
    command = [sys.executable, "-m", "pytest", str(HERE), "--engines", CHOSEN, f"--junitxml={report}"]
    result = subprocess.run(
        [*command, "-q", "--tb=no", "-p", "no:cacheprovider"],
        capture_output=True,
        text=True,
        check=False,
        cwd=HERE.parents[1],
    )
    cases = list(ET.parse(report).iter("testcase"))  # noqa: S314 - pytest's own file
    passed = [case.get("name") for case in cases if not list(case)]
    broken = [case.get("name") for case in cases if case.find("error") is not None]
    assert (passed, broken) == ([], []), result.stdout
    assert len(cases) >= 100
