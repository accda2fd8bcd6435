"""When a generation ends, and where: one boundary for ids and text.

The idea: plain decoding hands over one id per step, speculative decoding several. Both must end
at the same id with the same text, so neither loop decides anything: they push their ids through
`StopRules`, which looks at them one at a time whatever the size of the step.

Read first: text.py. Read next: generate.py. Proven by: tests/test_stopping.py.
"""

import operator
from collections import deque

from .text import TextStream


class StopStrings:
    """Holds text back while it may be the start of a stop string; cuts it at the first match.

    stops: a string, several strings, or None. The match that is complete first wins; of two
    complete at the same character, the one that starts first. This is decided by the text alone,
    so the pieces may be cut anywhere.
    Raises: ValueError if a stop string is empty, TypeError if one is not a string.
    """

    def __init__(self, stops=()):
        self.stops = (stops,) if isinstance(stops, str) else tuple(stops or ())
        for stop in self.stops:
            if not isinstance(stop, str):
                raise TypeError(f"stop strings must be str, got {stop!r}")
            if not stop:
                raise ValueError("a stop string is empty, expected at least one character")
        self.stopped = False
        self.held = ""

    def push(self, piece):
        """-> (visible text, True once a stop string is complete). After that, ("", True)."""
        if self.stopped:
            return "", True
        text = self.held + piece
        starts = [(text.find(stop), stop) for stop in self.stops]
        matches = [(start + len(stop), start) for start, stop in starts if start >= 0]
        if matches:
            self.stopped, self.held = True, ""
            return text[: min(matches)[1]], True
        shown = len(text) - self._may_begin(text)
        self.held = text[shown:]
        return text[:shown], False

    def finish(self):
        """The held text, when no more comes and no stop string was completed."""
        held, self.held = self.held, ""
        return held

    def _may_begin(self, text):
        """Length of the longest end of `text` that begins a stop string."""
        longest = max((len(stop) for stop in self.stops), default=1) - 1
        for n in range(min(longest, len(text)), 0, -1):
            if any(stop.startswith(text[-n:]) for stop in self.stops):
                return n
        return 0


class StopRules:
    """Decides where one generation ends, from its ids alone, however they are cut into steps.

    max_new_tokens: most ids to keep, 0 allowed. eos_ids: an id, several, or None. stops: stop
    strings, for which a tokenizer is needed; without one the text stays empty. context_left: new
    ids the context still has room for, None for no limit.

    * An end id ends the generation ("stop"). It is the last of the returned ids, so that every
      pass of the model has emitted something; the text ends before it.
    * A stop string ends it ("stop"). The text ends before it, and the ids are the shortest
      beginning of the ids whose text contains that text. (If the stop string starts inside a
      token, the text of that last id goes on past the boundary; the returned text does not.)
    * The token limit or the context's end ends it ("length"), with whatever was held back.
    * If one id meets two rules, "stop" wins.

    After the end: ids and text hold the whole result; finish_reason, None before, says why.
    `taken` counts the ids looked at, up to the one that ended it: the tokens that the model's
    passes emitted, whether or not a stop string cut them off again.
    Raises: ValueError for a negative limit, an empty stop string, or stops without a tokenizer.
    """

    def __init__(
        self, max_new_tokens, eos_ids=None, stops=(), tokenizer=None, context_left=None
    ):
        self.limit = _count("max_new_tokens", max_new_tokens)
        if context_left is not None:
            self.limit = min(self.limit, _count("context_left", context_left))
        self.eos_ids = _id_set(eos_ids)
        self._strings = StopStrings(stops)
        if self._strings.stops and tokenizer is None:
            raise ValueError("stop strings need a tokenizer, none was given")
        self._tokenizer = tokenizer
        self._stream = TextStream(tokenizer) if tokenizer else None
        self._seen = []  # ids that count, kept or not yet decided
        self.taken = 0
        self._kept = 0  # how many of them are returned for certain
        self._marks = deque()  # (ids, characters) at which text and ids end together
        self._streamed = 0  # characters that left the TextStream
        self._pieces = []
        self._shown = 0  # characters in _pieces
        self.finish_reason = "length" if self.limit == 0 else None

    @property
    def room(self):
        """How many more ids can be kept: a step need not draft past it."""
        return 0 if self.finish_reason else self.limit - len(self._seen)

    @property
    def ids(self):
        """All ids returned so far."""
        return self._seen[: self._kept]

    @property
    def text(self):
        """All text returned so far."""
        return "".join(self._pieces)

    def push(self, ids):
        """Ids of one step -> (kept ids, visible text, finish_reason or None).

        Ids and text that a stop string may still cut off come with a later push. Once there is
        a finish_reason, further ids are ignored: ([], "", finish_reason).
        """
        first_id, first_piece = self._kept, len(self._pieces)
        for i in ids:
            if self.finish_reason:
                break
            self._push_one(int(i))
        kept = self._seen[first_id : self._kept]
        return kept, "".join(self._pieces[first_piece:]), self.finish_reason

    def _push_one(self, i):
        self.taken += 1
        if i in self.eos_ids:
            self._seen.append(i)
            self._end("stop")
            return
        self._seen.append(i)
        if self._stream:
            piece = self._stream.push([i])
            if piece and not self._stream.pending:
                self._marks.append((len(self._seen), self._streamed + len(piece)))
            if self._show(piece):
                self._cut()
                return
        self._settle()
        if len(self._seen) == self.limit:
            self._end("length")

    def _show(self, piece):
        """Pass text on; True if it completes a stop string."""
        self._streamed += len(piece)
        visible, stopped = self._strings.push(piece)
        self._pieces.append(visible)
        self._shown += len(visible)
        return stopped

    def _settle(self):
        """Raise `_kept` to the ids that no stop string can cut off any more."""
        if not self._strings.stops:
            self._kept = len(self._seen)
        while self._marks and self._marks[0][1] <= self._shown:
            self._kept = max(self._kept, self._marks.popleft()[0])

    def _end(self, reason):
        """No more ids will count: let go of everything that was held."""
        if self._stream and self._show(self._stream.finish()):  # its end may complete a stop string
            self._cut()
            return
        self._pieces.append(self._strings.finish())
        self._kept = len(self._seen)
        self.finish_reason = reason

    def _cut(self):
        """A stop string is complete: keep the fewest ids whose text contains the visible text."""
        text, most = self.text, len(self._seen)
        while self._kept < most and not self._tokenizer.decode(self.ids).startswith(text):
            self._kept += 1
        self.finish_reason = "stop"


def _count(name, value):
    try:
        count = operator.index(value)
    except TypeError:
        raise ValueError(f"{name} is {value!r}, expected a whole number >= 0") from None
    if count < 0:
        raise ValueError(f"{name} is {count}, expected 0 or more")
    return count


def _id_set(eos_ids):
    if eos_ids is None:
        return frozenset()
    try:
        return frozenset([operator.index(eos_ids)])
    except TypeError:  # several
        return frozenset(operator.index(i) for i in eos_ids)
