"""PeerNotes: what is said of faulty peers and to strangers, each once, in bounded memory."""

from __future__ import annotations

import logging
from collections import OrderedDict

from rollout.coordinator.core.bounded_ids import BoundedIds

logger = logging.getLogger(__name__)


class PeerNotes:
    """Of at most `max_peers` peers. A stranger is answered once in `answer_interval_s`."""

    def __init__(self, max_peers: int, answer_interval_s: float) -> None:
        self._max_peers, self._answer_interval_s = max_peers, answer_interval_s
        self._logged: BoundedIds[bytes] = BoundedIds(max_peers)
        self._answered_at: OrderedDict[bytes, float] = OrderedDict()

    def log_once(self, identity: bytes, what: str) -> None:
        """Log what a peer did, unless something was logged of it before."""
        if self._logged.add(identity):
            logger.warning("peer %s %s", identity.hex()[:32], what)

    def may_answer(self, identity: bytes, now: float) -> bool:
        """Whether the stranger was not answered of late."""
        last = self._answered_at.get(identity)
        if last is not None and now - last < self._answer_interval_s:
            return False
        self._answered_at[identity] = now
        self._answered_at.move_to_end(identity)
        if len(self._answered_at) > self._max_peers:
            self._answered_at.popitem(last=False)
        return True
