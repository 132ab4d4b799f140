"""docs/troubleshooting.md knows every problem that `octavo doctor` can name."""

import re

from code_blocks import ROOT


def test_every_problem_of_doctor_is_on_the_page() -> None:
    rules = (ROOT / "src" / "octavo" / "inspection" / "doctor.py").read_text()
    names = re.findall(r'Problem\(\s*"([^"]+)"', rules)
    assert len(names) > 5
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    assert [name for name in names if name not in page] == []
