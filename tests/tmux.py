"""A real terminal, tmux, in which a command runs; its keys and its text."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from waiting import eventually


class Terminal:
    """A tmux server of its own, in which one command runs."""

    def __init__(self, folder: Path, width: int, height: int) -> None:
        self._socket = str(folder / "tmux")
        self._exit_code = folder / "exit_code"
        self._size = ("-x", str(width), "-y", str(height))

    def _tmux(self, *arguments: str) -> str:
        done = subprocess.run(
            ["tmux", "-S", self._socket, "-f", os.devnull, *arguments], capture_output=True, text=True, check=True
        )
        return done.stdout

    def start(self, *command: str) -> None:
        env = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
        env |= {"LC_ALL": "C.UTF-8", "TERM": "xterm-256color"}
        arguments = ["tmux", "-S", self._socket, "-f", os.devnull, "-u", "new-session", "-d", *self._size]
        # tmux 3.3 now and then does not notice that a command has ended, which then stays a zombie.
        self._exit_code.unlink(missing_ok=True)
        noted = ["sh", "-c", '"$@"; echo $? >"$0.new"; mv "$0.new" "$0"', str(self._exit_code), *command]
        subprocess.run([*arguments, *noted], env=env, check=True)
        self._tmux("set-option", "-wg", "remain-on-exit", "on")

    def press(self, *keys: str) -> None:
        self._tmux("send-keys", *keys)

    @property
    def text(self) -> str:
        return self._tmux("capture-pane", "-p")

    @property
    def first_line(self) -> str:
        return self.text.partition("\n")[0]

    def await_text(self, *parts: str) -> None:
        """Return once the screen shows all of ``parts``."""
        try:
            eventually(lambda: all(part in self.text for part in parts), timeout_s=120)
        except AssertionError as error:
            raise AssertionError(f"the screen does not show {parts}:\n{self.text}") from error

    def await_exit(self) -> int:
        """The exit code of the command, once it has ended."""
        eventually(self._exit_code.exists, what="the end of the command", timeout_s=120)
        return int(self._exit_code.read_text())

    def end(self) -> None:
        subprocess.run(["tmux", "-S", self._socket, "kill-server"], capture_output=True, check=False)
