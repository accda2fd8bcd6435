"""The seam for drafters: anything that can propose a tree can be verified by the same code.

A drafter never decides what is emitted (verify.py does), only how much one pass may yield. A bad
one costs time, never correctness, so a new method is one small class here. prompt_lookup.py is the
smallest; the model's own streams are the main one. `tree.union` merges the trees of several.

Read first: tree.py. Read next: prompt_lookup.py. Proven by: tests/test_prompt_lookup.py.
"""


class Drafter:
    """Proposes trees. Subclasses write `draft`, and `begin` if they remember anything.

    needs_streams: set it to be given the model's drafting data in `draft`.
    """

    needs_streams = False

    def begin(self, prompt_ids):
        """A new prompt starts: forget the old one."""

    def draft(self, ids, streams, room):
        """A Tree whose root token is ids[-1].

        ids      every id so far, prompt and emitted; a sequence that belongs to the caller: it only
                 grows until the next `begin`, and is not to be changed
        streams  drafting data of the model if `needs_streams`, else None
        room     the largest depth that makes sense (0: the root alone): no node below it could ever
                 be emitted, or it would lie beyond the last position
        """
        raise NotImplementedError(f"{type(self).__name__} does not say how to draft")
