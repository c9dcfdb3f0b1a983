"""Fuzz all input from peers: `python -m verification.fuzz --seconds 600 --seed 1`.

In the first part, the decoders and the connection objects run under atheris, which looks for inputs that
reach new code. In the second part, the conversations of these inputs, and random ones, are sent to real peers
of each role but ranks, in separate processes whose memory and descriptors are measured. Conversations that
cause an error are written to `verification/fuzz/cases`, and each run begins with them. The exit status is 1
if anything was found.
"""

import argparse
import asyncio
import hashlib
import importlib.util
import random
import re
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import msgspec

from verification.fuzz.grammar import conversation
from verification.fuzz.living import opened
from verification.fuzz.steps import CASES, Conversation, cases, keep
from verification.fuzz.targets import LIVE, PURE, TARGETS, conversation_of
from verification.fuzz.wire import Chooser
from verification.places import endpoint

_BYTES = 1000  # of an input; most conversations use fewer
_FIRST_INPUTS = 32  # without them libFuzzer starts with short inputs, and lengthens them slowly
_GRACE_S = 120  # until a process of libFuzzer that has not ended is killed
_REPLAYS = 8
_WARM_UP_SHARE = 0.3  # of the time: until the allocator has seen all sizes, and bounded tables are full
_GROWTH_KIB = 16_384  # the names of 4096 former senders, which a receiver stores, take 14 MiB


def main() -> int:
    """Run every target, and print the results."""
    parser = argparse.ArgumentParser(prog="python -m verification.fuzz", description=__doc__)
    parser.add_argument("--seconds", type=float, default=600, help="the duration of all targets; 600")
    parser.add_argument("--seed", type=int, help="of all random choices; by default, a random one")
    parser.add_argument(
        "--only", default="", help='targets whose names contain this, such as "publisher, tcp"'
    )
    parser.add_argument("--case", help="repeat only this case, by the name of its file without its suffix")
    arguments = parser.parse_args()
    chosen = {name: share for name, share in TARGETS.items() if arguments.only in name}
    if not chosen:
        parser.error(f"no target contains {arguments.only!r}: {', '.join(TARGETS)}")
    seed = random.SystemRandom().randrange(1, 1 << 24) if arguments.seed is None else arguments.seed
    found = False
    if arguments.case is not None:
        said = msgspec.json.decode((CASES / f"{arguments.case}.json").read_bytes(), type=Conversation)
        PURE["decoder" if said.to == "decoder" else "connections"]().hear(said)
        for target in chosen:
            if target.partition(", ")[0] == said.to:
                found |= _live(target, _GRACE_S, [said] * _REPLAYS, uvloop=bool(seed % 2))
        return int(found)
    if importlib.util.find_spec("atheris") is None:
        _tell("atheris is not installed: run `make fuzz`, or pip install -e '.[fuzz,test]'")
        return 2
    _tell(f"seed {seed}, {arguments.seconds:g} s")
    corpus: list[bytes] = []
    for index, (target, share) in enumerate(chosen.items()):
        seconds = share * arguments.seconds / sum(chosen.values())
        if target in PURE:
            found |= _guided(target, seconds, 32 * seed + index, corpus)
        else:
            said_next = _inputs(target.partition(", ")[0], random.Random(32 * seed + index), corpus)
            found |= _live(target, seconds, said_next, uvloop=bool(seed % 2))
    _tell(f"seed {seed}: " + ("something was found, see above" if found else "nothing was found"))
    return int(found)


def _guided(target: str, seconds: float, seed: int, corpus: list[bytes]) -> bool:
    """Run a pure target under atheris, and add to the corpus; return whether it found something."""
    began, source = time.monotonic(), random.Random(seed)
    with tempfile.TemporaryDirectory(prefix="aiotensor-fuzz-") as folder:
        kept, artifacts = Path(folder) / "corpus", Path(folder) / "artifacts"
        kept.mkdir()
        artifacts.mkdir()
        for number in range(_FIRST_INPUTS):
            (kept / f"first-{number}").write_bytes(source.randbytes(_BYTES))
        command = [
            *(sys.executable, "-m", "verification.fuzz.guided", target, f"-seed={seed % 2**32}"),
            *(f"-max_total_time={max(1, round(seconds))}", f"-max_len={_BYTES}", "-len_control=0"),
            *("-timeout=60", "-rss_limit_mb=4096", "-print_final_stats=1"),
            *(f"-artifact_prefix={artifacts}/", str(kept)),
        ]
        done = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=seconds + _GRACE_S, check=False
        )
        output = done.stdout.decode(errors="replace")
        inputs = [path.read_bytes() for path in sorted(kept.iterdir())]
        harmful = [path.read_bytes() for path in artifacts.iterdir()]
    executed = re.search(r"number_of_executed_units: (\d+)", output)
    count = 0 if executed is None else int(executed[1])
    _report(target, count, began, f"{len(inputs)} inputs kept")
    corpus += inputs
    if not done.returncode and not harmful and count:
        return False
    _tell(output[-6000:])
    for data in harmful:
        _keep(conversation_of(target, data))
    return True


def _inputs(role: str, source: random.Random, corpus: Sequence[bytes]) -> Iterator[Conversation]:
    """Yield the recorded cases, the inputs of a corpus, then random inputs and mutations of the corpus."""
    yield from cases(role).values()
    for kept in source.sample(corpus, len(corpus)):
        yield conversation(Chooser(kept[1:]), role)
    while True:
        data = bytearray(source.randbytes(_BYTES))
        if corpus and source.random() < 0.5:
            data = bytearray(source.choice(corpus)[1:].ljust(_BYTES, b"\0"))
            for _ in range(source.randint(1, 8)):
                data[source.randrange(len(data))] = source.randrange(256)
        yield conversation(Chooser(bytes(data)), role)


def _live(target: str, seconds: float, said: Iterable[Conversation], *, uvloop: bool) -> bool:
    """Send conversations to real peers, for some time at most; return whether these failed or grew."""
    role, _, link = target.partition(", ")

    async def harass(address: str) -> bool:
        count, last, before = 0, None, None
        async with opened(LIVE[role], address, uvloop=uvloop) as live:
            began = time.monotonic()
            try:
                for last in said:
                    if (passed := time.monotonic() - began) > seconds:
                        break
                    if before is None and passed > _WARM_UP_SHARE * seconds:
                        before = await live.look()
                    await live.hear(last)
                    count += 1
                after = await live.look()
            except BaseException:
                if last is not None:
                    _keep(last)
                raise
            finally:
                _report(target, count, began, live.summary)
        for figures in (before or after, after):
            _tell(f"{'':24} {', '.join(f'{held} {name}' for name, held in figures._asdict().items())}")
        grown = after.grown(before or after, _GROWTH_KIB)
        if grown:
            _tell(f"{'':24} GROWN: {', '.join(grown)}")
        return bool(grown)

    try:
        with endpoint(link) as place:
            return asyncio.run(harass(str(place)))
    except Exception:  # noqa: BLE001 - any is a finding
        _tell(traceback.format_exc())
        return True


def _keep(said: Conversation) -> None:
    name = f"found-{hashlib.sha256(msgspec.json.encode(said)).hexdigest()[:12]}"
    _tell(f"written to {keep(name, said)}")


def _report(name: str, executions: int, began: float, summary: str) -> None:
    _tell(f"{name:24} {executions:>8} executions in {time.monotonic() - began:.0f} s; {summary}")


def _tell(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
