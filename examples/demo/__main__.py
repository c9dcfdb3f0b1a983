"""Run the demo with `python -m demo`."""

from demo.command import demo

if __name__ == "__main__":
    demo()
