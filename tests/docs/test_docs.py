"""Documents that promise something checkable are checked."""

import re
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
README = (ROOT / "README.md").read_text()
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


@pytest.mark.parametrize("name", ["settings", "metrics"])
def test_a_generated_page_is_what_the_code_says(name: str) -> None:
    page = runpy.run_path(str(ROOT / "tools" / f"{name}.py"))["render"]()
    assert (ROOT / "docs" / f"{name}.md").read_text() == page, f"run `python tools/{name}.py`"


def test_a_requests_life_has_ten_lines_that_each_name_files_that_exist() -> None:
    life = README.split("## A request's life")[1].split("\n## ")[0]
    lines = re.split(r"^\d+\. ", life, flags=re.MULTILINE)[1:]
    assert len(lines) == 10
    for line in lines:
        named = re.findall(r"`([\w/]+\.py)`", line)
        assert named, line
        assert all((ROOT / name).is_file() or (ROOT / "gateway" / name).is_file() for name in named), named


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_and_paths_lead_somewhere(page: Path) -> None:
    text = page.read_text()
    links = re.findall(r"\]\((?!https?:)([^)#]+)\)", text)
    paths = re.findall(
        r"`((?:gateway|scheduler|gpu_worker|cache_service|mesh|protos|deploy|tools|tests|docs)/[\w./]*)`", text
    )
    missing = [link for link in links if not (page.parent / link).exists()]
    missing += [path for path in paths if not (ROOT / path).exists()]
    assert not missing


def test_the_faults_page_names_tests_that_exist() -> None:
    named = set(re.findall(r"`(test_\w+)`", (ROOT / "docs" / "faults.md").read_text()))
    source = "\n".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    assert len(named) > 40
    assert not [name for name in named if f"def {name}(" not in source]
