"""Fuzz all input from peers: `python -m verification.fuzz --seconds 600 --seed 1`.

In the first part each target runs under atheris in a separate process: the decoders, a receiver on each link,
and a sender, an inspector, a publisher, a subscriber and a rank on one machine and over tcp://. In the second
part the inputs of the first part, and random ones, are sent to these and to servers and clients, in separate
processes whose memory and descriptors are measured. Inputs that cause an error are written to
`verification/fuzz/cases`, and the tests replay them. The exit status is 1 if anything was found.
"""

import argparse
import hashlib
import importlib.util
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import msgspec

from verification.fuzz.alone import LiveReport, harass
from verification.fuzz.steps import Conversation, keep
from verification.fuzz.targets import Progress, conversation_of

# The share of each target in the duration.
GUIDED = {
    "decoder": 0.05,
    "messages": 0.05,
    "receiver, unix": 0.11,
    "receiver, tcp": 0.05,
    "sender": 0.04,
    "sender, tcp": 0.03,
    "inspector": 0.03,
    "inspector, tcp": 0.02,
    "publisher, unix": 0.05,
    "publisher, tcp": 0.04,
    "subscriber": 0.04,
    "subscriber, tcp": 0.04,
    "rank, unix": 0.04,
    "rank, tcp": 0.04,
}
LIVE = {
    "receiver, unix": 0.09,
    "receiver, tcp": 0.05,
    "sender": 0.03,
    "sender, tcp": 0.03,
    "inspector": 0.02,
    "inspector, tcp": 0.02,
    "server": 0.04,
    "client": 0.03,
    "publisher, unix": 0.05,
    "publisher, tcp": 0.03,
    "subscriber": 0.03,
    "subscriber, tcp": 0.03,
    "rank, unix": 0.03,
    "rank, tcp": 0.03,
}

_MAX_BYTES = 1000  # most conversations use fewer
_FIRST_INPUTS = 32  # without them libFuzzer starts with short inputs, and lengthens them slowly
_GRACE_S = 120  # until a process of libFuzzer that has not ended is killed


def main() -> int:
    """Run every target, and print the results."""
    parser = argparse.ArgumentParser(prog="python -m verification.fuzz", description=__doc__)
    parser.add_argument(
        "--seconds", type=float, default=600, help="the duration of all targets together; 600"
    )
    parser.add_argument(
        "--seed", type=int, help="of every random choice; by default a random one, which is printed"
    )
    parser.add_argument(
        "--only", default="", help='targets whose names contain this, such as "publisher, tcp"; all'
    )
    arguments = parser.parse_args()
    if importlib.util.find_spec("atheris") is None:
        _tell("atheris is not installed: run `make fuzz`, or pip install -e '.[fuzz,test]'")
        return 2
    seed = random.SystemRandom().randrange(1, 1 << 24) if arguments.seed is None else arguments.seed
    _tell(f"seed {seed}, {arguments.seconds:g} s")
    chosen = [share for shares in (GUIDED, LIVE) for name, share in shares.items() if arguments.only in name]
    if not chosen:
        parser.error(f"no target contains {arguments.only!r}: {', '.join({**GUIDED, **LIVE})}")
    seconds = arguments.seconds / sum(chosen)
    found = False
    corpora: dict[str, list[bytes]] = {}
    with tempfile.TemporaryDirectory(prefix="aiotensor-fuzz-") as folder:
        for index, (target, share) in enumerate(GUIDED.items()):
            if arguments.only not in target:
                continue
            place = Path(folder) / str(index)
            found |= _guided(target, share * seconds, 32 * seed + index + 1, place)
            corpora[target] = [path.read_bytes() for path in sorted((place / "corpus").iterdir())]
    for index, (target, share) in enumerate(LIVE.items()):
        if arguments.only in target:
            found |= _live(target, share * seconds, 32 * seed + index + 16, corpora.get(target, []))
    _tell(f"seed {seed}: " + ("something was found, see above" if found else "nothing was found"))
    return int(found)


def _guided(target: str, seconds: float, seed: int, place: Path) -> bool:
    """Run a target under atheris; return whether it found something."""
    corpus, artifacts, told = place / "corpus", place / "artifacts", place / "progress"
    corpus.mkdir(parents=True)
    artifacts.mkdir()
    source = random.Random(seed)
    for number in range(_FIRST_INPUTS):
        (corpus / f"first-{number}").write_bytes(source.randbytes(_MAX_BYTES))
    began = time.monotonic()
    command = [
        *(sys.executable, "-m", "verification.fuzz.guided", target, str(told)),
        *(f"-seed={seed % 2**32}", f"-max_total_time={max(1, round(seconds))}", f"-max_len={_MAX_BYTES}"),
        *("-len_control=0", "-timeout=60", "-rss_limit_mb=4096", "-print_final_stats=1"),
        *(f"-artifact_prefix={artifacts}/", str(corpus)),
    ]
    try:
        done = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=seconds + _GRACE_S, check=False
        )
        status, output = done.returncode, done.stdout.decode(errors="replace")
    except subprocess.TimeoutExpired as error:
        status, output = -1, (error.stdout or b"").decode(errors="replace") + "\nit did not end"
    progress = msgspec.json.decode(told.read_bytes(), type=Progress) if told.exists() else Progress()
    _report(
        f"guided   {target}",
        progress.executions,
        time.monotonic() - began,
        f"{len(list(corpus.iterdir()))} inputs kept; {progress.summary}",
    )
    harmful = [path.read_bytes() for path in artifacts.iterdir()]
    if not status and not harmful and progress.executions:
        return False
    _tell(output[-6000:])
    for data in harmful:
        _keep(conversation_of(target, data))
    return True


def _live(target: str, seconds: float, seed: int, corpus: list[bytes]) -> bool:
    """Send conversations to a separate process; return whether it failed or grew."""
    began = time.monotonic()
    report: LiveReport = harass(target, seconds, seed, corpus)
    _report(f"live     {target}", report.executions, time.monotonic() - began, report.summary)
    for when, figures in (("after the warm-up", report.before), ("in the end", report.after)):
        if figures is not None:
            held = ", ".join(f"{count} {name}" for name, count in figures._asdict().items())
            _tell(f"{'':24} {when}: {held}")
    if report.error:
        _tell(report.error)
    if report.grown:
        _tell(f"{'':24} GROWN: {', '.join(report.grown)}")
    if report.last is not None:
        _keep(report.last)
    return bool(report.error or report.grown)


def _keep(said: Conversation) -> None:
    name = f"found-{hashlib.sha256(msgspec.json.encode(said)).hexdigest()[:12]}"
    _tell(f"written to {keep(name, said)}")


def _report(name: str, executions: int, seconds: float, summary: str) -> None:
    _tell(f"{name:24} {executions:>8} executions in {seconds:.0f} s; {summary}")


def _tell(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
