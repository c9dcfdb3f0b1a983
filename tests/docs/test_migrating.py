"""The programs of the migration guide for vLLM print what the page shows."""

import pytest

from tests.docs.pages import LIMIT_S, Folder, blocks, folder

pytestmark = pytest.mark.timeout(LIMIT_S)

PAGE = "docs/migrating-vllm.md"


@pytest.mark.parametrize("which", [0, 1])
def test_a_program_that_replaces_a_transport_of_vllm_prints_what_the_page_shows(which: int) -> None:
    with folder(Folder) as made:
        made.save("program.py", blocks("python", PAGE)[which])
        printed = made.run("program.py")
    assert sorted(printed.splitlines()) == sorted(blocks("text", PAGE)[which].splitlines())
