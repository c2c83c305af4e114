# SPDX-License-Identifier: Apache-2.0
"""What hosts do in the model of snapshots and rewinds when they are ordered to.

Each ``take_*`` returns all answers that are possible, with the states after them.
"""

from __future__ import annotations

from rewind_hosts import Hosts
from rewind_state import (
    DONE,
    REFUSED,
    UP,
    Answers,
    Coming,
    Copy,
    Faults,
    Image,
    Session,
    State,
    at,
    put,
    put_coming,
    put_copy,
    spend,
)

from liveshift.runtime.model.ownership import Side


class Orders(Hosts):
    # ---- a source ------------------------------------------------------------------------------

    def take_lock(
        self, s: State, name: str, c: int, number: int, holders: tuple[str, ...], base: int
    ) -> Answers:
        h = at(s, name)
        copy = h.copies[c]
        if copy is None or copy.promised or number <= h.over:
            return [(REFUSED, s)]
        if copy.session is not None:
            again = copy.session.number == number and not copy.session.dumped
            return [(DONE if again else REFUSED, s)]
        whom, since = copy.sent
        has = whom == holders[0] and (since == base or not self.p.based)
        session = Session(number, holders, since if has else 0, base)
        return [(DONE, put_copy(s, name, c, copy._replace(session=session, sent=("", 0))))]

    def take_dump(
        self, s: State, name: str, c: int, number: int, holders: tuple[str, ...], base: int
    ) -> Answers:
        copy = at(s, name).copies[c]
        if copy is None or copy.promised:
            return [(REFUSED, s)]
        session = copy.session
        if session is None and not self.p.dump_only_if_locked:  # locked and dumped in one order
            session = Session(number, holders, 0, base)
            copy = copy._replace(session=session)
        if session is None or session.number != number:
            return [(REFUSED, s)]
        if session.dumped:
            return [(DONE, s)]
        if Image(number, c) not in at(s, session.holders[0]).held:
            return [(REFUSED, self.thaw(s, name, c, copy))]
        ways = [s]
        for there in session.holders:
            ways = [after for way in ways for after in self.arrives(way, there, c, copy, session)]
        sent, dumped = (session.holders[0], number), session._replace(dumped=True)
        after = copy._replace(session=dumped, sent=sent)
        return [(DONE, put_copy(way, name, c, after)) for way in ways]

    def arrives(self, s: State, name: str, c: int, copy: Copy, session: Session) -> list[State]:
        """The image has come to a holder as a whole, or not; the capsule's own host may give its
        copy up."""
        h, empty = at(s, name), Image(session.number, c)
        if empty not in h.held:
            return [s]
        has = any(
            i.number == session.base and i.capsule == c and i.complete and i.good for i in h.held
        )
        good = session.way == 0 or (session.way == session.base and has)
        image = Image(session.number, c, True, good, copy.past != session.number)
        ways = [(s, image)]
        if s.faults.chunks and good:
            ways.append((spend(s, "chunks"), image._replace(good=False)))
        if s.faults.copies and name != session.holders[0]:
            ways.append((spend(s, "copies"), empty))
        return [put(t, name, h._replace(held=h.held - {empty} | {i})) for t, i in ways]

    # ---- a holder ------------------------------------------------------------------------------

    def take_hold(self, s: State, name: str, number: int, capsules: tuple[int, ...]) -> Answers:
        h = at(s, name)
        if not self.p.keeps_earlier:
            h = h._replace(held=frozenset(i for i in h.held if i.number >= number))
        known = {(i.number, i.capsule) for i in h.held}
        new = {Image(number, c) for c in capsules if (number, c) not in known}
        return [(DONE, put(s, name, h._replace(held=h.held | new)))]

    def take_check(self, s: State, name: str, number: int, capsules: tuple[int, ...]) -> Answers:
        held = at(s, name).held
        images = [i for i in held if i.number == number and i.complete and i.capsule in capsules]
        whole = len(images) == len(capsules)
        wrong = frozenset(i for i in images if not i.good and self.p.digest)
        if whole and not wrong:
            held = (held - {*images}) | {image._replace(kept=True) for image in images}
        s = put(s, name, at(s, name)._replace(held=held - wrong))
        return [(DONE if whole and not wrong else REFUSED, s)]

    # ---- a copy at a second holder -------------------------------------------------------------

    def take_hold_anew(self, s: State, name: str, number: int, c: int) -> Answers:
        h = at(s, name)
        here = frozenset(i for i in h.held if (i.number, i.capsule) == (number, c))
        if self.p.kept_stays and any(image.kept for image in here):
            return [(REFUSED, s)]
        return [(DONE, put(s, name, h._replace(held=h.held - here | {Image(number, c)})))]

    def take_forward(self, s: State, name: str, number: int, c: int, second: str) -> Answers:
        """The image comes to the second holder as a whole, if that takes it still."""
        sent = [i for i in at(s, name).held if (i.number, i.capsule, i.kept) == (number, c, True)]
        there, empty = at(s, second), Image(number, c)
        if not sent or empty not in there.held or there.state is not UP:
            return [(REFUSED, s)]
        whole = sent[0]._replace(kept=False)
        ways = [(s, whole)]
        if s.faults.chunks:
            ways.append((spend(s, "chunks"), whole._replace(good=False)))
        held = there.held - {empty}
        return [(DONE, put(t, second, there._replace(held=held | {i}))) for t, i in ways]

    # ---- a rewind ------------------------------------------------------------------------------

    def take_end(
        self, s: State, name: str, rewinds: int, book: tuple[tuple[str, int], ...]
    ) -> Answers:
        """EndEarlier."""
        s = put(s, name, self.end_earlier(s, at(s, name), rewinds))
        s = self.learn(s, name, rewinds, book)
        busy = at(s, name).removing and self.p.answers_when_removed
        return [("removing" if busy else DONE, s)]

    def take_reserve(
        self,
        s: State,
        name: str,
        c: int,
        epoch: int,
        rewinds: int,
        book: tuple[tuple[str, int], ...],
    ) -> Answers:
        h = at(s, name)
        known_at, known = h.book[c]
        if h.copies[c] is not None or epoch < known or (epoch == known and known_at != name):
            return [(REFUSED, s)]
        if h.coming[c] is not None:  # it asks whether that one is over
            quiet = s._replace(faults=Faults())
            ended = [t for label, t in self.asks(quiet, name, h) if f"ends {c}" in label]
            if not ended:
                return [("arriving", s)]
            s = put_coming(s, name, c, None)
        s = self.learn(s, name, rewinds, book)
        return [(DONE, put_coming(s, name, c, Coming(True, rewinds, epoch)))]

    def take_bring(
        self, s: State, name: str, c: int, epoch: int, generation: int, holder: str
    ) -> Answers:
        """ForwardHeld and RestoreCapsule: the image comes, and a tree is restored up to where it
        would run."""
        h = at(s, name)
        copy, coming = h.copies[c], h.coming[c]
        if copy is not None:
            return [(DONE if copy.epoch == epoch else REFUSED, s)]
        if coming is None or coming.epoch != epoch or not coming.of_rewind:
            return [("nothing", s)]
        if coming.ready:
            return [(DONE, s)]
        if not coming.complete:
            images = at(s, holder).held
            if not any((i.number, i.capsule, i.complete) == (generation, c, True) for i in images):
                return [("gone", s)]
            coming = coming._replace(complete=True, generation=generation)
        answers = [(DONE, put_coming(s, name, c, coming._replace(ready=True)))]
        if s.faults.failures:
            answers.append(("failed", put_coming(spend(s, "failures"), name, c, None)))
        return answers

    def take_ruled(
        self, s: State, name: str, c: int, side: Side, epoch: int, new_epoch: int
    ) -> Answers:
        """The ruling RUN: the tree goes on, or the restored one runs."""
        h = at(s, name)
        copy, coming = h.copies[c], h.coming[c]
        if side is Side.LEAVING and copy is not None and copy.promised:
            s = put_copy(s, name, c, copy._replace(promised=False, epoch=new_epoch))
        elif side is Side.COMING and coming is not None and coming.ready and coming.epoch == epoch:
            runs = Copy(coming.rewinds, epoch, coming.generation)
            s = put_coming(put_copy(s, name, c, runs), name, c, None)
        return [(DONE, s)]
