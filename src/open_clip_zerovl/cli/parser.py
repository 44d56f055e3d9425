"""The parser of `zerovl`: its errors are one sentence, with the nearest flag or command for an unknown one."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import NoReturn

from open_clip_zerovl.core.errors import argparse_sentence, nearest


class Parser(argparse.ArgumentParser):
    """A parser that takes no abbreviations of flags: a shortened flag may come to mean another one."""

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **{"allow_abbrev": False, **kwargs})

    def parse_known_args(self, args=None, namespace=None):
        """As argparse's, but a command tells of unknown words itself: the parser of all commands does not know its flags."""
        found, rest = super().parse_known_args(args, namespace)
        if rest and not self._commands():
            self.error(f"unrecognized arguments: {' '.join(rest)}")
        return found, rest

    def error(self, message: str) -> NoReturn:
        """End with status 2 after one sentence."""
        commands = self._commands()
        word = message.partition("invalid choice: '")[2].partition("'")[0]
        if commands and word:
            known = list(_below(commands))
            # 'pack' is nearer to 'data pack' than letters tell.
            near = next((name for name in known if name.split()[-1] == word), None) or nearest(word, known)
            sentence = f"there is no command '{word}'; " + (
                f"did you mean `{self.prog} {near}`?" if near else f"`{self.prog} --help` lists the commands"
            )
        else:
            lists = "commands" if commands else "flags"
            sentence = argparse_sentence(message, self._option_string_actions, f"{self.prog} --help", lists=lists)
        self.exit(2, f"zerovl: error: {sentence}\n")

    def _commands(self) -> dict[str, argparse.ArgumentParser]:
        """The commands below this parser, by name."""
        action = next((one for one in self._actions if isinstance(one, argparse._SubParsersAction)), None)
        return {} if action is None else dict(action.choices)


def _below(commands: dict[str, argparse.ArgumentParser]) -> Iterator[str]:
    """The names of all commands with those below them: `data`, `data pack`."""
    for name, parser in commands.items():
        yield name
        if isinstance(parser, Parser):
            yield from (f"{name} {under}" for under in _below(parser._commands()))
