"""Choices of one answer: requests that share a prompt, which is computed once.

Life of a group
    1. led        the first request under a group's name leads it: it waits and computes as any request does
    2. following  those that come before the leader's prompt is computed wait here, out of the queue, so that
                  neither they compute what is being computed nor anybody waits behind them
    3. computed   the followers go to the head of the queue. Each finds the whole pages of the prompt in the
                  prefix cache, gets a copy of the rest from a member that still has it (copy on write: every
                  member writes its first token beside the prompt's last), and computes the prompt's last
                  token to sample from
    4. apart      from here on members have nothing to do with each other; each ends on its own

A leader that ends early leaves the lead to the first follower. A group is forgotten with its last member.
Names belong to a client: two gateways may choose the same.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from tandem_engine.memory.request_kv import RequestKv
from tandem_engine.names import PageId
from tandem_engine.scheduler.request import Request, sends_kv


class GroupKey(NamedTuple):
    client: bytes
    name: str


class PageCopy(NamedTuple):
    """Copy all of one page onto another at the start of a step."""

    source: PageId
    target: PageId


@dataclass(kw_only=True, slots=True)
class Group:
    """Members in order of arrival. Every live one is in exactly one of the three places."""

    leader: Request | None
    """Computes the prompt; None once it is computed."""
    following: list[Request] = field(default_factory=list)
    apart: list[Request] = field(default_factory=list)

    @property
    def empty(self) -> bool:
        return self.leader is None and not self.following and not self.apart


@dataclass(kw_only=True, slots=True)
class Groups:
    """All groups of one scheduler."""

    _groups: dict[GroupKey, Group] = field(default_factory=dict)

    def follow(self, req: Request) -> bool:
        """Take in a request that is about to wait. True: it follows, and is kept here until its turn."""
        if not req.group:
            return False
        group = self._groups.get(_key(req))
        if group is None:
            self._groups[_key(req)] = Group(leader=req)
            return False
        if group.leader is None or not same_prompt(req, group.leader) or _is_late(req, group.leader):
            group.apart.append(req)
            return False
        group.following.append(req)
        group.following.sort(key=lambda member: member.arrived_at)
        return True

    def computed(self, req: Request) -> list[Request]:
        """The prompt of `req` is computed. Returns the followers that it kept waiting, in order."""
        group = self._groups.get(_key(req)) if req.group else None
        if group is None or group.leader is not req:
            return []
        ready, group.following = group.following, []
        group.leader = None
        group.apart += [req, *ready]
        return ready

    def gone(self, req: Request) -> Request | None:
        """`req` ended or left for good. Returns the follower that leads instead, which has to be queued now."""
        group = self._groups.get(_key(req)) if req.group else None
        if group is None:
            return None
        if group.leader is req:
            group.leader = group.following.pop(0) if group.following else None
            if group.leader is not None:
                return group.leader
        else:
            group.following = [member for member in group.following if member is not req]
            group.apart = [member for member in group.apart if member is not req]
        if group.empty:
            del self._groups[_key(req)]
        return None

    def donor(self, req: Request) -> RequestKv | None:
        """KV of another member in which the whole prompt of `req` is settled."""
        group = self._groups.get(_key(req)) if req.group else None
        for member in group.apart if group is not None else ():
            kv = member.kv
            if member is not req and kv is not None and kv.committed_len >= req.prompt_len and same_prompt(member, req):
                return kv
        return None

    def led(self) -> Iterator[tuple[Request, Sequence[Request]]]:
        """Leaders whose prompt is not computed, and who follows them."""
        for group in self._groups.values():
            if group.leader is not None and group.following:
                yield group.leader, group.following

    def following(self) -> Iterator[Request]:
        """Requests that wait for a leader."""
        for group in self._groups.values():
            yield from group.following


def same_prompt(one: Request, other: Request) -> bool:
    """Whether the KV of their prompts may be shared."""
    return one.cache_salt == other.cache_salt and one.origin_input_ids == other.origin_input_ids


def _is_late(req: Request, leader: Request) -> bool:
    """Whether `req`, for another worker, was held up elsewhere and came before `leader`: that worker expects it first,
    and may have no pages for a leader that holds its own until then (`kept_back`)."""
    return sends_kv(req) and req.arrived_at < leader.arrived_at


def _key(req: Request) -> GroupKey:
    return GroupKey(req.client, req.group)
