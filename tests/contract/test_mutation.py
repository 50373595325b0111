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
    modules = sorted(str(path) for path in HERE.glob("test_*.py") if "wire" in path.read_text(encoding="utf-8"))
    command = [sys.executable, "-m", "pytest", *modules, "--engines", CHOSEN, f"--junitxml={report}"]
    result = subprocess.run(
        [*command, "-q", "--tb=no", "-p", "no:cacheprovider"],
        capture_output=True,
        text=True,
        check=False,
        cwd=HERE.parents[1],
    )
    cases = list(ET.parse(report).iter("testcase"))  # noqa: S314 - see above
    passed = [case.get("name") for case in cases if not len(case)]
    broken = [case.get("name") for case in cases if case.find("error") is not None]
    assert (passed, broken) == ([], []), result.stdout
    assert len(cases) >= 100
