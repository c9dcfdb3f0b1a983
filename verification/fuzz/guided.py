"""Run one target under atheris, which uses the coverage of an input to choose the next one.

`python -m verification.fuzz` runs each target in a separate process: libFuzzer ends its process at the end.
"""

import sys

import atheris

with atheris.instrument_imports(include=["aiotensor"]):
    from verification.fuzz.steps import cases
    from verification.fuzz.targets import LIVE, PURE, conversation_of


def main(target: str, *arguments: str) -> None:
    """Fuzz one target with the options of libFuzzer, which include its duration."""
    pure = PURE[target]()
    for role in (target, *LIVE):
        for said in cases(role).values():
            pure.hear(said)
    atheris.Setup([sys.argv[0], *arguments], lambda data: pure.hear(conversation_of(target, data)))
    atheris.Fuzz()


if __name__ == "__main__":
    main(*sys.argv[1:])
